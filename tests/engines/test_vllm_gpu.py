"""The vLLM engine on GPUs: bfloat16 states are as near to float32 as transformers' own, and tensor parallelism does not move them.

Run on a GPU machine: python -m pytest -m gpu tests/engines
"""

from __future__ import annotations

import gc
import importlib.util

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from eagle3dvc import engines, params, verifier
from eagle3dvc.hidden_states.format import ShardRequest, shard_key
from tests.engines import models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LENGTHS = [2, 800, 17, 33, 399, 128, 700, 5, 511, 64, 250, 801]
#: the kernels of GPUs want real head sizes
SIZES = {
    "llama": dict(hidden_size=1024, intermediate_size=2816, num_attention_heads=16, num_key_value_heads=8, head_dim=64),
    "deepseek": dict(
        hidden_size=1024,
        intermediate_size=2816,
        num_attention_heads=32,
        num_key_value_heads=32,
        moe_intermediate_size=256,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        q_lora_rank=256,
        qk_nope_head_dim=128,
        v_head_dim=128,
    ),
}


def extracted(folder, tokens, **extract):
    """The states of every sample, [T_i, layers, hidden], in float32, through an engine of its own."""
    values = {"engine": "vllm", "dtype": "bfloat16", "stored_dtype": "bfloat16", "max_num_batched_tokens": 512}
    values |= {"max_num_seqs": 64, "enforce_eager": True, "gpu_memory_utilization": 0.3, **extract}
    p = params.parse(
        {
            "max_samples": 10,
            "verifier": {"model": str(folder / "model"), "watch": str(folder / "model")},
            "prepare": {"max_length": 801},
            "extract": values,
        }
    )
    info = verifier.build(p, folder / "verifier")
    ids = verifier.layer_ids(info, p)
    engine = engines.make(p, info, ids)
    try:
        engine.prove(verifier.load_head(info.folder))
        key = shard_key(info.identity, ids, values["stored_dtype"], engines.numerics(p), tokens)
        header = {"identity": info.identity, "layer_ids": ids, "stored_dtype": values["stored_dtype"], "numerics": {}}
        path = folder / f"{key}.safetensors"
        (done,) = engine.extract([ShardRequest(key, tokens, header, info.hidden_size, path)])
    finally:
        engine.close()
        gc.collect()
    tensors = load_file(done.path)
    done.path.unlink()
    offsets = tensors["offsets"].tolist()
    return ids, [tensors["hidden_states"][a:b].float() for a, b in zip(offsets[:-1], offsets[1:], strict=True)]


def distance(got, want, quantile):
    """Relative error of the tokens at the worst layer; quantile 1 is the worst token."""
    errors = [(a - b).norm(dim=-1) / b.norm(dim=-1) for a, b in zip(got, want, strict=True)]  # [T_i, layers] each
    return torch.cat(errors).quantile(quantile, dim=0).max().item()


@pytest.mark.parametrize("kind", ["llama", "deepseek"])
def test_states_do_not_depend_on_tensor_or_expert_parallelism(kind, tmp_path, monkeypatch):
    """Relative to float32, two GPUs are as near as one, within the noise of bfloat16.

    The worst token counts; with experts the median, since rounding sends some tokens to other experts.
    """
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    model = models.save_model(kind, tmp_path / "model", positions=2048, **SIZES[kind])
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, models.VOCAB, n).astype(np.int32) for n in LENGTHS]
    ids, one = extracted(tmp_path, tokens)
    want = [models.reference_states(model, t, ids) for t in tokens]
    quantile = 0.5 if kind == "deepseek" else 1.0
    noise = distance(one, want, quantile)
    print(f"{kind}: one GPU to float32 transformers {noise:.2e} (worst token {distance(one, want, 1.0):.2e})", flush=True)
    assert noise < 3e-2
    if torch.cuda.device_count() < 2:
        return
    for name, settings in {"TP 2": {}, "TP 2 with experts": {"enable_expert_parallel": True}}.items():
        if kind == "llama" and settings:
            continue
        _, two = extracted(tmp_path, tokens, tensor_parallel_size=2, **settings)
        near, far = distance(two, one, quantile), distance(two, want, quantile)
        print(f"{kind}: {name} to one GPU {near:.2e}, to float32 {far:.2e}", flush=True)
        assert near < 2 * noise and far < 1.5 * noise
