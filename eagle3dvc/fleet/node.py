"""Make a machine ready for the next stage: check it, pull just what that stage reads, say what to run.

A rented node has the repository and its remote, nothing else. Hidden states of 100,000 samples are terabytes, so nothing is
pulled that no changed stage reads; the extract stage itself looks for each finished shard it wants (hidden_states/store.py).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from eagle3dvc.errors import UserError
from eagle3dvc.fleet import doctor


@dataclass(frozen=True)
class Stage:
    """A stage of dvc.yaml: names of the stages it reads from, paths it reads, paths it writes, whether it must run."""

    name: str
    after: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    changed: bool


@dataclass(frozen=True)
class Ready:
    """What was found and done: stages to run in order, paths pulled, the command to give next."""

    run: list[str]
    pulled: list[str]
    command: str

    def as_dict(self) -> dict:
        return {"run": self.run, "pulled": self.pulled, "command": self.command}


def stages() -> list[Stage]:
    """The pipeline's stages in running order; `changed` is what dvc.lock and the workspace say, missing data being no change."""
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        repo = Repo()
        with repo.lock:
            producer = {o.fs_path: s.addressing for s in repo.index.stages for o in s.outs}
            found = {}
            for s in repo.index.stages:
                after = {producer[d.fs_path] for d in s.deps if d.fs_path in producer}
                found[s.addressing] = Stage(
                    name=s.addressing,
                    after=tuple(sorted(after)),
                    reads=tuple(d.def_path for d in s.deps if d.fs_path in producer),
                    writes=tuple(o.def_path for o in s.outs if o.use_cache),
                    changed=s.changed(allow_missing=True),
                )
    except DvcException as e:
        raise UserError(f"DVC cannot read this pipeline ({str(e).splitlines()[0]}): run `dvc status` for the whole text") from e
    ordered: list[Stage] = []
    while len(ordered) < len(found):  # DVC has refused cycles by now
        done = {s.name for s in ordered}
        ordered += [s for s in found.values() if s.name not in done and done.issuperset(s.after)]
    return ordered


def to_run(pipeline: list[Stage]) -> list[str]:
    """Changed stages and every stage that reads from one, in order."""
    names: list[str] = []
    for s in pipeline:
        if s.changed or any(a in names for a in s.after):
            names.append(s.name)
    return names


def to_pull(pipeline: list[Stage], run: list[str]) -> list[str]:
    """Outputs of unchanged stages that a stage to be run reads."""
    kept = {path for s in pipeline if s.name not in run for path in s.writes}
    wanted = [path for s in pipeline if s.name in run for path in s.reads]
    return [path for path in dict.fromkeys(wanted) if path in kept]


def prepare(stage: str | None = None, say: Callable[[str], None] = print) -> Ready:
    """Doctor, pull, next command. `stage`: make ready for this stage and those it needs, default all that changed.

    Raises UserError when the stage is unknown, doctor finds a failure, or the pull fails.
    """
    if stage is not None and (names := _names()) and stage not in names:
        raise UserError(f"no stage {stage!r} in dvc.yaml; there are {', '.join(names)}")
    lines = doctor.examine()
    for line in lines:
        say(str(line))
    if failures := [line for line in lines if line.level == "failure"]:
        first = failures[0]
        raise UserError(f"doctor found {len(failures)} failure(s), the first is {first.check} ({first.text}): {first.fix}")
    pipeline = stages()
    run = to_run(pipeline)
    if stage is not None:
        run = [n for n in run if n == stage or n in _needed(pipeline, stage)]
    if not run:
        return Ready([], [], "dvc pull    # nothing is left to run; this brings the results")
    pull = to_pull(pipeline, run)
    if pull:
        say(f"pulling {', '.join(pull)}")
        r = subprocess.run([sys.executable, "-m", "dvc", "pull", *pull], stdin=subprocess.DEVNULL, stdout=2)
        if r.returncode:
            raise UserError(f"dvc pull {' '.join(pull)} failed: was it pushed from the machine that made it (dvc push)?")
    # --allow-missing: outputs that no stage here reads are not worth pulling
    target = f" {stage}" if stage else ""
    return Ready(run, pull, f"dvc repro --allow-missing{target}")


def _names() -> list[str]:
    """Names of the stages; none where DVC cannot read them, of which doctor says more."""
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        return [s.addressing for s in Repo().index.stages]
    except DvcException:
        return []


def _needed(pipeline: list[Stage], name: str) -> set[str]:
    """Every stage that `name` reads from, directly or not."""
    by_name = {s.name: s for s in pipeline}
    found: set[str] = set()
    todo = [name]
    while todo:
        for a in by_name[todo.pop()].after:
            if a not in found:
                found.add(a)
                todo.append(a)
    return found
