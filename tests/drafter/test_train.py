"""The train stage: results, interruptions, errors, warm starts. Everything on the tiny world, with really computed states."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from world import AUX, HIDDEN, VOCAB, World, make, params, write_data

from eagle3dvc import stage
from eagle3dvc.drafter import acceptance, checkpoints, model, train, trainer
from eagle3dvc.errors import UserError
from eagle3dvc.hidden_states.reader import HiddenStates
from eagle3dvc.verifier import load_head

REPOSITORY = Path(__file__).parents[2]
SHORT = {"max_steps": 12, "checkpoint_every": 4, "eval_every": 3}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return make(tmp_path_factory.mktemp("world"))


@pytest.fixture
def work(tmp_path, monkeypatch):
    """An empty repository of its own for each test."""
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def build(world: World, out: str = "drafter", log=None, **settings):
    return train.build(params(**settings), out=out, curves=f"{out}-curves", log=log, **world.folders)


def files(folder: str | Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(Path(folder).rglob("*")) if f.is_file()}


@pytest.fixture(scope="module")
def undisturbed(world, tmp_path_factory):
    """A run without interruption: (metrics, bytes of every output file)."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DVC_ROOT", str(folder))
        patch.chdir(folder)
        metrics = build(world, **SHORT)
        return metrics, files(folder / "drafter"), files(folder / "drafter-curves")


def test_outputs_and_metrics(world, work):
    log: dict = {}
    metrics = build(world, log=log, epochs=10)
    assert metrics["steps"] == 10 * max(1, round(len(plan_of(world)) / 1))
    out = work / "drafter"
    config = json.loads((out / "best/config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == AUX and "auto_map" not in config
    assert config["speculators_config"]["verifier"]["name_or_path"] == "tests/tiny"
    assert config["transformer_layer_config"]["layer_types"] == ["full_attention"]
    for part in ("best", "last"):
        tensors = load_file(out / part / "model.safetensors")
        assert all(v.dtype == torch.float32 for v in tensors.values() if v.is_floating_point())
        assert "embed_tokens.weight" not in tensors and tensors["lm_head.weight"].shape == (64, HIDDEN)
    map_ = load_file(out / "vocab.safetensors")
    assert torch.equal(map_["d2t"], load_file(out / "best/model.safetensors")["d2t"])
    # the metric is the walk of the written best checkpoint, and no later evaluation was better
    drafter = model.load(out / "best", world.folders["verifier"])
    data = HiddenStates(world.folders["hidden"], world.folders["prompts"])
    items = [data[int(i)] for i in data.splits["heldout"]]
    again = acceptance.walk(drafter, load_head(world.folders["verifier"]), items, 3, on_policy=True)
    assert metrics["acceptance_length"] == again.acceptance_length
    record = json.loads((out / "training.json").read_text())
    curve = [(r["heldout"]["acceptance_length"], r["step"]) for r in record["history"] if "heldout" in r]
    assert max(curve, key=lambda c: (c[0], -c[1])) == (metrics["acceptance_length"], metrics["best_step"])
    assert curve[0][1] == 0 and curve[0][0] < 1.3 < metrics["acceptance_length"]
    losses = [r["train"]["loss"] for r in record["history"] if "train" in r]
    assert losses[-1] < losses[0] / 2
    assert log["steps_per_second"] > 0 and 0 <= log["data_wait_fraction"] < 1 and log["peak_memory_bytes"] > 0
    curves = {f.stem for f in (work / "drafter-curves").rglob("*.tsv")}
    assert {"loss", "acceptance_length", "acceptance_at_1", "acceptance_at_3", "AdamW"} <= curves
    assert not [c for c in curves if "second" in c or "wait" in c or "memory" in c]


def plan_of(world: World):
    from eagle3dvc.drafter.data import Plan, survey, usable

    data = HiddenStates(world.folders["hidden"], world.folders["prompts"])
    found = survey(world.folders["prompts"], VOCAB, 3)
    t = usable(data, found, "train", 128)
    return Plan(t, data.lengths[t], found.targets[t], 128, 0)


def test_same_inputs_same_bytes(world, work, undisturbed):
    metrics = build(world, **SHORT, num_workers=2)  # whoever assembles the batches
    assert metrics == undisturbed[0] and metrics["steps"] == 12
    assert files("drafter") == undisturbed[1] and files("drafter-curves") == undisturbed[2]


@pytest.mark.parametrize("where", [1, 3, 4, 6, 9, 11])
def test_killed_at_any_step_ends_the_same(world, work, undisturbed, monkeypatch, where):
    """The process dies in step `where`, between gradient and update, and again a little later; the third run ends bitwise equal."""

    class Killed(BaseException):
        pass

    real = trainer.DrafterTrainer._optimizers_step

    def dying(limit):
        def step(self):
            if self.global_step >= limit:
                raise Killed
            real(self)

        return step

    for limit in (where, min(where + 3, 11)):
        monkeypatch.setattr(trainer.DrafterTrainer, "_optimizers_step", dying(limit))
        with pytest.raises(Killed):
            build(world, **SHORT)
        assert not Path("drafter").exists()
    monkeypatch.setattr(trainer.DrafterTrainer, "_optimizers_step", real)
    log: dict = {}
    assert build(world, log=log, **SHORT) == undisturbed[0]
    assert log["steps_computed"] == 12 - min(where + 3, 11) // 4 * 4
    assert files("drafter") == undisturbed[1] and files("drafter-curves") == undisturbed[2]


def project(world: World, work: Path, **settings) -> dict:
    """A project folder in which `python -m stages.train` runs, and its environment."""
    shutil.copytree(world.root / "data", work / "data")
    record = params(**settings).model_dump(mode="json")
    (work / "params.yaml").write_text(yaml.safe_dump(record))
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def start(env: dict, work: Path) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "stages.train"], env=env, cwd=work, stderr=subprocess.PIPE, text=True)


def wait_for_step(work: Path, process: subprocess.Popen, step: int) -> None:
    folder = work / ".dvc/tmp/eagle3dvc/train"
    while process.poll() is None:
        if [p for p in folder.glob("*/step-*") if int(p.name[5:]) >= step]:
            return
        time.sleep(0.01)
    raise AssertionError(f"ended before step {step}: {process.stderr.read()}")


@pytest.mark.slow
def test_signals_to_the_real_stage(world, work):
    """SIGKILL, then SIGTERM, then to the end: SIGTERM saves where it is and exits with 143; the result is an undisturbed run's."""
    settings = {"max_steps": 120, "checkpoint_every": 10, "eval_every": 60}
    env = project(world, work, **settings)
    first = start(env, work)
    wait_for_step(work, first, 20)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    second = start(env, work)
    wait_for_step(work, second, 40)
    second.send_signal(signal.SIGTERM)
    _, error = second.communicate()
    assert second.returncode == 143 and "ended by signal SIGTERM" in error
    assert not (work / "models").exists() and not (work / "metrics/train.json").exists()
    assert "continuing from step" not in error
    third = start(env, work)
    _, error = third.communicate()
    assert third.returncode == 0, error
    log = json.loads((work / "logs/train.json").read_text())
    assert log["steps_computed"] < 80
    got, curves = files(work / "models/drafter"), files(work / "metrics/train_curves")
    shutil.rmtree(work / ".dvc")
    whole = start(env, work)
    _, error = whole.communicate()
    assert whole.returncode == 0, error
    assert files(work / "models/drafter") == got and files(work / "metrics/train_curves") == curves


def test_signal_saves_between_two_steps(world, work, undisturbed, monkeypatch):
    """The checkpoint of a signal is of the step the signal came in, though none was due."""
    real = trainer.DrafterTrainer.train_step

    def step(self, loader):
        if self.global_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        real(self, loader)

    monkeypatch.setattr(trainer.DrafterTrainer, "train_step", step)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(stage.Interrupted) as e:
        build(world, **SHORT)
    assert e.value.signum == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is before
    assert [p.name for p in Path(".dvc").rglob("step-*")].count("step-00000006") == 1
    monkeypatch.setattr(trainer.DrafterTrainer, "train_step", real)
    log: dict = {}
    assert build(world, log=log, **SHORT) == undisturbed[0] and log["steps_computed"] == 6
    assert files("drafter") == undisturbed[1] and files("drafter-curves") == undisturbed[2]


@pytest.mark.parametrize("damage", ["no marker", "truncated", "half written", "no best"])
def test_only_complete_checkpoints_count(world, work, undisturbed, monkeypatch, damage):
    real = trainer.DrafterTrainer.train_step

    def step(self, loader):
        if self.global_step == 9:
            raise KeyboardInterrupt
        real(self, loader)

    monkeypatch.setattr(trainer.DrafterTrainer, "train_step", step)
    with pytest.raises(KeyboardInterrupt):
        build(world, **SHORT)
    monkeypatch.setattr(trainer.DrafterTrainer, "train_step", real)
    newest = max(Path(".dvc").rglob("step-*"))
    assert newest.name == "step-00000008"
    if damage == "no marker":
        (newest / checkpoints.MARKER).unlink()
    elif damage == "truncated":
        os.truncate(newest / "optimizer.pt", 100)
    elif damage == "half written":
        newest.rename(newest.with_name(f".{newest.name}.1.tmp"))
    else:
        best = json.loads((newest / "state.json").read_text())["best_step"]
        shutil.rmtree(newest.parent / f"best-{best:08d}")
    log: dict = {}
    assert build(world, log=log, **SHORT) == undisturbed[0]
    assert log["steps_computed"] in ((8, 12) if damage == "no best" else (8,))  # step 4 may name the same best weights
    assert files("drafter") == undisturbed[1]
    assert not list(Path(".dvc").rglob("*.tmp"))


def test_finished_runs_of_other_settings_are_removed(world, work):
    build(world, max_steps=2)
    build(world, max_steps=3)
    assert len(list(Path(".dvc/tmp/eagle3dvc/train").iterdir())) == 1


def test_accumulation_is_one_large_batch(world, work):
    """Two micro-batches a step give the gradient of their samples taken together, weighted by targets: the loss says so."""
    build(world, max_steps=3, gradient_accumulation_steps=2, tokens_per_batch=64, draft_vocab_size=VOCAB, scheduler="none")
    record = json.loads(Path("drafter/training.json").read_text())
    losses = [r["train"]["loss"] for r in record["history"] if "train" in r]
    got = load_file("drafter/last/model.safetensors")
    # the reference: both micro-batches in one packed batch, plain AdamW
    from eagle3dvc.drafter.data import Plan, assemble, model_inputs, survey, usable
    from eagle3dvc.drafter.vocab import choose
    from eagle3dvc.verifier import load_info

    data, found = HiddenStates(world.folders["hidden"], world.folders["prompts"]), survey(world.folders["prompts"], VOCAB, 3)
    t = usable(data, found, "train", 64)
    plan = Plan(t, data.lengths[t], found.targets[t], 64, 0)
    torch.manual_seed(0)
    config = model.draft_config(load_info(world.folders["verifier"]), params(draft_vocab_size=VOCAB).train, data.layer_ids)
    head = load_head(world.folders["verifier"])
    drafter = model.instantiate(config, head, choose(found.counts["train"], VOCAB), "sdpa").train()
    drafter.lm_head.weight.requires_grad_(True)
    trained = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 3e-3, weight_decay=0.0)
    from speculators.losses import resolve_loss_config

    for step in range(3):
        items = [data[i] for n in (2 * step, 2 * step + 1) for i in plan.batch(n)]
        rows = sum(len(i.token_ids) for i in items)
        inputs = model_inputs(assemble(items, ttt_steps=3, rows=rows, dtype=torch.float32), 4)
        _, loss, _ = drafter(**inputs, ttt_steps=3, loss_config=resolve_loss_config("kl_div", "eager"))
        assert losses[step] == pytest.approx(float(loss.detach()), rel=1e-4)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for name, p in drafter.named_parameters():
        if p.requires_grad:
            assert torch.allclose(got[name], p, rtol=1e-3, atol=2e-5), name


@pytest.mark.slow
def test_two_processes_take_the_same_steps_as_one(world, work, monkeypatch):
    """gloo on two CPU processes, the same global batch: the same losses and weights up to the order of a sum."""
    settings = {"max_steps": 6, "gradient_accumulation_steps": 2, "tokens_per_batch": 64, "eval_every": 3}
    one = build(world, out="one", **settings)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shutil.rmtree(".dvc")
    paths = {"out": str(work / "two"), "curves": str(work / "two-curves"), **world.folders}
    log: dict = {}
    two = train.torchrun(params(**settings), paths, 2, log)
    assert log["processes"] == 2 and two["steps"] == one["steps"] == 6
    assert two["acceptance_length"] == pytest.approx(one["acceptance_length"], abs=0.05)
    a, b = load_file("one/last/model.safetensors"), load_file("two/last/model.safetensors")
    for name in a:
        assert torch.allclose(a[name].float(), b[name].float(), rtol=1e-3, atol=1e-5), name
    h = [json.loads((work / n / "training.json").read_text())["history"] for n in ("one", "two")]
    for x, y in zip(*h, strict=True):
        if "train" in x:
            assert y["train"]["loss"] == pytest.approx(x["train"]["loss"], rel=1e-4)
    with pytest.raises(UserError, match="train.loss = 'nonsense'"):  # rank 0's sentence reaches the stage
        train.torchrun(params(**settings, loss="nonsense"), paths, 2, {})


def test_early_stop_and_muon(world, work):
    metrics = build(
        world, max_steps=40, eval_every=1, early_stop_patience=2, learning_rate=1e-9, optimizer="muon", muon_learning_rate=1e-9
    )
    assert metrics["steps"] == 2 and metrics["best_step"] == 0
    record = json.loads(Path("drafter/training.json").read_text())
    assert {"Muon", "AdamW"} == set(next(r for r in record["history"] if "train" in r)["lr"])


# warm starts


def test_warm_start_keeps_vocabulary_and_weights(world, work):
    first = build(world, out="first", epochs=8)
    warm = build(world, out="second", max_steps=2, warm_start="first", learning_rate=1e-8, draft_vocab_size=64)
    start = json.loads(Path("second/training.json").read_text())["history"][0]["heldout"]
    assert start["acceptance_length"] == first["acceptance_length"] == warm["acceptance_length"]
    a, b = load_file("first/best/model.safetensors"), load_file("second/best/model.safetensors")
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_warm_start_trains_float32_from_a_bfloat16_checkpoint(world, work):
    build(world, out="first", max_steps=4)
    tensors = load_file("first/best/model.safetensors")
    save_file({k: v.bfloat16() if v.is_floating_point() else v for k, v in tensors.items()}, "first/best/model.safetensors")
    build(world, out="second", max_steps=1, warm_start="first/best", learning_rate=2e-5, warmup_fraction=0.0)
    before, after = load_file("first/best/model.safetensors"), load_file("second/last/model.safetensors")
    moved = (before["fc.weight"].float() != after["fc.weight"]).float().mean()
    assert moved > 0.99  # in bfloat16 most of such a small update would be lost


def test_warm_start_from_a_git_revision(world, work):
    def run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, cwd=work)

    dvc = (sys.executable, "-m", "dvc")
    run("git", "init", "-q")
    run("git", "config", "user.email", "a@b.c")
    run("git", "config", "user.name", "a")
    run(*dvc, "init", "-q")
    build(world, out="models/drafter", max_steps=2)
    run(*dvc, "add", "-q", "models/drafter")
    run("git", "add", "-A")
    run("git", "commit", "-qm", "a drafter")
    want = load_file("models/drafter/best/model.safetensors")
    shutil.rmtree("models/drafter")
    build(world, out="second", max_steps=1, warm_start="HEAD", learning_rate=1e-12)
    got = load_file("second/last/model.safetensors")
    assert all(torch.allclose(want[k].float(), got[k].float()) for k in want)
    with pytest.raises(UserError, match="neither a folder nor a git revision"):
        build(world, warm_start="no-such-thing")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_vocab_size": 60}, "set train.draft_vocab_size to 64"),
        ({"norms": "speculators"}, "has norm_before_residual = False, this run has True"),
        ({"draft_intermediate_size": 80}, "set the train.draft_\\* parameters to its shape"),
        ({"draft_layers": 2}, "lacks layers.1"),
        ({"draft_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}}, "has rope_parameters"),
    ],
)
def test_warm_start_of_another_architecture_is_an_error(world, work, trained, settings, message):
    with pytest.raises(UserError, match=message):
        build(world, warm_start=str(trained.drafter), **settings)
    assert not Path("drafter").exists()


# errors


def copy_of(world: World, work: Path) -> World:
    shutil.copytree(world.root / "data", work / "data")
    return World(world.verifier, work)


def test_states_of_another_verifier_or_other_layers(world, work):
    other = copy_of(world, work)
    record = json.loads((work / "data/verifier/verifier.json").read_text())
    (work / "data/verifier/verifier.json").write_text(json.dumps(record | {"identity": "local:other"}))
    with pytest.raises(UserError, match="holds states of verifier local:tiny, .* is local:other: run `dvc repro`"):
        build(other)
    (work / "data/verifier/verifier.json").write_text(json.dumps(record))
    changed = params().model_copy(update={"extract": params().extract.model_copy(update={"aux_layer_ids": [1, 2, 5]})})
    with pytest.raises(UserError, match=r"states of layers \[1, 3, 5, 6\], the parameters ask for \[1, 2, 5, 6\]"):
        train.build(changed, out="drafter", curves="curves", **other.folders)


def test_empty_splits(world, work):
    other = copy_of(world, work)
    for name in ("prompts", "hidden_states"):
        shutil.rmtree(work / "data" / name)
    texts = [np.arange(3, 23, dtype=np.int32)] * 4
    write_data(world.verifier, work / "data", texts, [np.arange(20) >= 6] * 4, ["train"] * 4)
    with pytest.raises(UserError, match="the validation split has no sample.*raise prepare.heldout_fraction"):
        build(other)


def test_draft_vocabulary_larger_than_the_verifiers(world, work):
    with pytest.raises(UserError, match=f"train.draft_vocab_size = 97 is larger than the verifier's vocabulary of {VOCAB}"):
        build(world, draft_vocab_size=97)


def test_loss_that_is_not_finite_stops_at_that_step(world, work, monkeypatch):
    """The samples are named, the weights before are kept in the checkpoint, nothing is written to the outputs."""
    data = HiddenStates(world.folders["hidden"], world.folders["prompts"])
    bad = int(data.splits["train"][7])
    real = HiddenStates.__getitem__

    def item(self, i):
        x = real(self, i)
        if i == bad:
            x = type(x)(**{**x.__dict__, "hidden_states": torch.full_like(x.hidden_states, torch.nan)})
        return x

    monkeypatch.setattr(HiddenStates, "__getitem__", item)
    with pytest.raises(UserError, match="the loss is nan at step") as e:
        build(world, max_steps=20, checkpoint_every=1)
    assert real(data, bad).sample_id in str(e.value)
    step = int(str(e.value).split("at step ")[1].split(",")[0])
    plan = plan_of(world)
    assert bad in plan.batch(step - 1) and all(bad not in plan.batch(n) for n in range(step - 1))
    assert not Path("drafter").exists()
    if step > 1:
        kept = max(Path(".dvc").rglob("step-*"))
        assert kept.name == f"step-{step - 1:08d}" and checkpoints.complete(kept)
        assert all(torch.isfinite(v).all() for v in load_file(kept / "model.safetensors").values())


def test_out_of_device_memory_names_the_settings(world, work, monkeypatch):
    def step(self):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trainer.DrafterTrainer, "_optimizers_step", step)
    with pytest.raises(UserError, match=r"lower train.tokens_per_batch \(now 128\), .*train.gradient_checkpointing"):
        build(world)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpus": 3}, "train.gpus = 3, but this machine has"),
        ({"loss": "nonsense"}, "train.loss = 'nonsense'"),
        ({"draft_config": {"hiden_act": 1}}, "train.draft_config.hiden_act is not a setting.*did you mean hidden_act"),
        ({"draft_config": {"model_type": "gpt2"}}, "must be llama or qwen3"),
        ({"draft_config": {"hidden_size": 64}}, "must equal the verifier's 32"),
        ({"draft_config": {"rms_norm_eps": 1e-3}}, "must stay the verifier's"),
        ({"draft_heads": 4, "draft_kv_heads": 3}, "not a multiple"),
        ({"draft_head_dim": 7}, "is odd"),
        ({"tokens_per_batch": 16}, "raise train.tokens_per_batch to at least"),
        ({"attention": "flex_attention"}, "needs a GPU"),
    ],
)
def test_settings_that_cannot_be(world, work, settings, message):
    with pytest.raises(UserError, match=message):
        build(world, **settings)
    assert not Path("drafter").exists()


def test_damaged_checkpoints_are_refused(trained, tmp_path):
    folder = tmp_path / "best"
    shutil.copytree(trained.drafter / "best", folder)
    verifier = trained.world.folders["verifier"]
    tensors = load_file(folder / "model.safetensors")

    def expect(message: str, changed: dict[str, torch.Tensor]) -> None:
        save_file({k: v.contiguous() for k, v in changed.items()}, folder / "model.safetensors")
        with pytest.raises(UserError, match=message):
            model.load(folder, verifier)

    expect("lacks lm_head.weight", {k: v for k, v in tensors.items() if k != "lm_head.weight"})
    expect("no d2t", {k: v for k, v in tensors.items() if k != "d2t"})
    expect("do not describe the same", tensors | {"d2t": tensors["d2t"].flip(0)})
    expect("not finite", tensors | {"fc.weight": torch.full_like(tensors["fc.weight"], torch.nan)})
    expect("has unexpected input_norm.weight", tensors | {"input_norm.weight": torch.ones(3 * HIDDEN)})
    os.truncate(folder / "model.safetensors", 500)
    with pytest.raises(UserError, match="truncated"):
        model.load(folder, verifier)
