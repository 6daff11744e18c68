"""Profiles: values land in params.yaml, comments stay, invalid results are never written."""

from pathlib import Path

import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from eagle3dvc import profiles
from eagle3dvc.cli import app
from eagle3dvc.errors import UserError
from eagle3dvc.params import load

ROOT = Path(__file__).parent.parent
PARAMS = """\
# top comment
max_samples: 1000   # dial
seed: 0

# the verifier
verifier:
  model: demo   # demo, folder, hub
  revision: null

# prompts
prepare:
  # where from
  sources:
    - path: demo
      weight: 1.0
    # about a second source
  # how long
  max_length: 2048
  chat_template_kwargs: {}   # flow

# extraction
extract:
  aux_layer_ids:
    - 2
    - 4
    - 5

  # engine comment
  engine: auto
  env: {A: "b"}  # env comment
  # dtype
  dtype: float32
train:
  loggers: [dvclive] # loggers
# end of file comment
"""
OVERLAY = """\
# A profile for tests
max_samples: 50
verifier: {model: org/name}
prepare:
  sources:
    - path: a.jsonl   # first
      streaming: false
    - path: b
      name: q
  watch: a.jsonl
  chat_template_kwargs: {thinking: false}
extract:
  aux_layer_ids: [1, 2]
  engine: vllm
  env: {B: "1"}
  workers: 2
train:
  loggers: [wandb, dvclive]
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(PARAMS)
    Path("profiles").mkdir()
    Path("profiles/test.yaml").write_text(OVERLAY)
    return tmp_path


def comments(text):
    return sorted(line.partition("#")[2].strip() for line in text.splitlines() if "#" in line)


def test_apply_sets_values_and_keeps_every_comment(project):
    changed = profiles.apply("test")
    params = load()
    assert params.max_samples == 50 and params.verifier.model == "org/name"
    assert [s.path for s in params.prepare.sources] == ["a.jsonl", "b"]
    assert params.extract.aux_layer_ids == [1, 2] and params.extract.workers == 2
    assert params.extract.env == {"A": "b", "B": "1"} and params.train.loggers == ["wandb", "dvclive"]
    assert params.prepare.max_length == 2048, "what the profile does not name stays"
    assert changed["max_samples"] == (1000, 50)
    assert changed["extract.aux_layer_ids"] == ([2, 4, 5], [1, 2])
    assert comments(Path("params.yaml").read_text()) == sorted([*comments(PARAMS), "first"])


def test_comments_stand_before_the_same_keys(project):
    profiles.apply("test")
    lines = Path("params.yaml").read_text().splitlines()

    def after(comment):
        i = next(i for i, line in enumerate(lines) if line.strip() == f"# {comment}")
        return next(line.strip() for line in lines[i + 1 :] if line.strip() and not line.strip().startswith("#"))

    assert after("how long") == "max_length: 2048"
    assert after("engine comment") == "engine: vllm"
    assert after("dtype") == "dtype: float32"
    assert after("extraction") == "extract:"
    assert "model: org/name # demo, folder, hub" in " ".join(Path("params.yaml").read_text().split())


def test_applying_twice_changes_nothing(project):
    profiles.apply("test")
    before = Path("params.yaml").read_text()
    assert profiles.apply("test") == {}
    assert Path("params.yaml").read_text() == before


@pytest.mark.parametrize(
    ("overlay", "message"),
    [
        ("extract: {engin: vllm}", "did you mean extract.engine"),
        ("max_samples: 0", "max_samples"),
        ("extract: {aux_layer_ids: [3, 2]}", "ascending"),
        ("- 1", "expected a mapping"),
        ("extract: [", "not valid YAML"),
        ("seed: 1\nseed: 2", 'line 2: found duplicate key "seed"'),
    ],
)
def test_an_invalid_result_is_never_written(project, overlay, message):
    Path("profiles/bad.yaml").write_text(overlay)
    with pytest.raises(UserError, match=message):
        profiles.apply("bad")
    assert Path("params.yaml").read_text() == PARAMS
    assert sorted(p.name for p in project.iterdir()) == ["params.yaml", "profiles"]


def test_unknown_profile_suggests_the_nearest(project):
    with pytest.raises(UserError, match="did you mean test"):
        profiles.find("tset")


def test_a_profile_by_path(project, tmp_path):
    other = tmp_path / "elsewhere.yaml"
    other.write_text("seed: 7\n")
    profiles.apply(str(other))
    assert load().seed == 7


def test_a_linked_params_file_stays_a_link_and_keeps_its_mode(project):
    Path("params.yaml").rename("real.yaml")
    Path("real.yaml").chmod(0o640)
    Path("params.yaml").symlink_to("real.yaml")
    profiles.apply("test")
    assert Path("params.yaml").is_symlink() and load("real.yaml").max_samples == 50
    assert Path("real.yaml").stat().st_mode & 0o777 == 0o640


def test_command_line(project):
    run = CliRunner().invoke
    assert "A profile for tests" in run(app, ["profile", "list"], catch_exceptions=False).stdout
    assert run(app, ["profile", "show", "test"], catch_exceptions=False).stdout == OVERLAY
    assert "max_samples: 1000 -> 50" in run(app, ["profile", "apply", "test"], catch_exceptions=False).stdout


# ------------------------------------------------------------------------------------------- the profiles that ship
SHIPPED = sorted((ROOT / "profiles").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_profiles_are_valid_and_described(path):
    params = profiles.overlaid(path.stem, ROOT / "params.yaml", ROOT / "profiles")
    assert params.max_samples > 0
    assert profiles.summary(path)


def keys(data, where=""):
    """Dotted keys of the schema's own blocks; free mappings such as env count as one key."""
    free = {"extract.env", "extract.engine_args", "train.draft_config", "prepare.chat_template_kwargs"}
    for key, value in data.items():
        name = f"{where}{key}"
        if isinstance(value, dict) and name not in free:
            yield from keys(value, f"{name}.")
        else:
            yield name


def test_the_demo_profile_undoes_every_other_one():
    plain = {p.stem: set(keys(YAML(typ="safe").load(p.read_text()))) for p in SHIPPED}
    for name, names in plain.items():
        assert names <= plain["demo"], f"profiles/demo.yaml lacks keys that {name} sets"


def test_going_to_kimi_and_back_restores_the_demo(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text((ROOT / "params.yaml").read_text())
    profiles.apply("demo", path, ROOT / "profiles")
    demo = load(path)
    for name in ("kimi-k2.5-b300", "llama-3.1-8b", "demo"):
        profiles.apply(name, path, ROOT / "profiles")
    assert load(path) == demo
    assert comments(path.read_text()) == comments((ROOT / "params.yaml").read_text())


def test_the_rehearsal_is_a_prefix_of_the_hero_run():
    """What shard names depend on is the same in both, so the hero run finds the rehearsal's shards."""
    local, hero = (profiles.overlaid(f"kimi-k2.5-{n}", ROOT / "params.yaml", ROOT / "profiles") for n in ("local", "b300"))
    assert local.verifier == hero.verifier and local.seed == hero.seed
    differ = {"heldout_fraction"}  # chosen by the hash of a sample: no token changes
    assert local.prepare.model_dump(exclude=differ) == hero.prepare.model_dump(exclude=differ)
    for key in ("aux_layer_ids", "dtype", "stored_dtype", "quantization", "kv_cache_dtype"):
        assert getattr(local.extract, key) == getattr(hero.extract, key), key
