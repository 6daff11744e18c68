"""Small random verifiers in every layout the project reads; built in milliseconds, loadable by transformers and vLLM.

Tests and benchmarks import `make_verifier`. Shapes are the real families' (head sizes that vLLM's CPU attention has), the
weights random but fixed by `seed`, the tokenizer a byte-level one with a ChatML template.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

ARCHITECTURES = ("llama", "qwen2", "qwen3", "deepseek_v3")
NESTED = ("kimi_k25", "qwen2_5_vl", "mistral3")  # wrappers around a text model, and the names their weights have
VOCAB = 512


@functools.cache
def _tokenizer():
    from eagle3dvc.demo_verifier import tokenizer

    return tokenizer(VOCAB, conversations=200)


def text_config(arch: str, layers: int, hidden: int, vocab: int, tied: bool):
    """A transformers config of the family; head_dim 32 (deepseek_v3: MLA with a YaRN rope, two experts of four)."""
    import transformers as t

    common = dict(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        rms_norm_eps=1e-5,
    )
    heads = max(2, hidden // 32)
    grouped = dict(num_attention_heads=heads, num_key_value_heads=heads // 2)
    if arch == "llama":
        return t.LlamaConfig(**common, **grouped, head_dim=32)
    if arch == "qwen2":
        return t.Qwen2Config(**common, num_attention_heads=hidden // 32, num_key_value_heads=hidden // 32)
    if arch == "qwen3":
        return t.Qwen3Config(**common, **grouped, head_dim=32)
    if arch == "deepseek_v3":
        return t.DeepseekV3Config(
            **common,
            num_attention_heads=2,
            num_key_value_heads=2,
            q_lora_rank=32,
            kv_lora_rank=512,  # with the 64 below the only sizes that vLLM's MLA kernels take
            qk_nope_head_dim=32,
            qk_rope_head_dim=64,
            v_head_dim=32,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            n_shared_experts=1,
            moe_intermediate_size=hidden,
            first_k_dense_replace=1,
            num_mtp_layers=0,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=50000.0,
                factor=4.0,
                original_max_position_embeddings=256,
                beta_fast=32.0,
                beta_slow=1.0,
                mscale=1.0,
                mscale_all_dim=1.0,
            ),
        )
    raise ValueError(f"no tiny {arch}: one of {ARCHITECTURES}")


def make_verifier(
    folder: str | Path,
    arch: str = "llama",
    layers: int = 8,
    hidden: int = 64,
    vocab: int = VOCAB,
    tied: bool = False,
    nested: bool | str = False,
    seed: int = 0,
    shard_size: str | None = None,
    dtype: str = "float32",
) -> Path:
    """Save a random verifier with tokenizer into `folder` and return it.

    `nested` puts the text model into a wrapper: True for Kimi-K2.5's way (`language_model.model.`), "qwen2_5_vl" for
    `model.language_model.`; only config and names are those of the wrapper, there is no vision tower. `shard_size` such
    as "100KB" splits the weights and writes an index. `vocab` below the tokenizer's 512 makes a mismatch.
    """
    import torch
    from transformers import AutoModelForCausalLM

    folder = Path(folder)
    config = text_config(arch, layers, hidden, vocab, tied)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    # wide enough that layers differ from one another and greedy tokens are no near ties
                    parameter.normal_(0.0, 1.0 if "embed" in name else 1.5 / parameter.shape[-1] ** 0.5)
                elif "norm" in name:
                    parameter.uniform_(0.5, 1.5)
        model.tie_weights()
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(folder, **({"max_shard_size": shard_size} if shard_size else {}))
    if arch == "deepseek_v3":  # transformers 5 leaves out what vLLM's router reads
        _edit(folder / "config.json", topk_method="noaux_tc", scoring_func="sigmoid")
    _tokenizer().save_pretrained(folder)
    if nested:
        _wrap(folder, "kimi_k25" if nested is True else nested)
    return folder


def _edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=2))


def _wrap(folder: Path, wrapper: str) -> None:
    """Turn a saved text model into the layout of a multimodal checkpoint: config nested, tensors renamed."""
    config = json.loads((folder / "config.json").read_text())
    text = {k: v for k, v in config.items() if k not in ("architectures", "transformers_version")}
    if wrapper == "kimi_k25":
        rename = lambda n: f"language_model.{n}"  # noqa: E731
        text["model_type"] = "kimi_k2" if text["model_type"] == "deepseek_v3" else text["model_type"]
        text["auto_map"] = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
        outer = {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
        }
    elif wrapper == "qwen2_5_vl":
        rename = lambda n: n.replace("model.", "model.language_model.", 1)  # noqa: E731
        text["model_type"] = "qwen2_5_vl_text"
        outer = {"architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    elif wrapper == "mistral3":
        rename = lambda n: f"language_model.{n}"  # noqa: E731
        outer = {"architectures": ["Mistral3ForConditionalGeneration"]}
    else:
        raise ValueError(f"no wrapper {wrapper}: one of {NESTED}")
    outer |= {"model_type": wrapper, "text_config": text, "tie_word_embeddings": text["tie_word_embeddings"]}
    (folder / "config.json").write_text(json.dumps(outer, indent=2))
    rename_tensors(folder, rename)


def rename_tensors(folder: Path, rename) -> None:
    """Rewrite every safetensors file (and the index) of a folder with other tensor names."""
    from safetensors.torch import load_file, save_file

    for path in sorted(folder.glob("*.safetensors")):
        tensors = {rename(name): tensor for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        data = json.loads(index.read_text())
        _edit(index, weight_map={rename(name): file for name, file in data["weight_map"].items()})


def change_tensors(folder: Path, change) -> None:
    """Rewrite model.safetensors of a folder with `change(dict of tensors)` applied in place."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
