"""The card for publishing: the commit it names has this very export, and what cannot be read is one sentence."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from eagle3dvc.drafter import card
from eagle3dvc.errors import UserError

FOLDER = Path("export/speculators")


def git(*args: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    return subprocess.run(["git", *who, *args], check=True, capture_output=True, text=True).stdout.strip()


def write_lock(drafter: str, export: str) -> None:
    outs = [
        (name, f"    outs:\n    - path: {name}\n      md5: {md5}.dir\n")
        for name, md5 in (("models/drafter", drafter), ("models/export", export))
        if md5
    ]
    Path("dvc.lock").write_text("stages:\n" + "".join(f"  {name.split('/')[1]}:\n{text}" for name, text in outs))


def commit(drafter: str, export: str = "") -> str:
    write_lock(drafter, export)
    git("add", "dvc.lock")
    git("commit", "-qm", f"{drafter} {export}")
    return git("rev-parse", "HEAD")


@pytest.fixture
def project(trained, tmp_path, monkeypatch) -> Path:
    """A git repository whose export is of the drafter bbbb; dvc.lock was committed once before."""
    monkeypatch.chdir(tmp_path)
    git("init", "-q")
    commit("aaaa")
    write_lock("bbbb", "")
    trained.build(tmp_path / "export")
    return tmp_path


def test_the_commit_that_made_it_and_the_evaluation(project):
    with pytest.raises(UserError, match=r"no commit of a branch or tag has bbbb\.dir in dvc\.lock"):
        card.finished(FOLDER)
    made = commit("bbbb")
    commit("cccc")
    Path("metrics").mkdir()
    Path("metrics/evaluate.json").write_text('{"acceptance_length": 2.25}')
    text = card.finished(FOLDER)
    assert f"Git commit: `{made}`" in text
    assert "| `acceptance_length` | `2.25` |" in text


def test_the_same_drafter_exported_twice(project):
    first, second = commit("bbbb", "1111"), commit("bbbb", "2222")
    assert f"Git commit: `{second}`" in card.finished(FOLDER)
    write_lock("bbbb", "1111")
    assert f"Git commit: `{first}`" in card.finished(FOLDER)
    write_lock("bbbb", "3333")
    with pytest.raises(UserError, match=r"no commit .* has bbbb\.dir and 3333\.dir"):
        card.finished(FOLDER)


def test_an_experiment_is_no_commit_to_publish(project):
    before = git("rev-parse", "HEAD")
    git("update-ref", "refs/exps/ab/cdef/fast", commit("bbbb"))
    git("reset", "-q", "--hard", before)
    with pytest.raises(UserError, match=r"no commit of a branch or tag has bbbb\.dir"):
        card.finished(FOLDER)
    git("branch", "kept", "refs/exps/ab/cdef/fast")
    assert git("rev-parse", "kept") in card.finished(FOLDER)


def test_what_cannot_be_read_is_one_sentence(project):
    commit("bbbb")
    readme, metrics = FOLDER / "README.md", Path("metrics/evaluate.json")
    whole = readme.read_text()
    metrics.parent.mkdir()
    for text in ("{", "[1]", "3"):
        metrics.write_text(text)
        with pytest.raises(UserError, match=r"metrics/evaluate\.json is damaged"):
            card.finished(FOLDER)
    metrics.unlink()
    Path("dvc.lock").write_text("<<<<<<< HEAD\nstages: {\n")
    with pytest.raises(UserError, match=r"dvc\.lock is not valid YAML"):
        card.finished(FOLDER)
    git("checkout", "dvc.lock")
    readme.write_text(whole.replace("| `bbbb.dir` |", "| bbbb |"))
    with pytest.raises(UserError, match="the row of models/drafter was edited"):
        card.finished(FOLDER)
    readme.write_bytes(whole.encode() + b"\xff")
    with pytest.raises(UserError, match=r"README\.md cannot be read as text"):
        card.finished(FOLDER)
    shutil.rmtree(FOLDER)
    with pytest.raises(UserError, match="is not a card of this pipeline: give a folder inside models/export"):
        card.finished(FOLDER)


def test_only_a_card_is_replaced(project):
    mine = Path("mine.md")
    mine.write_text("my notes")
    with pytest.raises(UserError, match=r"mine\.md exists and is not a card"):
        card.write("text", mine)
    assert mine.read_text() == "my notes"
    for text in (f"one {card.MARK}", f"two {card.MARK}"):
        card.write(text, Path("card.md"))
        assert Path("card.md").read_text() == text
    for path in (Path("."), Path("no/card.md")):
        with pytest.raises(UserError):
            card.write("text", path)
