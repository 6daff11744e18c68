"""The KV connector that turns vLLM's paged hidden-state cache into shards, and the worker calls that steer it.

vLLM's method `extract_hidden_states` keeps the states of every token in a cache of its own. The scheduler half below sends, with
the step that completes a prompt, the ids of its blocks; the worker half gathers them in `wait_for_save` of the same step, after
the cache was written and before any later step can reuse the blocks. So no block outlives its request, nothing is pending when
the engine runs dry, and chunked prefill and preemption need nothing more than a right list of block ids.

Poison: the cache is filled with NaN at start and wherever blocks are given back, so a slot that was never written shows up as a
NaN, which the writer refuses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

from eagle3dvc.engines import vllm_compat
from eagle3dvc.engines.vllm_writer import Report, ShardWriter
from eagle3dvc.hidden_states.format import ShardRequest

#: keys of SamplingParams.extra_args["kv_transfer_params"]; requests without them are not ours
SHARD, ROW = "eagle3dvc_shard", "eagle3dvc_row"


@dataclass
class Job:
    """One sample that the step completes."""

    shard: str
    row: int
    tokens: int
    blocks: list[int]


@dataclass
class StepPlan(KVConnectorMetadata):
    jobs: list[Job] = field(default_factory=list)
    poison: list[int] = field(default_factory=list)  # blocks of prompts preempted before they were complete
    preemptions: int = 0


class ShardConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        spec = vllm_config.speculative_config
        if spec is None or spec.method != "extract_hidden_states":
            raise ValueError("ShardConnector needs the speculative method extract_hidden_states")
        if vllm_config.cache_config.enable_prefix_caching:
            raise ValueError("ShardConnector needs enable_prefix_caching=False: shared blocks cannot be poisoned")
        self._layers = len(spec.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids)
        self._group, self._block_size = vllm_compat.cache_group(kv_cache_config)
        self._threads = int(self._kv_transfer_config.get_from_extra_config("threads", 2))
        # Scheduler half: requests whose prompt is not complete yet.
        self._todo: dict[str, tuple[str, int, int]] = {}  # request -> shard, row, tokens
        self._blocks: dict[str, list[int]] = {}
        self._saved: set[str] = set()  # still running, their prompt is saved; they may be preempted and come again
        # Worker half.
        self.writer: ShardWriter | None = None
        self._cache: torch.Tensor | None = None  # [blocks, block_size, layers, hidden]
        self._poison = False
        self.preemptions = 0

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return vllm_compat.required_layout()

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # nothing outlives a step

    # -- scheduler ---------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        params = request.kv_transfer_params or {}
        if SHARD in params and request.request_id not in self._saved:
            self._todo[request.request_id] = (params[SHARD], params[ROW], request.num_prompt_tokens)

    def build_connector_meta(self, scheduler_output) -> KVConnectorMetadata:
        plan, out = StepPlan(), scheduler_output
        for request_id in out.preempted_req_ids or ():
            if request_id in self._todo:
                plan.preemptions += 1
                # Freed in this very scheduling pass: whoever gets them writes them after the poison.
                plan.poison += self._blocks.pop(request_id, [])
        computed = {}
        for new in out.scheduled_new_reqs:  # with the V2 runner resumed requests too
            computed[new.req_id] = new.num_computed_tokens
            if new.req_id in self._todo:
                self._blocks[new.req_id] = list(new.block_ids[self._group])
        cached = out.scheduled_cached_reqs
        for request_id, blocks, done in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            computed[request_id] = done
            if request_id not in self._todo or blocks is None:
                continue
            if request_id in cached.resumed_req_ids:
                self._blocks[request_id] = list(blocks[self._group])
            else:
                self._blocks[request_id].extend(blocks[self._group])
        for request_id, done in computed.items():
            if request_id not in self._todo:
                continue
            shard, row, tokens = self._todo[request_id]
            if done + out.num_scheduled_tokens[request_id] >= tokens:
                plan.jobs.append(Job(shard, row, tokens, self._blocks.pop(request_id)))
                del self._todo[request_id]
                self._saved.add(request_id)
        return plan

    def request_finished(self, request, block_ids):
        self._todo.pop(request.request_id, None)
        self._blocks.pop(request.request_id, None)
        self._saved.discard(request.request_id)
        return False, None

    def request_finished_all_groups(self, request, block_ids):
        return self.request_finished(request, ())

    # -- worker ------------------------------------------------------------------------------------------------------

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        writes = get_tensor_model_parallel_rank() == 0 and get_pp_group().is_last_rank
        if not layers or not writes:
            return  # every rank of a tensor-parallel group holds the same states: one of them writes
        (name,) = layers
        self._cache = vllm_compat.tokens_first(kv_caches[name], self._layers, self._block_size)
        others = [t for n, c in kv_caches.items() if n != name for t in (c if isinstance(c, list | tuple) else [c])]
        # Hybrid verifiers keep blocks of several kinds in one pool: a NaN left there could reach attention.
        self._poison = not any(_overlaps(kv_caches[name], c) for c in others)
        self.writer = ShardWriter(self._cache.device, self._threads)
        self.poison_all()

    def poison_all(self) -> None:
        """Fill the cache with NaN; only while no request is running."""
        if self._poison and self._cache is not None:
            with torch.inference_mode():
                self._cache.fill_(float("nan"))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepPlan) and self._cache is not None:
            self.preemptions += connector_metadata.preemptions
            if self._poison and connector_metadata.poison:
                self._fill_nan(self._index(connector_metadata.poison))

    def wait_for_save(self) -> None:
        if self._cache is None or not self.has_connector_metadata():
            return
        plan = self._get_connector_metadata()
        if not isinstance(plan, StepPlan):
            return
        for job in plan.jobs:
            index = self._index(job.blocks[: -(-job.tokens // self._block_size)])
            # On the compute stream: after this step's writes, before a later step can reuse the blocks.
            states = self._cache.index_select(0, index).flatten(0, 1)[: job.tokens]
            self.writer.put(job.shard, job.row, states)
            if self._poison:
                self._fill_nan(index)

    def _index(self, blocks: list[int]) -> torch.Tensor:
        index = torch.tensor(blocks, dtype=torch.long)
        return index.pin_memory().to(self._cache.device, non_blocking=True) if self._cache.is_cuda else index

    def _fill_nan(self, index: torch.Tensor) -> None:
        self._cache.index_fill_(0, index, float("nan"))

    def shutdown(self) -> None:
        if self.writer is not None:
            self.writer.close()


def _overlaps(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the memory ranges of two cache tensors overlap (views into one pool)."""
    if not a.numel() or not b.numel():
        return False

    def extent(t):
        last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()

    (a0, a1), (b0, b1) = extent(a), extent(b)
    return a.device == b.device and a0 < b1 and b0 < a1


class WorkerCalls:
    """vLLM mixes this into its worker class; the driver reaches it through `collective_rpc`."""

    def shards_open(self, request: ShardRequest) -> None:
        if (writer := _connector().writer) is not None:
            writer.open(request)

    def shards_poll(self) -> Report | None:
        """The report of the rank that writes, None from the others."""
        connector = _connector()
        if connector.writer is None:
            return None
        report = connector.writer.poll()
        report.preemptions = connector.preemptions
        return report

    def shards_poison(self) -> None:
        _connector().poison_all()


def _connector() -> ShardConnector:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()
