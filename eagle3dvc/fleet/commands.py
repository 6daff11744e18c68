"""The fleet's verbs on the command line: plan, profile, playbook, doctor, node. Imports happen when a verb runs."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer

profile = typer.Typer(no_args_is_help=True, help="List, show or apply a profile (an overlay for params.yaml).")
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)
    app.command("playbook")(playbook)
    app.command("doctor")(doctor)
    app.command("node")(node)
    app.add_typer(profile, name="profile")


def _print_json(data: Any) -> None:
    typer.echo(json_module.dumps(data, indent=2, sort_keys=True))


def plan(
    samples: Annotated[int | None, typer.Option(help="Samples to plan; default: max_samples of params.yaml.")] = None,
    hardware: Annotated[str | None, typer.Option(help="Profile name or YAML path; default: the machine measured.")] = None,
    from_: Annotated[str | None, typer.Option("--from", help="logs/ folder, YAML file or built-in measurement.")] = None,
    budget: Annotated[float | None, typer.Option(help="US dollars: the largest sample count that fits.")] = None,
    hours: Annotated[float | None, typer.Option(help="Hours: the largest sample count that fits.")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Network GB/s, in place of the profile's.")] = None,
    have: Annotated[
        int | None,
        typer.Option(
            help="Samples whose hidden states exist; default: those of the last run for a plan from logs/ here, else 0."
        ),
    ] = None,
    answers: Annotated[
        bool | None,
        typer.Option("--answers/--no-answers", help="The verifier writes the answers first; default: as the run in logs/ did."),
    ] = None,
    tokens_per_step: Annotated[int | None, typer.Option(help="Training batch, if not as measured.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the measurement to this YAML file.")] = None,
    json: Json = False,
) -> None:
    """Time, cost, storage and memory of a run, from measured figures, as ranges."""
    from eagle3dvc.errors import UserError
    from eagle3dvc.fleet import measurement as measurements
    from eagle3dvc.fleet import plan as plans
    from eagle3dvc.params import load

    for name, value in (("budget", budget), ("hours", hours)):
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name} {value} must be above 0")
    where = from_ or (plans.KNOWN_RUN if hardware else "logs")
    m = measurements.measurement(where)
    if save:
        measurements.save(m, save)
    source = measurements.hardware(m.hardware) if m.hardware else None
    target = measurements.hardware(hardware) if hardware else None
    samples = load().max_samples if samples is None else samples
    own = Path(where).is_dir()
    if answers is None:
        answers = own and m.answers is not None
    if have is None:  # here, what the last run computed is found again
        have = m.samples if own and target is None else 0

    def plan_for(n: int) -> plans.Plan:
        return plans.make(m, n, source, target, bandwidth, have, answers, tokens_per_step)

    made = plan_for(samples)
    largest = plans.largest(plan_for, budget, hours) if budget is not None or hours is not None else None
    projection = plans.serving(m.serving, source, target or source) if m.serving and source else None
    if json:
        data = made.as_dict()
        if largest is not None:
            data["largest_samples"] = {"budget": budget, "hours": hours, **largest}
        if projection is not None:
            data["serving"] = projection.as_dict()
        _print_json(data)
        return
    for line in plans.describe(made, m, largest, projection):
        typer.echo(line)


@profile.command("list")
def profile_list(json: Json = False) -> None:
    """Profiles there are, with their first comment line."""
    from eagle3dvc import profiles

    found = profiles.available()
    if json:
        _print_json({name: profiles.summary(path) for name, path in found.items()})
        return
    for name, path in found.items():
        typer.echo(f"{name:<20} {profiles.summary(path)}")


@profile.command("show")
def profile_show(name: str) -> None:
    """What a profile would set."""
    from eagle3dvc import profiles

    typer.echo(profiles.find(name).read_text(encoding="utf-8"), nl=False)


@profile.command("apply")
def profile_apply(name: str, params: Path = Path("params.yaml")) -> None:
    """Write a profile's values into params.yaml; comments stay, nothing is written unless the result is valid."""
    from eagle3dvc import profiles

    changed = profiles.apply(name, params)
    for key, (old, new) in changed.items():
        typer.echo(f"{key}: {old!r} -> {new!r}")
    typer.echo(f"{params}: profile {name} applied, {len(changed)} value(s) changed")


def playbook(
    check: Annotated[bool, typer.Option("--check", help="Exit 1 when docs/hero-run.md is stale; write nothing.")] = False,
    profile: Annotated[str | None, typer.Option(help="Profile of the run.")] = None,
    hardware: Annotated[str | None, typer.Option(help="Profile name or YAML path of the machine.")] = None,
    from_: Annotated[str | None, typer.Option("--from", help="Measurement name or YAML path.")] = None,
) -> None:
    """Render docs/hero-run.md, the commands of a hero run with time and cost of each; options left out stay as they are in it."""
    from eagle3dvc.errors import UserError
    from eagle3dvc.fleet import playbook as playbooks

    if check and (profile or hardware or from_):
        raise UserError("--check takes profile, hardware and measurement from the document: leave the other options out")
    typer.echo(playbooks.check() if check else playbooks.write(profile, hardware, from_))


def doctor(
    samples: Annotated[int | None, typer.Option(help="Plan disk for this many samples; default: max_samples.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Run these checks only (repeatable).")] = None,
    json: Json = False,
) -> None:
    """Check this machine and this repository before a run; exit 1 on any failure."""
    from eagle3dvc.fleet import doctor as doctors

    lines = doctors.examine(samples=samples, only=only)
    if json:
        _print_json([line.as_dict() for line in lines])
    else:
        for line in lines:
            typer.echo(str(line))
    if any(line.level == "failure" for line in lines):
        raise typer.Exit(1)


def node(
    stage: Annotated[str | None, typer.Option(help="Make ready for this stage only; default: all that changed.")] = None,
    json: Json = False,
) -> None:
    """Make this machine ready for a stage: doctor, pull what the stage reads, print the next command."""
    from eagle3dvc.fleet import node as nodes

    ready = nodes.prepare(stage, say=lambda text: typer.echo(text, err=json))
    if json:
        _print_json(ready.as_dict())
    else:
        typer.echo(f"next: {ready.command}")
