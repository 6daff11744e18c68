"""Training speed: `speculators train` from its own per-sample files against this project's train stage, on the same samples.

    python bench/train.py --shape llama-8b                          # one GPU: both, then the table
    python bench/train.py --shape llama-8b --only ours --gpus 2     # two GPUs, the same batch a step as --gpus 1 --accumulate 2
    python bench/train.py --shape tiny --steps 20                   # CPU: ours only, the library's command needs a GPU
    python bench/train.py --memory                                  # host memory of a small and an eight times larger cache

States are random: speed does not depend on them, and both must then show the same falling loss. Both are read the same way, from
their records on the `speculators.metrics` logger with the time they came, and without the first --skip steps, in which they
compile and the library uses up what its 8 workers loaded meanwhile: one batch each, not the four of its default, which a loader
that is a little too slow takes 200 steps to use up. The library's own step_ms and fetch_ms are not used: where it
does not log every step they hold what the GPU had still to do of the step before. --json FILE writes what was printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import kernels  # noqa: E402

#: the samples are this often in the library's one epoch: its loaders stop, and validate and save, between epochs
REPEATS = 4
LAYERS = {
    "llama-8b": {
        "hidden": 4096,
        "intermediate": 14336,
        "layers": 32,
        "heads": 32,
        "groups": 8,
        "vocab": 128256,
        "draft": 32000,
    },
    "tiny": {"hidden": 128, "intermediate": 384, "layers": 8, "heads": 4, "groups": 4, "vocab": 1024, "draft": 512},
}


def make_data(root: Path, shape: dict, samples: int, length: int, per_sample_files: bool) -> None:
    """data/verifier (head only), data/prompts, data/hidden_states, and the same in the library's format under library/."""
    import numpy as np
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    from eagle3dvc.hidden_states.format import ShardBuffer, ShardRequest, shard_key
    from eagle3dvc.prompts.shards import Sample, ShardWriter, sample_id

    hidden, vocab = shape["hidden"], shape["vocab"]
    aux = [2, shape["layers"] // 2, shape["layers"] - 3]
    ids = [*aux, shape["layers"]]
    folder = root / "data/verifier"
    folder.mkdir(parents=True)
    LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=shape["intermediate"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["groups"],
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def random(*size: int) -> torch.Tensor:
        return (torch.randn(*size, device=device) * 0.02).bfloat16().cpu()

    weights = {"model.embed_tokens.weight": random(vocab, hidden), "lm_head.weight": random(vocab, hidden)}
    save_file(
        weights | {"model.norm.weight": torch.ones(hidden).bfloat16()}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    record = {
        "format": 1,
        "source": "local",
        "name": "bench/verifier",
        "revision": None,
        "identity": "local:bench",
        "model_type": "llama",
        "num_layers": shape["layers"],
        "hidden_size": hidden,
        "vocab_size": vocab,
        "norm_eps": 1e-5,
        "tied_embeddings": False,
        "dtype": "bfloat16",
        "default_aux_layer_ids": aux,
    }
    (folder / "verifier.json").write_text(json.dumps(record))
    rng = np.random.default_rng(0)
    lengths = rng.integers(length // 2, length + length // 2, samples)
    rows = []
    for n in lengths:
        tokens, mask = rng.integers(3, shape["draft"], int(n)).astype(np.int32), np.ones(int(n), dtype=bool)
        mask[:8] = False
        rows.append(Sample(sample_id(tokens, mask), tokens, mask, "bench", "train"))
    s = rows[-1]  # one held-out sample: every other length would be compiled for
    rows[-1] = Sample(s.sample_id, s.token_ids, s.loss_mask, s.source, "heldout")
    for name in ("data/prompts", "data/hidden_states", "library/hidden_states"):
        (root / name).mkdir(parents=True)
    writer = ShardWriter(root / "data/prompts", 32)
    for row in rows:
        writer.add(row)
    writer.flush()
    for k in range(0, samples, 32):
        part = rows[k : k + 32]
        key = shard_key("local:bench", ids, "bfloat16", {}, [s.token_ids for s in part])
        header = {"identity": "local:bench", "layer_ids": ids, "stored_dtype": "bfloat16", "numerics": {}}
        path = root / f"data/hidden_states/{k // 32:05d}-{key}.safetensors"
        request = ShardRequest(key, [s.token_ids for s in part], header, hidden, path)
        buffer = ShardBuffer(request)
        for i, s in enumerate(part):
            states = torch.randn(len(s.token_ids), len(ids), hidden, device=device).bfloat16().cpu()
            buffer.put(i, states)
            if per_sample_files:
                tensors = {"hidden_states": states, "token_ids": torch.from_numpy(s.token_ids.astype(np.int64))}
                first = root / f"library/hidden_states/hs_{k + i}.safetensors"
                save_file(tensors, first)
                for again in range(1, REPEATS):
                    os.link(first, root / f"library/hidden_states/hs_{again * samples + k + i}.safetensors")
        buffer.finish(check_finite=False)
    if per_sample_files:
        from datasets import Dataset

        columns = {
            "input_ids": [s.token_ids.tolist() for s in rows] * REPEATS,
            "loss_mask": [s.loss_mask.astype(int).tolist() for s in rows] * REPEATS,
            "seq_len": [len(s.token_ids) for s in rows] * REPEATS,
        }
        data = Dataset.from_dict(columns)
        data.set_format("torch")
        data.save_to_disk(str(root / "library/data"))
        counts = np.bincount(np.concatenate([s.token_ids[s.loss_mask] for s in rows]), minlength=vocab)
        torch.save({int(i): int(counts[i]) for i in np.flatnonzero(counts)}, root / "library/data/token_freq.pt")


class Records(logging.Handler):
    """Every metric record as a line of JSON with the time it came."""

    def __init__(self, path: str):
        super().__init__()
        self.alone_from: float = int(os.environ["ALONE_FROM"])
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, dict) and "train" in record.msg:
            if record.step >= self.alone_from:
                kernels.before()
                self.alone_from = math.inf
            line = {"time": time.time(), "step": record.step, **record.msg}
            self.file.write(json.dumps(line, default=str) + "\n")
            self.file.flush()


def run_library(arguments: list[str], records: str) -> None:
    """The library's own command in this process, with the records kept."""
    logging.getLogger().addHandler(Records(records))  # on the root logger: the library configures its own loggers anew
    sys.argv = ["speculators", *arguments]
    import runpy

    runpy.run_module("speculators.train", run_name="__main__", alter_sys=True)


def run_ours(settings: str, records: str) -> None:
    from eagle3dvc import params as params_module
    from eagle3dvc.drafter import train

    if os.environ.get("RANK", "0") == "0":
        logging.getLogger("speculators.metrics").addHandler(Records(records))
    log: dict = {}
    values = json.loads(settings)
    traced = values.pop("traced", None)
    if traced:
        _trace_steps(*traced)
    train.build(params_module.parse(values), log=log)
    print(json.dumps(log))


def _trace_steps(first: int, last: int) -> None:
    """Print where step `first` waits for the GPU, and what the GPU did in each step after it, up to `last`."""
    from eagle3dvc.drafter.trainer import DrafterTrainer

    plain, trace = DrafterTrainer.train_step, []

    def traced(self: DrafterTrainer, loader: object) -> None:
        if self.global_step == first - 1 and self.device.type == "cuda":
            with kernels.waits() as found:
                plain(self, loader)
            print("ours, waits for the GPU in a step:", *(f"\n  {n} x {place}" for place, n in found.most_common()), flush=True)
        else:
            if self.global_step == first:
                trace.append(kernels.Trace())
            plain(self, loader)
        if self.global_step == last:
            print("ours, ms a step:", kernels.summary(trace.pop().stop(), last - first, 30), flush=True)

    DrafterTrainer.train_step = traced


def settings_of(args: argparse.Namespace, shape: dict) -> dict:
    train = {
        "draft_vocab_size": shape["draft"],
        "tokens_per_batch": args.tokens,
        "max_steps": args.steps,
        "optimizer": args.optimizer,
        "learning_rate": args.lr,
        "muon_learning_rate": args.lr,
        "weight_decay": 0.0,
        "scheduler": "linear",
        "warmup_fraction": 0.1,
        "precision": "bfloat16" if args.shape != "tiny" else "float32",
        "compile": args.shape != "tiny",
        "norms": "speculators",  # what the library's command trains when nothing is said
        "train_lm_head": False,
        "gradient_accumulation_steps": args.accumulate,
        "num_workers": args.workers,
        "gpus": args.gpus,
        "eval_every": 10**6,
        "checkpoint_every": 10**6,
        "loggers": [],
    }
    found = {"max_samples": args.samples, "train": train}
    if args.profile:
        train["max_steps"] += args.profile
        found["traced"] = [args.steps + 1, args.steps + args.profile]
    return found


def library_arguments(args: argparse.Namespace, shape: dict, root: Path) -> list[str]:
    aux = [2, shape["layers"] // 2, shape["layers"] - 3]
    return [
        *("--verifier-name-or-path", str(root / "data/verifier"), "--speculator-type", "eagle3"),
        *("--data-path", str(root / "library/data"), "--hidden-states-path", str(root / "library/hidden_states")),
        *("--save-path", str(root / "out"), "--on-missing", "raise", "--target-layer-ids", *map(str, aux)),
        *("--draft-vocab-size", str(shape["draft"]), "--total-seq-len", str(args.tokens), "--ttt-steps", "3"),
        *("--mask-token-id", "0"),  # unused by EAGLE-3, but looked for in a tokenizer when not given
        *("--epochs", "1", "--max-steps", str(args.steps), "--optimizer", args.optimizer),
        *("--lr", str(args.lr), "--muon-lr", str(args.lr), "--weight-decay", "0", "--muon-weight-decay", "0"),
        *("--scheduler-type", "linear", "--scheduler-warmup-steps", str(int(0.1 * (args.steps + args.profile)))),
        *("--scheduler-total-steps", str(args.steps + args.profile)),  # ours goes on for the trace
        *("--num-workers", str(args.library_workers), "--prefetch-factor", "1"),
        *("--loss-implementation", "eager", "--log-freq", "5"),
        *("--full-attention-indices", "0", "--train-data-ratio", "0.99"),
    ]


def summary(path: Path, skip: int, last_step: int) -> dict:
    """tokens/s, ms a step and data-wait share over the steps after `skip`, and the loss curve."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    kept = [r for r in lines if skip <= r["step"] <= last_step]
    first, last = kept[0], kept[-1]
    seconds, steps = last["time"] - first["time"], last["step"] - first["step"]
    if "tokens" in last["profile"]:  # ours: running totals
        tokens = last["profile"]["tokens"] - first["profile"]["tokens"]
        wait = (last["profile"]["data_wait_seconds"] - first["profile"]["data_wait_seconds"]) / seconds
    else:  # the library's, of the logged steps
        each = [r["profile"]["tokens_per_s"] * r["profile"]["step_ms"] / 1000 for r in kept]
        tokens, wait = sum(each) / len(each) * steps, None
    return {
        "tokens_per_second": round(tokens / seconds),
        "ms_per_step": round(1000 * seconds / steps, 1),
        "data_wait_fraction": None if wait is None else round(wait, 4),
        "loss": {r["step"]: round(float(r["train"]["loss"]), 4) for r in lines if r["step"] % 10 == 0 or r is lines[-1]},
    }


def child(root: Path, kind: str, payload: str, records: Path, processes: int = 1, until: int | None = None) -> None:
    """Run one side, which has the GPU alone (kernels.alone) from step ALONE_FROM on. until: the step after whose record it is ended
    (the library would go on to validate and save)."""
    here = Path(__file__).resolve()
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // processes))} if processes > 1 else {}
    environment = {
        **threads,
        **os.environ,
        "PYTHONPATH": f"{here.parents[1]}:{os.environ.get('PYTHONPATH', '')}",
        "DVC_ROOT": str(root),
    }
    command = [sys.executable, *launch, str(here), "--child", kind, payload, str(records)]
    process = subprocess.Popen(command, cwd=root, env=environment, start_new_session=True)
    try:
        while (code := process.poll()) is None:
            lines = records.read_text().splitlines() if until is not None and records.exists() else []
            if lines and json.loads(lines[-1])["step"] >= until:
                return
            time.sleep(0.2)
        if code:
            raise SystemExit(f"the {kind} side ended with status {code}; its output is above")
    finally:
        kernels.after()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def show(name: str, row: dict) -> dict:
    wait = "" if row["data_wait_fraction"] is None else f"  wait {row['data_wait_fraction']:.2%}"
    print(f"{name:8} {row['tokens_per_second']:>9,} tokens/s {row['ms_per_step']:>8} ms/step{wait}")
    print(f"{'':8} loss {row['loss']}", flush=True)
    return row


def compare(args: argparse.Namespace) -> dict:
    shape, found = LAYERS[args.shape], {}
    root = Path(tempfile.mkdtemp(prefix="bench-train-", dir=args.dir))
    made = Path(args.data) if args.data else root / "made"
    library = args.only != "ours" and args.shape != "tiny"
    os.environ["ALONE_FROM"] = str(max(0, args.skip - 20))  # for the Records of both sides
    try:
        began = time.time()
        if not (made / "whole").exists():
            make_data(made, shape, args.samples, args.length, library)
            (made / "whole").touch()
        print(f"data: {args.samples} samples in {time.time() - began:.0f} s", flush=True)
        for name in ("data", "library"):
            (root / name).symlink_to(made / name)
        if args.only != "library":
            child(root, "ours", json.dumps(settings_of(args, shape)), root / "ours.jsonl", args.gpus)
            found["ours"] = show("ours", summary(root / "ours.jsonl", args.skip, args.steps))
        if library:
            arguments = json.dumps(library_arguments(args, shape, root))
            child(root, "library", arguments, root / "library.jsonl", until=(args.steps - 6) // 5 * 5)
            found["library"] = show("library", summary(root / "library.jsonl", args.skip, args.steps))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if len(found) == 2:
        found["ratio"] = round(found["ours"]["tokens_per_second"] / found["library"]["tokens_per_second"], 3)
        print(f"ratio    {found['ratio']}")
    return found


def read_epoch() -> None:
    """One epoch of batches through the loader, as training reads them, without the model (which is the same whatever the cache)."""
    import torch

    from eagle3dvc.drafter.data import Loader, Plan, survey, usable
    from eagle3dvc.hidden_states.reader import HiddenStates

    data = HiddenStates()
    found = survey("data/prompts", LAYERS["tiny"]["vocab"], 3)
    train = usable(data, found, "train", 8192)
    plan = Plan(train, data.lengths[train], found.targets[train], 8192, 0)
    loader = Loader(data, plan, device=torch.device("cpu"), dtype=torch.bfloat16, ttt_steps=3, workers=2)
    for _ in range(len(plan)):
        next(loader)
    loader.close()


def memory(args: argparse.Namespace) -> dict:
    """Peak host memory of reading one epoch of a cache of --samples and of one eight times as large."""
    shape, found = LAYERS["tiny"] | {"hidden": 2048}, {}
    for factor in (1, 8):
        root = Path(tempfile.mkdtemp(prefix="bench-train-", dir=args.dir))
        try:
            make_data(root, shape, args.samples * factor, args.length, False)
            size = sum(f.stat().st_size for f in (root / "data/hidden_states").iterdir())
            child(root, "memory", "", root / "unused")
            found[f"{size / 1e9:.2f} GB cache"] = json.loads((root / "memory.json").read_text())["peak_host_memory_bytes"]
        finally:
            shutil.rmtree(root, ignore_errors=True)
    for name, value in found.items():
        print(f"{name}: peak host memory {value / 1e9:.3f} GB")
    return found


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        kind, payload, records = sys.argv[2:]
        if kind == "library":
            return run_library(json.loads(payload), records)
        if kind == "ours":
            return run_ours(payload, records)
        read_epoch()
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        Path("memory.json").write_text(json.dumps({"peak_host_memory_bytes": peak}))
        return None
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=LAYERS, default="llama-8b")
    parser.add_argument("--steps", type=int, default=110, help="fewer than the library's epoch")
    parser.add_argument(
        "--skip",
        type=int,
        default=50,
        help="steps before the measurement: compiling, and what the library's workers have ready by then",
    )
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--samples", type=int, default=640)
    parser.add_argument("--length", type=int, default=512, help="mean tokens a sample")
    parser.add_argument("--tokens", type=int, default=8192, help="packed tokens a micro-batch")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="muon")
    parser.add_argument("--workers", type=int, default=2, help="our assembling threads")
    parser.add_argument("--library-workers", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--only", choices=["ours", "library"])
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="then look at N more of our steps")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--dir", default="/dev/shm" if os.path.isdir("/dev/shm") else None, help="where the data is made")
    parser.add_argument(
        "--data",
        help="a folder that keeps the data from one call to the next; nothing else may differ but --only, --gpus, --accumulate",
    )
    parser.add_argument("--json")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no child outlives this process
    found = memory(args) if args.memory else compare(args)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n")
    return None


if __name__ == "__main__":
    main()
