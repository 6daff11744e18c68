"""Damage: every way in which an exported drafter can be wrong without failing to load is refused, with the reason."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import world
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from eagle3dvc.drafter import check, layouts
from eagle3dvc.drafter import model as drafter_model
from eagle3dvc.errors import UserError


def edit_config(folder: Path, change) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def set_ids(folder: Path, ids: list[int]) -> None:
    def change(config):
        if "eagle_config" in config:
            config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [i - 1 for i in ids]
        else:
            config["eagle_aux_hidden_state_layer_ids"] = ids

    edit_config(folder, change)


def decoder_of(config: dict) -> dict:
    return config.get("transformer_layer_config", config)


def drop(name: str):
    return lambda folder: edit_tensors(folder, lambda t: t.pop(name))


def shift_ids(folder: Path) -> None:
    set_ids(folder, [i + 1 for i in world.AUX[:2]] + [world.AUX[2] + 1])


def swap_ids(folder: Path) -> None:
    set_ids(folder, [world.AUX[1], world.AUX[0], world.AUX[2]])


def permute_d2t(folder: Path) -> None:
    """Another order of the same verifier tokens: names, shapes, range and t2d all stay right."""

    def change(t):
        ids = t["d2t"] + torch.arange(len(t["d2t"]))
        t["d2t"] = ids.roll(1) - torch.arange(len(ids))

    edit_tensors(folder, change)


def shuffle_offsets(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update(d2t=t["d2t"].flip(0).contiguous()))


def wrong_rope(folder: Path) -> None:
    def change(config):
        c = decoder_of(config)
        if "rope_parameters" in c:
            c["rope_parameters"]["rope_theta"] = 100.0
        else:
            c["rope_theta"] = 100.0

    edit_config(folder, change)


def swap_aux(folder: Path) -> None:
    """The first two blocks of fc.weight trade places, as when the states are concatenated in another order."""

    def change(t):
        a, b, c = t["fc.weight"].chunk(3, dim=1)
        t["fc.weight"] = torch.cat([b, a, c], dim=1).contiguous()

    edit_tensors(folder, change)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)


def truncate_header(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 20)


def other_eps(folder: Path) -> None:
    edit_config(folder, lambda c: decoder_of(c).update(rms_norm_eps=1e-2))


def scaled_weight(folder: Path) -> None:
    edit_tensors(
        folder, lambda t: t.update({"norm.weight": t["norm.weight"] * torch.linspace(0.5, 1.5, len(t["norm.weight"]))})
    )


def not_finite(folder: Path) -> None:
    edit_tensors(folder, lambda t: t["norm.weight"].fill_(float("nan")))


def one_bit(folder: Path) -> None:
    def change(t):
        raw = t["lm_head.weight"].view(torch.uint8)
        raw[0, 0] ^= 1

    edit_tensors(folder, change)


def local_path(folder: Path) -> None:
    def change(config):
        if "eagle3dvc" in config:
            config["eagle3dvc"]["verifier"] = "/data/models/verifier"
        else:
            config["speculators_config"]["verifier"]["name_or_path"] = "/data/models/verifier"

    edit_config(folder, change)


def wrong_shape(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"fc.weight": t["fc.weight"][:, :-1].contiguous()}))


def extra_tensor(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"input_norm.weight": torch.ones(3 * world.HIDDEN, dtype=torch.bfloat16)}))


def second_file(folder: Path) -> None:
    shutil.copyfile(folder / "model.safetensors", folder / "copy.safetensors")


STRUCTURE = {
    "lm_head dropped": (drop("lm_head.weight"), r"lm_head\.weight is missing.*silently accept almost nothing"),
    "d2t dropped": (drop("d2t"), r"d2t is missing.*every draft token means another one"),
    "fc dropped": (drop("fc.weight"), r"tensor fc\.weight is missing"),
    "d2t offsets shuffled": (shuffle_offsets, r"d2t (points outside|maps two|and t2d disagree)"),
    "ids not ascending": (swap_ids, r"must be strictly ascending"),
    "file truncated": (truncate, r"truncated or damaged"),
    "header truncated": (truncate_header, r"truncated or damaged"),
    "not finite": (not_finite, r"norm\.weight holds values that are not finite"),
    "local path": (local_path, r"local path"),
    "wrong shape": (wrong_shape, r"fc\.weight has shape \[32, 95\].*needs \[32, 96\]"),
    "tensor of another configuration": (extra_tensor, r"input_norm\.weight has no place.*skip it silently"),
    "second weight file": (second_file, r"2 safetensors files but no model\.safetensors\.index\.json"),
}
SETTINGS = {
    "ids shifted": (shift_ids, r"auxiliary layers \[2, 4, 6\].*trained on \[1, 3, 5\]"),
    "rope": (wrong_rope, r"rope_parameters is .*100\.0.* in config\.json but was .*10000\.0"),
    "eps": (other_eps, r"rms_norm_eps is 0\.01 in config\.json but was 1e-05"),
}
WEIGHTS = {
    "d2t permuted": (permute_d2t, r"d2t.*(drafts would mean other tokens|maps drafts to other tokens)"),
    "aux order": (swap_aux, r"auxiliary layers are swapped.*\[1, 0, 2\]"),
    "weight scaled": (scaled_weight, r"(norm\.weight is not the one that was exported|gives other logits)"),
}
ONLY_CHECKSUM = {"one bit": (one_bit, r"lm_head\.weight is not the one that was exported")}


@pytest.fixture(params=layouts.LAYOUTS)
def folder(request, trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained.export / request.param, tmp_path / request.param))


def test_an_undamaged_export_passes_everything(trained):
    f = trained.world.folders
    reports = check.verify_export(trained.export, f["hidden"], f["verifier"], f["prompts"], trained.drafter / "best")
    assert [r["layout"] for r in reports] == ["speculators", "sglang"]
    for r in reports:
        assert r["checked"] == ["structure", "provenance", "probe", "trained", "hidden states"]
        assert r["probe_difference"] < 1e-6 and r["first_draft_accuracy"] > 0.2


@pytest.mark.parametrize("name", [*STRUCTURE, *SETTINGS, *WEIGHTS, *ONLY_CHECKSUM])
def test_damage_is_refused(folder, name):
    damage, says = {**STRUCTURE, **SETTINGS, **WEIGHTS, **ONLY_CHECKSUM}[name]
    damage(folder)
    with pytest.raises(UserError, match=says):
        check.verify_export(folder)


@pytest.mark.parametrize("name", [*SETTINGS, *WEIGHTS])
def test_the_probe_alone_finds_it(folder, name):
    """A folder whose provenance file was lost, or was written by whoever did the damage."""
    damage, _ = {**SETTINGS, **WEIGHTS}[name]
    damage(folder)
    (folder / check.PROVENANCE).unlink()
    says = {
        "ids shifted": r"auxiliary layers \[2, 4, 6\].*trained on \[1, 3, 5\]",
        "d2t permuted": r"d2t maps drafts to other tokens",
        "aux order": r"auxiliary layers are swapped",
    }.get(name, r"gives other logits than at export")
    with pytest.raises(UserError, match=says):
        check.verify_export(folder)


@pytest.mark.parametrize("name", ["ids shifted", "d2t permuted", "aux order"])
def test_hidden_states_alone_find_it(folder, trained, name):
    """A drafter from elsewhere carries neither provenance nor probe: the cache and the verifier's head judge it."""
    damage, _ = {**SETTINGS, **WEIGHTS}[name]
    (folder / check.PROVENANCE).unlink()
    (folder / check.PROBE).unlink()
    f = trained.world.folders
    assert check.verify_export(folder, f["hidden"], f["verifier"], f["prompts"])[0]["first_draft_accuracy"] > 0.2
    damage(folder)
    says = {
        "ids shifted": r"the hidden states hold \[1, 3, 5\]: the ids are shifted",
        "d2t permuted": r"what the verifier says next only",
        "aux order": r"auxiliary layers are swapped",
    }[name]
    with pytest.raises(UserError, match=says):
        check.verify_export(folder, f["hidden"], f["verifier"], f["prompts"])


@pytest.mark.parametrize("name", [*SETTINGS, *WEIGHTS])
def test_the_self_check_of_the_stage_finds_it(folder, trained, name):
    damage, _ = {**SETTINGS, **WEIGHTS}[name]
    f = trained.world.folders
    model = drafter_model.load(trained.drafter / "best", f["verifier"])
    before = {k: v.clone() for k, v in model.state_dict().items()}
    expected = check.wanted(model, torch.bfloat16, check.windows(f["hidden"], f["prompts"]))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()), "rounding is undone"
    check.self_check(folder, model, expected)
    damage(folder)
    says = {
        "ids shifted": r"auxiliary layers \[2, 4, 6\].*trained on \[1, 3, 5\]",
        "d2t permuted": r"d2t maps drafts to other tokens",
        "aux order": r"auxiliary layers are swapped",
    }.get(name, r"does not compute what was trained")
    with pytest.raises(UserError, match=says):
        check.self_check(folder, model, expected)


def test_without_anything_to_compute_with_it_does_not_say_ok(folder):
    (folder / check.PROVENANCE).unlink()
    (folder / check.PROBE).unlink()
    with pytest.raises(UserError, match=r"nothing shows that it drafts: give --hidden"):
        check.verify_export(folder)
    assert check.verify_export(folder, structure_only=True)[0]["checked"] == ["structure"]


def test_damaged_companions_are_refused(folder):
    os.truncate(folder / check.PROBE, 30)
    with pytest.raises(UserError, match=r"eagle3dvc\.probe is damaged"):
        check.verify_export(folder)
    (folder / check.PROVENANCE).write_text("{")
    with pytest.raises(UserError, match=r"eagle3dvc\.json is damaged"):
        check.verify_export(folder)


def test_command_line(trained, tmp_path):
    from eagle3dvc import cli

    done = CliRunner().invoke(cli.app, ["verify-export", str(trained.export), "--json"])
    assert done.exit_code == 0
    assert [r["checked"] for r in json.loads(done.stdout)] == [["structure", "provenance", "probe"]] * 2
    copy = Path(shutil.copytree(trained.export / "sglang", tmp_path / "sglang"))
    shift_ids(copy)
    done = CliRunner().invoke(cli.app, ["verify-export", str(copy)])
    assert done.exit_code != 0 and re.search("trained on", str(done.exception))


def layer(**values):
    return lambda config: decoder_of(config).update(values)


OBEYED = {
    "num_aux_hidden_states": ("speculators", layer(num_aux_hidden_states=5), "num_aux_hidden_states is 5, with 3 auxiliary"),
    "no layers": ("speculators", lambda c: decoder_of(c).pop("num_hidden_layers"), "num_hidden_layers is missing"),
    "no proposals": (
        "speculators",
        lambda c: c["speculators_config"].update(proposal_methods=[]),
        "proposal_methods must be a",
    ),
    "algorithm": (
        "speculators",
        lambda c: c["speculators_config"].update(algorithm="dflash"),
        "algorithm is 'dflash', not eagle3",
    ),
    "dtype": ("speculators", lambda c: c.update(dtype="banana"), "dtype is 'banana', no dtype"),
    "path": ("speculators", layer(_name_or_path="/home/me/model"), "_name_or_path is '/home/me/model', a local path"),
    "code": ("sglang", lambda c: c.update(auto_map={"AutoModel": "x.Y"}), "auto_map asks engines to run code"),
    "tied": ("sglang", lambda c: c.update(tie_word_embeddings=True), "an engine may take the embedding for the head"),
    "tied too": ("speculators", lambda c: c.update(tie_word_embeddings=True), "may take the embedding for the head"),
    "tied decoder": ("speculators", layer(tie_word_embeddings=True), "may take the embedding for the head"),
    "other dtype": ("speculators", layer(dtype="float16"), "dtype is 'float16' but the tensors are bfloat16"),
    "other torch_dtype": ("sglang", layer(torch_dtype="float32"), "torch_dtype is 'float32' but the tensors are bfloat16"),
    "logit_scale": ("speculators", layer(logit_scale=0.5), "logit_scale is 0.5"),
    "quantised": ("sglang", layer(quantization_config={"bits": 4}), "quantised drafters are not handled"),
    "bias": ("sglang", layer(bias=True), "bias is set: engines would make biases"),
    "eagle_config": (
        "speculators",
        layer(eagle_config={"norm_before_fc": True}),
        "eagle_config inside transformer_layer_config",
    ),
    "two thetas": ("speculators", layer(rope_theta=500.0), "rope_theta is 500.0 in the decoder but 10000.0 in another place"),
    "two ropes": ("sglang", layer(rope_parameters={"rope_theta": 9.0}), "rope_theta is 10000.0 in the decoder but 9.0"),
    "scaled once": (
        "sglang",
        layer(rope_parameters={"rope_type": "linear", "factor": 4.0}, rope_scaling=None),
        "rope_scaling is missing: SGLang would not scale",
    ),
    "scaled twice": (
        "speculators",
        layer(rope_scaling={"rope_type": "linear", "factor": 4.0}),
        "rope_type is linear in rope_scaling but default",
    ),
    "scaled in part": ("speculators", layer(rope_scaling={"type": "default", "factor": 4.0}), "factor stands in only one of"),
    "theta inside": (
        "sglang",
        lambda c: c.update(rope_parameters={"rope_theta": c.pop("rope_theta")}),
        "rope_theta is missing at top level",
    ),
    "ropes a type": (
        "speculators",
        lambda c: decoder_of(c)["rope_parameters"].update(full_attention={"rope_theta": 3.0}),
        "has an entry full_attention; rope settings a layer type are not handled",
    ),
    "partial": ("speculators", layer(partial_rotary_factor=0.5), "partial_rotary_factor other than 1 is not handled"),
    "partial inside": (
        "speculators",
        lambda c: decoder_of(c)["rope_parameters"].update(partial_rotary_factor=0.5),
        "partial_rotary_factor other than 1 is not handled",
    ),
    "layer_types": ("speculators", layer(layer_types=["full_attention"] * 2), "layer_types has 2 entries for 1 layers"),
    "chunked": ("sglang", layer(layer_types=["chunked_attention"]), "layer_types names 'chunked_attention'"),
    "no window": ("speculators", layer(layer_types=["sliding_attention"]), "sliding_window is missing"),
    "rope type": ("speculators", lambda c: decoder_of(c)["rope_parameters"].update(rope_type="foo"), "rope"),
}


@pytest.mark.parametrize("what", OBEYED)
@pytest.mark.parametrize("sealed", [True, False])
def test_keys_that_only_engines_read(trained, tmp_path, what, sealed):
    layout, change, message = OBEYED[what]
    folder = Path(shutil.copytree(trained.export / layout, tmp_path / layout))
    if not sealed:
        (folder / check.PROVENANCE).unlink()
    edit_config(folder, change)
    with pytest.raises(UserError, match=message):
        check.verify_export(folder)


def test_every_folder_of_an_export_is_looked_at(trained, tmp_path):
    export = Path(shutil.copytree(trained.export, tmp_path / "export"))
    (export / "sglang/config.json").unlink()
    with pytest.raises(UserError, match="sglang"):
        check.verify_export(export)
    shutil.rmtree(export / "sglang")
    shutil.rmtree(export / "speculators")
    shutil.copytree(trained.export / "sglang", export / "speculators")
    with pytest.raises(UserError, match="holds the sglang layout"):
        check.verify_export(export)


def test_a_map_changed_where_nothing_was_drafted(trained, tmp_path):
    """Two entries of d2t trade places: the logits and most drafts stay what they are."""
    folder = Path(shutil.copytree(trained.export / "speculators", tmp_path / "x"))
    (folder / check.PROVENANCE).unlink()
    (folder / check.PROBE).unlink()
    ids = load_file(folder / "model.safetensors")["d2t"]
    ids = ids + torch.arange(len(ids))
    f = trained.world.folders
    for a in range(0, len(ids) - 1, 7):
        swapped = ids.clone()
        swapped[[a, a + 1]] = swapped[[a + 1, a]]
        edit_tensors(folder, lambda t, new=swapped: t.update(d2t=new - torch.arange(len(new))))
        with pytest.raises(UserError, match="d2t maps drafts to other tokens than in training"):
            check.verify_export(folder, f["hidden"], f["verifier"], f["prompts"], trained.drafter / "best")


def test_a_probe_of_nothing(trained, tmp_path):
    folder = Path(shutil.copytree(trained.export / "speculators", tmp_path / "x"))
    from safetensors import safe_open

    with safe_open(folder / check.PROBE, "pt") as f:
        meta, p = f.metadata(), {n: f.get_tensor(n) for n in f.keys()}  # noqa: SIM118 (not a mapping)
    p |= {n: p[n][..., :0].contiguous() for n in ("ids", "logits", "draft_ids")}
    save_file(p, folder / check.PROBE, metadata=meta)
    with pytest.raises(UserError, match="holds nothing to compare with"):
        check.verify_export(folder)


def rename(folder: Path, old: str, new: str, keep: bool = False) -> None:
    def change(t):
        for name in [n for n in t if n.startswith(old)]:
            t[new + name.removeprefix(old)] = t[name].clone() if keep else t.pop(name)

    edit_tensors(folder, change)


@pytest.mark.parametrize(
    ("layout", "old", "new"),
    [
        ("sglang", "midlayer.", "layers.0."),
        ("sglang", "midlayer.", "model.layers.0."),
        ("sglang", "midlayer.", "model.model.midlayer."),
        ("sglang", "lm_head.", "model.lm_head."),
        ("sglang", "d2t", "model.d2t"),
        ("speculators", "fc.", "model.fc."),
        ("speculators", "layers.0.", "model.layers.0."),
    ],
)
@pytest.mark.parametrize("sealed", [True, False])
def test_names_that_the_engine_would_not_find(trained, tmp_path, layout, old, new, sealed):
    folder = Path(shutil.copytree(trained.export / layout, tmp_path / layout))
    if not sealed:
        (folder / check.PROVENANCE).unlink()
    f = trained.world.folders
    model = drafter_model.load(trained.drafter / "best", f["verifier"])
    expected = check.wanted(model, torch.bfloat16, check.windows(f["hidden"], f["prompts"], count=1))
    rename(folder, old, new)
    says = "would skip it without a word: it must be called|is missing"
    with pytest.raises(UserError, match=says):
        check.verify_export(folder)
    with pytest.raises(UserError, match=says):
        check.self_check(folder, model, expected)


def test_names_that_sglang_finds(trained, tmp_path):
    folder = Path(shutil.copytree(trained.export / "sglang", tmp_path / "sglang"))
    for name in ("midlayer.", "fc.", "norm."):
        rename(folder, name, f"model.{name}")
    assert check.verify_export(folder)[0]["checked"] == ["structure", "provenance", "probe"]


@pytest.mark.parametrize(("old", "new"), [("lm_head.", "model.lm_head."), ("midlayer.", "layers.0.")])
def test_two_names_of_one_tensor(trained, tmp_path, old, new):
    folder = Path(shutil.copytree(trained.export / "sglang", tmp_path / "sglang"))
    rename(folder, old, new, keep=True)
    with pytest.raises(UserError, match="are two tensors of one meaning"):
        layouts.read(folder)


def test_a_tensor_of_the_verifier(trained, tmp_path):
    """vLLM ends in a traceback on it; `convert` leaves it out."""
    folder = Path(shutil.copytree(trained.export / "speculators", tmp_path / "speculators"))
    edit_tensors(folder, lambda t: t.update({"verifier_lm_head.weight": t["lm_head.weight"].clone()}))
    with pytest.raises(UserError, match="verifier_lm_head.weight is a tensor of the verifier"):
        check.verify_export(folder)
    layouts.read(folder)


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_keys_that_say_the_same_twice(trained, tmp_path, layout):
    """Writers add them, and engines that read either compute the same."""
    folder = Path(shutil.copytree(trained.export / layout, tmp_path / layout))
    says = {
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_theta": 10000, "type": "default", "factor": None},
        "logit_scale": 1.0,
    }
    more = {"partial_rotary_factor": 1.0, "layer_types": ["full_attention"], "bias": False, "quantization_config": None}
    edit_config(folder, layer(**says, **more, torch_dtype="bfloat16"))
    (folder / check.PROVENANCE).unlink()
    assert check.verify_export(folder)[0]["checked"] == ["structure", "probe"]


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.parametrize("spelt", ["rope_parameters", "rope_scaling", "type"])
def test_layouts_and_the_reference_read_rope_alike(trained, tmp_path, layout, spelt):
    """However it is spelt, and the probe of the unscaled drafter shows that the scaling is computed."""
    from eagle3dvc.drafter import reference

    folder = Path(shutil.copytree(trained.export / layout, tmp_path / layout))
    rope = {"type" if spelt == "type" else "rope_type": "linear", "factor": 4.0}

    def change(config):
        c = decoder_of(config)
        for key in ("rope_parameters", "rope_scaling", "rope_theta"):
            c.pop(key, None)
        if spelt == "rope_parameters":
            c["rope_parameters"] = {**rope, "rope_theta": 500.0}
        else:
            c.update(rope_scaling=rope, rope_theta=500.0)

    edit_config(folder, change)
    wanted = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
    assert layouts.read(folder).decoder["rope_parameters"] == wanted
    found = reference.load(folder).rotary
    head = world.HIDDEN // 4
    assert torch.allclose(found.inv_freq, 500.0 ** (-torch.arange(0, head, 2) / head) / 4)


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_the_probe_knows_the_whole_map(trained, tmp_path, layout):
    """Two entries of d2t trade places that are among the largest logits of no kept position; a probe of old cannot see it."""
    from safetensors import safe_open

    folder = Path(shutil.copytree(trained.export / layout, tmp_path / layout))
    (folder / check.PROVENANCE).unlink()
    probe = load_file(folder / check.PROBE)
    with safe_open(folder / check.PROBE, "pt") as f:
        said = json.loads(f.metadata()["eagle3dvc"])
    probe |= {n: probe[n][..., :1].contiguous() for n in ("ids", "logits", "draft_ids")}
    a, b = sorted(set(range(64)) - set(probe["draft_ids"].flatten().tolist()))[:2]

    def change(t):
        ids = t["d2t"] + torch.arange(64)
        ids[[a, b]] = ids[[b, a]]
        t["d2t"] = ids - torch.arange(64)

    edit_tensors(folder, change)
    save_file(probe, folder / check.PROBE, metadata={"eagle3dvc": json.dumps(said)})
    with pytest.raises(UserError, match="d2t maps drafts to other tokens than at export"):
        check.verify_export(folder)
    del said["d2t"]
    save_file(probe, folder / check.PROBE, metadata={"eagle3dvc": json.dumps(said)})
    assert check.verify_export(folder)[0]["checked"] == ["structure", "probe"]
