"""A plan against what then happens: run the demo at N samples, plan 4 N from its logs, grow to 4 N and compare, stage by stage.

    python bench/plan.py [--samples 500] [--times 4] [--responses dataset] [--keep FOLDER]

Both runs are the whole pipeline with this repository's params.yaml in a DVC repository of its own; the second reuses the verifier and
the hidden states of the first, and the plan says so. Ends with an error where the total is off by more than 30 %.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.pipeline.conftest import REPO, Project, new_project

STAGES = ("verifier", "prepare", "extract", "train", "export", "evaluate")
ALLOWED = 0.3


def repro(project: Project) -> tuple[float, dict[str, float]]:
    """(seconds of `dvc repro`, seconds of each stage that it ran)."""
    before = {s: project.log(s)["finished_at"] for s in STAGES if (project.root / "logs" / f"{s}.json").exists()}
    started = time.perf_counter()
    project.dvc("repro", timeout=3600)
    seconds = time.perf_counter() - started
    logs = {s: project.log(s) for s in STAGES}
    return seconds, {s: log["seconds_stage"] for s, log in logs.items() if log["finished_at"] != before.get(s)}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--samples", type=int, default=500, help="N")
    p.add_argument("--times", type=int, default=4)
    p.add_argument("--responses", default="dataset", choices=["dataset", "verifier"], help="who writes the answers")
    p.add_argument("--keep", type=Path, help="an empty folder for the repository, kept; default: a temporary one")
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        project = new_project((a.keep or Path(scratch)).resolve() / "project")
        shutil.copy(REPO / "params.yaml", project.root / "params.yaml")
        project.set(max_samples=a.samples, prepare__responses=a.responses)
        project.commit("the demo")
        wall, ran = repro(project)
        print(f"{a.samples:,} samples: {wall:.1f} s, of which stages {sum(ran.values()):.1f} s", flush=True)

        target = a.samples * a.times
        plan = json.loads(project.run("eagle3dvc", "plan", "--samples", str(target), "--from", "logs", "--json").stdout)
        project.set(max_samples=target)
        wall, measured = repro(project)
        reused = project.log("extract")["shards_reused"]
    print(f"{target:,} samples: {wall:.1f} s, {plan['have']:,} planned and {reused} shards found as reused\n")
    print(f"{'stage':<10}{'planned s':>18}{'measured s':>12}{'planned / measured':>20}")
    for stage in [*measured, *(s for s in plan["stages"] if s not in measured)]:
        low, high = plan["stages"].get(stage, [0.0, 0.0])
        took = measured.get(stage, 0.0)
        ratio = f"{(low + high) / 2 / took:.2f}" if took else "not run"
        print(f"{stage:<10}{f'{low:.1f} - {high:.1f}' if low != high else f'{low:.1f}':>18}{took:>12.1f}{ratio:>20}")
    planned = sum(plan["seconds"]) / 2
    total = sum(measured.values())
    print(f"{'total':<10}{planned:>18.1f}{total:>12.1f}{planned / total:>20.2f}")
    print(f"{'dvc repro':<10}{planned:>18.1f}{wall:>12.1f}{planned / wall:>20.2f}   (with what DVC itself takes)")
    if not 1 - ALLOWED <= planned / wall <= 1 + ALLOWED:
        raise SystemExit(f"error: the plan is off by more than {ALLOWED:.0%}")


if __name__ == "__main__":
    main()
