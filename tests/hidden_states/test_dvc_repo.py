"""Stages run where there is no DVC: in a folder that is no repository, and on a machine without the package."""

from __future__ import annotations

import subprocess
import sys

import pytest

from eagle3dvc import stage
from eagle3dvc.errors import UserError
from eagle3dvc.hidden_states import dvc_repo


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    return tmp_path


def test_the_work_of_earlier_stages_is_no_repository(folder):
    stage.work_dir("answers")
    assert (folder / ".dvc").is_dir()
    assert dvc_repo.DvcRepo.open() is None


def test_a_repository_is_found_from_below(folder, monkeypatch):
    for command in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(command, check=True, capture_output=True)
    below = folder / "below"
    below.mkdir()
    monkeypatch.chdir(below)
    found = dvc_repo.DvcRepo.open()
    assert found is not None and found.objects.is_relative_to(folder / ".dvc" / "cache")


def test_without_dvc(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "dvc.repo", None)  # importing it fails
    assert dvc_repo.DvcRepo.open() is None
    (folder / ".dvc").mkdir()
    (folder / ".dvc/config").write_text("")
    with pytest.raises(UserError, match="is a DVC repository but DVC cannot be imported"):
        dvc_repo.DvcRepo.open()


def test_without_git(folder, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))
    assert dvc_repo.locked_dirs("data/hidden_states") == []
