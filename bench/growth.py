"""What growth costs: bytes moved when one shard joins 2 GB of old ones, and seconds of a no-op repro with 2,000 shards.

Real DVC repositories in a temporary folder. Bytes are read and written by `dvc repro` and all it starts (/proc/PID/io), less those
of the same growth in a repository whose shards are tiny (what starting Python reads).   python bench/growth.py [--gigabytes 2]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.pipeline.conftest import Project, new_project

PER_SHARD = 100


def make(folder: Path, hidden: int, samples: int, per_shard: int = PER_SHARD, stored: str = "float32") -> Project:
    project = new_project(folder)
    demo = {
        "layers": 7,
        "hidden_size": hidden,
        "heads": hidden // 32,
        "intermediate_size": hidden,
        "vocab_size": 512,
        "steps": 1,
        "batch_size": 1,
    }
    project.set(
        max_samples=samples,
        verifier__demo=demo,
        prepare__samples_per_shard=per_shard,
        extract__stored_dtype=stored,
        extract__batch_tokens=8192,
    )
    project.env["OMP_NUM_THREADS"] = "2"
    project.dvc("repro", "extract", timeout=3600)
    project.commit("grown")
    return project


def io_of(project: Project, *args: str) -> dict[str, int]:
    """rchar and wchar of a command and everything it started."""
    r = project.run("bash", "-c", '"$@" >/dev/null; cat /proc/$$/io', "bash", *args, timeout=3600)
    return {k: int(v) for k, v in (line.split(": ") for line in r.stdout.splitlines() if line.startswith(("rchar", "wchar")))}


def grow(project: Project, samples: int) -> tuple[dict[str, int], int, float]:
    """(I/O, size of the new shard, seconds) of growing to so many samples, one shard more."""
    before = set(project.shards())
    project.set(max_samples=samples)
    started = time.perf_counter()
    io = io_of(project, "dvc", "repro", "extract")
    seconds = time.perf_counter() - started
    (new,) = set(project.shards()) - before
    log = project.log("extract")
    assert log["shards_computed"] == 1, log
    return io, (project.root / "data/hidden_states" / new).stat().st_size, seconds


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gigabytes", type=float, default=2.0, help="old shards")
    p.add_argument("--shards", type=int, default=2000, help="shards of the no-op run")
    a = p.parse_args()
    result: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as tmp:
        hidden = 512
        shards = max(1, round(a.gigabytes * 1e9 / (PER_SHARD * 145 * 4 * hidden * 4)))
        big = make(Path(tmp) / "big" / "project", hidden, shards * PER_SHARD)
        small = make(Path(tmp) / "small" / "project", 64, shards * PER_SHARD)
        old = big.metrics("extract")["bytes"]
        io, size, seconds = grow(big, (shards + 1) * PER_SHARD)
        base, tiny, _ = grow(small, (shards + 1) * PER_SHARD)
        for kind in ("rchar", "wchar"):
            moved = (io[kind] - base[kind]) / (size - tiny)
            result[f"{kind}_per_new_byte"] = round(moved, 3)
        result |= {"old_bytes": old, "new_shard_bytes": size, "growth_seconds": round(seconds, 2)}
        print(f"{old / 1e9:.2f} GB in {shards} shards, one of {size / 1e6:.0f} MB added in {seconds:.1f} s:")
        print(
            f"  read {result['rchar_per_new_byte']} x and wrote {result['wchar_per_new_byte']} x the new shard's bytes (at most 1.2 each)"
        )

        many = make(Path(tmp) / "many" / "project", 64, a.shards, per_shard=1)
        started = time.perf_counter()
        text = many.dvc("repro", "extract").stdout
        result["noop_seconds"] = round(time.perf_counter() - started, 2)
        assert "Running stage" not in text
        print(f"no-op repro with {many.metrics('extract')['shards']} shards: {result['noop_seconds']} s (at most 5)")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
