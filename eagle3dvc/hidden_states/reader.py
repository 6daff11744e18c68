"""Reading shards: memory-mapped, zero-copy, by sample, checked on first use.

:class:`Shard` is one file, :class:`HiddenStates` a whole cache joined with its prompt shards. Files are mapped and their
descriptors closed, so 10,000 shards need no raised limit; both classes pickle (a worker maps the files itself).
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from eagle3dvc.errors import UserError
from eagle3dvc.hidden_states import format as fmt
from eagle3dvc.prompts import shards as prompt_shards

REPAIR = "run `eagle3dvc verify --repair` and then `dvc repro`"
_MAX_HEADER = 16 << 20
_libc = ctypes.CDLL(None)


class Damaged(UserError):
    """A shard that is truncated, altered or not a shard; the message names the file and the repair."""


class Shard:
    """One hidden-state shard. Opening it checks the size and the seal (header and index), not yet the states.

    Attributes: header (dict: identity, layer_ids, stored_dtype, numerics, key, ...), row_offsets int64 [n+1],
    checksums uint64 [n]. Raises Damaged.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self._open()
        except Damaged:
            raise
        except FileNotFoundError:
            raise Damaged(f"{self.path} does not exist (a dangling link?): {REPAIR}") from None
        except OSError as e:
            raise self._damaged(f"it cannot be read ({e.strerror})") from None
        except (ValueError, KeyError, IndexError, TypeError, UnicodeDecodeError, struct.error, OverflowError) as e:
            raise self._damaged(f"its header or index is damaged ({type(e).__name__})") from None

    def _damaged(self, what: str) -> Damaged:
        return Damaged(f"{self.path}: {what}: {REPAIR}")

    def _open(self) -> None:
        with open(self.path, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            prefix = f.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if not 2 <= length <= min(size - 8, _MAX_HEADER):
                raise self._damaged("it is truncated or not a hidden-state shard")
            text = f.read(length)
        entries = json.loads(text)
        self.header = json.loads(entries["__metadata__"][fmt.META])
        if self.header["format"] != fmt.FORMAT:
            raise self._damaged(f"it has format {self.header['format']}, this version reads {fmt.FORMAT}")
        self.layer_ids: list[int] = self.header["layer_ids"]
        rows, layers, self.hidden_size = entries["hidden_states"]["shape"]
        ends = {name: 8 + length + e["data_offsets"][1] for name, e in entries.items() if name != "__metadata__"}
        starts = {name: 8 + length + e["data_offsets"][0] for name, e in entries.items() if name != "__metadata__"}
        if max(ends.values()) != size:
            raise self._damaged(f"it has {size} bytes where its header says {max(ends.values())}")
        self._map = torch.UntypedStorage.from_file(str(self.path), shared=False, nbytes=size)
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(self._map)
        raw = self._bytes.numpy()
        whole = memoryview(raw)
        seal = fmt.seal_of(whole[: ends["offsets"]], whole[starts["padding"] : ends["checksums"]])
        if seal != int(raw[starts["seal"] : ends["seal"]].view("<u8")[0]):
            raise self._damaged("its header or index does not match its seal")
        dtype = fmt.DTYPES[self.header["stored_dtype"]][1]
        self.row_offsets = raw[starts["offsets"] : ends["offsets"]].view("<i8")
        self.checksums = raw[starts["checksums"] : ends["checksums"]].view("<u8")
        self._tokens = raw[starts["token_ids"] : ends["token_ids"]].view("<i4")
        states = self._bytes[starts["hidden_states"] : ends["hidden_states"]]
        self._states = (states.view(dtype) if rows else torch.empty(0, dtype=dtype)).view(rows, layers, self.hidden_size)
        self._scales = None
        if "scales" in starts:
            self._scales = self._bytes[starts["scales"] : ends["scales"]].view(torch.float32).view(rows, layers)
        self.size = size

    def __len__(self) -> int:
        return len(self.checksums)

    def __getstate__(self):
        return {"path": self.path}

    def __setstate__(self, state):
        self.__init__(state["path"])

    def span(self, i: int) -> tuple[int, int]:
        return int(self.row_offsets[i]), int(self.row_offsets[i + 1])

    def token_ids(self, i: int) -> np.ndarray:
        """int32 [T_i], a view of the file."""
        a, b = self.span(i)
        return self._tokens[a:b]

    def stored(self, i: int) -> torch.Tensor:
        """[T_i, layers, hidden] as stored, a view of the file; must not be written to."""
        a, b = self.span(i)
        return self._states[a:b]

    def states(self, i: int) -> torch.Tensor:
        """[T_i, layers, hidden]: a view as stored, or for float8 the values in bfloat16."""
        x = self.stored(i)
        if self._scales is None:
            return x
        a, b = self.span(i)
        return (x.float() * self._scales[a:b].unsqueeze(-1)).to(torch.bfloat16)

    def release(self, i: int) -> None:
        """Let go of the memory pages of sample i's states (they stay in the page cache), so that a process that copies samples
        into batches does not grow to the size of the cache. Views of the sample stay valid."""
        stored = self.stored(i)
        start, end = stored.data_ptr(), stored.data_ptr() + stored.numel() * stored.element_size()
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)

    def check(self, i: int) -> None:
        """Compare sample i's bytes with its checksum; raises Damaged."""
        a, b = self.span(i)
        scales = None if self._scales is None else memoryview(self._scales[a:b].numpy()).cast("B")
        states = memoryview(self.stored(i).view(torch.uint8).numpy()).cast("B")
        if fmt.sample_checksum(states, scales, memoryview(self.token_ids(i)).cast("B")) != int(self.checksums[i]):
            raise self._damaged(f"sample {i} does not match its checksum")


@dataclass(frozen=True)
class Item:
    """One sample. hidden_states [T, layers, hidden] in ascending layer order; token_ids int64 [T]; loss_mask bool [T]."""

    hidden_states: torch.Tensor
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    sample_id: str
    source: str
    split: str


class HiddenStates:
    """Random access by sample to a hidden-state cache and the prompt shards it was made from.

    Sample i of the cache is sample i of the prompt shards in file order. Raises UserError where the two do not belong
    together (missing or extra shards, other tokens), Damaged where bytes do not match their checksums.

    verify: compare each sample with its checksum the first time it is read.
    """

    def __init__(self, folder: str | Path = "data/hidden_states", prompts: str | Path = "data/prompts", verify: bool = True):
        self.folder, self.prompts, self.verify = Path(folder), Path(prompts), verify
        files = {f.name.rsplit("-", 1)[0]: f for f in sorted(self.folder.glob(f"*{fmt.SUFFIX}"))}
        wanted = {f.stem: f for f in prompt_shards.shard_files(self.prompts)}
        if files.keys() != wanted.keys():
            odd = sorted(files.keys() ^ wanted.keys())
            raise UserError(
                f"{self.folder} and {self.prompts} do not belong together: shard {odd[0]} is in only one of them; run `dvc repro`"
            )
        if not files:
            raise UserError(f"{self.folder} holds no shards: run `dvc repro extract`")
        self._files = [files[stem] for stem in sorted(files)]
        self._shards: dict[int, Shard] = {}
        self._prompts: dict[int, list[prompt_shards.Sample]] = {}
        first = self._shard(0)
        self.layer_ids, self.identity, self.hidden_size = first.layer_ids, first.header["identity"], first.hidden_size
        self.stored_dtype: str = first.header["stored_dtype"]
        counts, lengths, splits = [], [], []
        for f in wanted.values():
            table = pq.read_table(f, columns=["token_ids", "split"])
            counts.append(len(table))
            lengths.append(pc.list_value_length(table["token_ids"]).to_numpy().astype(np.int64))
            splits.append(table["split"].to_numpy(zero_copy_only=False))
        self.starts = np.concatenate([[0], np.cumsum(counts)])
        self.lengths = np.concatenate(lengths)
        self._split_names = np.concatenate(splits)
        self._seen = np.zeros(len(self.lengths), dtype=bool)

    @cached_property
    def splits(self) -> dict[str, np.ndarray]:
        """split name -> indices of its samples, ascending."""
        return {s: np.flatnonzero(self._split_names == s) for s in ("train", "heldout")}

    def __len__(self) -> int:
        return len(self.lengths)

    def __getstate__(self):
        return {**self.__dict__, "_shards": {}, "_prompts": {}}

    def _shard(self, k: int) -> Shard:
        if (s := self._shards.get(k)) is None:
            s = Shard(self._files[k])
            if self._shards:
                first = next(iter(self._shards.values()))
                for what in ("identity", "layer_ids", "stored_dtype"):
                    if s.header[what] != first.header[what]:
                        raise UserError(
                            f"{s.path} has {what} {s.header[what]}, {first.path} has {first.header[what]}: one cache mixes two "
                            f"configurations; {REPAIR}"
                        )
            self._shards[k] = s
        return s

    def _samples(self, k: int) -> list[prompt_shards.Sample]:
        if (p := self._prompts.get(k)) is None:
            p = self._prompts[k] = prompt_shards.read_shard(self.prompts / f"{self._files[k].name.rsplit('-', 1)[0]}.parquet")
        return p

    def locate(self, i: int) -> tuple[int, int]:
        """(shard number, index in the shard) of sample i."""
        if not 0 <= i < len(self):
            raise IndexError(i)
        k = int(np.searchsorted(self.starts, i, side="right")) - 1
        return k, i - int(self.starts[k])

    def __getitem__(self, i: int) -> Item:
        k, j = self.locate(int(i))
        shard, samples = self._shard(k), self._samples(k)
        if len(shard) != len(samples):
            raise UserError(f"{shard.path} holds {len(shard)} samples, its prompt shard {len(samples)}: {REPAIR}")
        sample, tokens = samples[j], shard.token_ids(j)
        if self.verify and not self._seen[i]:
            shard.check(j)
            if not np.array_equal(tokens, sample.token_ids):
                raise UserError(f"{shard.path}: sample {j} was computed for other tokens than its prompt shard has: {REPAIR}")
            self._seen[i] = True
        return Item(
            hidden_states=shard.states(j),
            token_ids=torch.from_numpy(tokens.astype(np.int64)),
            loss_mask=torch.from_numpy(np.array(sample.loss_mask)),
            sample_id=sample.sample_id,
            source=sample.source,
            split=sample.split,
        )

    def release(self, i: int) -> None:
        """See :meth:`Shard.release`."""
        k, j = self.locate(int(i))
        self._shard(k).release(j)

    def __iter__(self) -> Iterator[Item]:
        return (self[i] for i in range(len(self)))
