"""The placement recipes: valid syntax, commands that exist, and SLURM's way out tried for real with a signal."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from typer.main import get_command

from eagle3dvc.cli import app

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "docs" / "recipes"


def sky():
    return YAML(typ="safe").load((RECIPES / "skypilot.yaml").read_text())


def scripts():
    found = {p.name: p.read_text() for p in sorted(RECIPES.glob("*.sh"))}
    return found | {f"skypilot.yaml {part}": sky()[part] for part in ("setup", "run")}


@pytest.mark.parametrize("name", scripts())
def test_scripts_parse_and_stop_at_the_first_error(name):
    text = scripts()[name]
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "set -euo pipefail" in text


@pytest.mark.parametrize("name", scripts())
def test_commands_exist(name):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    cli = get_command(app)
    text = scripts()[name]
    for verb in re.findall(r"^\s*(?:if .*then )?make ([a-z-]+)", text, re.M):
        assert verb in targets
    for verb in re.findall(r"^(?:.*then )?eagle3dvc ([a-z-]+)", text, re.M):
        assert verb in cli.commands, verb


def test_all_recipes_end_checked_and_pushed():
    for name in ("rented-box.sh", "slurm.sh", "skypilot.yaml run"):
        text = scripts()[name]
        order = [text.index(c) for c in ("dvc repro --allow-missing", "dvc status -q", "dvc push")]
        assert order == sorted(order), name


def test_slurm_directives():
    lines = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", (RECIPES / "slurm.sh").read_text(), re.M)
    assert len(lines) == (RECIPES / "slurm.sh").read_text().count("#SBATCH")
    directives = dict(lines)
    assert directives["signal"] == "B:TERM@600" and "requeue" in directives
    # SLURM reads directives only before the first command
    assert re.search(r"#SBATCH", (RECIPES / "slurm.sh").read_text().split("set -euo")[1]) is None


def test_skypilot_uses_spot_with_recovery_and_no_secret_in_the_file():
    task = sky()
    assert set(task) <= {"name", "resources", "envs", "secrets", "setup", "run", "num_nodes", "workdir", "file_mounts"}
    assert task["resources"]["use_spot"] is True and task["resources"]["job_recovery"]["strategy"]
    assert set(task["secrets"].values()) == {None} and task["envs"]["REMOTE_URL"] is None


def test_skypilot_brings_dvc_lock_home(tmp_path):
    """The machine is deleted when the job ends: what is not in git by then is lost. Other programs are stand-ins."""
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost"]
    subprocess.run([*git, "init", "-q", "--bare", "-b", "main", tmp_path / "home.git"], check=True)
    subprocess.run([*git, "clone", "-q", tmp_path / "home.git", tmp_path / "mine"], check=True, capture_output=True)
    for name in ("dvc.lock", "metrics/train.json", "plots/a.csv", ".venv/bin/activate"):
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    subprocess.run([*git, "add", "-f", "."], cwd=tmp_path / "mine", check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first"], cwd=tmp_path / "mine", check=True)
    subprocess.run([*git, "push", "-q", "origin", "HEAD:main"], cwd=tmp_path / "mine", check=True)
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name in ("make", "eagle3dvc", "dvc"):
        (bin_ / name).write_text(f'#!/usr/bin/env bash\ncase "{name} $1" in "dvc repro") echo done > dvc.lock;; esac\n')
        (bin_ / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{bin_}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "REPOSITORY": str(tmp_path / "home.git"),
        "BRANCH": "main",
        "RESULTS": sky()["envs"]["RESULTS"],
        "REMOTE_URL": "s3://b/x",
    }
    for part in ("setup", "run"):
        subprocess.run(["bash", "-c", sky()[part]], cwd=tmp_path, env=environment, check=True)
    show = ["git", "--git-dir", str(tmp_path / "home.git"), "show", f"{environment['RESULTS']}:dvc.lock"]
    assert subprocess.run(show, check=True, capture_output=True, text=True).stdout == "done\n"


def test_slurm_says_what_its_output_folder_and_login_nodes_need():
    text = (RECIPES / "slurm.sh").read_text()
    folder = re.search(r"^#SBATCH --output=(\w+)/", text, re.M).group(1)
    assert f"mkdir -p {folder} && sbatch" in text and "srun --gpus=1 make setup" in text


def test_the_hub_cache_lies_outside_the_repository_for_a_relative_folder_too():
    assert 'HF_HOME="${HF_HOME:-$(dirname "$PWD")/hf}"' in scripts()["rented-box.sh"]


STAGE = """\
import signal, sys, time
from eagle3dvc.stage import die_with_parent
die_with_parent()  # as every stage of the pipeline
def save(*_):
    time.sleep(1)  # a checkpoint takes a while; whoever kills meanwhile loses it
    open("saved", "w").close()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
open("started", "w").close()
time.sleep(float(sys.argv[1]))
open("out", "w").close()
"""


@pytest.fixture
def cluster(tmp_path):
    """A repository with a real DVC pipeline of one stage, and stand-ins for `scontrol` and `eagle3dvc` that write down calls."""
    bin_ = tmp_path / ".venv" / "bin"
    bin_.mkdir(parents=True)
    venv = Path(sys.executable).parent
    (bin_ / "activate").write_text(f'export PATH="{bin_}:{venv}:$PATH"\n')
    for name in ("eagle3dvc", "scontrol"):
        (bin_ / name).write_text(f'#!/usr/bin/env bash\necho "{name} $*" >> calls\n')
        (bin_ / name).chmod(0o755)
    (tmp_path / "work.py").write_text(STAGE)
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q", "--no-scm"], cwd=tmp_path, check=True)
    subprocess.run(
        [sys.executable, "-m", "dvc", "remote", "add", "-q", "-d", "r", str(tmp_path / "r")], cwd=tmp_path, check=True
    )
    return tmp_path


def stage(cluster, seconds):
    command = f"{sys.executable} work.py {seconds}"
    (cluster / "dvc.yaml").write_text(f"stages:\n  work:\n    cmd: {command}\n    deps: [work.py]\n    outs: [out]\n")


def start(cluster):
    env = {**os.environ, "SLURM_SUBMIT_DIR": str(cluster), "SLURM_JOB_ID": "7", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(["bash", str(RECIPES / "slurm.sh")], env=env, cwd=cluster, start_new_session=True)


def test_slurm_job_that_finishes(cluster):
    stage(cluster, 0)
    assert start(cluster).wait(120) == 0
    assert (cluster / "calls").read_text().splitlines() == ["eagle3dvc node", "eagle3dvc report"]
    assert len(list((cluster / "r").rglob("*"))) > 1, "nothing was pushed"


def test_slurm_job_whose_time_is_up_saves_and_queues_again(cluster):
    stage(cluster, 100)
    job = start(cluster)
    try:
        deadline = time.monotonic() + 120
        while not (cluster / "started").exists():
            assert time.monotonic() < deadline and job.poll() is None
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)  # B: in --signal means the batch script alone
        assert job.wait(60) == 0
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert (cluster / "saved").exists() and not (cluster / "out").exists()
    assert (cluster / "calls").read_text().splitlines() == ["eagle3dvc node", "scontrol requeue 7"]


def test_slurm_job_whose_time_is_up_before_the_stages_queues_again(cluster):
    stage(cluster, 0)
    (cluster / ".venv/bin/eagle3dvc").write_text(
        '#!/usr/bin/env bash\necho "eagle3dvc $*" >> calls\nsleep 100 && touch slept\n'
    )
    job = start(cluster)
    try:
        deadline = time.monotonic() + 60
        while not (cluster / "calls").exists():
            assert time.monotonic() < deadline and job.poll() is None
            time.sleep(0.05)
        time.sleep(0.5)
        job.send_signal(signal.SIGTERM)
        assert job.wait(30) == 0
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert (cluster / "calls").read_text().splitlines() == ["eagle3dvc node", "scontrol requeue 7"]
    assert not (cluster / "started").exists() and not (cluster / "slept").exists()
