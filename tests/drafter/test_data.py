"""Batches against a reference written out by hand, and the properties of the plan."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from world import AUX, LAYERS, VOCAB, make, make_verifier

from eagle3dvc.drafter import model as drafter_model
from eagle3dvc.drafter import vocab
from eagle3dvc.drafter.data import Loader, Plan, assemble, model_inputs, pack, survey, target_mask, usable
from eagle3dvc.errors import UserError
from eagle3dvc.hidden_states.reader import HiddenStates
from eagle3dvc.verifier import Head

TTT = 3


def item(length: int, mask: list[int], seed: int) -> SimpleNamespace:
    g = torch.Generator().manual_seed(seed)
    return SimpleNamespace(
        hidden_states=torch.randn(length, 4, 8, generator=g),
        token_ids=torch.randint(3, VOCAB, (length,), generator=g),
        loss_mask=torch.tensor(mask, dtype=torch.bool),
    )


def test_rows_are_what_eagle3_says():
    """The drafter has just been given x_{r+1} and knows the states up to r; it must say x_{r+2}, as the verifier would at r+1."""
    a, b = item(7, [0, 0, 0, 1, 1, 0, 1], 1), item(5, [0, 0, 0, 0, 1], 2)
    host = assemble([a, b], ttt_steps=TTT, rows=16, dtype=torch.float32)
    got = model_inputs(host, layers=4)
    row = 0
    for number, x in enumerate((a, b)):
        length = len(x.token_ids)
        for r in range(length - 1):
            at = row + r
            assert torch.equal(got["hidden_states"][0, at], torch.cat([x.hidden_states[r, k] for k in range(3)]))
            assert torch.equal(got["verifier_last_hidden_states"][0, at], x.hidden_states[r + 1, 3])
            assert int(got["input_ids"][0, at]) == int(x.token_ids[r + 1])
            assert int(got["position_ids"][0, at]) == r + 1
            assert int(got["document_ids"][0, at]) == number
            learn = r + 2 < length and bool(x.loss_mask[r + 2]) and r >= TTT - 1
            assert bool(got["loss_mask"][0, at]) == learn, (number, r)
        assert int(got["document_ids"][0, row + length - 1]) == -1
        assert not got["loss_mask"][0, row + length - 1]
        row += length
    assert got["document_ids"][0, row:].eq(-1).all() and not got["loss_mask"][0, row:].any()
    assert got["hidden_states"][0, row:].eq(0).all()  # nothing uninitialised, which could be NaN, reaches the model


def test_target_mask_by_hand():
    mask = torch.tensor([0, 1, 1, 0, 1, 1, 1], dtype=torch.bool)
    assert target_mask(mask, 1).tolist() == [True, False, True, True, True, False, False]
    assert target_mask(mask, 3).tolist() == [False, False, True, True, True, False, False]


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    from world import params

    verifier, folder = make_verifier(), tmp_path_factory.mktemp("verifier")
    verifier.config.save_pretrained(folder)
    head = Head(verifier.model.embed_tokens.weight.data, verifier.lm_head.weight.data, verifier.model.norm.weight.data, 1e-5)
    info = SimpleNamespace(folder=folder, norm_eps=1e-5, name="tests/tiny")
    counts = np.arange(VOCAB)
    torch.manual_seed(0)
    config = drafter_model.draft_config(info, params(draft_vocab_size=64).train, [*AUX, LAYERS])
    drafter = drafter_model.instantiate(config, head, vocab.choose(counts, 64), "eager")
    return drafter.train(), head


def real_item(drafter, length: int, first: int, seed: int) -> SimpleNamespace:
    g = torch.Generator().manual_seed(seed)
    return SimpleNamespace(
        hidden_states=torch.randn(length, 4, drafter.hidden_size, generator=g),
        token_ids=torch.randint(3, VOCAB, (length,), generator=g),
        loss_mask=torch.arange(length) >= first,
    )


def loss_of(drafter, items, rows=None) -> tuple[float, int]:
    from speculators.losses import resolve_loss_config

    rows = rows or sum(len(i.token_ids) for i in items)
    host = assemble(items, ttt_steps=TTT, rows=rows, dtype=torch.float32)
    _, loss, _ = drafter(**model_inputs(host, 4), ttt_steps=TTT, loss_config=resolve_loss_config("kl_div", "eager"))
    return float(loss), int(host["loss_mask"].sum())


def test_loss_is_the_plain_definition(drafter):
    """KL from the verifier's distribution for x_{r+2+j} to the drafter's at step j, over the supervised rows, summed over j."""
    model, head = drafter
    x = real_item(model, 14, 5, 3)
    host = assemble([x], ttt_steps=TTT, rows=14, dtype=torch.float32)
    seen = []
    handle = model.lm_head.register_forward_hook(lambda m, a, out: seen.append(out.detach()[0]))
    got, count = loss_of(model, [x])
    handle.remove()
    target = head.logits(x.hidden_states[:, 3])[:, model.t2d].log_softmax(-1)  # at p: for x_{p+1}
    want = 0.0
    for j in range(TTT):
        draft = seen[j].log_softmax(-1)
        for r in range(14):
            aim = r + 2 + j  # the token that step j of row r drafts
            if aim < 14 and bool(x.loss_mask[aim]) and r + j >= TTT - 1:
                want += float((target[aim - 1].exp() * (target[aim - 1] - draft[r])).sum()) / count
    assert count == int(host["loss_mask"].sum()) == 14 - 5
    assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("first", [0, 1, 2, 5])
def test_packed_loss_is_the_weighted_mean_of_the_single_losses(drafter, first):
    """No row of a sample is compared with, or attends to, another sample, wherever its supervision begins."""
    model, _ = drafter
    items = [real_item(model, n, first, s) for s, n in enumerate((9, 14, 11))]
    single = [loss_of(model, [i]) for i in items]
    packed, count = loss_of(model, items, rows=40)
    assert count == sum(n for _, n in single)
    assert packed == pytest.approx(sum(v * n for v, n in single) / count, rel=1e-5)


def test_pack_fills_and_never_exceeds():
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, 900, 2000)
    batches = pack(lengths, 2048)
    assert sorted(np.concatenate(batches).tolist()) == list(range(2000))
    fill = [lengths[b].sum() for b in batches]
    assert max(fill) <= 2048 and sum(fill) / (2048 * len(batches)) > 0.97
    with pytest.raises(ValueError, match="exceeds"):
        pack(np.asarray([5, 3000]), 2048)


def plan(seed: int = 0) -> Plan:
    rng = np.random.default_rng(1)
    lengths = rng.integers(10, 60, 200)
    return Plan(np.arange(1000, 1200), lengths, lengths // 2, 128, seed)


def test_plan_is_reproducible_and_random_access():
    a, b = plan(), plan()
    n = 3 * len(a)
    assert [a.batch(i) for i in range(n)] == [b.batch(i) for i in range(n)]
    c = plan()
    order = np.random.default_rng(0).permutation(n)  # in any order, as after an interruption
    assert {int(i): c.batch(int(i)) for i in order} == {i: a.batch(i) for i in range(n)}
    assert [plan(1).batch(i) for i in range(5)] != [a.batch(i) for i in range(5)]
    first = [s for i in range(len(a)) for s in a.batch(i)]
    assert sorted(first) == list(range(1000, 1200))
    second = [a.batch(len(a) + i) for i in range(5)]
    assert second != [a.batch(i) for i in range(5)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make(tmp_path_factory.mktemp("world"), count=40, heldout=8, stored="bfloat16")


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_loader_does_not_depend_on_workers_or_processes(world, workers):
    data = HiddenStates(world.folders["hidden"], world.folders["prompts"])
    found = survey(world.folders["prompts"], VOCAB, TTT)
    train = usable(data, found, "train", 128)
    plan = Plan(train, data.lengths[train], found.targets[train], 128, 0)

    def take(count, **kw):
        loader = Loader(data, plan, device=torch.device("cpu"), dtype=torch.float32, ttt_steps=TTT, **kw)
        try:
            return [next(loader) for _ in range(count)]
        finally:
            loader.close()

    want = take(12)
    for mine, plain in zip(take(12, workers=workers), want, strict=True):
        assert mine.samples == plain.samples and mine.targets == plain.targets
        for k, v in plain.inputs.items():
            assert torch.equal(mine.inputs[k], v), k
    halves = [take(6, workers=workers, rank=r, world=2) for r in (0, 1)]
    assert [b.samples for pair in zip(*halves, strict=True) for b in pair] == [b.samples for b in want]
    assert [b.samples for b in take(4, workers=workers, start=8)] == [b.samples for b in want[8:]]
    assert all(b.targets == int(b.inputs["loss_mask"].sum()) for b in want)


def test_batches_hold_the_stored_bits(world):
    data = HiddenStates(world.folders["hidden"], world.folders["prompts"])
    host = assemble([data[0], data[1]], ttt_steps=TTT, rows=64, dtype=torch.bfloat16)
    a = len(data[0].token_ids)
    assert host["states"].dtype == torch.bfloat16
    assert torch.equal(host["states"][:a], data[0].hidden_states.reshape(a, -1))
    assert torch.equal(
        host["states"][a : a + len(data[1].token_ids)], data[1].hidden_states.reshape(len(data[1].token_ids), -1)
    )


def test_a_sample_longer_than_a_batch_is_an_error(world):
    data = HiddenStates(world.folders["hidden"], world.folders["prompts"])
    found = survey(world.folders["prompts"], VOCAB, TTT)
    with pytest.raises(UserError, match=r"more than train.tokens_per_batch = 20: raise"):
        usable(data, found, "train", 20)


def test_tokens_of_another_verifier_are_an_error(world):
    with pytest.raises(UserError, match="made for another verifier"):
        survey(world.folders["prompts"], 20, TTT)


# the draft vocabulary


def test_vocabulary_is_the_most_frequent_with_deterministic_ties():
    counts = np.zeros(50, dtype=np.int64)
    counts[[7, 3, 30, 12]] = [5, 9, 5, 1]
    chosen = vocab.choose(counts, 3)
    assert chosen.ids.tolist() == [3, 7, 30] and torch.where(chosen.t2d)[0].tolist() == [3, 7, 30]
    assert vocab.choose(counts, 2).ids.tolist() == [3, 7]  # 7 and 30 tie: the lower id
    assert vocab.choose(counts, 3, required=[49]).ids.tolist() == [3, 7, 49]
    assert vocab.choose(counts, 6).ids.tolist() == [0, 1, 3, 7, 12, 30]  # filled up from below
    assert chosen.coverage(counts) == pytest.approx(19 / 20)
    whole = vocab.choose(counts, 50)
    assert not whole.pruned and whole.ids.tolist() == list(range(50))


def test_vocabulary_errors():
    counts = np.ones(50, dtype=np.int64)
    with pytest.raises(UserError, match="train.draft_vocab_size = 51 is larger than the verifier's vocabulary of 50"):
        vocab.choose(counts, 51)
    with pytest.raises(UserError, match="smaller than the 3 end and special tokens"):
        vocab.choose(counts, 2, required=[1, 2, 3])
    good = vocab.choose(counts, 10)
    with pytest.raises(UserError, match="do not describe the same"):
        vocab.check(good.d2t + 1, good.t2d, "here")


def test_end_and_used_special_tokens_are_required(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    (tmp_path / "tokenizer.json").write_text(
        '{"added_tokens": [{"id": 5, "special": true}, {"id": 6, "special": true}, {"id": 7, "special": false}]}'
    )
    counts = np.zeros(20, dtype=np.int64)
    counts[[5, 7]] = 1
    assert vocab.required_ids(tmp_path, counts) == [2, 5, 9]
