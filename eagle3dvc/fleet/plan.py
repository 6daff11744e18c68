"""What a run of N samples will take: time a stage, storage, memory, cost, as ranges with the input each line hangs on.

The model is stated in docs/plan.md. In short: every stage is a sum of parts; a part has a measured time, grows with tokens,
steps or not at all, and on other hardware is multiplied by the ratio of the one thing that limits it.
"""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass, replace

from eagle3dvc.errors import UserError
from eagle3dvc.fleet.measurement import ZERO, Hardware, Measurement, Range, Serving

KNOWN_RUN = "kimi-k2.5-local"
LOAD = "load the verifier"
LEFT = "what is left of it at the end"
HOUR = 3600.0
MOST_SAMPLES = 10**12
ONE = Range(1.0, 1.0)
# float32 master weights, gradients and two AdamW moments, and a bfloat16 copy for the forward pass
TRAINING_BYTES_PER_PARAMETER = 18
# best, last and one unfinished resume checkpoint: float32 weights each, two of them with two moments
CHECKPOINT_BYTES_PER_PARAMETER = 4 * (1 + 3 + 3)


@dataclass(frozen=True)
class Line:
    """One part of a stage: `seconds` on the target, and the input that decides it. `beside` lines run during others."""

    stage: str
    what: str
    seconds: Range
    hangs_on: str
    beside: bool = False


@dataclass(frozen=True)
class Memory:
    what: str
    need_gb: Range
    have_gb: float

    @property
    def fits(self) -> bool:
        return self.need_gb.high <= self.have_gb


@dataclass(frozen=True)
class Plan:
    """A plan for `samples` samples, `have` of which have their hidden states; `hours` and `cost` are of the critical path, set-up to
    last byte pushed. `estimated`: the day of the hardware profile's rates and prices, None where they are no estimates. `waiting`: seconds of a push beside other work that are left at the low and the
    high end of that work; faster work leaves more, so the two are not a range."""

    samples: int
    have: int
    tokens: int
    steps: int
    measurement: str
    hardware: str | None
    lines: list[Line]
    hidden_state_bytes: float
    storage_bytes: float
    disk_bytes: float | None
    push_seconds: Range | None
    memory: list[Memory]
    price_per_hour: Range | None
    estimated: datetime.date | None = None
    waiting: tuple[float, float] = (0.0, 0.0)

    @property
    def seconds(self) -> Range:
        work = sum((line.seconds for line in self.lines if not line.beside and line.what != LEFT), ZERO)
        return Range(work.low + self.waiting[0], work.high + self.waiting[1])

    @property
    def hours(self) -> Range:
        return self.seconds / HOUR

    @property
    def cost(self) -> Range | None:
        return self.hours * self.price_per_hour if self.price_per_hour else None

    def stage_seconds(self) -> dict[str, Range]:
        """Seconds a stage, in the order the stages run; lines that run beside others are left out."""
        found: dict[str, Range] = {}
        for line in self.lines:
            if not line.beside:
                found[line.stage] = found.get(line.stage, ZERO) + line.seconds
        return found

    def as_dict(self) -> dict:
        return {
            "samples": self.samples,
            "have": self.have,
            "tokens": self.tokens,
            "steps": self.steps,
            "measurement": self.measurement,
            "hardware": self.hardware,
            "hours": _round(self.hours),
            "seconds": _round(self.seconds),
            "cost": _round(self.cost),
            "price_per_hour": _round(self.price_per_hour),
            "hardware_estimated_on": self.estimated.isoformat() if self.estimated else None,
            "stages": {stage: _round(seconds) for stage, seconds in self.stage_seconds().items()},
            "lines": [
                {
                    "stage": line.stage,
                    "what": line.what,
                    "seconds": _round(line.seconds),
                    "hangs_on": line.hangs_on,
                    "on_critical_path": not line.beside,
                }
                for line in self.lines
            ],
            "storage": {
                "hidden_state_bytes": round(self.hidden_state_bytes),
                "total_bytes": round(self.storage_bytes),
                "disk_bytes": round(self.disk_bytes) if self.disk_bytes else None,
                "fits": self.disk_bytes is None or self.storage_bytes <= self.disk_bytes,
                "push_seconds": _round(self.push_seconds),
            },
            "memory": [
                {"what": m.what, "need_gb": _round(m.need_gb), "have_gb": m.have_gb, "fits": m.fits} for m in self.memory
            ],
        }


def _round(r: Range | None) -> list[float] | None:
    return [round(v, 2) for v in r.pair()] if r else None


def _grow(seconds: Range, fixed_share: Range, ratio: float) -> Range:
    """`seconds` at `ratio` times the work when `fixed_share` of them does not grow."""
    at = [share + (1 - share) * ratio for share in fixed_share.pair()]
    return Range(seconds.low * min(at), seconds.high * max(at))


@dataclass(frozen=True)
class Ratios:
    """Time on the target over time on the source, by what limits it; all 1 on the same machine."""

    same: bool
    compute: Range = ONE
    memory: Range = ONE
    allreduce: Range = ONE
    latency: Range = ONE
    disk_read: Range = ONE

    @classmethod
    def between(cls, source: Hardware | None, target: Hardware | None) -> Ratios:
        if source is None or target is None or source == target:
            return cls(same=True)

        def rate(h: Hardware, one: float) -> float:
            return h.gpus * one

        return cls(
            same=False,
            compute=Range.of(rate(source, source.dense_bf16_tflops) / rate(target, target.dense_bf16_tflops)),
            memory=Range.of(rate(source, source.memory_bandwidth_gb_s) / rate(target, target.memory_bandwidth_gb_s)),
            allreduce=source.allreduce_gb_s / target.allreduce_gb_s,
            latency=target.allreduce_latency_us / source.allreduce_latency_us,
            disk_read=source.disk_read_gb_s / target.disk_read_gb_s,
        )

    @property
    def either(self) -> Range:
        """Compute-bound or memory-bound, not known which."""
        both = (*self.compute.pair(), *self.memory.pair())
        return Range(min(both), max(both))

    def uncertain(self, r: Range, scaling: Range) -> Range:
        """A scaled time, widened by how well the share of the peak rate carries over to other hardware."""
        return r if self.same else r / scaling


def _node_lines(m: Measurement, network: Range | None) -> list[Line]:
    lines = []
    if m.node.seconds_setup.high:
        lines.append(Line("node", "set up the machine", m.node.seconds_setup, "fixed"))
    if m.node.download_verifier and m.verifier_bytes and network:
        seconds = Range.of(m.verifier_bytes / 1e9) / network
        lines.append(Line("node", "download the verifier", seconds, "verifier bytes, network"))
    return lines


def _load_line(m: Measurement, target: Hardware | None, ratios: Ratios) -> Line:
    """Start-up stays; reading the checkpoint goes at the target's disk rate, or by the disks' ratio when its size is unknown."""
    e = m.extract
    if ratios.same:
        return Line("extract", LOAD, e.seconds_load, "measured")
    if m.verifier_bytes:
        seconds = e.seconds_start + Range.of(m.verifier_bytes / 1e9) / target.disk_read_gb_s
        return Line("extract", LOAD, seconds, "verifier bytes, disk read, fixed start")
    seconds = e.seconds_start + e.seconds_load.minus(e.seconds_start) * ratios.disk_read
    return Line("extract", LOAD, seconds, "disk read ratio, fixed start")


def _scaled(measured: Range, ratios: Ratios, ratio: Range, scaling: Range, share: Range, allreduce: Range) -> Range:
    """A time of which `share` is all-reduce and the rest is limited by one rate; the two shares move against each other."""
    if ratios.same:
        return measured
    ends = [measured * (1 - s) * ratios.uncertain(ratio, scaling) + measured * s * allreduce for s in share.pair()]
    return Range(min(r.low for r in ends), max(r.high for r in ends))


def _answer_lines(m: Measurement, target: Hardware | None, ratios: Ratios, new_samples: int) -> list[Line]:
    """The verifier loads once: what writes the answers computes their hidden states before it ends."""
    a = m.answers
    if a is None:
        raise UserError(f"{m.name} has no `answers:` block, so the time of writing answers is unknown: leave --answers out")
    measured = a.tokens_per_sample * new_samples / a.tokens_per_second
    seconds = _scaled(measured, ratios, ratios.memory, a.scaling, a.allreduce_share, ratios.latency)
    load = _load_line(m, target, ratios)
    return [
        replace(load, stage="prepare"),
        Line("prepare", "answers by the verifier", seconds, "answer tokens, memory bandwidth, all-reduce latency"),
    ]


def _prefill(m: Measurement, ratios: Ratios, tokens: float) -> Range:
    """Prefill time: the compute share by the bf16 rate, the all-reduce share by the interconnect."""
    e = m.extract
    measured = Range.of(tokens) / e.tokens_per_second
    return _scaled(measured, ratios, ratios.compute, e.scaling, e.allreduce_share, ratios.allreduce)


def _extract_lines(m: Measurement, target: Hardware | None, ratios: Ratios, tokens: float, new_bytes: float) -> list[Line]:
    if not tokens:
        return [Line("extract", "find finished shards", m.extract.seconds_other, "fixed")]
    prefill = _prefill(m, ratios, tokens)
    bound = "measured tokens/s" if ratios.same else "bf16 rate, interconnect"
    if target is not None and not ratios.same:
        write = Range.of(new_bytes / 1e9) / target.disk_write_gb_s
        bound = "disk write" if write.low > prefill.low and write.high > prefill.high else f"{bound}, disk write"
        prefill = prefill.at_least(write)
    return [
        _load_line(m, target, ratios),
        Line("extract", "hidden states", prefill, f"tokens, {bound}"),
        Line("extract", "start, checks, commit", m.extract.seconds_other, "fixed"),
    ]


def _train_lines(
    m: Measurement, target: Hardware | None, ratios: Ratios, steps: int, new_bytes: float, packed: float, growth: float
) -> list[Line]:
    """Steps at the measured rate. `packed` times the tokens in a step cost 1 to `packed` times the time: the optimizer's memory
    traffic stays, the matrix products grow, and nobody has measured which is larger.
    """
    t = m.train
    step = ONE / t.steps_per_second * Range(min(1.0, packed), max(1.0, packed))
    bound = "steps, measured steps/s"
    if not ratios.same:
        ends = [
            ratios.uncertain(step.minus(overhead) * ratios.either, t.scaling) + overhead
            for overhead in t.overhead_seconds_per_step.pair()
        ]
        step = Range(min(r.low for r in ends), max(r.high for r in ends))
        bound = "steps, bf16 rate and memory bandwidth, fixed launch time a step"
    seconds = step * steps
    if target is not None and not ratios.same:
        read = Range.of(t.epochs * new_bytes / 1e9) / target.disk_read_gb_s
        if read.high > seconds.high:
            bound = "disk read"
        seconds = seconds.at_least(read)
    grown = steps * packed / t.steps
    outside = _grow(t.seconds_outside, t.fixed_share, grown)
    lines = [Line("train", "optimizer steps", seconds, bound)]
    if not t.seconds_validation.high:
        return [*lines, Line("train", "start, validation, checkpoints", outside, "fixed, number of validations")]
    walked = _at_most(t.validation_samples, growth, t.validation_samples_most) * (1.0 if t.validations_fixed else grown)
    return [
        *lines,
        Line("train", "validation walks", t.seconds_validation * walked, "held-out samples, train.eval_samples and eval_every"),
        Line("train", "start, checkpoints", outside, "fixed, steps"),
    ]


def _at_most(samples: int, growth: float, most: int | None) -> float:
    """How many times as many of `samples` there are when the data grow and no more than `most` are taken."""
    grown = samples * growth
    if most is not None:
        grown = min(grown, max(most, samples))
    return grown / samples if samples else 1.0


def _evaluate_line(m: Measurement, growth: float) -> Line:
    e = m.evaluate
    ratio = _at_most(e.samples, growth, e.samples_most)
    return Line("evaluate", "acceptance walk", _grow(e.seconds, e.fixed_share, ratio), "held-out samples, evaluate.samples")


def _push_lines(m: Measurement, push: Range | None, beside: Range) -> tuple[list[Line], tuple[float, float]]:
    """Streaming push runs beside extract and train; only what is left then is waited for, as Plan.waiting. Otherwise all of it is."""
    if push is None:
        return [], (0.0, 0.0)
    if not m.push_while_extracting:
        return [Line("push", "hidden states to the remote", push, "bytes, network")], (0.0, 0.0)
    waiting = max(0.0, push.low - beside.low), max(0.0, push.high - beside.high)
    lines = [
        Line("push", "hidden states, while others run", push, "bytes, network", beside=True),
        Line("push", LEFT, Range(min(waiting), max(waiting)), "bytes, network, train time"),
    ]
    return lines, waiting


def _memory(m: Measurement, target: Hardware | None) -> list[Memory]:
    if target is None:
        return []
    found = []
    if m.verifier_bytes:
        # 3 to 10 GB a GPU for activations, CUDA graphs, NCCL and the cache of one batch of prompts
        need = Range.of(m.verifier_bytes / 1e9 / target.gpus) + Range(3, 10)
        found.append(Memory("verifier in one GPU, with work space", need, target.memory_gb * 0.95))
    if m.drafter_parameters:
        need = Range.of(m.drafter_parameters * TRAINING_BYTES_PER_PARAMETER / 1e9) + Range(4, 30)
        found.append(Memory("training in one GPU, with activations", need, target.memory_gb * 0.95))
    return found


def make(m: Measurement, samples: int, *args, **options) -> Plan:
    """See :func:`_make`. Raises UserError too when figures are so large or so small that times leave what a float can hold."""
    if samples > MOST_SAMPLES:
        raise UserError(f"samples must be at most {MOST_SAMPLES:,}")
    try:
        plan = _make(m, samples, *args, **options)
        _ = plan.cost or plan.seconds  # their sums are worked out when asked for
        return plan
    except (OverflowError, ValueError, ZeroDivisionError) as e:
        raise UserError(
            f"no plan of {samples:,} samples from {m.name}: a time or a size is out of bounds ({e}); check the number of samples, the "
            "bandwidth and the figures of the measurement and the hardware profile"
        ) from e


def _make(
    m: Measurement,
    samples: int,
    source: Hardware | None = None,
    target: Hardware | None = None,
    bandwidth_gb_s: float | None = None,
    have: int = 0,
    answers: bool = False,
    tokens_per_step: int | None = None,
) -> Plan:
    """Plan `samples` samples from measurement `m` taken on `source`, on `target` (None or equal: the same machine).

    `have` samples have their hidden states already. `bandwidth_gb_s` replaces the target's network rate. `answers`: the
    verifier writes them first. `tokens_per_step`: another batch size than the measured run's. Raises UserError for counts
    below 1 and for a target when the machine that measured is unknown.
    """
    if samples < 1 or have < 0:
        raise UserError(f"samples = {samples} and have = {have}: samples must be at least 1, have at least 0")
    if bandwidth_gb_s is not None and not 0 < bandwidth_gb_s < math.inf:
        raise UserError(f"bandwidth = {bandwidth_gb_s} GB/s must be above 0")
    if target is not None and source is None:
        raise UserError(
            f"{m.name} was measured on a machine that no hardware profile describes, so its times cannot be scaled to "
            f"{target.name}: leave --hardware out to plan for the same machine, set `hardware:` in a file written by --save, "
            "or plan --from kimi-k2.5-local"
        )
    ratios = Ratios.between(source, target)
    growth = samples / m.samples
    tokens = m.tokens * growth
    new_tokens = m.tokens * max(0, samples - have) / m.samples
    hidden, new_bytes = tokens * m.bytes_per_token, new_tokens * m.bytes_per_token
    packed = 1.0
    if tokens_per_step is not None:
        if tokens_per_step < 1:
            raise UserError(f"tokens per step = {tokens_per_step} must be at least 1")
        packed = tokens_per_step / (m.tokens * m.train.epochs / m.train.steps)
    steps = m.train.steps if m.train.steps_fixed else max(1, round(m.train.steps * growth / packed))
    network = Range.of(bandwidth_gb_s) if bandwidth_gb_s else (target.network_gb_s if target else None)

    extract = _extract_lines(m, target, ratios, new_tokens, new_bytes)
    answering = _answer_lines(m, target, ratios, samples - have) if answers and samples > have else []
    if answering:
        states = next(line for line in extract if line.what == "hidden states")
        answering.append(replace(states, stage="prepare"))
        extract = [Line("extract", "find finished shards", m.extract.seconds_other, "fixed")]
    train = _train_lines(m, target, ratios, steps, hidden, packed, growth)
    beside = sum((line.seconds for line in [*answering[2:], *extract, *train] if line.what != LOAD), ZERO)
    push = Range.of(new_bytes / 1e9) / network if network else None
    lines = [
        *(_node_lines(m, network) if target else []),
        *([] if have else [Line("verifier", "identity, head weights", m.verifier.seconds_fixed, "fixed")]),
        Line("prepare", "prompts and masks", _grow(m.prepare.seconds, m.prepare.fixed_share, growth), "samples"),
        *answering,
        *extract,
        *train,
        Line("export", "layouts and self-check", m.export.seconds_fixed, "fixed"),
        _evaluate_line(m, growth),
    ]
    pushing, waiting = _push_lines(m, push, beside * m.repeat)
    lines = [replace(line, seconds=line.seconds * m.repeat) for line in lines] + pushing
    checkpoints = m.drafter_parameters * CHECKPOINT_BYTES_PER_PARAMETER
    return Plan(
        samples=samples,
        have=min(have, samples),
        tokens=round(tokens),
        steps=steps,
        measurement=m.name,
        hardware=target.name if target else (source.name if source else None),
        lines=[line for line in lines if line.seconds.high > 0],
        hidden_state_bytes=hidden,
        storage_bytes=hidden + m.verifier_bytes + checkpoints,
        disk_bytes=target.disk_tb * 1e12 if target else None,
        push_seconds=push,
        memory=_memory(m, target),
        price_per_hour=target.price_per_hour if target else None,
        estimated=target.as_of if target else None,
        waiting=waiting,
    )


def largest(plan_for, budget: float | None, hours: float | None) -> dict[str, int]:
    """The largest sample counts within a budget in dollars, a time and the disk: `sure` by the high ends, `at_best` by the low ends.

    `plan_for(samples)` gives a Plan; its times never fall with more samples, so bisection finds the edge. 0: not even one.
    """

    def fits(samples: int, end: str) -> bool:
        plan = plan_for(samples)
        if plan.disk_bytes is not None and plan.storage_bytes > plan.disk_bytes:
            return False
        if hours is not None and getattr(plan.hours, end) > hours:
            return False
        if budget is not None:
            if plan.cost is None:
                raise UserError("a budget needs a price an hour: name the machine with --hardware")
            return getattr(plan.cost, end) <= budget
        return True

    found = {}
    for name, end in (("sure", "high"), ("at_best", "low")):
        low, high = 0, 1
        while high < 10**9 and fits(high, end):
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle, end) else (low, middle)
        found[name] = low
    return found


@dataclass(frozen=True)
class Projection:
    """Tokens/s at batch 1: without and with the drafter, and what would have to change to reach the published figure."""

    hardware: str
    baseline: Range
    with_drafter: Range
    allreduce_share: Range
    acceptance_needed: Range | None
    draft_tokens: int

    def as_dict(self) -> dict:
        return {
            "hardware": self.hardware,
            "baseline_tokens_per_second": _round(self.baseline),
            "tokens_per_second": _round(self.with_drafter),
            "allreduce_share": _round(self.allreduce_share),
            "acceptance_length_for_published": _round(self.acceptance_needed),
        }


def serving(s: Serving, source: Hardware, target: Hardware, acceptance_length: Range | None = None) -> Projection:
    """Serving speed on `target` from a baseline measured on `source`.

    One decoding step is all-reduce (by latency), memory traffic (by bandwidth) and kernel launches (the same anywhere). A
    round of speculation costs one verifying step and `draft_tokens` drafter steps and yields `acceptance_length` tokens.
    """
    ratios = Ratios.between(source, target)
    step = 1.0 / s.baseline_tokens_per_second
    allreduce = Range.of(step * s.allreduce_share) * ratios.latency
    rest = step * (1 - s.allreduce_share)
    ends = [floor + (rest - floor) * ratios.memory.middle for floor in (min(f, rest) for f in s.kernel_floor_seconds.pair())]
    on_target = allreduce + Range(min(ends), max(ends))
    round_cost = s.verify_cost + s.draft_cost * s.draft_tokens
    accepted = acceptance_length or s.acceptance_length
    baseline = ONE / on_target
    published = s.published_tokens_per_second
    return Projection(
        hardware=target.name,
        baseline=baseline,
        with_drafter=baseline * (accepted / round_cost),
        allreduce_share=Range(
            allreduce.low / (allreduce.low + max(ends)), min(1.0, allreduce.high / (allreduce.high + min(ends)))
        ),
        acceptance_needed=Range.of(published) / baseline * round_cost if published else None,
        draft_tokens=s.draft_tokens,
    )


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / HOUR:.1f} h"


def spread(r: Range, text=duration) -> str:
    """`low - high`, once when both read the same."""
    low, high = text(r.low), text(r.high)
    return low if low == high else f"{low} - {high}"


def size(n: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if n >= scale:
            return f"{n / scale:.2f} {unit}"
    return f"{n / 1e3:.0f} kB"


def dollars(v: float) -> str:
    return f"${v:,.0f}"


def describe(plan: Plan, m: Measurement, largest: dict[str, int] | None, projection: Projection | None) -> list[str]:
    """The plan as lines of text for a terminal."""
    on = f" on {plan.hardware}" if plan.hardware else " on the machine measured"
    lines = [f"{plan.samples:,} samples, {plan.tokens:,} tokens, {plan.steps:,} training steps{on}"]
    lines.append(f"measured: {m.name} ({m.samples:,} samples{f' on {m.hardware}' if m.hardware else ''})")
    if plan.have:
        lines.append(f"{plan.have:,} of the samples have their hidden states already (--have 0 plans from nothing)")
    lines.append("")
    for line in plan.lines:
        beside = " (runs beside)" if line.beside else ""
        lines.append(f"  {line.stage:<9} {line.what:<34} {spread(line.seconds):>18}   {line.hangs_on}{beside}")
    cost = f"   {spread(plan.cost, dollars)} at {spread(plan.price_per_hour, dollars)} an hour" if plan.cost else ""
    lines.append(f"  {'total':<9} {'':<34} {spread(plan.seconds):>18}{cost}")
    lines.append("")
    lines.append(f"storage: {size(plan.hidden_state_bytes)} of hidden states, {size(plan.storage_bytes)} in all")
    if plan.disk_bytes:
        fits = "fits" if plan.storage_bytes <= plan.disk_bytes else "DOES NOT FIT"
        lines[-1] += f", {fits} {size(plan.disk_bytes)} of disk"
    if plan.push_seconds:
        lines.append(f"push: {spread(plan.push_seconds)}")
    for memory in plan.memory:
        need = spread(memory.need_gb, lambda v: f"{v:.0f} GB")
        lines.append(f"memory: {memory.what}: {need} of {memory.have_gb:.0f} GB, {'fits' if memory.fits else 'DOES NOT FIT'}")
    if plan.estimated:
        lines.append(
            f"rates and prices of {plan.hardware} are estimates of {plan.estimated}: put what you are offered into a copy"
        )
    if largest is not None:
        by_disk = ", the disk counted too" if plan.disk_bytes else ""
        lines.append(
            f"largest run within the limits: {largest['sure']:,} samples for sure, {largest['at_best']:,} at best{by_disk}"
        )
    if projection is not None:
        rate = lambda v: f"{v:.0f}"  # noqa: E731
        lines.append(
            f"serving on {projection.hardware}, batch 1: {spread(projection.baseline, rate)} tok/s without, "
            f"{spread(projection.with_drafter, rate)} with the drafter; all-reduce takes "
            f"{spread(projection.allreduce_share, lambda v: f'{v:.0%}')} of a step"
        )
        if (need := projection.acceptance_needed) is not None:
            possible = projection.draft_tokens + 1
            short = "" if need.high <= possible else f"; more than {possible} is not possible with {possible - 1} draft tokens"
            lines.append(
                f"  {m.serving.published_tokens_per_second:.0f} tok/s need an acceptance length of "
                f"{spread(need, lambda v: f'{v:.1f}')}{short}"
            )
    return lines
