"""Acceptance length and tokens/s of a verifier with and without its drafter, in vLLM on the same engine settings.

One engine starts without a drafter and one for each number of draft tokens; counters are the engine's own, answers are compared
with plain greedy decoding. Prompts are files of questions, or by default the held-out split of data/prompts.

    python bench/serve.py                                          # the pipeline's own verifier and export
    python bench/serve.py --verifier FOLDER --drafter FOLDER --prompts a.jsonl b.jsonl --batch-sizes 1 8 32 --draft-tokens 1 2 3
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle3dvc import evaluate, serving
from eagle3dvc.errors import UserError
from eagle3dvc.params import parse
from eagle3dvc.prompts.shards import iter_samples


def prompts_of(a: argparse.Namespace) -> list[evaluate.Prompt]:
    if not a.prompts:
        return evaluate.heldout_prompts(iter_samples("data/prompts", "heldout"), a.max_prompt)[: a.samples]
    files = [os.path.abspath(p) for p in a.prompts]
    asked = {"engine": "vllm", "prompts": files, "watch": os.path.commonpath(files)}
    params = parse({"max_samples": 1, "evaluate": asked})
    found = evaluate.file_prompts(params, a.verifier, a.samples)
    return [p for p in found if len(p.token_ids) <= a.max_prompt]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--verifier", default="data/verifier", help="folder with the whole verifier and its tokenizer")
    p.add_argument("--drafter", default="models/export/speculators")
    p.add_argument("--prompts", nargs="*", default=[], help="files of questions (.jsonl, .json, .parquet)")
    p.add_argument("--samples", type=int, default=32, help="prompts a file")
    p.add_argument("--max-prompt", type=int, default=2048, help="longer prompts are left out")
    p.add_argument("--draft-tokens", type=int, nargs="+", default=[3])
    p.add_argument("--batch-sizes", type=int, nargs="+", default=[1], help="1 is compared by source too")
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--dtype", default="auto")
    p.add_argument("--engine-args", type=json.loads, default={}, help="JSON of vLLM's EngineArgs")
    p.add_argument("--logs", default="logs")
    p.add_argument("--json", action="store_true")
    a = p.parse_args()
    for name in ("samples", "max_prompt", "max_new_tokens"):
        if getattr(a, name) < 1:
            p.error(f"--{name.replace('_', '-')} must be at least 1")
    if min(*a.draft_tokens, *a.batch_sizes) < 1:
        p.error("--draft-tokens and --batch-sizes must be at least 1")
    prompts = prompts_of(a)
    if not prompts:
        p.error(f"no prompt of at most {a.max_prompt} tokens is left: raise --max-prompt")
    plain = serving.Spec(
        prompts=[x.token_ids for x in prompts],
        groups=[x.group for x in prompts],
        max_new_tokens=a.max_new_tokens,
        model=a.verifier,
        stop_token_ids=evaluate.stop_tokens(a.verifier),
        batch_sizes=a.batch_sizes,
        dtype=a.dtype,
        warmup=16,
        engine_args={"skip_tokenizer_init": True, **a.engine_args},
    )
    logs, found = Path(a.logs), {}
    with tempfile.TemporaryDirectory() as scratch:
        drafter = str(evaluate.as_speculators(Path(a.drafter), Path(scratch)))
        base = serving.measure(plain, logs / "serve-plain.log")
        for k in sorted(set(a.draft_tokens)):
            found[k] = serving.measure(
                dataclasses.replace(plain, drafter=drafter, draft_tokens=k), logs / f"serve-draft{k}.log"
            )
    report = evaluate.compare(base, found, max(found), a.dtype, a.max_new_tokens)
    if a.json:
        print(json.dumps(report, indent=2, sort_keys=True))
        return
    print(f"vLLM {report['version']}, {len(prompts)} prompts, up to {a.max_new_tokens} new tokens, {a.verifier} + {a.drafter}")
    print("batch  draft tokens  acceptance length  by position           tokens/s  without drafter  speed-up")
    for row in report["table"]:
        rates = " ".join(f"{x:.3f}" for x in row["acceptance_by_position"])
        print(
            f"{row['batch_size']:>5}  {row['draft_tokens']:>12}  {row['acceptance_length']:>17.3f}  {rates:<20}"
            f"  {row['tokens_per_second']:>8.1f}  {row['baseline_tokens_per_second']:>15.1f}  {row['speedup']:>8.2f}"
        )
    if report["by_group"]:
        print(f"\n{max(found)} draft tokens, batch 1, by source:")
    for name, row in sorted(report["by_group"].items()):
        print(
            f"  {name}: acceptance length {row['acceptance_length']:.3f}, {row['tokens_per_second']:.1f} tokens/s, "
            f"{row['baseline_tokens_per_second']:.1f} without, speed-up {row['speedup']:.2f} ({row['prompts']} prompts)"
        )
    print(f"answers equal to plain greedy decoding: {report['identical_outputs']} of {report['prompts']}")


if __name__ == "__main__":
    try:
        main()
    except UserError as e:
        sys.exit(f"error: {e}")
