"""Time and memory of the prepare stage for n and 2n samples, from the demo source and from a JSONL file.

    python bench/prepare.py --verifier data/verifier --samples 50000

Each run is a process of its own, held to two cores where the system allows it. Printed for each: seconds, processor seconds,
peak memory, samples and tokens a second, and the time for 2n over the time for n. The JSONL rows are demo conversations joined
to about `--turns` turns, so that samples of a realistic length can be timed too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def write_jsonl(path: Path, samples: int, turns: int) -> None:
    from eagle3dvc.prompts import demo

    stream = demo.conversations("bench")
    with open(path, "w", encoding="utf-8") as f:
        for _ in range(samples):
            messages: list[dict] = []
            while len(messages) < 2 * turns:
                messages += [m for m in next(stream)["messages"] if m["role"] != "system"]
            f.write(json.dumps({"messages": messages}) + "\n")


def one(source: str, samples: int, verifier: str) -> None:
    """Run prepare in this process and print one JSON line."""
    from eagle3dvc.params import parse
    from eagle3dvc.prompts.prepare import build

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    params = parse({"max_samples": samples, "prepare": {"sources": [{"path": source}], "watch": str(Path(source).parent)}})
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        metrics = build(params, verifier, Path(folder) / "prompts", notice=lambda text: None)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    result = {
        "seconds": round(time.monotonic() - started, 1),
        "processor_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_memory_gb": round(usage.ru_maxrss * 1024 / 1e9, 2),
        "samples": metrics["samples"],
        "tokens": metrics["tokens"],
    }
    print(json.dumps(result))


def measured(source: str, samples: int, verifier: str) -> dict:
    command = [sys.executable, __file__, "--one", source, "--samples", str(samples), "--verifier", verifier]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verifier", default="data/verifier", help="a verifier folder (its tokenizer is used)")
    parser.add_argument("--samples", type=int, default=50_000, help="n; 2n is run as well")
    parser.add_argument("--turns", type=int, default=3, help="turns of each JSONL sample")
    parser.add_argument("--one", metavar="SOURCE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return one(args.one, args.samples, args.verifier)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.jsonl"
        write_jsonl(path, 2 * args.samples, args.turns)
        for source in ("demo", str(path)):
            runs = [measured(source, n, args.verifier) for n in (args.samples, 2 * args.samples)]
            for run in runs:
                rates = f"{run['samples'] / run['seconds']:,.0f} samples/s, {run['tokens'] / run['seconds']:,.0f} tokens/s"
                print(
                    f"{Path(source).name:12} {run['samples']:>8,} samples {run['seconds']:>7} s "
                    f"({run['processor_seconds']} processor s), {run['peak_memory_gb']} GB, {rates}"
                )
            print(f"{Path(source).name:12} time for 2n / time for n: {runs[1]['seconds'] / runs[0]['seconds']:.2f}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
