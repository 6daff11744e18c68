"""`eagle3dvc convert`: a drafter trained anywhere, from one layout to the other, tensors bit for bit."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle3dvc.drafter import check, layouts
from eagle3dvc.errors import UserError


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
    from eagle3dvc.verifier import load_head

    src, out = Path(src), Path(out)
    if to not in layouts.LAYOUTS:
        raise UserError(f"--to {to}: the layouts are {' and '.join(layouts.LAYOUTS)}")
    if out.exists():
        raise UserError(f"{out} exists already: give a folder that does not, or remove it")
    if speculative_tokens is not None and speculative_tokens < 1:
        raise UserError(f"--draft-tokens {speculative_tokens} must be at least 1")
    was = check.provenance(src)  # refuses what was changed since: the copy would be sealed anew
    d = layouts.read(src, layer_ids=layer_ids, verifier=verifier_name)
    if not d.verifier:
        raise UserError(f"{src} does not name its verifier: give --verifier-name, the public id of the model")
    if speculative_tokens is not None:
        d = replace(d, speculative_tokens=speculative_tokens)
    if verifier is not None:
        head = load_head(verifier)
        hidden = d.target_hidden_size or d.decoder["hidden_size"]
        if tuple(head.lm_head.shape) != (d.vocab_size, hidden):
            raise UserError(
                f"{src} is a drafter for a verifier with vocabulary {d.vocab_size} and hidden size {hidden}, {verifier} has "
                f"{head.lm_head.shape[0]} and {head.lm_head.shape[1]}: give the folder of its own verifier"
            )
        d = without_copies(d, head)
    work = out.with_name(f".{out.name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    try:
        layouts.write(d, work, to)
        if layouts.read(work).decoder != d.decoder:
            raise UserError(f"{src}: its configuration does not survive the {to} layout; this is a bug, please report it")
        layouts.check_config(layouts.read_config(work), d, to, src)  # keys that came along and that engines obey
        same = was if was.get("name") == d.verifier else {}
        record = {"name": d.verifier, "revision": same.get("revision"), "identity": same.get("identity")}
        check.write_provenance(work, d, record)
        if (src / check.PROBE).is_file():
            shutil.copyfile(src / check.PROBE, work / check.PROBE)
            check.verify_export(work)
        out.parent.mkdir(parents=True, exist_ok=True)
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return d
