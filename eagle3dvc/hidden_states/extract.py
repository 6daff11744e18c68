"""The extract stage: every prompt shard gets its hidden-state shard; only those that exist nowhere are computed."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from eagle3dvc import engines
from eagle3dvc.errors import UserError
from eagle3dvc.hidden_states.format import SUFFIX, FinishedShard, ShardRequest, shard_key
from eagle3dvc.hidden_states.store import Store
from eagle3dvc.params import Params
from eagle3dvc.progress import ShardProgress
from eagle3dvc.prompts.shards import shard_files
from eagle3dvc.verifier import VerifierInfo, layer_ids, load_head, load_info


@dataclass(frozen=True)
class Planned:
    """A prompt shard and the name of its hidden-state shard."""

    prompts: Path
    key: str
    name: str
    samples: int
    tokens: int


def read_token_ids(path: Path) -> list[np.ndarray]:
    """The token ids of a prompt shard: int32 arrays [T_i], in order."""
    column = pq.read_table(path, columns=["token_ids"])["token_ids"].combine_chunks()
    values, offsets = column.values.to_numpy(), column.offsets.to_numpy()
    return [values[a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]


def plan(params: Params, info: VerifierInfo, ids: Sequence[int], prompts: str | Path) -> list[Planned]:
    """The hidden-state shards that the prompt shards in `prompts` ask for, in order."""
    planned = []
    for f in shard_files(prompts):
        tokens = read_token_ids(f)
        key = shard_key(info.identity, ids, params.extract.stored_dtype, engines.numerics(params), tokens)
        planned.append(Planned(f, key, f"{f.stem}-{key}{SUFFIX}", len(tokens), sum(map(len, tokens))))
    if not planned:
        raise UserError(f"{prompts} holds no prompt shards: run `dvc repro prepare`")
    return planned


class Requests:
    """One request for each planned shard, of known number; token ids are read when the engine takes the request."""

    def __init__(
        self,
        planned: Sequence[Planned],
        store: Store,
        params: Params,
        info: VerifierInfo,
        ids: Sequence[int],
        engine: engines.Engine,
    ):
        self.planned, self.store, self.hidden_size = planned, store, info.hidden_size
        self.header = {
            "identity": info.identity,
            "layer_ids": list(ids),
            "layer_convention": "vllm",
            "stored_dtype": params.extract.stored_dtype,
            "numerics": {k: v for k, v in engines.numerics(params).items() if v is not None},
            "engine": engine.name,
            "engine_version": engine.version,
        }

    def __len__(self) -> int:
        return len(self.planned)

    def __iter__(self) -> Iterator[ShardRequest]:
        for p in self.planned:
            yield ShardRequest(p.key, read_token_ids(p.prompts), self.header, self.hidden_size, self.store.path(p.key))


def compute(
    params: Params,
    info: VerifierInfo,
    ids: Sequence[int],
    missing: Sequence[Planned],
    store: Store,
    log: dict[str, Any],
    engine: engines.Engine | None = None,
) -> Iterator[FinishedShard]:
    """Load the engine, prove it, and compute the missing shards; each is yielded when it is durable.

    engine: one that runs and is proven already (it wrote the answers) and that stays open.
    Raises UserError where what comes back is not what was asked: a shard missing, doubled or of another size.
    """
    started, own = time.monotonic(), engine is None
    engine = engine or engines.make(params, info, ids)
    try:
        if own:
            engine.prove(load_head(info.folder))
        log |= {"engine": engine.name, "engine_version": engine.version, "seconds_load": round(time.monotonic() - started, 3)}
        started, left = time.monotonic(), {p.key: p for p in missing}
        with ShardProgress("extract", len(missing), sum(p.tokens for p in missing)) as progress:
            engine.on_tokens = progress.tick
            for done in engine.extract(Requests(missing, store, params, info, ids, engine)):
                asked = left.pop(done.key, None)
                if asked is None or (asked.tokens, asked.samples) != (done.tokens, done.samples):
                    raise UserError(
                        f"engine {engine.name} gave back shard {done.key}, which was not asked for or has other samples"
                    )
                store.remember(done)
                progress.advance(done.tokens, done.bytes)
                yield done
        if left:
            raise UserError(
                f"engine {engine.name} never gave back {len(left)} shards, the first is {next(iter(left.values())).name}"
            )
        log["seconds_extract"] = round(time.monotonic() - started, 3)
        log |= getattr(engine, "stats", dict)()
    finally:
        if own:
            engine.close()


class Uploads:
    """Streams finished shards to the default remote while others are computed.

    A failed upload never ends the run: it is tried once more at the end and then reported; `dvc push` brings what is left.
    """

    def __init__(self, store: Store, enabled: bool):
        self.store, self.pushed, self.failed = store, 0, 0
        self._pool = None
        self._jobs: list[tuple[Future, FinishedShard]] = []
        if enabled:
            if store.dvc is None:
                raise UserError("extract.push_while_extracting needs a DVC repository with a default remote")
            _ = store.dvc.remote  # out of reach: said before hours of work, not after
            # two at a time hold memory to 2 x 2 x shard size on S3 and keep a 10 Gbit/s link busy
            self._pool = ThreadPoolExecutor(2, thread_name_prefix="push")

    def add(self, shard: FinishedShard) -> None:
        if self._pool:
            self._jobs.append((self._pool.submit(self.store.dvc.push, shard.path, shard.key, shard.md5), shard))

    def finish(self) -> None:
        if not self._pool:
            return
        for job, shard in self._jobs:
            try:
                try:
                    job.result()
                except Exception:
                    self.store.dvc.push(shard.path, shard.key, shard.md5)
                self.pushed += 1
            except Exception as e:
                self.failed += 1
                print(f"warning: shard {shard.key} was not pushed ({e}); `dvc push` will do it", file=sys.stderr)
        self._pool.shutdown()


def build(
    params: Params,
    log: dict[str, Any],
    out: str = "data/hidden_states",
    prompts: str = "data/prompts",
    verifier: str = "data/verifier",
) -> dict[str, Any]:
    """Fill `out` with one shard a prompt shard; returns the metrics and fills the log."""
    info = load_info(verifier)
    ids = layer_ids(info, params)
    planned = plan(params, info, ids, prompts)
    store = Store(out, params.extract.allow_recompute)
    target = Path(out)
    target.mkdir(parents=True, exist_ok=True)
    names = {p.name for p in planned}
    for stale in target.iterdir():  # left by a run outside DVC, which empties the folder itself
        if stale.name not in names or not stale.is_file():
            shutil.rmtree(stale) if stale.is_dir() and not stale.is_symlink() else stale.unlink()

    hits = store.find_all(p.key for p in planned)
    found = {key: path for key, (_, path) in hits.items()}
    origins = Counter(origin for origin, _ in hits.values())
    missing = {p.key: p for p in planned if p.key not in found}
    print(f"extract: {len(found)} shards found {dict(origins)}, {len(missing)} to compute", flush=True)

    md5s = {key: store.md5_of(path) for key, path in found.items()}
    uploads = Uploads(store, params.extract.push_while_extracting)
    try:
        if missing:
            for done in compute(params, info, ids, list(missing.values()), store, log):
                found[done.key], md5s[done.key] = done.path, done.md5
                uploads.add(done)
    finally:
        uploads.finish()

    size = 0
    for p in planned:
        dst = target / p.name
        if not (dst.exists() and dst.samefile(found[p.key])):  # what lies there may be damaged; what was found was opened
            dst.unlink(missing_ok=True)
            store.place(found[p.key], dst)
        size += dst.stat().st_size
    if store.dvc:
        store.dvc.save_md5([(target / p.name, md5s[p.key]) for p in planned if md5s[p.key]])
    extra = {f.name for f in target.iterdir()} ^ names
    if extra:
        raise UserError(
            f"{out} should hold exactly the planned shards but differs in {sorted(extra)[0]}: is another run writing there?"
        )

    tokens, computed = sum(p.tokens for p in planned), sum(p.tokens for p in missing.values())
    log |= {
        "shards_reused": len(planned) - len(missing),
        "shards_computed": len(missing),
        "reused_from": dict(origins),
        "tokens_computed": computed,
        "bytes_computed": sum((target / p.name).stat().st_size for p in missing.values()),
        "tokens_per_second": round(computed / log["seconds_extract"], 1) if log.get("seconds_extract") else None,
        "shards_pushed": uploads.pushed,
        "push_failures": uploads.failed,
    }
    return {
        "samples": sum(p.samples for p in planned),
        "tokens": tokens,
        "bytes": size,
        "bytes_per_token": round(size / tokens, 2),
        "shards": len(planned),
        "layer_ids": list(ids),
    }
