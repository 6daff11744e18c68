"""Small random checkpoints with a tokenizer, in the shapes of real verifiers, and their states by transformers alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

VOCAB, HIDDEN, LAYERS = 320, 64, 8
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(folder: Path, template: str = TEMPLATE) -> None:
    """Bytes as tokens, ChatML marks as special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def _config(kind: str, positions: int, sizes: dict):
    from transformers import DeepseekV3Config, LlamaConfig, Qwen2Config, Qwen3Config

    common = dict(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=positions,
        intermediate_size=128,
        eos_token_id=257,
        bos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    if kind == "llama":
        return LlamaConfig(**{**common, "num_key_value_heads": 2, "head_dim": 32, **sizes})
    if kind == "qwen2":
        return Qwen2Config(**{**common, "num_attention_heads": 2}, num_key_value_heads=1)
    if kind == "qwen3":
        return Qwen3Config(**common, num_key_value_heads=2, head_dim=32)
    if kind == "deepseek":
        own = dict(
            num_key_value_heads=4,
            moe_intermediate_size=32,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_shared_experts=1,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=32,
            kv_lora_rank=512,  # these two sizes are the only ones vLLM's MLA kernels take
            qk_rope_head_dim=64,
            qk_nope_head_dim=32,
            v_head_dim=32,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 50000.0,
                "factor": 4.0,
                "original_max_position_embeddings": positions // 4,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        )
        return DeepseekV3Config(**{**common, **own, **sizes})
    raise ValueError(kind)


def save_model(kind: str, folder: Path, positions: int = 512, **sizes):
    """Random weights of a spread that keeps the residual stream lively; returns the transformers model (float32, eval).

    sizes: fields of the config to change (llama, deepseek).
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = _config(kind, positions, sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.64 / config.hidden_size**0.5 if p.dim() > 1 else 1 + 0.1 * torch.randn_like(p))
    model.save_pretrained(folder)
    if kind == "deepseek":  # transformers leaves out what vLLM reads
        path = folder / "config.json"
        saved = json.loads(path.read_text())
        path.write_text(json.dumps({**saved, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}))
    save_tokenizer(folder)
    return model


def prompts(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).astype(np.int32) for n in lengths]


@torch.no_grad()
def reference_states(model, ids: np.ndarray, layer_ids: list[int]) -> torch.Tensor:
    """[T, layers, hidden] of one sample alone: transformers' hidden_states, and the input of the final norm for the last id."""
    kept = []
    handle = model.model.norm.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    try:
        out = model(torch.from_numpy(ids)[None].long(), output_hidden_states=True, use_cache=False)
    finally:
        handle.remove()
    last = len(model.model.layers)
    return torch.stack([kept[0][0] if k == last else out.hidden_states[k][0] for k in layer_ids], 1)


def worst_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest relative error of a token at any layer."""
    return ((got.float() - want).norm(dim=-1) / want.norm(dim=-1)).max().item()
