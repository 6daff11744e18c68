"""`eagle3dvc convert`: a drafter trained anywhere, from one layout to the other, tensors bit for bit."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle3dvc.drafter import check, layouts
from eagle3dvc.errors import UserError
from eagle3dvc.params import MOST_DRAFT_TOKENS


def without_copies(d: layouts.Drafter, head: Any) -> layouts.Drafter:
    """The drafter without an embedding that is the verifier's own: engines share it, a copy only costs memory.

    The drafter's copy may be in a narrower dtype than the verifier's.
    """
    import torch

    embed = d.tensors.get("embed_tokens.weight")
    if embed is None or not torch.equal(embed.float(), head.embed.to(embed.dtype).float()):
        return d
    return replace(d, tensors={k: t for k, t in d.tensors.items() if k != "embed_tokens.weight"})


def convert(
    src: str | Path,
    to: str,
    out: str | Path,
    layer_ids: list[int] | None = None,
    verifier_name: str | None = None,
    speculative_tokens: int | None = None,
    verifier: str | Path | None = None,
) -> layouts.Drafter:
    """Convert the drafter in `src` (safetensors, single or sharded) to layout `to` in the new folder `out`.

    layer_ids (vLLM's convention: SGLang's plus one) and verifier_name (public id) are for drafters that do not say them. The
    probe, a statement about the tensors, goes along. With `verifier` (its data/verifier folder) an embedding that is a copy of the
    verifier's is left out, as engines share it. Raises UserError and leaves nothing.
    """
    src, out = Path(src), Path(out)
    if to not in layouts.LAYOUTS:
        raise UserError(f"--to {to}: the layouts are {' and '.join(layouts.LAYOUTS)}")
    if os.path.lexists(out):
        raise UserError(f"{out} exists already: give a folder that does not, or remove it")
    if speculative_tokens is not None and not 1 <= speculative_tokens <= MOST_DRAFT_TOKENS:
        raise UserError(f"--draft-tokens {speculative_tokens} must be from 1 to {MOST_DRAFT_TOKENS}")
    if verifier_name is not None:
        layouts.check_verifier_name(verifier_name, "")
    was = check.provenance(src)  # refuses what was changed since: the copy would be sealed anew
    d = layouts.read(src, layer_ids=layer_ids, verifier=verifier_name)
    if not d.verifier:
        raise UserError(f"{src} does not name its verifier: give --verifier-name, the public id of the model")
    if speculative_tokens is not None:
        d = replace(d, speculative_tokens=speculative_tokens)
    if verifier is not None:
        d = _fit(d, src, verifier)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))  # of its own: two conversions may run
    except OSError as e:
        raise UserError(f"{out} cannot be made ({e.strerror})") from None
    try:
        _write(d, work / out.name, to, src, was)
        (work / out.name).rename(out)
    except UserError as e:
        raise UserError(str(e).replace(str(work / out.name), str(src))) from None  # what is wrong came from there
    except OSError as e:
        raise UserError(f"{out} cannot be written ({e.strerror})") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return d


def _fit(d: layouts.Drafter, src: Path, verifier: str | Path) -> layouts.Drafter:
    """The drafter without copies of this verifier's tensors; UserError where it is not the verifier of this drafter."""
    from eagle3dvc.verifier import load_head, load_info

    head, layers = load_head(verifier), load_info(verifier).num_layers
    hidden = d.target_hidden_size or d.decoder["hidden_size"]
    if tuple(head.lm_head.shape) != (d.vocab_size, hidden):
        raise UserError(
            f"{src} is a drafter for a verifier with vocabulary {d.vocab_size} and hidden size {hidden}, {verifier} has "
            f"{head.lm_head.shape[0]} and {head.lm_head.shape[1]}: give the folder of its own verifier"
        )
    if d.aux_layer_ids[-1] > layers:
        raise UserError(
            f"{src}: auxiliary layers {list(d.aux_layer_ids)} (vLLM's ids), {verifier} has {layers} layers: correct --layer-ids "
            "or give the folder of its own verifier"
        )
    return without_copies(d, head)


def _write(d: layouts.Drafter, folder: Path, to: str, src: Path, was: dict[str, Any]) -> None:
    """The whole new folder, checked; `was` is what the source's provenance says of the verifier."""
    layouts.write(d, folder, to)
    if layouts.read(folder).decoder != d.decoder:
        raise UserError(f"{src}: its configuration does not survive the {to} layout; this is a bug, please report it")
    layouts.check_config(layouts.read_config(folder), d, to, src)  # keys that came along and that engines obey
    same = was if was.get("name") == d.verifier else {}
    record = {"name": d.verifier, "revision": same.get("revision"), "identity": same.get("identity")}
    check.write_provenance(folder, d, record)
    if (src / check.PROBE).is_file():
        shutil.copyfile(src / check.PROBE, folder / check.PROBE)
        check.verify_export(folder)
