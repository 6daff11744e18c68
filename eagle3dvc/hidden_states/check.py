"""`eagle3dvc verify`: re-read shards at disk speed and compare everything that can be compared; repair by removing the bad."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from eagle3dvc.errors import UserError
from eagle3dvc.hidden_states import format as fmt
from eagle3dvc.hidden_states.reader import Damaged, Shard
from eagle3dvc.prompts.shards import read_shard, shard_files


@dataclass
class Report:
    """What a check found. bad: file -> reason. samples and bytes: how much was read."""

    shards: int = 0
    samples: int = 0
    bytes: int = 0
    bad: dict[str, str] = field(default_factory=dict)


def check_shard(path: Path, prompts: Path | None, fraction: float = 1.0, identity: str | None = None) -> tuple[int, int]:
    """Check one shard; returns (samples, bytes) read. Raises Damaged with the reason.

    Checked: size, seal of header and index, the key in the name against header and tokens, identity of the verifier; then of
    `fraction` of the samples (all at 1.0): checksum, finiteness; and of all samples: token ids against the prompt shard.
    """
    shard = Shard(path)
    head = shard.header
    tokens = [shard.token_ids(i) for i in range(len(shard))]
    key = fmt.shard_key(head["identity"], head["layer_ids"], head["stored_dtype"], head["numerics"], tokens)
    if not key == head["key"] == fmt.key_of_name(path.name):
        raise Damaged(
            f"{path}: its name, header and token ids do not agree on its key ({fmt.key_of_name(path.name)}, {head['key']}, {key})"
        )
    if identity is not None and head["identity"] != identity:
        raise Damaged(f"{path}: it was computed with verifier {head['identity']}, data/verifier is {identity}")
    if prompts is not None:
        samples = read_shard(prompts)
        if len(samples) != len(tokens) or any(not np.array_equal(s.token_ids, t) for s, t in zip(samples, tokens)):
            raise Damaged(f"{path}: its token ids are not those of {prompts}")
    chosen = range(len(shard))
    if fraction < 1.0:
        chosen = random.sample(chosen, max(1, round(fraction * len(shard))))
    nbytes = 0
    for i in chosen:
        shard.check(i)
        x = shard.states(i)
        if not torch.isfinite(x).all():
            raise Damaged(f"{path}: sample {i} has states that are not finite")
        nbytes += x.numel() * shard.stored(i).element_size()
        shard.release(i)
    return len(chosen), nbytes


def verify(
    folder: str | Path = "data/hidden_states",
    prompts: str | Path | None = "data/prompts",
    verifier: str | Path | None = "data/verifier",
    fraction: float = 1.0,
    jobs: int | None = None,
) -> Report:
    """Check every shard of a cache in parallel. Missing and surplus shards count as bad.

    Raises UserError where the folder does not exist or holds no shard.
    """
    folder = Path(folder)
    files = sorted(folder.glob(f"*{fmt.SUFFIX}"))
    if not files:
        raise UserError(f"{folder} holds no hidden-state shards: run `dvc repro extract` or `dvc checkout`")
    identity = None
    if verifier is not None and (Path(verifier) / "verifier.json").exists():
        from eagle3dvc.verifier import load_info

        identity = load_info(verifier).identity
    report, by_stem = Report(), {}
    if prompts is not None and Path(prompts).is_dir():
        by_stem = {f.stem: f for f in shard_files(prompts)}
        for stem in sorted(by_stem.keys() - {f.name.rsplit("-", 1)[0] for f in files}):
            report.bad[str(folder / f"{stem}-*{fmt.SUFFIX}")] = "the prompt shard has no hidden-state shard"
    else:
        prompts = None

    def one(path: Path) -> tuple[Path, int, int, str | None]:
        stem = path.name.rsplit("-", 1)[0]
        if prompts is not None and stem not in by_stem:
            return path, 0, 0, f"no prompt shard {stem} belongs to it"
        try:
            samples, nbytes = check_shard(path, by_stem.get(stem), fraction, identity)
            return path, samples, nbytes, None
        except Damaged as e:
            return path, 0, 0, str(e).removeprefix(f"{path}: ")
        except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as e:
            return path, 0, 0, f"it cannot be read ({type(e).__name__}: {e})"

    with ThreadPoolExecutor(jobs or min(8, (os.cpu_count() or 1) * 2)) as pool:
        for path, samples, nbytes, why in pool.map(one, files):
            report.shards += 1
            report.samples += samples
            report.bytes += nbytes
            if why:
                report.bad[str(path)] = why
    return report


def copies(path: Path) -> Iterator[Path]:
    """Every place on this machine that holds the bytes of a bad shard: the file, resumable work, DVC's cache object."""
    from eagle3dvc import stage
    from eagle3dvc.hidden_states.dvc_repo import DvcRepo

    key = fmt.key_of_name(path.name)
    yield path
    yield stage.work_dir("shards") / f"{key}{fmt.SUFFIX}"
    if dvc := DvcRepo.open():
        for md5 in {md5 for name, md5 in dvc.listings() if key and fmt.key_of_name(name) == key}:
            yield dvc.object_path(md5)
        if path.is_symlink():
            yield path.resolve()


def repair(bad: dict[str, str]) -> list[str]:
    """Remove bad shards wherever this machine keeps them, so that the next `dvc repro` fetches or computes exactly those.

    A shard that DVC's cache still held would be checked out again as it is, damage included; so its object goes too.
    """
    removed = []
    for name in bad:
        if "*" in name:
            continue
        for p in list(copies(Path(name))):
            if p.exists() or p.is_symlink():
                p.unlink()
                removed.append(str(p))
    return removed
