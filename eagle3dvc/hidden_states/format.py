"""The hidden-state shard: one safetensors file holding the states of many samples. Writer and the pieces a reader shares.

Layout (docs/formats.md, format 2). Tensors in file order, all little-endian:

    offsets        int64   [samples + 1]          first row of each sample; offsets[-1] = tokens
    token_ids      int32   [tokens]
    hidden_states  stored  [tokens, layers, hidden]
    padding        uint8   [0 to 7]               zeros, so that the next tensor starts on 8 bytes
    checksums      uint64  [samples]              xxh3_64 of a sample's state bytes, scale bytes and token bytes
    seal           uint64  [1]                    xxh3_64 of header, offsets, padding and checksums
    scales         float32 [tokens, layers]       float8 only: state = stored * scale

Everything before the states is known before the first one is computed, and all that is computed from them stands behind them, so
the file is written and its md5 taken while the states arrive. Every bit of it is under some checksum.

The header has ONE metadata key, `eagle3dvc`, a sorted JSON string: with several keys safetensors writes them in an order that
differs between processes, so the same shard would get another md5.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from eagle3dvc.errors import UserError

FORMAT = 2
KEY_LENGTH = 24
SUFFIX = ".safetensors"
META = "eagle3dvc"
DTYPES = {
    "bfloat16": ("BF16", torch.bfloat16),
    "float16": ("F16", torch.float16),
    "float32": ("F32", torch.float32),
    "float8_e4m3fn": ("F8_E4M3", torch.float8_e4m3fn),
}
FP8_MAX = 448.0
_CHUNK = 32 << 20  # long calls without Python's lock: a thread that needs it often waits for the engine's thread each time


def shard_key(
    identity: str,
    layer_ids: Sequence[int],
    stored_dtype: str,
    numerics: dict[str, Any],
    token_ids: Sequence[np.ndarray],
) -> str:
    """24 hex digits that name a shard by all that its states depend on.

    That is: this format, the verifier's identity, the layer ids, the stored dtype, the numerics the engine computes in
    (dtype, quantisation, KV-cache dtype) and the token ids. Not: masks, positions in the data set, batch sizes, engines or
    their versions; a change of those never forces terabytes to be computed again.
    """
    lengths = [len(t) for t in token_ids]
    head = {
        "format": FORMAT,
        "identity": identity,
        "layer_ids": list(layer_ids),
        "stored_dtype": stored_dtype,
        "numerics": {k: v for k, v in numerics.items() if v is not None},
        "lengths": lengths,
    }
    h = hashlib.sha256(json.dumps(head, sort_keys=True, separators=(",", ":")).encode())
    for t in token_ids:
        h.update(np.ascontiguousarray(t, dtype="<i4").tobytes())
    return h.hexdigest()[:KEY_LENGTH]


def key_of_name(name: str) -> str | None:
    """The key in a shard's file name (`00000-<key>.safetensors` or `<key>.safetensors`), None for other files."""
    name = name.rsplit("/", 1)[-1]
    if not name.endswith(SUFFIX):
        return None
    key = name[: -len(SUFFIX)].rsplit("-", 1)[-1]
    return key if len(key) == KEY_LENGTH and all(c in "0123456789abcdef" for c in key) else None


@dataclass(frozen=True)
class ShardRequest:
    """One shard to compute.

    key: its content key. token_ids: int32 arrays [T_i], in shard order. header: what the file says of itself (identity,
    layer_ids, stored_dtype, numerics, engine, engine_version). hidden_size: H. path: where the finished file must stand.
    """

    key: str
    token_ids: list[np.ndarray]
    header: dict[str, Any]
    hidden_size: int
    path: Path

    @property
    def tokens(self) -> int:
        return sum(len(t) for t in self.token_ids)


@dataclass(frozen=True)
class FinishedShard:
    key: str
    path: Path
    md5: str
    bytes: int
    tokens: int
    samples: int


@dataclass
class Layout:
    """Where everything stands in a shard of given sample lengths; all positions in bytes from the start of the file."""

    header: bytes
    offsets_at: int
    tokens_at: int
    states_at: int
    padding_at: int
    checksums_at: int
    seal_at: int
    scales_at: int
    size: int
    row_offsets: np.ndarray = field(repr=False)

    @classmethod
    def of(cls, lengths: Sequence[int], layers: int, hidden: int, stored_dtype: str, header: dict[str, Any]) -> Layout:
        code, dtype = DTYPES[stored_dtype]
        n, rows = len(lengths), int(sum(lengths))
        states = dtype.itemsize * rows * layers * hidden
        padding = -(4 * rows + states) % 8
        sizes = [
            ("offsets", "I64", [n + 1], 8 * (n + 1)),
            ("token_ids", "I32", [rows], 4 * rows),
            ("hidden_states", code, [rows, layers, hidden], states),
            ("padding", "U8", [padding], padding),
            ("checksums", "U64", [n], 8 * n),
            ("seal", "U64", [1], 8),
        ]
        if stored_dtype == "float8_e4m3fn":
            sizes.append(("scales", "F32", [rows, layers], 4 * rows * layers))
        meta = json.dumps({**header, "format": FORMAT}, sort_keys=True, separators=(",", ":"))
        entries: dict[str, Any] = {"__metadata__": {META: meta}}
        at, starts = 0, {}
        for name, kind, shape, nbytes in sizes:
            entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + nbytes]}
            starts[name] = at
            at += nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % 64)  # the first tensor starts on a 64-byte boundary
        base = 8 + len(text)
        return cls(
            header=struct.pack("<Q", len(text)) + text,
            offsets_at=base,
            tokens_at=base + starts["token_ids"],
            states_at=base + starts["hidden_states"],
            padding_at=base + starts["padding"],
            checksums_at=base + starts["checksums"],
            seal_at=base + starts["seal"],
            scales_at=base + starts["seal"] + 8,
            size=base + at,
            row_offsets=np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))]).astype("<i8"),
        )


def seal_of(header_and_offsets: bytes | memoryview, padding_and_checksums: bytes | memoryview) -> int:
    """xxh3_64 over what no sample's checksum covers: header and offsets, then padding and checksums."""
    h = xxhash.xxh3_64(header_and_offsets)
    h.update(padding_and_checksums)
    return h.intdigest()


def sample_checksum(states: memoryview, scales: memoryview | None, tokens: memoryview) -> int:
    """xxh3_64 of one sample's state, scale and token bytes, in this order."""
    h = xxhash.xxh3_64(states)
    if scales is not None:
        h.update(scales)
    h.update(tokens)
    return h.intdigest()


def quantise_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., H] -> (float8_e4m3fn [..., H], float32 scales [...]); one scale a token and layer, the largest value maps to 448."""
    scale = x.abs().amax(-1).float().clamp_(min=1e-12) / FP8_MAX
    return (x.float() / scale.unsqueeze(-1)).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def fsync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class DurableFile:
    """A file that appears under its name only when it is whole and on the disk; the md5 is taken on the way.

    Written through `<name>.<pid>.tmp` beside it; `abort` removes that. Each piece is hashed while it is written: an md5 cannot be
    divided, so nothing else may stand in its way (0.6 GB/s, what one file can do).
    """

    def __init__(self, path: Path):
        self.path, self._tmp = path, path.with_name(f"{path.name}.{os.getpid()}.tmp")
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._file = open(self._tmp, "wb", buffering=0)  # noqa: SIM115 - closed by commit and abort

    def write(self, data: memoryview) -> None:
        """Append `data`; it may change as soon as this returns."""
        failed, stop = [], threading.Event()

        def hash_it() -> None:
            try:
                for start in range(0, len(data), _CHUNK):
                    if stop.is_set():
                        return
                    self._md5.update(data[start : start + _CHUNK])
            except BaseException as e:  # an error of hashing is an error of writing
                failed.append(e)

        hashing = threading.Thread(target=hash_it, name="md5")
        hashing.start()
        try:
            for start in range(0, len(data), _CHUNK):
                chunk = data[start : start + _CHUNK]
                while chunk:
                    chunk = chunk[self._file.write(chunk) :]
        except BaseException:
            stop.set()
            raise
        finally:
            hashing.join()
        if failed:
            raise failed[0]

    def commit(self) -> str:
        """fsync, rename, fsync of the folder; returns the md5 of all that was written."""
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._tmp, self.path)
        fsync_dir(self.path.parent)
        return self._md5.hexdigest()

    def abort(self) -> None:
        self._file.close()
        self._tmp.unlink(missing_ok=True)


class ShardBuffer:
    """The bytes of one shard in memory, laid out as the file will be; samples may be filled in any order.

    storage: a preallocated uint8 tensor of at least `nbytes(request)` (pinned memory that is used again and again), else one
    is allocated. `stream()` writes what has come so far, `finish()` the rest; until then no file with a final name exists.
    One thread fills, one thread (it may be another) streams and finishes.
    """

    def __init__(self, request: ShardRequest, storage: torch.Tensor | None = None):
        self.request = request
        self.stored = request.header["stored_dtype"]
        self.layers = len(request.header["layer_ids"])
        self._dtype = DTYPES[self.stored][1]
        self.layout = self._layout(request)
        size = self.layout.size
        if storage is None:
            storage = torch.empty(size, dtype=torch.uint8)
        elif storage.numel() < size:
            raise ValueError(f"shard needs {size} bytes, the buffer has {storage.numel()}")
        self.bytes = storage[:size]
        view, at, rows = self._view, self.layout, int(self.layout.row_offsets[-1])
        self.states = view(at.states_at, at.padding_at, self._dtype).view(rows, self.layers, request.hidden_size)
        self.scales = None
        if self.stored == "float8_e4m3fn":
            self.scales = view(at.scales_at, size, torch.float32).view(rows, self.layers)
        tokens = view(at.tokens_at, at.states_at, torch.int32).numpy()
        np.concatenate([np.asarray(t, dtype="<i4") for t in request.token_ids], out=tokens)
        raw = self.bytes.numpy()
        raw[: at.offsets_at] = np.frombuffer(at.header, dtype=np.uint8)
        raw[at.offsets_at : at.tokens_at].view("<i8")[:] = at.row_offsets
        raw[at.padding_at : at.checksums_at] = 0
        self.samples = len(request.token_ids)
        self.missing = set(range(self.samples))
        self.ready = 0  # samples 0 .. ready - 1 are filled
        self.written = 0  # samples 0 .. written - 1 are in the file
        self._file: DurableFile | None = None

    @staticmethod
    def _layout(request: ShardRequest) -> Layout:
        header = {**request.header, "key": request.key}
        lengths = [len(t) for t in request.token_ids]
        layers = len(request.header["layer_ids"])
        return Layout.of(lengths, layers, request.hidden_size, request.header["stored_dtype"], header)

    @classmethod
    def nbytes(cls, request: ShardRequest) -> int:
        """Size of the finished file in bytes."""
        return cls._layout(request).size

    def _view(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        return self.bytes[start:stop].view(dtype) if stop > start else torch.empty(0, dtype=dtype)

    def span(self, i: int) -> tuple[int, int]:
        """First and past-the-last row of sample i."""
        return int(self.layout.row_offsets[i]), int(self.layout.row_offsets[i + 1])

    def rows(self, i: int) -> torch.Tensor:
        """The rows of sample i, [T_i, layers, hidden] in the stored dtype, to be filled; call `filled(i)` after that."""
        a, b = self.span(i)
        return self.states[a:b]

    def filled(self, i: int) -> None:
        if i not in self.missing:
            raise RuntimeError(f"sample {i} of shard {self.request.key} came twice")
        self.missing.discard(i)
        while self.ready < self.samples and self.ready not in self.missing:
            self.ready += 1

    def put(self, i: int, x: torch.Tensor) -> None:
        """Store x [T_i, layers, hidden] as sample i, converted to the stored dtype (and its scales)."""
        if self.scales is not None:
            a, b = self.span(i)
            x, scale = quantise_fp8(x)
            self.scales[a:b].copy_(scale)
        self.rows(i).copy_(x)
        self.filled(i)

    @property
    def pending(self) -> int:
        """Bytes of states that `stream` could write now."""
        rows = self.layout.row_offsets
        return int(rows[self.ready] - rows[self.written]) * self.layers * self.request.hidden_size * self._dtype.itemsize

    def stream(self, last: int, check_finite: bool = True) -> None:
        """Checksum and write samples `written` .. `last - 1`; last is at most `ready`.

        Raises UserError where a state is not finite, OSError of the disk; call `abort` then.
        """
        r, at = self.request, self.layout
        raw = self.bytes.numpy()
        whole = memoryview(raw)
        if self._file is None:
            self._file = DurableFile(r.path)
            self._file.write(whole[: at.states_at])
        row = self.layers * r.hidden_size * self._dtype.itemsize
        sums = raw[at.checksums_at : at.seal_at].view("<u8")
        first = self.written
        for i in range(first, last):
            a, b = self.span(i)
            if check_finite:
                x = self.scales[a:b] if self.scales is not None else self.states[a:b]
                ok = torch.isfinite(x).all() and not (self.scales is not None and self.states[a:b].float().isnan().any())
                if not ok:
                    raise UserError(
                        f"sample {i} of shard {r.key} has hidden states that are not finite: the verifier overflows in "
                        f"{r.header.get('numerics', {}).get('dtype')} or is damaged; try extract.dtype float32 or bfloat16"
                    )
            states = whole[at.states_at + a * row : at.states_at + b * row]
            scales = whole[at.scales_at + 4 * a * self.layers : at.scales_at + 4 * b * self.layers]
            tokens = whole[at.tokens_at + 4 * a : at.tokens_at + 4 * b]
            sums[i] = sample_checksum(states, scales if self.scales is not None else None, tokens)
        start, stop = (at.states_at + int(at.row_offsets[i]) * row for i in (first, last))
        self._file.write(whole[start:stop])
        self.written = last

    def finish(self, check_finite: bool = True) -> FinishedShard:
        """Write what is left, checksums, seal and scales; fsync and rename. Nothing stays where it fails.

        Raises as `stream`, and RuntimeError where a sample was never filled.
        """
        r, at = self.request, self.layout
        if self.missing:
            self.abort()
            raise RuntimeError(f"shard {r.key}: samples {sorted(self.missing)[:5]} were never extracted")
        try:
            self.stream(self.ready, check_finite)
            raw = self.bytes.numpy()
            whole = memoryview(raw)
            raw[at.seal_at : at.seal_at + 8].view("<u8")[0] = seal_of(whole[: at.tokens_at], whole[at.padding_at : at.seal_at])
            self._file.write(whole[at.padding_at :])
            md5 = self._file.commit()
        except BaseException:
            self.abort()
            raise
        return FinishedShard(r.key, r.path, md5, at.size, int(at.row_offsets[-1]), self.samples)

    def abort(self) -> None:
        """Remove what was written of an unfinished file."""
        if self._file is not None:
            self._file.abort()
