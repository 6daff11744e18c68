"""EAGLE-3 in plain torch, written from the definition of the layouts: the second opinion of the self-check.

It shares no code with speculators, vLLM or `layouts`: it parses the folder itself and computes every step in float64, so
that an error in names, layer order, rope keys or norm flags shows as a difference and rounding does not. Only the rope
frequencies come from transformers. Shapes: T positions, A auxiliary layers, H hidden, D draft vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, head]; the first `cos.shape[-1]` channels turn, the rest pass."""
    n = cos.shape[-1]
    turn, rest = x[..., :n], x[..., n:]
    a, b = turn.chunk(2, dim=-1)
    turned = turn * cos[:, None] + torch.cat([-b, a], dim=-1) * sin[:, None]
    return torch.cat([turned, rest], dim=-1)


@dataclass
class Reference:
    """One drafter as its layout defines it; `load` makes it."""

    weights: dict[str, torch.Tensor]  # as stored; each is widened where it is used, so memory stays the file's size
    decoder: dict[str, Any]
    aux_layer_ids: list[int]  # vLLM's convention
    flags: dict[str, bool]
    rotary: Any

    @property
    def offsets(self) -> torch.Tensor | None:
        return self.weights.get("d2t")

    def to_verifier(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return draft_ids if self.offsets is None else draft_ids + self.offsets[draft_ids]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return _rms(x, self.weights[name].to(x.dtype), self.decoder["rms_norm_eps"])

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        bias = self.weights.get(f"{name}.bias")
        return F.linear(x, self.weights[f"{name}.weight"].to(x.dtype), None if bias is None else bias.to(x.dtype))

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """Auxiliary states [T, A, H] of the verifier -> the drafter's first hidden state [T, H]."""
        flat = states.flatten(1)
        if self.flags["norm_before_fc"]:
            flat = self._norm(flat, "input_norm.weight")
        if self.flags["fc_norm"]:
            flat = torch.cat([self._norm(s, f"fc_norm.{i}.weight") for i, s in enumerate(states.unbind(1))], dim=-1)
        return self._linear(flat, "fc")

    def _attend(self, x: torch.Tensor, i: int, cos, sin, cache: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Step 0 attends causally; step j of the chain that starts at t sees step 0 up to t, and its own steps 1..j."""
        c, p, steps = self.decoder, f"layers.{i}.self_attn", len(x)
        head, groups = c["head_dim"], c["num_attention_heads"] // c["num_key_value_heads"]
        q, k, v = (self._linear(x, f"{p}.{n}_proj").view(steps, -1, head) for n in "qkv")
        if f"{p}.q_norm.weight" in self.weights:
            q, k = self._norm(q, f"{p}.q_norm.weight"), self._norm(k, f"{p}.k_norm.weight")
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        cache.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        (k0, v0), chain = cache[0], cache[1:]
        at = torch.arange(steps)
        seen = at[None, :] <= at[:, None]
        if (c.get("layer_types") or ["full_attention"] * (i + 1))[i] == "sliding_attention":
            seen &= at[None, :] > at[:, None] - c["sliding_window"]
        scores = torch.einsum("qhd,khd->hqk", q, k0).masked_fill(~seen, float("-inf"))
        own = [torch.einsum("qhd,qhd->hq", q, kj)[..., None] for kj, _ in chain]
        weights = torch.softmax(torch.cat([scores, *own], dim=-1) * head**-0.5, dim=-1)
        out = torch.einsum("hqk,khd->qhd", weights[..., :steps], v0)
        for j, (_, vj) in enumerate(chain):
            out = out + weights[..., steps + j].T[..., None] * vj
        return self._linear(out.flatten(1), f"{p}.o_proj")

    def _layer(self, x: torch.Tensor, embeds: torch.Tensor, i: int, cos, sin, cache) -> torch.Tensor:
        p = f"layers.{i}"
        if i == 0:
            normed = self._norm(x, f"{p}.hidden_norm.weight")
            residual = normed if self.flags["norm_before_residual"] else x
            inputs = torch.cat([self._norm(embeds, f"{p}.input_layernorm.weight"), normed], dim=-1)
        else:
            residual, inputs = x, self._norm(x, f"{p}.input_layernorm.weight")
        x = residual + self._attend(inputs, i, cos, sin, cache)
        y = self._norm(x, f"{p}.post_attention_layernorm.weight")
        gated = F.silu(self._linear(y, f"{p}.mlp.gate_proj")) * self._linear(y, f"{p}.mlp.up_proj")
        return x + self._linear(gated, f"{p}.mlp.down_proj")

    @torch.no_grad()
    def chain(self, states: torch.Tensor, embeds: list[torch.Tensor], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
        """Logits [T, D] of each drafting step, the chains of all positions at once.

        states [T, A, H]: position t has the verifier's states g_t. embeds: one [T, H] a step, the embeddings of the
        tokens fed: step 0 takes x_{t+1}, step j the token after it in the text or in the draft.
        """
        x, logits = self.combine(states.to(dtype)), []
        caches: list[list] = [[] for _ in range(self.decoder["num_hidden_layers"])]
        for step, embed in enumerate(embeds):
            at = torch.arange(len(x))[None] + 1 + step
            cos, sin = (t[0].to(dtype) for t in self.rotary(torch.empty(0, dtype=torch.float32), at))
            for i, cache in enumerate(caches):
                x = self._layer(x, embed.to(dtype), i, cos, sin, cache)
            out = self._norm(x, "norm.weight")
            x = out if self.flags["norm_output"] else x
            logits.append(self._linear(out, "lm_head"))
        return logits


def _as_sglang_finds_them(raw: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by speculators' names; as in SGLang, what is neither `midlayer.*` nor a parameter's name is not there."""
    found = {}
    for name, t in raw.items():
        bare = name.removeprefix("model.")
        if bare.startswith("midlayer."):
            found[f"layers.0.{bare.removeprefix('midlayer.')}"] = t
        elif name in ("lm_head.weight", "d2t", "t2d") or bare in ("fc.weight", "norm.weight", "embed_tokens.weight"):
            found[bare] = t
    return found


def load(folder: str | Path) -> Reference:
    """Read either layout as an engine would; a file that is not one fails with KeyError or SafetensorError."""
    from safetensors.torch import load_file
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from eagle3dvc.drafter.layouts import weight_files

    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    raw = {k: v for f in weight_files(folder) for k, v in load_file(f).items()}
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    if "speculators_model_type" in config:
        decoder, ids = config["transformer_layer_config"], config["eagle_aux_hidden_state_layer_ids"]
        flags = {f: bool(config.get(f)) for f in flags}
    else:
        decoder, ids = config, [i + 1 for i in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
        flags = dict.fromkeys(flags, False)
        raw = _as_sglang_finds_them(raw)
    heads = decoder["num_attention_heads"]
    decoder = decoder | {
        "num_hidden_layers": decoder.get("num_hidden_layers") or 1,
        "num_key_value_heads": decoder.get("num_key_value_heads") or heads,
        "head_dim": decoder.get("head_dim") or decoder["hidden_size"] // heads,
    }
    rope = {**(decoder.get("rope_scaling") or {}), **(decoder.get("rope_parameters") or {})}  # layouts refuses contradictions
    rope["rope_theta"] = decoder.get("rope_theta") or rope.get("rope_theta")
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
    rotary = LlamaRotaryEmbedding(LlamaConfig(**{k: decoder[k] for k in sizes if k in decoder}, rope_parameters=rope))
    return Reference(raw, decoder, list(ids), flags, rotary)
