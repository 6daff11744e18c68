"""The model card (README.md) of an export, and what only a repository's history can add to it.

The card inside `models/export` is part of a DVC output, so it holds only what the same inputs always give: names, counts,
settings, the drafter's own metrics, and the hashes that dvc.lock records for its inputs. A git commit is not such a thing:
the commit that records this export in dvc.lock does not exist yet while the export is being made. The hashes name it without
doubt, though: `eagle3dvc card` looks up the first commit of a branch or tag whose dvc.lock has the drafter's and, where the present
dvc.lock is of that drafter, the export's, and writes a card with the commit and the evaluation, for publishing.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from eagle3dvc.drafter import layouts
from eagle3dvc.drafter.layouts import Drafter
from eagle3dvc.errors import UserError, yaml_problem

INPUTS = ("data/verifier", "data/prompts", "data/hidden_states", "models/drafter")
EXPORT = "models/export"
METRICS = (
    "`acceptance_length` and `heldout_loss` are of the best checkpoint (`best_step`), on `heldout_samples` held-out samples. The rest is "
    "of the whole training: its last loss, steps, samples and supervised tokens, and the draft vocabulary."
)
MARK = "<!-- eagle3dvc: provenance -->"


def _outputs(lock: str | Path) -> dict[str, str | None]:
    """{output: md5} of all outputs in dvc.lock; empty outside DVC. Raises UserError where it is no YAML."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    if (text := _read(Path(lock))) is None:
        return {}
    try:
        stages = (YAML(typ="safe").load(text) or {}).get("stages") or {}
    except YAMLError as e:
        raise UserError(f"{lock} is not valid YAML: {yaml_problem(e)}") from None
    return {o["path"]: o.get("md5") for s in stages.values() for o in s.get("outs", ())}


def lock_hashes(lock: str | Path = "dvc.lock") -> dict[str, str]:
    """{output: md5} of the inputs of an export, as dvc.lock records them; empty outside DVC."""
    outs = _outputs(lock)
    return {name: outs[name] for name in INPUTS if outs.get(name)}


def source_counts(prompts: str | Path) -> dict[str, dict[str, int]]:
    """{source: {split: samples}} of the prompt shards."""
    import pyarrow.parquet as pq

    from eagle3dvc.prompts import shards

    counts: dict[str, dict[str, int]] = {}
    for file in shards.shard_files(prompts):
        table = pq.read_table(file, columns=["source", "split"])
        for row in table.group_by(["source", "split"]).aggregate([([], "count_all")]).to_pylist():
            splits = counts.setdefault(row["source"], {})
            splits[row["split"]] = splits.get(row["split"], 0) + row["count_all"]
    return {k: counts[k] for k in sorted(counts)}


def serve_command(d: Drafter, layout: str, revision: str | None = None, model: str | None = None) -> str:
    """The command that serves the verifier with this drafter; FOLDER stands for where the reader put it.

    model: what to serve where the verifier's name is nothing an engine could download.
    """
    k, model = d.speculative_tokens, model or d.verifier
    pin = f" --revision {revision}" if revision else ""
    if layout == layouts.SPECULATORS:
        spec = json.dumps({"model": "FOLDER", "method": "eagle3", "num_speculative_tokens": k})
        return f"vllm serve {model}{pin} --speculative-config '{spec}'"
    return (
        f"python -m sglang.launch_server --model-path {model}{pin} --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path FOLDER --speculative-num-steps {k} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {k + 1}"
    )


def _table(rows: list[tuple[str, Any]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)])


def _flat(block: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows = []
    for k in sorted(block):
        v = block[k]
        rows += _flat(v, f"{prefix}{k}.") if isinstance(v, dict) else [(f"`{prefix}{k}`", f"`{json.dumps(v)}`")]
    return rows


def _public(settings: dict[str, Any]) -> dict[str, Any]:
    """Without the path of some machine: a card goes everywhere."""
    start = settings.get("warm_start")
    return {**settings, "warm_start": "a local folder"} if start and layouts.looks_local(start) else settings


def training_record(drafter: str | Path) -> dict[str, Any]:
    """models/drafter/training.json: what the drafter was trained with and how well it did. Raises UserError."""
    path = Path(drafter) / "training.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise UserError(f"{path} cannot be read ({e}): run `dvc repro train`") from None


def text(d: Drafter, layout: str, *, info: Any, drafter: str | Path, prompts: str | Path) -> str:
    """The card of one layout; the same inputs give the same text."""
    record, demo = training_record(drafter), info.source == "demo"
    engine = "vLLM" if layout == layouts.SPECULATORS else "SGLang"
    revision = info.revision
    counts = source_counts(prompts)
    data = [(f"`{s}`", ", ".join(f"{n} {split}" for split, n in sorted(by.items()))) for s, by in counts.items()]
    hashes = lock_hashes()
    find = f"git log --format=%H -S {hashes['models/drafter']} -- dvc.lock" if "models/drafter" in hashes else None
    c = d.decoder
    ids = list(d.aux_layer_ids)
    shown = ids if layout == layouts.SPECULATORS else [i - 1 for i in ids]
    lines = [
        "---",
        "library_name: " + ("vllm" if layout == layouts.SPECULATORS else "sglang"),
        f"base_model: {d.verifier}",
        "tags: [eagle3, speculative-decoding, " + layout + "]",
        "---",
        "",
        f"# EAGLE-3 drafter for {d.verifier} ({engine})",
        "",
        "Serve it (FOLDER is where you put this folder):",
        "",
        "```bash",
        serve_command(d, layout, revision, "data/verifier" if demo else None),
        "```",
        "",
        *(["The demo verifier is published nowhere: data/verifier of the pipeline is the whole model.", ""] * demo),
        f"The draft tokens come from {d.draft_vocab_size} of the verifier's {d.vocab_size} tokens; the verifier decides every"
        " token, so the answers stay its own.",
    ]
    if layout == layouts.SGLANG:
        lines += [
            "",
            "For SGLang only: vLLM would read these layer ids in its own convention and take every layer one too early.",
        ]
    lines += [
        "",
        "## Verifier",
        "",
        _table([("name", d.verifier), ("revision", revision or "none"), ("identity", info.identity)]),
    ]
    lines += ["", "## Drafter", ""]
    lines.append(
        _table(
            [
                ("decoder layers", c["num_hidden_layers"]),
                ("hidden size", c["hidden_size"]),
                (
                    "heads, key/value heads, head size",
                    f"{c['num_attention_heads']}, {c['num_key_value_heads']}, {c['head_dim']}",
                ),
                ("auxiliary layers (this layout's ids)", shown),
                ("rope", f"`{json.dumps(c['rope_parameters'], sort_keys=True)}`"),
                ("norms", ", ".join(f for f in layouts.NORM_FLAGS if getattr(d, f)) or "none of the optional ones"),
                ("attention", f"sliding window {c['sliding_window']}" if d.sliding else "full"),
                ("weights", str(d.tensors["fc.weight"].dtype).removeprefix("torch.")),
            ]
        )
    )
    lines += ["", "## Data", "", _table(data or [("none", "")])]
    lines += ["", "## Training", "", _table(_flat({"seed": record["seed"], **_public(record["settings"])}))]
    lines += ["", "## Metrics", "", METRICS, "", _table(_flat(record["metrics"]))]
    lines += ["", "## Where it comes from", "", MARK]
    lines.append(_table([(f"`{k}`", f"`{v}`") for k, v in hashes.items()] or [("dvc.lock", "not made by a DVC pipeline")]))
    if find:
        lines += ["", f"These are the hashes dvc.lock records. The git commit that made them: `{find} | tail -1`"]
    return "\n".join(lines) + "\n"


def _git(*args: str, missing: str | None = None) -> str:
    """What git prints; where it fails, `missing`, or UserError."""
    done = subprocess.run(["git", *args], capture_output=True, encoding="utf-8", errors="replace")
    if not done.returncode:
        return done.stdout.strip()
    if missing is not None:
        return missing
    said = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
    raise UserError(f"git {' '.join(args[:2])} failed: {said[-1]}")


def commit_of(hashes: list[str], lock: str = "dvc.lock") -> str:
    """The first commit of the branches, tags and HEAD whose dvc.lock has all these hashes; UserError when none has.

    Experiments are not looked through: their commits are nothing that others have.
    """
    where = ("--branches", "--tags", "--remotes", "HEAD")
    for commit in _git("log", "--format=%H", "--reverse", "--topo-order", *where, "--", lock).splitlines():
        found = _git("show", f"{commit}:./{lock}", missing="")
        if all(f"md5: {md5}\n" in f"{found}\n" for md5 in hashes):
            return commit
    raise UserError(
        f"no commit of a branch or tag has {' and '.join(hashes)} in {lock}: commit {lock} first (git add {lock} && git commit)"
    )


def finished(folder: str | Path, metrics: str | Path = "metrics/evaluate.json", lock: str = "dvc.lock") -> str:
    """The card of an exported layout with the git commit that made it and, where there is one, the evaluation. Raises UserError."""
    path = Path(folder) / "README.md"
    card = _read(path)
    if card is None or MARK not in card:
        raise UserError(f"{path} is not a card of this pipeline: give a folder inside models/export")
    row = re.search(r"^\| `models/drafter`.*$", card.split(MARK, 1)[1], re.MULTILINE)
    if not row:
        raise UserError(f"{path} was not made by a DVC pipeline: there is no commit to find")
    hashed = re.fullmatch(r"\| `models/drafter` \| `([0-9a-f]+(?:\.dir)?)` \|", row[0])
    if not hashed:
        raise UserError(f"{path}: the row of models/drafter was edited and holds no hash now: run `dvc checkout {EXPORT}`")
    hashes, outs = [hashed[1]], _outputs(lock)
    if outs.get("models/drafter") == hashed[1] and outs.get(EXPORT):  # else dvc.lock is of another drafter's export
        hashes.append(outs[EXPORT])
    card = card.replace(MARK, f"{MARK}\nGit commit: `{commit_of(hashes, lock)}`\n")
    if (rows := _evaluation(Path(metrics))) is not None:
        card = card.replace("\n## Where it comes from\n", f"\n## Evaluation\n\n{_table(rows)}\n\n## Where it comes from\n")
    return card


def _evaluation(path: Path) -> list[tuple[str, Any]] | None:
    """Rows of metrics/evaluate.json; None where there is none."""
    if (found := _read(path)) is None:
        return None
    try:
        values = dict(json.loads(found))
    except (ValueError, TypeError, RecursionError) as e:
        raise UserError(f"{path} is damaged ({e}): run `dvc repro evaluate`, or `git checkout` it") from None
    return _flat({k: v for k, v in values.items() if isinstance(v, int | float | list | dict)})


def _read(path: Path) -> str | None:
    """Its text; None where there is no such file. Raises UserError."""
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path} cannot be read as text ({e}): get it again, `dvc checkout` or `git checkout` does") from None


def write(text: str, path: Path) -> None:
    """Write a finished card; UserError where `path` is something else than a card of this pipeline, or cannot be written."""
    if path.exists() and MARK not in (_read(path) or ""):
        raise UserError(f"{path} exists and is not a card of this pipeline: give another name, or remove it")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise UserError(f"{path} cannot be written ({e.strerror})") from None
