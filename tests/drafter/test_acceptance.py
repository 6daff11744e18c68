"""The walk against a slow reference that really drafts, one token at a time, as an engine does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from world import AUX, LAYERS, VOCAB, answers, make_verifier, states

from eagle3dvc.drafter import model as drafter_model
from eagle3dvc.drafter import vocab
from eagle3dvc.drafter.acceptance import accepted_lengths, bootstrap, count, merge, visit, walk
from eagle3dvc.errors import UserError
from eagle3dvc.hidden_states.reader import Item
from eagle3dvc.verifier import Head

DEPTH = 3


@pytest.fixture(scope="module")
def verifier():
    return make_verifier()


@pytest.fixture(scope="module")
def head(verifier) -> Head:
    return Head(verifier.model.embed_tokens.weight.data, verifier.lm_head.weight.data, verifier.model.norm.weight.data, 1e-5)


def item(verifier, tokens: np.ndarray, mask: np.ndarray, source: str = "a") -> Item:
    return Item(
        hidden_states=states(verifier, tokens, [*AUX, LAYERS]),
        token_ids=torch.from_numpy(tokens.astype(np.int64)),
        loss_mask=torch.from_numpy(mask),
        sample_id="0" * 32,
        source=source,
        split="heldout",
    )


def make_drafter(head, tmp_path, verifier, size: int, layers: int = 1, norms: str = "portable", attention: str = "sdpa"):
    """A drafter that is right now and then: its layer is small next to the fused state, whose first part is the last layer's."""
    from types import SimpleNamespace

    from world import params

    verifier.config.save_pretrained(tmp_path)
    info = SimpleNamespace(folder=tmp_path, norm_eps=1e-5, name="tests/tiny")
    train = params(draft_vocab_size=size, draft_layers=layers, norms=norms).train
    counts = np.zeros(VOCAB, dtype=np.int64)
    counts[:size] = 1
    torch.manual_seed(3)
    config = drafter_model.draft_config(info, train, [*AUX, LAYERS])
    drafter = drafter_model.instantiate(config, head, vocab.choose(counts, size), attention).eval()
    with torch.no_grad():
        drafter.fc.weight.mul_(0.1)
        width = drafter.hidden_size
        drafter.fc.weight[:, -width:] += torch.eye(width)
        drafter.norm.weight.copy_(head.norm)
    return drafter


@torch.no_grad()
def train_a_little(drafter, items, steps: int = 60):
    """So that chains of every length occur."""
    from speculators.losses import resolve_loss_config

    from eagle3dvc.drafter.data import assemble, model_inputs

    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], 5e-3)
    host = assemble(items, ttt_steps=DEPTH, rows=sum(len(i.token_ids) for i in items), dtype=torch.float32)
    inputs, loss_config = model_inputs(host, 4), resolve_loss_config("kl_div", "eager")
    with torch.enable_grad():
        for _ in range(steps):
            _, loss, _ = drafter.train()(**inputs, ttt_steps=DEPTH, loss_config=loss_config)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return drafter.eval()


class ChainDrafter:
    """EAGLE-3 chain drafting written out: its own keys and values, its own hidden state fed back, no packing, no masks."""

    def __init__(self, drafter):
        self.d = drafter

    def _norm(self, norm, x):
        return norm.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)

    def _rope(self, x, position: int):
        half = x.shape[-1] // 2
        theta = self.d.config.transformer_layer_config.rope_parameters["rope_theta"]
        angle = position / theta ** (torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def _layer(self, index: int, embedded, hidden, position: int, cache: list):
        layer, config = self.d.layers[index], self.d.config.transformer_layer_config
        width, heads, groups = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        residual = hidden
        if index == 0:
            normed = self._norm(layer.hidden_norm, hidden)
            residual = normed if self.d.config.norm_before_residual else hidden
            x = torch.cat([self._norm(layer.input_layernorm, embedded), normed])
        else:
            x = self._norm(layer.input_layernorm, hidden)
        attn = layer.self_attn
        q = self._rope((attn.q_proj.weight @ x).view(heads, width), position)
        k = self._rope((attn.k_proj.weight @ x).view(groups, width), position)
        cache.append((k, (attn.v_proj.weight @ x).view(groups, width)))
        keys, values = (torch.stack(c).repeat_interleave(heads // groups, 1) for c in zip(*cache, strict=True))
        weights = torch.softmax(torch.einsum("hd,thd->ht", q, keys) / width**0.5, -1)
        x = residual + attn.o_proj.weight @ torch.einsum("ht,thd->hd", weights, values).reshape(-1)
        y = self._norm(layer.post_attention_layernorm, x)
        mlp = layer.mlp
        return x + mlp.down_proj.weight @ (torch.nn.functional.silu(mlp.gate_proj.weight @ y) * (mlp.up_proj.weight @ y))

    def _step(self, token: int, hidden, position: int, caches: list[list]):
        for index in range(len(self.d.layers)):
            hidden = self._layer(index, self.d.embed_tokens.weight[token], hidden, position, caches[index])
        normed = self._norm(self.d.norm, hidden)
        draft = int((self.d.lm_head.weight @ normed).argmax())
        token = draft + int(self.d.d2t[draft]) if self.d.use_draft_vocab else draft
        return token, normed if self.d.config.norm_output else hidden

    @torch.no_grad()
    def draft(self, tokens: list[int], aux: torch.Tensor, depth: int) -> list[int]:
        """Drafts after the text tokens x_0..x_{i+1}, given the auxiliary states g_0..g_i [i+1, aux * H]."""
        caches: list[list] = [[] for _ in self.d.layers]
        if self.d.input_norm is not None:
            aux = self._norm(self.d.input_norm, aux)
        for position, (token, state) in enumerate(zip(tokens[1:], aux, strict=True)):
            token, hidden = self._step(token, self.d.fc.weight @ state, position, caches)
        drafts = [token]
        while len(drafts) < depth:
            token, hidden = self._step(token, hidden, len(tokens) - 2 + len(drafts), caches)
            drafts.append(token)
        return drafts


@torch.no_grad()
def reference(verifier, drafter, prompt: list[int], answer: int, depth: int) -> tuple[int, list[int]]:
    """(drafts, accepted by position) of real speculative decoding of `answer` tokens; the verifier checks every draft."""
    chain, text = ChainDrafter(drafter), list(prompt)
    end = len(prompt) + answer

    def greedy(tokens):
        return verifier(torch.tensor([tokens])).logits[0].argmax(-1).tolist()

    text.append(greedy(text)[-1])
    drafts, accepted = 0, [0] * depth
    while len(text) < end:
        aux = states(verifier, np.asarray(text[:-1]), AUX).flatten(1)
        guess = chain.draft(text, aux, depth)
        choice = greedy(text + guess)[len(text) - 1 :]
        n = 0
        while n < depth and guess[n] == choice[n] and len(text) + n < end:
            accepted[n] += 1
            n += 1
        drafts += 1
        text += [*guess[:n], choice[n]]
    return drafts, accepted


@pytest.mark.parametrize(
    ("size", "layers", "norms"), [(VOCAB, 1, "portable"), (60, 1, "portable"), (60, 2, "speculators"), (60, 1, "speculators")]
)
def test_walk_counts_what_real_drafting_counts(verifier, head, tmp_path, size, layers, norms):
    texts = answers(verifier, 5, 5, 20, seed=2)
    mask = np.arange(texts.shape[1]) >= 5
    items = [item(verifier, t, mask) for t in texts]
    drafter = train_a_little(make_drafter(head, tmp_path, verifier, size, layers, norms), items)
    want = [reference(verifier, drafter, t[:5].tolist(), 20, DEPTH) for t in texts]
    got = walk(drafter, head, items, DEPTH, on_policy=True)
    assert got.drafts == sum(d for d, _ in want)
    assert got.by_position == [sum(a[j] for _, a in want) for j in range(DEPTH)]
    assert sorted(map(tuple, got.per_sample.tolist())) == sorted((d, sum(a)) for d, a in want)
    assert 1.3 < got.acceptance_length < 4 and len(set(got.by_position)) == DEPTH  # chains of every length were compared
    assert got.greedy_agreement == 1.0
    assert walk(drafter, head, items, DEPTH, on_policy=False) == _ignoring_arrays(got)


class _ignoring_arrays:
    """Equality of two walks apart from the order of their samples."""

    def __init__(self, a):
        self.a = a

    def __eq__(self, b):
        keys = ("drafts", "accepted", "by_position", "by_source", "supervised", "agreed")
        return all(getattr(self.a, k) == getattr(b, k) for k in keys)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packing_changes_nothing(verifier, head, tmp_path, attention):
    texts = answers(verifier, 9, 4, 20, seed=5)
    items = [item(verifier, t[: 12 + i], np.arange(12 + i) >= 4, source=f"s{i % 2}") for i, t in enumerate(texts)]
    drafter = make_drafter(head, tmp_path, verifier, 70, attention=attention)
    together = walk(drafter, head, items, DEPTH, on_policy=True, rows=512)
    alone = walk(drafter, head, items, DEPTH, on_policy=True, rows=1)
    assert together == _ignoring_arrays(alone)
    assert set(together.by_source) == {"s0", "s1"}
    parts = [count(drafter, head, items[:4], DEPTH, True), count(drafter, head, items[4:], DEPTH, True)]
    assert merge(parts) == _ignoring_arrays(together)


def test_untrained_drafter_accepts_almost_nothing(verifier, head, tmp_path):
    from types import SimpleNamespace

    from world import params

    verifier.config.save_pretrained(tmp_path)
    info = SimpleNamespace(folder=tmp_path, norm_eps=1e-5, name="tests/tiny")
    torch.manual_seed(0)
    config = drafter_model.draft_config(info, params(draft_vocab_size=VOCAB).train, [*AUX, LAYERS])
    drafter = drafter_model.instantiate(config, head, vocab.choose(np.ones(VOCAB, dtype=np.int64), VOCAB), "sdpa").eval()
    texts = answers(verifier, 20, 5, 24, seed=7)
    items = [item(verifier, t, np.arange(len(t)) >= 5) for t in texts]
    assert walk(drafter, head, items, DEPTH, on_policy=True).acceptance_length < 1.3


def test_tokens_outside_the_draft_vocabulary_are_wrong(verifier, head, tmp_path):
    """A drafter that is always right, but for tokens it cannot name."""

    class Oracle(torch.nn.Module):
        def __init__(self, answer, ids):
            super().__init__()
            self.embed_tokens, self.fc = torch.nn.Embedding(1, 1), torch.nn.Linear(1, 1)
            self.answer, self.use_draft_vocab = answer, True
            self.d2t = ids - torch.arange(len(ids))
            self.of = {int(t): n for n, t in enumerate(ids)}

        def forward(self, ttt_steps, **_):
            n = len(self.answer)
            text = [*self.answer[2:], 0, 0, 0, 0, 0]
            return [torch.tensor([[self.of.get(int(text[i + j]), 0) for i in range(n)]]) for j in range(ttt_steps)]

    text = answers(verifier, 1, 4, 16, seed=11)[0]
    known = torch.tensor(sorted({*range(0, VOCAB, 2), *(int(t) for t in text[:12])}))
    got = walk(Oracle(text, known), head, [item(verifier, text, np.arange(20) >= 4)], DEPTH, on_policy=True)
    chains, reached, i = 0, [0] * DEPTH, 3
    while i + 1 < 19:
        n = 0
        while n < DEPTH and i + 2 + n < 20 and int(text[i + 2 + n]) in known.tolist():
            reached[n] += 1
            n += 1
        chains, i = chains + 1, i + n + 1
    assert (got.drafts, got.by_position) == (chains, reached)
    assert set(text[12:].tolist()) - set(known.tolist()), "the text must leave the draft vocabulary"


def test_foreign_text_is_judged_by_the_verifier():
    """Off policy a draft counts when it is the verifier's choice, and the chain ends where that is not the text."""
    tokens = torch.tensor([9, 1, 2, 3, 4, 5, 6])
    mask = torch.tensor([False, True, True, True, True, True, True])
    greedy = torch.tensor([1, 2, 7, 4, 5, 6, 0])  # at token 2 the verifier would go on with 7, the text says 3
    drafts = torch.zeros(3, 7, dtype=torch.long)
    drafts[:, 0] = torch.tensor([2, 7, 4])  # right, right where the text leaves, unverifiable
    drafts[:, 1] = torch.tensor([3, 4, 5])  # the text's token, which the verifier rejects
    drafts[:, 2] = torch.tensor([4, 5, 6])
    assert accepted_lengths(drafts, tokens, mask, greedy)[:3].tolist() == [2, 0, 3]
    assert accepted_lengths(drafts, tokens, mask, None)[:3].tolist() == [1, 3, 3]


def test_visits_follow_accepted_runs_and_answers():
    mask = np.array([0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1], dtype=bool)
    counts = np.array([0, 2, 3, 3, 0, 1, 0, 0, 0, 1, 0, 0, 0])
    # from 1: 2 accepted -> 4: 0 -> 5: 1 -> 7, the end; from 9: 1 accepted -> 11, the end
    chains, reached = visit(counts, mask, 3)
    assert (chains, reached.tolist()) == (4, [3, 1, 0])
    chains, reached = visit(counts, mask, 3, tail=2)
    assert (chains, reached.tolist()) == (1, [1, 1, 0])


def test_nothing_to_measure_is_an_error(verifier, head, tmp_path):
    text = answers(verifier, 1, 4, 4, seed=1)[0]
    drafter = make_drafter(head, tmp_path, verifier, 70)
    with pytest.raises(UserError, match="prepare.heldout_fraction"):
        walk(drafter, head, [item(verifier, text, np.arange(8) >= 7)], DEPTH, on_policy=True)


def test_interval_covers_and_shrinks():
    rng = np.random.default_rng(0)
    drafts = np.full(400, 10)
    per_sample = np.stack([drafts, rng.binomial(10, 0.6, 400)], 1)
    low, high = bootstrap(per_sample, 500, 0.95, 0)
    few_low, few_high = bootstrap(per_sample[:20], 500, 0.95, 0)
    assert low < 1.6 < high and high - low < few_high - few_low
    assert bootstrap(per_sample, 500, 0.95, 0) == (low, high)
