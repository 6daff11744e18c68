"""What a GPU did in a stretch of a program (--profile of the other benchmarks), and having it alone while something is timed."""

from __future__ import annotations

import json
import os
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def alone() -> Iterator[None]:
    """What is timed inside has the GPU alone: the command BENCH_BEFORE stops what shares it, BENCH_AFTER lets it go on."""
    before()
    try:
        yield
    finally:
        after()


def before() -> None:
    if command := os.environ.get("BENCH_BEFORE"):
        os.system(command)
        time.sleep(1)  # what was begun on the GPU ends


def after() -> None:
    if command := os.environ.get("BENCH_AFTER"):
        os.system(command)


@contextmanager
def waits() -> Iterator[Counter]:
    """Where the program waits for the GPU inside: {innermost lines of code: times}, filled at the end."""
    import torch

    found: Counter = Counter()

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            lines = [f"{os.path.basename(f.filename)}:{f.lineno} {f.name}" for f in traceback.extract_stack()[:-1]]
            found[" < ".join(line for line in lines[::-1] if not line.startswith("warnings.py"))[:400]] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


class Trace:
    """Records what the GPUs of this process do until `stop`; launches are recorded too, other work of the CPU is not."""

    def __init__(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        self._cuda = torch.cuda.is_available()
        self._profile = profile(activities=[ProfilerActivity.CUDA if self._cuda else ProfilerActivity.CPU])
        self._profile.start()

    def stop(self) -> list[dict[str, Any]]:
        """The trace's events."""
        import torch

        if self._cuda:
            torch.cuda.synchronize()
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.json")
            self._profile.export_chrome_trace(path)
            with open(path, encoding="utf-8") as f:
                return json.load(f)["traceEvents"]


def summary(events: list[dict[str, Any]], units: float, top: int = 14) -> str:
    """A table in ms a unit (a step, 8,192 tokens): time with a kernel at work, without one, the longest kernels, the longest gaps."""
    kernels = sorted(
        (e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e.get("cat") in ("kernel", "gpu_memset") and "dur" in e
    )
    copies = [e["dur"] for e in events if e.get("cat") == "gpu_memcpy" and "dur" in e]
    if not kernels:
        return "no kernels were recorded"
    by_name: dict[str, list[float]] = defaultdict(list)
    gaps: dict[tuple[str, str], list[float]] = defaultdict(list)
    end, last, idle = kernels[0][0], "", 0.0
    for start, stop, name in kernels:
        by_name[name].append(stop - start)
        if start > end:
            idle += start - end
            gaps[last, name].append(start - end)
        if stop > end:
            end, last = stop, name
    window = end - kernels[0][0]
    lines = [
        f"{window / 1e3 / units:.2f} ms a unit: {(window - idle) / 1e3 / units:.2f} with a kernel at work, {idle / 1e3 / units:.2f} "
        f"without; copies {sum(copies) / 1e3 / units:.2f}"
    ]
    for name, times in sorted(by_name.items(), key=lambda x: -sum(x[1]))[:top]:
        lines.append(f"  {sum(times) / 1e3 / units:9.3f} ms in {len(times) / units:8.1f} calls  {name[:110]}")
    lines.append("gaps, by the kernel before and the one after")
    for (one, other), times in sorted(gaps.items(), key=lambda x: -sum(x[1]))[:8]:
        mean = sum(times) / len(times) / 1e3
        lines.append(f"  {sum(times) / 1e3 / units:9.3f} ms, {mean:.3f} each  {one[:60]} -> {other[:60]}")
    calls: dict[str, list[float]] = defaultdict(list)
    for e in events:
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "dur" in e:
            calls[e["name"]].append(e["dur"])
    lines.append("calls")
    for name, times in sorted(calls.items(), key=lambda x: -sum(x[1]))[:8]:
        lines.append(
            f"  {sum(times) / 1e3 / units:9.3f} ms, longest {max(times) / 1e3:.3f}, {len(times) / units:8.1f} calls  {name}"
        )
    return "\n".join(lines)
