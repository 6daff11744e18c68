"""Prefill speed: vLLM alone, vLLM with its stock hidden-state connector, and this project's engine.

    python bench/extract.py --shape llama-8b                        # one GPU
    python bench/extract.py --shape deepseek-v3 --samples 1024
    python bench/extract.py --shape tiny --samples 64               # CPU, a minute

All with `load_format: dummy` on a config.json made here, so nothing is downloaded. Each mode runs in a child process of its own,
one after the other; a warm-up of the same kind goes before the measured run. What counts for `ours` is everything: copying,
checking, checksums, md5, writing, fsync, renaming. Prints a table, and JSON with --json FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import kernels  # noqa: E402

MODES = ("prefill", "stock", "ours")
SHAPES = {
    "llama-8b": {
        "aux": [2, 16, 29],
        "dtype": "bfloat16",
        "config": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
    },
    "deepseek-v3": {  # as many layers as one GPU holds, every other size that of the whole model
        "aux": [1, 3, 4],
        "dtype": "bfloat16",
        "config": {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 6,
            "first_k_dense_replace": 3,
            "moe_layer_freq": 1,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": 129280,
            "max_position_embeddings": 163840,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000,
            "rope_scaling": {
                "type": "yarn",
                "rope_type": "yarn",
                "factor": 40,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
    },
    "tiny": {
        "aux": [2, 4, 5],
        "dtype": "float32",
        "config": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": 1024,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
        },
    },
}


def samples_of(args, seed: int, count: int):
    """int32 token ids, lengths uniform in [length/2, 3/2 length]: prefill that has to be chunked and mixed."""
    import numpy as np

    rng = np.random.default_rng(seed)
    vocab = SHAPES[args.shape]["config"]["vocab_size"]
    lengths = rng.integers(args.length // 2, args.length + args.length // 2 + 1, count)
    return [rng.integers(0, vocab, n).astype(np.int32) for n in lengths]


def common(args, folder: Path) -> dict:
    """What all three modes give to vLLM."""
    shape = SHAPES[args.shape]
    settings = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": shape["dtype"],
        "tensor_parallel_size": args.tp,
        "max_model_len": 2 * args.length,
        "max_num_batched_tokens": args.batched,
        "max_num_seqs": args.seqs,
        "gpu_memory_utilization": args.memory,
        "enforce_eager": args.eager,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }
    if args.kv_cache:
        settings["kv_cache_memory_bytes"] = int(args.kv_cache * 1e9)
    return settings | _cpu(args)


def _cpu(args) -> dict:
    import torch

    return {} if torch.cuda.is_available() else {"kv_cache_memory_bytes": 1 << 30}


def stock_or_plain(args, folder: Path, out: Path) -> dict:
    """vLLM's own LLM.generate with one token a prompt, without or with its ExampleHiddenStatesConnector."""
    from vllm import LLM, SamplingParams

    extra = {}
    if args.mode == "stock":
        ids = [*SHAPES[args.shape]["aux"], SHAPES[args.shape]["config"]["num_hidden_layers"]]
        extra = {
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
            },
            "kv_transfer_config": {
                "kv_connector": "ExampleHiddenStatesConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": str(out), "use_synchronization_lock": False},
            },
        }
    if args.profile:
        extra["worker_extension_cls"] = "extract.Tracing"
    llm = LLM(**common(args, folder), **extra)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, ignore_eos=True)

    def run(token_ids):
        from vllm.inputs import tokens_input

        prompts = [tokens_input(t.tolist()) for t in token_ids]
        started = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - started, len(outputs)

    run(samples_of(args, 1, args.warmup))
    time.sleep(5)  # the stock connector's threads still write: a file removed under them is an error
    for f in out.iterdir():
        f.unlink()
    token_ids = samples_of(args, 2, args.samples)
    with kernels.alone():
        seconds, finished = run(token_ids)
        found = {"samples": finished}
        if args.mode == "stock":
            time.sleep(5)  # its threads may still write; the files of the last step never come in some set-ups
            found["files"] = sum(f.suffix == ".safetensors" for f in out.iterdir())
        if args.profile:
            part = samples_of(args, 3, args.profile)
            llm.collective_rpc("trace_start")
            run(part)
            found["profile"] = llm.collective_rpc("trace_stop", args=(sum(map(len, part)) / args.batched,))[0]
    return found | rates(seconds, sum(map(len, token_ids)))


def ours(args, folder: Path, out: Path) -> dict:
    import types

    from eagle3dvc import params
    from eagle3dvc.engines.vllm import OWN_ARGS, VllmEngine
    from eagle3dvc.hidden_states.format import ShardRequest, shard_key
    from eagle3dvc.hidden_states.reader import Shard

    shape = SHAPES[args.shape]
    ids = [*shape["aux"], shape["config"]["num_hidden_layers"]]
    extra = {k: v for k, v in common(args, folder).items() if k not in OWN_ARGS}
    p = params.parse(
        {
            "max_samples": args.samples,
            "verifier": {"model": str(folder), "watch": str(folder)},
            "prepare": {"max_length": 2 * args.length - 1},
            "extract": {
                "engine": "vllm",
                "dtype": shape["dtype"],
                "stored_dtype": args.stored or shape["dtype"],
                "tensor_parallel_size": args.tp,
                "max_num_batched_tokens": args.batched,
                "max_num_seqs": args.seqs,
                "gpu_memory_utilization": args.memory,
                "enforce_eager": args.eager,
                "shards_in_flight": args.in_flight,
                "engine_args": extra,
            },
        }
    )
    info = types.SimpleNamespace(  # dummy weights: there is no head to prove, so no data/verifier is made
        source="local",
        folder=folder,
        name=args.shape,
        model_type=shape["config"]["model_type"],
        hidden_size=shape["config"]["hidden_size"],
    )
    engine = VllmEngine(p, info, ids)

    def run(token_ids, keep):
        requests = []
        for start in range(0, len(token_ids), args.shard):
            part = token_ids[start : start + args.shard]
            key = shard_key("bench", ids, p.extract.stored_dtype, {}, part)
            header = {"identity": "bench", "layer_ids": ids, "stored_dtype": p.extract.stored_dtype, "numerics": {}}
            requests.append(ShardRequest(key, part, header, info.hidden_size, out / f"{key}.safetensors"))
        last = [0.0]
        engine.on_tokens = lambda tokens: last.__setitem__(0, time.perf_counter())
        with ThreadPoolExecutor(1) as remover:  # removing a large file takes a tenth of a second, which is not the engine's
            started, done, kept = time.perf_counter(), [], []
            for shard in engine.extract(requests):
                done.append(shard)
                kept.append(shard.path)
                if not keep and len(kept) > 2:  # a benchmark of 30 GB must not need 30 GB
                    remover.submit(kept.pop(0).unlink)
            ended = time.perf_counter()
        return ended - started, ended - last[0], done, kept

    run(samples_of(args, 1, args.warmup), False)
    for f in out.iterdir():
        f.unlink()
    token_ids = samples_of(args, 2, args.samples)
    with kernels.alone():
        seconds, tail, done, kept = run(token_ids, args.keep)
        engine_stats = engine.stats()
        if args.profile:
            part = samples_of(args, 3, args.profile)
            trace = kernels.Trace()
            run(part, False)
            engine_stats["profile"] = kernels.summary(trace.stop(), sum(map(len, part)) / args.batched)
    checked = 0
    for path in kept:  # outside the measured time: every checksum of what is left
        shard = Shard(path)
        for i in range(len(shard)):
            shard.check(i)
            checked += 1
    engine.close()
    return {
        "samples": sum(d.samples for d in done),
        "shards": len(done),
        "bytes": sum(d.bytes for d in done),
        "bytes_per_second": round(sum(d.bytes for d in done) / seconds),
        "samples_checked": checked,
        "seconds_after_last_sample": round(tail, 3),
        **engine_stats,
        **rates(seconds, sum(map(len, token_ids))),
    }


class Tracing:
    """vLLM mixes this into its worker class: what its GPU does, from another process."""

    def trace_start(self) -> None:
        self.trace = kernels.Trace()

    def trace_stop(self, units: float) -> str:
        return kernels.summary(self.trace.stop(), units)


def rates(seconds: float, tokens: int) -> dict:
    return {"tokens": tokens, "seconds": round(seconds, 3), "tokens_per_second": round(tokens / seconds)}


def child(args) -> None:
    import torch

    folder, out = Path(args.folder), Path(args.folder) / args.mode if not args.out else Path(args.out) / args.mode
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    found = ours(args, folder, out) if args.mode == "ours" else stock_or_plain(args, folder, out)
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    Path(args.result).write_text(json.dumps(found))
    shutil.rmtree(out, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument(
        "--warmup", type=int, default=None, help="samples before the measured run; default as many as fill every buffer once"
    )
    parser.add_argument("--length", type=int, default=512, help="mean tokens a sample")
    parser.add_argument("--shard", type=int, default=100, help="samples a shard")
    parser.add_argument("--batched", type=int, default=8192)
    parser.add_argument("--seqs", type=int, default=256)
    parser.add_argument("--in-flight", type=int, default=6)
    parser.add_argument("--memory", type=float, default=0.9)
    parser.add_argument(
        "--kv-cache", type=float, default=0, metavar="GB", help="a cache of this size whatever else holds memory"
    )
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--stored", default=None, help="stored dtype; default the one computed in")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument(
        "--profile", type=int, default=0, metavar="N", help="then trace the GPU for N more samples: JSON and logs"
    )
    parser.add_argument("--keep", action="store_true", help="keep every shard until all are checked")
    parser.add_argument("--out", default=None, help="where shards are written (a disk, /dev/shm); default a temporary folder")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--json", default=None)
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.warmup is None:
        args.warmup = args.shard * (args.in_flight + 1)
    if args.mode:
        return child(args)

    results: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as tmp:
        Path(tmp, "config.json").write_text(json.dumps(SHAPES[args.shape]["config"]))
        for mode in args.modes.split(","):
            result = Path(tmp) / f"{mode}.json"
            log = Path(tmp) / f"{mode}.log"
            argv = [sys.executable, __file__, *sys.argv[1:], "--mode", mode, "--folder", tmp, "--result", str(result)]
            with open(log, "wb") as f:
                code = subprocess.run(argv, stdout=f, stderr=subprocess.STDOUT, env={**os.environ, "DVC_ROOT": tmp}).returncode
            if code or not result.exists():
                print("\n".join(log.read_text(errors="replace").splitlines()[-40:]), file=sys.stderr)
                lines = [x for x in log.read_text(errors="replace").splitlines() if "Error" in x]
                results[mode] = {"failed": (lines or ["no message"])[-1].strip()[-300:]}
            else:
                results[mode] = json.loads(result.read_text())
            profile = results[mode].pop("profile", None)
            print(f"{mode}: {json.dumps(results[mode])}", flush=True)
            if profile:
                print(f"{mode}, ms for {args.batched} tokens: {profile}", flush=True)

    base = results.get("prefill", {}).get("tokens_per_second")
    print(f"\n| {args.shape}, tp {args.tp} | tokens/s | of plain prefill | GB/s | samples |\n|---|---|---|---|---|")
    for mode, r in results.items():
        if "failed" in r:
            print(f"| {mode} | failed: {r['failed']} | | | |")
            continue
        share = f"{r['tokens_per_second'] / base:.3f}" if base else ""
        rate = f"{r['bytes_per_second'] / 1e9:.2f}" if "bytes_per_second" in r else ""
        print(f"| {mode} | {r['tokens_per_second']:,} | {share} | {rate} | {r.get('files', r['samples'])} of {args.samples} |")
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps({"settings": vars(args), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
