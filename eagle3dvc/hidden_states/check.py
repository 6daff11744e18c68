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
    """What a check found. bad: file -> reason. damaged: those of them whose own bytes are wrong, which a repair may remove; the
    others are whole but missing, surplus or of another verifier. samples and bytes: how much was read."""

    shards: int = 0
    samples: int = 0
    bytes: int = 0
    bad: dict[str, str] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)


class Foreign(UserError):
    """A shard that is whole but does not belong to these prompts or this verifier."""


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
    if identity is not None and head["identity"] != identity:
        raise Foreign(f"{path}: it was computed with verifier {head['identity']}, data/verifier is {identity}")
    if prompts is not None:
        samples = read_shard(prompts)
        if len(samples) != len(tokens) or any(not np.array_equal(s.token_ids, t) for s, t in zip(samples, tokens)):
            raise Foreign(f"{path}: its token ids are not those of {prompts}")
    return len(chosen), nbytes


def verify(
    folder: str | Path = "data/hidden_states",
    prompts: str | Path | None = "data/prompts",
    verifier: str | Path | None = "data/verifier",
    fraction: float = 1.0,
    jobs: int | None = None,
) -> Report:
    """Check every shard of a cache in parallel. Missing and surplus shards count as bad.

    prompts, verifier: what the shards are compared with; None leaves that comparison out. Raises UserError where a folder does
    not exist or holds no shard.
    """
    folder = Path(folder)
    files = sorted(folder.glob(f"*{fmt.SUFFIX}"))
    if not files:
        raise UserError(f"{folder} holds no hidden-state shards: run `dvc repro extract` or `dvc checkout`")
    for name, given, file in (("prompts", prompts, "manifest.json"), ("verifier", verifier, "verifier.json")):
        if (
            given is not None
            and not (Path(given) / file).exists()
            and not (name == "prompts" and any(Path(given).glob("*.parquet")))
        ):
            raise UserError(
                f"{given} holds no {file}, so nothing can be compared with it: give --{name} FOLDER, or --{name} '' to do without"
            )
    identity = None
    if verifier is not None:
        from eagle3dvc.verifier import load_info

        identity = load_info(verifier).identity
    report, by_stem = Report(), {}
    if prompts is not None:
        by_stem = {f.stem: f for f in shard_files(prompts)}
        for stem in sorted(by_stem.keys() - {f.name.rsplit("-", 1)[0] for f in files}):
            report.bad[str(folder / f"{stem}-*{fmt.SUFFIX}")] = "the prompt shard has no hidden-state shard"

    def one(path: Path) -> tuple[Path, int, int, str | None, bool]:
        stem = path.name.rsplit("-", 1)[0]
        surplus = prompts is not None and stem not in by_stem
        try:
            samples, nbytes = check_shard(path, by_stem.get(stem), fraction, identity)
            why = f"no prompt shard {stem} belongs to it" if surplus else None
            return path, samples, nbytes, why, False
        except (Damaged, ValueError, KeyError, TypeError, IndexError, RuntimeError) as e:
            return path, 0, 0, str(e).removeprefix(f"{path}: "), not path.is_dir()
        except (UserError, OSError) as e:  # another verifier, or a prompt shard that cannot be read
            return path, 0, 0, str(e).removeprefix(f"{path}: "), False

    with ThreadPoolExecutor(jobs or min(8, (os.cpu_count() or 1) * 2)) as pool:
        for path, samples, nbytes, why, damaged in pool.map(one, files):
            report.shards += 1
            report.samples += samples
            report.bytes += nbytes
            if why:
                report.bad[str(path)] = why
            if damaged:
                report.damaged.append(str(path))
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


def repair(damaged: list[str]) -> list[str]:
    """Remove damaged shards wherever this machine keeps them, so that the next `dvc repro` fetches or computes exactly those.

    A damaged object in DVC's cache would be checked out again as it is, so it goes too; a copy that is whole stays and is linked
    in again.
    """
    removed = []
    for name in damaged:
        for p in list(copies(Path(name))):
            if (p.exists() or p.is_symlink()) and (p == Path(name) or not _whole(p)):
                p.unlink()
                removed.append(str(p))
    return removed


def _whole(path: Path) -> bool:
    try:
        shard = Shard(path)
        for i in range(len(shard)):
            shard.check(i)
        return True
    except Damaged:
        return False
