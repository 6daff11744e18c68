"""`eagle3dvc convert`: both directions, bit for bit, and drafters trained elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import world
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from eagle3dvc.drafter import check, layouts
from eagle3dvc.drafter.convert import convert
from eagle3dvc.errors import UserError


def foreign(trained, folder: Path, **config) -> Path:
    """An EAGLE-3 drafter as others publish it: no word about the verifier, layer ids or where it comes from."""
    shutil.copytree(trained.export / "sglang", folder)
    for name in (check.PROVENANCE, check.PROBE, "README.md"):
        (folder / name).unlink()
    found = json.loads((folder / "config.json").read_text())
    del found["eagle3dvc"], found["eagle_config"]
    (folder / "config.json").write_text(json.dumps(found | config))
    return folder


def shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, keys in parts.items():
        save_file({k: tensors[k] for k in keys}, folder / file)
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {k: file for file, keys in parts.items() for k in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("way", [("speculators", "sglang"), ("sglang", "speculators")])
def test_there_and_back_is_bit_exact(trained, tmp_path, way):
    start, other = way
    convert(trained.export / start, other, tmp_path / "there")
    convert(tmp_path / "there", start, tmp_path / "back")
    for name in ("config.json", "model.safetensors", check.PROBE):
        assert (tmp_path / "back" / name).read_bytes() == (trained.export / start / name).read_bytes(), name
        assert (tmp_path / "there" / name).read_bytes() == (trained.export / other / name).read_bytes(), name
    assert check.verify_export(tmp_path / "back")[0]["checked"] == ["structure", "provenance", "probe"]


def test_float32_weights_stay_float32(trained, tmp_path):
    convert(trained.drafter / "best", "sglang", tmp_path / "out", verifier_name="tests/tiny")
    a = load_file(trained.drafter / "best/model.safetensors")
    b = {k.replace("midlayer.", "layers.0."): t for k, t in load_file(tmp_path / "out/model.safetensors").items()}
    assert a.keys() == b.keys()
    assert all(torch.equal(t, b[k]) and t.dtype == b[k].dtype for k, t in a.items())
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "float32"


def test_foreign_drafter_needs_its_ids_and_verifier(trained, tmp_path):
    source = foreign(trained, tmp_path / "in")
    with pytest.raises(UserError, match="does not say its layer ids: give --layer-ids"):
        convert(source, "speculators", tmp_path / "out", verifier_name="tests/tiny")
    with pytest.raises(UserError, match="--verifier-name"):
        convert(source, "speculators", tmp_path / "out", layer_ids=world.AUX)
    convert(source, "speculators", tmp_path / "out", layer_ids=world.AUX, verifier_name="tests/tiny")
    made = load_file(tmp_path / "out/model.safetensors")
    wanted = load_file(trained.export / "speculators/model.safetensors")
    assert made.keys() == wanted.keys() and all(torch.equal(t, wanted[k]) for k, t in made.items())
    f = trained.world.folders
    report = check.verify_export(tmp_path / "out", f["hidden"], f["verifier"], f["prompts"])[0]
    assert report["first_draft_accuracy"] > 0.2


def test_sharded_and_prefixed_input(trained, tmp_path):
    source = foreign(trained, tmp_path / "in")
    tensors = load_file(source / "model.safetensors")
    kept = {"d2t", "t2d", "lm_head.weight"}
    save_file({k if k in kept else f"model.{k}": t for k, t in tensors.items()}, source / "model.safetensors")
    shard(source)
    convert(source, "speculators", tmp_path / "out", layer_ids=world.AUX, verifier_name="tests/tiny")
    wanted = load_file(trained.export / "speculators/model.safetensors")
    made = load_file(tmp_path / "out/model.safetensors")
    assert made.keys() == wanted.keys() and all(torch.equal(t, wanted[k]) for k, t in made.items())
    (source / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00002\.safetensors, which does not exist"):
        convert(source, "speculators", tmp_path / "other", layer_ids=world.AUX, verifier_name="tests/tiny")


def test_an_index_cannot_point_outside(trained, tmp_path):
    source = foreign(trained, tmp_path / "in")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": "../other.safetensors"}}))
    with pytest.raises(UserError, match="outside its folder"):
        convert(source, "speculators", tmp_path / "out", layer_ids=world.AUX, verifier_name="tests/tiny")


def test_pickles_are_refused(trained, tmp_path):
    source = foreign(trained, tmp_path / "in")
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is a PyTorch pickle, which can run code"):
        convert(source, "speculators", tmp_path / "out", layer_ids=world.AUX, verifier_name="tests/tiny")


def test_full_vocabulary(trained, tmp_path):
    """Without a map both engines take draft ids for verifier ids; d2t and t2d must not be there (vLLM refuses them)."""
    source = foreign(trained, tmp_path / "in", draft_vocab_size=world.VOCAB)
    tensors = load_file(source / "model.safetensors")
    del tensors["d2t"], tensors["t2d"]
    tensors["lm_head.weight"] = torch.randn(world.VOCAB, world.HIDDEN).bfloat16()
    save_file(tensors, source / "model.safetensors")
    convert(source, "speculators", tmp_path / "out", layer_ids=world.AUX, verifier_name="tests/tiny")
    assert {"d2t", "t2d"}.isdisjoint(load_file(tmp_path / "out/model.safetensors"))
    save_file({**tensors, "d2t": torch.zeros(world.VOCAB, dtype=torch.long)}, source / "model.safetensors")
    with pytest.raises(UserError, match="d2t has no place"):
        convert(source, "speculators", tmp_path / "other", layer_ids=world.AUX, verifier_name="tests/tiny")


def test_a_copied_embedding_is_left_out_and_one_of_its_own_kept(trained, tmp_path):
    source = Path(shutil.copytree(trained.export / "speculators", tmp_path / "in"))
    tensors = load_file(source / "model.safetensors")
    (source / check.PROVENANCE).unlink()
    embed = trained.world.verifier.model.embed_tokens.weight.detach().bfloat16()
    save_file({**tensors, "embed_tokens.weight": embed}, source / "model.safetensors")
    with pytest.raises(UserError, match="embed_tokens of the drafter's own .*--verifier"):
        convert(source, "sglang", tmp_path / "out")
    folder = trained.world.folders["verifier"]
    convert(source, "sglang", tmp_path / "out", verifier=folder)
    assert "embed_tokens.weight" not in load_file(tmp_path / "out/model.safetensors")
    save_file({**tensors, "embed_tokens.weight": embed * 2}, source / "model.safetensors")
    with pytest.raises(UserError, match="embed_tokens of the drafter's own"):
        convert(source, "sglang", tmp_path / "other", verifier=folder)
    convert(source, "speculators", tmp_path / "other", verifier=folder)
    assert torch.equal(load_file(tmp_path / "other/model.safetensors")["embed_tokens.weight"], embed * 2)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"layer_ids": [2, 4, 6]}, r"says layer ids \[1, 3, 5\], you gave \[2, 4, 6\]"),
        ({"to": "gguf"}, "the layouts are speculators and sglang"),
    ],
)
def test_contradictions(trained, tmp_path, given, says):
    with pytest.raises(UserError, match=says):
        convert(trained.export / "sglang", **{"to": "speculators", "out": tmp_path / "out", **given})
    assert not list(tmp_path.iterdir()), "nothing half-written"


def test_what_is_no_drafter(tmp_path):
    with pytest.raises(UserError, match=r"config\.json does not exist"):
        convert(tmp_path, "sglang", tmp_path / "out")
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(UserError, match="neither a speculators EAGLE-3 drafter"):
        convert(tmp_path, "sglang", tmp_path / "out")
    (tmp_path / "config.json").write_text('{"speculators_model_type": "dflash"}')
    with pytest.raises(UserError, match="only eagle3"):
        convert(tmp_path, "sglang", tmp_path / "out")


def test_command_line(trained, tmp_path):
    from eagle3dvc import cli

    out = tmp_path / "out"
    done = CliRunner().invoke(cli.app, ["convert", str(trained.export / "sglang"), "--to", "speculators", str(out)])
    assert done.exit_code == 0 and layouts.read(out).aux_layer_ids == tuple(world.AUX)
    done = CliRunner().invoke(cli.app, ["convert", str(trained.export / "sglang"), "--to", "speculators", str(out)])
    assert isinstance(done.exception, UserError) and "exists already" in str(done.exception)


@pytest.mark.parametrize("probe", [True, False])
def test_what_was_changed_since_the_export_is_not_sealed_anew(trained, tmp_path, probe):
    """The copy would carry a record of the damaged drafter and pass every check."""
    source = Path(shutil.copytree(trained.export / "speculators", tmp_path / "in"))
    if not probe:
        (source / check.PROBE).unlink()
    config = json.loads((source / "config.json").read_text())
    config["transformer_layer_config"]["rope_parameters"]["rope_theta"] = 77.0
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="rope_parameters is .* in config.json but was"):
        convert(source, "sglang", tmp_path / "out")
    source = Path(shutil.copytree(trained.export / "sglang", tmp_path / "in2"))
    tensors = load_file(source / "model.safetensors")
    tensors["fc.weight"].view(torch.int16)[0, 0] ^= 1
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="fc.weight is not the one that was exported"):
        convert(source, "speculators", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_verifiers_record_goes_along(trained, tmp_path):
    convert(trained.export / "speculators", "sglang", tmp_path / "out")
    was, now = (
        json.loads((f / check.PROVENANCE).read_text())["verifier"] for f in (trained.export / "speculators", tmp_path / "out")
    )
    assert now == was and now["identity"]


def test_converting_a_foreign_drafter_proves_nothing(trained, tmp_path):
    convert(foreign(trained, tmp_path / "in"), "speculators", tmp_path / "out", layer_ids=world.AUX, verifier_name="tests/tiny")
    with pytest.raises(UserError, match="nothing shows that it drafts"):
        check.verify_export(tmp_path / "out")
    assert check.verify_export(tmp_path / "out", structure_only=True)[0]["checked"] == ["structure", "provenance"]


@pytest.mark.parametrize("flag", layouts.NORM_FLAGS)
@pytest.mark.parametrize("inside", [True, False])
def test_norms_that_sglang_cannot_say(trained, tmp_path, flag, inside):
    """vLLM reads these in an EAGLE config too, SGLang does not: neither reading nor converting may drop them."""
    given = {"layer_ids": world.AUX, "verifier_name": "tests/tiny"}
    for value in (True, False):
        said = {"eagle_config": {flag: value}} if inside else {flag: value}
        source = foreign(trained, tmp_path / f"in-{value}", **said)
        if value:
            with pytest.raises(UserError, match=f"{flag} = true: SGLang's layout cannot say this"):
                convert(source, "speculators", tmp_path / "out", **given)
        else:
            convert(source, "speculators", tmp_path / "out", **given)
            assert flag not in json.loads((tmp_path / "out/config.json").read_text())["transformer_layer_config"]
    sealed = Path(shutil.copytree(trained.export / "sglang", tmp_path / "sealed"))
    config = json.loads((sealed / "config.json").read_text())
    (config["eagle_config"] if inside else config)[flag] = True
    (sealed / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="SGLang's layout cannot say this"):
        check.verify_export(sealed)


@pytest.mark.parametrize(
    ("key", "value"),
    [("bias", True), ("logit_scale", 0.5), ("quantization_config", {"bits": 4}), ("partial_rotary_factor", 0.5)],
)
def test_keys_that_engines_obey_do_not_come_along(trained, tmp_path, key, value):
    source = foreign(trained, tmp_path / "in", **{key: value})
    with pytest.raises(UserError, match=f"in/config.json: .*({key}|quantised)"):
        convert(source, "speculators", tmp_path / "out", layer_ids=world.AUX, verifier_name="tests/tiny")


def test_keys_of_published_drafters_do_no_harm(trained, tmp_path):
    """What NVIDIA's, SpecForge's and AngelSlim's configurations say beside the drafter; the dtype is that of the tensors anyway."""
    nvidia = {
        **{"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_aux_hidden_state": True},
        **{"use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1},
        "eagle_aux_hidden_state_layer_ids": [],
    }
    others = {"max_window_layers": 36, "sliding_window": None, "use_sliding_window": False, "torch_dtype": "float16"}
    source = foreign(trained, tmp_path / "in", eagle_config=nvidia, **others, tie_word_embeddings=True, rope_scaling=None)
    convert(source, "speculators", tmp_path / "out", layer_ids=world.AUX, verifier_name="tests/tiny")
    assert check.verify_export(tmp_path / "out", structure_only=True)
    convert(tmp_path / "out", "sglang", tmp_path / "back")
    assert check.verify_export(tmp_path / "back", structure_only=True)
