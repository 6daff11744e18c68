"""A world and a drafter really trained on it, made once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import world

torch.set_num_threads(1)  # the models here are so small that a second thread only waits


@dataclass(frozen=True)
class Trained:
    """The tiny world with a trained drafter and its export; tests that change files copy them first."""

    world: world.World
    drafter: Path
    export: Path
    log: dict
    metrics: dict

    def build(self, out: Path, params=None, drafter: Path | None = None) -> dict:
        from eagle3dvc.drafter import export

        return export.build(params or world.params(), out, drafter or self.drafter, **self.world.folders)


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Trained:
    from eagle3dvc.drafter import export, train

    root = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DVC_ROOT", str(root))
        patch.chdir(root)
        made = world.make(root)
        params = world.params(epochs=12)
        train.build(params, out=root / "models/drafter", curves=root / "curves", **made.folders)
        log: dict = {}
        metrics = export.build(params, root / "models/export", root / "models/drafter", log=log, **made.folders)
    return Trained(made, root / "models/drafter", root / "models/export", log, metrics)
