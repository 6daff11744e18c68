"""Every hole of guards.HOLES: first the installed library is shown to have it, then the guard is shown to close it.

Where a first half fails, the library has changed: read the entry, and drop the guard.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import warnings
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from world import AUX, HIDDEN, LAYERS, VOCAB, make_verifier, params

from eagle3dvc.drafter import check, guards, model, trainer, vocab
from eagle3dvc.drafter.acceptance import walk
from eagle3dvc.drafter.data import target_mask
from eagle3dvc.errors import UserError
from eagle3dvc.verifier import Head, load_head

CPU_ONLY = pytest.mark.skipif(torch.accelerator.is_available(), reason="the hole is one of machines without an accelerator")


def test_the_tested_version_is_installed(monkeypatch):
    guards.check_version()
    monkeypatch.setattr(guards, "TESTED", "0.8.0")
    with pytest.raises(UserError, match="install speculators==0.8.0"):
        guards.check_version()


def test_every_hole_names_itself():
    assert len({h.name for h in guards.HOLES}) == len(guards.HOLES)
    assert all(h.library and h.guard and h.goes_when and "0.9.0" in h.versions for h in guards.HOLES)


def library_config(**kw):
    from speculators.train.trainer import TrainerConfig

    return TrainerConfig(lr=1e-3, num_epochs=3, save_path=kw.pop("save_path", "unused"), **kw)


@pytest.fixture
def drafter(tmp_path):
    verifier = make_verifier()
    verifier.config.save_pretrained(tmp_path / "verifier")
    head = Head(verifier.model.embed_tokens.weight.data, verifier.lm_head.weight.data, verifier.model.norm.weight.data, 1e-5)
    info = SimpleNamespace(folder=tmp_path / "verifier", norm_eps=1e-5, name="tests/tiny")
    torch.manual_seed(0)
    config = model.draft_config(info, params().train, [*AUX, LAYERS])
    counts = torch.arange(VOCAB).numpy()
    return model.instantiate(config, head, vocab.choose(counts, 64), "eager")


def batch(length: int = 12, value: float = 0.1) -> dict:
    return {
        "hidden_states": torch.full((1, length, 3 * HIDDEN), value),
        "verifier_last_hidden_states": torch.full((1, length, HIDDEN), value),
        "input_ids": torch.full((1, length), 5),
        "document_ids": torch.zeros(1, length, dtype=torch.long),
        "loss_mask": torch.ones(1, length, dtype=torch.bool),
        "position_ids": torch.arange(1, length + 1)[None],
        "error_records": 0,
    }


@pytest.fixture
def library_trainer(drafter, tmp_path, monkeypatch):
    """The library's own Trainer with the least that lets it run on a CPU: make(batches, **config)."""
    from speculators.losses import resolve_loss_config
    from speculators.train.trainer import Trainer

    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *a: None)

    class OnCPU(Trainer):
        def setup_trainer(self):
            super().setup_trainer()
            self.local_rank, self.device_type = "cpu", "cpu"

    class Batches(list):
        batch_sampler = None

        def __iter__(self):  # the loop changes a batch in place
            return iter([dict(b) for b in list.__iter__(self)])

    def make(batches, **kw):
        call = {"ttt_steps": 3, "loss_config": resolve_loss_config("kl_div", "eager")}
        kw = {"save_path": str(tmp_path / "library"), "hidden_states_dtype": torch.float32, "scheduler_type": "none"} | kw
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return OnCPU(drafter, library_config(train_call_kwargs=call, **kw), Batches(batches))

    return make


@CPU_ONLY
def test_device(drafter, tmp_path):
    from speculators.train.trainer import Trainer

    class Seen(Exception):
        pass

    class Stop(Trainer):
        def setup_trainer(self):
            raise Seen(self.device_type)

    with pytest.raises(Seen, match="cuda"):
        Stop(drafter, library_config(save_path=str(tmp_path)), [])
    assert "self.device.type" in inspect.getsource(trainer.DrafterTrainer.setup_trainer)


@CPU_ONLY
def test_process_group(monkeypatch):
    from speculators.train import distributed

    for name, value in {
        "LOCAL_RANK": "0",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "_is_distributed", False)  # the library sets it before it fails
    with pytest.raises((ValueError, RuntimeError)):
        distributed.maybe_setup_distributed()
    with guards.process_group() as (rank, world):
        assert (rank, world) == (0, 1) and distributed.is_distributed()
    assert not distributed.is_distributed() and not torch.distributed.is_initialized()


def test_signals(library_trainer):
    """The library swallows SIGTERM and returns; test_train shows ours saving and ending with 143."""
    import signal

    t = library_trainer([batch()] * 4)
    real = t._optimizers_step

    def step():
        real()
        os.kill(os.getpid(), signal.SIGTERM)

    t._optimizers_step = step
    t.run_training()  # returns: a pipeline would go on
    assert t.global_step < 12


def test_checkpoints(library_trainer, tmp_path):
    """bfloat16 moments, and a folder of nothing but a number counts as the newest; test_train shows ours."""
    from speculators.train.checkpointer import SingleGPUCheckpointer

    t = library_trainer([batch()] * 2)
    t.train_epoch(0)
    t.checkpointer.save_checkpoint(t.model, t.optimizers, 0)
    state = torch.load(tmp_path / "library/0/optimizer_state_dict.pt")["state"]
    assert {v["exp_avg"].dtype for v in state.values()} == {torch.bfloat16}
    (tmp_path / "library/7").mkdir()
    assert SingleGPUCheckpointer(tmp_path / "library").previous_epoch == 7


def test_max_steps(library_trainer):
    t = library_trainer([batch()] * 4, max_steps=2)
    t.run_training()
    assert t.global_step > 2


def test_clipping(library_trainer, monkeypatch):
    from speculators.train.trainer import TrainerConfig

    norms = []
    real = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda p, n, *a: norms.append(n) or real(p, n, *a))
    library_trainer([batch()]).train_epoch(0)
    assert norms == [1.0]
    assert not {"max_grad_norm", "gradient_accumulation_steps"} & set(TrainerConfig._fields)


def test_not_finite(library_trainer):
    t = library_trainer([batch(value=float("nan")), batch()])
    t.train_epoch(0)
    assert t.global_step == 2 and t.model.fc.weight.isnan().any()


def test_documents(drafter):
    """Without the mask, the loss of two packed samples is not that of the two; test_data shows that with it, it is."""
    from speculators.losses import resolve_loss_config

    def loss(first: int, length: int, seed: int, masked: int = 0, packed=()):
        parts = packed or [(length, seed)]
        made = []
        for n, s in parts:
            g = torch.Generator().manual_seed(s)
            mask = torch.arange(n) >= first
            mask[:masked] = False
            made.append(
                {
                    "hidden_states": torch.randn(n, 3 * HIDDEN, generator=g),
                    "verifier_last_hidden_states": torch.randn(n, HIDDEN, generator=g),
                    "input_ids": torch.randint(3, VOCAB, (n,), generator=g),
                    "loss_mask": mask,
                    "position_ids": torch.arange(1, n + 1),
                }
            )
        inputs = {k: torch.cat([m[k] for m in made])[None] for k in made[0]}
        inputs["document_ids"] = torch.cat([torch.full((n,), i) for i, (n, _) in enumerate(parts)])[None]
        _, value, metrics = drafter(**inputs, ttt_steps=3, loss_config=resolve_loss_config("kl_div", "eager"))
        steps = [float(metrics[f"loss_{j}_sum"]) * int(inputs["loss_mask"][:, j:].sum()) for j in range(3)]
        return sum(steps)

    for masked, same in ((0, False), (2, True)):
        alone = loss(0, 9, 1, masked) + loss(0, 11, 2, masked)
        together = loss(0, 0, 0, masked, packed=[(9, 1), (11, 2)])
        assert (together == pytest.approx(alone, rel=1e-4)) is same


def test_mask_shift():
    """The row whose target predicts the first answer token is not learnt by the library, the row that predicts past the end is."""
    from speculators.models.eagle3.data import shift_batch

    mask = torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.bool)
    rows = {k: torch.zeros(6, 1) for k in ("hidden_states", "verifier_last_hidden_states")}
    library = shift_batch(
        {**rows, "input_ids": torch.arange(6), "loss_mask": mask, "lengths": torch.tensor([6]), "position_ids": torch.arange(6)}
    )["loss_mask"]
    assert library.tolist() == [False, False, True, True, True]  # row r stands on x_{r+1}, its target predicts x_{r+2}
    assert target_mask(mask, 1)[:5].tolist() == [False, True, True, True, False]


def test_lost_samples(tmp_path):
    """A cached sample with other tokens is skipped with a warning; the reader raises (tests/hidden_states)."""
    from datasets import Dataset
    from speculators.train.data import ArrowDataset
    from speculators.train.recovery import SampleUnavailable

    data = Dataset.from_dict({"input_ids": [[1, 2, 3]], "loss_mask": [[1, 1, 1]], "seq_len": [3]})
    data.set_format("torch")
    data.save_to_disk(tmp_path / "data")
    transfer = SimpleNamespace(
        get_cached=lambda i: {"hidden_states": torch.zeros(3, 4, 8), "token_ids": torch.tensor([1, 2, 4])}
    )
    with warnings.catch_warnings(record=True):
        got = ArrowDataset(8, tmp_path / "data", transfer=transfer, on_missing="raise")[0]
    assert isinstance(got, SampleUnavailable)


def test_verifier_weights(drafter, tmp_path):
    """Without lm_head and norm the library takes the embedding and some layer's norm; ours refuses the verifier folder."""
    verifier = make_verifier()
    verifier.save_pretrained(tmp_path / "verifier")
    tensors = load_file(tmp_path / "verifier/model.safetensors")
    kept = {k: v for k, v in tensors.items() if k not in ("lm_head.weight", "model.norm.weight")}
    kept = {k: torch.full_like(v, 3.0) if k.endswith("layernorm.weight") else v for k, v in kept.items()}
    save_file(kept, tmp_path / "verifier/model.safetensors", metadata={"format": "pt"})
    drafter.config.speculators_config.verifier.name_or_path = str(tmp_path / "verifier")
    drafter.load_verifier_weights()
    assert drafter.verifier_norm.weight.eq(3.0).all()
    assert torch.equal(drafter.verifier_lm_head.weight, kept["model.embed_tokens.weight"][drafter.t2d])
    (tmp_path / "verifier/verifier.json").write_text(
        json.dumps(
            {
                "format": 1, "source": "local", "name": "t", "revision": None, "identity": "local:t", "model_type": "llama",
                "num_layers": LAYERS, "hidden_size": HIDDEN, "vocab_size": VOCAB, "norm_eps": 1e-5, "tied_embeddings": False,
                "dtype": "float32", "default_aux_layer_ids": None,
            }
        )
    )  # fmt: skip
    with pytest.raises(UserError):
        load_head(tmp_path / "verifier")


def test_scaled_norm_is_refused(drafter):
    """A verifier whose norm multiplies by 1 + w: the drafter's targets would be another distribution."""

    class Scaled(Head):
        def logits(self, h):
            h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.norm)
            return h @ self.lm_head.T

    scaled = Scaled(drafter.embed_tokens.weight.data, torch.randn(VOCAB, HIDDEN), drafter.verifier_norm.weight.data, 1e-5)
    choice = vocab.choose(torch.arange(VOCAB).numpy(), 64)
    with pytest.raises(UserError, match="scaled norm or capped logits"):
        model.instantiate(drafter.config, scaled, choice, "eager")


def test_sliding_window(tmp_path):
    from speculators.train.config import schema

    fields = {n: f for c in vars(schema).values() if hasattr(c, "model_fields") for n, f in c.model_fields.items()}
    assert fields["sliding_window"].default == 2048 and fields["full_attention_indices"].default_factory() == []
    make_verifier().config.save_pretrained(tmp_path)
    ours = model.layer_config(tmp_path, params(draft_layers=2).train, norm_eps=1e-5, aux_layers=3)
    assert ours.layer_types == ["full_attention"] * 2
    asked = model.layer_config(tmp_path, params(sliding_window=64).train, norm_eps=1e-5, aux_layers=3)
    assert asked.layer_types == ["sliding_attention"] and asked.sliding_window == 64


def test_frozen_head(drafter, tmp_path):
    """The library freezes lm_head whenever it loads the verifier; train.train_lm_head decides here (true by default)."""
    make_verifier().save_pretrained(tmp_path / "verifier")
    drafter.config.speculators_config.verifier.name_or_path = str(tmp_path / "verifier")
    drafter.lm_head.weight.requires_grad_(True)
    drafter.load_verifier_weights()
    assert not drafter.lm_head.weight.requires_grad
    assert params().train.train_lm_head


def test_warm_start(drafter, tmp_path):
    """from_pretrained keeps a bfloat16 checkpoint's dtype; ours is float32 whatever the file holds (test_train: updates survive)."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    make_verifier().save_pretrained(tmp_path / "verifier")
    model.save(drafter, tmp_path / "drafter")
    tensors = load_file(tmp_path / "drafter/model.safetensors")
    half = {k: v.bfloat16() if v.is_floating_point() else v for k, v in tensors.items()}
    save_file(half, tmp_path / "drafter/model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "drafter/config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(tmp_path / "verifier")
    (tmp_path / "drafter/config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    loaded = Eagle3SpeculatorConfig.from_pretrained(tmp_path / "drafter")
    loaded.transformer_layer_config._attn_implementation = "eager"
    theirs = Eagle3DraftModel.from_pretrained(tmp_path / "drafter", config=loaded)
    assert theirs.fc.weight.dtype == torch.bfloat16
    with torch.no_grad():
        model.put_weights(drafter, half, "here")
    assert drafter.fc.weight.dtype == torch.float32


def test_draft_vocabulary():
    """The library's command builds no map where the counts are missing."""
    from speculators.train import cli

    source = inspect.getsource(cli)
    assert "token_freq" in source
    counts = torch.zeros(VOCAB, dtype=torch.long).numpy()
    assert vocab.choose(counts, 64).size == 64  # without a single count the size is still what was asked for


def test_acceptance(drafter):
    """Targets outside the draft vocabulary: the library compares with the best of the rest and calls it right."""
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.metrics import compute_metrics

    logits = torch.zeros(1, 4, 64)
    logits[..., 3] = 1.0
    targets = logits.clone()  # the verifier's logits, of which only the draft vocabulary's are given
    loss = resolve_loss_config("kl_div", "eager")
    _, found = compute_metrics(logits, targets, torch.ones(1, 4, dtype=torch.bool), None, 0, 1.0, loss)
    assert float(found["full_acc_0_sum"]) == 4.0  # whatever the verifier's real choice outside the map was


@pytest.mark.parametrize(
    ("device", "compiled", "name"), [("cpu", False, "eager"), ("cuda", True, "eager"), ("cuda", False, "fused")]
)
def test_loss_implementation(device, compiled, name):
    assert guards.loss_implementation(torch.device(device), compiled) == name


class Calls(TorchDispatchMode):
    """Names of the operators called."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


def test_accuracy(drafter, monkeypatch):
    """A selection by mask has a size that the CPU must wait for; the same counts need none."""
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import metrics
    from speculators.models.metrics import compute_accuracy_single_step

    rng = torch.Generator().manual_seed(1)
    for masked in (True, False):
        for continued in (True, False):
            pred, target = (torch.randint(0, 3, (1, 40), generator=rng) for _ in range(2))
            mask = torch.randint(0, 2, (1, 40), generator=rng) if masked else None
            left = [torch.randint(0, 2, (1, 40), generator=rng).bool()] * 2 if continued else [None, None]
            left = [x if x is None else x.clone() for x in left]
            library = compute_accuracy_single_step(pred, target, mask, left[0])
            ours = guards.counted_accuracy(pred, target, mask, left[1])
            assert [float(x) for x in ours] == [float(x) for x in library] and all(x.dtype == torch.float for x in ours)
            assert not continued or torch.equal(*left)
    inputs = batch() | {"loss_mask": torch.tensor([[0, 1] * 6])}
    call = {"ttt_steps": 3, "loss_config": resolve_loss_config("kl_div", "eager")}
    monkeypatch.setattr(metrics, "compute_accuracy_single_step", compute_accuracy_single_step)
    found = {}
    for kind in ("library", "ours"):
        if kind == "ours":
            guards.no_waiting()
        with Calls() as calls:
            found[kind] = drafter(**inputs, **call)
        assert any("masked_select" in n for n in calls.names) == (kind == "library")
    assert found["ours"][1] == found["library"][1]
    assert {k: float(v) for k, v in found["ours"][2].items()} == {k: float(v) for k, v in found["library"][2].items()}


def test_compiled_everywhere(drafter, monkeypatch):
    """On a GPU machine the forward is compiled; tensors on its CPU then meet a code generator that may fail."""
    from speculators.models.utils import conditional_torch_compile

    def fails(graph, inputs):
        raise RuntimeError("this C++ does not build")

    forward = inspect.unwrap(type(drafter).forward)
    with monkeypatch.context() as there_is_a_gpu:
        there_is_a_gpu.setattr(torch.cuda, "is_available", lambda: True)
        compiled = conditional_torch_compile(forward, backend=fails)
    monkeypatch.setattr(type(drafter), "forward", compiled)
    window = check.Window(torch.randn(12, 3, HIDDEN), torch.arange(1, 12 + check.STEPS))
    with pytest.raises(Exception, match="does not build"):
        drafter(**batch(), ttt_steps=2)
    logits = check.trained_logits(drafter, window)
    assert [tuple(x.shape) for x in logits] == [(12, 64)] * check.STEPS
    sample = SimpleNamespace(
        hidden_states=torch.randn(12, 4, HIDDEN),
        token_ids=torch.arange(12),
        loss_mask=torch.ones(12, dtype=torch.bool),
        source="a",
    )
    head = Head(torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN), torch.ones(HIDDEN), 1e-5)
    assert walk(drafter.eval(), head, [sample], 3, True).drafts > 0


def test_gradient_checkpointing(drafter):
    """Refused by the library; whole layers computed again would see a cache that already holds their keys."""
    from speculators.losses import resolve_loss_config

    assert not drafter.supports_gradient_checkpointing
    call = {"ttt_steps": 3, "loss_config": resolve_loss_config("kl_div", "eager")}
    grads = {}
    for kind in ("plain", "blocks"):
        drafter.zero_grad()
        if kind == "blocks":
            model.checkpoint_gradients(drafter)
        drafter(**batch(), **call)[1].backward()
        grads[kind] = drafter.layers[0].mlp.up_proj.weight.grad.clone()
    assert torch.allclose(grads["plain"], grads["blocks"], atol=1e-7) and grads["plain"].abs().max() > 0
    for layer in drafter.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    with pytest.raises(RuntimeError):
        drafter(**batch(), **call)[1].backward()
