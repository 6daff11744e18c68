"""`eagle3dvc inspect PATH`: what is in a shard, a hidden-state cache, a prompt shard or a prompt folder."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from eagle3dvc.errors import UserError
from eagle3dvc.hidden_states import format as fmt


def _lengths(lengths: list[int] | np.ndarray) -> dict[str, float]:
    a = np.asarray(lengths)
    return {"min": int(a.min()), "median": float(np.median(a)), "mean": round(float(a.mean()), 1), "max": int(a.max())}


def _decode(token_ids: np.ndarray, mask: np.ndarray | None, verifier: str | Path) -> dict[str, Any]:
    """A sample as text; with a mask also the supervised spans, each decoded on its own."""
    if not (Path(verifier) / "verifier.json").exists():
        return {"token_ids": [int(t) for t in token_ids[:32]]}
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(verifier)
    shown: dict[str, Any] = {"text": tokenizer.decode(token_ids)}
    if mask is not None:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(mask, dtype=np.int8), [0]])))
        shown["supervised"] = [tokenizer.decode(token_ids[a:b]) for a, b in edges.reshape(-1, 2)]
    return shown


def _shards(files: list[Path], verifier: str | Path) -> dict[str, Any]:
    from eagle3dvc.hidden_states.reader import Shard

    shards = [Shard(f) for f in files]
    first, lengths = shards[0], np.concatenate([np.diff(s.row_offsets) for s in shards])
    states = sum(s.size for s in shards)
    identities = Counter(s.header["identity"] for s in shards)
    return {
        "kind": "hidden states",
        "identity": identities.most_common()[0][0] if len(identities) == 1 else dict(identities),
        "layer_ids": first.layer_ids,
        "hidden_size": first.hidden_size,
        "stored_dtype": first.header["stored_dtype"],
        "numerics": first.header["numerics"],
        "engines": dict(Counter(f"{s.header['engine']} {s.header['engine_version']}" for s in shards)),
        "shards": len(shards),
        "samples": len(lengths),
        "tokens": int(lengths.sum()),
        "lengths": _lengths(lengths),
        "bytes": states,
        "bytes_per_token": round(states / int(lengths.sum()), 2),
        "sample": {"file": files[0].name, "index": 0, **_decode(first.token_ids(0), _mask(files[0]), verifier)},
    }


def _mask(path: Path) -> np.ndarray | None:
    """The loss mask of a hidden-state shard's first sample, where the prompt shards lie beside the cache."""
    from eagle3dvc.prompts.shards import read_shard

    prompts = path.parent.parent / "prompts" / f"{path.name.rsplit('-', 1)[0]}.parquet"
    return read_shard(prompts)[0].loss_mask if prompts.exists() else None


def _prompts(files: list[Path], verifier: str | Path) -> dict[str, Any]:
    from eagle3dvc.prompts.shards import read_shard

    samples = [s for f in files for s in read_shard(f)]
    lengths = [len(s.token_ids) for s in samples]
    return {
        "kind": "prompts",
        "shards": len(files),
        "samples": len(samples),
        "tokens": sum(lengths),
        "supervised_tokens": int(sum(s.loss_mask.sum() for s in samples)),
        "lengths": _lengths(lengths),
        "by_source": dict(Counter(s.source for s in samples)),
        "by_split": dict(Counter(s.split for s in samples)),
        "bytes": sum(f.stat().st_size for f in files),
        "sample": {
            "file": files[0].name,
            "sample_id": samples[0].sample_id,
            **_decode(samples[0].token_ids, samples[0].loss_mask, verifier),
        },
    }


def inspect(path: str | Path, verifier: str | Path = "data/verifier") -> dict[str, Any]:
    """A summary of a shard file or a folder of shards; raises UserError for anything else."""
    path = Path(path)
    if path.is_dir():
        hidden = [f for f in sorted(path.glob(f"*{fmt.SUFFIX}")) if fmt.key_of_name(f.name)]
        prompts = sorted(path.glob("*.parquet"))
    else:
        hidden = [path] if fmt.key_of_name(path.name) else []
        prompts = [path] if path.suffix == ".parquet" else []
    if not path.exists():
        raise UserError(f"{path} does not exist: give a shard, or a folder such as data/hidden_states or data/prompts")
    if hidden:
        return _shards(hidden, verifier)
    if prompts:
        return _prompts(prompts, verifier)
    raise UserError(f"{path} holds neither hidden-state shards (*{fmt.SUFFIX} named by key) nor prompt shards (*.parquet)")


def show(summary: dict[str, Any], as_json: bool) -> None:
    """Print a summary as JSON or as a table."""
    if as_json:
        print(json.dumps(summary, indent=2, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for key, value in summary.items():
        if isinstance(value, dict):
            value = "\n".join(f"{k}: {v}" for k, v in value.items())
        table.add_row(key, f"{value:,}" if isinstance(value, int) else str(value))
    Console(markup=False, highlight=False).print(table)
