"""A fresh clone with only the remote: what is pulled, what is said, and that nothing old is computed again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eagle3dvc.cli import app
from eagle3dvc.errors import UserError
from eagle3dvc.fleet import node

STAGES = """\
stages:
  verifier: {cmd: mkdir -p data/verifier && echo v > data/verifier/v, outs: [data/verifier]}
  prepare:
    cmd: mkdir -p data/prompts && grep max_samples params.yaml > data/prompts/p
    deps: [data/verifier]
    params: [max_samples]
    outs: [data/prompts]
  extract:
    cmd: mkdir -p data/hidden_states && cp data/prompts/p data/hidden_states/h
    deps: [data/verifier, data/prompts]
    params: [extract]
    outs: [data/hidden_states]
  train:
    cmd: mkdir -p models/drafter && cat data/hidden_states/h params.yaml > models/drafter/m
    deps: [data/prompts, data/hidden_states]
    params: [train]
    outs: [models/drafter]
  evaluate: {cmd: cp models/drafter/m result, deps: [models/drafter, data/verifier], outs: [result]}
"""
PARAMS = "max_samples: 100\nextract: {dtype: float32}\ntrain: {learning_rate: 0.001}\n"


def run(*args, cwd):
    subprocess.run(args, cwd=cwd, check=True, capture_output=True)


def dvc(*args, cwd):
    run(sys.executable, "-m", "dvc", *args, cwd=cwd)


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """A repository whose pipeline has run once and was pushed."""
    base = tmp_path_factory.mktemp("origin")
    root = base / "repo"
    root.mkdir()
    run("git", "init", "-q", ".", cwd=root)
    dvc("init", "-q", cwd=root)
    (root / "dvc.yaml").write_text(STAGES)
    (root / "params.yaml").write_text(PARAMS)
    (root / ".dvc/config").write_text(
        f'[core]\n    remote = r\n[cache]\n    type = "hardlink,symlink"\n[\'remote "r"\']\n    url = {base / "remote"}\n'
    )
    dvc("repro", "-q", cwd=root)
    dvc("push", "-q", cwd=root)
    run("git", "add", "-A", cwd=root)
    run("git", "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "run", cwd=root)
    return root


@pytest.fixture
def clone(origin, tmp_path, monkeypatch):
    run("git", "clone", "-q", str(origin), str(tmp_path / "clone"), cwd=tmp_path)
    monkeypatch.chdir(tmp_path / "clone")
    monkeypatch.delenv("DVC_ROOT", raising=False)
    return tmp_path / "clone"


def change(old, new):
    text = Path("params.yaml").read_text()
    assert old in text
    Path("params.yaml").write_text(text.replace(old, new))


def made():
    return sorted(p for p in ("data/verifier", "data/prompts", "data/hidden_states", "models/drafter") if os.path.isdir(p))


def test_nothing_to_run_pulls_nothing(clone):
    ready = node.prepare(say=lambda _: None)
    assert ready.run == [] and ready.command.startswith("dvc pull") and made() == []


def test_growth_pulls_only_what_prepare_and_extract_read(clone):
    change("max_samples: 100", "max_samples: 400")
    ready = node.prepare(say=lambda _: None)
    assert ready.run == ["prepare", "extract", "train", "evaluate"]
    assert ready.pulled == ["data/verifier"] == made()


def test_new_training_settings_pull_prompts_and_hidden_states(clone):
    change("learning_rate: 0.001", "learning_rate: 0.002")
    ready = node.prepare(say=lambda _: None)
    assert ready.run == ["train", "evaluate"]
    assert made() == sorted(ready.pulled) == ["data/hidden_states", "data/prompts", "data/verifier"]
    dvc(*ready.command.split()[1:], cwd=clone)
    assert Path("result").is_file()
    assert node.prepare(say=lambda _: None).run == []


def test_one_stage_only(clone):
    change("learning_rate: 0.001", "learning_rate: 0.002")
    ready = node.prepare("train", say=lambda _: None)
    assert ready.run == ["train"] and ready.command == "dvc repro --allow-missing train"
    assert made() == ["data/hidden_states", "data/prompts"]


def test_unknown_stage(clone):
    said = []
    with pytest.raises(UserError, match="no stage 'trian' in dvc.yaml; there are .*train"):
        node.prepare("trian", say=said.append)
    assert said == [], "a slip of the pen is said before doctor looks at everything"


def test_a_pipeline_that_cannot_be_read_is_said_with_a_stage_too(clone):
    Path("dvc.yaml").write_text("stages: [")
    with pytest.raises(UserError):
        node.prepare("train", say=lambda _: None)


def test_a_doctor_failure_stops_it_before_anything_is_pulled(clone):
    change("dtype: float32", "dtype: float33")
    with pytest.raises(UserError, match=r"doctor found .* the first is params \(.*extract.dtype"):
        node.prepare(say=lambda _: None)
    assert made() == []


def test_what_was_never_pushed_is_said(clone, origin):
    import shutil

    change("learning_rate: 0.001", "learning_rate: 0.002")
    empty = clone.parent / "empty"
    empty.mkdir()
    config = Path(".dvc/config").read_text()
    Path(".dvc/config").write_text(config.replace(str(origin.parent / "remote"), str(empty)))
    with pytest.raises(UserError, match="was it pushed"):
        node.prepare(say=lambda _: None)
    shutil.rmtree(empty)


def test_command_line_json(clone):
    change("max_samples: 100", "max_samples: 400")
    result = CliRunner().invoke(app, ["node", "--json"], catch_exceptions=False)
    data = json.loads(result.stdout)
    assert data == {
        "run": ["prepare", "extract", "train", "evaluate"],
        "pulled": ["data/verifier"],
        "command": "dvc repro --allow-missing",
    }
