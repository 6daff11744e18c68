"""Real DVC repositories with this project in them, on a demo verifier small enough to train in seconds."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from filelock import FileLock
from ruamel.yaml import YAML

REPO = Path(__file__).resolve().parents[2]
SMALL = {
    "max_samples": 40,
    "verifier.demo": {
        "layers": 7,
        "hidden_size": 64,
        "heads": 2,
        "intermediate_size": 128,
        "vocab_size": 512,
        "steps": 25,
        "batch_size": 8,
    },
    "prepare.samples_per_shard": 10,
    "prepare.heldout_fraction": 0.2,
    "extract.engine": "transformers",
    "extract.batch_tokens": 4096,
    "train.draft_vocab_size": 256,
    "train.epochs": 1,
    "train.max_steps": 6,
    "evaluate.samples": 10,
}


@dataclass
class Project:
    """A copy of this repository under its own git and DVC, with every shared place of the machine shut out."""

    root: Path
    env: dict[str, str] = field(default_factory=dict)

    def environ(self) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("DVC_", "GIT_", "AWS_"))}
        env |= {
            "PATH": f"{Path(sys.executable).parent}:{env['PATH']}",
            "DVC_GLOBAL_CONFIG_DIR": str(self.root.parent / "dvc-global"),
            "DVC_SYSTEM_CONFIG_DIR": str(self.root.parent / "dvc-system"),
            "DVC_NO_ANALYTICS": "1",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            **{f"GIT_{who}_{what}": "t@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            **self.env,
        }
        return env

    def run(self, *args: str, check: bool = True, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        r = subprocess.run(args, cwd=self.root, env=self.environ(), capture_output=True, text=True, timeout=timeout)
        assert not check or r.returncode == 0, f"{args} ended with {r.returncode}:\n{r.stdout[-4000:]}\n{r.stderr[-4000:]}"
        return r

    def dvc(self, *args: str, **kw) -> subprocess.CompletedProcess[str]:
        return self.run("dvc", *args, **kw)

    def git(self, *args: str, **kw) -> subprocess.CompletedProcess[str]:
        return self.run("git", *args, **kw)

    def popen(self, *args: str) -> subprocess.Popen[str]:
        """Start a command in a session of its own, so that a test can kill it."""
        return subprocess.Popen(
            args,
            cwd=self.root,
            env=self.environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def set(self, **values) -> None:
        """Change parameters; `__` stands for the dot."""
        set_params(self.root, {k.replace("__", "."): v for k, v in values.items()})

    def commit(self, message: str = "state") -> None:
        self.git("add", "-A")
        self.git("commit", "-qm", message, "--allow-empty")

    def log(self, stage: str) -> dict:
        return json.loads((self.root / "logs" / f"{stage}.json").read_text())

    def metrics(self, stage: str) -> dict:
        return json.loads((self.root / "metrics" / f"{stage}.json").read_text())

    def files(self, folder: str) -> dict[str, str]:
        """file name -> md5 of everything in a folder."""
        return {
            str(f.relative_to(self.root / folder)): hashlib.md5(f.read_bytes()).hexdigest()
            for f in sorted((self.root / folder).rglob("*"))
            if f.is_file()
        }

    def shards(self) -> dict[str, str]:
        return self.files("data/hidden_states")

    def clone(self, folder: Path) -> Project:
        """`git clone` into another folder, on a machine that has nothing else of this one."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.git("clone", "-q", str(self.root), str(folder))
        other = Project(folder, dict(self.env))
        other.dvc("config", "--local", "core.site_cache_dir", str(folder.parent / f"{folder.name}-site"))
        return other


def set_params(root: Path, values: dict) -> None:
    yaml = YAML()
    data = yaml.load(root / "params.yaml")
    for dotted, value in values.items():
        *path, last = dotted.split(".")
        at = data
        for part in path:
            if at.get(part) is None:
                at[part] = {}
            at = at[part]
        at[last] = value
    yaml.dump(data, root / "params.yaml")


def new_project(folder: Path) -> Project:
    folder.mkdir(parents=True)
    for name in ("eagle3dvc", "stages", ".dvc", "dvc.yaml", "params.yaml", ".gitignore", ".dvcignore", "profiles", "README.md"):
        src = REPO / name
        if src.is_dir():
            shutil.copytree(
                src, folder / name, ignore=shutil.ignore_patterns("__pycache__", "cache", "tmp", "site-cache", "config.local")
            )
        else:
            shutil.copy(src, folder / name)
    project = Project(folder)
    project.git("init", "-q", "-b", "main")
    project.dvc("config", "--local", "core.site_cache_dir", str(folder.parent / "site"))
    set_params(folder, SMALL)
    project.commit("new")
    return project


@pytest.fixture(scope="session")
def finished_project(tmp_path_factory) -> Project:
    """The whole pipeline run once, whichever of pytest's processes comes first; tests work on copies of it."""
    base = tmp_path_factory.getbasetemp()
    base = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "finished"
    with FileLock(f"{base}.lock"):
        if not (base / "done").exists():
            shutil.rmtree(base, ignore_errors=True)
            project = new_project(base / "project")
            project.dvc("repro")
            project.commit("first run")
            (base / "done").touch()
    return Project(base / "project")


@pytest.fixture
def project(finished_project, tmp_path) -> Project:
    """A copy of the finished project, hard links kept, with a site_cache_dir of its own."""
    folder = tmp_path / "project"
    subprocess.run(["cp", "-a", str(finished_project.root), str(folder)], check=True)
    copy = Project(folder)
    copy.dvc("config", "--local", "core.site_cache_dir", str(tmp_path / "site"))
    return copy
