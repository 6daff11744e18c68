"""Prompt shards: data/prompts/00000.parquet ... and manifest.json, written and read here (docs/formats.md).

The same samples give the same bytes, whenever and wherever they are written: no time, no path, no statistics, fixed
compression. So the shards of 1,000 samples are a prefix of those of 100,000, and DVC stores and moves only what is new.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eagle3dvc.errors import UserError

FORMAT = 1
TRAIN, HELDOUT = "train", "heldout"


@dataclass(frozen=True, slots=True)
class Sample:
    """One tokenised conversation; `loss_mask[t]` is true where token t is one the drafter learns to predict."""

    sample_id: str  # 32 hex digits, see sample_id()
    token_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T]
    source: str
    split: str  # "train" or "heldout"


def sample_id(token_ids: np.ndarray, loss_mask: np.ndarray) -> str:
    """xxh3_128 (32 hex digits) of the token ids (little-endian int32) followed by the mask (one byte a token)."""
    import xxhash

    return xxhash.xxh3_128_hexdigest(token_ids.astype("<i4").tobytes() + loss_mask.astype(np.uint8).tobytes())


def split_of(sample_id: str, heldout_fraction: float) -> str:
    """The split a sample belongs to: a function of its id alone, so it never moves when samples are added or reordered.

    Raising the fraction only ever moves samples from train to heldout.
    """
    return HELDOUT if int(sample_id[:16], 16) < heldout_fraction * 2**64 else TRAIN


def _schema():
    import pyarrow as pa

    return pa.schema(
        [
            ("sample_id", pa.string()),
            ("token_ids", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.bool_())),
            ("source", pa.string()),
            ("split", pa.string()),
        ]
    )


def write_shard(path: str | Path, samples: list[Sample]) -> None:
    """Write one shard; the same samples always give the same bytes. Raises UserError where it would exceed 2^31 tokens."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    offsets = np.concatenate([[0], np.cumsum([len(s.token_ids) for s in samples])])
    if offsets[-1] >= 2**31:
        raise UserError(f"{path}: a shard of {offsets[-1]} tokens is too large: lower prepare.samples_per_shard")
    offsets = pa.array(offsets.astype(np.int32))
    tokens = np.concatenate([s.token_ids for s in samples]).astype(np.int32)
    mask = np.concatenate([s.loss_mask for s in samples]).astype(bool)
    table = pa.Table.from_arrays(
        [
            pa.array([s.sample_id for s in samples], pa.string()),
            pa.ListArray.from_arrays(offsets, pa.array(tokens)),
            pa.ListArray.from_arrays(offsets, pa.array(mask)),
            pa.array([s.source for s in samples], pa.string()),
            pa.array([s.split for s in samples], pa.string()),
        ],
        schema=_schema(),
    )
    pq.write_table(
        table, path, compression="zstd", compression_level=3, use_dictionary=["source", "split"], write_statistics=False
    )


def read_shard(path: str | Path) -> list[Sample]:
    """Every sample of one shard, in order; arrays are read-only views. Raises UserError for a missing or damaged file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, memory_map=False)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: run `dvc repro prepare`") from None
    except (pa.ArrowException, OSError) as e:
        raise UserError(f"{path} is not a readable prompt shard ({e}): run `dvc repro -f prepare`".replace("\n", " ")) from None
    if not table.schema.equals(_schema()):
        raise UserError(
            f"{path} has the columns {', '.join(f'{f.name}: {f.type}' for f in table.schema)}, "
            f"not those of a prompt shard: run `dvc repro -f prepare`"
        )
    table = table.combine_chunks()
    ids, sources, splits = (table.column(name).to_pylist() for name in ("sample_id", "source", "split"))
    if not ids:
        return []
    tokens, mask = (table.column(name).chunk(0) for name in ("token_ids", "loss_mask"))
    offsets = tokens.offsets.to_numpy()
    if not tokens.offsets.equals(mask.offsets):
        raise UserError(f"{path}: token_ids and loss_mask differ in length: run `dvc repro -f prepare`")
    token_values, mask_values = tokens.values.to_numpy(), mask.values.to_numpy(zero_copy_only=False)
    return [
        Sample(ids[i], token_values[a:b], mask_values[a:b], sources[i], splits[i])
        for i, (a, b) in enumerate(zip(offsets, offsets[1:]))
    ]


def shard_files(folder: str | Path = "data/prompts") -> list[Path]:
    """The shards of a folder in sample order. Raises UserError where there is none."""
    files = sorted((f for f in Path(folder).glob("*.parquet") if f.stem.isdigit()), key=lambda f: int(f.stem))
    if not files:
        raise UserError(f"{folder} holds no prompt shard: run `dvc repro prepare`")
    return files


def iter_samples(folder: str | Path = "data/prompts", split: str | None = None) -> Iterator[Sample]:
    """Samples of all shards in order, those of one split if given; one shard in memory at a time."""
    for path in shard_files(folder):
        yield from (s for s in read_shard(path) if split in (None, s.split))


def read_manifest(folder: str | Path = "data/prompts") -> dict:
    """The manifest of a prompts folder. Raises UserError where it is missing or of another format."""
    path = Path(folder) / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: run `dvc repro prepare`") from None
    except ValueError as e:
        raise UserError(f"{path} is not JSON ({e}): run `dvc repro -f prepare`") from None
    if manifest.get("format") != FORMAT:
        raise UserError(f"{path} has format {manifest.get('format')}, this version reads {FORMAT}: run `dvc repro -f prepare`")
    return manifest


class ShardWriter:
    """Writes samples into numbered shards of `samples_per_shard`; the last one may be shorter."""

    def __init__(self, folder: Path, samples_per_shard: int):
        self.folder, self.samples_per_shard = folder, samples_per_shard
        self.shards: list[dict] = []  # what the manifest says of each
        self._pending: list[Sample] = []

    def add(self, sample: Sample) -> None:
        self._pending.append(sample)
        if len(self._pending) == self.samples_per_shard:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as one shard; call once more at the end."""
        if not self._pending:
            return
        name = f"{len(self.shards):05d}.parquet"
        write_shard(self.folder / name, self._pending)
        tokens = sum(len(s.token_ids) for s in self._pending)
        self.shards.append({"file": name, "samples": len(self._pending), "tokens": tokens})
        self._pending = []
