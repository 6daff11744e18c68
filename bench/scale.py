"""What each part of the pipeline costs at several sizes: prepare, extract, opening the cache in train, growth, no-op and plan.

    python bench/scale.py [--samples 12500 25000 50000 100000] [--folder FOLDER --minutes 8]

For each size N a real DVC repository runs the real stages with 0.8 N samples, runs again (a no-op), grows to N and runs again. The
verifier is tiny (7 layers of 32) and training takes 6 steps, so that what is timed is the handling of data. Processor seconds, of a
command and all that it started, tell growth of work from a busy machine. Their exponent over all sizes is printed (1 is linear; above
1.1 the script fails) and, since fixed costs hide in it, what each further sample costs between two sizes. With --folder finished
steps are kept and the same command continues after --minutes; the repositories of finished sizes are removed (the largest takes
about 4 GB).
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.pipeline.conftest import Project, new_project

SIZES = (12_500, 25_000, 50_000, 100_000)
LINEAR = 1.1  # exponent
DEMO = {"layers": 7, "hidden_size": 32, "heads": 2, "intermediate_size": 64, "vocab_size": 1024, "steps": 1, "batch_size": 1}
SETTINGS = {
    "verifier__demo": DEMO,
    "prepare__samples_per_shard": 100,
    "prepare__heldout_fraction": 0.1,
    "extract__batch_tokens": 8192,
    "evaluate__samples": 200,
}


def base(samples: int) -> int:
    return samples * 4 // 5


def steps(project: Callable[[], Project], samples: int) -> dict[str, Callable[[], dict]]:
    """name -> what is done; each returns what the stages said of it beside the time."""

    def make() -> dict:
        new = new_project(project().root)
        new.set(max_samples=base(samples), **SETTINGS)
        new.dvc("repro", "verifier", timeout=3600)
        return {}

    def stage(name: str) -> dict:
        p = project()
        p.dvc("repro", name, timeout=3600)
        log = p.log(name)
        keys = ("seconds_stage", "seconds_extract", "seconds_load", "seconds", "shards_reused", "shards_computed")
        keys += ("peak_host_memory_bytes", "tokens_computed")
        return {k: log[k] for k in keys if log.get(k) is not None}

    def noop() -> dict:
        text = project().dvc("repro", timeout=3600).stdout
        assert "Running stage" not in text, text
        return {}

    def grow() -> dict:
        project().set(max_samples=samples)
        return stage("prepare")

    def rest() -> dict:
        project().dvc("repro", timeout=3600)
        return {"bytes": project().metrics("extract")["bytes"], "shards": project().metrics("extract")["shards"]}

    def plan() -> dict:
        text = project().run("eagle3dvc", "plan", "--samples", str(2 * samples), "--json").stdout
        return {"seconds_planned": json.loads(text)["seconds"]}

    return {
        "make": make,
        "prepare 0.8 N": lambda: stage("prepare"),
        "extract 0.8 N": lambda: stage("extract"),
        "train 0.8 N": lambda: stage("train"),
        "export, evaluate 0.8 N": rest,
        "no-op 0.8 N": noop,
        "prepare N": grow,
        "extract growth to N": lambda: stage("extract"),
        "train N": lambda: stage("train"),
        "export, evaluate N": rest,
        "no-op N": noop,
        "plan": plan,
    }


def timed(do: Callable[[], dict]) -> dict:
    """What `do` returned, with seconds and the processor seconds of the processes it waited for."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    said = do()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": round(time.perf_counter() - started, 2), "processor": round(cpu, 2), **said}


def run(folder: Path, sizes: list[int], deadline: float) -> dict[str, dict]:
    """{"N": {step: what it took}}; stops before the next step once `deadline` has passed."""
    kept = folder / "results.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    for samples in sizes:
        done = results.setdefault(str(samples), {})
        place = folder / str(samples)
        for name, do in steps(lambda place=place: Project(place / "project"), samples).items():
            if name in done:
                continue
            if time.monotonic() > deadline:
                print("time is up: run the same command again to continue", flush=True)
                return results
            if name == "make":
                shutil.rmtree(place, ignore_errors=True)
            done[name] = timed(do)
            kept.write_text(json.dumps(results, indent=1))
            print(f"{samples:>7,} {name:<24} {json.dumps(done[name])}", flush=True)
        shutil.rmtree(place, ignore_errors=True)
    return results


def overhead(step: dict) -> dict:
    """An extract step less computing states and loading: finding, linking and committing shards."""
    less = step.get("seconds_extract", 0) + step.get("seconds_load", 0)
    return {"wall": step["wall"] - less}


def table(results: dict[str, dict]) -> bool:
    """Print seconds a step and size with the exponent over all sizes; whether nothing is worse than linear."""
    sizes = sorted((int(n) for n, steps in results.items() if "plan" in steps))
    if not sizes:
        return True
    rows: dict[str, list[dict]] = {}
    for n in sizes:
        for name, step in results[str(n)].items():
            rows.setdefault(name, []).append(step)
            if name.startswith("extract"):
                rows.setdefault(f"{name}, less computing", []).append(overhead(step))
    print(f"\n{'wall s (processor s)':<38}" + "".join(f"{n:>17,}" for n in sizes) + "   exponent; ms a further sample")
    fine = True
    for name, found in rows.items():
        if name == "make":
            continue
        cost = [s.get("processor", s["wall"]) for s in found]
        exponent = math.log(cost[-1] / cost[0]) / math.log(sizes[-1] / sizes[0]) if len(sizes) > 1 else 0.0
        further = [(b - a) / (m - n) for a, b, n, m in zip(cost, cost[1:], sizes, sizes[1:])]
        bad = exponent > LINEAR
        fine &= not bad
        texts = [f"{s['wall']:.1f} ({s['processor']:.1f})" if "processor" in s else f"{s['wall']:.1f}" for s in found]
        print(
            f"{name:<38}"
            + "".join(f"{t:>17}" for t in texts)
            + "   "
            + f"{exponent:.2f}; "
            + " ".join(f"{1000 * f:.2f}" for f in further)
            + ("   worse than linear" if bad else "")
        )
    memory = {
        name: [round(s["peak_host_memory_bytes"] / 1e9, 2) for s in found]
        for name, found in rows.items()
        if "peak_host_memory_bytes" in found[0]
    }
    for name, gigabytes in memory.items():
        print(f"{name:<38}" + "".join(f"{g:>14} GB" for g in gigabytes))
    return fine


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--samples", type=int, nargs="+", default=list(SIZES))
    p.add_argument("--folder", type=Path, help="where results and repositories are kept; default: a temporary folder")
    p.add_argument("--minutes", type=float, default=math.inf, help="start no further step after so long")
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (a.folder or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        results = run(folder, sorted(a.samples), time.monotonic() + 60 * a.minutes)
    if not table(results):
        raise SystemExit("error: a step grows faster than the samples")


if __name__ == "__main__":
    main()
