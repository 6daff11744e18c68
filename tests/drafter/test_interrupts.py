"""Training ended by signals at random steps, in the real stage, and continued until it ends: bitwise the undisturbed run.

Each run is a process group of its own, and the signal goes to the whole group. The moments come from a seed that is printed;
EAGLE3DVC_SEED=N repeats them.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from world import World, make, params

from eagle3dvc.drafter import checkpoints, train

REPOSITORY = Path(__file__).parents[2]
STEPS, EVERY, EVALUATE = 200, 10, 20
SETTINGS = {"max_steps": STEPS, "checkpoint_every": EVERY, "eval_every": EVALUATE}
EXITS = {signal.SIGKILL: -9, signal.SIGTERM: 143}
# One process that has imported everything (10 s) forks the runs. Nothing has computed in it, so a fork is as good as a start.
FORKS = """
import os, runpy, sys
import torch
from eagle3dvc.drafter import export, trainer
from speculators.models import eagle3
for folder in sys.stdin:
    if (pid := os.fork()) == 0:
        os.setsid()
        os.chdir(folder.strip())
        os.environ["DVC_ROOT"] = folder.strip()
        os.dup2(os.open("errors.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.dup2(2, 1)
        runpy.run_module("stages.train", run_name="__main__", alter_sys=True)
        os._exit(0)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return make(tmp_path_factory.mktemp("world"))


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "DVC_NO_ANALYTICS": "1"}


class Started:
    """The stage run as a user runs it, in a session of its own."""

    def __init__(self, work: Path, command: tuple[str, ...] = ("-m", "stages.train")):
        with open(work / "errors.txt", "w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=work,
                env=environment(),
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )
        self.pid = self.process.pid

    def running(self) -> bool:
        return self.process.poll() is None

    def wait(self) -> int:
        return self.process.wait(timeout=120)


# The stage with two gloo processes on the CPU (train.gpus counts GPUs only)
TWO = """
import sys
from eagle3dvc import stage
from eagle3dvc.drafter import train
names = {"out": "models/drafter", "hidden": "data/hidden_states", "prompts": "data/prompts", "verifier": "data/verifier"}
stage.run("train", lambda params, log: train.torchrun(params, {**names, "curves": train.CURVES}, 2, log))
"""


class Forks:
    """The same from a process that has everything imported; call it with a work folder."""

    def __init__(self):
        command = [sys.executable, "-c", FORKS]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment(), stdin=pipe, stdout=pipe, text=True)

    def __call__(self, work: Path) -> Forks:
        self.process.stdin.write(f"{work}\n")
        self.process.stdin.flush()
        self.pid = int(self.process.stdout.readline())
        return self

    def running(self) -> bool:
        import select

        return not select.select([self.process.stdout], [], [], 0)[0]

    def wait(self) -> int:
        return int(self.process.stdout.readline())


def project(world: World, work: Path, **settings) -> Path:
    """A folder in which the stage runs: inputs and params.yaml."""
    shutil.copytree(world.root / "data", work / "data")
    (work / "params.yaml").write_text(yaml.safe_dump(params(**SETTINGS, **settings).model_dump(mode="json")))
    return work


def files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def outputs(work: Path) -> dict[str, dict[str, bytes]]:
    return {name: files(work / name) for name in ("models", "metrics")}


def curve(work: Path, name: str) -> list[int]:
    """The steps of one curve, as DVC would draw it."""
    path = work / "metrics/train_curves/plots/metrics" / f"{name}.tsv"
    if not path.exists():
        return []
    with open(path, encoding="utf-8") as f:
        return [int(row["step"]) for row in csv.DictReader(f, delimiter="\t") if row["step"]]


def saved(work: Path) -> int:
    """Step of the newest complete checkpoint, 0 where there is none."""
    found = [p for p in work.glob(".dvc/tmp/eagle3dvc/train/*/step-*") if checkpoints.complete(p)]
    return max((int(p.name[5:]) for p in found), default=0)


def processes_in(work: Path) -> list[int]:
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if Path(os.readlink(link)) == work:
                found.append(int(link.parent.name))
    return found


def gone(work: Path) -> None:
    """Wait until no process works in the folder."""
    deadline = time.monotonic() + 100
    while processes_in(work):
        assert time.monotonic() < deadline, "processes outlived the one that started them"
        time.sleep(0.1)


def interrupt(start, work: Path, number: int, step: int, rng: random.Random, undisturbed) -> str:
    """Run the stage until it logs `step`, wait a moment (a step, an evaluation, a checkpoint, the last writing) and signal."""
    shutil.rmtree(work / "metrics/train_curves", ignore_errors=True)  # as dvc does with the outputs of what it runs again
    before = saved(work)
    run = start(work)
    while run.running() and max(curve(work, "train/loss"), default=-1) < step:
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.1))
    sent = time.monotonic()
    if run.running():
        os.killpg(run.pid, number)
    code = run.wait()
    seconds, seen = time.monotonic() - sent, max(curve(work, "train/loss"), default=0)
    said = (work / "errors.txt").read_text()
    assert code in (0, EXITS[number]), said
    assert code == 0 or step <= seen
    if code == EXITS[signal.SIGTERM]:
        assert "error: train: ended by signal SIGTERM; finished work is kept, run `dvc repro` again to continue" in said
        assert saved(work) == max(seen, before)  # not a step is lost
    elif code:
        assert saved(work) >= (seen - 1) // EVERY * EVERY
    # the outputs: whole, where the signal came after them, or not there
    models, record = files(work / "models"), work / "metrics/train.json"
    assert models in ({}, undisturbed["models"]) or all(name.startswith(".") for name in models)
    assert not record.exists() or models and record.read_bytes() == undisturbed["metrics"]["train.json"]
    return f"{signal.Signals(number).name} at step {seen}, saved {saved(work)}, exit {code} after {seconds:.2f} s"


def interrupted_run(start, work: Path, moments: list[tuple[int, int]], rng: random.Random, undisturbed) -> None:
    for step, number in moments:
        print(interrupt(start, work, number, step, rng, undisturbed))
        shutil.rmtree(work / "models/drafter", ignore_errors=True)
        (work / "metrics/train.json").unlink(missing_ok=True)
    run = start(work)
    assert run.wait() == 0, (work / "errors.txt").read_text()
    assert curve(work, "train/loss") == list(range(1, STEPS + 1))
    assert curve(work, "heldout/acceptance_length") == list(range(0, STEPS + 1, EVALUATE))
    assert json.loads((work / "metrics/train.json").read_text())["steps"] == STEPS
    assert outputs(work) == undisturbed
    left = [p for p in work.rglob("*") if p.name.endswith((".tmp", ".part"))]
    assert not left


def chosen_seed() -> int:
    seed = int(os.environ.get("EAGLE3DVC_SEED") or random.SystemRandom().randrange(10**6))
    print(f"EAGLE3DVC_SEED={seed}")
    return seed


def moments(rng: random.Random, each: int) -> list[tuple[int, int]]:
    """`each` random steps for either signal in the order of the steps; the last of each comes while the outputs are written."""
    found = [(rng.randint(1, STEPS), n) for n in EXITS for _ in range(each - 1)]
    return sorted(found) + [(STEPS, n) for n in EXITS]


def compare_interrupted(world, folder, start, each):
    """A run that nothing disturbs, then one with `each` interruptions by either signal: the same outputs."""
    for name in ("undisturbed", "disturbed"):
        (folder / name).mkdir()
    whole = project(world, folder / "undisturbed")
    assert start(whole).wait() == 0, (whole / "errors.txt").read_text()
    rng = random.Random(chosen_seed())
    work = project(world, folder / "disturbed")
    interrupted_run(start, work, moments(rng, each), rng, outputs(whole))


@pytest.mark.slow
def test_three_kills_and_three_terminations(world, tmp_path):
    start = Forks()
    compare_interrupted(world, tmp_path, start, 3)
    start.process.stdin.close()
    assert start.process.wait(timeout=60) == 0


@pytest.mark.slow
def test_dvc_terminated_with_its_stage(world, tmp_path):
    """As systemd, a batch system or a closed terminal do it: dvc dies at once, the stage saves before it ends."""
    work = project(world, tmp_path)
    (work / "dvc.yaml").write_text("stages: {train: {cmd: python -m stages.train, outs: [models/drafter]}}")
    for command in (("init", "-q", "--no-scm"), ("config", "core.site_cache_dir", str(work / "site"))):
        subprocess.run([sys.executable, "-m", "dvc", *command], cwd=work, check=True)
    run = Started(work, ("-m", "dvc", "repro"))
    while run.running() and max(curve(work, "train/loss"), default=-1) < 15:
        time.sleep(0.001)
    os.killpg(run.pid, signal.SIGTERM)
    assert run.wait() == -signal.SIGTERM
    gone(work)
    assert saved(work) == max(curve(work, "train/loss")) >= 15
    assert not (work / "models").exists()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_twenty_kills_and_twenty_terminations(world, tmp_path):
    compare_interrupted(world, tmp_path, Started, 20)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fsdp", [False, True])
def test_two_processes_interrupted(world, tmp_path, fsdp):
    """A signal for the stage reaches the processes that torchrun started elsewhere, also when the stage is killed."""

    def start(work: Path) -> Started:
        return Started(work, ("-c", TWO))

    for name in ("undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    settings = {"gradient_accumulation_steps": 2, "tokens_per_batch": 64, "fsdp": fsdp}
    whole = project(world, tmp_path / "undisturbed", **settings)
    assert start(whole).wait() == 0, (whole / "errors.txt").read_text()
    rng = random.Random(chosen_seed())
    work = project(world, tmp_path / "disturbed", **settings)
    for step, number in sorted((rng.randint(1, STEPS - 1), n) for n in EXITS for _ in range(2)):
        print(interrupt(start, work, number, step, rng, outputs(whole)))
        gone(work)
    interrupted_run(start, work, [], rng, outputs(whole))


def test_a_process_whose_torchrun_is_gone_ends_at_once(tmp_path):
    """It was still importing when torchrun was killed: nothing tells it but the pid it was given."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / "job.json").write_text(json.dumps({"params": params().model_dump(mode="json"), "paths": {}}))
    environment = {**os.environ, train.PARENT: str(gone.pid), "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "eagle3dvc.drafter.train", str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "the torchrun that started this process is gone" in (tmp_path / "error.json").read_text()
