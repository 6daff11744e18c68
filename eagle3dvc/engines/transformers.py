"""The reference engine: the verifier in transformers, on CPU or one GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

from eagle3dvc import engines
from eagle3dvc.errors import UserError
from eagle3dvc.hidden_states.format import FinishedShard, ShardBuffer, ShardRequest
from eagle3dvc.params import Params
from eagle3dvc.verifier import Head, VerifierInfo, model_path

#: worst relative error of norm + head on the stored last state against the verifier's own logits
TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}


def decoder_of(model: torch.nn.Module) -> tuple[torch.nn.Module, torch.nn.ModuleList, torch.nn.Module]:
    """(decoder, its layers, its final norm) of a causal language model or of the text part of a multimodal one."""
    for name in ("model.language_model", "language_model.model", "language_model", "model", "transformer"):
        try:
            decoder = model.get_submodule(name)
        except AttributeError:
            continue
        if hasattr(decoder, "layers") and hasattr(decoder, "norm"):
            return decoder, decoder.layers, decoder.norm
    raise UserError(
        f"{type(model).__name__} has no decoder with `layers` and `norm` that extract.engine = transformers knows: "
        "use extract.engine = vllm"
    )


def length_batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices in batches of similar length whose padded size stays within batch_tokens (one sample may exceed it)."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if batch and lengths[i] * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


class TransformersEngine:
    """Hidden states by hooks on the decoder layers; only the asked layers are kept.

    Samples are padded on the right and no attention mask is passed: under causal attention no token sees the padding
    after it, and the fast causal kernel is used. Padding counts as length, which matters to ropes that follow the longest
    sample of a batch: `engines.check_rope` refuses them where it would.
    """

    name = "transformers"
    version = transformers.__version__
    on_tokens: Callable[[int], None] | None = None

    def __init__(self, params: Params, info: VerifierInfo, layer_ids: Sequence[int]):
        self.layer_ids = list(layer_ids)
        self.batch_tokens = params.extract.batch_tokens
        self.dtype = params.extract.dtype
        if params.extract.quantization or params.extract.kv_cache_dtype != "auto":
            raise UserError(
                "extract.quantization and extract.kv_cache_dtype need extract.engine = vllm; the transformers engine "
                "computes in extract.dtype"
            )
        path = model_path(params, info)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            self.model = AutoModelForCausalLM.from_pretrained(
                path,
                revision=engines.revision(info),
                dtype=getattr(torch, self.dtype),
                trust_remote_code=params.verifier.trust_remote_code,
            )
        except (OSError, ValueError) as e:
            raise UserError(f"the verifier {path} cannot be loaded by transformers: {str(e).splitlines()[0]}") from e
        self.model.to(self.device).eval().requires_grad_(False)
        self.decoder, self.layers, self.norm = decoder_of(self.model)
        if len(self.layers) != info.num_layers:
            raise UserError(f"the loaded verifier has {len(self.layers)} layers, verifier.json says {info.num_layers}")

    @contextmanager
    def _captured(self):
        """Yields a dict id -> states [batch, length, hidden] that the hooks fill during a forward pass."""
        kept: dict[int, torch.Tensor] = {}
        last = len(self.layers)

        def keep(layer_id):
            def hook(module, args, out):
                kept[layer_id] = out[0] if isinstance(out, tuple) else out

            return hook

        def keep_norm_input(module, args):
            kept[last] = args[0]

        handles = [self.layers[k - 1].register_forward_hook(keep(k)) for k in self.layer_ids if k < last]
        handles.append(self.norm.register_forward_pre_hook(keep_norm_input))
        try:
            yield kept
        finally:
            for h in handles:
                h.remove()

    @torch.inference_mode()
    def states(self, token_ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Hidden states of each sample, [T_i, layers, hidden] in the compute dtype, in the order of the samples."""
        longest = max(len(t) for t in token_ids)
        ids = torch.zeros((len(token_ids), longest), dtype=torch.long)
        for row, t in enumerate(token_ids):
            ids[row, : len(t)] = torch.from_numpy(np.array(t, dtype=np.int64))
        with self._captured() as kept:
            self.decoder(input_ids=ids.to(self.device), use_cache=False)
        return [torch.stack([kept[k][i, : len(t)] for k in self.layer_ids], 1) for i, t in enumerate(token_ids)]

    @torch.inference_mode()
    def prove(self, head: Head) -> None:
        """See :class:`Engine`. Also compares every hooked layer with transformers' own `hidden_states`."""
        vocab = self.model.get_input_embeddings().num_embeddings
        ids = torch.arange(48) * 7919 % vocab  # spread over the vocabulary, the same each time
        got = self.states([ids.tolist()])[0].float().cpu()
        out = self.model(input_ids=ids[None].to(self.device), output_hidden_states=True, use_cache=False)
        tolerance = TOLERANCE[self.dtype]
        for slot, k in enumerate(self.layer_ids[:-1]):
            want = out.hidden_states[k][0].float().cpu()
            if not relative_error(got[:, slot], want) <= tolerance:
                raise UserError(
                    f"hidden state {k} is not the output of decoder layer {k}: this verifier orders its layers in a way the "
                    "transformers engine does not know; use extract.engine = vllm"
                )
        want = out.logits[0].float().cpu()
        error = relative_error(head.logits(got[:, -1])[:, : want.shape[-1]], want[:, : head.lm_head.shape[0]])
        if not error <= tolerance:
            raise UserError(
                f"final norm + lm_head of data/verifier on the stored last state give other logits than the verifier itself "
                f"(relative error {error:.2g}, allowed {tolerance:.0e}): head, norm or layer ids do not fit this verifier; "
                "run `dvc repro -f verifier`"
            )

    def extract(self, requests: Iterable[ShardRequest]) -> Iterator[FinishedShard]:
        for request in requests:
            buffer = ShardBuffer(request)
            for batch in length_batches([len(t) for t in request.token_ids], self.batch_tokens):
                for i, x in zip(batch, self.states([request.token_ids[i] for i in batch]), strict=True):
                    buffer.put(i, x)
                if self.on_tokens is not None:
                    self.on_tokens(sum(len(request.token_ids[i]) for i in batch))
            yield buffer.finish()

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
        from eagle3dvc.engines.transformers_generate import generate

        return generate(
            self.model,
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop_token_ids=stop_token_ids,
            batch_tokens=self.batch_tokens,
            done=done,
        )

    def close(self) -> None:
        self.model = self.decoder = self.layers = self.norm = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Worst row's |got - want| / |want| (rows are tokens); NaN where either is not finite."""
    return ((got - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-12)).max().item()
