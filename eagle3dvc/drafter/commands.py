"""The drafter's verbs on the command line: convert, verify-export, card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("convert")(convert)
    app.command("verify-export")(verify_export)
    app.command("card")(card)


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A drafter's folder: safetensors, single or sharded.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that does not exist yet.")],
    to: Annotated[str, typer.Option(help="speculators (vLLM) or sglang.")],
    layer_ids: Annotated[str | None, typer.Option(help="Auxiliary layers in vLLM's ids (SGLang's plus one): 2,16,29.")] = None,
    verifier_name: Annotated[str | None, typer.Option(help="Public id of the verifier.")] = None,
    draft_tokens: Annotated[int | None, typer.Option(help="Draft tokens an engine takes by default.")] = None,
    verifier: Annotated[Path | None, typer.Option(help="data/verifier: leave out an embedding that is its copy.")] = None,
) -> None:
    """Convert an EAGLE-3 drafter between the layouts of vLLM and SGLang, tensors bit for bit."""
    from eagle3dvc.drafter import convert as module
    from eagle3dvc.errors import UserError

    try:
        ids = [int(i) for i in layer_ids.split(",")] if layer_ids is not None else None
    except ValueError:
        raise UserError(f"--layer-ids {layer_ids} must be numbers with commas between, as in 2,16,29") from None
    d = module.convert(source, to, out, ids, verifier_name, draft_tokens, verifier)
    typer.echo(f"{out}: {to} layout of a drafter for {d.verifier}, auxiliary layers {list(d.aux_layer_ids)} (vLLM's ids)")


def verify_export(
    folder: Annotated[Path, typer.Argument(help="A layout's folder, or models/export with several.")],
    hidden: Annotated[Path | None, typer.Option(help="A cache of hidden states to draft from.")] = None,
    verifier: Annotated[Path, typer.Option(help="The verifier's folder that goes with --hidden.")] = Path("data/verifier"),
    prompts: Annotated[Path, typer.Option(help="The prompt shards that go with --hidden.")] = Path("data/prompts"),
    trained: Annotated[Path | None, typer.Option(help="A checkpoint (models/drafter/best) to compare logits with.")] = None,
    structure_only: Annotated[bool, typer.Option("--structure-only", help="Names, shapes and values only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Check that an exported drafter is whole and computes what was trained; exit 1 with the reason if not."""
    import json

    from eagle3dvc.drafter import check

    reports = check.verify_export(folder, hidden, verifier, prompts, trained, structure_only)
    if as_json:
        typer.echo(json.dumps(reports, indent=2, sort_keys=True))
        return
    for r in reports:
        typer.echo(f"{r['folder']}: ok ({r['layout']}; checked {', '.join(r['checked'])})")


def card(
    folder: Annotated[Path, typer.Argument(help="models/export/speculators or models/export/sglang.")],
    write: Annotated[Path | None, typer.Option(help="Write it here instead of printing it; no other file is replaced.")] = None,
) -> None:
    """The model card with the git commit that made the drafter and its evaluation, for publishing."""
    from eagle3dvc.drafter import card as module

    text = module.finished(folder)
    if write is None:
        typer.echo(text, nl=False)
    else:
        module.write(text, write)
        typer.echo(f"{write}: written")
