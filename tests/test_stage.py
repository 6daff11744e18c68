"""What all stages share: the commits that names stand for, and that dvc.yaml names the code they are made of."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from eagle3dvc import stage
from eagle3dvc.errors import UserError


def test_an_experiment_is_found_by_its_whole_name_only(tmp_path):
    def git(*args: str) -> str:
        who = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
        return subprocess.run(["git", *who, *args], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    commits = []
    for text in ("one", "two"):
        git("commit", "-q", "--allow-empty", "-m", text)
        commits.append(git("rev-parse", "HEAD"))
    git("update-ref", "refs/exps/ab/cdef/puffy-cat", commits[0])
    assert stage.commit_of("puffy-cat", tmp_path) == commits[0]
    assert stage.commit_of(commits[1][:12], tmp_path) == commits[1]
    for name in ("*", "puffy-*", "puffy-ca?", "puffy", "cdef/puffy-cat", "nothing"):
        assert stage.commit_of(name, tmp_path) is None, name
    git("update-ref", "refs/exps/cd/cdef/puffy-cat", commits[0])
    assert stage.commit_of("puffy-cat", tmp_path) == commits[0], "twice the same commit is one"
    git("update-ref", "refs/exps/ef/cdef/puffy-cat", commits[1])
    with pytest.raises(UserError, match=r"puffy-cat is the name of 2 experiments \(.*\): give the commit instead"):
        stage.commit_of("puffy-cat", tmp_path)


@pytest.mark.parametrize(("name", "module"), [("export", "eagle3dvc/drafter/export.py"), ("evaluate", "eagle3dvc/evaluate.py")])
def test_what_a_stage_imports_of_the_drafter_is_a_dependency(name, module):
    root = Path(stage.__file__).parents[1]
    deps = YAML(typ="safe").load((root / "dvc.yaml").read_text())["stages"][name]["deps"]
    found = {module}
    for node in ast.walk(ast.parse((root / module).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "eagle3dvc.drafter":
            found |= {f"eagle3dvc/drafter/{a.name}.py" for a in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("eagle3dvc.drafter."):
            found.add(node.module.replace(".", "/") + ".py")
    assert len(found) > 4 and found <= set(deps)
