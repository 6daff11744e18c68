"""Training curves: a handler of the `speculators.metrics` logger that writes DVCLive's files for `dvc plots`.

Only what the same inputs give again is written (loss, accuracy, learning rate, acceptance): the folder is a DVC output. Rates,
waiting and memory change from run to run and belong into logs/train.json.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RUN_VARYING = ("profile",)


def flatten(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Nested metrics as {"train/loss": 1.0, ...}; what is no number is left out."""
    flat: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            flat[f"{prefix}{name}"] = value
    return flat


def _live(folder: Path) -> Any:
    """A DVCLive writer that opens no repository: the folder is an output of a running stage, so experiments and commits are
    DVC's business; and opening takes seconds and fails in a repository without a commit."""
    from dvclive import Live

    class Writer(Live):
        def _init_dvc(self) -> None:
            self._dvc_file, self._save_dvc_exp = "dvc.yaml", False

    return Writer(dir=str(folder), save_dvc_exp=False, dvcyaml=None)


class CurvesHandler(logging.Handler):
    """Writes one table a metric under `folder` (`train/loss.tsv` ...: columns step and the metric's name)."""

    def __init__(self, folder: str | Path):
        super().__init__()
        self.folder = Path(folder)
        self._live: Any = None

    def restart(self, rows: list[dict[str, Any]]) -> None:
        """Begin the curves anew with the rows of an earlier part of the same run (a resumed run shows one whole curve)."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._live = _live(self.folder)
        for row in rows:
            self._write(row["step"], {k: v for k, v in row.items() if k != "step"})

    def _write(self, step: int, row: Mapping[str, Any]) -> None:
        self._live.step = step
        for name, value in flatten({k: v for k, v in row.items() if k not in RUN_VARYING}).items():
            self._live.log_metric(name, value)

    def emit(self, record: logging.LogRecord) -> None:
        if self._live is not None and isinstance(record.msg, Mapping) and hasattr(record, "step"):
            self._write(record.step, record.msg)

    def close(self) -> None:
        self._live = None
        super().close()
