"""The evaluate stage: what it reports is the walk of the exported drafter, with differences and intervals that mean something."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import world

from eagle3dvc import evaluate, serving
from eagle3dvc.drafter import layouts
from eagle3dvc.drafter import model as drafter_model
from eagle3dvc.drafter.acceptance import walk
from eagle3dvc.errors import UserError
from eagle3dvc.hidden_states.reader import HiddenStates
from eagle3dvc.params import parse
from eagle3dvc.verifier import load_head


def params(**settings):
    return parse(
        {
            "max_samples": 48,
            "prepare": {"responses": "verifier", "max_length": 64},
            "extract": {"aux_layer_ids": world.AUX},
            "evaluate": {"samples": 12, "bootstrap": 200, **settings},
        }
    )


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """Run the stage in a folder of its own: (metrics, log, plots)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))

    def go(drafter=trained.export, **settings):
        log: dict = {}
        made = evaluate.build(params(**settings), log, drafter, plots=tmp_path / "plots", **trained.world.folders)
        return made, log, tmp_path / "plots"

    return go


@pytest.fixture(scope="module")
def untrained(trained, tmp_path_factory) -> Path:
    """The same drafter with random weights in place of what it learnt."""
    folder = tmp_path_factory.mktemp("untrained") / "speculators"
    d = layouts.read(trained.export / "speculators")
    torch.manual_seed(0)
    for t in d.tensors.values():
        if t.is_floating_point() and t.dim() == 2:
            t.normal_(0, 0.1)
    layouts.write(d, folder, "speculators")
    return folder


def test_metrics_are_the_walk_of_the_export(trained, run):
    metrics, log, plots = run()
    folders = trained.world.folders
    data = HiddenStates(folders["hidden"], folders["prompts"])
    drafter = drafter_model.load(trained.export / "speculators", folders["verifier"])
    items = [data[int(i)] for i in data.splits["heldout"]]
    wanted = walk(drafter, load_head(folders["verifier"]), items, 3, True)
    assert metrics["drafts"] == wanted.drafts and metrics["accepted"] == wanted.accepted
    assert metrics["acceptance_length"] == pytest.approx(1 + wanted.accepted / wanted.drafts, abs=1e-6)
    assert metrics["acceptance_by_position"] == pytest.approx([n / wanted.drafts for n in wanted.by_position], abs=1e-6)
    assert sum(metrics["acceptance_by_position"]) == pytest.approx(metrics["acceptance_length"] - 1, abs=1e-5)
    assert metrics["samples"] == 12 and metrics["draft_tokens"] == 3 and metrics["on_policy"] is True
    assert metrics["greedy_agreement"] == 1.0, "the answers of this world are the verifier's own"
    low, high = metrics["acceptance_length_ci95"]
    assert low < metrics["acceptance_length"] < high
    assert metrics["by_source"].keys() == {"source-0", "source-1"}
    assert sum(s["drafts"] for s in metrics["by_source"].values()) == metrics["drafts"]
    assert log.keys() == {"seconds_growing"}, "no engine was asked for"
    assert json.loads(json.dumps(metrics)) == metrics
    assert run()[0] == metrics, "the same inputs give the same numbers"


def test_plots_are_tables_of_the_same_numbers(run):
    metrics, _, plots = run()
    with open(plots / "by_position.csv") as f:
        rows = list(csv.DictReader(f))
    own = [float(r["accepted"]) for r in rows if r["source"] == "all"]
    assert own == metrics["acceptance_by_position"]
    assert {r["source"] for r in rows} == {"all", "source-0", "source-1"}
    with open(plots / "by_source.csv") as f:
        lengths = {r["source"]: float(r["acceptance_length"]) for r in csv.DictReader(f)}
    assert lengths == {s: row["acceptance_length"] for s, row in metrics["by_source"].items()}


def test_training_beats_no_training_by_more_than_its_interval(run, untrained):
    metrics, _, _ = run(baseline=str(untrained))
    found = metrics["baseline"]
    assert found["acceptance_length"] < 1.3 < metrics["acceptance_length"]
    assert found["difference"] == pytest.approx(metrics["acceptance_length"] - found["acceptance_length"], abs=1e-5)
    low, high = found["difference_ci95"]
    assert 0 < low < found["difference"] < high


def test_a_drafter_does_not_differ_from_itself(trained, run):
    found = run(baseline=str(trained.export / "sglang"))[0]["baseline"]
    assert found["difference"] == 0 and found["difference_ci95"] == [0, 0]
    assert found["name"] == str(trained.export / "sglang") and not found.keys() & {"commit", "verifier"}


def test_a_baseline_that_contradicts_its_provenance(trained, run, tmp_path):
    copy = Path(shutil.copytree(trained.export / "speculators", tmp_path / "other"))
    config = json.loads((copy / "config.json").read_text())
    config["transformer_layer_config"]["rope_parameters"]["rope_theta"] = 77.0
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="other: rope_parameters is .*77.* in config.json but was"):
        run(baseline=str(copy))


def test_a_foreign_sglang_drafter_that_does_not_say_its_verifier_is_to_be_converted_first(trained, tmp_path):
    shutil.copytree(trained.export / "sglang", tmp_path / "foreign")
    config = json.loads((tmp_path / "foreign/config.json").read_text())
    del config["eagle3dvc"]
    (tmp_path / "foreign/config.json").write_text(json.dumps(config))
    (tmp_path / "foreign/eagle3dvc.json").unlink()
    with pytest.raises(UserError, match="give --verifier-name, .*: convert it with `eagle3dvc convert .*foreign OUT --to spec"):
        evaluate.as_speculators(tmp_path / "foreign", tmp_path)


def test_the_sglang_layout_alone_gives_the_same_numbers(trained, run, tmp_path):
    shutil.copytree(trained.export / "sglang", tmp_path / "only/sglang")
    assert run(drafter=tmp_path / "only")[0] == run()[0]


def test_weights_of_another_name_are_found(trained, run, tmp_path):
    copy = Path(shutil.copytree(trained.export / "speculators", tmp_path / "other"))
    (copy / "model.safetensors").rename(copy / "drafter.safetensors")
    assert run(drafter=copy)[0] == run()[0]
    (copy / "drafter.safetensors").unlink()
    with pytest.raises(UserError, match="other holds no safetensors file"):
        drafter_model.read_checkpoint(copy)


def test_draft_token_sweep(run):
    metrics, _, _ = run(sweep_draft_tokens=[1, 2])
    by = metrics["by_draft_tokens"]
    assert list(by) == ["1", "2", "3"]
    assert 1 < by["1"] <= by["2"] <= by["3"] == metrics["acceptance_length"] and by["1"] <= 2


def test_baseline_of_a_git_revision(trained, run, untrained, tmp_path):
    def call(*args: str) -> str:
        return subprocess.run(args, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com"]
    dvc = [sys.executable, "-m", "dvc"]
    call(*git, "init", "-q")
    call(*dvc, "init", "-q")
    shutil.copytree(untrained, tmp_path / "models/export/speculators")
    call(*dvc, "add", "-q", "models/export")
    call(*git, "add", "-A")
    call(*git, "commit", "-qm", "before")
    revision = call(*git, "rev-parse", "HEAD")
    shutil.rmtree(tmp_path / "models/export")
    metrics, _, _ = run(baseline=revision)
    assert metrics["baseline"]["acceptance_length"] == run(baseline=str(untrained))[0]["baseline"]["acceptance_length"]
    assert run(baseline="HEAD")[0]["baseline"] == metrics["baseline"] | {"name": "HEAD"}
    assert metrics["baseline"]["name"] == metrics["baseline"]["commit"] == revision
    shutil.rmtree(tmp_path / ".dvc/cache")
    with pytest.raises(
        UserError, match=rf"DVC cannot get models/export of {revision[:12]} \(.*(No such|No storage).*\); if another"
    ):
        run(baseline=revision)
    with pytest.raises(UserError, match="neither a folder nor a git revision"):
        run(baseline="no-such-thing")


def test_what_cannot_be_evaluated(trained, run, tmp_path):
    with pytest.raises(UserError, match="holds no drafter"):
        run(drafter=tmp_path)
    copy = Path(shutil.copytree(trained.export / "speculators", tmp_path / "other"))
    (copy / "eagle3dvc.json").unlink()
    config = json.loads((copy / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [2, 3, 4]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"reads the auxiliary layers \[2, 3, 4\], .* hold \[1, 3, 5\]"):
        run(drafter=copy)


def test_a_damaged_folder_is_one_sentence(trained, run, tmp_path):
    copy = Path(shutil.copytree(trained.export / "speculators", tmp_path / "other"))
    weights = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    for setting in ({"drafter": copy}, {"baseline": str(copy)}):
        with pytest.raises(UserError, match="truncated or damaged"):
            run(**setting)


def test_a_baseline_of_another_vocabulary(trained, run, tmp_path):
    """Another part of the verifier's vocabulary is comparable; another verifier's vocabulary is not."""
    d = layouts.read(trained.export / "speculators")
    few = 16
    tensors = dict(d.tensors)
    ids = (torch.arange(d.draft_vocab_size) + tensors["d2t"])[:few]
    tensors |= {"lm_head.weight": tensors["lm_head.weight"][:few].clone(), "d2t": tensors["d2t"][:few].clone()}
    tensors["t2d"] = torch.zeros_like(tensors["t2d"]).index_fill(0, ids, True)
    layouts.write(dataclasses.replace(d, tensors=tensors, draft_vocab_size=few), tmp_path / "few", "speculators")
    found = run(baseline=str(tmp_path / "few"))[0]["baseline"]
    assert 1 <= found["acceptance_length"] < run()[0]["acceptance_length"] and found["difference"] > 0
    more = d.vocab_size + 8
    tensors = d.tensors | {"t2d": torch.cat([d.tensors["t2d"], torch.zeros(8, dtype=torch.bool)])}
    other = dataclasses.replace(d, tensors=tensors, decoder=d.decoder | {"vocab_size": more})
    layouts.write(other, tmp_path / "more", "speculators")
    with pytest.raises(UserError, match=f"a verifier with vocabulary {more} .* has {d.vocab_size}"):
        run(baseline=str(tmp_path / "more"))


def test_a_drafter_of_a_verifier_of_another_name_is_said(trained, run, tmp_path, capsys):
    d = layouts.read(trained.export / "speculators", verifier="tests/other")
    layouts.write(d, tmp_path / "other", "speculators")
    run()
    assert "it is evaluated on" not in capsys.readouterr().err
    found = run(drafter=tmp_path / "other", baseline=str(tmp_path / "other"))[0]
    assert found["baseline"]["verifier"] == "tests/other"
    assert "says it is a drafter for tests/other; it is evaluated on tests/tiny" in capsys.readouterr().err


def test_many_draft_tokens_and_none(run):
    found = run(draft_tokens=20)[0]
    assert len(found["acceptance_by_position"]) == 20
    assert found["acceptance_length"] >= run()[0]["acceptance_length"]
    with pytest.raises(UserError, match=r"evaluate\.draft_tokens = 0 "):
        params(draft_tokens=0)


def test_what_needs_an_engine_says_so():
    asked = {"exact": True, "alone": True, "prompts": ["a.jsonl"], "batch_sizes": [1, 8], "max_new_tokens": 64}
    for name, value in asked.items():
        with pytest.raises(UserError, match=f"evaluate.{name} needs an engine"):
            params(**{name: value})
    params(prompts=[], batch_sizes=[1], max_new_tokens=128)


def test_a_prompt_beyond_the_context_is_refused(trained):
    f = trained.world.folders
    samples = evaluate.heldout(12, f["hidden"], f["prompts"])
    positions = json.loads((Path(f["verifier"]) / "config.json").read_text())["max_position_embeddings"]
    asked = params(engine="vllm", max_new_tokens=positions)
    with pytest.raises(UserError, match=f"has 6 tokens; .* the verifier's {positions} positions"):
        evaluate.engine_specs(asked, trained.export / "speculators", samples, f["verifier"])


def test_a_verifier_of_the_hub_is_served_at_its_commit(trained, tmp_path):
    f = trained.world.folders
    samples = evaluate.heldout(12, f["hidden"], f["prompts"])
    verifier = Path(shutil.copytree(f["verifier"], tmp_path / "verifier"))
    said = json.loads((verifier / "verifier.json").read_text())
    asked = params(engine="vllm")
    plain, _ = evaluate.engine_specs(asked, trained.export / "speculators", samples, verifier)
    assert "revision" not in plain.engine_args, "a folder has none"
    (verifier / "verifier.json").write_text(json.dumps(said | {"source": "hub", "revision": "0123abcd"}))
    plain, specs = evaluate.engine_specs(asked, trained.export / "speculators", samples, verifier)
    assert plain.engine_args["revision"] == specs[3].engine_args["revision"] == "0123abcd"


def test_no_heldout_split(trained, tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    texts = [np.arange(3, 13, dtype=np.int32) + i for i in range(4)]
    world.write_data(trained.world.verifier, root, texts, [np.ones(10, dtype=bool)] * 4, ["train"] * 4)
    with pytest.raises(UserError, match="has no held-out samples: raise prepare.heldout_fraction"):
        evaluate.heldout(10, root / "hidden_states", root / "prompts")


def test_difference_interval_is_paired():
    """Two drafters that differ by one accepted token on every sample: the spread between samples must cancel."""
    rng = np.random.default_rng(0)
    drafts = np.full(50, 20)
    accepted = rng.integers(0, 50, 50)
    old, new = np.stack([drafts, accepted], 1), np.stack([drafts, accepted + 1], 1)
    change, (low, high) = evaluate.difference(new, old, 300, 0)
    assert change == pytest.approx(0.05) and low == pytest.approx(0.05) and high == pytest.approx(0.05)


def test_prompts_of_heldout_samples_end_where_the_answer_begins(trained):
    f = trained.world.folders
    samples = evaluate.heldout(12, f["hidden"], f["prompts"])
    prompts = evaluate.heldout_prompts(samples, 64)
    items = list(samples)
    assert len(prompts) == 12
    for prompt, item in zip(prompts, items):
        assert prompt.token_ids == item.token_ids[:6].tolist() and prompt.group == item.source


def test_stop_tokens(tmp_path):
    with pytest.raises(UserError, match="names no eos_token_id"):
        evaluate.stop_tokens(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    assert evaluate.stop_tokens(tmp_path) == [2]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert evaluate.stop_tokens(tmp_path) == [2, 7]


def test_prompt_files_are_rendered_and_grouped_by_category(tmp_path):
    from transformers import AutoTokenizer

    from eagle3dvc import demo_verifier

    demo_verifier.tokenizer(400, 50).save_pretrained(tmp_path / "verifier")
    rows = [
        {"question_id": 1, "category": "math", "turns": ["What is 3 plus 4?", "And 5 more?"]},
        {"question_id": 2, "category": "", "turns": ["Say hello."], "reference": ["hello"]},
        {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?"}]},
    ]
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    asked = params(engine="vllm", prompts=[str(file)], watch=str(file))
    found = evaluate.file_prompts(asked, tmp_path / "verifier", 10)
    texts = [AutoTokenizer.from_pretrained(tmp_path / "verifier").decode(p.token_ids) for p in found]
    ask, answer = "<|im_start|>user\n{}<|im_end|>\n", "<|im_start|>assistant\n"
    assert texts == [
        ask.format("What is 3 plus 4?") + answer,
        ask.format("Say hello.") + answer,
        "<|im_start|>system\nBe short.<|im_end|>\n" + ask.format("Why?") + answer,
    ], "first questions only, each with the prompt for an answer"
    assert [p.group for p in found] == ["questions/math", "questions", "questions"]
    assert len(evaluate.file_prompts(asked, tmp_path / "verifier", 1)) == 1
    other = tmp_path / "other" / "questions.jsonl"
    other.parent.mkdir()
    other.write_text(json.dumps(rows[1]) + "\n")
    both = params(engine="vllm", prompts=[str(file), str(other)], watch=str(tmp_path))
    groups = [p.group for p in evaluate.file_prompts(both, tmp_path / "verifier", 10)]
    assert groups == [f"{file}/math", str(file), str(file), str(other)], "two files of one name"
    with pytest.raises(UserError, match=r"evaluate\.prompts names .*questions\.jsonl twice"):
        twice = [str(file), f"{tmp_path}/other/../questions.jsonl"]
        evaluate.file_prompts(params(engine="vllm", prompts=twice, watch=str(tmp_path)), "x", 1)
    file.write_text("")
    with pytest.raises(UserError, match=r"questions\.jsonl is empty: it holds no row; remove it from evaluate\.prompts"):
        evaluate.file_prompts(asked, tmp_path / "verifier", 10)
    file.write_text(json.dumps({"nothing": 1}) + "\n")
    with pytest.raises(UserError, match=r"evaluate\.prompts: .*questions\.jsonl line 1 is no question"):
        evaluate.file_prompts(asked, tmp_path / "verifier", 10)
    for category in ('"half a pair: \\ud800"', '["a", "b"]', "3"):
        file.write_text(f'{{"turns": ["Why?"], "category": {category}}}\n')
        with pytest.raises(UserError, match=r"line 1 is no question \(invalid_category: its category .* is no text\); correct"):
            evaluate.file_prompts(asked, tmp_path / "verifier", 10)
    file.write_text('{"turns": ["half a pair: \\ud800"]}\n')
    with pytest.raises(UserError, match=r"evaluate\.prompts: .*line 1 is no question \(invalid_unicode: "):
        evaluate.file_prompts(asked, tmp_path / "verifier", 10)


def test_engines_are_compared_by_source_too():
    def result(seconds: dict[str, float], drafts: int, accepted: int) -> serving.Result:
        counters = {"drafts": drafts, "draft_tokens": 3 * drafts, "accepted": accepted, "by_position": [accepted, 0, 0]}
        groups = {g: {**counters, "prompts": 1, "tokens": 60, "seconds": s} for g, s in seconds.items()}
        total = sum(seconds.values())
        run = {"batch_size": 8, "seconds": total, "tokens": 120, "tokens_per_second": 120 / total}
        run |= {"counters": {name: 2 * n if name != "by_position" else n for name, n in counters.items()}}
        runs = [run | {"groups": {}}, run | {"batch_size": 1, "groups": groups}]
        return serving.Result(runs, [[1, 2], [3, 4]], "0.0", 1.0, "m")

    report = evaluate.compare(
        result({"chat": 2.0, "code": 4.0}, 0, 0), {3: result({"chat": 4.0, "code": 2.0}, 40, 20)}, 3, "x", 9
    )
    rows = {g: (r["tokens_per_second"], r["baseline_tokens_per_second"], r["speedup"]) for g, r in report["by_group"].items()}
    assert rows == {"chat": (15.0, 30.0, 0.5), "code": (30.0, 15.0, 2.0)} and report["speedup"] == 1.0
    assert report["by_group"]["code"]["acceptance_length"] == 1.5 == report["acceptance_length"]


def test_stop_tokens_of_damaged_files(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": []}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert evaluate.stop_tokens(tmp_path) == [7]
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match="generation_config.json is damaged"):
        evaluate.stop_tokens(tmp_path)
