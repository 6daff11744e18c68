"""One vLLM engine, with or without a drafter: the same prompts at given batch sizes, its own counters, tokens a second.

An engine setting is fixed when the engine starts and device memory comes back only when its process ends, so each engine runs
in a process of its own (`python -m eagle3dvc.serving SPEC RESULT`, both JSON). `measure` starts it and reads the result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eagle3dvc.errors import UserError

ROOM = 16  # positions left past the last token: drafts reach there, and near the limit vLLM drafts less
COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "by_position",
}


@dataclass(frozen=True)
class Spec:
    """What one engine is to do. prompts: token ids; groups: one name a prompt, counters are kept apart by it at batch size 1.

    model: folder or hub id, None where the drafter's config names the verifier. stop_token_ids end an answer; with none every
    answer has max_new_tokens tokens. warmup: tokens generated before anything is measured.
    """

    prompts: list[list[int]]
    groups: list[str]
    max_new_tokens: int
    model: str | None = None
    drafter: str | None = None
    draft_tokens: int = 0
    stop_token_ids: list[int] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=lambda: [1])
    dtype: str = "auto"
    warmup: int = 8
    engine_args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """What it did. runs: one a batch size {"batch_size", "seconds", "tokens", "tokens_per_second", "counters", "groups": {group:
    its counters, prompts, tokens and seconds}, empty above batch size 1}; outputs: the answers of the first batch size, token ids;
    version: of vLLM; seconds_load."""

    runs: list[dict[str, Any]]
    outputs: list[list[int]]
    version: str
    seconds_load: float
    model: str

    def acceptance_length(self, run: int = 0) -> float:
        total = self.counters(run)
        return 1 + total["accepted"] / total["drafts"] if total["drafts"] else 1.0

    def counters(self, run: int = 0) -> dict[str, Any]:
        """Drafts, accepted drafts and these by position, of all prompts together."""
        return {name: self.runs[run]["counters"][name] for name in ("drafts", "accepted", "by_position")}


def measure(spec: Spec, log: str | Path) -> Result:
    """Run one engine in its own process; what it prints goes to the file `log`. Raises UserError when it fails,
    or when there are fewer prompts than a batch size: they could not be in flight together."""
    log, largest = Path(log), max(spec.batch_sizes)
    if largest > len(spec.prompts):
        raise UserError(
            f"a batch size of {largest} needs as many prompts, there are {len(spec.prompts)}: lower it or give more"
        )
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "spec.json", Path(folder) / "result.json"
        asked.write_text(json.dumps(asdict(spec)), encoding="utf-8")
        env = {"VLLM_USE_FLASHINFER_SAMPLER": "0", **os.environ, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", **spec.env}
        with open(log, "wb") as out:
            done = subprocess.run(
                [sys.executable, "-m", "eagle3dvc.serving", str(asked), str(answered)], stdout=out, stderr=out, env=env
            )
        if done.returncode or not answered.is_file():
            raise UserError(f"vLLM failed {_what(spec)}: {_cause(log)}; its log is {log}")
        return Result(**json.loads(answered.read_text(encoding="utf-8")))


def _what(spec: Spec) -> str:
    model = spec.model or "the verifier its drafter names"
    return f"serving {model}" + (f" with the drafter {spec.drafter} ({spec.draft_tokens} tokens)" if spec.drafter else "")


def _cause(log: Path) -> str:
    lines = [line.split("]", 1)[-1].strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(":")[0] or "Error:" in line]
    return (errors or lines or ["it printed nothing"])[-1][:300]


# ---------------------------------------------------------------- inside the engine's process


def engine_args(spec: Spec) -> dict[str, Any]:
    """vLLM's EngineArgs for a spec; the same with and without the drafter but for the drafter itself."""
    import torch

    longest = max(len(p) for p in spec.prompts) + max(spec.max_new_tokens, spec.warmup)
    args: dict[str, Any] = {
        "model": spec.model or spec.drafter,
        "dtype": spec.dtype,
        "max_model_len": longest + spec.draft_tokens + ROOM,
        "max_num_seqs": max(spec.batch_sizes),
        "generation_config": "vllm",
        "disable_log_stats": False,
        "enable_prefix_caching": False,  # a second batch size would find its prompts computed
        "seed": 0,
    }
    if not torch.cuda.is_available():
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        args["kv_cache_memory_bytes"] = min(1 << 30, memory // 16)
    args |= spec.engine_args
    if spec.drafter and spec.model:
        args["speculative_config"] = {"method": "eagle3", "model": spec.drafter, "num_speculative_tokens": spec.draft_tokens}
    elif spec.drafter and spec.draft_tokens:
        args["speculative_config"] = {"num_speculative_tokens": spec.draft_tokens}
    return args


def _counters(llm: Any) -> Counter:
    found: Counter = Counter()
    for metric in llm.get_metrics():
        if (name := COUNTERS.get(metric.name)) == "by_position":
            found.update({(name, j): v for j, v in enumerate(metric.values)})
        elif name:
            found[name] += metric.value
    return found


def _differences(after: Counter, before: Counter) -> dict[str, Any]:
    plain = {name: int(after[name] - before[name]) for name in ("drafts", "draft_tokens", "accepted")}
    places = sorted(key[1] for key in after if isinstance(key, tuple))
    return plain | {"by_position": [int(after["by_position", j] - before["by_position", j]) for j in places]}


def _generate(engine: Any, prompts: list[list[int]], batch: int, params: Any, tag: str) -> list[list[int]]:
    """Greedy answers with exactly `batch` requests in flight while there are prompts left."""
    from eagle3dvc.engines import vllm_compat

    answers: list[list[int]] = [[] for _ in prompts]
    waiting, running = iter(range(len(prompts))), 0
    while True:
        while running < batch and (i := next(waiting, None)) is not None:
            vllm_compat.add_request(engine, f"{tag}/{i}", prompts[i], params)
            running += 1
        if not running:
            return answers
        for out in engine.step():
            if out.finished:
                answers[int(out.request_id.rsplit("/", 1)[1])] = list(out.outputs[0].token_ids)
                running -= 1


def decode(llm: Any, spec: Spec, batch: int, params: Any, tag: str) -> tuple[dict[str, Any], list[list[int]]]:
    """All prompts at one batch size: (what `Result.runs` says of it, answers as token ids).

    vLLM counts for the whole engine, not for a request. With one request in flight that is exact for each group when the groups come
    one after the other; a larger batch mixes them, so that only the total is known.
    """
    if batch == 1:
        parts = {name: [i for i, g in enumerate(spec.groups) if g == name] for name in sorted(set(spec.groups))}
    else:
        parts = {"all": list(range(len(spec.prompts)))}
    groups, answers, start = {}, [[] for _ in spec.prompts], _counters(llm)
    for name, chosen in parts.items():
        before, at = _counters(llm), time.monotonic()
        found = _generate(llm.llm_engine, [spec.prompts[i] for i in chosen], batch, params, f"{tag}{name}")
        seconds = time.monotonic() - at
        groups[name] = {
            **_differences(_counters(llm), before),
            "prompts": len(chosen),
            "tokens": sum(map(len, found)),
            "seconds": seconds,
        }
        for i, answer in zip(chosen, found, strict=True):
            answers[i] = answer
    seconds, tokens = (sum(g[name] for g in groups.values()) for name in ("seconds", "tokens"))
    figures = {
        "batch_size": batch,
        "seconds": round(seconds, 4),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 2),
        "counters": _differences(_counters(llm), start),
        "groups": {name: g | {"seconds": round(g["seconds"], 4)} for name, g in groups.items()} if batch == 1 else {},
    }
    return figures, answers


def run(spec: Spec) -> Result:
    """Start the engine in this process and do everything the spec asks."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from eagle3dvc.engines import vllm_compat

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    started = time.monotonic()
    llm = LLM(**engine_args(spec))
    loaded = time.monotonic() - started
    stops = list(spec.stop_token_ids)

    def sampling(n: int) -> Any:
        return SamplingParams(
            temperature=0.0,
            max_tokens=n,
            ignore_eos=True,  # stop_token_ids says it all
            stop_token_ids=stops,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    runs, outputs = [], []
    for k, batch in enumerate(spec.batch_sizes):
        if spec.warmup:
            _generate(llm.llm_engine, spec.prompts[:batch], batch, sampling(spec.warmup), f"warm{k}")
        figures, answers = decode(llm, spec, batch, sampling(spec.max_new_tokens), str(k))
        runs.append(figures)
        outputs = outputs or answers
    model = llm.llm_engine.vllm_config.model_config.model
    return Result(runs, outputs, vllm_compat.installed(), round(loaded, 2), model)


def main(asked: str, answered: str) -> None:
    result = run(Spec(**json.loads(Path(asked).read_text(encoding="utf-8"))))
    Path(answered).write_text(json.dumps(asdict(result)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
