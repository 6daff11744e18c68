import itertools
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from eagle3dvc import prompts, stage
from eagle3dvc.errors import UserError
from eagle3dvc.params import parse
from eagle3dvc.prompts import shards
from tests.prompts.conftest import CHATML, make_tokenizer, question

ROOT = Path(__file__).parents[2]


def params(*sources, max_samples=100, watch=None, seed=0, **prepare):
    specs = [s if isinstance(s, dict) else {"path": str(s)} for s in sources]
    prepare.setdefault("samples_per_shard", 10)
    if watch:
        prepare["watch"] = str(watch)
    return parse({"max_samples": max_samples, "seed": seed, "prepare": {"sources": specs, **prepare}})


@pytest.fixture
def build(tmp_path, verifier, monkeypatch):
    """Builds into tmp_path/out; returns the metrics. Sources must lie in tmp_path."""
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))

    def run(*sources, out="out", folder=verifier, **settings):
        return prompts.build(params(*sources, watch=tmp_path, **settings), folder, tmp_path / out, notice=lambda text: None)

    return run


def samples(folder):
    return list(shards.iter_samples(folder))


def contents(folder):
    return {f.name: f.read_bytes() for f in sorted(Path(folder).iterdir())}


# --- the shards


def test_a_small_run_is_byte_for_byte_the_beginning_of_a_large_one(build, tmp_path):
    """1,000 samples against 4,000, with rejected rows, duplicates and two mixed sources on the way."""
    rows = [question(i) for i in range(2500)]
    for i in range(0, 2500, 50):
        rows[i] = {"messages": [{"role": "user", "content": f"no answer {i}"}]}
        rows[i + 1] = rows[i + 2]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    sources = [{"path": str(tmp_path / "rows.jsonl"), "weight": 2.0}, {"path": "demo"}]
    settings = {"samples_per_shard": 128, "shuffle_buffer": 300}
    small = build(*sources, out="small", max_samples=1000, **settings)
    large = build(*sources, out="large", max_samples=4000, **settings)
    assert (small["samples"], large["samples"]) == (1000, 4000)
    assert 0 < small["rejected"] < large["rejected"]
    assert 0 < small["duplicates"] < large["duplicates"]
    a, b = contents(tmp_path / "small"), contents(tmp_path / "large")
    full = [name for name in a if name.endswith(".parquet")][:-1]
    assert full == [f"{i:05d}.parquet" for i in range(7)]
    assert all(a[name] == b[name] for name in full)
    ids = [s.sample_id for s in samples(tmp_path / "small")]
    assert ids == [s.sample_id for s in samples(tmp_path / "large")][:1000]
    assert len(set(ids)) == 1000
    assert b["rejected.jsonl"].startswith(a["rejected.jsonl"])


def test_same_inputs_give_the_same_bytes_in_another_process(build, tmp_path, verifier):
    build("demo", max_samples=55)
    text = yaml.safe_dump(params("demo", max_samples=55, watch=tmp_path).model_dump())
    (tmp_path / "p.yaml").write_text(text)
    code = (
        "from eagle3dvc import prompts, params\n"
        f"prompts.build(params.load({str(tmp_path / 'p.yaml')!r}), {str(verifier)!r}, {str(tmp_path / 'again')!r})"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment)
    assert contents(tmp_path / "out") == contents(tmp_path / "again")


def test_metrics_and_manifest_say_what_is_in_the_shards(build, tmp_path, write_jsonl):
    path = write_jsonl([question(i) for i in range(37)])
    metrics = build(path, {"path": "demo", "weight": 0.5}, max_samples=50, heldout_fraction=0.3)
    found = samples(tmp_path / "out")
    counted = {
        "samples": len(found),
        "tokens": sum(len(s.token_ids) for s in found),
        "supervised_tokens": int(sum(s.loss_mask.sum() for s in found)),
        "heldout_samples": sum(s.split == "heldout" for s in found),
    }
    assert counted["samples"] == 50
    assert 0 < counted["heldout_samples"] < 50
    assert {k: metrics[k] for k in counted} == counted
    zero = ("rejected", "duplicates", "truncated", "unsupervised_turns", "missing_samples")
    assert {k: metrics[k] for k in zero} == dict.fromkeys(zero, 0)
    for name in ("data", "demo"):
        mine = [s for s in found if s.source == name]
        assert metrics["by_source"][name] == {"samples": len(mine), "tokens": sum(len(s.token_ids) for s in mine)}
    manifest = shards.read_manifest(tmp_path / "out")
    assert {k: manifest[k] for k in counted} == counted
    assert manifest["shards"] == [
        {"file": f.name, "samples": len(s := shards.read_shard(f)), "tokens": sum(len(x.token_ids) for x in s)}
        for f in shards.shard_files(tmp_path / "out")
    ]
    assert (manifest["format"], manifest["max_length"], manifest["responses"]) == (1, 2048, "dataset")
    assert len(manifest["tokenizer"]) == 32
    assert (tmp_path / "out" / "rejected.jsonl").read_bytes() == b""


def test_tokenizer_hash_follows_files_and_settings(build, tmp_path, verifier, write_jsonl):
    path = write_jsonl([question(1)])
    copy = tmp_path / "copy"
    shutil.copytree(verifier, copy)

    def of(**settings):
        build(path, **settings)
        return shards.read_manifest(tmp_path / "out")["tokenizer"]

    assert of() == of(folder=copy)
    (copy / "config.json").write_text('{"max_position_embeddings": 9000}')
    assert of() == of(folder=copy)
    make_tokenizer(CHATML + "{# x #}").save_pretrained(copy)
    assert len({of(), of(folder=copy), of(chat_template=CHATML), of(thinking=False)}) == 4


def test_held_out_samples_stay_held_out(build, tmp_path, write_jsonl):
    """Whatever the number of samples, their order, their source's name or the seed of the shuffle."""
    path = write_jsonl([question(i) for i in range(400)])

    def heldout(out, **settings):
        build(path, out=out, **settings)
        return {s.sample_id: s.split for s in samples(tmp_path / out)}

    reference = heldout("a", max_samples=400)
    assert 20 < sum(split == "heldout" for split in reference.values()) < 70
    for out, settings in {
        "b": {"max_samples": 100},
        "c": {"max_samples": 200, "shuffle_buffer": 64, "seed": 1},
        "d": {"max_samples": 200, "shuffle_buffer": 64, "seed": 2},
    }.items():
        other = heldout(out, **settings)
        assert other.items() <= reference.items()
    assert [s.sample_id for s in samples(tmp_path / "c")] != [s.sample_id for s in samples(tmp_path / "d")]


def test_duplicates_are_dropped_by_content_across_sources_and_shapes(build, tmp_path, write_jsonl):
    a = write_jsonl([{"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": "b"}], "a.jsonl")
    b = write_jsonl([{"instruction": "q", "output": "a"}, {"turns": ["q2"], "reference": ["a"]}], "b.jsonl")
    metrics = build(a, b)
    assert (metrics["samples"], metrics["duplicates"], metrics["rejected"]) == (3, 1, 0)
    assert [s.source for s in samples(tmp_path / "out")] == ["a", "a", "b"]


def test_truncation_is_counted_and_never_leaves_an_empty_mask(build, tmp_path, write_jsonl):
    rows = [
        question(1),
        {"prompt": "q", "completion": "one two three four five " * 20},
        {"prompt": "a very long question " * 40, "completion": "short"},
    ]
    metrics = build(write_jsonl(rows), max_length=64, max_rejected_fraction=0.5)
    assert (metrics["samples"], metrics["truncated"]) == (2, 1)
    assert metrics["rejected_by_reason"] == {"truncated_before_answer": 1}
    found = samples(tmp_path / "out")
    assert [len(s.token_ids) for s in found] == [len(found[0].token_ids), 64]
    assert all(s.loss_mask.any() for s in found)
    [line] = (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "source": "data",
        "row": 3,
        "where": f"{tmp_path / 'data.jsonl'} line 3",
        "reason": "truncated_before_answer",
        "detail": "no supervised token in its first 64 tokens",
    }
    metrics = build(tmp_path / "data.jsonl", max_length=64, max_rejected_fraction=0.9, keep_truncated=False)
    assert (metrics["samples"], metrics["truncated"], metrics["rejected_by_reason"]) == (1, 0, {"too_long": 2})


def test_rejected_rows_are_counted_by_reason_and_listed(build, tmp_path, write_jsonl):
    rows = [question(i) for i in range(20)]
    rows[4], rows[9], rows[11] = {"text": "x"}, {"messages": [{"role": "user", "content": "q"}]}, {"text": "y"}
    metrics = build(write_jsonl(rows), max_rejected_fraction=0.15)
    assert (metrics["samples"], metrics["rejected"]) == (17, 3)
    assert metrics["rejected_by_reason"] == {"no_assistant": 1, "unknown_shape": 2}
    listed = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert [(x["row"], x["reason"]) for x in listed] == [(5, "unknown_shape"), (10, "no_assistant"), (12, "unknown_shape")]


def test_too_many_rejected_rows_end_the_run_at_once(build, tmp_path, write_jsonl):
    """As soon as the limit cannot be kept any more: the broken line far behind is never reached."""
    path = write_jsonl([{"text": "x"}] * 3000)
    with open(path, "a") as f:
        f.write("{broken\n")
    with pytest.raises(
        UserError, match=r"12 of 12 rows rejected \(12 unknown_shape\), more than prepare.max_rejected_fraction = 0.1"
    ):
        build(path, max_samples=100)
    kept = (tmp_path / "logs" / "rejected.jsonl").read_text().splitlines()
    assert len(kept) == 12


def test_more_samples_asked_for_than_there_are_uses_all_and_says_so(tmp_path, verifier, write_jsonl):
    said = []
    path = write_jsonl([question(i) for i in range(30)])
    metrics = prompts.build(params(path, watch=tmp_path, max_samples=500), verifier, tmp_path / "out", notice=said.append)
    assert (metrics["samples"], metrics["missing_samples"]) == (30, 470)
    assert any("hold only 30 usable samples of the 500 asked for in max_samples" in text for text in said)


def test_an_endless_source_with_nothing_new_ends(build, monkeypatch):
    from eagle3dvc.prompts import demo, prepare

    first = next(demo.conversations(0))
    monkeypatch.setattr(demo, "conversations", lambda seed: itertools.repeat(first))
    monkeypatch.setattr(prepare, "_DRY", 600)
    metrics = build("demo", max_samples=10)
    assert (metrics["samples"], metrics["duplicates"], metrics["missing_samples"]) == (1, 600, 9)


def test_system_prompt_and_template_file_are_used(build, tmp_path, write_jsonl, tokenizer):
    (tmp_path / "mine.jinja").write_text(CHATML.replace("'<|im_start|>'", "'<|im_start|>:'"))
    build(write_jsonl([question(1)]), system_prompt="Be brief.", chat_template=str(tmp_path / "mine.jinja"))
    [sample] = samples(tmp_path / "out")
    text = tokenizer.decode(sample.token_ids)
    assert text.startswith("<|im_start|>:system\nBe brief.<|im_end|>\n<|im_start|>:user\nWhat comes after 1?")


def test_pretokenised_rows_need_no_chat_template(build, tmp_path, write_jsonl):
    folder = tmp_path / "bare"
    make_tokenizer(template=None).save_pretrained(folder)
    metrics = build(write_jsonl([{"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}]), folder=folder)
    assert metrics["supervised_tokens"] == 2
    [sample] = samples(tmp_path / "out")
    assert (sample.token_ids.tolist(), sample.loss_mask.tolist()) == ([5, 6, 7, 8], [False, False, True, True])


# --- failure


def test_a_failed_run_leaves_what_was_there_and_nothing_half_written(build, tmp_path, write_jsonl):
    build(write_jsonl([question(i) for i in range(30)]))
    before = contents(tmp_path / "out")
    path = write_jsonl([question(i) for i in range(100, 130)], "broken.jsonl")
    with open(path, "a") as f:
        f.write('{"prompt": "q", \n')
    with pytest.raises(UserError, match=r"broken.jsonl line 31: broken JSON"):
        build(path)
    assert contents(tmp_path / "out") == before
    assert not [p.name for p in tmp_path.iterdir() if "tmp" in p.name]


def test_a_killed_run_is_cleared_away_by_the_next(build, tmp_path, write_jsonl):
    (tmp_path / ".out.tmp").mkdir()
    (tmp_path / ".out.tmp" / "00009.parquet").write_text("half")
    build(write_jsonl([question(1)]))
    assert sorted(contents(tmp_path / "out")) == ["00000.parquet", "manifest.json", "rejected.jsonl"]
    assert not (tmp_path / ".out.tmp").exists()


STAGE_ERRORS = {
    "empty file": ("", {}, r"data.jsonl is empty: it holds no row"),
    "broken JSON": ('{"prompt": "q", "completion": "a"}\n{"prompt"\n', {}, r"data.jsonl line 2: broken JSON"),
    "not UTF-8": (b'{"prompt": "\xff"}\n', {}, r"data.jsonl line 1: not UTF-8"),
    "unknown shape": ('{"text": "q"}\n', {}, r"line 1: unknown_shape: the keys found are text; known shapes are messages"),
    "no assistant": ('{"messages": [{"role": "user", "content": "q"}]}\n', {}, "line 1: no_assistant: it has no assistant turn"),
    "empty masks": ('{"input_ids": [1, 2], "loss_mask": [0, 0]}\n' * 2, {}, r"2 of 2 rows rejected \(2 empty_mask\)"),
    "all empty, any share allowed": (
        '{"input_ids": [1, 2], "loss_mask": [0, 0]}\n',
        {"max_rejected_fraction": 1.0},
        "no row of prepare.sources can be used; the first is .*its loss_mask is all zero",
    ),
    "roles": ('{"messages": [{"role": "assistant", "content": "a"}]}\n', {}, "roles_out_of_order: message 1 is assistant at the start"),
    "empty content": ('{"prompt": "q", "completion": " "}\n', {}, r"empty_content: message 2 \(assistant\) has no content"),
    "missing template file": ('{"prompt": "q", "completion": "a"}\n', {"chat_template": "none.jinja"}, "none.jinja is neither a temp"),
    "missing file": (None, {}, r"prepare.sources\[0\]: ./data.jsonl does not exist"),
    "max_length 0": ('{"prompt": "q", "completion": "a"}\n', {"max_length": 0}, "prepare.max_length = 0"),
    "max_length too large": ('{"prompt": "q", "completion": "a"}\n', {"max_length": 5000}, "more than the verifier's 4096 positions"),
    "mask before the cut": ('{"prompt": "q", "completion": "a"}\n', {"max_length": 3}, "truncated_before_answer"),
}  # fmt: skip


@pytest.fixture
def run_stage(tmp_path, monkeypatch, capsys):
    """Runs stages/prepare.py in tmp_path as its process would, but in this one: (exit status, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    monkeypatch.setattr(stage, "die_with_parent", lambda: None)  # pytest is not to end with whoever started it
    handler = signal.getsignal(signal.SIGTERM)

    def run():
        status = 0
        try:
            runpy.run_path(str(ROOT / "stages" / "prepare.py"), run_name="__main__")
        except SystemExit as e:
            status = e.code
        return status, capsys.readouterr().err

    yield run
    signal.signal(signal.SIGTERM, handler)


def stage_folder(tmp_path, verifier, content, **prepare):
    shutil.copytree(verifier, tmp_path / "data" / "verifier")
    if content is not None:
        (tmp_path / "data.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    prepare = {"sources": [{"path": "./data.jsonl"}], "watch": "data.jsonl", **prepare}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump({"max_samples": 10, "prepare": prepare}))


@pytest.mark.parametrize("case", STAGE_ERRORS)
def test_the_stage_ends_non_zero_with_one_sentence_and_writes_nothing(tmp_path, verifier, run_stage, case):
    content, prepare, message = STAGE_ERRORS[case]
    stage_folder(tmp_path, verifier, content, **prepare)
    status, err = run_stage()
    assert status == 1
    [line] = err.splitlines()
    assert line.startswith("error: prepare: ")
    assert re.search(message, line), line
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["verifier"]
    assert not (tmp_path / "metrics").exists()


def test_the_stage_without_a_chat_template_or_tokenizer(tmp_path, verifier, run_stage):
    stage_folder(tmp_path, verifier, '{"prompt": "q", "completion": "a"}\n')
    shutil.rmtree(tmp_path / "data" / "verifier")
    make_tokenizer(template=None).save_pretrained(tmp_path / "data" / "verifier")
    status, err = run_stage()
    assert (status, err.count("error: prepare: the verifier's tokenizer has no chat template: set prepare.chat_template")) == (
        1,
        1,
    )
    for file in (tmp_path / "data" / "verifier").iterdir():
        file.unlink()
    status, err = run_stage()
    assert (status, err.count("error: prepare: data/verifier holds no tokenizer that loads")) == (1, 1)


@pytest.mark.parametrize("good", [True, False])
def test_the_stage_as_a_process(tmp_path, verifier, good):
    stage_folder(tmp_path, verifier, "".join(json.dumps(question(i)) + "\n" for i in range(10)) if good else "{}\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DVC_ROOT": str(tmp_path)}
    command = [sys.executable, str(ROOT / "stages" / "prepare.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    if not good:
        assert done.returncode == 1
        assert done.stderr.startswith("error: prepare: 1 of 1 rows rejected (1 unknown_shape)")
        assert not (tmp_path / "data" / "prompts").exists()
        return
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "metrics" / "prepare.json").read_text())
    assert (metrics["samples"], metrics["rejected"]) == (10, 0)
    assert len(samples(tmp_path / "data" / "prompts")) == 10
    assert "prepare: 10 samples" in done.stdout
