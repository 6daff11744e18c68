"""The reference engine against transformers' own hidden states: every layer, any batch, any padding."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle3dvc import engines, verifier
from eagle3dvc import params as params_module
from eagle3dvc.engines import transformers as engine_module
from eagle3dvc.engines.transformers import TransformersEngine, length_batches, relative_error
from eagle3dvc.errors import UserError
from eagle3dvc.hidden_states.format import ShardRequest, shard_key
from eagle3dvc.hidden_states.reader import Shard
from tests.engines import models

LENGTHS = [5, 61, 2, 33, 34, 7, 120, 3]


@pytest.fixture(scope="module", params=["tiny_llama", "tiny_qwen2", "tiny_qwen3", "tiny_deepseek"])
def world(request, tmp_path_factory):
    """(params, info, reference model) of one architecture."""
    folder = request.getfixturevalue(request.param)
    settings = {
        "max_samples": 1,
        "verifier": {"model": str(folder), "watch": str(folder)},
        "extract": {"engine": "transformers"},
    }
    p = params_module.parse(settings)
    info = verifier.build(p, tmp_path_factory.mktemp("data") / "verifier")
    return p, info, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def tokens(vocab: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab, n).astype(np.int32) for n in LENGTHS]


@torch.no_grad()
def reference(model, ids: np.ndarray) -> list[torch.Tensor]:
    """[T, H] for ids 1..N: `hidden_states[k]` of one unpadded sample, and the input of the final norm for N."""
    seen = []
    handle = model.model.norm.register_forward_pre_hook(lambda m, args: seen.append(args[0][0]))
    out = model(torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states=True)
    handle.remove()
    return [h[0] for h in out.hidden_states[1:-1]] + seen


def test_every_layer_in_any_batch(world, tmp_path):
    p, info, model = world
    ids = list(range(1, info.num_layers + 1))
    samples = tokens(info.vocab_size)
    want = [torch.stack(reference(model, t), 1) for t in samples]
    engine = TransformersEngine(p, info, ids)
    for batch_tokens, order in [(8192, range(8)), (8192, [6, 2, 0, 7, 1, 5, 3, 4]), (130, range(8)), (1, range(8))]:
        engine.batch_tokens = batch_tokens
        picked = [samples[i] for i in order]
        header = {"identity": info.identity, "layer_ids": ids, "stored_dtype": "float32", "numerics": {"dtype": "float32"}}
        key = shard_key(info.identity, ids, "float32", {"dtype": "float32"}, picked)
        request = ShardRequest(key, picked, header, info.hidden_size, tmp_path / f"{key}.safetensors")
        (done,) = engine.extract([request])
        shard = Shard(done.path)
        for row, i in enumerate(order):
            error = (shard.states(row) - want[i]).norm(dim=-1) / want[i].norm(dim=-1)
            assert error.max() <= 1e-5, (i, error.max())
            # off by one would be seen: neighbouring layers differ by far more than the tolerance
            assert ((want[i][:, 1:] - want[i][:, :-1]).norm(dim=-1) / want[i][:, 1:].norm(dim=-1)).max() > 1e-2
        done.path.unlink()


def test_proof_passes_and_finds_a_wrong_head_norm_or_layer(world):
    p, info, _ = world
    engine = TransformersEngine(p, info, verifier.layer_ids(info, p))
    head = verifier.load_head(info.folder)
    engine.prove(head)
    for wrong in (
        dataclasses.replace(head, lm_head=head.lm_head.roll(1, 0)),
        dataclasses.replace(head, norm=torch.ones_like(head.norm)),
        dataclasses.replace(head, eps=1.0),
    ):
        with pytest.raises(UserError, match=r"norm \+ lm_head"):
            engine.prove(wrong)
    # the last id hooked one layer early, and an auxiliary id off by one
    engine.norm = engine.layers[-1]
    with pytest.raises(UserError, match=r"norm \+ lm_head"):
        engine.prove(head)
    engine = TransformersEngine(p, info, verifier.layer_ids(info, p))
    engine.layers = [*engine.layers[1:], engine.layers[0]]
    with pytest.raises(UserError, match="hidden state 2 is not the output of decoder layer 2"):
        engine.prove(head)


def test_bfloat16_proof(tiny_llama, tmp_path):
    settings = {
        "max_samples": 1,
        "verifier": {"model": str(tiny_llama), "watch": str(tiny_llama)},
        "extract": {"dtype": "bfloat16"},
    }
    p = params_module.parse(settings)
    info = verifier.build(p, tmp_path / "verifier")
    TransformersEngine(p, info, verifier.layer_ids(info, p)).prove(verifier.load_head(info.folder))


def test_length_batches_keep_the_limit_and_every_sample():
    lengths = [5, 100, 3, 50, 51, 200, 1]
    batches = list(length_batches(lengths, 110))
    assert sorted(i for b in batches for i in b) == list(range(7))
    assert all(len(b) * max(lengths[i] for i in b) <= 110 or len(b) == 1 for b in batches)
    assert list(length_batches([], 10)) == []


def test_settings_of_vllm_are_refused(tiny_llama, tmp_path):
    settings = {
        "max_samples": 1,
        "verifier": {"model": str(tiny_llama), "watch": str(tiny_llama)},
        "extract": {"quantization": "fp8"},
    }
    p = params_module.parse(settings)
    info = verifier.build(p, tmp_path / "verifier")
    with pytest.raises(UserError, match="need extract.engine = vllm"):
        TransformersEngine(p, info, verifier.layer_ids(info, p))


FROM_HUB = """
import sys
from eagle3dvc import params, verifier
from eagle3dvc.engines.transformers import TransformersEngine
p = params.parse({"max_samples": 1, "verifier": {"model": "org/tiny"}, "extract": {"engine": "transformers"}})
info = verifier.build(p, sys.argv[1])
open(sys.argv[2], "w").write("b" * 40)  # somebody pushes to the branch
engine = TransformersEngine(p, info, [2, 8])
engine.prove(verifier.load_head(sys.argv[1]))
print(info.identity, engine.model.get_input_embeddings().weight.sum().item())
"""


def test_the_commit_of_the_identity_is_loaded_when_its_branch_has_moved(tmp_path):
    repo = tmp_path / "home/hub/models--org--tiny"
    model = models.save_model("llama", repo / "snapshots" / ("a" * 40))
    shutil.copytree(repo / "snapshots" / ("a" * 40), repo / "snapshots" / ("b" * 40))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)
    model.save_pretrained(repo / "snapshots" / ("b" * 40))
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text("a" * 40)
    env = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    env.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-c", FROM_HUB, str(tmp_path / "verifier"), str(repo / "refs/main")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    identity, weights = done.stdout.split()[-2:]
    assert identity == f"hub:org/tiny@{'a' * 40}"
    assert float(weights) == pytest.approx(model.get_input_embeddings().weight.sum().item() / 2)


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        (LONGROPE, 63),  # vLLM's max_model_len is one more than the samples have
        ({"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default"}, "other": None}, 63),
        ({"rope_type": "dynamic", "factor": 2.0}, 512),
        ({"rope_type": "yarn", "original_max_position_embeddings": 64, "factor": 8.0}, None),
        ({"rope_theta": 10000.0}, None),
        (None, None),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_ropes_that_follow_the_longest_sample_are_refused(tmp_path, monkeypatch, rope, longest, workers):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512, "rope_parameters": rope}))
    monkeypatch.setattr(engine_module, "TransformersEngine", lambda *args: "started")
    ray = pytest.importorskip("eagle3dvc.engines.ray") if workers > 1 else None
    if ray:
        monkeypatch.setattr(ray, "RayEngine", lambda *args: "started")
    info = SimpleNamespace(folder=tmp_path, name="phi")

    def make(max_length):
        settings = {"max_samples": 1, "extract": {"engine": "transformers", "workers": workers}}
        return engines.make(params_module.parse({**settings, "prepare": {"max_length": max_length}}), info, [2, 8])

    assert make(longest or 4096) == "started"
    if longest:
        with pytest.raises(UserError, match=f"lower prepare.max_length from {longest + 1} to {longest}"):
            make(longest + 1)


def test_states_of_longrope_below_its_bound_depend_on_no_neighbour(tmp_path):
    """And above it they would: the reason for the bound."""
    from transformers import Phi3Config

    factors = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    config = Phi3Config(
        vocab_size=models.VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=2,
        max_position_embeddings=512,
        original_max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=257,
        pad_token_id=None,
        rope_parameters={**LONGROPE, **factors},
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "phi")
    models.save_tokenizer(tmp_path / "phi")
    settings = {"verifier": {"model": str(tmp_path / "phi"), "watch": str(tmp_path / "phi")}, "prepare": {"max_length": 63}}
    p = params_module.parse({"max_samples": 1, "extract": {"engine": "transformers"}, **settings})
    info = verifier.build(p, tmp_path / "verifier")
    engine = engines.make(p, info, [2, 8])
    short, longest, longer = models.prompts([40, 63, 65])
    (alone,) = engine.states([short])
    assert relative_error(engine.states([short, longest])[0], alone) < 1e-5
    assert relative_error(engine.states([short, longer])[0], alone) > 1e-3
    with pytest.raises(UserError, match="has a longrope rotary embedding"):
        engines.make(p.model_copy(update={"prepare": p.prepare.model_copy(update={"max_length": 64})}), info, [2, 8])
