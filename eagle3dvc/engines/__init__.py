"""Engines compute hidden states (and answers) with the verifier: one small protocol, several ways to run it."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from eagle3dvc.errors import UserError

if TYPE_CHECKING:
    from eagle3dvc.hidden_states.format import FinishedShard, ShardRequest
    from eagle3dvc.params import Params
    from eagle3dvc.verifier import Head, VerifierInfo


class Engine(Protocol):
    """A loaded verifier. Built only when something is left to compute: loading a 1T verifier takes 20 minutes.

    on_tokens: what the caller sets to be told how many tokens were just computed; engines with many shards in flight call it.
    """

    name: str
    version: str
    on_tokens: Callable[[int], None] | None

    def prove(self, head: Head) -> None:
        """Final norm + lm_head on the stored last state must reproduce the verifier's own logits, else UserError.

        One check that proves layer ids, the final norm and the head at once, before the first shard is written.
        """

    def extract(self, requests: Iterable[ShardRequest]) -> Iterator[FinishedShard]:
        """Compute and write shards; each is yielded when its file is durable. `requests` is consumed lazily; where it has a length,
        an engine may use it to end well."""

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
        """Answers to prompts (token ids): the new ids of each, the stop token included where one came.

        max_new_tokens: one limit, or one a prompt. temperature 0 is greedy. done(i, ids) is called as each answer is complete.
        """

    def close(self) -> None:
        """Give memory and processes back."""


def numerics(params: Params) -> dict[str, str | None]:
    """What the values of hidden states depend on beside verifier and tokens; part of every shard's key."""
    e = params.extract
    kv = None if e.kv_cache_dtype == "auto" else e.kv_cache_dtype
    return {"dtype": e.dtype, "quantization": e.quantization, "kv_cache_dtype": kv}


def sample_seed(seed: int, prompt: Sequence[int]) -> int:
    """The seed of one answer: depends on the prompt and `seed` only, not on what else is in the batch."""
    text = ",".join(map(str, (seed, *prompt)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def revision(info: VerifierInfo) -> str | None:
    """The commit that engines load: the one in a hub verifier's identity, wherever the branch stands now; None for folders."""
    return info.revision if info.source == "hub" else None


def choose(params: Params, info: VerifierInfo) -> str:
    """The engine's name: what params.extract.engine says, or for `auto` vLLM where it is installed and a GPU is there."""
    if params.extract.engine != "auto":
        return params.extract.engine
    import importlib.util

    import torch

    # On CPU vLLM's start-up of over a minute outweighs its speed for the small verifiers that fit there.
    if not torch.cuda.is_available() or importlib.util.find_spec("vllm") is None:
        return "transformers"
    from eagle3dvc.engines import vllm

    return "vllm" if vllm.supports(info) else "transformers"


def check_rope(params: Params, info: VerifierInfo) -> None:
    """Raises UserError where the rotary embedding of a sample may depend on the longest sample beside it or on max_model_len.

    transformers chooses the factors of `longrope` and the base of `dynamic` by the longest sample of a batch. vLLM takes
    longrope's long factors for every sample once its max_model_len, prepare.max_length + 1, passes the original length.
    """
    path = Path(info.folder) / "config.json"
    if not path.is_file():
        return  # a Ray worker that does not see the driver's files, and the driver has looked
    config = json.loads(path.read_text(encoding="utf-8"))
    ropes = config.get("rope_parameters") or {}
    for rope in [r for r in ropes.values() if isinstance(r, dict)] or [ropes]:  # one of each kind of layer, or one for all
        kind = rope.get("rope_type")
        if kind == "longrope":
            original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
            most = (original or config["max_position_embeddings"]) - 1
        elif kind == "dynamic":
            most = config["max_position_embeddings"]
        else:
            continue
        if params.prepare.max_length > most:
            raise UserError(
                f"{info.name} has a {kind} rotary embedding: where samples may have more than {most} tokens, the states of each "
                f"depend on those beside it; lower prepare.max_length from {params.prepare.max_length} to {most}"
            )


def make(params: Params, info: VerifierInfo, layer_ids: Sequence[int]) -> Engine:
    """Load the verifier into the engine that params ask for, or into extract.workers of them (through Ray)."""
    check_rope(params, info)
    if params.extract.workers > 1:
        try:
            from eagle3dvc.engines.ray import RayEngine
        except ImportError as e:
            raise UserError(
                f"extract.workers = {params.extract.workers} needs Ray ({e}): pip install 'ray>=2.40', or set extract.workers to 1"
            ) from e
        return RayEngine(params, info, layer_ids)
    os.environ.update(params.extract.env)  # before vLLM is imported
    name = choose(params, info)
    if name == "transformers":
        if params.extract.engine_args:
            print(
                "note: extract.engine_args is for vLLM, the transformers engine does not read it", file=sys.stderr, flush=True
            )
        from eagle3dvc.engines.transformers import TransformersEngine

        return TransformersEngine(params, info, layer_ids)
    try:
        from eagle3dvc.engines.vllm import VllmEngine
    except ImportError as e:
        raise UserError(
            f"extract.engine = vllm but vLLM cannot be imported ({e}): install the `gpu` or `cpu` extra, "
            "or set extract.engine to transformers"
        ) from e
    return VllmEngine(params, info, layer_ids)
