"""Nothing is lost and nothing is silently wrong: kills, full disks, two runs at once, S3."""

import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.pipeline.conftest import Project
from tests.pipeline.test_growth import reuse

GROWN = {"max_samples": 80, "train__max_steps": 12, "train__checkpoint_every": 2}


def copy_of(project: Project, folder: Path) -> Project:
    folder.parent.mkdir(parents=True)
    subprocess.run(["cp", "-a", str(project.root), str(folder)], check=True)
    other = Project(folder, dict(project.env))
    other.dvc("config", "--local", "core.site_cache_dir", str(folder.parent / "site"))
    return other


@pytest.fixture(scope="module")
def grown(finished_project, tmp_path_factory):
    """(the project before growing, undisturbed shards, drafter files, steps, seconds of the undisturbed run)."""
    before = copy_of(finished_project, tmp_path_factory.mktemp("before") / "x" / "project")
    before.set(**GROWN)
    undisturbed = copy_of(before, tmp_path_factory.mktemp("undisturbed") / "x" / "project")
    started = time.monotonic()
    undisturbed.dvc("repro", "train")
    seconds = time.monotonic() - started
    return before, undisturbed.shards(), undisturbed.files("models/drafter"), undisturbed.metrics("train")["steps"], seconds


def finished_shards(project: Project) -> set[str]:
    """Keys of new shards that are whole before the second run: in the resume area or in DVC's cache."""
    partial = project.root / ".dvc/tmp/eagle3dvc/shards"
    names = {f.name for f in partial.glob("*.safetensors")} if partial.exists() else set()
    lists = (project.root / ".dvc/cache/files/md5").glob("*/*.dir")
    names |= {n for f in lists for n in re.findall(r"\d{5}-[0-9a-f]{24}\.safetensors", f.read_text())}
    return {n.removesuffix(".safetensors").split("-")[-1] for n in names}


def kill_and_resume(grown, folder: Path, rng: random.Random) -> str:
    before, shards, drafter, steps, seconds = grown
    project = copy_of(before, folder)
    (project.root / "logs/extract.json").unlink()
    process = project.popen("dvc", "repro", "train")
    after = rng.uniform(0, seconds * 1.1)
    try:
        process.wait(after)
    except subprocess.TimeoutExpired:
        if rng.random() < 0.5:
            process.kill()  # dvc alone: its stage must die with it
            deadline = time.monotonic() + 20
            while in_session(process.pid) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not in_session(process.pid), "a stage outlived its dvc"
        else:
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    keys = {n.removesuffix(".safetensors").split("-")[-1] for n in shards}
    have = finished_shards(project) & keys
    log = project.root / "logs/extract.json"
    log.unlink(missing_ok=True)
    project.dvc("repro", "train")
    assert project.shards() == shards
    if log.exists():  # else DVC had committed the stage before the kill
        assert reuse(project) == (len(have), len(keys) - len(have))
    assert project.metrics("train")["steps"] == steps
    assert project.files("models/drafter") == drafter
    assert project.dvc("status", "-q", "train", check=False).returncode == 0
    shutil.rmtree(folder.parent)
    return f"killed after {after:.1f} of {seconds:.1f} s: {len(have)} of {len(keys)} shards were whole"


def in_session(session: int) -> list[int]:
    """Processes of a session that still run (zombies do not count)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def test_sigkill_loses_at_most_the_shard_being_written(grown, tmp_path):
    rng = random.Random(1)
    for i in range(2):
        print(kill_and_resume(grown, tmp_path / f"{i}" / "project", rng))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_sigkill_at_thirty_moments(grown, tmp_path):
    rng = random.Random(2)
    for i in range(30):
        print(kill_and_resume(grown, tmp_path / f"{i}" / "project", rng))


def test_sigterm_ends_with_an_error_and_keeps_finished_work(grown, tmp_path):
    before, shards, drafter, _, _ = grown
    project = copy_of(before, tmp_path / "t" / "project")
    process = project.popen("dvc", "repro", "train")
    work = project.root / ".dvc/tmp/eagle3dvc/train"
    deadline = time.monotonic() + 300
    while not (work.exists() and any(work.rglob("*.safetensors"))) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    stages = [p for p in in_session(process.pid) if b"stages.train" in Path(f"/proc/{p}/cmdline").read_bytes()]
    for pid in stages:
        os.kill(pid, signal.SIGTERM)
    output = process.communicate()[0]
    if stages:
        assert process.returncode != 0 and "SIGTERM" in output
    project.dvc("repro", "train")
    assert project.shards() == shards and project.files("models/drafter") == drafter


def test_two_runs_at_once(grown, tmp_path):
    before, shards, _, _, _ = grown
    project = copy_of(before, tmp_path / "two" / "project")
    processes = [project.popen("dvc", "repro", "extract") for _ in range(2)]
    outputs = [p.communicate()[0] for p in processes]
    assert any(p.returncode == 0 for p in processes)
    for p, text in zip(processes, outputs):
        assert p.returncode == 0 or re.search(r"busy|lock", text), text
    project.dvc("repro", "extract")
    assert project.shards() == shards
    assert project.run("eagle3dvc", "verify").returncode == 0


def test_full_disk(project, tmp_path):
    """A file system of its own, too small for the shards; then the same with room: what was finished is not computed again."""
    mount = tmp_path / "small"
    mount.mkdir()
    project.set(max_samples=400, extract__stored_dtype="float32")
    project.dvc("repro", "prepare")
    used = int(subprocess.check_output(["du", "-sk", str(project.root)]).split()[0])
    script = f"""
        set -e
        mount -t tmpfs -o size={used + 2500}k tmpfs {mount}
        cp -a {project.root} {mount}/project
        cd {mount}/project
        dvc config --local core.site_cache_dir {tmp_path}/site-small
        echo FIRST; dvc repro extract && exit 9
        ls .dvc/tmp/eagle3dvc/shards
        mount -o remount,size={used + 200000}k {mount}
        echo SECOND; dvc repro extract
        cat logs/extract.json
        eagle3dvc verify
    """
    r = subprocess.run(["unshare", "-rm", "sh", "-c", script], env=project.environ(), capture_output=True, text=True)
    assert r.returncode == 0, r.stdout + r.stderr
    assert "no space left on the disk" in r.stderr
    first, second = r.stdout.split("SECOND")
    kept = re.findall(r"^[0-9a-f]{24}\.safetensors$", first, re.M)
    assert kept and ".tmp" not in first.split("FIRST")[1]
    assert f'"shards_reused": {len(kept)}' in second and f'"shards_computed": {40 - len(kept)}' in second
    assert "40 shards, 400 samples" in second and "0 bad" in second
