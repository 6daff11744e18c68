"""What a plan is made from: a hardware profile, and what one run measured (a YAML file, or a run's own logs).

Every figure is a number or a pair [low, high]; a pair says how well the figure is known, and the plan carries it through.
"""

from __future__ import annotations

import datetime
import difflib
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from eagle3dvc.errors import UserError, yaml_problem

HERE = Path(__file__).parent
HARDWARE, MEASUREMENTS = HERE / "hardware", HERE / "measurements"
STAGES = ("verifier", "prepare", "extract", "train", "export", "evaluate")


@dataclass(frozen=True)
class Range:
    """A non-negative figure between `low` and `high`, taken as independent of every other range."""

    low: float
    high: float

    def __post_init__(self):
        if not 0 <= self.low <= self.high < float("inf"):
            raise ValueError(f"[{self.low}, {self.high}] is not a pair [low, high] of finite numbers from 0 up")

    @classmethod
    def of(cls, value: Any) -> Range:
        if isinstance(value, Range):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float | list | tuple):
            raise ValueError(f"{value!r} is neither a number nor a pair [low, high]")
        pair = value if isinstance(value, list | tuple) else (value, value)
        if len(pair) != 2 or any(isinstance(v, bool) or not isinstance(v, int | float) for v in pair):
            raise ValueError(f"{value!r} is neither a number nor a pair [low, high]")
        return cls(float(pair[0]), float(pair[1]))

    def __add__(self, other: Range | float) -> Range:
        other = Range.of(other)
        return Range(self.low + other.low, self.high + other.high)

    def __mul__(self, other: Range | float) -> Range:
        other = Range.of(other)
        return Range(self.low * other.low, self.high * other.high)

    def __truediv__(self, other: Range | float) -> Range:
        other = Range.of(other)
        return Range(self.low / other.high, self.high / other.low)

    def minus(self, other: Range | float) -> Range:
        """What is left of this after `other`, never below 0."""
        other = Range.of(other)
        return Range(max(0.0, self.low - other.high), max(0.0, self.high - other.low))

    def at_least(self, other: Range) -> Range:
        """The larger of two, end by end: two things that run beside each other."""
        return Range(max(self.low, other.low), max(self.high, other.high))

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    def pair(self) -> list[float]:
        return [self.low, self.high]


ZERO = Range(0.0, 0.0)
REPEAT = Range(0.85, 1.15)  # an estimate from few runs on a shared machine; short stages move by more (docs/plan.md)
_WRITTEN = PlainSerializer(lambda r: r.low if r.low == r.high else r.pair())  # a number, or [low, high]
Figure = Annotated[Range, BeforeValidator(Range.of), _WRITTEN]


def _positive(r: Range) -> Range:
    if r.low <= 0:
        raise ValueError(f"{r.pair()} must be above 0")
    return r


PositiveFigure = Annotated[
    Range,
    BeforeValidator(lambda v: _positive(Range.of(v))),
    _WRITTEN,
]


def _share(r: Range) -> Range:
    if r.high > 1:
        raise ValueError(f"{r.pair()} must be a share, from 0 to 1")
    return r


Share = Annotated[
    Range,
    BeforeValidator(lambda v: _share(Range.of(v))),
    _WRITTEN,
]
Count = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class Hardware(Block):
    """One machine that is rented or owned as a whole; GB are 1e9 bytes, prices US dollars an hour for all of it.

    as_of: the day on which rates and prices were estimated; None where they are an offer.
    """

    name: str
    description: str
    gpu_name: str
    gpus: Count
    dense_bf16_tflops: Amount
    memory_gb: Amount
    memory_bandwidth_gb_s: Amount
    interconnect: str
    allreduce_gb_s: PositiveFigure
    allreduce_latency_us: PositiveFigure
    disk_read_gb_s: PositiveFigure
    disk_write_gb_s: PositiveFigure
    disk_tb: Amount
    host_memory_gb: Amount
    network_gb_s: PositiveFigure
    price_per_hour: Figure
    as_of: datetime.date | None = None


class Node(Block):
    seconds_setup: Figure = ZERO
    download_verifier: bool = False


class Prepare(Block):
    """`fixed_share` is the part of `seconds` that more samples do not add to; [0, 1] where nobody knows."""

    seconds: Figure = ZERO
    fixed_share: Share = Range(0.0, 1.0)


class Answers(Block):
    """Answers written by the verifier, many at once: what `tokens_per_second` stands for is decoding, not prefill."""

    tokens_per_sample: PositiveFigure
    tokens_per_second: PositiveFigure
    allreduce_share: Share = ZERO
    scaling: PositiveFigure = Range(0.7, 1.3)


class Extract(Block):
    """`seconds_load` holds `seconds_start`; `allreduce_share` is of the time that `tokens_per_second` stands for."""

    seconds_load: Figure = ZERO
    seconds_start: Figure = ZERO
    seconds_other: Figure = ZERO
    tokens_per_second: PositiveFigure
    allreduce_share: Share = ZERO
    scaling: PositiveFigure = Range(0.7, 1.3)


class Train(Block):
    """`overhead_seconds_per_step` is spent by the host in each step; `seconds_outside` are start, validation and checkpoints.

    `steps` grow with the samples unless `steps_fixed` (train.max_steps is set). `seconds_validation` are all walks over
    `validation_samples`, which grow up to `validation_samples_most`; as many walks whatever the steps if `validations_fixed`.
    """

    steps: Count
    steps_per_second: PositiveFigure
    overhead_seconds_per_step: Figure = ZERO
    seconds_outside: Figure = ZERO
    fixed_share: Share = Range(0.0, 1.0)
    seconds_validation: Figure = ZERO
    validation_samples: Annotated[int, Field(ge=0)] = 0
    validation_samples_most: int | None = None
    validations_fixed: bool = True
    steps_fixed: bool = False
    epochs: Count = 1
    scaling: PositiveFigure = Range(0.9, 1.1)


class Fixed(Block):
    seconds_fixed: Figure = ZERO


class Evaluate(Block):
    """`samples` held-out samples took `seconds`; their number grows with the data up to `samples_most`."""

    seconds: Figure = ZERO
    fixed_share: Share = Range(0.0, 1.0)
    samples: Annotated[int, Field(ge=0)] = 0
    samples_most: int | None = None


class Serving(Block):
    baseline_tokens_per_second: Amount
    allreduce_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    allreduces_per_token: Count = 1
    kernel_floor_seconds: Figure = ZERO
    acceptance_length: PositiveFigure
    draft_tokens: Count = 3
    draft_cost: Figure
    verify_cost: PositiveFigure = Range(1.0, 1.0)
    published_tokens_per_second: Amount | None = None


class Measurement(Block):
    """What one run of `samples` samples took, on which hardware; None for hardware means a machine no profile describes. `repeat`:
    by what a time changes when the same is run again."""

    name: str
    description: str = ""
    hardware: str | None = None
    samples: Count
    tokens: Count
    bytes_per_token: Amount
    verifier_bytes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    drafter_parameters: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    repeat: PositiveFigure = Range(1.0, 1.0)
    push_while_extracting: bool = False
    acceptance_length: float | None = None
    versions: dict[str, str] = {}
    node: Node = Node()
    verifier: Fixed = Fixed()
    prepare: Prepare = Prepare()
    answers: Answers | None = None
    extract: Extract
    train: Train
    export: Fixed = Fixed()
    evaluate: Evaluate = Evaluate()
    serving: Serving | None = None


Model = TypeVar("Model", bound=BaseModel)


def read(path: Path, model: type[Model]) -> Model:
    """A YAML file as `model`; raises UserError naming the file, the key and what is wrong with it."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        data = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}") from None
    except (YAMLError, UnicodeDecodeError) as e:
        raise UserError(f"{path} is not valid YAML: {yaml_problem(e)}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a mapping, found {type(data).__name__}")
    try:
        return model.model_validate(data)
    except ValidationError as e:
        parts = []
        for err in e.errors():
            where = ".".join(str(p) for p in err["loc"])
            parts.append(f"{where}: {err['msg'].removeprefix('Value error, ')}")
        raise UserError(f"{path}: " + "; ".join(parts)) from None


def names(folder: Path) -> list[str]:
    return sorted(p.stem for p in folder.glob("*.yaml"))


def _find(name: str, folder: Path, what: str) -> Path:
    """A built-in file by name, or any file by path."""
    if (built_in := folder / f"{name}.yaml").is_file() and "/" not in name:
        return built_in
    if Path(name).is_file():
        return Path(name)
    near = difflib.get_close_matches(name, names(folder), n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(f"no {what} {name!r}: {hint}give one of {', '.join(names(folder))} or the path of a YAML file")


def hardware(name: str) -> Hardware:
    """A hardware profile by built-in name or path; raises UserError."""
    return read(_find(name, HARDWARE, "hardware profile"), Hardware)


def measurement(source: str) -> Measurement:
    """A measurement from a built-in name, a YAML file, or a folder of logs; raises UserError."""
    if Path(source).is_dir():
        return from_logs(Path(source))
    if source == "logs":
        raise UserError(
            "there is no folder logs/ here, so nothing was measured yet: run `dvc repro` first, or name the machine (--hardware) "
            f"or a measurement (--from {' or '.join(names(MEASUREMENTS))})"
        )
    return read(_find(source, MEASUREMENTS, "measurement"), Measurement)


def save(m: Measurement, path: Path) -> None:
    """Write a measurement that `plan --from` and the playbook read back; a file in git, unlike the logs it came from."""
    from ruamel.yaml import YAML

    data = m.model_dump(mode="json", exclude_defaults=True)
    if path.is_dir():
        raise UserError(f"--save {path} is a folder: give the YAML file to write")
    if not path.parent.is_dir():
        raise UserError(f"--save {path}: there is no folder {path.parent}")
    tmp = path.with_name(f".{path.name}.tmp")
    try:
        with open(tmp, "w", encoding="utf-8") as f:
            f.write(f"# Written by `eagle3dvc plan --save {path.name}` from a run's logs and metrics.\n")
            YAML().dump(data, f)
        tmp.replace(path)
    finally:
        tmp.unlink(missing_ok=True)


def _json(path: Path) -> dict:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise UserError(f"{path} is not readable JSON ({e}): delete it and run `dvc repro` again") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected an object; delete it and run `dvc repro` again")
    return data


def _runs(logs: Path, stage: str) -> list[dict]:
    """Every recorded run of a stage on the machine of the last one, oldest first; logs/<stage>.json is the last."""
    runs = []
    history = logs / "history.jsonl"
    if history.is_file():
        for line in history.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:  # a machine that died while appending leaves half a line, and only there
                continue
            if isinstance(entry, dict) and entry.get("stage") == stage:
                runs.append(entry)
    last = _json(logs / f"{stage}.json")
    if last and last not in runs:
        runs.append(last)
    return [r for r in runs if r.get("hardware") == runs[-1].get("hardware")] if runs else []


def _growth(runs: list[dict], points: list[tuple[float, float]]) -> tuple[Range, Range]:
    """(seconds at the last run's size, share of them that is fixed).

    The last run says which of its seconds grow (`seconds_growing`); the fixed rest is the middle of all runs, which a cold start
    does not move. Runs that do not say: from (units, seconds) of several, two or more sizes give a least-squares line with neither
    part below zero. One size cannot say what is fixed: [0, 1].
    """
    import numpy as np

    if (growing := runs[-1].get("seconds_growing")) is not None:
        fixed = statistics.median(_seconds(r) - r["seconds_growing"] for r in runs if "seconds_growing" in r)
        return Range.of(fixed + growing), Range.of(fixed / (fixed + growing) if fixed + growing else 1.0)
    size, seconds = points[-1]
    if len({n for n, _ in points}) < 2 or not size:
        return Range.of(seconds), Range(0.0, 1.0)
    n, s = np.array(points, dtype=float).T
    slope, fixed = (float(v) for v in np.polyfit(n, s, 1))
    if fixed < 0:
        slope, fixed = float((n * s).sum() / (n * n).sum()), 0.0
    if slope < 0:
        slope, fixed = 0.0, float(s.mean())
    total = fixed + slope * size
    return Range.of(total), Range.of(fixed / total if total else 1.0)


def _required(entry: dict, key: str, where: Path) -> float:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise UserError(f"{where}: {key} = {value!r} should be a number above 0: run `dvc repro` again to measure")
    return float(value)


def _profile_of(entry: dict) -> str | None:
    """The built-in profile whose GPUs are the ones a log names; None when there is none."""
    gpus = (entry.get("hardware") or {}).get("gpus") or []
    for name in names(HARDWARE):
        profile = hardware(name)
        if len(gpus) == profile.gpus and all(profile.gpu_name in g.get("name", "") for g in gpus):
            return name
    return None


def _seconds(run: dict) -> float:
    """How long the whole stage took; `seconds` may be its core only (training's steps)."""
    return float(run.get("seconds_stage") or run["seconds"])


def _middle(runs: list[dict]) -> Range:
    """The usual seconds of a stage whose work does not grow: the median of its runs, which a cold start does not move."""
    return Range.of(statistics.median(_seconds(r) for r in runs)) if runs else ZERO


def _points(runs: list[dict], size: str, now: dict) -> list[tuple[float, float]]:
    """(size, seconds) of each run that recorded its size; the last run's size is in the metrics in any case."""
    runs = [*runs[:-1], {**runs[-1], "metrics": now}]
    return [(float(r["metrics"][size]), _seconds(r)) for r in runs if size in (r.get("metrics") or {})]


def _prepare(runs: list[dict], now: dict) -> Prepare:
    seconds, share = _growth(runs, _points(runs, "samples", now))
    return Prepare(seconds=seconds, fixed_share=share)


def _evaluate(runs: list[dict], now: dict, most: int) -> Evaluate:
    points = _points(runs, "samples", now) if runs and now else []
    if not points:
        return Evaluate()
    seconds, share = _growth(runs, points)
    return Evaluate(seconds=seconds, fixed_share=share, samples=int(points[-1][0]), samples_most=most)


def _verifier_bytes(root: Path, params) -> float:
    """Bytes of the verifier's weights: of its folder, or of the hub's local cache; 0.0 where they are not here."""
    model = params.verifier.model
    folder = root / "data" / "verifier" if model == "demo" else root / model
    if model != "demo" and not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            config = try_to_load_from_cache(model, "config.json", revision=params.verifier.revision)
        except HFValidationError:  # a folder that is gone
            return 0.0
        if not isinstance(config, str):
            return 0.0
        folder = Path(config).parent
    return float(sum(f.stat().st_size for f in folder.glob("*.safetensors")))


def _without_answers(prepare: dict) -> dict:
    """A prepare run in which the verifier wrote answers (and computed their states), less the time of both and of loading it."""
    if not prepare.get("seconds_answers"):
        return prepare
    apart = sum(float(prepare.get(k) or 0.0) for k in ("seconds_load_engine", "seconds_answers", "seconds_extract"))
    return {**prepare, "seconds_stage": max(0.0, _seconds(prepare) - apart)}


def _answers(runs: list[dict], now: dict) -> Answers | None:
    """From the last prepare run in which the verifier wrote answers; None where none did."""
    wrote = [r for r in runs if r.get("answers_tokens_generated") and r.get("seconds_answers")]
    if not wrote or not now.get("answer_tokens"):
        return None
    rate = wrote[-1]["answers_tokens_generated"] / wrote[-1]["seconds_answers"]
    return Answers(tokens_per_sample=Range.of(now["answer_tokens"] / now["samples"]), tokens_per_second=Range.of(rate))


def _extract(runs: list[dict], prepares: list[dict], logs: Path) -> Extract:
    """From the last run that computed tokens: a run that reused every shard says nothing about speed. Where the verifier wrote the
    answers, its session in prepare has computed the states too."""
    computed = [r for r in runs if r.get("tokens_computed")]
    sessions = [r for r in prepares if r.get("tokens_computed") and r.get("seconds_extract")]
    if sessions and (not computed or str(sessions[-1].get("finished_at")) > str(computed[-1].get("finished_at"))):
        run = sessions[-1]
        return Extract(
            seconds_load=Range.of(float(run.get("seconds_load_engine") or 0.0)),
            seconds_start=Range(0.0, float(run.get("seconds_load_engine") or 0.0)),  # not known: all of it, or nothing
            seconds_other=_middle([r for r in runs if not r.get("tokens_computed")]),
            tokens_per_second=Range.of(run["tokens_computed"] / run["seconds_extract"]),
        )
    if not computed:
        raise UserError(
            f"{logs}: every recorded extract run reused finished shards, so none measured the speed: run `dvc repro` once with "
            "a larger max_samples, or plan from a measurement file"
        )
    run = computed[-1]
    where = logs / "extract.json"
    seconds, working = _seconds(run), _required(run, "seconds_extract", where)
    load = float(run.get("seconds_load") or 0.0)
    return Extract(
        seconds_load=Range.of(load),
        seconds_start=Range(0.0, load),  # not known: all of it, or nothing
        seconds_other=Range.of(max(0.0, seconds - load - working)),
        tokens_per_second=Range.of(_required(run, "tokens_computed", where) / working),
    )


def _train(runs: list[dict], now: dict, params, logs: Path) -> Train:
    """From the last run that took steps. What the stage did beside them is outside: start, validation, checkpoints."""
    stepped = [r for r in runs if r.get("steps_per_second") and r.get("steps_computed", 1)]
    where = logs / "train.json"
    rate = _required(stepped[-1] if stepped else {}, "steps_per_second", where)
    steps_now = int(_required(now, "steps", logs.parent / "metrics" / "train.json"))
    common = {
        "steps": steps_now,
        "steps_per_second": Range.of(rate),
        "steps_fixed": params.train.max_steps is not None,
        "epochs": params.train.epochs,
    }
    if "seconds_validation" in stepped[-1]:
        apart = ("seconds", "seconds_validation", "seconds_checkpoints")
        fixed = statistics.median(
            max(0.0, _seconds(r) - sum(float(r[k]) for k in apart)) for r in stepped if "seconds_validation" in r
        )
        whole = steps_now / (stepped[-1].get("steps_computed") or steps_now)  # a continued run took part of the steps
        saving = stepped[-1]["seconds_checkpoints"] * whole
        return Train(
            **common,
            seconds_outside=Range.of(fixed + saving),
            fixed_share=Range.of(fixed / (fixed + saving) if fixed + saving else 1.0),
            seconds_validation=Range.of(stepped[-1]["seconds_validation"] * whole),
            validation_samples=int(now.get("heldout_samples", 0)),
            validation_samples_most=params.train.eval_samples,
            validations_fixed=params.train.eval_every is None,
        )
    outside = []
    for r in stepped:
        steps = r.get("steps_computed") or (r.get("metrics") or now).get("steps", 0)
        outside.append((float(steps), max(0.0, _seconds(r) - steps / r["steps_per_second"])))
    seconds, share = _growth(stepped, outside)
    if share.low == 0 and share.high == 1 and params.train.eval_every is None:
        # validation then happens ten times whatever the number of steps, on at most eval_samples samples
        share = Range(0.5, 1.0)
    return Train(**common, seconds_outside=seconds, fixed_share=share)


def _serving(runs: list[dict], tensor_parallel_size: int) -> Serving | None:
    """From the last evaluate run that decoded in an engine, one sequence at a time on one GPU: with several, nobody has measured
    how much of a step is all-reduce. What a round costs follows from acceptance length and speed-up."""
    found = [e for r in runs if (e := r.get("engine")) and e.get("batch_size") == 1 and e.get("speedup")]
    if not found or tensor_parallel_size > 1:
        return None
    e = found[-1]
    round_cost = e["acceptance_length"] / e["speedup"]
    return Serving(
        baseline_tokens_per_second=e["baseline_tokens_per_second"],
        kernel_floor_seconds=Range(0.0, 1 / e["baseline_tokens_per_second"]),  # not known: nothing, or the whole step
        acceptance_length=Range.of(e["acceptance_length"]),
        draft_tokens=e["draft_tokens"],
        draft_cost=Range.of(max(0.0, round_cost - 1) / e["draft_tokens"]),
    )


def _unmeasured(m: Measurement, params) -> Measurement:
    """What logs do not say and scaling to another machine needs, as ranges that hold all that is likely."""
    several = params.extract.tensor_parallel_size > 1
    share = Range(0.0, 0.6) if several else ZERO  # 0.6: all-reduce over PCIe at its worst
    launch = Range(0.0, min(0.02, 1 / m.train.steps_per_second.high))
    return m.model_copy(
        update={
            "extract": m.extract.model_copy(update={"allreduce_share": share}),
            "answers": m.answers.model_copy(update={"allreduce_share": share}) if m.answers else None,
            "train": m.train.model_copy(update={"overhead_seconds_per_step": launch}),
        }
    )


def from_logs(logs: Path) -> Measurement:
    """A measurement from `logs/` and the `metrics/` and params.yaml beside it; raises UserError naming what is missing or odd."""
    try:
        return _from_logs(logs)
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as e:
        if isinstance(e, ValidationError):
            err = e.errors()[0]
            e = ValueError(f"{'.'.join(str(p) for p in err['loc'])}: {err['msg']}")
        raise UserError(
            f"{logs} or the metrics beside it hold figures that no stage here writes ({type(e).__name__}: {e}): move "
            f"{logs / 'history.jsonl'} away and run `dvc repro` again to measure, or plan from a measurement file"
        ) from e


def changed_since(root: Path, params) -> str | None:
    """The parameter by which the run that dvc.lock records had another verifier, other prompts or another precision than `params`, so
    that its bytes and seconds a sample say nothing about the run to come, as after `profile apply`; None where there is none."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        stages = YAML(typ="safe").load((root / "dvc.lock").read_text(encoding="utf-8"))["stages"]
        then = {name: stages[name]["params"]["params.yaml"][name] for name in ("verifier", "prepare", "extract")}
        made = [o.get("md5") for o in stages["verifier"].get("outs", []) if o["path"] == "data/verifier"]
        read = [d.get("md5") for d in stages["extract"].get("deps", []) if d["path"] == "data/verifier"]
        if made != read:  # the verifier stage has run since, extract has not
            return "verifier.model"
        now = params.model_dump(mode="json")
        for block, keys in _DECIDE.items():
            for key in keys:
                old, new = then[block].get(key), now[block][key]
                if key == "sources":  # dvc.lock has what params.yaml says, without the defaults
                    old, new = [s["path"] for s in old or []], [s["path"] for s in new]
                if key in then[block] and old != new:
                    return f"{block}.{key}"
    except (OSError, ValueError, LookupError, TypeError, AttributeError, YAMLError):
        return None  # no finished run, or a file that DVC itself will refuse
    return None


_DECIDE = {
    "verifier": ("model", "revision"),
    "prepare": ("sources", "max_length", "responses", "max_new_tokens", "chat_template", "system_prompt"),
    "extract": ("aux_layer_ids", "stored_dtype"),
}


def _from_logs(logs: Path) -> Measurement:
    from eagle3dvc import params as params_module

    root = logs.resolve().parent
    params = params_module.load(root / "params.yaml")
    if (changed := changed_since(root, params) or "").startswith("verifier."):
        raise UserError(
            f"{logs} measured another verifier than params.yaml names now ({changed} differs from dvc.lock): run `dvc repro` with a few "
            f"samples first, or plan from a measurement file (--from {' or '.join(names(MEASUREMENTS))} or a path)"
        )
    metrics = {stage: _json(root / "metrics" / f"{stage}.json") for stage in STAGES}
    runs = {stage: _runs(logs, stage) for stage in STAGES}
    for stage in ("prepare", "extract", "train"):
        if not runs[stage] or not metrics[stage]:
            raise UserError(
                f"{logs} holds no finished run of the {stage} stage: run `dvc repro` first, or plan from a measurement file "
                f"(--from {' or '.join(names(MEASUREMENTS))} or a path)"
            )
    where = root / "metrics" / "extract.json"
    samples = int(_required(metrics["extract"], "samples", where))
    measured = Measurement(
        name=logs.resolve().parent.name,
        description=f"{samples:,} samples on this machine",
        hardware=_profile_of(runs["train"][-1]),
        samples=samples,
        tokens=int(_required(metrics["extract"], "tokens", where)),
        bytes_per_token=_required(metrics["extract"], "bytes_per_token", where),
        verifier_bytes=_verifier_bytes(root, params),
        drafter_parameters=next(
            (float(r["drafter_parameters"]) for r in runs["train"][::-1] if "drafter_parameters" in r), 0.0
        ),
        repeat=REPEAT,
        push_while_extracting=params.extract.push_while_extracting,
        acceptance_length=metrics["evaluate"].get("acceptance_length"),
        versions=runs["train"][-1].get("versions") or {},
        verifier=Fixed(seconds_fixed=_middle(runs["verifier"])),
        prepare=_prepare([_without_answers(r) for r in runs["prepare"]], metrics["prepare"]),
        answers=_answers(runs["prepare"], metrics["prepare"]) if params.prepare.responses == "verifier" else None,
        extract=_extract(runs["extract"], runs["prepare"], logs),
        train=_train(runs["train"], metrics["train"], params, logs),
        export=Fixed(seconds_fixed=_middle(runs["export"])),
        evaluate=_evaluate(runs["evaluate"], metrics["evaluate"], params.evaluate.samples),
        serving=_serving(runs["evaluate"], params.extract.tensor_parallel_size),
    )
    return _unmeasured(measured, params)
