"""The export: what each layout says, that it says it the same way twice, and what it refuses to leave out."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import world
from safetensors import safe_open

from eagle3dvc.drafter import check, export, layouts
from eagle3dvc.drafter import model as drafter_model
from eagle3dvc.errors import UserError


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as f:
        return {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118


def digests(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): hashlib.md5(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def drafter(trained) -> layouts.Drafter:
    return layouts.read(trained.export / "speculators")


def test_speculators_layout(trained):
    folder = trained.export / "speculators"
    config = json.loads((folder / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == world.AUX
    assert config["draft_vocab_size"] == 64 and config["dtype"] == "bfloat16"
    assert [config[f] for f in layouts.NORM_FLAGS] == [False] * 4
    assert config["transformer_layer_config"]["model_type"] == "llama"
    assert "num_aux_hidden_states" not in config["transformer_layer_config"]
    verifier = config["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "tests/tiny", "architectures": ["LlamaForCausalLM"]}
    found = tensors(folder)
    d = layouts.read(folder)
    assert {k: tuple(t.shape) for k, t in found.items()} == layouts.expected_tensors(d)
    assert {str(t.dtype) for t in found.values()} == {"torch.bfloat16", "torch.int64", "torch.bool"}
    ids = found["d2t"] + torch.arange(64)
    assert torch.equal(ids, found["t2d"].nonzero()[:, 0]), "d2t holds offsets from the draft id"


def test_sglang_layout(trained):
    one, other = (trained.export / name for name in ("sglang", "speculators"))
    config = json.loads((one / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [i - 1 for i in world.AUX]
    assert config["rope_theta"] == 10000.0 and config["rope_scaling"] is None and "rope_parameters" not in config
    assert config["draft_vocab_size"] == 64 and config["tie_word_embeddings"] is False
    a, b = tensors(one), tensors(other)
    assert {k.replace("midlayer.", "layers.0.") for k in a} == b.keys()
    assert "embed_tokens.weight" not in a and "lm_head.weight" in a
    assert all(torch.equal(t, b[k.replace("midlayer.", "layers.0.")]) for k, t in a.items())


def test_speculators_own_classes_read_it(trained):
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(str(trained.export / "speculators"))
    assert config.eagle_aux_hidden_state_layer_ids == world.AUX
    assert config.transformer_layer_config.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}


def test_engines_would_load_one_safetensors_file(trained):
    for layout in layouts.LAYOUTS:
        assert [p.name for p in (trained.export / layout).glob("*.safetensors")] == ["model.safetensors"]
        assert not list((trained.export / layout).glob("*.bin"))


def test_same_inputs_same_bytes_and_no_path_inside(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(trained.world.root)  # the card quotes the dvc.lock of the folder it is made in
    trained.build(tmp_path / "again")
    first = digests(trained.export)
    assert first == digests(tmp_path / "again")
    assert len(first) == 2 * 5
    for file in trained.export.rglob("*"):
        if file.is_file():
            assert str(trained.world.root).encode() not in file.read_bytes(), f"{file} names a folder of this machine"


def test_self_check_is_tight_and_metrics_are_stable(trained):
    for layout in layouts.LAYOUTS:
        found = trained.log["self_check"][layout]
        assert found["max_difference"] < 1e-4, "the two implementations agree far below the tolerance"
        assert 0.9 < found["same_token"] <= 1.0
    assert trained.metrics["layouts"] == ["sglang", "speculators"]
    assert trained.metrics["parameters"] == sum(
        t.numel() for t in tensors(trained.export / "sglang").values() if t.is_floating_point()
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"fc_norm": True}, "fc_norm"),
        ({"norm_output": True}, "norm_output"),
        ({"aux_layer_ids": (1, 2, 3, 5)}, "4 auxiliary layers"),
        ({"decoder": {"layer_types": ["sliding_attention"], "sliding_window": 64}}, "sliding window of 64"),
        ({"decoder": {"num_hidden_layers": 2}}, "2 decoder layers"),
        ({"decoder": {"model_type": "qwen3"}}, "qwen3"),
        ({"decoder": {"attention_bias": True}}, "attention_bias"),
    ],
)
def test_sglang_refuses_what_it_cannot_say(drafter, tmp_path, change, says):
    if "decoder" in change:
        change = {"decoder": {**drafter.decoder, **change["decoder"]}}
    with pytest.raises(UserError, match=f"sglang layout cannot represent.*{says}"):
        layouts.write(replace(drafter, **change), tmp_path / "out", "sglang")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("norms", ["speculators"])
def test_other_norms_export_for_vllm_only(trained, tmp_path, norms):
    """An untrained drafter with every norm speculators has: its speculators layout passes the self-check, sglang is refused."""
    from eagle3dvc.drafter.vocab import DraftVocab
    from eagle3dvc.verifier import load_head, load_info

    folders, params = trained.world.folders, world.params(norms=norms, draft_layers=2)
    info, head = load_info(folders["verifier"]), load_head(folders["verifier"])
    t2d = torch.zeros(world.VOCAB, dtype=torch.bool)
    t2d[::2] = True
    vocab = DraftVocab(t2d.nonzero()[:, 0] - torch.arange(48), t2d)
    config = drafter_model.draft_config(
        info, params.train.model_copy(update={"draft_vocab_size": 48}), [*world.AUX, world.LAYERS]
    )
    made = drafter_model.instantiate(config, head, vocab, "eager")
    with torch.no_grad():  # norms of ones would hide a forgotten one
        for name, p in made.named_parameters():
            if "norm" in name and not name.startswith("verifier"):
                p.uniform_(0.5, 1.5)
    drafter_model.save(made, tmp_path / "drafter/best")
    (tmp_path / "drafter/training.json").write_bytes((trained.drafter / "training.json").read_bytes())
    with pytest.raises(UserError, match="sglang layout cannot represent norm_before_residual = true; norm_before_fc = true"):
        trained.build(tmp_path / "export", params, tmp_path / "drafter")
    assert not (tmp_path / "export").exists() and not list(tmp_path.glob(".export*")), "nothing half-written"
    only = params.model_copy(
        update={"export": params.export.model_copy(update={"layouts": ["speculators"], "dtype": "float32"})}
    )
    trained.build(tmp_path / "export", only, tmp_path / "drafter")
    config = json.loads((tmp_path / "export/speculators/config.json").read_text())
    assert config["norm_before_fc"] and config["norm_output"] and config["norm_before_residual"]


def test_number_of_aux_states_is_written_when_not_three(drafter, tmp_path):
    wide = torch.zeros(world.HIDDEN, 4 * world.HIDDEN, dtype=torch.bfloat16)
    four = replace(drafter, aux_layer_ids=(1, 2, 3, 5), tensors={**drafter.tensors, "fc.weight": wide})
    layouts.write(four, tmp_path / "out", "speculators")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == 4
    assert layouts.read(tmp_path / "out").aux_layer_ids == (1, 2, 3, 5)


@pytest.mark.parametrize("name", ["/data/models/x", "./x", "../x", "~/x", "C:\\models\\x", "a/b/c", ""])
def test_local_verifier_names_are_refused(drafter, tmp_path, name):
    with pytest.raises(UserError, match="local path"):
        layouts.write(replace(drafter, verifier=name), tmp_path / "out", "speculators")


def test_values_that_overflow_the_dtype_are_refused(drafter):
    broken = {**drafter.tensors, "norm.weight": torch.full((world.HIDDEN,), 3.4e38)}  # above bfloat16's largest, fits float32
    broken["norm.weight"] = torch.nextafter(broken["norm.weight"], torch.tensor(float("inf"))) * 1.0003
    with pytest.raises(UserError, match=r"norm.weight holds values that are not finite in bfloat16"):
        export.cast(replace(drafter, tensors=broken), "bfloat16")


def test_unfinished_checkpoint_is_refused(trained, tmp_path):
    with pytest.raises(UserError, match=r"best.*config.json"):
        trained.build(tmp_path / "export", drafter=tmp_path / "nothing")
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 50000.0},
        {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0},
        {
            "rope_type": "yarn",
            "rope_theta": 50000.0,
            "factor": 64.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
    ids=lambda r: r["rope_type"],
)
def test_rope_means_the_same_in_both_layouts_and_in_speculators(trained, drafter, tmp_path, rope):
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    decoder = {**drafter.decoder, "rope_parameters": rope, "max_position_embeddings": 262144}
    changed = export.cast(replace(drafter, decoder=decoder), "float32")
    head = drafter_model.load(trained.drafter / "best", trained.world.folders["verifier"])
    probes = check.windows(trained.world.folders["hidden"], trained.world.folders["prompts"], count=2)
    for layout in layouts.LAYOUTS:
        layouts.write(changed, tmp_path / layout, layout)
        assert layouts.read(tmp_path / layout).decoder == decoder
    config = Eagle3SpeculatorConfig.from_pretrained(str(tmp_path / "speculators"))
    config.transformer_layer_config._attn_implementation = "eager"
    other = type(head)(config).float().eval()
    other.load_state_dict(head.state_dict())
    other.load_state_dict({k: v.float() for k, v in changed.tensors.items() if k.endswith("weight")}, strict=False)
    for layout in layouts.LAYOUTS:
        assert check.self_check(tmp_path / layout, other, check.wanted(other, torch.float32, probes))["max_difference"] < 1e-4
    if rope["rope_type"] != "default":
        with pytest.raises(UserError, match="does not compute what was trained"):
            check.self_check(tmp_path / "sglang", head, check.wanted(head, torch.float32, probes))


def test_card_says_where_the_drafter_comes_from(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lock = "schema: '2.0'\nstages:\n  train:\n    cmd: x\n    outs:\n    - path: models/drafter\n      md5: 0123abcd.dir\n"
    Path("dvc.lock").write_text(lock)
    trained.build(tmp_path / "export")
    for layout, command in (
        ("speculators", "vllm serve tests/tiny"),
        ("sglang", "sglang.launch_server --model-path tests/tiny"),
    ):
        card = (tmp_path / "export" / layout / "README.md").read_text()
        assert command in card
        assert "| `models/drafter` | `0123abcd.dir` |" in card
        assert "| `source-0` | 6 heldout, 18 train |" in card
        assert "| `learning_rate` | `0.003` |" in card
        assert "acceptance_length" in card and "local:tiny" in card
        assert "are of the best checkpoint (`best_step`), on `heldout_samples` held-out" in card
