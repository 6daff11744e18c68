"""Several engines through Ray: the same names and bytes as one, whatever happens to a worker."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3dvc import engines
from eagle3dvc.errors import UserError
from eagle3dvc.hidden_states.format import ShardRequest, shard_key
from eagle3dvc.params import parse
from eagle3dvc.verifier import load_head, load_info
from tests.drafter.world import AUX, HIDDEN, LAYERS, VOCAB, make_verifier, write_verifier

ray = pytest.importorskip("ray", reason="the ray extra is not installed")
IDS = [*AUX, LAYERS]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(params, info, requests): a tiny verifier and 12 shards of 40 samples of many lengths."""
    root = tmp_path_factory.mktemp("ray")
    before, root_before = os.getcwd(), os.environ.get("DVC_ROOT")
    os.chdir(root)
    os.environ["DVC_ROOT"] = str(root)
    write_verifier(make_verifier(), root / "verifier")
    params = parse(
        {
            "max_samples": 480,
            "verifier": {"model": "verifier", "watch": "verifier"},
            "extract": {"engine": "transformers", "batch_tokens": 2048, "workers": 2},
        }
    )
    rng = np.random.default_rng(0)
    requests = []
    for _ in range(12):
        tokens = [rng.integers(3, VOCAB, int(n)).astype(np.int32) for n in rng.integers(2, 200, 40)]
        key = shard_key("local:tiny", IDS, "bfloat16", {"dtype": "float32"}, tokens)
        header = {
            "identity": "local:tiny",
            "layer_ids": IDS,
            "stored_dtype": "bfloat16",
            "numerics": {"dtype": "float32"},
            "engine": "transformers",
            "engine_version": "1",
        }
        requests.append(ShardRequest(key, tokens, header, HIDDEN, Path()))
    yield params, load_info("verifier"), requests
    os.chdir(before)
    if root_before is None:
        os.environ.pop("DVC_ROOT")
    else:
        os.environ["DVC_ROOT"] = root_before


def into(folder, requests):
    folder.mkdir(exist_ok=True)
    return [replace(r, path=folder / f"{r.key}.safetensors") for r in requests]


def hashes(folder):
    return {p.name: hashlib.md5(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def alone(world, tmp_path_factory):
    """What one engine writes: {file name: md5}; and its answers to three prompts."""
    params, info, requests = world
    folder = tmp_path_factory.mktemp("alone") / "shards"
    one = params.model_copy(update={"extract": params.extract.model_copy(update={"workers": 1})})
    engine = engines.make(one, info, IDS)
    finished = list(engine.extract(into(folder, requests)))
    answers = engine.generate(PROMPTS, **SETTINGS)
    engine.close()
    assert {f.path.name: f.md5 for f in finished} == hashes(folder)
    return hashes(folder), answers


PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [3], [4, 4]]
SETTINGS = {"max_new_tokens": [4, 5, 6, 7, 8], "temperature": 0.7, "top_p": 0.9, "seed": 3, "stop_token_ids": [2]}


@pytest.fixture(scope="module")
def pair(world):
    """Two workers, proved."""
    params, info, _ = world
    handler = signal.getsignal(signal.SIGTERM)
    engine = engines.make(params, info, IDS)
    assert signal.getsignal(signal.SIGTERM) is handler, "Ray's handler would end a stage without a word"
    engine.prove(load_head("verifier"))
    yield engine
    engine.close()
    assert not ray.is_initialized()


def test_an_engine_that_cannot_load_says_why(world):  # before `pair` holds the processors
    params, info, _ = world
    extract = params.extract.model_copy(update={"quantization": "fp8"})
    with pytest.raises(UserError, match=r"extract\.quantization"):
        engines.make(params.model_copy(update={"extract": extract}), info, IDS)


def test_every_engine_is_closed(world, tmp_path, monkeypatch):
    """Not only its process killed: vLLM has processes of its own."""
    from eagle3dvc.engines import ray as module

    class Noting(module.Worker):
        def close(self):
            super().close()
            (tmp_path / str(self.number)).touch()

    monkeypatch.setattr(module, "Worker", Noting)
    engines.make(*world[:2], IDS).close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1"]


def test_a_worker_that_dies_while_proving_or_loading_is_replaced(world, tmp_path, monkeypatch):
    from eagle3dvc.engines import ray as module

    class Dying(module.Worker):
        def die_where_told(self, name):
            for file in (tmp_path / f"{name}-{self.number}", tmp_path / f"{name}-{self.number}-once"):
                if file.exists():
                    if file.name.endswith("once"):
                        file.unlink()
                    os.kill(os.getpid(), signal.SIGKILL)

        def prove(self, head):
            self.die_where_told("prove")
            super().prove(head)

        def load(self):
            super().load()
            self.die_where_told("load")

    monkeypatch.setattr(module, "Worker", Dying)
    engine = engines.make(*world[:2], IDS)
    try:
        (tmp_path / "prove-1-once").touch()
        engine.prove(load_head("verifier"))
        assert engine.stats()["workers_lost"] == 1 and not (tmp_path / "prove-1-once").exists()
        (tmp_path / "load-0-once").touch()
        engine._in_a_row = 0
        engine._replace(engine.seats[0], RuntimeError("killed"))
        assert engine.stats()["workers_lost"] == 3, "the loss and that of the first replacement"
        assert engine._in_a_row == 2 and ray.get(engine.seats[0].actor.about.remote())["pid"] == engine.seats[0].pid
        (tmp_path / "load-0").touch()
        engine._in_a_row = 0
        with pytest.raises(UserError, match="lost in a row"):
            engine._replace(engine.seats[0], RuntimeError("killed"))
    finally:
        engine.close()


@pytest.fixture
def cluster(monkeypatch):
    """A cluster of several machines, all of them this one; RAY_ADDRESS names it."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    sooner = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000}  # a machine's end is noticed
    head = {"num_cpus": 1, "num_gpus": 0, "include_dashboard": False, "_system_config": sooner}
    made = Cluster(initialize_head=True, head_node_args=head)
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    yield made
    ray.shutdown()
    made.shutdown()


def test_a_machine_that_leaves_for_good_ends_its_worker_and_not_the_run(world, alone, cluster, tmp_path, monkeypatch):
    from eagle3dvc.engines import ray as module

    leaving = cluster.add_node(num_cpus=1, num_gpus=0)
    cluster.wait_for_nodes()
    engine = module.RayEngine(*world[:2], IDS)
    engine.prove(load_head("verifier"))
    monkeypatch.setattr(module, "PLACEMENT_TIMEOUT", 2.0)
    gone = next(seat for seat in engine.seats if seat.node == leaving.node_id)
    stayed = next(seat for seat in engine.seats if seat is not gone)
    assert stayed.node != gone.node
    stream = engine.extract(into(tmp_path / "two", world[2]))
    finished = [next(stream)]
    cluster.remove_node(leaving, allow_graceful=False)
    finished += list(stream)
    assert sorted(f.path.name for f in finished) == sorted(alone[0])
    assert hashes(tmp_path / "two") == alone[0]
    assert engine._working() == [stayed] and engine.stats()["workers_lost"] == 1
    engine.prove(load_head("verifier"))
    assert engine.generate(PROMPTS, **SETTINGS) == alone[1]
    list(engine.extract(into(tmp_path / "two", world[2][:2])))

    # other workers of that machine: neither another loss in a row, nor waited for once more
    deadline = time.monotonic() + 60
    while leaving.node_id in module._machines():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    monkeypatch.setattr(module, "PLACEMENT_TIMEOUT", 100.0)
    started = time.monotonic()
    before, gone.actor = engine._in_a_row, stayed.actor
    monkeypatch.setattr(module.ray, "kill", lambda actor: None)
    engine._replace(gone, RuntimeError("its machine went away"))
    assert engine._working() == [stayed] and engine._in_a_row == before
    assert time.monotonic() - started < 50

    monkeypatch.setattr(module, "PLACEMENT_TIMEOUT", 0.5)
    monkeypatch.setattr(module, "_places", lambda *_: 0)
    with pytest.raises(UserError, match=r"no machine of the Ray cluster had 1 CPU free for another; finished shards are kept"):
        engine._replace(stayed, RuntimeError("gone too"))
    assert engine._working() == []
    engine.close()


def test_workers_are_counted_by_machine(world, cluster, monkeypatch):
    """6 and 2 GPUs are 8, and no two workers of 4."""
    from eagle3dvc.engines import ray as module

    for gpus in (6, 2):
        cluster.add_node(num_cpus=2, num_gpus=gpus)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, logging_level="error")
    params = world[0]
    wide = params.model_copy(update={"extract": params.extract.model_copy(update={"tensor_parallel_size": 4})})
    with pytest.raises(UserError, match=r"have 6, 2, room for 1: lower one of them"):
        module._share(wide, 2)
    assert module._share(wide, 1) == {"num_gpus": 4, "num_cpus": 1}
    monkeypatch.setattr(module, "PLACEMENT_TIMEOUT", 0.5)
    with pytest.raises(
        UserError, match=r"needs 4 GPUs and 1 CPU on one machine for each, the Ray cluster has these free for 1"
    ):
        module._wait_for_room({"num_gpus": 4, "num_cpus": 1}, 2)
    module._wait_for_room({"num_gpus": 2, "num_cpus": 1}, 3)


def test_processors_are_shared_by_machine(world, monkeypatch):
    from eagle3dvc.engines import ray as module

    monkeypatch.setattr(module, "_machines", lambda: {"a": {"CPU": 6.0}, "b": {"CPU": 2.0}, "driver": {}})
    assert module._share(world[0], 2) == {"num_cpus": 3}, "4 for each would leave one waiting for ever"
    assert module._share(world[0], 4) == {"num_cpus": 2}


def test_a_full_cluster_is_said_and_not_waited_for_for_ever(world, pair, monkeypatch):
    from eagle3dvc.engines import ray as module

    monkeypatch.setattr(module, "PLACEMENT_TIMEOUT", 0.5)
    with pytest.raises(UserError, match="others hold them"):
        module.RayEngine(*world[:2], IDS)
    assert ray.is_initialized(), "the cluster of the first engine is not its to end"


def test_same_bytes_as_one_worker(world, pair, alone, tmp_path):
    finished = list(pair.extract(into(tmp_path / "two", world[2])))
    assert hashes(tmp_path / "two") == alone[0]
    assert {f.path.name: f.md5 for f in finished} == alone[0]
    assert (pair.name, pair.version) == ("transformers", engines.transformers.TransformersEngine.version)


def test_workers_compute_with_as_many_threads_as_one_engine_would(pair):
    """The last bits of a wide matrix product on a CPU depend on the number of threads."""
    threads = {ray.get(seat.actor.about.remote())["threads"] for seat in pair.seats}
    assert threads == {torch.get_num_threads()}


def test_every_worker_did_its_part_and_says_how_fast(world, pair, tmp_path):
    before = [seat.shards for seat in pair.seats]
    list(pair.extract(into(tmp_path / "two", world[2])))
    done = [seat.shards - b for seat, b in zip(pair.seats, before, strict=True)]
    assert sum(done) == 12 and min(done) >= 1
    rows = pair.stats()["workers"]
    assert [r["worker"] for r in rows] == [0, 1]
    assert all(r["tokens_per_second"] == pytest.approx(r["tokens"] / r["seconds"], rel=0.05) for r in rows)


def test_requests_are_taken_as_they_are_needed(world, pair, tmp_path):
    taken = 0

    def source():
        nonlocal taken
        for request in into(tmp_path / "two", world[2]):
            taken += 1
            yield request

    stream = pair.extract(source())
    next(stream)
    assert taken <= 8, "a hundred thousand samples must not be read ahead"
    assert len(list(stream)) == 11


def test_a_killed_worker_loses_nothing(world, pair, alone, tmp_path):
    stream = pair.extract(into(tmp_path / "two", world[2]))
    finished = [next(stream)]
    killed = pair.seats[0].pid
    os.kill(killed, signal.SIGKILL)
    finished += list(stream)
    assert sorted(f.path.name for f in finished) == sorted(alone[0])
    assert hashes(tmp_path / "two") == alone[0], "every shard, and nothing half-written"
    assert pair.stats()["workers_lost"] >= 1
    assert pair.seats[0].pid != killed


def test_what_a_lost_worker_left_half_written_is_removed(world, pair, tmp_path):
    (request, *_), seat = into(tmp_path / "two", world[2]), pair.seats[0]
    ray.get([pair.line.clear.remote(), pair.line.feed.remote([request], True), pair.line.take.remote(seat.number)])
    pair.paths[request.key] = request.path
    half, other = (request.path.with_name(f"{request.path.name}.{pid}.tmp") for pid in (seat.pid, seat.pid + 1))
    half.touch()
    other.touch()
    assert pair._replace(seat, RuntimeError("killed")) == 1, "the shard waits for another worker"
    assert not half.exists() and other.exists()


def test_a_shard_taken_by_a_worker_already_given_up_is_not_forgotten(world, pair, alone, tmp_path, monkeypatch):
    """Its call reaches the line after its shards were put back."""
    feed, taken = pair._feed, []

    def feed_and_take(source, count):
        waiting = feed(source, count)
        if not taken:
            taken.append(ray.get(pair.line.take.remote(0)).key)
        return waiting

    monkeypatch.setattr(pair, "_feed", feed_and_take)
    finished = list(pair.extract(into(tmp_path / "two", world[2])))
    assert len(finished) == 12 and taken
    assert hashes(tmp_path / "two") == alone[0]


def test_shards_travel_where_no_file_system_is_shared(world, pair, alone, tmp_path):
    for seat in pair.seats:
        seat.shared = False
    try:
        finished = list(pair.extract(into(tmp_path / "two", world[2])))
    finally:
        for seat in pair.seats:
            seat.shared = True
    assert hashes(tmp_path / "two") == alone[0]
    assert {f.path.parent for f in finished} == {tmp_path / "two"}


def test_workers_on_this_machine_share_the_file_system(pair):
    assert [seat.shared for seat in pair.seats] == [True, True]
    assert not ray.get(pair.seats[0].actor.sees.remote("/nowhere", "x"))


def test_answers_equal_those_of_one_worker(pair, alone):
    seen = {}
    answers = pair.generate(PROMPTS, **SETTINGS, done=lambda i, a: seen.__setitem__(i, a))
    assert answers == alone[1]
    assert seen == dict(enumerate(alone[1]))


def test_a_worker_lost_while_answering(pair, alone):
    """Killed when the first answers are there: the chunk it holds goes to another."""

    def done(i, answer):
        if not killed:
            killed.append(pair.seats[1].pid)
            os.kill(killed[0], signal.SIGKILL)

    killed = []
    assert pair.generate(PROMPTS, **SETTINGS, done=done) == alone[1]
    assert pair.generate(PROMPTS, **SETTINGS) == alone[1]
    assert killed and pair.seats[1].pid != killed[0]


def test_an_error_in_a_worker_is_the_runs_error_and_no_lost_worker(world, pair, tmp_path):
    lost = pair.stats()["workers_lost"]
    bad = replace(world[2][0], path=tmp_path / "none" / "deeper" / "x.safetensors")
    with pytest.raises(Exception, match="none/deeper"):
        list(pair.extract([bad]))
    assert pair.stats()["workers_lost"] == lost


def test_workers_lost_in_a_row_end_the_run(pair):
    from eagle3dvc.engines.ray import MOST_LOST

    before = pair._in_a_row
    pair._in_a_row = MOST_LOST - 1
    try:
        with pytest.raises(UserError, match=r"lost in a row, the last one said: out of memory; .* Lower extract.workers"):
            pair._replace(pair.seats[0], RuntimeError("out of memory\nmore"))
    finally:
        pair._in_a_row = before


def test_line_gives_a_lost_workers_shards_to_the_next(world):
    from eagle3dvc.engines.ray import Line

    a, b, c = world[2][:3]
    line = Line()
    assert line.take(0) == "wait"
    line.feed([a, b, c], closed=True)
    assert (line.take(0).key, line.take(0).key) == (a.key, b.key)
    line.done(0, a.key)
    assert line.lost(0) == 2, "b, taken and not done, and c"
    assert [line.take(1).key, line.take(1).key, line.take(1)] == [b.key, c.key, "end"]
    assert line.lost(0) == 0


def test_one_worker_needs_no_ray():
    code = (
        "import sys; from eagle3dvc import engines; from eagle3dvc.params import parse\n"
        "from types import SimpleNamespace as N\n"
        "try: engines.make(parse({'max_samples': 1, 'verifier': {'model': 'x/y'}, 'extract': {'engine': 'transformers'}}),"
        " N(folder='.', source='hub', name='x/y'), [1])\n"
        "except Exception: pass\n"
        "assert 'ray' not in sys.modules and 'transformers' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})


def test_nothing_is_left_running_when_the_stage_is_killed(world, tmp_path):
    """SIGKILL the driver: Ray's processes and the workers end by themselves."""
    code = (
        "import os, ray; os.environ['RAY_USAGE_STATS_ENABLED'] = '0'\n"
        "ray.init(address='local', include_dashboard=False, num_cpus=1, object_store_memory=100 << 20, logging_level='error')\n"
        "@ray.remote\n"
        "def pid(): return os.getpid()\n"
        "print(ray.get(pid.remote()), flush=True); import time; time.sleep(100)"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    worker = int(driver.stdout.readline())
    driver.kill()
    driver.wait()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{worker}").exists() and "zombie" not in Path(f"/proc/{worker}/status").read_text():
        assert time.monotonic() < deadline, "the worker outlived its driver"
        time.sleep(0.2)


def test_a_ray_that_happens_to_run_here_is_not_joined():
    """Only RAY_ADDRESS names a cluster to join; Ray by itself would take any that runs on this machine."""
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    say = "print(ray.get_runtime_context().gcs_address, flush=True)"
    begin = (
        "import signal, sys, time; from ray.cluster_utils import Cluster\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit())\n"
        "made = Cluster(initialize_head=True, head_node_args={'num_cpus': 1, 'object_store_memory': 100 << 20})\n"
        "try:\n    print(made.address, flush=True); time.sleep(100)\nfinally:\n    made.shutdown()"
    )
    other = subprocess.Popen([sys.executable, "-c", begin], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        theirs = other.stdout.readline().strip()
        code = f"import ray; from eagle3dvc.engines import ray as engine; engine._start(1); {say}"
        ours = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True).stdout
        assert theirs and ours.strip() and ours.strip() != theirs
    finally:
        other.terminate()
        other.wait()
