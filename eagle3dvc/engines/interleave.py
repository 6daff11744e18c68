"""The order in which the prompts of several shards go to an engine."""

from __future__ import annotations

import heapq

from eagle3dvc.hidden_states.format import ShardRequest


class Interleave:
    """Feeds `ways` shards at a time, each begun when the one before it is 1/ways through.

    A shard is hashed beside its writing, at about 0.6 GB/s, while a fast verifier makes several GB/s of states. So several
    shards fill at once, each as slowly as a thread can follow, and they end one after the other, so that buffers come free evenly.
    The last ones end together: no thread is left alone with what the others have finished. So the last `early` shards begin at
    once, when no others follow (`due`), and what is left of all open ones is then fed evenly (`last`).
    """

    def __init__(self, ways: int, early: int = 0):
        self.ways, self.early = ways, early
        self._heap: list[tuple[float, int, int, float, ShardRequest]] = []  # when, number of the shard, next row, step, shard
        self._opened = 0
        self._now = self._next_start = 0.0

    def due(self, left: int | None = None) -> bool:
        """Whether the next shard should be opened before another prompt is taken. left: how many are still to be opened, None
        where that is not known."""
        if left is not None and left <= self.early:
            return True
        return not self._heap or self._heap[0][0] >= self._next_start

    def open(self, request: ShardRequest) -> None:
        start = max(self._now, self._next_start)
        heapq.heappush(self._heap, (start, self._opened, 0, 1 / len(request.token_ids), request))
        self._opened += 1
        self._next_start = start + 1 / self.ways

    def last(self) -> None:
        """No shard follows: what is left of the open ones is fed so that all end at the same time."""
        left = [(number, row, request) for _, number, row, _, request in self._heap]
        steps = [1 / (len(request.token_ids) - row) for _, row, request in left]
        self._heap = [(self._now + step, *entry[:2], step, entry[2]) for step, entry in zip(steps, left, strict=True)]
        heapq.heapify(self._heap)

    def next(self) -> tuple[ShardRequest, int] | None:
        """The shard and the row of the next prompt; None where every open shard is fed."""
        if not self._heap:
            return None
        self._now, number, row, step, request = heapq.heappop(self._heap)
        if row + 1 < len(request.token_ids):
            heapq.heappush(self._heap, (self._now + step, number, row + 1, step, request))
        return request, row
