"""Checkpoints of a training run that survive anything: complete or absent, never half.

A run's folder lies in the resume area, named by the hash of all that its result depends on, the code included:

    step-00000100/   model.safetensors (trained tensors), optimizer.pt, state.json, COMPLETE (the size of every file)
    best-00000080/   model.safetensors, COMPLETE
    FINISHED         the run has ended; the next run of another key may remove the folder

Each folder is written beside, every file and the folder fsynced, and renamed; the marker inside is the last file written.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eagle3dvc.hidden_states.format import fsync_dir

MARKER = "COMPLETE"
FINISHED = "FINISHED"
KEEP = 2


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Make folder `path` through `fill(temporary)`: after a crash at any point it is complete or not there."""
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    try:
        fill(tmp)
        files = sorted(f for f in tmp.rglob("*") if f.is_file())
        for f in files:
            with open(f, "rb") as handle:
                os.fsync(handle.fileno())
        with open(tmp / MARKER, "w", encoding="utf-8") as f:
            json.dump({str(x.relative_to(tmp)): x.stat().st_size for x in files}, f, sort_keys=True)
            f.flush()
            os.fsync(f.fileno())
        fsync_dir(tmp)
        if path.exists():
            shutil.rmtree(path)
        os.rename(tmp, path)
        fsync_dir(path.parent)
    except BaseException:
        shutil.rmtree(tmp, ignore_errors=True)
        raise


def complete(path: Path) -> bool:
    """Whether the folder's marker is there and every file has the size it names."""
    try:
        sizes = json.loads((path / MARKER).read_text(encoding="utf-8"))
        return all((path / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def numbered(folder: Path, kind: str) -> list[tuple[int, Path]]:
    """(step, folder) of a run's `step` or `best` folders, complete or not, in the order of steps."""
    found = ((p.name.removeprefix(f"{kind}-"), p) for p in folder.glob(f"{kind}-*"))
    return sorted((int(n), p) for n, p in found if n.isdigit())


class Store:
    """The checkpoints of one run. folder: the run's own, made if missing."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".*.tmp"):  # of a process that was killed while it wrote
            shutil.rmtree(left, ignore_errors=True)

    def _numbered(self, kind: str) -> list[tuple[int, Path]]:
        return numbered(self.folder, kind)

    def save(self, step: int, tensors: dict[str, torch.Tensor], optimizer: Any, state: dict[str, Any]) -> None:
        """Write the checkpoint of `step`, then drop all but the last two and the best weights these name."""
        from safetensors.torch import save_file

        def fill(tmp: Path) -> None:
            save_file(tensors, tmp / "model.safetensors", metadata={"format": "pt"})
            torch.save(optimizer, tmp / "optimizer.pt")
            (tmp / "state.json").write_text(json.dumps(state, sort_keys=True), encoding="utf-8")

        write_folder(self.folder / f"step-{step:08d}", fill)
        self._prune()

    def _prune(self) -> None:
        kept = self._numbered("step")[-KEEP:]
        for _, path in self._numbered("step")[:-KEEP]:
            shutil.rmtree(path, ignore_errors=True)
        needed = {json.loads((p / "state.json").read_text())["best_step"] for _, p in kept if complete(p)}
        newest = max(needed, default=-1)
        for step, path in self._numbered("best"):
            if step not in needed and step < newest:
                shutil.rmtree(path, ignore_errors=True)

    def save_best(self, step: int, tensors: dict[str, torch.Tensor]) -> None:
        from safetensors.torch import save_file

        write_folder(
            self.folder / f"best-{step:08d}",
            lambda tmp: save_file(tensors, tmp / "model.safetensors", metadata={"format": "pt"}),
        )

    def load_best(self, step: int) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return load_file(self.folder / f"best-{step:08d}" / "model.safetensors")

    def load(self) -> tuple[dict[str, torch.Tensor], Any, dict[str, Any]] | None:
        """(tensors, optimizer, state) of the highest complete checkpoint whose best weights are there too, or None."""
        from safetensors.torch import load_file

        for _, path in reversed(self._numbered("step")):
            if not complete(path):
                continue
            state = json.loads((path / "state.json").read_text(encoding="utf-8"))
            if state["best_step"] >= 0 and not complete(self.folder / f"best-{state['best_step']:08d}"):
                continue
            optimizer = torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True)
            return load_file(path / "model.safetensors"), optimizer, state
        return None

    def finish(self) -> None:
        """Mark the run as ended, so that a later run may remove the folder."""
        (self.folder / FINISHED).touch()


def remove_finished(parent: Path, keep: Path) -> None:
    """Remove the folders of ended runs, except `keep`; those of interrupted ones stay, they can be continued."""
    for folder in parent.iterdir():
        if folder != keep and (folder / FINISHED).exists():
            shutil.rmtree(folder, ignore_errors=True)
