"""Acceptance length of a drafter trained on its verifier's own answers against one trained on the data set's answers.

    python bench/own_answers.py                                    # the demo verifier in data/verifier, questions like its own
    python bench/own_answers.py --verifier FOLDER --prompts alpaca.jsonl humaneval.jsonl mt_bench.jsonl --engine vllm
    python bench/own_answers.py --verifier FOLDER --prompts alpaca.jsonl humaneval.jsonl mt_bench.jsonl --samples 4000  # a GPU

Rows are {"turns": [...], "reference": [...]}. Every fourth row that has answers, and all that have none, are held out; the others
become the training prompts, alone first and then two in one prompt, until there are --samples. Each side is the pipeline itself,
stage by stage, in a folder of its own: `own` with prepare.responses = verifier, `reference` with the file's answers, all else equal.
A third folder has the held-out prompts with the verifier's greedy answers, which is what a server sees, and evaluates both there.
Neither DVC nor git is needed. --keep DIR keeps the own drafter for bench/serve.py; --set train.learning_rate=1e-3 sets a parameter.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SIDES = {"own": "verifier", "reference": "dataset"}
# sizes by what there is: the demo, a real verifier on a CPU (a narrow drafter, few steps), a real verifier on a GPU
DEMO = {"max_length": 512, "new": 96, "samples": 300, "steps": 150, "batch": 1024, "vocab": 512, "rate": 6e-3, "inner": None}
CPU = {"max_length": 512, "new": 96, "samples": 160, "steps": 200, "batch": 512, "vocab": 4096, "rate": 1e-3, "inner": 1024}
GPU = {
    "max_length": 1024,
    "new": 128,
    "samples": 4000,
    "steps": 400,
    "batch": 4096,
    "vocab": 16384,
    "rate": 5e-4,
    "inner": None,
}


def questions(files: list[Path], heldout: int) -> tuple[list[dict], dict[str, list[dict]]]:
    """(rows to train on, files in turn; held-out rows by file name, at most `heldout` a file)."""
    from eagle3dvc.errors import UserError

    train, kept = [], {}
    for file in files:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        whole = [r for r in rows if r.get("reference") and len(r["reference"]) == len(r["turns"]) == 1]
        whole = whole if 2 * len(whole) > len(rows) else []  # a file with some answers only measures, like one with none
        kept[file.stem] = (whole[::4] or rows)[:heldout]
        train.append([r for i, r in enumerate(whole) if i % 4])
    longest = max(map(len, train), default=0)
    rows = [part[i] for i in range(longest) for part in train if i < len(part)]
    if len(rows) < 2:
        raise UserError(f"{', '.join(map(str, files))}: no file has an answer (`reference`) in most of its rows to train on")
    return rows, kept


def demo_questions(path: Path) -> Path:
    """A file of questions that the demo verifier was trained to answer, none of them from its training."""
    from eagle3dvc.prompts import demo

    found = demo.eval_prompts(0, 400)
    write_rows(path, ({"turns": [q["messages"][0]["content"]], "reference": [q["reference"]]} for q in found))
    return path


def training_rows(rows: list[dict], count: int) -> Iterator[dict]:
    """`count` rows: each one alone, then every ordered pair of two different ones in one prompt, nearest first."""
    from eagle3dvc.errors import UserError

    most = len(rows) ** 2
    if count > most:
        raise UserError(f"--samples {count}: {len(rows)} rows with answers give at most {most} prompts")
    for n in range(count):
        gap, i = divmod(n, len(rows))
        pair = [rows[i]] if gap == 0 else [rows[i], rows[(i + gap) % len(rows)]]
        yield {key: ["\n\n".join(r[key][0].strip() for r in pair)] for key in ("turns", "reference")}


def write_rows(path: Path, rows: Iterator[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")


def settings(a: argparse.Namespace, d: dict[str, Any], name: str, sources: list[Path]) -> dict[str, Any]:
    """What differs from the project's params.yaml."""
    on_gpu = a.device == "cuda"
    extract: dict[str, Any] = {"engine": a.engine, "dtype": d["dtype"], "batch_tokens": 8192 if on_gpu else 2048}
    if on_gpu:  # the folders share the GPU; for few answers an engine lives a minute, which compiling would double
        extract |= {"enforce_eager": not a.questions, "gpu_memory_utilization": 0.25, "max_num_seqs": 512}
        extract |= {"engine_args": {"kv_cache_memory_bytes": 12 << 30}}
    else:
        extract |= {"max_num_seqs": 32, "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}}
    return {
        "max_samples": 1_000_000 if name == "heldout" or a.questions else a.samples,
        "prepare": {
            "sources": [{"path": str(p)} for p in sources],
            "watch": str(sources[0].parent),
            "max_length": d["max_length"],
            "max_new_tokens": d["new"],
            "heldout_fraction": 0.9999 if name == "heldout" else 0.1,
            "max_rejected_fraction": 0.5,
            "samples_per_shard": 100 if on_gpu else 25,
            "responses": SIDES.get(name, "verifier"),
        },
        "extract": extract,
        "train": {
            "draft_vocab_size": d["vocab"],
            "learning_rate": d["rate"],
            "max_steps": a.steps,
            "eval_every": a.steps,  # before and after, so that both sides end with the weights of the last step
            "eval_samples": 8,
            "checkpoint_every": 1_000_000,
            "tokens_per_batch": d["batch"],
            "precision": d["dtype"],
            "compile": False,
            "loggers": [],
            "draft_intermediate_size": d["inner"],
        },
        "export": {"layouts": ["speculators"]},
        "evaluate": {"samples": 1_000_000, "draft_tokens": a.draft_tokens},
    }


class Side:
    """One working copy: params.yaml, data and models of its own; the code is the project's."""

    def __init__(self, a: argparse.Namespace, folder: Path, values: dict[str, Any]):
        from eagle3dvc import profiles, verifier

        self.folder, self.device, self.seconds = folder, a.device, {}
        folder.mkdir(parents=True)
        self.params = folder / "params.yaml"
        shutil.copyfile(ROOT / "params.yaml", self.params)
        verifier.use(str(a.verifier), None, a.name, self.params)
        profiles.write(values, self.params, "the settings of this benchmark")
        profiles.write(a.overrides, self.params, "--set")

    def run(self, *stages: str) -> None:
        """Run stages here, one after the other; what they print goes to stages.log."""
        from eagle3dvc.errors import UserError

        env = {**os.environ, "DVC_ROOT": str(self.folder), "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        if self.device == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""
        for stage in stages:
            started = time.monotonic()
            with open(self.folder / "stages.log", "ab") as log:
                done = subprocess.run(
                    [sys.executable, "-m", f"stages.{stage}"], cwd=self.folder, env=env, stdout=log, stderr=log
                )
            self.seconds[stage] = round(time.monotonic() - started, 1)
            if done.returncode:
                lines = (self.folder / "stages.log").read_text("utf-8", "replace").strip().splitlines()
                raise UserError(f"stage {stage} failed in {self.folder}: {lines[-1] if lines else 'no reason given'}")
            print(f"  {self.folder.name}: {stage} {self.seconds[stage]} s", file=sys.stderr, flush=True)

    def metrics(self, stage: str) -> dict[str, Any]:
        return json.loads((self.folder / "metrics" / f"{stage}.json").read_text(encoding="utf-8"))


def untrained(side: Side, out: Path) -> None:
    """The drafter that this side's training began with (model.instantiate after the same seed), as a checkpoint folder."""
    import torch
    from safetensors.torch import load_file

    from eagle3dvc import params, verifier
    from eagle3dvc.drafter import model
    from eagle3dvc.drafter.vocab import DraftVocab

    p = params.load(side.params)
    data = side.folder / "data/verifier"
    info = verifier.load_info(data)
    torch.manual_seed(p.seed)
    config = model.draft_config(info, p.train, verifier.layer_ids(info, p))
    chosen = DraftVocab(**load_file(side.folder / "models/drafter/vocab.safetensors"))
    model.save(model.instantiate(config, verifier.load_head(data), chosen, "sdpa"), out)


def evaluate(judge: Side, drafter: Path, baseline: Path) -> dict[str, Any]:
    """metrics/evaluate.json of `drafter` beside `baseline` on the held-out prompts, by the stage itself."""
    from eagle3dvc import profiles

    place = judge.folder / "models/export"
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(drafter)
    profiles.write({"evaluate": {"baseline": str(baseline)}}, judge.params, "the benchmark's baseline")
    judge.run("evaluate")
    return judge.metrics("evaluate")


def measure(a: argparse.Namespace, d: dict[str, Any], work: Path) -> dict[str, Any]:
    files = a.prompts or [demo_questions(work / "prompts/demo.jsonl")]
    train, kept = questions(files, a.heldout)
    write_rows(work / "prompts/train/train.jsonl", training_rows(train, a.samples))
    if a.questions:
        shutil.copyfile(a.questions, work / "prompts/train/questions.jsonl")
    for name, rows in kept.items():
        write_rows(work / f"prompts/heldout/{name}.jsonl", rows)
    names = ["own"] if a.questions else list(SIDES)
    sources = {name: sorted((work / "prompts/train").iterdir()) for name in names}
    sources["heldout"] = [work / f"prompts/heldout/{name}.jsonl" for name in kept]
    sides = {name: Side(a, work / name, settings(a, d, name, sources[name])) for name in ("heldout", *names)}
    judge = sides["heldout"]
    judge.run("verifier")
    for name in names:
        shutil.copytree(judge.folder / "data/verifier", sides[name].folder / "data/verifier")
    jobs = [(judge, ("prepare", "extract")), *((sides[name], ("prepare", "extract", "train", "export")) for name in names)]
    with ThreadPoolExecutor(a.jobs) as pool:
        try:
            for job in [pool.submit(side.run, *stages) for side, stages in jobs]:
                job.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    exports = {name: sides[name].folder / "models/export" for name in names}
    untrained(sides["own"], work / "untrained")
    result = evaluate(judge, exports["own"], work / "untrained")
    before, beside = result["baseline"], {}
    if "reference" in exports:
        result = evaluate(judge, exports["own"], exports["reference"])
        other = result["baseline"]
        beside = {
            "reference": other["acceptance_length"],
            "difference": other["difference"],
            "difference_ci95": other["difference_ci95"],
            "reference_by_position": other["acceptance_by_position"],
        }
    if a.keep:
        shutil.rmtree(a.keep, ignore_errors=True)
        shutil.copytree(exports["own"] / "speculators", a.keep)
    return {
        "before": before["acceptance_length"],
        "own": result["acceptance_length"],
        "own_ci95": result["acceptance_length_ci95"],
        "own_by_position": result["acceptance_by_position"],
        **beside,
        "own_by_source": {k: v["acceptance_length"] for k, v in result["by_source"].items()},
        "heldout_samples": result["samples"],
        "drafts": result["drafts"],
        "greedy_agreement": result["greedy_agreement"],
        "draft_tokens": result["draft_tokens"],
        "prompts": a.samples,
        "questions": len(train),
        "made_up": len(a.questions.read_text(encoding="utf-8").splitlines()) if a.questions else 0,
        "trained": {name: sides[name].metrics("train") for name in names},
        "prepared": {name: {k: sides[name].metrics("prepare")[k] for k in ("samples", "tokens")} for name in sides},
        "seconds": {name: side.seconds for name, side in sides.items()},
    }


def parse() -> tuple[argparse.Namespace, dict[str, Any]]:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--verifier", type=Path, default=Path("data/verifier"), help="a folder in Hugging Face's layout")
    p.add_argument("--name", default=None, help="public id of the verifier (default: the folder's name)")
    p.add_argument(
        "--prompts", type=Path, nargs="+", help=".jsonl files of turns and references (default: the demo's questions)"
    )
    p.add_argument("--samples", type=int, help="training prompts")
    p.add_argument(
        "--questions",
        type=Path,
        help="further training prompts, beside --samples, without answers (bench/questions.py): only the own side then",
    )
    p.add_argument("--heldout", type=int, default=40, help="held-out prompts a file, at most")
    p.add_argument("--steps", type=int, help="optimizer steps of each side")
    p.add_argument("--max-new-tokens", type=int, help="tokens of an answer, at most")
    p.add_argument("--draft-tokens", type=int, default=3)
    p.add_argument("--engine", choices=["auto", "vllm", "transformers"], default="auto")
    p.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    p.add_argument("--jobs", type=int, help="folders at work side by side (default: 3 on a GPU, 1 on a CPU)")
    p.add_argument("--set", dest="sets", nargs="*", default=[], metavar="KEY=VALUE", help="any parameter, for all sides")
    p.add_argument("--keep", type=Path, help="keep the own drafter's export in this folder")
    p.add_argument("--work", type=Path, help="a new folder for everything, kept (default: temporary)")
    p.add_argument("--json", type=Path, help="write the result here as well")
    a = p.parse_args()
    if a.device is None:
        import torch

        a.device = "cuda" if torch.cuda.is_available() else "cpu"
    d = dict(DEMO if not a.prompts else GPU if a.device == "cuda" else CPU)
    d["dtype"] = "bfloat16" if a.prompts else "float32"
    d["new"] = a.max_new_tokens or d["new"]
    a.samples, a.steps = a.samples or d["samples"], a.steps or d["steps"]
    a.jobs = a.jobs or (3 if a.device == "cuda" else 1)
    a.verifier, a.name = a.verifier.resolve(), a.name or f"bench/{a.verifier.resolve().name}"
    a.overrides = {}
    for text in a.sets:
        key, _, value = text.partition("=")
        *path, last = key.split(".")
        node = a.overrides
        for part in path:
            node = node.setdefault(part, {})
        node[last] = json.loads(value) if value[:1] in '-0123456789[{tfn"' and value else value
    return a, d


def main() -> None:
    from eagle3dvc.errors import UserError

    a, d = parse()
    started = time.monotonic()
    try:
        with nullcontext(a.work) if a.work else tempfile.TemporaryDirectory(prefix="own-answers-") as work:
            found = measure(a, d, Path(work).resolve())
    except UserError as e:
        sys.exit(f"error: {e}")
    found["seconds_total"] = round(time.monotonic() - started, 1)
    print(
        f"{a.verifier.name} on {a.device}, engine {a.engine}: {a.samples} training prompts from {found['questions']} questions,"
        + (f" {found['made_up']} made-up ones," if found["made_up"] else "")
    )
    print(f"{a.steps} steps a side; {found['heldout_samples']} held-out prompts, {found['draft_tokens']} draft tokens")
    print("acceptance length on the verifier's own greedy answers")
    print(f"  before training             {found['before']:.3f}")
    print(f"  after its own answers       {found['own']:.3f}")
    if "reference" in found:
        low, high = found["difference_ci95"]
        print(f"  after reference answers     {found['reference']:.3f}")
        print(f"  own - reference             {found['difference']:+.3f}  (95 % interval {low:+.3f} to {high:+.3f})")
    print("  own by source               " + ", ".join(f"{k} {v:.3f}" for k, v in found["own_by_source"].items()))
    print(f"seconds: {found['seconds_total']} in all; {json.dumps(found['seconds'])}")
    if a.json:
        a.json.parent.mkdir(parents=True, exist_ok=True)
        a.json.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
