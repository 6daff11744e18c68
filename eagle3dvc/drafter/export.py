"""The export stage: the best checkpoint in every layout asked for, each reloaded and compared before it counts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle3dvc.drafter import card, check, layouts
from eagle3dvc.drafter.convert import without_copies
from eagle3dvc.errors import UserError
from eagle3dvc.params import Params
from eagle3dvc.stage import put_folder


def cast(d: layouts.Drafter, dtype: str) -> layouts.Drafter:
    """The drafter with its floating-point tensors in `dtype`; UserError where a value does not fit."""
    import torch

    target = getattr(torch, dtype)
    tensors = {k: t.to(target) if t.is_floating_point() else t for k, t in d.tensors.items()}
    for name, t in tensors.items():
        if t.is_floating_point() and not t.isfinite().all():
            raise UserError(
                f"{name} holds values that are not finite in {dtype}: the training diverged, look at models/drafter"
            )
    return replace(d, tensors=tensors)


def prepare_drafter(checkpoint: Path, info: Any, head: Any) -> layouts.Drafter:
    """The trained drafter under its verifier's public name, without tensors that are the verifier's own."""
    d = layouts.read(checkpoint, verifier=info.name)
    if d.vocab_size != info.vocab_size:
        raise UserError(f"{checkpoint} drafts from {d.vocab_size} tokens, its verifier {info.name} has {info.vocab_size}")
    config = json.loads((info.folder / "config.json").read_text(encoding="utf-8"))
    names = tuple(config.get("architectures") or d.verifier_architectures)
    return replace(without_copies(d, head), verifier_architectures=names)


def build(
    params: Params,
    out: str | Path = "models/export",
    drafter: str | Path = "models/drafter",
    hidden: str | Path = "data/hidden_states",
    prompts: str | Path = "data/prompts",
    verifier: str | Path = "data/verifier",
    log: dict | None = None,
) -> dict[str, Any]:
    """Write `out`/<layout> for every layout of params.export; returns the metrics, raises UserError and leaves nothing.

    `log` receives what the self-check measured (differences of logits, share of unchanged greedy drafts).
    """
    import torch

    from eagle3dvc.drafter import model as drafter_model
    from eagle3dvc.verifier import load_head, load_info

    out, checkpoint = Path(out), Path(drafter) / "best"
    info, head = load_info(verifier), load_head(verifier)
    trained = drafter_model.load(checkpoint, verifier)
    d = cast(prepare_drafter(checkpoint, info, head), params.export.dtype)
    probes = check.windows(hidden, prompts)
    expected = check.wanted(trained, getattr(torch, params.export.dtype), probes)
    work = out.with_name(f".{out.name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    checked, sizes = {}, {}
    try:
        for layout in params.export.layouts:
            folder = work / layout
            layouts.write(d, folder, layout)
            checked[layout] = check.self_check(folder, trained, expected)
            check.write_provenance(folder, d, {"name": info.name, "revision": info.revision, "identity": info.identity})
            check.write_probe(folder, head.embed, probes[0])
            text = card.text(d, layout, info=info, drafter=drafter, prompts=prompts)
            (folder / "README.md").write_text(text, encoding="utf-8")
            check.verify_export(folder)
            sizes[layout] = sum(f.stat().st_size for f in layouts.weight_files(folder))
        put_folder(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if log is not None:
        log["self_check"] = checked
    return {
        "aux_layer_ids": list(d.aux_layer_ids),
        "draft_vocab_size": d.draft_vocab_size,
        "layouts": sorted(params.export.layouts),
        "parameters": sum(t.numel() for t in d.tensors.values() if t.is_floating_point()),
        "weight_bytes": sizes,
    }
