"""Extraction with one worker and with two (extract.workers), each on a core of its own: tokens/s and the ratio.

    python bench/workers.py [--shards 12] [--hidden 256] [--layers 8]

Loading (with two workers: Ray and two verifiers) is printed apart: it happens once a run, whatever the number of samples. The shards
of both must be equal. Needs two cores that are idle.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # a core a worker; before torch is imported


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shards", type=int, default=12)
    parser.add_argument("--samples", type=int, default=50, help="a shard")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()

    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from eagle3dvc import engines
    from eagle3dvc.hidden_states.format import ShardRequest, shard_key
    from eagle3dvc.params import parse
    from eagle3dvc.verifier import VerifierInfo

    ids = [2, args.layers // 2, args.layers - 3, args.layers]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        os.environ["DVC_ROOT"] = folder
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=1024,
            hidden_size=args.hidden,
            intermediate_size=3 * args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=4,
            tie_word_embeddings=False,
        )
        LlamaForCausalLM(config).save_pretrained(root / "verifier")
        info = VerifierInfo(
            source="local",
            name="bench/llama",
            revision=None,
            identity="local:bench",
            model_type="llama",
            num_layers=args.layers,
            hidden_size=args.hidden,
            vocab_size=1024,
            norm_eps=1e-6,
            tied_embeddings=False,
            dtype="float32",
            default_aux_layer_ids=None,
            folder=root / "verifier",
        )
        rng = np.random.default_rng(0)
        tokens = [
            [rng.integers(0, 1024, args.length).astype(np.int32) for _ in range(args.samples)] for _ in range(args.shards)
        ]
        total = args.shards * args.samples * args.length
        seconds, written = {}, {}
        for workers in (1, 2):
            settings = {"engine": "transformers", "workers": workers}
            model = {"model": str(root / "verifier"), "watch": str(root / "verifier")}
            params = parse({"max_samples": 1, "verifier": model, "extract": settings})
            out = root / f"shards-{workers}"
            out.mkdir()
            requests = []
            for t in tokens:
                key = shard_key("local:bench", ids, "bfloat16", {"dtype": "float32"}, t)
                header = {"identity": "local:bench", "layer_ids": ids, "stored_dtype": "bfloat16"}
                requests.append(ShardRequest(key, t, header, args.hidden, out / f"{key}.safetensors"))
            began = time.perf_counter()
            engine = engines.make(params, info, ids)
            loading = time.perf_counter() - began
            list(engine.extract(requests[:2]))  # first calls allocate and compile
            began = time.perf_counter()
            list(engine.extract(requests))
            seconds[workers] = time.perf_counter() - began
            engine.close()
            written[workers] = {p.name: hashlib.md5(p.read_bytes()).hexdigest() for p in out.iterdir()}
            print(
                f"{workers} worker(s): {seconds[workers]:.2f} s, {total / seconds[workers]:,.0f} tokens/s; loading {loading:.1f} s",
                flush=True,
            )
        if written[1] != written[2]:
            raise SystemExit("error: the shards of one and of two workers differ")
        print(f"same {args.shards} shards; two workers are {seconds[1] / seconds[2]:.2f} times as fast")


if __name__ == "__main__":
    main()
