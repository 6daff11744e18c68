"""Shards in flight on the rank that writes: samples come in any order, threads hash and write them while others come.

Nothing here knows vLLM. On CUDA the buffers are pinned and used again and again (copying runs at 50 GB/s), copies run on a side
stream, and finiteness is checked on the device, where it costs nothing.
"""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from eagle3dvc.errors import UserError
from eagle3dvc.hidden_states.format import FinishedShard, ShardBuffer, ShardRequest, quantise_fp8

NOT_FINITE = (
    "sample {row} of shard {key} has hidden states that are not finite: the verifier overflows in this dtype, or the engine "
    "never wrote them; try extract.dtype float32 or bfloat16, and extract.engine transformers to tell the two apart"
)


#: bytes of states worth a thread's turn: long against the turn's own cost, short against a shard
STREAM_BYTES = 32 << 20


@dataclass
class _Open:
    buffer: ShardBuffer
    storage: torch.Tensor
    finite: torch.Tensor | None  # uint8 [samples] pinned, 1 where finite; CUDA only
    copied: dict[int, Any] = field(default_factory=dict)  # sample -> event after its copy; CUDA only
    busy: bool = False  # a thread is at it


@dataclass
class Report:
    """What `poll` returns; plain values, so that it crosses process borders."""

    finished: list[FinishedShard] = field(default_factory=list)
    error: tuple[str, str, int] | None = None  # kind (user, os, other), message, errno
    incomplete: dict[str, list[int]] = field(default_factory=dict)  # open shards: rows that have not come
    preemptions: int = 0


def pinned(size: int) -> torch.Tensor:
    """uint8 [size] in page-locked host memory.

    Locking pages that threads have touched before runs at 12 GB/s, torch's own pinned allocation at 2.5 (bench/extract.py, H200):
    the first shards of a run wait for it.
    """
    storage = torch.empty(size, dtype=torch.uint8)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(torch.Tensor.zero_, storage.chunk(8)))
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(storage.data_ptr(), size, 0)):
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    weakref.finalize(storage, runtime.cudaHostUnregister, storage.data_ptr()).atexit = False
    return storage


class ShardWriter:
    """Buffers of open shards, the copies into them and the threads that write them.

    The caller bounds memory: it opens no more shards than it wants in flight, and a buffer is free again only once its file is
    durable. Threads only hash and write, both without Python's lock.
    """

    def __init__(self, device: torch.device, threads: int):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._open: dict[str, _Open] = {}
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()  # guards _free, _finished and _error
        self._finished: list[FinishedShard] = []
        self._error: BaseException | None = None
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="shard-writer")

    def open(self, request: ShardRequest) -> None:
        """Make a shard ready to be filled."""
        if request.key in self._open:
            raise RuntimeError(f"shard {request.key} is open already")
        storage = self._storage(ShardBuffer.nbytes(request))
        finite = None
        if self.stream is not None:
            finite = torch.zeros(len(request.token_ids), dtype=torch.uint8, pin_memory=True)
        self._open[request.key] = _Open(ShardBuffer(request, storage), storage, finite)

    def _storage(self, size: int) -> torch.Tensor:
        with self._lock:
            fits = [s for s in self._free if s.numel() >= size]
            best = min(fits, key=torch.Tensor.numel, default=None)
            if best is not None:
                self._free = [s for s in self._free if s is not best]
                return best
            self._free = self._free[1:]  # too small: replaced by a larger one
        # Shards differ a little in size: an eighth more lets the next ones use this buffer again.
        size += size // 8
        return torch.empty(size, dtype=torch.uint8) if self.stream is None else pinned(size)

    def put(self, key: str, row: int, states: torch.Tensor) -> None:
        """Store one sample, states [T, layers, hidden] on the engine's device, in the engine's dtype.

        Returns before an asynchronous copy is done; the source tensor may be freed, its memory stays reserved.
        """
        shard = self._open.get(key)
        if shard is None:
            raise RuntimeError(f"sample {row} came for shard {key}, which is not open: it came twice or was never asked for")
        buffer = shard.buffer
        first, last = buffer.span(row)
        if states.shape[0] != last - first:
            raise RuntimeError(f"sample {row} of shard {key} has {last - first} tokens, the engine gave {states.shape[0]}")
        if self.stream is None:
            buffer.put(row, states)
        else:
            self._put_async(shard, row, states)
        whole = not buffer.missing
        if whole:
            del self._open[key]
        with self._lock:
            if shard.busy or not (whole or buffer.pending >= STREAM_BYTES):
                return
            shard.busy = True
        self._threads.submit(self._stream, shard)

    def _put_async(self, shard: _Open, row: int, states: torch.Tensor) -> None:
        buffer = shard.buffer
        first, last = buffer.span(row)
        scale = None
        if buffer.scales is not None:
            states, scale = quantise_fp8(states)
            checked = scale
        else:
            states = states.to(buffer.states.dtype)
            checked = states
        finite = torch.isfinite(checked).all().to(torch.uint8)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            pairs = [(buffer.rows(row), states), (shard.finite[row], finite)]
            if scale is not None:
                pairs.append((buffer.scales[first:last], scale))
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
                source.record_stream(self.stream)
            shard.copied[row] = torch.cuda.Event()
            shard.copied[row].record(self.stream)
        buffer.filled(row)

    def _stream(self, shard: _Open) -> None:
        """Write what has come of a shard; the last call makes its file durable. At most one thread is at a shard."""
        buffer, on_cpu = shard.buffer, self.stream is None
        try:
            while True:
                ready = buffer.ready
                if not on_cpu:
                    self._wait(shard, ready)
                if ready == buffer.samples:
                    done = buffer.finish(check_finite=on_cpu)
                    with self._lock:
                        self._finished.append(done)
                        self._free.append(shard.storage)
                    return
                buffer.stream(ready, check_finite=on_cpu)
                with self._lock:
                    if buffer.ready < buffer.samples and buffer.pending < STREAM_BYTES:
                        shard.busy = False
                        return
        except BaseException as e:
            buffer.abort()
            with self._lock:
                self._error = self._error or e

    @staticmethod
    def _wait(shard: _Open, ready: int) -> None:
        """Wait for the copies of the samples before `ready`; raises UserError where one is not finite."""
        for row in range(shard.buffer.written, ready):
            shard.copied.pop(row).synchronize()
            if not shard.finite[row]:
                raise UserError(NOT_FINITE.format(row=row, key=shard.buffer.request.key))

    def poll(self) -> Report:
        """Shards finished since the last call, and the first error of a writer thread."""
        with self._lock:
            report = Report(self._finished, incomplete={k: sorted(s.buffer.missing) for k, s in self._open.items()})
            self._finished = []
            error = self._error
        if isinstance(error, UserError):
            report.error = ("user", str(error), 0)
        elif isinstance(error, OSError):
            report.error = ("os", error.strerror or str(error), error.errno or 0)
        elif error is not None:
            report.error = ("other", f"{type(error).__name__}: {error}", 0)
        return report

    def close(self) -> None:
        """Wait for the writes that were begun; shards that are not whole leave no file."""
        self._threads.shutdown(wait=True)
        for shard in self._open.values():
            shard.buffer.abort()
        self._open.clear()
        self._free.clear()
