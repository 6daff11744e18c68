"""The train stage: results, interruptions, errors, warm starts. Everything on the tiny world, with really computed states."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from world import AUX, HIDDEN, VOCAB, World, make, params, write_data

from eagle3dvc import stage
from eagle3dvc.drafter import acceptance, check, checkpoints, model, train, trainer
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


def plan_of(world: World, capacity: int = 128):
    from eagle3dvc.drafter.data import Plan, survey, usable

    data = HiddenStates(world.folders["hidden"], world.folders["prompts"])
    found = survey(world.folders["prompts"], VOCAB, 3)
    t = usable(data, found, "train", capacity)
    return Plan(t, data.lengths[t], found.targets[t], capacity, 0)


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


def test_other_code_does_not_continue_what_this_code_computed(world, work, monkeypatch, capsys):
    """A corrected loss must not be answered with the checkpoint of the wrong one."""
    runs, ours = Path(".dvc/tmp/eagle3dvc/train"), train.CODE_HASH
    logs: list[dict] = [{} for _ in range(4)]
    build(world, log=logs[0], max_steps=4)
    monkeypatch.setattr(train, "CODE_HASH", "other")
    build(world, log=logs[1], max_steps=4)
    assert logs[0]["steps_computed"] == logs[1]["steps_computed"] == 4
    assert "note" not in capsys.readouterr().err
    assert len(list(runs.iterdir())) == 1  # the other one had ended

    def interrupted(step: int) -> None:
        with pytest.raises(stage.Interrupted), monkeypatch.context() as ended:
            ended.setattr(trainer.DrafterTrainer, "_stop_if_asked", interrupt_after(step))
            build(world, max_steps=8)

    interrupted(2)
    monkeypatch.setattr(train, "CODE_HASH", ours)
    interrupted(3)
    said = capsys.readouterr().err
    assert said.count("unfinished run with the same data and settings at step 2, by other code of training") == 1
    (gone := runs / "gone").mkdir()
    (gone / train.OF).symlink_to("removed")  # another run removes its folder at this moment
    build(world, log=logs[2], max_steps=8)
    assert logs[2]["steps_computed"] == 5 and "note" not in capsys.readouterr().err  # its own is continued
    monkeypatch.setattr(train, "CODE_HASH", "third")
    unmarked = next(p for p in runs.iterdir() if (p / "step-00000002").exists())
    digest = (unmarked / train.OF).read_text()
    (unmarked / train.OF).unlink()
    unmarked.rename(runs / digest)  # as earlier versions named it
    build(world, log=logs[3], max_steps=8)
    assert logs[3]["steps_computed"] == 8 and f"{digest} has an unfinished run" in capsys.readouterr().err


def interrupt_after(step: int):
    """_stop_if_asked of a trainer that is signalled in this step."""
    real = trainer.DrafterTrainer._stop_if_asked

    def stop(self, saved):
        if self.global_step == step:
            self._signal = signal.SIGTERM
        real(self, saved)

    return stop


def test_code_is_what_python_executes(tmp_path):
    file = tmp_path / "a.py"

    def of(text: str) -> str:
        file.write_text(text)
        return train.code([file])

    one = of('"""What."""\n\ndef f(x):\n    """How."""\n    return x + 1  # why\n')
    assert one == of("def f(x):\n\n\n    return (x + 1)\n") != of("def f(x):\n    return x + 2\n")
    deps = yaml.safe_load((REPOSITORY / "dvc.yaml").read_text())["stages"]["train"]["deps"]
    assert {str(f.relative_to(REPOSITORY)) for f in train.CODE} == {d for d in deps if d.startswith("eagle3dvc/")}


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


@pytest.fixture(scope="module")
def one_process(world, tmp_path_factory):
    """The run that two processes must repeat: clipping changes every step, micro-batches differ in targets."""
    folder = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DVC_ROOT", str(folder))
        patch.chdir(folder)
        build(world, out="one", **TWO)
    return folder / "one"


TWO = {"max_steps": 6, "gradient_accumulation_steps": 2, "tokens_per_batch": 64, "eval_every": 3, "max_grad_norm": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True])
def test_two_processes_take_the_same_steps_as_one(world, work, one_process, monkeypatch, fsdp):
    """gloo on two CPU processes, the same global batch: the same losses, gradients and weights up to the order of a sum."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    paths = {"out": str(work / "two"), "curves": str(work / "two-curves"), **world.folders}
    log: dict = {}
    two = train.torchrun(params(**TWO, fsdp=fsdp), paths, 2, log)
    one = json.loads((one_process / "training.json").read_text())
    assert log["processes"] == 2 and two["steps"] == one["metrics"]["steps"] == 6
    assert two["acceptance_length"] == pytest.approx(one["metrics"]["acceptance_length"], abs=0.05)
    a, b = load_file(one_process / "last/model.safetensors"), load_file("two/last/model.safetensors")
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.allclose(a[name].float(), b[name].float(), rtol=1e-3, atol=1e-5), name
    rows = [
        [r["train"] for r in h["history"] if "train" in r] for h in (one, json.loads(Path("two/training.json").read_text()))
    ]
    for x, y in zip(*rows, strict=True):
        assert y["loss"] == pytest.approx(x["loss"], rel=1e-4)
        assert y["grad_norm"] == pytest.approx(x["grad_norm"], rel=1e-3) and x["grad_norm"] > 0.1  # AdamW hides a factor
    if fsdp:  # one process has nothing to shard: its checkpoints are others
        build(world, out="again", **TWO, fsdp=True)
        c = load_file("again/last/model.safetensors")
        assert all(torch.allclose(a[name].float(), c[name].float(), rtol=1e-3, atol=1e-5) for name in a)
    else:
        with pytest.raises(UserError, match="train.loss = 'nonsense'"):  # rank 0's sentence reaches the stage
            train.torchrun(params(**TWO, loss="nonsense"), paths, 2, {})


@pytest.mark.slow
def test_two_processes_share_muons_work(world, work, monkeypatch):
    """Each orthogonalizes some of the matrices; all matrices are stepped in both, as one process does."""
    muon = {**TWO, "optimizer": "muon", "learning_rate": 0.02, "muon_learning_rate": 0.02, "draft_intermediate_size": 96}
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    build(world, out="one", **muon)
    train.torchrun(params(**muon), {"out": str(work / "two"), "curves": str(work / "two-curves"), **world.folders}, 2, {})
    a, b = load_file("one/last/model.safetensors"), load_file("two/last/model.safetensors")
    for name in a:
        assert torch.allclose(a[name].float(), b[name].float(), rtol=1e-3, atol=1e-4), name


@pytest.mark.slow
def test_the_process_at_fault_is_heard(world, work, monkeypatch):
    """Two processes: a bad sample of the second one is named, and so is the error of the one that fails first."""
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}:{work}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # Python imports sitecustomize at its start: the second process sees NaN in the first sample of its first micro-batch
    (work / "sitecustomize.py").write_text(
        "import dataclasses, os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    from eagle3dvc.hidden_states.reader import HiddenStates\n"
        "    real = HiddenStates.__getitem__\n"
        "    def item(self, i):\n"
        "        x = real(self, i)\n"
        "        bad = x.sample_id == os.environ['BAD']\n"
        "        return dataclasses.replace(x, hidden_states=x.hidden_states * float('nan')) if bad else x\n"
        "    HiddenStates.__getitem__ = item\n"
    )
    data = HiddenStates(world.folders["hidden"], world.folders["prompts"])
    settings = TWO | {"eval_every": 6}
    batches = plan_of(world, 64)
    others, mine = ([data[i].sample_id for i in batches.batch(n)] for n in (0, 1))
    monkeypatch.setenv("BAD", mine[0])
    paths = {"out": str(work / "two"), "curves": str(work / "two-curves"), **world.folders}
    with pytest.raises(UserError, match="the loss is nan at step 1, ") as e:
        train.torchrun(params(**settings), paths, 2, {})
    assert all(name in str(e.value) for name in mine) and not any(name in str(e.value) for name in others)


def test_gradient_checkpointing_computes_again_and_gives_the_same(world, work, monkeypatch):
    passes: list[int] = []
    real = model.instantiate

    def counted(*args):
        drafter = real(*args)
        forward = drafter.layers[0].mlp.forward

        def count(x):
            passes.extend([1] if drafter.training else [])
            return forward(x)

        drafter.layers[0].mlp.forward = count
        return drafter

    monkeypatch.setattr(model, "instantiate", counted)
    found = {}
    for on in (False, True):
        passes.clear()
        build(world, out=f"run-{on}", max_steps=3, gradient_checkpointing=on)
        found[on] = len(passes)
        shutil.rmtree(".dvc")
    assert found == {False: 3 * 3, True: 2 * 3 * 3}  # three steps of three TTT steps, each once more in the backward pass
    a, b = (load_file(f"run-{on}/last/model.safetensors") for on in (False, True))
    assert all(torch.allclose(a[k].float(), b[k].float(), atol=1e-6) for k in a)


def test_tensorboard_gets_the_curves(world, work):
    build(world, max_steps=4, eval_every=2, loggers=["tensorboard"])
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = next(Path("logs/train").rglob("events.out.tfevents.*")).parent
    found = EventAccumulator(str(folder))
    found.Reload()
    rows = json.loads(Path("drafter/training.json").read_text())["history"]
    assert [e.step for e in found.Scalars("train/loss")] == [1, 2, 3, 4]
    assert [e.value for e in found.Scalars("train/loss")] == pytest.approx([r["train"]["loss"] for r in rows if "train" in r])
    assert [e.step for e in found.Scalars("heldout/acceptance_length")] == [0, 2, 4]
    assert found.Scalars("profile/tokens")
    assert not Path("drafter-curves").exists()  # dvclive was not asked for


def test_a_logger_that_is_not_installed(world, work, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UserError, match=r"train.loggers names mlflow, which is not installed: run `pip install mlflow`"):
        build(world, loggers=["dvclive", "mlflow"])
    assert not Path("drafter").exists()


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


def published(trained, folder: Path, layout: str, own_embedding: bool = False) -> Path:
    """A drafter as others publish it: bfloat16, with a copy of the verifier's embedding; in EAGLE's layout the config names
    neither layer ids nor verifier, and the map has an offset a draft id."""
    shutil.copytree(trained.export / layout, folder)
    for name in ("README.md", check.PROVENANCE, check.PROBE):
        (folder / name).unlink()
    tensors = load_file(folder / "model.safetensors")
    embed = trained.world.verifier.model.embed_tokens.weight.detach().bfloat16()
    tensors["embed_tokens.weight"] = embed * 2 if own_embedding else embed
    save_file(tensors, folder / "model.safetensors")
    if layout == "sglang":
        config = json.loads((folder / "config.json").read_text())
        del config["eagle3dvc"], config["eagle_config"]
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("layout", ["speculators", "sglang"])
def test_warm_start_from_a_published_drafter(world, work, trained, layout):
    """Equal weights in float32, its vocabulary map, and the schedule of a run that begins."""
    folder = published(trained, work / "published", layout)
    settings = {"max_steps": 8, "eval_every": 8, "learning_rate": 1e-9}
    metrics = build(world, warm_start=str(folder), **settings)
    assert metrics["best_step"] == 0  # the weights before the first step
    wanted = {k.replace("midlayer.", "layers.0."): v for k, v in load_file(folder / "model.safetensors").items()}
    got = load_file("drafter/best/model.safetensors")
    assert got.keys() == wanted.keys() - {"embed_tokens.weight"}
    assert all(torch.equal(v, wanted[k].float() if v.is_floating_point() else wanted[k]) for k, v in got.items())
    assert all(v.dtype == torch.float32 for v in got.values() if v.is_floating_point())
    map_ = load_file("drafter/vocab.safetensors")
    assert torch.equal(map_["d2t"], wanted["d2t"]) and torch.equal(map_["t2d"], wanted["t2d"])
    build(world, out="cold", **settings)
    rates = [
        [r["lr"]["AdamW"] for r in json.loads(Path(n, "training.json").read_text())["history"] if "lr" in r]
        for n in ("drafter", "cold")
    ]
    assert rates[0] == rates[1] and len(rates[0]) == 8


@pytest.mark.parametrize("layout", ["speculators", "sglang"])
def test_an_embedding_of_the_drafters_own(world, work, trained, layout):
    """Training shares the verifier's embedding, so a drafter with another one cannot be continued; a walk must use it."""
    folder = published(trained, work / "published", layout, own_embedding=True)
    with pytest.raises(UserError, match="has an embedding of its own.*shares the verifier's"):
        build(world, warm_start=str(folder))
    assert not Path("drafter").exists()
    if layout == "speculators":
        loaded = model.load(folder, world.folders["verifier"])
        assert torch.equal(loaded.embed_tokens.weight, load_file(folder / "model.safetensors")["embed_tokens.weight"].float())


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
    run("git", "update-ref", "refs/exps/ab/cdef/fast", "HEAD")  # an experiment's name, as `dvc exp run -n fast` keeps it
    shutil.rmtree(".dvc/tmp/eagle3dvc/train-warm")
    build(world, out="third", max_steps=1, warm_start="fast", learning_rate=1e-12)
    assert files("third/last") == files("second/last")
    with pytest.raises(UserError, match="neither a folder nor a git revision or experiment"):
        build(world, warm_start="no-such-thing")
    shutil.rmtree(".dvc/tmp/eagle3dvc/train-warm")
    shutil.rmtree(".dvc/cache")
    with pytest.raises(UserError, match="models/drafter of that revision cannot be read \\((?!Having any).*models/drafter"):
        build(world, out="fourth", max_steps=1, warm_start="HEAD")


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


@pytest.mark.parametrize("when", [{"checkpoint_every": 1}, {"eval_every": 1, "early_stop_patience": 5}, {"max_steps": 3}])
def test_weights_that_an_update_made_not_finite(world, work, monkeypatch, when):
    """Loss and gradient of the step are finite, the update is not: nothing of it is evaluated or kept, wherever it would be."""
    real = trainer.DrafterTrainer._optimizers_step

    def step(self):
        real(self)
        if self.global_step == 2:
            with torch.no_grad():
                self.raw_model.fc.weight[3, 5] = torch.inf

    monkeypatch.setattr(trainer.DrafterTrainer, "_optimizers_step", step)
    with pytest.raises(
        UserError, match="the weights are not finite after step 3, though loss and gradient are: lower train.learn"
    ):
        build(world, **{"max_steps": 20, **when})
    assert not Path("drafter").exists()
    for kept in Path(".dvc").rglob("*.safetensors"):
        assert all(torch.isfinite(v).all() for v in load_file(kept).values()), kept


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"draft_heads": 5, "draft_kv_heads": 5},
            "train.draft_heads = 5, train.draft_kv_heads = 5.* do not make a draft layer",
        ),
        (
            {"draft_config": {"hidden_act": "nope"}},
            "train.draft_config = {'hidden_act': 'nope'}.* do not make a draft layer: .*nope",
        ),
        ({"draft_config": {"rope_parameters": 5}}, "do not make a draft layer"),
        ({"draft_config": {"num_hidden_layers": 0}}, "a drafter has at least one layer"),
        ({"loss": '{"ce": -1}'}, "its weights must be finite, none of them negative"),
        ({"loss": '{"ce": 0}'}, "not all 0"),
        ({"loss": '{"ce": NaN}'}, "must be finite"),
        ({"ttt_steps": 60}, r"raise max_samples \(now \d+\), or lower train.ttt_steps \(now 60\)"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together(world, work, settings, message):
    with pytest.raises(UserError, match=message):
        build(world, **settings)


CPU_OUT = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), CPU_OUT])
@pytest.mark.parametrize("where", ["setup_model", "_evaluate", "_optimizers_step"])
def test_too_little_memory_names_the_settings(world, work, monkeypatch, error, where):
    """Wherever it is noticed: placing the model, the walk before the first step, or a step."""

    def fail(self):
        raise error

    monkeypatch.setattr(trainer.DrafterTrainer, where, fail)
    message = r"'s memory is too small after step 0: lower train.tokens_per_batch \(now 128\), .*train.gradient_checkpointing"
    with pytest.raises(UserError, match=message):
        build(world)


def test_other_errors_keep_their_traceback(world, work, monkeypatch):
    def fail(self):
        raise RuntimeError("a bug")

    monkeypatch.setattr(trainer.DrafterTrainer, "_evaluate", fail)
    with pytest.raises(RuntimeError, match="a bug"):
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
