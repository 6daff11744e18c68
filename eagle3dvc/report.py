"""`eagle3dvc report`: the evaluation and what each stage's last run did, from metrics/ and logs/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eagle3dvc import stage
from eagle3dvc.errors import UserError

STAGES = ("verifier", "prepare", "extract", "train", "export", "evaluate")


def collect() -> dict[str, Any]:
    """{"metrics": {stage: ...}, "logs": {stage: ...}} of what has run; raises UserError where nothing has."""

    def read(folder: Path) -> dict[str, Any]:
        files = {s: folder / f"{s}.json" for s in STAGES}
        try:
            return {s: json.loads(f.read_text(encoding="utf-8")) for s, f in files.items() if f.exists()}
        except ValueError as e:
            raise UserError(
                f"a file in {folder} is not valid JSON ({e}): run the stage again with `dvc repro -f -s STAGE`"
            ) from None

    found = {"metrics": read(Path("metrics")), "logs": read(stage.root() / "logs")}
    if not found["metrics"]:
        raise UserError("metrics/ is empty: run `make repro` first")
    return found


def _number(x: Any) -> str:
    if isinstance(x, bool) or not isinstance(x, int | float):
        return str(x)
    return f"{x:,}" if isinstance(x, int) else f"{x:,.3f}"


def show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, indent=2, sort_keys=True))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    table = Table("stage", "seconds", "what the last run did", box=None, pad_edge=False)
    facts = {
        "prepare": ("samples", "tokens"),
        "extract": ("shards_reused", "shards_computed", "tokens_computed", "tokens_per_second", "engine"),
        "train": ("steps_per_second", "tokens_per_second", "data_wait_fraction"),
        "evaluate": (),
    }
    for name in STAGES:
        if log := found["logs"].get(name):
            texts = [f"{k} {_number(log[k])}" for k in facts.get(name, ()) if log.get(k) is not None]
            table.add_row(name, _number(log.get("seconds", "")), ", ".join(texts))
    console.print(table)
    if e := found["metrics"].get("evaluate"):
        by_position = ", ".join(f"{p:.3f}" for p in e["acceptance_by_position"])
        console.print(
            f"\nacceptance length {e['acceptance_length']:.3f} with {e['draft_tokens']} draft tokens on {e['samples']} held-out samples"
            f" (by position {by_position})"
        )
        for source, row in sorted(e.get("by_source", {}).items()):
            length = row["acceptance_length"] if isinstance(row, dict) else row
            console.print(f"  {source}: {length:.3f}")
