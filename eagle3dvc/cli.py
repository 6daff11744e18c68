"""`eagle3dvc`: one verb a task. Every command imports what it needs when it runs, so `--help` answers at once."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from eagle3dvc.drafter import commands as drafter_commands
from eagle3dvc.fleet import commands as fleet_commands

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__.split("\n")[0])


@app.callback()
def _callback() -> None:
    """Train EAGLE-3 drafters through a data-versioned pipeline."""


@app.command()
def params(path: str = "params.yaml") -> None:
    """Check params.yaml against the schema."""
    from eagle3dvc.params import load

    load(path)
    typer.echo(f"{path}: ok")


@app.command()
def use(
    model: Annotated[str, typer.Argument(help="demo, a local folder or a hub id")],
    revision: Annotated[str | None, typer.Option(help="hub commit, tag or branch")] = None,
    name: Annotated[str | None, typer.Option(help="public id of a local verifier, which exported drafters will name")] = None,
    path: Annotated[str, typer.Option("--params")] = "params.yaml",
) -> None:
    """Choose the verifier: set verifier.model, revision, name and watch in params.yaml."""
    from eagle3dvc.verifier import use as use_verifier

    changed = use_verifier(model, revision, name, path)
    for key, (old, new) in changed.items():
        typer.echo(f"{key}: {old} -> {new}")
    typer.echo(f"{path}: {'written' if changed else 'unchanged'}")


@app.command()
def verify(
    folder: str = "data/hidden_states",
    prompts: str = "data/prompts",
    verifier: str = "data/verifier",
    sample: Annotated[float | None, typer.Option(help="check the states of this fraction of each shard's samples")] = None,
    full: Annotated[bool, typer.Option("--full", help="check every byte (the default)")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="remove bad shards, so that `dvc repro` makes them again")] = False,
    jobs: Annotated[int | None, typer.Option(help="threads", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Re-read hidden-state shards and compare checksums, tokens, shapes, finiteness and identity; exit 1 on any bad shard."""
    import dataclasses
    import json

    from eagle3dvc.errors import UserError
    from eagle3dvc.hidden_states import check

    if sample is not None and (full or not 0 < sample <= 1):
        raise UserError(f"--sample {sample} must be above 0 and at most 1, and does not go with --full")
    report = check.verify(folder, prompts or None, verifier or None, sample or 1.0, jobs)
    removed = check.repair(report.damaged) if repair else []
    if as_json:
        typer.echo(json.dumps({**dataclasses.asdict(report), "removed": removed}, indent=2))
    else:
        for path, why in report.bad.items():
            typer.echo(f"bad: {path}: {why}")
        typer.echo(f"{report.shards} shards, {report.samples} samples, {report.bytes / 1e9:.3f} GB read, {len(report.bad)} bad")
        if removed:
            typer.echo(f"removed {len(removed)} files; run `dvc repro` to make exactly these shards again")
        elif report.damaged:
            typer.echo("to repair: `eagle3dvc verify --repair` and then `dvc repro`")
        if len(report.bad) > len(report.damaged):
            typer.echo("shards that are missing, surplus or of another verifier are not damaged: run `dvc repro`")
    if report.bad and not (removed and len(report.damaged) == len(report.bad)):
        raise typer.Exit(1)


@app.command()
def inspect(path: str, verifier: str = "data/verifier", as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Show what is in a shard, a hidden-state cache or a prompt folder."""
    from eagle3dvc.hidden_states import inspect as module

    module.show(module.inspect(path, verifier), as_json)


fleet_commands.register(app)
drafter_commands.register(app)


@app.command()
def report(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Print the evaluation and what each stage's last run did."""
    from eagle3dvc import report as module

    module.show(module.collect(), as_json)


def main() -> None:
    """Run the command line; a UserError becomes one sentence on standard error and exit status 1."""
    from eagle3dvc.errors import UserError

    try:
        app()
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        raise SystemExit(1) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(141) from None
    except OSError as e:  # a file that cannot be read or written is the user's to settle; without a name it is a bug
        if e.filename is None:
            raise
        print(f"error: {e.filename}: {e.strerror}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
