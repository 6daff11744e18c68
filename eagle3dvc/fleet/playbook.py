"""Render docs/hero-run.md: the hero run from a bare node to tear-down, with time and cost of every command.

Everything it reads is in git (params.yaml, a profile, a measurement file, a hardware profile, learnings.yaml, the guards in
the code), so rendering twice gives the same bytes on any machine, and a stale document is a test failure.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from eagle3dvc import profiles
from eagle3dvc.errors import UserError, yaml_problem
from eagle3dvc.fleet import measurement as measurements
from eagle3dvc.fleet import plan as plans
from eagle3dvc.fleet.measurement import Range

DOCUMENT = Path("docs/hero-run.md")
LEARNINGS = Path("learnings.yaml")
_INPUTS = re.compile(r"eagle3dvc playbook --profile (\S+) --hardware (\S+) --from ([^\s`]+)")


@dataclass(frozen=True)
class Inputs:
    """What the document is about; kept in the document's own first lines, so that --check renders the same one."""

    profile: str = "kimi-k2.5-b300"
    hardware: str = "b300x8"
    measurement: str = plans.KNOWN_RUN

    def command(self) -> str:
        return f"eagle3dvc playbook --profile {self.profile} --hardware {self.hardware} --from {self.measurement}"


class Learning(BaseModel):
    model_config = ConfigDict(extra="forbid")

    date: datetime.date
    symptom: str = Field(min_length=1)
    cause: str = Field(min_length=1)
    fix: str = Field(min_length=1)
    version: str = Field(min_length=1)


class _Learnings(BaseModel):
    entries: list[Learning]


def learnings(path: Path = LEARNINGS) -> list[Learning]:
    """The lessons, oldest first; raises UserError naming the entry and the key that is wrong."""
    from pydantic import ValidationError
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        entries = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
        return _Learnings(entries=entries or []).entries
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}") from None
    except (YAMLError, UnicodeDecodeError) as e:
        raise UserError(f"{path} is not valid YAML: {yaml_problem(e)}") from None
    except ValidationError as e:
        err = e.errors()[0]
        where = " ".join(f"{p + 1}" if isinstance(p, int) else str(p) for p in err["loc"][1:])
        raise UserError(f"{path}: {f'entry {where}: ' if where else ''}{err['msg']}") from None


@dataclass(frozen=True)
class Step:
    """Time and cost of a stage's part of the plan, as text."""

    time: str
    cost: str


def _step(seconds: Range, price: Range) -> Step:
    return Step(plans.spread(seconds), plans.spread(seconds / plans.HOUR * price, _dollars))


def _dollars(v: float) -> str:
    return f"${v:,.2f}" if v < 10 else f"${v:,.0f}"


def render(inputs: Inputs) -> str:
    """The document as text. Raises UserError for a missing or invalid input."""
    import jinja2

    from eagle3dvc.drafter.guards import HOLES

    m = measurements.measurement(inputs.measurement)
    if m.hardware is None:
        raise UserError(f"{inputs.measurement} names no hardware profile: add `hardware:` to it")
    source, target = measurements.hardware(m.hardware), measurements.hardware(inputs.hardware)
    params = profiles.overlaid(inputs.profile)
    answers = params.prepare.responses == "verifier" and m.answers is not None

    def as_measured(samples: int) -> plans.Plan:
        return plans.make(m, samples, source, target)

    def as_set(samples: int) -> plans.Plan:
        return plans.make(
            m,
            samples,
            source,
            target,
            None,
            0,
            answers,
            params.train.tokens_per_batch * params.train.gradient_accumulation_steps,
        )

    hero = as_set(params.max_samples)
    price = target.price_per_hour
    by_stage: dict[str, list[plans.Line]] = {}
    for line in hero.lines:
        by_stage.setdefault(line.stage, []).append(line)
    steps = {stage: _step(seconds, price) for stage, seconds in hero.stage_seconds().items()}
    for line in hero.lines:
        steps[f"{line.stage}: {line.what}"] = _step(line.seconds, price)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("eagle3dvc.fleet", "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"spread": plans.spread, "size": plans.size}
    environment.filters["money"] = lambda r: plans.spread(r, _dollars)
    environment.filters["rate"] = lambda r: plans.spread(r, lambda v: f"{v:.0f}")
    environment.filters["percent"] = lambda r: plans.spread(r, lambda v: f"{v:.0%}")
    environment.filters["one"] = lambda r: plans.spread(r, lambda v: f"{v:.1f}")
    environment.filters["cell"] = lambda text: str(text).replace("|", "\\|").replace("\n", " ")
    return environment.get_template("hero-run.md.j2").render(
        inputs=inputs,
        zero=measurements.ZERO,
        price=price,
        m=m,
        params=params,
        source=source,
        target=target,
        hero=hero,
        half=as_set(max(1, params.max_samples // 2)),
        measured=[as_measured(max(1, params.max_samples // 2)), as_measured(params.max_samples)],
        known=as_measured(m.samples),
        largest=plans.largest(as_set, 500, 12),
        answers=answers,
        by_stage=by_stage,
        steps=steps,
        serving=plans.serving(m.serving, source, target) if m.serving else None,
        local=plans.serving(m.serving, source, source) if m.serving else None,
        guards=HOLES,
        learnings=learnings(),
    )


def _recorded(text: str) -> Inputs:
    found = _INPUTS.search(text)
    return Inputs(*found.groups()) if found else Inputs()


def write(profile: str | None = None, hardware: str | None = None, measurement: str | None = None) -> str:
    """Render the document and write it where it changed; returns a sentence. What is None stays as in the present document."""
    old = DOCUMENT.read_text(encoding="utf-8", errors="replace") if DOCUMENT.is_file() else ""
    kept = _recorded(old)
    inputs = Inputs(profile or kept.profile, hardware or kept.hardware, measurement or kept.measurement)
    if _recorded(inputs.command()) != inputs:
        raise UserError(
            f"`{inputs.command()}` cannot be kept in the document: give names and paths without spaces and backquotes"
        )
    new = render(inputs)
    if new == old:
        return f"{DOCUMENT} is up to date"
    DOCUMENT.parent.mkdir(parents=True, exist_ok=True)
    tmp = DOCUMENT.with_name(f".{DOCUMENT.name}.tmp")
    tmp.write_text(new, encoding="utf-8")
    tmp.replace(DOCUMENT)
    return f"wrote {DOCUMENT}"


def check() -> str:
    """A sentence when the document is what its inputs give; raises UserError when it is stale or missing."""
    if not DOCUMENT.is_file():
        raise UserError(f"{DOCUMENT} does not exist: run `eagle3dvc playbook`")
    text = DOCUMENT.read_text(encoding="utf-8", errors="replace")
    if text != render(_recorded(text)):
        raise UserError(f"{DOCUMENT} is stale, an input of it changed: run `eagle3dvc playbook` and commit the result")
    return f"{DOCUMENT} is up to date"
