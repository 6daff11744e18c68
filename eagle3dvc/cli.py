"""`eagle3dvc`: one verb a task. Every command imports what it needs when it runs, so `--help` answers at once."""

from __future__ import annotations

import sys

import typer

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


if __name__ == "__main__":
    main()
