"""Several engines as one: Ray actors, each with a verifier of its own, over the shards still missing.

A worker takes the next shard when its engine asks for one, so a fast machine does more; the engine keeps as many in flight as it
would alone. Shards that a lost worker had taken go back to the front of the line and a new worker takes its place. What is written
is what one engine writes: the same requests, the same code, the same bytes.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray._private.state import available_resources_per_node
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from eagle3dvc import engines, stage
from eagle3dvc.errors import UserError
from eagle3dvc.hidden_states.format import FinishedShard, ShardRequest, fsync_dir
from eagle3dvc.params import Params
from eagle3dvc.verifier import Head, VerifierInfo

#: workers lost without a shard or an answer coming in between: past this something is wrong with the work, not with a machine
MOST_LOST = 3
#: what a worker that went away, or its machine, leaves behind in the driver
LOST = (RayActorError, ObjectLostError)
#: finished shards of one worker that may wait for the driver: bounds what lies in the object store where shards travel
_AHEAD = 2
#: seconds to wait for processors and GPUs that others in the cluster hold
PLACEMENT_TIMEOUT = 120.0
#: seconds that engines have to give their memory and processes back
CLOSE_TIMEOUT = 20.0
_POLL = 0.2


class Line:
    """The line of shards that workers take from; an actor beside the driver. Requests are fed a few at a time."""

    def __init__(self):
        self.waiting: deque[ShardRequest] = deque()
        self.closed = False
        self.taken: dict[int, dict[str, ShardRequest]] = {}

    def clear(self) -> None:
        self.waiting.clear()
        self.taken.clear()
        self.closed = False

    def feed(self, requests: list[ShardRequest], closed: bool) -> None:
        self.waiting.extend(requests)
        self.closed = closed

    def take(self, worker: int) -> ShardRequest | str:
        """The next request, "wait" when more will be fed, or "end"."""
        if not self.waiting:
            return "end" if self.closed else "wait"
        request = self.waiting.popleft()
        self.taken.setdefault(worker, {})[request.key] = request
        return request

    def done(self, worker: int, key: str) -> int:
        """A worker's shard is finished; returns how many requests wait."""
        self.taken.get(worker, {}).pop(key, None)
        return len(self.waiting)

    def held(self, worker: int) -> list[str]:
        """Keys of what a worker has taken and not finished."""
        return list(self.taken.get(worker, {}))

    def lost(self, worker: int) -> int:
        """Put what a lost worker had taken back to the front; returns how many requests wait."""
        self.waiting.extendleft(reversed(self.taken.pop(worker, {}).values()))
        return len(self.waiting)


class Worker:
    """One engine. Lives in its own process, on this machine or another."""

    def __init__(self, number: int, params: Params, info: VerifierInfo, layer_ids: Sequence[int], threads: int):
        torch.set_num_threads(threads)
        self.number = number
        self.arguments = params, info, layer_ids

    def node(self) -> str:
        """Where it was placed; answered before the engine loads, which may take minutes."""
        return ray.get_runtime_context().get_node_id()

    def load(self) -> None:
        self.engine = engines.make(*self.arguments)

    def about(self) -> dict[str, Any]:
        return {
            "name": self.engine.name,
            "version": self.engine.version,
            "node": self.node(),
            "pid": os.getpid(),
            "threads": torch.get_num_threads(),
        }

    def prove(self, head: Head) -> None:
        self.engine.prove(head)

    def sees(self, path: str, text: str) -> bool:
        """Whether a file of the driver is here too: one file system, so shards need not travel."""
        try:
            return Path(path).read_text(encoding="utf-8") == text
        except OSError:
            return False

    def extract(self, line, shared: bool) -> Iterator[tuple[FinishedShard, Any]]:
        """Shards until the line is empty: (finished, None) where the driver sees the file, else (finished, its bytes)."""
        with tempfile.TemporaryDirectory(prefix="eagle3dvc-ray-") as folder:
            for shard in self.engine.extract(self._requests(line, None if shared else Path(folder))):
                if shared:
                    yield shard, None
                else:
                    yield shard, np.fromfile(shard.path, dtype=np.uint8)
                    shard.path.unlink()

    def _requests(self, line, folder: Path | None) -> Iterator[ShardRequest]:
        while (request := ray.get(line.take.remote(self.number))) != "end":
            if isinstance(request, str):
                time.sleep(_POLL)
            else:
                yield request if folder is None else replace(request, path=folder / request.path.name)

    def generate(self, prompts: list, settings: dict[str, Any]) -> list[list[int]]:
        return self.engine.generate(prompts, **settings)

    def stats(self) -> dict[str, Any]:
        return getattr(self.engine, "stats", dict)()

    def close(self) -> None:
        self.engine.close()


@dataclass
class Seat:
    """The driver's view of a worker: its actor, what it runs, and what it has done (kept when the actor is replaced).

    No actor: there was no room for another one. `pid` is 0 until its engine is loaded.
    """

    number: int
    actor: Any = None
    shared: bool = True
    node: str = ""
    pid: int = 0
    stream: Any = None
    shards: int = 0
    tokens: int = 0
    seconds: float = 0.0
    started: float | None = None

    def stop_clock(self) -> None:
        if self.started is not None:
            self.seconds += time.monotonic() - self.started
            self.started = None


def _cause(e: RayTaskError) -> BaseException:
    return e.cause if isinstance(e.cause, BaseException) else e


class RayEngine:
    """See :class:`eagle3dvc.engines.Engine`; `extract.workers` engines behind it.

    RAY_ADDRESS names a running cluster; without it Ray is started on this machine and ended with the engine.
    """

    def __init__(self, params: Params, info: VerifierInfo, layer_ids: Sequence[int]):
        self.params, self.info, self.layer_ids = params, info, list(layer_ids)
        self.workers = params.extract.workers
        self.own = not ray.is_initialized()
        self.head_ref = None
        self.paths: dict[str, Path] = {}
        self.seats = [Seat(i) for i in range(self.workers)]
        self.replaced = 0
        self._in_a_row = 0
        self._counted: set[str] = set()  # machines that a loss was counted for
        self._waited: set[str] = set()  # machines in whose place no other came in time
        self._answering = False
        if self.own:
            _start(self.workers)
        try:
            self.options = _share(params, self.workers)
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            self.line = ray.remote(Line).options(num_cpus=0, scheduling_strategy=here).remote()
            _wait_for_room(self.options, self.workers)
            for seat in self.seats:
                self._start_actor(seat)
            for seat in self.seats:
                try:
                    about = self._settle(seat)
                except LOST as e:
                    raise UserError(f"extract worker {seat.number} ended while loading the verifier: {e}") from e
            self.name, self.version = about["name"], about["version"]
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------------------------------- workers
    def _start_actor(self, seat: Seat) -> None:
        params, info = _elsewhere(self.params), replace(self.info, folder=Path(self.info.folder).resolve())
        # as many threads as one engine here would take: on a CPU the last bits of a matrix product depend on their number
        threads = torch.get_num_threads()
        actor = ray.remote(Worker).options(**self.options)
        seat.actor = actor.remote(seat.number, params, info, self.layer_ids, threads)

    def _settle(self, seat: Seat, limit: float | None = None) -> dict[str, Any]:
        """Wait until a worker's engine is loaded; find out whether it sees this machine's files.

        Raises UserError, LOST when it died, and GetTimeoutError when it was not placed on a machine within `limit` seconds.
        """
        seat.node = ray.get(seat.actor.node.remote(), timeout=limit)
        try:
            ray.get(seat.actor.load.remote())
            about = ray.get(seat.actor.about.remote())
            probe = self._probe()
            try:
                seat.shared = ray.get(seat.actor.sees.remote(str(probe), probe.read_text(encoding="utf-8")))
            finally:
                probe.unlink(missing_ok=True)
        except RayTaskError as e:
            if isinstance(cause := _cause(e), UserError):
                raise cause from None
            raise UserError(f"extract worker {seat.number} could not load the verifier: {e}") from e
        seat.pid = about["pid"]
        return about

    @staticmethod
    def _probe() -> Path:
        path = stage.work_dir("ray") / f"probe-{os.getpid()}-{time.monotonic_ns()}"
        path.write_text(os.urandom(16).hex(), encoding="utf-8")
        return path

    def _working(self) -> list[Seat]:
        return [seat for seat in self.seats if seat.actor is not None]

    def _replace(self, seat: Seat, why: BaseException) -> int:
        """A worker is gone: put its shards back and start another in its place, or drop the seat when there is no room for one.

        Returns how many requests wait. Raises UserError after MOST_LOST in a row, and with no seat left.
        """
        while True:
            waiting = self._lose(seat, why)
            try:
                self._wait_for_place(seat)
                self._start_actor(seat)
                self._settle(seat, PLACEMENT_TIMEOUT)
                if self.head_ref is not None:
                    ray.get(seat.actor.prove.remote(self.head_ref))
                return waiting
            except RayTaskError as e:
                raise _cause(e) from None
            except GetTimeoutError:
                self._drop(seat)
                return waiting
            except LOST as e:
                why = e

    def _lose(self, seat: Seat, why: BaseException) -> int:
        """Count a loss and put its shards back; returns how many requests wait. Raises UserError after MOST_LOST in a row."""
        seat.stop_clock()
        self.replaced += 1
        if seat.node not in self._counted or seat.node in _machines():  # workers that went with one machine are one loss
            self._in_a_row += 1
        self._counted.add(seat.node)
        for key in ray.get(self.line.held.remote(seat.number)):  # half-written files, where its machine's are seen here
            path = self.paths[key]
            path.with_name(f"{path.name}.{seat.pid}.tmp").unlink(missing_ok=True)
        waiting = ray.get(self.line.lost.remote(seat.number))
        reason = str(why).strip().splitlines()[0] if str(why).strip() else type(why).__name__
        if self._in_a_row >= MOST_LOST:
            raise UserError(
                f"{MOST_LOST} extract workers were lost in a row, the last one said: {reason}; finished shards are kept. Lower "
                "extract.workers or the batch sizes if memory ran out, then run `dvc repro` again"
            )
        print(f"warning: extract worker {seat.number} was lost ({reason}); starting another", file=sys.stderr, flush=True)
        self._end_actor(seat)
        return waiting

    def _wait_for_place(self, seat: Seat) -> None:
        """Until one worker fits; at once for a machine that was waited for already. Raises GetTimeoutError."""
        deadline = time.monotonic() + PLACEMENT_TIMEOUT
        while not _places(self.options, _free()):
            # that a machine is gone may be known a while after its workers are
            if time.monotonic() > deadline or (seat.node in self._waited and seat.node not in _machines()):
                raise GetTimeoutError("no room for another worker")
            time.sleep(_POLL)

    def _drop(self, seat: Seat) -> None:
        """Go on without a worker. Raises UserError when it was the last."""
        self._waited.add(seat.node)
        self._end_actor(seat)
        if not (left := len(self._working())):
            raise UserError(
                f"the last extract worker was lost, and within {PLACEMENT_TIMEOUT:g} s no machine of the Ray cluster had "
                f"{_wanted(self.options)} free for another; finished shards are kept. Bring the machine back (`ray status`) or lower "
                "extract.workers, then run `dvc repro` again"
            )
        print(
            f"warning: no machine of the Ray cluster has {_wanted(self.options)} free for extract worker {seat.number}; going on "
            f"with {left} of {self.workers} workers",
            file=sys.stderr,
            flush=True,
        )

    @staticmethod
    def _end_actor(seat: Seat) -> None:
        if seat.actor is not None:
            ray.kill(seat.actor)
        seat.actor, seat.pid = None, 0

    # -------------------------------------------------------------------------------------------------------- engine
    def prove(self, head: Head) -> None:
        """Every worker proves its own engine: machines differ."""
        self.head_ref = ray.put(head)
        for seat, proof in [(seat, seat.actor.prove.remote(self.head_ref)) for seat in self._working()]:
            try:
                ray.get(proof)
            except RayTaskError as e:
                raise _cause(e) from None
            except LOST as e:
                self._replace(seat, e)

    def extract(self, requests: Iterable[ShardRequest]) -> Iterator[FinishedShard]:
        source = iter(requests)
        ray.get(self.line.clear.remote())
        waiting = self._feed(source, 2 * self.workers)
        for seat in self._working():
            self._begin(seat)
        while running := {seat.stream: seat for seat in self.seats if seat.stream is not None}:
            ready, _ = ray.wait(list(running), num_returns=1, timeout=_POLL)
            for stream in ready:
                seat = running[stream]
                try:
                    finished, data = ray.get(next(stream))
                except StopIteration:
                    seat.stream = None
                    seat.stop_clock()
                    continue
                except RayTaskError as e:
                    raise _cause(e) from None
                except LOST as e:
                    seat.stream = None
                    waiting = self._replace(seat, e)
                    if seat.actor is not None:
                        self._begin(seat)
                    continue
                self._in_a_row = 0
                if data is not None:
                    finished = self._receive(finished, data)
                seat.shards, seat.tokens = seat.shards + 1, seat.tokens + finished.tokens
                waiting = ray.get(self.line.done.remote(seat.number, finished.key))
                yield finished
            if not any(seat.stream for seat in self.seats):  # what a lost worker still took while it was being ended
                waiting = ray.get([self.line.lost.remote(seat.number) for seat in self.seats])[-1]
            if waiting < self.workers:
                waiting = self._feed(source, 2 * self.workers - waiting)
            # a worker whose engine found the line empty has ended; a lost worker's shards may be waiting since
            if waiting:
                for seat in self._working():
                    if seat.stream is None:
                        self._begin(seat)

    def _feed(self, source: Iterator[ShardRequest], count: int) -> int:
        """Bring up to `count` more requests into the line; returns how many wait there."""
        batch = list(itertools.islice(source, count))
        self.paths |= {r.key: r.path for r in batch}
        ray.get(self.line.feed.remote(batch, len(batch) < count))
        return ray.get(self.line.done.remote(-1, ""))

    def _begin(self, seat: Seat) -> None:
        seat.started = time.monotonic()
        seat.stream = seat.actor.extract.options(num_returns="streaming", _generator_backpressure_num_objects=_AHEAD).remote(
            self.line, seat.shared
        )

    def _receive(self, shard: FinishedShard, data: np.ndarray) -> FinishedShard:
        """Write a shard that came through Ray's object store to where it was asked for; its md5 is checked on the way."""
        path = self.paths[shard.key]
        md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
        if md5 != shard.md5 or data.nbytes != shard.bytes:
            raise UserError(f"shard {shard.key} arrived damaged from another machine: run `dvc repro` again")
        tmp = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            with open(tmp, "wb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            os.replace(tmp, path)
        finally:
            tmp.unlink(missing_ok=True)
        fsync_dir(path.parent)
        return replace(shard, path=path)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int],
        temperature: float,
        top_p: float,
        seed: int,
        stop_token_ids: Sequence[int],
        done: Callable[[int, list[int]], None] | None = None,
    ) -> list[list[int]]:
        """Prompts in chunks, each to the worker that is free; an answer depends on its prompt and `seed` alone."""
        limits = list(max_new_tokens) if not isinstance(max_new_tokens, int) else [max_new_tokens] * len(prompts)
        size = max(1, -(-len(prompts) // (4 * self.workers)))
        todo = deque(range(start, min(start + size, len(prompts))) for start in range(0, len(prompts), size))
        answers: list[list[int]] = [[] for _ in prompts]
        running: dict[Any, tuple[Seat, range]] = {}
        idle, self._answering = self._working(), True
        while todo or running:
            while todo and idle:
                seat, chunk = idle.pop(), todo.popleft()
                settings = {
                    "max_new_tokens": [limits[i] for i in chunk],
                    "temperature": temperature,
                    "top_p": top_p,
                    "seed": seed,
                    "stop_token_ids": list(stop_token_ids),
                }
                running[seat.actor.generate.remote([list(prompts[i]) for i in chunk], settings)] = (seat, chunk)
            (ready,), _ = ray.wait(list(running), num_returns=1)
            seat, chunk = running.pop(ready)
            try:
                for i, answer in zip(chunk, ray.get(ready), strict=True):
                    answers[i] = answer
                    if done is not None:
                        done(i, answer)
                self._in_a_row = 0
            except RayTaskError as e:
                raise _cause(e) from None
            except LOST as e:
                todo.appendleft(chunk)
                self._replace(seat, e)
            if seat.actor is not None:
                idle.append(seat)
        self._answering = False
        return answers

    def stats(self) -> dict[str, Any]:
        """For the log: what each worker did, and how many were lost."""
        rows = [
            {
                "worker": seat.number,
                "node": seat.node,
                "shards": seat.shards,
                "tokens": seat.tokens,
                "seconds": round(seat.seconds, 3),
                "tokens_per_second": round(seat.tokens / seat.seconds, 1) if seat.seconds else None,
            }
            for seat in self.seats
        ]
        return {"workers": rows, "workers_lost": self.replaced}

    def close(self) -> None:
        if not ray.is_initialized():
            return
        # an engine with processes of its own ends them; one that is at work (the run was interrupted) would not answer
        idle = [seat.actor.close.remote() for seat in self._working() if seat.pid and seat.stream is None]
        if idle and not self._answering:
            ray.wait(idle, num_returns=len(idle), timeout=CLOSE_TIMEOUT)
        for seat in self.seats:
            self._end_actor(seat)
        if hasattr(self, "line"):
            ray.kill(self.line)
        if self.own:
            ray.shutdown()


def _elsewhere(params: Params) -> Params:
    """The parameters of one engine among several: alone in its process, in any working folder.

    With tensor parallelism vLLM must start processes of its own: it would take the cluster's other GPUs through Ray.
    """
    extract: dict[str, Any] = {"workers": 1}
    if params.extract.tensor_parallel_size > 1 and "distributed_executor_backend" not in params.extract.engine_args:
        extract["engine_args"] = {**params.extract.engine_args, "distributed_executor_backend": "mp"}
    changes: dict[str, Any] = {"extract": params.extract.model_copy(update=extract)}
    if params.verifier.model != "demo" and Path(params.verifier.model).is_dir():
        changes["verifier"] = params.verifier.model_copy(update={"model": str(Path(params.verifier.model).resolve())})
    return params.model_copy(update=changes)


def _start(workers: int) -> None:
    """Connect to RAY_ADDRESS, or start Ray here. Raises UserError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "1")
    address = os.environ.get("RAY_ADDRESS")
    common = {"include_dashboard": False} if not address else {}
    if not address:
        cpus = len(os.sched_getaffinity(0))
        # requests and answers are small; shards of this machine never go through the object store
        common |= {"num_cpus": max(cpus, workers), "object_store_memory": 512 << 20}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        # "local": without it Ray joins whatever cluster someone left running here
        ray.init(address=address or "local", log_to_driver=True, logging_level="error", **common)
    except (ConnectionError, RuntimeError, ValueError, OSError) as e:
        where = f"the Ray cluster at RAY_ADDRESS={address} cannot be reached" if address else "Ray cannot be started here"
        raise UserError(f"{where} ({str(e).splitlines()[0]}): start it, or set extract.workers: 1, which needs no Ray") from e
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray puts its own in place, which ends the stage without a word


def _machines() -> dict[str, dict[str, float]]:
    """What each machine of the cluster has: {node id: {"CPU": 8, ...}}."""
    return {n["NodeID"]: n["Resources"] for n in ray.nodes() if n["Alive"]}


def _free() -> dict[str, dict[str, float]]:
    """What each machine has free."""
    alive = _machines()
    return {node: free for node, free in available_resources_per_node().items() if node in alive}


def _places(options: dict[str, Any], machines: Mapping[str, Mapping[str, float]]) -> int:
    """How many workers fit, each on one machine."""
    need = {k: n for k, n in (("GPU", options.get("num_gpus", 0)), ("CPU", options["num_cpus"])) if n}
    return sum(min(int(has.get(k, 0) // n) for k, n in need.items()) for has in machines.values())


def _wanted(options: dict[str, Any]) -> str:
    names = ((options.get("num_gpus", 0), "GPU"), (options["num_cpus"], "CPU"))
    return " and ".join(f"{n} {name}{'s' * (n > 1)}" for n, name in names if n)


def _share(params: Params, workers: int) -> dict[str, Any]:
    """Processors and GPUs of each worker, which is on one machine. Raises UserError when the cluster does not have that many GPUs."""
    machines = _machines()
    gpus = sorted((int(has["GPU"]) for has in machines.values() if has.get("GPU")), reverse=True)
    each = params.extract.tensor_parallel_size
    if gpus:
        if sum(gpus) < each * workers:
            raise UserError(
                f"extract.workers = {workers} with tensor_parallel_size = {each} needs {each * workers} GPUs, the cluster has "
                f"{sum(gpus)}: lower one of them"
            )
        if (room := sum(n // each for n in gpus)) < workers:
            raise UserError(
                f"extract.workers = {workers} with tensor_parallel_size = {each} needs {each} GPUs on one machine for each worker; the "
                f"machines of the cluster have {', '.join(map(str, gpus))}, room for {room}: lower one of them"
            )
        return {"num_gpus": each, "num_cpus": 1}
    cpus = [int(has.get("CPU", 0)) for has in machines.values()]
    return {"num_cpus": next((n for n in range(sum(cpus) // workers, 1, -1) if sum(c // n for c in cpus) >= workers), 1)}


def _wait_for_room(options: dict[str, Any], workers: int) -> None:
    """Until the cluster has free what the workers need: without this they would wait for ever, without a word. Raises UserError."""
    deadline = time.monotonic() + PLACEMENT_TIMEOUT
    while (room := _places(options, _free())) < workers:
        if time.monotonic() > deadline:
            raise UserError(
                f"extract.workers = {workers} needs {_wanted(options)} on one machine for each, the Ray cluster has these free for {room}, "
                "and others hold them: lower extract.workers or end what holds them (`ray status`)"
            )
        time.sleep(_POLL)
