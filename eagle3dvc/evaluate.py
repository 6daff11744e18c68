"""The evaluate stage: the acceptance length that serving will show, with what it is made of and how sure it is.

(a) Always: the exact greedy walk over the held-out split with the exported drafter, as an engine would load it; in total, by
position, by source, with bootstrap intervals, and beside a baseline when there is one. These are metrics: the same inputs give
the same numbers. (b) With evaluate.engine = vllm: real speculative decoding, the engine's own counters, tokens a second with
and without the drafter. Speeds differ from run to run, so they go to logs/evaluate.json (docs/evaluation.md).
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagle3dvc.drafter import layouts
from eagle3dvc.errors import UserError
from eagle3dvc.params import Params
from eagle3dvc.stage import commit_of, dvc_get

PLOTS = Path("plots/evaluate")
EXPORT = "models/export"


@dataclass(frozen=True)
class Heldout:
    """The samples of a walk: indices into the cache, read one by one."""

    data: Any
    indices: np.ndarray

    def __iter__(self) -> Iterator[Any]:
        for i in self.indices:
            yield self.data[int(i)]
            self.data.release(int(i))

    def __len__(self) -> int:
        return len(self.indices)


def heldout(samples: int, hidden: str | Path, prompts: str | Path) -> Heldout:
    """The first `samples` held-out samples that have an answer; UserError when there is none."""
    from eagle3dvc.hidden_states.reader import HiddenStates

    data = HiddenStates(hidden, prompts)
    found = data.splits["heldout"]
    if not len(found):
        raise UserError(
            f"{prompts} has no held-out samples: raise prepare.heldout_fraction or max_samples, then run `dvc repro`"
        )
    return Heldout(data, found[:samples])


def as_speculators(folder: Path, scratch: Path) -> Path:
    """The folder itself, or what is inside it, in the layout the walk loads; other layouts are converted into `scratch`.

    Raises UserError where there is none, or where it is damaged or not what its provenance says.
    """
    from eagle3dvc.drafter import check
    from eagle3dvc.drafter.convert import convert

    candidates = [folder, folder / layouts.SPECULATORS, folder / layouts.SGLANG, folder / "best"]
    for f in candidates:
        if (f / "config.json").is_file():
            if layouts.detect(layouts.read_config(f), f) == layouts.SPECULATORS:
                # read here: speculators and transformers would end a damaged one in a traceback
                check.provenance(f, layouts.read(f))
                return f
            try:
                convert(f, layouts.SPECULATORS, scratch / "converted")
            except UserError as e:
                how = f": convert it with `eagle3dvc convert {f} OUT --to speculators` and give OUT instead"
                raise UserError(f"{e}{how if '--' in str(e) else ''}") from None
            return scratch / "converted"
    raise UserError(f"{folder} holds no drafter (looked for config.json in it, in speculators/, sglang/ and best/)")


def baseline_folder(baseline: str, scratch: Path, repository: Path) -> tuple[Path, str | None]:
    """(folder, None) of a drafter's folder; (folder, commit) of a git revision or experiment, whose models/export is fetched from the
    DVC cache or remote. Raises UserError."""
    if Path(baseline).is_dir():
        return Path(baseline), None
    commit = commit_of(baseline, repository)
    if commit is None:
        raise UserError(
            f"evaluate.baseline = {baseline} is neither a folder nor a git revision or experiment of this repository"
        )
    out = scratch / "baseline"
    if why := dvc_get(repository, EXPORT, commit, out):
        raise UserError(
            f"evaluate.baseline = {baseline}: DVC cannot get {EXPORT} of {commit[:12]} ({why}); if another cache or remote has it, "
            "run `dvc push` there or `dvc fetch -r REMOTE` in a checkout of that commit"
        )
    return out, commit


def named_verifier(folder: Path) -> str | None:
    """The public name of the verifier in the config.json of a folder in speculators layout; None where it says none."""
    return ((layouts.read_config(folder).get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")


def load_drafter(folder: Path, layer_ids: list[int], verifier: str | Path, where: str):
    """The drafter ready to walk on states of these layers (of `where`, for messages), on the GPU where there is one."""
    import torch

    from eagle3dvc.drafter import model as drafter_model
    from eagle3dvc.verifier import load_info

    config, name = layouts.read_config(folder), load_info(verifier).name
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    said = named_verifier(folder)
    if said != name:
        print(f"note: {folder} says it is a drafter for {said}; it is evaluated on {name}", file=sys.stderr, flush=True)
    if ids != list(layer_ids[:-1]):
        raise UserError(
            f"{folder} reads the auxiliary layers {ids}, {where} hold {list(layer_ids[:-1])}: it cannot be evaluated there"
        )
    drafter = drafter_model.load(folder, verifier)
    return drafter.to("cuda") if torch.cuda.is_available() else drafter


def difference(new: np.ndarray, old: np.ndarray, resamples: int, seed: int) -> tuple[float, list[float]]:
    """Difference of two acceptance lengths on the same samples and its 95 % paired bootstrap interval.

    new, old: int64 [samples, 2] of drafts and accepted; the same draw of samples serves both, so what makes a sample easy or
    hard for either cancels.
    """
    rng, n = np.random.default_rng(seed), len(new)

    def length(counts: np.ndarray) -> float:
        drafts, accepted = counts.sum(0)
        return 1 + accepted / drafts if drafts else 1.0

    draws = [rng.integers(0, n, n) for _ in range(resamples)]
    spread = np.quantile([length(new[d]) - length(old[d]) for d in draws], [0.025, 0.975])
    return length(new) - length(old), [float(x) for x in spread]


def _rounded(x: Any) -> Any:
    if isinstance(x, float):
        return round(x, 6)
    if isinstance(x, dict):
        return {k: _rounded(v) for k, v in x.items()}
    return [_rounded(v) for v in x] if isinstance(x, list | tuple) else x


def on_policy(params: Params) -> bool:
    """Whether the answers are the verifier's own greedy output, so that the text itself is what it says next."""
    return params.prepare.responses == "verifier" and params.prepare.temperature == 0


def build(
    params: Params,
    log: dict,
    drafter: str | Path = EXPORT,
    hidden: str | Path = "data/hidden_states",
    prompts: str | Path = "data/prompts",
    verifier: str | Path = "data/verifier",
    plots: str | Path = PLOTS,
) -> dict[str, Any]:
    """The metrics of the stage; writes the plots; `log["engine"]` where an engine ran. Raises UserError."""
    from eagle3dvc.drafter.acceptance import walk
    from eagle3dvc.stage import root
    from eagle3dvc.verifier import load_head, load_info

    e = params.evaluate
    samples, head, own = heldout(e.samples, hidden, prompts), load_head(verifier), on_policy(params)
    with tempfile.TemporaryDirectory(prefix="eagle3dvc-") as scratch_:
        scratch = Path(scratch_)
        folder = as_speculators(Path(drafter), scratch / "drafter")
        model = load_drafter(folder, samples.data.layer_ids, verifier, str(hidden))
        began = time.monotonic()
        result = walk(model, head, samples, e.draft_tokens, own)
        metrics = report(result, params, len(samples), own)
        sweep = {}
        for k in sorted(set(e.sweep_draft_tokens) - {e.draft_tokens}):
            sweep[k] = walk(model, head, samples, k, own).acceptance_length
        if sweep:
            sweep[e.draft_tokens] = result.acceptance_length
            metrics["by_draft_tokens"] = {str(k): _rounded(sweep[k]) for k in sorted(sweep)}
        del model
        if e.baseline:
            found, commit = baseline_folder(e.baseline, scratch, root())
            other = as_speculators(found, scratch / "other")
            origin = {"name": e.baseline, "commit": commit, "verifier": named_verifier(other)}
            if origin["verifier"] == load_info(verifier).name:
                del origin["verifier"]
            before = walk(
                load_drafter(other, samples.data.layer_ids, verifier, str(hidden)), head, samples, e.draft_tokens, own
            )
            change, interval = difference(result.per_sample, before.per_sample, e.bootstrap, params.seed)
            metrics["baseline"] = _rounded(
                {
                    **{k: v for k, v in origin.items() if v is not None},
                    "acceptance_length": before.acceptance_length,
                    "acceptance_by_position": before.rate_by_position,
                    "difference": change,
                    "difference_ci95": interval,
                }
            )
        write_plots(result, Path(plots))
        if e.engine == "vllm":
            log["engine"] = run_engine(params, folder, samples, verifier, scratch)
        # what more held-out samples add to; `plan` reads it
        log["seconds_growing"] = round(time.monotonic() - began - log.get("engine", {}).get("seconds_load_all", 0.0), 3)
    return metrics


def report(result: Any, params: Params, samples: int, own: bool) -> dict[str, Any]:
    """Counters of one walk as metrics."""
    return _rounded(
        {
            "acceptance_length": result.acceptance_length,
            "acceptance_length_ci95": list(result.interval(params.evaluate.bootstrap, seed=params.seed)),
            "acceptance_by_position": result.rate_by_position,
            "draft_tokens": params.evaluate.draft_tokens,
            "drafts": result.drafts,
            "accepted": result.accepted,
            "samples": samples,
            "greedy_agreement": result.greedy_agreement,
            "on_policy": own,
            "by_source": {
                s: {**{k: v for k, v in row.items() if k != "by_position"}, "acceptance_by_position": _rates(row)}
                for s, row in result.by_source.items()
            },
        }
    )


def _rates(row: dict[str, Any]) -> list[float]:
    return [n / row["drafts"] if row["drafts"] else 0.0 for n in row["by_position"]]


def write_plots(result: Any, folder: Path) -> None:
    """`by_position.csv` (source, position, accepted) and `by_source.csv` (source, acceptance_length) for `dvc plots`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with open(folder / "by_position.csv", "w", newline="", encoding="utf-8") as f:
        out = csv.writer(f)
        out.writerow(["source", "position", "accepted"])
        rows = [("all", result.rate_by_position), *((s, _rates(row)) for s, row in result.by_source.items())]
        out.writerows([s, j, round(r, 6)] for s, rates in rows for j, r in enumerate(rates, 1))
    with open(folder / "by_source.csv", "w", newline="", encoding="utf-8") as f:
        out = csv.writer(f)
        out.writerow(["source", "acceptance_length"])
        out.writerows([s, round(row["acceptance_length"], 6)] for s, row in result.by_source.items())


# ---------------------------------------------------------------- real speculative decoding


@dataclass(frozen=True)
class Prompt:
    token_ids: list[int]
    group: str  # source, or source/category where the row has one


def heldout_prompts(samples: Heldout, limit: int) -> list[Prompt]:
    """Each held-out sample up to its first answer."""
    found = []
    for item in samples:
        answer = np.flatnonzero(np.asarray(item.loss_mask))
        if len(answer) and answer[0] > 0 and answer[0] <= limit:
            found.append(Prompt(item.token_ids[: answer[0]].tolist(), item.source))
    return found


def file_prompts(params: Params, verifier: str | Path, per_file: int) -> list[Prompt]:
    """First questions of the rows of evaluate.prompts, rendered as prepare renders them; groups are file/category. Raises UserError.

    Files whose names are the same are told apart by their paths.
    """
    from eagle3dvc.params import Source
    from eagle3dvc.prompts.conversations import Rejected, from_row
    from eagle3dvc.prompts.render import load_renderer
    from eagle3dvc.prompts.sources import open_source

    paths = params.evaluate.prompts
    if twice := [p for p, n in Counter(map(os.path.realpath, paths)).items() if n > 1]:
        raise UserError(f"evaluate.prompts names {twice[0]} twice: its questions would count twice; remove one of them")
    renderer = load_renderer(params, verifier)
    sources = [open_source(Source(path=p), params.seed, f"evaluate.prompts[{i}]") for i, p in enumerate(paths)]
    names = Counter(source.name for source in sources)
    found = []
    for path, source in zip(paths, sources, strict=True):
        name = source.name if names[source.name] == 1 else path
        for n, row in enumerate(source.rows()):
            if n == per_file:
                break
            try:
                conversation = from_row(row, params.prepare.system_prompt)
                if conversation.messages is None:
                    raise UserError(f"evaluate.prompts: {row.where} is pre-tokenised; give questions as text")
                roles = [m["role"] for m in conversation.messages]
                end = roles.index("assistant") if "assistant" in roles else len(roles)
                ids = renderer.prompt_ids(conversation.messages[:end], conversation.tools)
                category = row.data.get("category") if isinstance(row.data, dict) else None
                if category and not _is_text(category):  # it names a group in the log
                    raise Rejected("invalid_category", f"its category {ascii(category)[:80]} is no text")
            except Rejected as e:
                raise UserError(f"evaluate.prompts: {row.where} is no question ({e}); correct it or remove it") from None
            found.append(Prompt(list(ids), f"{name}/{category}" if category else name))
    return found


def _is_text(value: Any) -> bool:
    """Whether it is text that can be written: half of a surrogate pair cannot."""
    try:
        return isinstance(value, str) and bool(value.encode())
    except UnicodeEncodeError:
        return False


def stop_tokens(folder: str | Path) -> list[int]:
    """End-of-answer tokens of the verifier: generation_config.json, else config.json."""
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        try:
            ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        except (ValueError, AttributeError) as e:
            raise UserError(f"{path} is damaged ({e}): get it again from where the verifier is") from None
        if ids not in (None, []):
            return sorted({ids} if isinstance(ids, int) else set(ids))
    raise UserError(f"{folder} names no eos_token_id: an answer would never end; add it to generation_config.json")


def run_engine(params: Params, drafter: Path, samples: Heldout, verifier: str | Path, scratch: Path) -> dict[str, Any]:
    """Speculative decoding in vLLM, with and without the drafter on the same settings. Returns what goes to the log.

    With evaluate.alone the drafter's folder is served by itself too; with evaluate.exact the walk is repeated over the engine's own
    answers. Raises UserError where answers or counters then differ although the verifier computes in float32.
    """
    import dataclasses

    from eagle3dvc import serving
    from eagle3dvc.stage import root

    e, logs = params.evaluate, root() / "logs"
    plain, specs = engine_specs(params, drafter, samples, verifier)
    own = default_draft_tokens(drafter)  # what an engine drafts that is given the folder and nothing else
    if e.exact:  # answers of one length, and beyond it the text that the last drafts are compared with
        endless = {"stop_token_ids": []}
        plain = dataclasses.replace(plain, max_new_tokens=e.max_new_tokens + max(*specs, own), **endless)
        specs = {k: dataclasses.replace(spec, **endless) for k, spec in specs.items()}
    base = serving.measure(plain, logs / "evaluate-plain.log")
    found = {k: serving.measure(spec, logs / f"evaluate-draft{k}.log") for k, spec in specs.items()}
    log = compare(base, found, e.draft_tokens, params.extract.dtype, e.max_new_tokens)
    log["endless"] = e.exact  # then these are not the figures of serving: text past the end of an answer is drafted as well
    served = {str(k): (k, result) for k, result in found.items()}
    if e.alone:
        alone = dataclasses.replace(specs[e.draft_tokens], model=None, draft_tokens=0)
        if Path(plain.model).is_dir():  # under its public name, as a hub would give it, so that no network is needed
            name = layouts.read_config(drafter)["speculators_config"]["verifier"]["name_or_path"]
            alone = dataclasses.replace(alone, env=alone.env | stand_in(name, Path(plain.model), scratch / "hub"))
        result = serving.measure(alone, logs / "evaluate-alone.log")
        served["alone"] = (own, result)
        log["alone"] = compare(base, {own: result}, own, params.extract.dtype, e.max_new_tokens)
    if e.exact:
        log["exact"] = exact(params, drafter, verifier, plain, base.outputs, served, scratch)
    log["seconds_load_all"] = round(base.seconds_load + sum(result.seconds_load for _, result in served.values()), 3)
    return log


def default_draft_tokens(drafter: Path) -> int:
    """The number of draft tokens that a folder of the speculators layout itself proposes."""
    return layouts.read(drafter).speculative_tokens


def stand_in(name: str, folder: Path, cache: Path) -> dict[str, str]:
    """Environment of a process that finds `folder` under the hub id `name` in a hub cache of its own, and nothing else."""
    snapshot = cache / f"models--{name.replace('/', '--')}" / "snapshots" / "local"
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        (snapshot / file.name).symlink_to(file.resolve())
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("local")
    return {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}


def exact(
    params: Params,
    drafter: Path,
    verifier: str | Path,
    plain: Any,
    answers: list[list[int]],
    served: dict[str, tuple[int, Any]],
    scratch: Path,
) -> dict[str, Any]:
    """The walk over the engine's own greedy answers, beside the engine's counters; UserError where they differ in float32.

    plain: the serving.Spec that gave `answers`, longer than those of `served` ({name: (draft tokens, serving.Result)}) by the drafts
    that reach past their end. Returns {name: {"walk", "engine": counters, "equal", "identical_outputs"}}; `engine` is the first batch
    size's, `equal` and the outputs are of all.
    """
    from eagle3dvc.drafter.acceptance import walk
    from eagle3dvc.verifier import load_head

    limit, head = params.evaluate.max_new_tokens, load_head(verifier)
    items = answered(params, verifier, plain, answers, scratch / "answers")
    model = load_drafter(drafter, items.layer_ids, verifier, "the engine's answers")
    report, wrong = {}, []
    for name, (k, result) in served.items():
        cut = [item.head(len(prompt) + limit + k) for item, prompt in zip(items.items, plain.prompts, strict=True)]
        found = walk(model, head, cut, k, True, tail=k)
        wanted = {"drafts": found.drafts, "accepted": found.accepted, "by_position": found.by_position}
        same = sum(a == b[:limit] for a, b in zip(result.outputs, answers, strict=True))
        counters = [result.counters(i) for i in range(len(result.runs))]
        equal = all(c == wanted for c in counters)
        report[name] = {
            "walk": wanted,
            "engine": counters[0],
            "equal": equal,
            "identical_outputs": same,
            "prompts": len(answers),
        }
        if not equal or same < len(answers):
            wrong.append(f"{name}: walk {wanted}, engine {counters}, {same} of {len(answers)} answers as without a drafter")
    if wrong and params.extract.dtype == "float32":
        raise UserError(
            f"evaluate.exact: in float32 the engine's counters must be the walk's and its answers those without a drafter, but "
            f"{'; '.join(wrong)}: this engine does not serve the drafter as it was trained, look at logs/evaluate-*.log"
        )
    return report


@dataclass(frozen=True)
class Answered:
    """Prompts with their answers and the verifier's states, computed anew in the dtype that the engine serves in."""

    items: list[Any]
    layer_ids: list[int]


def answered(params: Params, verifier: str | Path, plain: Any, answers: list[list[int]], folder: Path) -> Answered:
    """States of every prompt and its answer, from the engine that extract would use; none of it is kept on disk."""
    import torch
    from safetensors.torch import load_file

    from eagle3dvc import engines
    from eagle3dvc.hidden_states.format import ShardRequest
    from eagle3dvc.verifier import layer_ids, load_head, load_info

    info = load_info(verifier)
    ids, dtype = layer_ids(info, params), params.extract.dtype
    texts = [np.asarray(p + a, np.int32) for p, a in zip(plain.prompts, answers, strict=True)]
    prepare = params.prepare.model_copy(update={"max_length": max(map(len, texts))})
    engine = engines.make(params.model_copy(update={"prepare": prepare}), info, ids)
    header = {"identity": info.identity, "layer_ids": ids, "stored_dtype": dtype, "numerics": engines.numerics(params)}
    folder.mkdir(parents=True)
    try:
        engine.prove(load_head(verifier))
        path = folder / "answers.safetensors"
        for _ in engine.extract([ShardRequest("answers", texts, header, info.hidden_size, path)]):
            pass
    finally:
        engine.close()
    states = load_file(path)["hidden_states"].split([len(t) for t in texts])
    path.unlink()
    items = []
    for text, prompt, group, state in zip(texts, plain.prompts, plain.groups, states, strict=True):
        mask = torch.arange(len(text)) >= len(prompt)
        items.append(Sample(state, torch.as_tensor(text).long(), mask, group))
    return Answered(items, ids)


@dataclass(frozen=True)
class Sample:
    """What the walk reads of a sample: hidden_states [T, layers, hidden], token_ids int64 [T], loss_mask bool [T], source."""

    hidden_states: Any
    token_ids: Any
    loss_mask: Any
    source: str

    def head(self, length: int) -> Sample:
        """Its first `length` tokens."""
        return Sample(self.hidden_states[:length], self.token_ids[:length], self.loss_mask[:length], self.source)


def engine_specs(params: Params, drafter: Path, samples: Heldout, verifier: str | Path) -> tuple[Any, dict[int, Any]]:
    """(the engine without a drafter, {draft tokens: the same engine with it}): serving.Spec each.

    Draft-token counts are those of evaluate.draft_tokens and sweep_draft_tokens. Raises UserError where there is no prompt.
    """
    import dataclasses

    from eagle3dvc import engines, serving
    from eagle3dvc.verifier import load_info, model_path

    e, x, info = params.evaluate, params.extract, load_info(verifier)
    commit = engines.revision(info)
    prompts = file_prompts(params, verifier, e.samples) if e.prompts else heldout_prompts(samples, params.prepare.max_length)
    if not prompts:
        raise UserError("there is no prompt to decode: give evaluate.prompts, or held-out samples with an answer")
    counts = sorted({e.draft_tokens, *e.sweep_draft_tokens})
    _check_room(prompts, params, counts[-1], verifier)
    plain = serving.Spec(
        prompts=[p.token_ids for p in prompts],
        groups=[p.group for p in prompts],
        max_new_tokens=e.max_new_tokens,
        model=model_path(params, info),
        stop_token_ids=stop_tokens(verifier),
        batch_sizes=e.batch_sizes,
        dtype=x.dtype,
        engine_args={
            "trust_remote_code": params.verifier.trust_remote_code,
            "quantization": x.quantization,
            "kv_cache_dtype": x.kv_cache_dtype,
            "tensor_parallel_size": x.tensor_parallel_size,
            "enable_expert_parallel": x.enable_expert_parallel,
            "gpu_memory_utilization": x.gpu_memory_utilization,
            "enforce_eager": x.enforce_eager,
            "skip_tokenizer_init": True,
            **x.engine_args,
            **({"revision": commit} if commit else {}),  # whose states the drafter learnt from
        },
        env=x.env,
    )
    return plain, {k: dataclasses.replace(plain, drafter=str(drafter), draft_tokens=k) for k in counts}


def _check_room(prompts: list[Prompt], params: Params, draft_tokens: int, verifier: str | Path) -> None:
    """UserError where a prompt, its answer and the drafts past its end exceed the verifier's positions."""
    from eagle3dvc.serving import ROOM

    config = json.loads((Path(verifier) / "config.json").read_text(encoding="utf-8"))
    positions, longest = config.get("max_position_embeddings"), max(prompts, key=lambda p: len(p.token_ids))
    room = None if positions is None else positions - params.evaluate.max_new_tokens - draft_tokens - ROOM
    if room is not None and len(longest.token_ids) > room:
        raise UserError(
            f"a prompt of {longest.group} has {len(longest.token_ids)} tokens; with evaluate.max_new_tokens = "
            f"{params.evaluate.max_new_tokens} and {draft_tokens} draft tokens the verifier's {positions} positions leave {room}: "
            "lower evaluate.max_new_tokens, or remove the longest prompts"
        )


def compare(plain: Any, found: dict[int, Any], draft_tokens: int, dtype: str, max_new_tokens: int) -> dict[str, Any]:
    """One engine's figures with and without a drafter. plain: serving.Result without, whose answers may go on beyond
    max_new_tokens; found: by number of draft tokens. `by_group` is of batch size 1, {} where that was not asked for."""
    main = found[draft_tokens]
    first, base = main.runs[0], plain.runs[0]
    by_group = {}
    for run, without in zip(main.runs, plain.runs, strict=True):
        by_group |= {g: {**c, **_group(c, without["groups"][g])} for g, c in run["groups"].items()}
    same = sum(a == b[:max_new_tokens] for a, b in zip(main.outputs, plain.outputs, strict=True))
    table = [
        {
            "draft_tokens": k,
            "batch_size": run["batch_size"],
            "acceptance_length": round(result.acceptance_length(i), 4),
            "acceptance_by_position": _engine_rates(result.counters(i)),
            "tokens_per_second": run["tokens_per_second"],
            "baseline_tokens_per_second": plain.runs[i]["tokens_per_second"],
            "speedup": round(run["tokens_per_second"] / plain.runs[i]["tokens_per_second"], 4),
        }
        for k, result in sorted(found.items())
        for i, run in enumerate(result.runs)
    ]
    return {
        "name": "vllm",
        "version": main.version,
        "dtype": dtype,
        "acceptance_length": round(main.acceptance_length(), 4),
        "counters": main.counters(),
        "tokens_per_second": first["tokens_per_second"],
        "baseline_tokens_per_second": base["tokens_per_second"],
        "speedup": round(first["tokens_per_second"] / base["tokens_per_second"], 4),
        "batch_size": first["batch_size"],
        "draft_tokens": draft_tokens,
        "prompts": len(main.outputs),
        "identical_outputs": same,
        "by_group": by_group,
        "table": table,
        "seconds_load": main.seconds_load,
    }


def _group(counters: dict[str, Any], plain: dict[str, Any]) -> dict[str, float]:
    """What `compare` says of the prompts of one source. plain: their counters without a drafter."""
    rate, base = (c["tokens"] / c["seconds"] if c["seconds"] else 0.0 for c in (counters, plain))
    return {
        "acceptance_length": round(1 + counters["accepted"] / counters["drafts"], 4) if counters["drafts"] else 1.0,
        "tokens_per_second": round(rate, 2),
        "baseline_tokens_per_second": round(base, 2),
        "speedup": round(rate / base, 4) if base else 0.0,
    }


def _engine_rates(counters: dict[str, Any]) -> list[float]:
    return [round(n / counters["drafts"], 4) if counters["drafts"] else 0.0 for n in counters["by_position"]]
