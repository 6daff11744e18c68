"""The cache grows: only new shards are ever computed, wherever the old ones are."""

import json
import sys

import pytest

from tests.pipeline.conftest import Project


def reuse(project: Project) -> tuple[int, int]:
    log = project.log("extract")
    return log["shards_reused"], log["shards_computed"]


def extract(project: Project, *args: str) -> tuple[int, int]:
    """`dvc repro extract`; (0, 0) where DVC found no need to run the stage."""
    log = project.root / "logs/extract.json"
    log.unlink(missing_ok=True)
    project.dvc("repro", *args, "extract")
    assert project.dvc("status", "-q", "extract", check=False).returncode == 0
    return reuse(project) if log.exists() else (0, 0)


def test_only_new_shards_are_computed(project):
    old, old_tokens = project.shards(), project.metrics("extract")["tokens"]
    project.set(max_samples=80)
    assert extract(project) == (4, 4)
    grown = project.shards()
    assert len(grown) == 8 and old.items() <= grown.items()
    assert project.log("extract")["tokens_computed"] == project.metrics("extract")["tokens"] - old_tokens
    project.commit("80")
    # back again: DVC's run cache, or the stage finding everything
    project.set(max_samples=40)
    assert extract(project)[1] == 0
    assert project.shards() == old


def test_a_partial_last_shard_is_the_only_one_computed_again(project):
    project.set(max_samples=45)
    assert extract(project) == (4, 1)
    project.set(max_samples=55)
    assert extract(project) == (4, 2)


@pytest.mark.parametrize(
    ("change", "computed"),
    [
        ({"extract__stored_dtype": "float8_e4m3fn"}, 4),
        ({"extract__aux_layer_ids": [1, 3, 6]}, 4),
        ({"extract__dtype": "bfloat16"}, 4),
        ({"extract__batch_tokens": 512}, 0),
        ({"train__learning_rate": 0.002}, 0),
        ({"prepare__heldout_fraction": 0.5}, 0),
    ],
)
def test_what_a_changed_parameter_costs(project, change, computed):
    before = project.shards()
    project.set(**change)
    reused, got = extract(project)
    assert got == computed
    if computed:
        assert not set(before) & set(project.shards())
    else:
        assert project.shards() == before


def test_a_changed_engine_version_recomputes_nothing(project):
    source = project.root / "eagle3dvc/engines/transformers.py"
    text = source.read_text()
    assert "version = transformers.__version__" in text
    source.write_text(text.replace("version = transformers.__version__", 'version = "99.0"'))
    assert extract(project, "-f", "-s") == (4, 0)


def test_a_changed_verifier_recomputes_all(project):
    before = project.shards()
    project.set(verifier__demo__steps=26)
    assert extract(project) == (0, 4)
    assert not set(before) & set(project.shards())


def test_a_changed_mask_recomputes_nothing(project, tmp_path):
    rows = [{"input_ids": list(range(i, i + 20)), "loss_mask": [0] * 10 + [1] * 10} for i in range(30)]
    source = project.root / "rows.jsonl"
    source.write_text("".join(json.dumps(r) + "\n" for r in rows))
    project.set(prepare__sources=[{"path": "rows.jsonl"}], prepare__watch="rows.jsonl")
    assert extract(project) == (0, 3)
    before, prompts = project.shards(), project.files("data/prompts")
    for r in rows:
        r["loss_mask"] = [0] * 5 + [1] * 15
    source.write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert extract(project) == (3, 0)
    assert project.shards() == before and project.files("data/prompts") != prompts


def cache_object(project: Project, md5: str):
    return project.root / ".dvc/cache/files/md5" / md5[:2] / md5[2:]


def test_a_deleted_shard_is_recomputed_with_the_same_bytes(project):
    before = project.shards()
    name = sorted(before)[1]
    (project.root / "data/hidden_states" / name).unlink()
    cache_object(project, before[name]).unlink()
    (project.root / ".dvc/tmp/eagle3dvc/shards" / name.split("-")[1]).unlink()  # kept until the run after the one that made it
    assert extract(project) == (3, 1)
    assert project.shards() == before
    # only the workspace file: DVC or the stage brings it back from the cache
    (project.root / "data/hidden_states" / name).unlink()
    assert extract(project)[1] == 0
    assert project.shards() == before


def test_verify_finds_and_repairs_a_damaged_shard(project):
    before = project.shards()
    name = sorted(before)[2]
    path = project.root / "data/hidden_states" / name
    assert project.run("eagle3dvc", "verify").returncode == 0
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.chmod(0o644)
    path.write_bytes(data)  # in place: a hard link, so the cache object is damaged too
    bad = project.run("eagle3dvc", "verify", check=False)
    assert bad.returncode == 1 and name in bad.stdout and "--repair" in bad.stdout
    assert "bad: " in bad.stdout and bad.stdout.count("bad: ") == 1
    project.set(train__learning_rate=0.003)
    train = project.dvc("repro", "-s", "train", check=False)
    assert train.returncode != 0 and name in train.stderr + train.stdout
    assert project.run("eagle3dvc", "verify", "--repair").returncode == 0
    assert extract(project) == (3, 1)
    assert project.shards() == before
    assert project.run("eagle3dvc", "verify", "--json").returncode == 0


def test_experiments_and_branches_share_shards(project):
    project.dvc("exp", "run", "-S", "max_samples=60", "extract")
    assert reuse(project) == (4, 2)
    project.git("reset", "-q", "--hard")
    project.dvc("checkout", "-q")
    project.dvc("exp", "run", "--temp", "-S", "max_samples=70", "extract")
    assert reuse(project) == (6, 1)
    assert len(project.shards()) == 4  # the workspace is untouched
    project.dvc("exp", "run", "--queue", "-S", "max_samples=80", "extract")
    project.dvc("exp", "run", "--run-all")
    assert reuse(project) == (7, 1)
    project.git("checkout", "-q", "-b", "other")
    project.set(max_samples=80)
    assert extract(project)[1] == 0


def test_dvc_takes_the_md5_computed_while_writing(project):
    """A md5 that is wrong on purpose comes back from `dvc add`: DVC has not read the file. Fails when its internals change."""
    path = project.root / "saved.bin"
    path.write_bytes(b"x" * 1000)
    wrong = "0123456789abcdef0123456789abcdef"
    code = f"from pathlib import Path; from eagle3dvc.hidden_states.dvc_repo import DvcRepo as D; assert D.open().save_md5([(Path('saved.bin'), '{wrong}')])"
    project.run(sys.executable, "-c", code)
    project.dvc("add", "saved.bin")
    assert wrong in (project.root / "saved.bin.dvc").read_text()


def test_every_shard_has_its_md5_in_dvcs_state_before_dvc_commits(project):
    """The stage alone, without DVC around it: what DVC's commit would find."""
    before = project.shards()
    project.set(max_samples=60)
    project.dvc("repro", "prepare")
    project.run(sys.executable, "-m", "stages.extract")
    code = (
        "import json; from pathlib import Path; from eagle3dvc.hidden_states.dvc_repo import DvcRepo as D; repo = D.open();"
        "print(json.dumps({p.name: repo.known_md5(p) for p in Path('data/hidden_states').iterdir()}))"
    )
    known, shards = json.loads(project.run(sys.executable, "-c", code).stdout), project.shards()
    assert {n: known[n] for n in shards.keys() - before.keys()} == dict(shards.items() - before.items())
    # this copy of the project has a new state table, so DVC has never hashed the old shards here: nobody vouches for them
    assert {known[n] for n in before} == {None}


def test_compiled_python_files_are_no_inputs(project):
    project.run(sys.executable, "-m", "compileall", "-q", "-f", "eagle3dvc", "stages")
    assert list((project.root / "eagle3dvc/prompts").rglob("*.pyc"))
    assert project.dvc("status", "-q", check=False).returncode == 0


def test_repair_leaves_whole_shards_alone(project):
    """Fewer prompts than shards is no damage; nor is a damaged copy beside a cache object that is whole."""
    before = project.shards()
    project.set(max_samples=20)
    project.dvc("repro", "prepare")
    r = project.run("eagle3dvc", "verify", "--repair", check=False)
    assert r.returncode == 1 and "removed" not in r.stdout and project.shards() == before
    project.set(max_samples=40)
    project.dvc("repro", "prepare")
    path = project.root / "data/hidden_states" / sorted(before)[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)
    assert project.run("eagle3dvc", "verify", "--repair").returncode == 0
    assert extract(project)[1] == 0 and project.shards() == before


def test_a_damaged_file_in_the_output_is_replaced_by_a_run_outside_dvc(project):
    before = project.shards()
    path = project.root / "data/hidden_states" / sorted(before)[1]
    path.unlink()
    path.write_bytes(b"")
    (project.root / "data/hidden_states/folder").mkdir()
    project.run(sys.executable, "-m", "stages.extract")
    assert project.shards() == before
