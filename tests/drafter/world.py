"""A tiny world for the tests of the drafter: a small real verifier, its own answers as prompts, and its states in real shards."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from eagle3dvc.hidden_states.format import ShardBuffer, ShardRequest, shard_key
from eagle3dvc.params import Params, parse
from eagle3dvc.prompts.shards import Sample, ShardWriter, sample_id

LAYERS, HIDDEN, VOCAB = 6, 32, 96
AUX = [1, 3, 5]


@dataclass
class World:
    """verifier: a transformers model; folders as the stages would have made them."""

    verifier: torch.nn.Module
    root: Path

    @property
    def folders(self) -> dict[str, str]:
        names = {"verifier": "verifier", "prompts": "prompts", "hidden": "hidden_states"}
        return {k: str(self.root / "data" / v) for k, v in names.items()}


def make_verifier(seed: int = 0) -> torch.nn.Module:
    """A Llama of 6 layers whose weights are large enough for its answers to depend on the prompt."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 1.5)  # a norm of ones would hide a missing one
    return model


@torch.no_grad()
def states(verifier: torch.nn.Module, tokens: np.ndarray, layer_ids: list[int]) -> torch.Tensor:
    """[T, layers, H]: the residual stream after each layer of layer_ids; the last id is the input of the final norm."""
    seen = {}
    hooks = [
        layer.register_forward_hook(lambda m, a, out, k=k: seen.__setitem__(k, out[0] if isinstance(out, tuple) else out))
        for k, layer in enumerate(verifier.model.layers, 1)
        if k in layer_ids
    ]
    verifier(torch.from_numpy(tokens.astype(np.int64))[None])
    for hook in hooks:
        hook.remove()
    return torch.stack([seen[k][0] for k in layer_ids], dim=1)


@torch.no_grad()
def answers(verifier: torch.nn.Module, count: int, prompt: int, length: int, seed: int) -> np.ndarray:
    """int32 [count, prompt + length]: random prompts and the verifier's own greedy continuation."""
    ids = torch.randint(3, VOCAB, (count, prompt), generator=torch.Generator().manual_seed(seed))
    whole = verifier.generate(ids, max_new_tokens=length, do_sample=False, eos_token_id=None, pad_token_id=0)
    return whole.numpy().astype(np.int32)


def write_verifier(model: torch.nn.Module, folder: Path) -> None:
    model.save_pretrained(folder)
    record = {
        "format": 1,
        "source": "local",
        "name": "tests/tiny",
        "revision": None,
        "identity": "local:tiny",
        "model_type": "llama",
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "norm_eps": 1e-5,
        "tied_embeddings": False,
        "dtype": "float32",
        "default_aux_layer_ids": [2, 3, 3],
    }
    (folder / "verifier.json").write_text(json.dumps(record))


def write_data(
    model: torch.nn.Module,
    root: Path,
    texts: list[np.ndarray],
    masks: list[np.ndarray],
    splits: list[str],
    stored: str = "float32",
) -> None:
    """prompts/ and hidden_states/ under root, 16 samples a shard."""
    samples = [
        Sample(sample_id(t, m), t, m, f"source-{i % 2}", s)
        for i, (t, m, s) in enumerate(zip(texts, masks, splits, strict=True))
    ]
    layer_ids = [*AUX, LAYERS]
    (root / "prompts").mkdir()
    (root / "hidden_states").mkdir()
    writer = ShardWriter(root / "prompts", 16)
    for sample in samples:
        writer.add(sample)
    writer.flush()
    for k in range(0, len(samples), 16):
        tokens = [s.token_ids for s in samples[k : k + 16]]
        numerics = {"dtype": "float32"}
        key = shard_key("local:tiny", layer_ids, stored, numerics, tokens)
        header = {
            "identity": "local:tiny",
            "layer_ids": layer_ids,
            "stored_dtype": stored,
            "numerics": numerics,
            "engine": "tests",
            "engine_version": "1",
        }
        path = root / "hidden_states" / f"{k // 16:05d}-{key}.safetensors"
        buffer = ShardBuffer(ShardRequest(key, tokens, header, HIDDEN, path))
        for i, t in enumerate(tokens):
            buffer.put(i, states(model, t, layer_ids))
        buffer.finish()


def make(root: Path, count: int = 48, prompt: int = 6, length: int = 24, heldout: int = 12, stored: str = "float32") -> World:
    """A whole world under root/data; the last `heldout` samples are the validation split. Lengths differ from sample to sample."""
    model = make_verifier()
    write_verifier(model, root / "data" / "verifier")
    rng = np.random.default_rng(0)
    texts, masks = [], []
    for row in answers(model, count, prompt, length, seed=1):
        text = row[: prompt + int(rng.integers(length // 2, length + 1))]
        mask = np.zeros(len(text), dtype=bool)
        mask[prompt:] = True
        texts.append(text)
        masks.append(mask)
    splits = ["train"] * (count - heldout) + ["heldout"] * heldout
    write_data(model, root / "data", texts, masks, splits, stored)
    return World(model, root)


def params(**train) -> Params:
    """Parameters for the world; `train` overrides its train block."""
    defaults = {
        "draft_vocab_size": 64,
        "tokens_per_batch": 128,
        "epochs": 4,
        "learning_rate": 3e-3,
        "eval_samples": 12,
        "checkpoint_every": 1000,
    }
    return parse(
        {
            "max_samples": 48,
            "seed": 0,
            "prepare": {"responses": "verifier"},
            "extract": {"aux_layer_ids": AUX},
            "train": {**defaults, **train},
        }
    )
