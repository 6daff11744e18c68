"""Random sample reads: packed shards against one safetensors file a sample, page cache warm.

Both sides read the same samples in the same random order and copy them into one preallocated batch buffer, as a training loader
does. Prints samples/s of both and the ratio.   python bench/reader.py [--samples 256] [--tokens 512]
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from eagle3dvc.hidden_states.format import ShardBuffer, ShardRequest, shard_key
from eagle3dvc.hidden_states.reader import HiddenStates
from eagle3dvc.prompts.shards import Sample, sample_id, write_shard

LAYERS, HIDDEN = 4, 896


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--samples", type=int, default=256)
    p.add_argument("--tokens", type=int, default=512)
    p.add_argument("--per-shard", type=int, default=64)
    p.add_argument("--rounds", type=int, default=5)
    a = p.parse_args()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as tmp:
        root = Path(tmp)
        for d in ("hidden", "prompts", "single"):
            (root / d).mkdir()
        state = torch.randn(a.tokens, LAYERS, HIDDEN).to(torch.bfloat16)
        for k in range(0, a.samples, a.per_shard):
            tokens = [rng.integers(0, 1000, a.tokens).astype(np.int32) for _ in range(min(a.per_shard, a.samples - k))]
            mask = np.ones(a.tokens, dtype=bool)
            samples = [Sample(sample_id(t, mask), t, mask, "bench", "train") for t in tokens]
            write_shard(root / "prompts" / f"{k // a.per_shard:05d}.parquet", samples)
            key = shard_key("bench", [1, 2, 3, 4], "bfloat16", {}, tokens)
            header = {"identity": "bench", "layer_ids": [1, 2, 3, 4], "stored_dtype": "bfloat16", "numerics": {}}
            buffer = ShardBuffer(
                ShardRequest(key, tokens, header, HIDDEN, root / f"hidden/{k // a.per_shard:05d}-{key}.safetensors")
            )
            for i, t in enumerate(tokens):
                buffer.put(i, state)
                save_file({"hidden_states": state, "token_ids": torch.from_numpy(t)}, root / f"single/{k + i}.safetensors")
            buffer.finish()
        out = torch.empty_like(state)
        packed = HiddenStates(root / "hidden", root / "prompts", verify=True)

        def read_packed(i: int) -> None:
            out.copy_(packed[i].hidden_states)

        def read_single(i: int) -> None:
            out.copy_(load_file(root / f"single/{i}.safetensors")["hidden_states"])

        order = list(range(a.samples))
        for read in (read_packed, read_single):  # page cache and checksums
            for i in order:
                read(i)
        best = {read_packed: 0.0, read_single: 0.0}
        for _ in range(a.rounds):
            random.shuffle(order)
            for read in best:
                started = time.perf_counter()
                for i in order:
                    read(i)
                best[read] = max(best[read], a.samples / (time.perf_counter() - started))
    fast, slow = best[read_packed], best[read_single]
    print(f"packed shards       {fast:10,.0f} samples/s")
    print(f"one file a sample   {slow:10,.0f} samples/s")
    print(json.dumps({"packed_samples_per_second": fast, "single_samples_per_second": slow, "ratio": round(fast / slow, 2)}))


if __name__ == "__main__":
    main()
