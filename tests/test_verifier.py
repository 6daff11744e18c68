"""The verifier folder: the head equals the real model's logits in every layout, and nothing wrong gets through."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

from eagle3dvc import verifier
from eagle3dvc.errors import UserError
from eagle3dvc.params import parse
from tests import tiny


def params(model, **extract):
    block = {"model": str(model)}
    if Path(model).is_dir():
        block["watch"] = str(model)
    return parse({"max_samples": 10, "verifier": block, "extract": extract})


def edit(path, **changes):
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not ...}))


def folder_bytes(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def assert_head_is_the_models(folder, config, model):
    """Head.logits of the last decoder layer's output equals the model's own logits."""
    ids = torch.randint(3, config.vocab_size, (1, 17), generator=torch.Generator().manual_seed(1))
    caught = {}
    norm = model.model.norm
    hook = norm.register_forward_pre_hook(lambda module, args: caught.update(h=args[0]))
    with torch.no_grad():
        logits = model(ids).logits[0]
    hook.remove()
    head = verifier.load_head(folder)
    torch.testing.assert_close(head.logits(caught["h"][0]), logits, rtol=1e-5, atol=1e-4)
    assert head.embed.shape == head.lm_head.shape == (config.vocab_size, config.hidden_size)
    torch.testing.assert_close(head.embed, model.get_input_embeddings().weight.detach().float())
    return head


# ---------------------------------------------------------------- layouts


@pytest.mark.parametrize("arch", tiny.ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_head_equals_model(tmp_path, arch, tied):
    source = tiny.make_verifier(tmp_path / "v", arch, tied=tied)
    info = verifier.build(params(source), tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    head = assert_head_is_the_models(tmp_path / "out", model.config, model)
    assert (head.lm_head is head.embed) == tied == info.tied_embeddings
    with safe_open(tmp_path / "out/model.safetensors", "pt") as f:
        assert (verifier.HEAD in f.keys()) == (not tied)  # noqa: SIM118 (not a dict)
        assert len(f.metadata()) == 1
    assert (info.model_type, info.num_layers, info.hidden_size, info.vocab_size) == (arch, 8, 64, tiny.VOCAB)
    assert info == verifier.load_info(tmp_path / "out")


OTHERS = {  # families of PLAIN_HEADS with a small config of their own: the claim is checked, not believed
    "mistral": {},
    "mixtral": {"num_local_experts": 2},
    "phi3": {},
    "qwen2_moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "head_dim": 32},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {"num_experts": 2, "num_experts_per_tok": 1},
    "glm4": {"head_dim": 32},
    "glm4_moe": {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "head_dim": 32},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 32},
    "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 64, "head_dim": 32, "moe_layers": []},
    "smollm3": {},
    "seed_oss": {"head_dim": 32},
    "arcee": {},
    "cwm": {"head_dim": 32},
    "ernie4_5": {"head_dim": 32},
    "ernie4_5_moe": {"moe_num_experts": 2, "moe_k": 1, "moe_intermediate_size": 32},
    "exaone4": {"head_dim": 32},
    "ministral": {"head_dim": 32},
    "ministral3": {"head_dim": 32},
    "minimax_m2": {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 32},
    "deepseek_v2": {"q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
                    "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
                    "moe_intermediate_size": 32},
}  # fmt: skip
WRAPPED = {"qwen2_5_vl_text", "qwen2_vl_text", "qwen3_vl_moe_text", "qwen3_vl_text"}  # text halves without a class of their own


def test_every_family_is_tested():
    assert set(OTHERS) | set(tiny.ARCHITECTURES) | WRAPPED == verifier.PLAIN_HEADS


@pytest.mark.parametrize("kind", OTHERS)
def test_plain_families(tmp_path, kind):
    source = tmp_path / "v"
    base = dict(vocab_size=tiny.VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=0,
                eos_token_id=2, pad_token_id=0)  # fmt: skip
    config = transformers.CONFIG_MAPPING[kind](**(base | OTHERS[kind]))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(source)
    tiny._tokenizer().save_pretrained(source)
    verifier.build(params(source), tmp_path / "out")
    assert_head_is_the_models(tmp_path / "out", config, model)


@pytest.mark.parametrize("arch, nested", [("deepseek_v3", "kimi_k25"), ("qwen2", "qwen2_5_vl"), ("llama", "mistral3")])
@pytest.mark.parametrize("tied", [False, True])
def test_nested(tmp_path, arch, nested, tied):
    plain = tiny.make_verifier(tmp_path / "plain", arch, tied=tied)
    source = tiny.make_verifier(tmp_path / "v", arch, tied=tied, nested=nested)
    info = verifier.build(params(source), tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    assert_head_is_the_models(tmp_path / "out", model.config, model)
    assert info.tied_embeddings == tied
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["model_type"] == ("qwen2_5_vl_text" if nested == "qwen2_5_vl" else arch)
    assert not {"auto_map", "text_config", "quantization_config"} & set(config)


def test_real_wrapper(tmp_path):
    """A wrapper as transformers itself saves it, vision tower included."""
    text = dict(vocab_size=tiny.VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=7, num_attention_heads=2,
                num_key_value_heads=2, tie_word_embeddings=False)  # fmt: skip
    config = transformers.Qwen3VLConfig(
        text_config=text | dict(head_dim=32),
        vision_config=dict(
            depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64, deepstack_visual_indexes=[0]
        ),
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3VLForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "v")
    tiny._tokenizer().save_pretrained(tmp_path / "v")
    info = verifier.build(params(tmp_path / "v"), tmp_path / "out")
    assert (info.model_type, info.num_layers) == ("qwen3_vl_text", 7)
    head = verifier.load_head(tmp_path / "out")
    torch.testing.assert_close(head.lm_head, model.lm_head.weight.detach())
    torch.testing.assert_close(head.norm, model.model.language_model.norm.weight.detach())
    torch.testing.assert_close(head.embed, model.model.language_model.embed_tokens.weight.detach())


def test_sharded_is_the_same(tmp_path):
    one = tiny.make_verifier(tmp_path / "one")
    many = tiny.make_verifier(tmp_path / "many", shard_size="200KB")
    assert len(list(many.glob("*.safetensors"))) > 2
    verifier.build(params(one), tmp_path / "a")
    verifier.build(params(many), tmp_path / "b")
    a, b = folder_bytes(tmp_path / "a"), folder_bytes(tmp_path / "b")
    assert a.pop("verifier.json") != b.pop("verifier.json")  # other files, other identity
    assert a == b


def test_bfloat16_stays(tmp_path):
    source = tiny.make_verifier(tmp_path / "v", dtype="bfloat16")
    info = verifier.build(params(source), tmp_path / "out")
    assert info.dtype == "bfloat16"
    assert {t.dtype for t in load_file(tmp_path / "out/model.safetensors").values()} == {torch.bfloat16}
    assert verifier.load_head(tmp_path / "out").embed.dtype == torch.float32


# ---------------------------------------------------------------- identity


def test_same_input_same_bytes_and_no_paths(tmp_path):
    source = tiny.make_verifier(tmp_path / "v")
    edit(source / "config.json", _name_or_path=str(tmp_path / "somewhere"))
    verifier.build(params(source), tmp_path / "a")
    moved = tmp_path / "elsewhere" / "v"
    shutil.copytree(source, moved)
    verifier.build(params(moved), tmp_path / "b")
    assert folder_bytes(tmp_path / "a") == folder_bytes(tmp_path / "b")
    for name, data in folder_bytes(tmp_path / "a").items():
        assert str(tmp_path).encode() not in data, name
    assert verifier.load_info(tmp_path / "a").name == "v"


def test_identity_follows_content(tmp_path):
    source = tiny.make_verifier(tmp_path / "v")
    identity = lambda: verifier.content_hash(verifier.open_folder(source))  # noqa: E731
    first = identity()
    (source / "README.md").write_text("a model card")
    (source / ".git").mkdir()
    (source / ".git" / "config.json").write_text("{}")
    assert identity() == first
    weights = source / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1000] ^= 1
    weights.write_bytes(data)
    second = identity()
    assert second != first
    (source / "chat_template.jinja").write_text((source / "chat_template.jinja").read_text() + " ")
    assert identity() not in (first, second)


@pytest.mark.parametrize(
    "given, said, expected",
    [("org/name", "other/one", "org/name"), (None, "org/base-7b", "org/base-7b"), (None, "/data/base", "v"), (None, None, "v")],
)
def test_public_name(tmp_path, given, said, expected):
    source = tiny.make_verifier(tmp_path / "v", layers=7)
    if said:
        edit(source / "config.json", _name_or_path=said)
    block = {"model": str(source), "watch": str(source), "name": given}
    info = verifier.build(parse({"max_samples": 1, "verifier": block}), tmp_path / "out")
    assert info.name == expected


# ---------------------------------------------------------------- layer ids


def info_of(layers):
    n = layers
    default = [2, n // 2, n - 3] if n >= 7 else None
    return verifier.VerifierInfo("local", "v", None, "local:x", "llama", n, 64, 512, 1e-5, False, "float32", default, Path("."))


@pytest.mark.parametrize(
    "layers, ids, expected",
    [(8, None, [2, 4, 5, 8]), (61, None, [2, 30, 58, 61]), (8, [1, 7], [1, 7, 8]), (4, [1, 2, 3], [1, 2, 3, 4])],
)
def test_layer_ids(layers, ids, expected):
    assert verifier.layer_ids(info_of(layers), params("demo", **({"aux_layer_ids": ids} if ids else {}))) == expected


@pytest.mark.parametrize("ids", [[2, 4, 8], [2, 4, 9], [8]])
def test_layer_ids_off_by_one(ids):
    with pytest.raises(UserError, match=r"lie in 1\.\.7 .*8 decoder layers"):
        verifier.layer_ids(info_of(8), params("demo", aux_layer_ids=ids))


@pytest.mark.parametrize("ids", [[0, 4, 5], [-1, 2], [4, 2, 5], [2, 2, 5], []])
def test_layer_ids_not_ascending_from_one(ids):
    with pytest.raises(UserError, match="strictly ascending"):
        verifier.layer_ids(info_of(8), params("demo", aux_layer_ids=ids))


def test_too_few_layers_for_defaults(tmp_path):
    for layers, default in ((7, [2, 3, 4]), (6, None), (3, None)):
        info = verifier.build(params(tiny.make_verifier(tmp_path / f"v{layers}", layers=layers)), tmp_path / f"o{layers}")
        assert info.default_aux_layer_ids == default
    with pytest.raises(UserError, match="extract.aux_layer_ids to ascending ids from 1 to 2"):
        verifier.layer_ids(info, params("demo"))


# ---------------------------------------------------------------- what is refused


def without(name):
    return lambda folder: tiny.change_tensors(folder, lambda t: t.pop(name))


def replaced(name, change):
    return lambda folder: tiny.change_tensors(folder, lambda t: t.update({name: change(t[name])}))


def renamed(old, new):
    return lambda folder: tiny.rename_tensors(folder, lambda n: n.replace(old, new))


def added(name, like):
    return lambda folder: tiny.change_tensors(folder, lambda t: t.update({name: t[like].clone() + 1}))


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def poison(tensor):
    tensor = tensor.clone()
    tensor.view(-1)[7] = float("nan")
    return tensor


def as_bin(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def no_tokenizer(folder):
    for path in verifier.tokenizer_files(folder):
        path.unlink()


def configured(**changes):
    return lambda folder: edit(folder / "config.json", **changes)


DAMAGE = {
    "no lm_head": (without(verifier.HEAD), r"lm_head.weight is missing .*tie_word_embeddings"),
    "no norm": (without(verifier.NORM), r"final norm model.norm.weight is missing"),
    "no embedding": (without(verifier.EMBED), r"no token embedding"),
    "layer missing": (configured(num_hidden_layers=9), r"9 decoder layers but the weights lack layer 8"),
    "quantised head": (replaced(verifier.HEAD, lambda t: t.to(torch.int8)), r"dtype int8, a quantised tensor"),
    "fp8 head": (replaced(verifier.HEAD, lambda t: t.to(torch.float8_e4m3fn)), r"dtype float8_e4m3fn, a quantised tensor"),
    "packed head": (renamed("lm_head.weight", "lm_head.weight_packed"), r"lm_head is quantised"),
    "head bias": (added("lm_head.bias", verifier.NORM), r"lm_head has a bias"),
    "layer norm": (added("model.norm.bias", verifier.NORM), r"no RMSNorm"),
    "wrong shape": (replaced(verifier.HEAD, lambda t: t[:-1].clone()), r"shape \[511, 64\] but config.json says \[512, 64\]"),
    "not finite": (replaced(verifier.EMBED, poison), r"not finite"),
    "tied but different": (configured(tie_word_embeddings=True), r"two different tensors"),
    "truncated": (cut, r"model.safetensors is damaged or cut off"),
    "pickled": (as_bin, r"pytorch_model.bin but no safetensors"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"no safetensors weights"),
    "no config": (lambda f: (f / "config.json").unlink(), r"has no config.json"),
    "config not JSON": (lambda f: (f / "config.json").write_text("{"), r"config.json is not valid JSON"),
    "unknown family": (configured(model_type="mystery"), r"'mystery', which this transformers does not know"),
    "gemma": (configured(model_type="gemma2"), r"'gemma2' are not known to be a plain RMSNorm"),
    "layer norm family": (configured(model_type="gpt_neox"), r"'gpt_neox' are not known"),
    "soft cap": (configured(final_logit_softcapping=30.0), r"final_logit_softcapping = 30.0"),
    "no tokenizer": (no_tokenizer, r"has no tokenizer"),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), r"the tokenizer does not load"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_refused(tmp_path, name):
    damage, message = DAMAGE[name]
    source = tiny.make_verifier(tmp_path / "v", layers=7 if name != "layer missing" else 8)
    damage(source)
    with pytest.raises(UserError, match=message):
        verifier.build(params(source), tmp_path / "data" / "out")
    assert list((tmp_path / "data").iterdir()) == []  # nothing half-written


def test_tokenizer_of_another_model(tmp_path):
    source = tiny.make_verifier(tmp_path / "v", layers=7, vocab=tiny.VOCAB - 1)
    with pytest.raises(UserError, match="has id 511 but the verifier's vocabulary has 511 tokens"):
        verifier.build(params(source), tmp_path / "out")


def test_incomplete_shards(tmp_path):
    source = tiny.make_verifier(tmp_path / "v", shard_size="200KB")
    files = sorted(source.glob("*.safetensors"))
    kept = files[1].read_bytes()
    files[1].unlink()
    with pytest.raises(UserError, match=f"{files[1].name} is missing"):
        verifier.build(params(source), tmp_path / "out")
    files[1].write_bytes(files[0].read_bytes())
    with pytest.raises(UserError, match=f"{files[1].name} lacks .* fetch it again"):
        verifier.build(params(source), tmp_path / "out")
    files[1].write_bytes(kept)
    (source / verifier.INDEX).unlink()
    with pytest.raises(UserError, match=f"no {verifier.INDEX}"):
        verifier.build(params(source), tmp_path / "out")


def test_failure_keeps_the_old_folder(tmp_path):
    source, out = tiny.make_verifier(tmp_path / "v", layers=7), tmp_path / "out"
    verifier.build(params(source), out)
    before = folder_bytes(out)
    cut(source)
    with pytest.raises(UserError):
        verifier.build(params(source), out)
    assert folder_bytes(out) == before


@pytest.mark.parametrize("model", ["./missing", "/nowhere/model", "a/b/c", "weights/model.gguf "])
def test_unknown_folder(model):
    with pytest.raises(UserError, match="does not exist"):
        verifier.source_of(model)


def test_a_file_is_no_verifier(tmp_path):
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(UserError, match="is a file"):
        verifier.source_of(str(tmp_path / "model.gguf"))


def test_reading_a_folder_that_is_none(tmp_path):
    with pytest.raises(UserError, match="run `dvc repro verifier` first"):
        verifier.load_info(tmp_path)
    (tmp_path / "verifier.json").write_text('{"format": 99}')
    with pytest.raises(UserError, match="not of format 1"):
        verifier.load_info(tmp_path)


# ---------------------------------------------------------------- hub

BUILD_FROM_HUB = """
import sys
from eagle3dvc import errors, params, verifier
block = {"model": sys.argv[1], "revision": sys.argv[3] if len(sys.argv) > 3 else None}
try:
    print(verifier.build(params.parse({"max_samples": 1, "verifier": block}), sys.argv[2]).identity)
except errors.UserError as e:
    sys.exit(f"error: {e}")
"""


def from_hub(home, *args):
    """Offline, with a hub cache as huggingface_hub lays it out: what a machine has that fetched it before."""
    env = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    env.pop("HF_HUB_CACHE", None)
    return subprocess.run([sys.executable, "-c", BUILD_FROM_HUB, *map(str, args)], env=env, capture_output=True, text=True)


def test_hub(tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "home/hub/models--org--tiny"
    snapshot = tiny.make_verifier(repo / "snapshots" / commit, shard_size="200KB")
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text(commit)
    # only the shards with the three tensors are needed
    index = json.loads((snapshot / verifier.INDEX).read_text())["weight_map"]
    needed = {index[name] for name in (verifier.EMBED, verifier.NORM, verifier.HEAD)}
    others = [p for p in snapshot.glob("*.safetensors") if p.name not in needed]
    assert others
    for path in others:
        path.unlink()
    done = from_hub(tmp_path / "home", "org/tiny", tmp_path / "out")
    assert done.stdout.strip() == f"hub:org/tiny@{commit}", done.stderr
    info = verifier.load_info(tmp_path / "out")
    assert (info.source, info.name, info.revision) == ("hub", "org/tiny", commit)
    again = from_hub(tmp_path / "home", "org/tiny", tmp_path / "again", commit)
    assert again.returncode == 0
    assert folder_bytes(tmp_path / "again") == folder_bytes(tmp_path / "out")
    missing = from_hub(tmp_path / "home", "org/other", tmp_path / "x")
    assert missing.returncode == 1
    assert "no folder here and cannot be fetched from the hub" in missing.stderr
    assert not (tmp_path / "x").exists()


# ---------------------------------------------------------------- eagle3dvc use


def cli(*args):
    return subprocess.run([sys.executable, "-m", "eagle3dvc.cli", *map(str, args)], capture_output=True, text=True)


def test_use(tmp_path):
    source = tiny.make_verifier(tmp_path / "v", layers=7)
    path = tmp_path / "params.yaml"
    shutil.copy(Path(__file__).parents[1] / "params.yaml", path)
    comments = [line.split("#", 1)[1] for line in path.read_text().splitlines() if "#" in line]
    done = cli("use", source, "--name", "org/v", "--params", path)
    assert done.returncode == 0, done.stderr
    block = verifier_block(path)
    assert (block.model, block.watch, block.name, block.revision) == (str(source), str(source), "org/v", None)
    assert [line.split("#", 1)[1] for line in path.read_text().splitlines() if "#" in line] == comments
    assert cli("use", "org/tiny", "--revision", "v2", "--params", path).returncode == 0
    block = verifier_block(path)
    assert (block.model, block.revision, block.name) == ("org/tiny", "v2", None)
    assert block.watch == type(block).model_fields["watch"].default
    before = path.read_bytes()
    cut(source)
    for args, message in (
        ((source,), "cut off"),
        (("demo", "--revision", "v2"), "goes with a hub id"),
        (("./missing",), "does not exist"),
    ):
        done = cli("use", *args, "--params", path)
        assert (done.returncode, message in done.stderr) == (1, True), done.stderr
        assert path.read_bytes() == before


def verifier_block(path):
    from eagle3dvc.params import load

    return load(path).verifier
