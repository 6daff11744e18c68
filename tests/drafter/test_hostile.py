"""Damaged, foreign and half-written folders: one sentence each, never a traceback, never something half done."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import world
from safetensors.torch import load_file, save_file

from eagle3dvc.drafter import check, layouts
from eagle3dvc.drafter.convert import convert
from eagle3dvc.errors import UserError

WRONG = [None, "x", "", -1, 0, 1.5, 10**30, True, [], ["a"], {}, {"a": 1}, float("nan"), [1, [2]]]
GONE = object()


@pytest.fixture(params=layouts.LAYOUTS)
def folder(request, trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained.export / request.param, tmp_path / request.param))


def places(value, path: tuple = ()) -> Iterator[tuple]:
    """Every place in a JSON document."""
    if path:
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def damaged(document) -> Iterator[tuple[str, dict]]:
    """(what was done, the document) with a value of another kind, or none, at every place."""
    for path in places(document):
        for value in (*WRONG, GONE):
            other = copy.deepcopy(document)
            node = other
            for key in path[:-1]:
                node = node[key]
            if value is GONE:
                del node[path[-1]]
            else:
                node[path[-1]] = value
            yield f"{path} = {'gone' if value is GONE else repr(value)}", other


def refused(call, *args) -> bool:
    """Whether it raises UserError; any other exception fails the test with its traceback."""
    try:
        call(*args)
    except UserError as e:
        assert len(str(e)) < 1000 and "\n" not in str(e)
        return True
    return False


def test_no_value_in_config_json_ends_in_a_traceback(folder):
    original = json.loads((folder / "config.json").read_text())
    count = 0
    for _, config in damaged(original):
        (folder / "config.json").write_text(json.dumps(config))
        if not refused(layouts.read, folder):
            if count % 10 == 0:  # it computes, so not each of them
                refused(check.verify_export, folder)
            count += 1
    assert count > 50, "some fields are read by nobody, and some wrong values are defaults"


@pytest.mark.parametrize("name", ["norm_before_residual", "transformer_layer_config", "eagle_aux_hidden_state_layer_ids"])
def test_what_engines_would_guess_must_be_said(trained, tmp_path, name):
    folder = shutil.copytree(trained.export / "speculators", tmp_path / "d")
    config = json.loads((folder / "config.json").read_text())
    del config[name]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / check.PROVENANCE).unlink()
    with pytest.raises(UserError, match=name.removeprefix("eagle_aux_hidden_state_").replace("layer_ids", "layer ids")):
        layouts.read(folder)


def test_no_value_in_the_provenance_ends_in_a_traceback(trained, tmp_path):
    folder = shutil.copytree(trained.export / "speculators", tmp_path / "d")
    d = layouts.read(folder)
    path = folder / check.PROVENANCE
    original = json.loads(path.read_text())
    accepted = []
    for what, document in damaged(original):
        path.write_text(json.dumps(document))
        if not refused(check._check_provenance, folder, d) and ("settings" in what or "tensors" in what):
            accepted.append(what)
    assert all("= None" in a or "gone" in a or "True" in a or "= 0" in a for a in accepted), accepted


def test_a_probe_of_any_shape(trained, tmp_path):
    folder = shutil.copytree(trained.export / "speculators", tmp_path / "d")
    path = folder / check.PROBE
    tensors = load_file(path)
    meta = {"eagle3dvc": json.dumps({"aux_layer_ids": world.AUX, "format": 1})}
    changes = [lambda t: t[:0], lambda t: t[:1], lambda t: t[..., :1], lambda t: t.flatten(), lambda t: -t - 1]
    for name in tensors:
        for n, change in enumerate(changes):
            save_file(tensors | {name: change(tensors[name]).contiguous()}, path, metadata=meta)
            assert refused(check.verify_export, folder), (name, n)
        save_file({k: v for k, v in tensors.items() if k != name}, path, metadata=meta)
        assert refused(check.verify_export, folder), name
    for said in ({}, {"eagle3dvc": "[]"}, {"eagle3dvc": "{}"}, {"eagle3dvc": "x"}):
        save_file(tensors, path, metadata=said)
        assert refused(check.verify_export, folder), said
    save_file(tensors, path, metadata=meta)
    check.verify_export(folder)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100000, "null", "{", "\xff"])
def test_files_that_are_no_json(folder, text):
    for name in ("config.json", check.PROVENANCE, "model.safetensors.index.json"):
        kept = (folder / name).read_bytes() if (folder / name).is_file() else None
        (folder / name).write_bytes(text.encode("latin-1"))
        assert refused(check.verify_export, folder), name
        (folder / name).unlink()
        if kept is not None:
            (folder / name).write_bytes(kept)
    check.verify_export(folder)


@pytest.mark.parametrize(
    "names", [{}, {"a": 1}, {"a": None}, {"a": ["b"]}, {"a": "../model.safetensors"}, {"a": "gone.safetensors"}]
)
def test_an_index_of_nonsense(folder, names):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert refused(layouts.read, folder)


def test_shards_are_checked_like_one_file(trained, tmp_path):
    """A drafter from elsewhere, in shards and with prefixed names, goes through every check that one file goes through."""

    def called(name: str) -> str:
        return name if name in ("lm_head.weight", "d2t", "t2d") else f"model.{name}"

    folder = shutil.copytree(trained.export / "sglang", tmp_path / "d")
    tensors = load_file(folder / layouts.WEIGHTS)
    (folder / layouts.WEIGHTS).unlink()
    half = len(tensors) // 2
    parts = {"a.safetensors": list(tensors)[:half], "b.safetensors": list(tensors)[half:]}
    for file, names in parts.items():
        save_file({called(n): tensors[n] for n in names}, folder / file)
    index = {called(n): file for file, names in parts.items() for n in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    w = trained.world.folders
    (report,) = check.verify_export(folder, w["hidden"], w["verifier"], w["prompts"])
    assert report["checked"] == ["structure", "provenance", "probe", "hidden states"]


@pytest.mark.parametrize("number", [0, -1, 65])
def test_convert_takes_no_such_number_of_draft_tokens(trained, tmp_path, number):
    with pytest.raises(UserError, match="--draft-tokens"):
        convert(trained.export / "sglang", "speculators", tmp_path / "out", speculative_tokens=number)
    assert not (tmp_path / "out").exists()


def test_convert_refuses_a_verifier_of_another_size(trained, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": world.VOCAB + 8, "hidden_size": world.HIDDEN, "num_hidden_layers": 1, "intermediate_size": 8}
    world.write_verifier(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)), tmp_path / "verifier")
    with pytest.raises(UserError, match=f"has {world.VOCAB + 8} and {world.HIDDEN}: give the folder of its own verifier"):
        convert(trained.export / "sglang", "speculators", tmp_path / "out", verifier=tmp_path / "verifier")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.float64])
def test_quantised_tensors(folder, dtype):
    tensors = load_file(folder / layouts.WEIGHTS)
    save_file(tensors | {"fc.weight": tensors["fc.weight"].to(dtype)}, folder / layouts.WEIGHTS)
    with pytest.raises(UserError, match=f"fc.weight is {dtype}, .*quantised drafters are not handled"):
        layouts.read(folder)


@pytest.mark.parametrize("size", [0, 200, 100_000])
def test_a_full_disk(folder, tmp_path, size):
    """In a child whose files may not grow beyond `size` bytes."""
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from eagle3dvc.drafter import layouts\n"
        "from eagle3dvc.errors import UserError\n"
        "d = layouts.read(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)\n"
        "try:\n"
        "    layouts.write(d, Path(sys.argv[2]), 'sglang')\n"
        "except UserError as e:\n"
        "    print(e)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, folder, tmp_path / "out", str(size)], capture_output=True, text=True, check=True
    )
    assert bool(re.search(r"^model.safetensors cannot be written .*: is the disk full\?$", done.stdout)) == (size < 100_000)


def test_texts_that_no_file_can_hold(folder, tmp_path):
    (folder / check.PROVENANCE).unlink()
    config = json.loads((folder / "config.json").read_text())
    config.get("transformer_layer_config", config)["comment"] = "\ud800"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="not valid Unicode"):
        convert(folder, "speculators", tmp_path / "out")


@pytest.mark.parametrize("name", ["org/mo\ndel", "org/mo\x00del", "org/mo\x1b[31mdel", "org/mo\ud800del", "org/mo\u2028del"])
def test_verifier_names_that_cannot_be_printed(folder, tmp_path, name):
    for kept in (True, False):
        if not kept:
            (folder / check.PROVENANCE).unlink()
        with pytest.raises(UserError, match="holds characters that cannot be printed") as e:
            convert(folder, "speculators", tmp_path / "out", verifier_name=name)
        assert str(e.value).isprintable()
    config = json.loads((folder / "config.json").read_text())
    if "eagle3dvc" in config:
        config["eagle3dvc"]["verifier"] = name
    else:
        config["speculators_config"]["verifier"]["name_or_path"] = name
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="holds characters that cannot be printed"):
        check.verify_export(folder)
    assert not (tmp_path / "out").exists()


def test_convert_refuses_layers_that_the_verifier_has_not(trained, tmp_path):
    verifier = shutil.copytree(trained.world.folders["verifier"], tmp_path / "verifier")
    record = json.loads((verifier / "verifier.json").read_text())
    for layers in (world.AUX[-1], world.AUX[-1] - 1):
        (verifier / "verifier.json").write_text(json.dumps(record | {"num_layers": layers}))
        if layers == world.AUX[-1]:
            convert(trained.export / "sglang", "speculators", tmp_path / "fits", verifier=verifier)
            continue
        with pytest.raises(UserError, match=rf"auxiliary layers \[1, 3, 5\] .* has {layers} layers: correct --layer-ids"):
            convert(trained.export / "sglang", "speculators", tmp_path / "out", verifier=verifier)


def test_convert_replaces_nothing(trained, tmp_path, monkeypatch):
    """Neither a link to nowhere nor what another conversion put there meanwhile; folders that cannot be made are one sentence."""
    source = trained.export / "sglang"
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="link exists already"):
        convert(source, "speculators", tmp_path / "link")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="out cannot be made"):
        convert(source, "speculators", tmp_path / "file/out")
    write = layouts.write

    def slow(d, folder, layout):
        write(d, folder, layout)
        monkeypatch.setattr(layouts, "write", write)
        convert(source, "speculators", tmp_path / "out")  # another one is faster

    monkeypatch.setattr(layouts, "write", slow)
    with pytest.raises(UserError, match=r"out cannot be written \(Directory not empty\)"):
        convert(source, "speculators", tmp_path / "out")
    check.verify_export(tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link", "out"]


def test_convert_names_the_folder_that_is_damaged(trained, tmp_path):
    source = Path(shutil.copytree(trained.export / "sglang", tmp_path / "in"))
    (source / check.PROBE).write_bytes(b"x")
    with pytest.raises(UserError, match=f"^{source}/{check.PROBE} is damaged"):
        convert(source, "speculators", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


# ---------------------------------------------------------------- SIGKILL at every step of writing

WRITES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "shutil.rmtree", "shutil.copyfile"}


def killed(build, at: int, where: Path) -> int:
    """Run build() in a child that SIGKILL ends at its at-th change of a file below `where`; how many there were if it was not."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        seen = 0

        def hook(event, args):
            nonlocal seen
            opened = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
            if (opened or event in WRITES) and str(where) in str(args[0]):
                seen += 1
                if seen == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            build()
            os.write(write, str(seen).encode())
        finally:
            os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    told = os.read(read, 100)
    os.close(read)
    assert told or os.WIFSIGNALED(status), "the child failed by itself"
    return int(told or 0)


def test_an_export_that_is_killed_leaves_the_old_or_the_new_one(trained, tmp_path):
    out = tmp_path / "export"

    def build():
        trained.build(out)

    build()
    total = killed(build, 0, tmp_path)
    assert total > 20
    absent = 0
    for at in [1, 2, 3, total // 3, total // 2, *range(total - 14, total + 1)]:
        assert killed(build, at, tmp_path) == 0
        if out.exists():
            assert len(check.verify_export(out)) == 2
        else:  # between the two renames
            absent += 1
            old = out.with_name(".export.old")
            assert len(check.verify_export(old)) == 2
            build()
    assert absent <= 1
    build()
    assert [p.name for p in tmp_path.iterdir()] == ["export"], "a later run clears what the killed ones left"


def test_a_conversion_that_is_killed_leaves_nothing_or_all(trained, tmp_path):
    out = tmp_path / "out"

    def build():
        convert(trained.export / "sglang", "speculators", out)

    total = killed(build, 0, tmp_path)
    shutil.rmtree(out)
    for at in range(1, total + 1):
        assert killed(build, at, tmp_path) == 0
        assert not out.exists() or check.verify_export(out)
        shutil.rmtree(out, ignore_errors=True)
    build()
    left = [p.name for p in tmp_path.iterdir() if p.name != "out"]
    assert all(name.startswith(".out.") for name in left), "each killed one leaves its own hidden folder"
