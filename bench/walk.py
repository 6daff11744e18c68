"""Seconds of the greedy walk over 1,000 held-out samples of 512 tokens with a drafter of an 8B verifier's shape.

Weights and states are random, so nothing is accepted and the walk takes every step there is: its slowest case.
    python bench/walk.py [--samples 1000] [--tokens 512] [--hidden 4096 --vocab 128256 --draft-vocab 32000]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle3dvc.drafter import vocab
from eagle3dvc.drafter.acceptance import walk
from eagle3dvc.hidden_states.reader import Item
from eagle3dvc.verifier import Head


def drafter_of(a: argparse.Namespace, device: str, dtype: torch.dtype):
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from transformers import LlamaConfig

    layer = LlamaConfig(
        vocab_size=a.vocab,
        hidden_size=a.hidden,
        intermediate_size=int(3.5 * a.hidden),
        num_hidden_layers=1,
        num_attention_heads=max(1, a.hidden // 128),
        num_key_value_heads=max(1, a.hidden // 512),
        max_position_embeddings=8192,
    )
    layer._attn_implementation = "sdpa"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=a.draft_vocab, eagle_aux_hidden_state_layer_ids=[2, 16, 29]
    )
    with torch.device(device):
        model = Eagle3DraftModel(config)
    for p in model.parameters():
        p.data = torch.randn_like(p, dtype=dtype) * 0.02
    chosen = vocab.choose(torch.arange(a.vocab, 0, -1).numpy(), a.draft_vocab)
    model.load_vocab_mappings(chosen.t2d.to(device), chosen.d2t.to(device))
    return model.eval()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--samples", type=int, default=1000)
    p.add_argument("--tokens", type=int, default=512)
    p.add_argument("--hidden", type=int, default=4096)
    p.add_argument("--vocab", type=int, default=128256)
    p.add_argument("--draft-vocab", type=int, default=32000)
    p.add_argument("--draft-tokens", type=int, default=3)
    a = p.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    drafter = drafter_of(a, device, torch.float32)
    pool = [torch.randn(a.tokens, 4, a.hidden).bfloat16() for _ in range(8)]
    mask = torch.arange(a.tokens) >= a.tokens // 4

    def samples(n: int):
        for i in range(n):
            tokens = torch.randint(0, a.vocab, (a.tokens,), generator=torch.Generator().manual_seed(i))
            yield Item(pool[i % len(pool)], tokens, mask, f"{i:032x}", "random", "heldout")

    head = Head(torch.randn(a.vocab, a.hidden), torch.randn(a.vocab, a.hidden) * 0.02, torch.ones(a.hidden), 1e-5)
    started = time.monotonic()
    found = walk(drafter, head, samples(a.samples), a.draft_tokens, True)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.monotonic() - started
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}: {a.samples} samples of {a.tokens} tokens in {seconds:.1f} s ({found.drafts} chains walked)")


if __name__ == "__main__":
    main()
