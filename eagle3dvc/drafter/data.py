"""From packed shards to batches: what a row of a batch means, which samples share a batch, and how a batch gets to the device.

One row a token. A sample x_0..x_{T-1} with states g (auxiliary layers) and y (input of the final norm) gives, for its row r:

    input    x_{r+1}      the token the verifier has just emitted
    hidden   g_r          the verifier's states one token earlier (EAGLE-3 lags by one)
    target   y_{r+1}      norm + head of it is the verifier's distribution for x_{r+2}
    mask     loss_mask of x_{r+2}: the token the target predicts, not the one it stands on
    position r + 1

Test-time-training step j compares row r with the target and the mask of row r + j. Rows T-2 and T-1 have no next token and are
masked. Samples stand one after the other in a batch with their T rows each, so states are copied once and as they are stored;
row T-1 belongs to no document (-1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from eagle3dvc.errors import UserError

BLOCK = 128  # rows of a flex-attention block: batches on an accelerator are whole blocks
OPEN_BINS = 32  # more gives fuller batches and costs planning time; 32 fills over 97 % of ordinary chat data


def target_mask(loss_mask: torch.Tensor, ttt_steps: int) -> torch.Tensor:
    """bool [T] -> bool [T]: row r says whether x_{r+2} is to be learnt.

    The first ttt_steps - 1 rows are masked: in a packed batch, step j would compare them with the end of the sample before.
    """
    mask = torch.zeros_like(loss_mask)
    mask[:-2] = loss_mask[2:]
    mask[: ttt_steps - 1] = False
    return mask


@dataclass(frozen=True)
class Survey:
    """What the masks say, without reading states: targets a sample (int64 [samples]) and supervised tokens by id and split."""

    targets: np.ndarray
    counts: dict[str, np.ndarray]


def survey(prompts: str, vocab_size: int, ttt_steps: int) -> Survey:
    """One pass over the prompt shards; raises UserError for a token outside the verifier's vocabulary."""
    from eagle3dvc.prompts.shards import iter_samples

    targets, counts = [], {s: np.zeros(vocab_size, dtype=np.int64) for s in ("train", "heldout")}
    for sample in iter_samples(prompts):
        mask = np.asarray(sample.loss_mask, dtype=bool)
        tokens = np.asarray(sample.token_ids)
        if len(tokens) and tokens.max() >= vocab_size:
            raise UserError(
                f"sample {sample.sample_id} has token {tokens.max()}, the verifier's vocabulary ends at {vocab_size - 1}: "
                f"{prompts} was made for another verifier; run `dvc repro`"
            )
        targets.append(int(target_mask(torch.from_numpy(mask), ttt_steps).sum()) if len(mask) > 2 else 0)
        counts[sample.split] += np.bincount(tokens[mask], minlength=vocab_size)
    return Survey(np.asarray(targets, dtype=np.int64), counts)


def pack(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Positions 0..n-1 in batches of at most `capacity` rows, in the order given, best fit over a few open batches.

    Raises ValueError where one length exceeds the capacity.
    """
    if len(lengths) and lengths.max() > capacity:
        raise ValueError(f"length {lengths.max()} exceeds the capacity {capacity}")
    done: list[np.ndarray] = []
    bins: list[list[int]] = []
    room = np.empty(0, dtype=np.int64)
    for i, length in enumerate(lengths.tolist()):
        fits = np.flatnonzero(room >= length)
        if len(fits):
            b = int(fits[np.argmin(room[fits])])
            bins[b].append(i)
            room[b] -= length
        elif len(bins) < OPEN_BINS:
            bins.append([i])
            room = np.append(room, capacity - length)
        else:
            b = int(np.argmin(room))
            done.append(np.asarray(bins[b]))
            bins[b], room[b] = [i], capacity - length
    return done + [np.asarray(b) for b in bins]


class Plan:
    """The endless sequence of micro-batches: which samples are in batch n. Depends on seed, samples and capacity only, so neither
    the number of workers or processes nor an interruption changes it.

    indices, lengths, targets: the usable samples (their numbers in the cache, rows and targets), all int64 [n].
    """

    def __init__(self, indices: np.ndarray, lengths: np.ndarray, targets: np.ndarray, capacity: int, seed: int):
        self.indices, self.lengths, self.targets, self.capacity, self.seed = indices, lengths, targets, capacity, seed
        self._starts = [0]  # first batch of each epoch planned so far
        self._epoch, self._batches = -1, []
        self.epoch_batches = len(self._plan(0))

    def __len__(self) -> int:
        return self.epoch_batches

    def _plan(self, epoch: int) -> list[np.ndarray]:
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(len(self.indices))
        batches = [order[b] for b in pack(self.lengths[order], self.capacity)]
        return [batches[i] for i in rng.permutation(len(batches))]

    def _locate(self, n: int) -> np.ndarray:
        epoch = 0
        while True:
            if epoch + 1 < len(self._starts):
                if n < self._starts[epoch + 1]:
                    break
            else:
                self._epoch, self._batches = epoch, self._plan(epoch)
                self._starts.append(self._starts[epoch] + len(self._batches))
                if n < self._starts[-1]:
                    break
            epoch += 1
        if self._epoch != epoch:
            self._epoch, self._batches = epoch, self._plan(epoch)
        return self._batches[n - self._starts[epoch]]

    def batch(self, n: int) -> list[int]:
        """Numbers of the samples in micro-batch n, in batch order."""
        return [int(i) for i in self.indices[self._locate(n)]]

    def batch_targets(self, n: int) -> int:
        """Supervised targets in micro-batch n."""
        return int(self.targets[self._locate(n)].sum())


@dataclass
class Batch:
    """One packed micro-batch on the device.

    inputs: the model's arguments, each [1, rows, ...]. samples: numbers of the samples. tokens: rows that belong to samples.
    targets: supervised targets. wait: seconds the training loop waited for it.
    """

    inputs: dict[str, torch.Tensor]
    samples: list[int]
    tokens: int
    targets: int
    wait: float = 0.0


def assemble(
    items: Sequence[Any], *, ttt_steps: int, rows: int, dtype: torch.dtype, pin: bool = False
) -> dict[str, torch.Tensor]:
    """Pack items (hidden_states [T, layers, H], token_ids [T], loss_mask [T]) one after the other into host buffers.

    Returns states [rows+1, layers*H], tokens [rows+1], document_ids [rows], loss_mask [rows], position_ids [rows]; the row after
    the last makes both shifts by one plain views. Rows after the last sample are zeros of document -1.
    """
    width = items[0].hidden_states[0].numel()
    states = torch.empty(rows + 1, width, dtype=dtype, pin_memory=pin)
    tokens = torch.zeros(rows + 1, dtype=torch.long, pin_memory=pin)
    documents = torch.full((rows,), -1, dtype=torch.long, pin_memory=pin)
    mask = torch.zeros(rows, dtype=torch.bool, pin_memory=pin)
    positions = torch.zeros(rows, dtype=torch.long, pin_memory=pin)
    at = 0
    for number, item in enumerate(items):
        length = len(item.token_ids)
        states[at : at + length].copy_(item.hidden_states.reshape(length, width))
        tokens[at : at + length] = item.token_ids
        documents[at : at + length - 1] = number
        mask[at : at + length] = target_mask(item.loss_mask, ttt_steps)
        positions[at : at + length] = torch.arange(1, length + 1)
        at += length
    states[at:] = 0
    return {"states": states, "tokens": tokens, "document_ids": documents, "loss_mask": mask, "position_ids": positions}


def model_inputs(host: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """The model's arguments as views of assembled buffers (on any device). layers: stored layers, the last is the target."""
    states = host["states"]
    aux = states.shape[1] // layers * (layers - 1)
    return {
        "hidden_states": states[None, :-1, :aux],
        "verifier_last_hidden_states": states[None, 1:, aux:],
        "input_ids": host["tokens"][None, 1:],
        "document_ids": host["document_ids"][None],
        "loss_mask": host["loss_mask"][None],
        "position_ids": host["position_ids"][None],
    }


def padded_rows(rows: int, device: torch.device, capacity: int) -> int:
    """Rows of a batch: what is used on a CPU; one fixed number of whole blocks on an accelerator, so nothing compiles twice."""
    return rows if device.type == "cpu" else -(-capacity // BLOCK) * BLOCK


class Loader:
    """Iterates one process's share of the plan from a position on, assembled ahead of time by threads.

    Batch n of the plan goes to process n % world. On CUDA a thread fills pinned memory and a side stream copies it, so the
    copies of the next batches run beside the computation; copying releases the interpreter lock, hence threads, which share the
    mapped shards. workers 0 assembles in the calling thread.
    """

    def __init__(
        self,
        data: Any,
        plan: Plan,
        *,
        device: torch.device,
        dtype: torch.dtype,
        ttt_steps: int,
        start: int = 0,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
    ):
        self.data, self.plan, self.device, self.dtype, self.ttt_steps = data, plan, device, dtype, ttt_steps
        self.next, self.world = start + rank, world
        self.layers = len(data.layer_ids)
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="batch") if workers else None
        self._ahead: deque[Future] = deque()
        self._depth = max(2, workers)

    def _build(self, numbers: list[int], targets: int) -> tuple[Batch, Any]:
        items = [self.data[i] for i in numbers]
        tokens = sum(len(i.token_ids) for i in items)
        rows = padded_rows(tokens, self.device, self.plan.capacity)
        host = assemble(items, ttt_steps=self.ttt_steps, rows=rows, dtype=self.dtype, pin=self._cuda)
        for i in numbers:
            self.data.release(i)
        copied = None
        if self._cuda:
            with torch.cuda.stream(self._stream):
                host = {k: v.to(self.device, non_blocking=True) for k, v in host.items()}
                copied = torch.cuda.Event()
                copied.record(self._stream)
        return Batch(model_inputs(host, self.layers), numbers, tokens, targets), copied

    def _submit(self) -> None:
        numbers, targets = self.plan.batch(self.next), self.plan.batch_targets(self.next)
        self.next += self.world
        self._ahead.append(self._pool.submit(self._build, numbers, targets))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        import time

        began = time.perf_counter()
        if self._pool is None:
            numbers, targets = self.plan.batch(self.next), self.plan.batch_targets(self.next)
            self.next += self.world
            batch, copied = self._build(numbers, targets)
        else:
            while len(self._ahead) < self._depth:
                self._submit()
            batch, copied = self._ahead.popleft().result()
            self._submit()
        if copied is not None:
            current = torch.cuda.current_stream(self.device)
            if not copied.query():  # the copy is not done: what the device would wait for, the loop waits for, and counts
                copied.synchronize()
            current.wait_event(copied)
            for tensor in batch.inputs.values():
                tensor.record_stream(current)
        batch.wait = time.perf_counter() - began
        return batch

    def close(self) -> None:
        if self._pool is not None:
            for future in self._ahead:
                future.cancel()
            self._pool.shutdown(wait=True)
            self._pool = None


def usable(data: Any, found: Survey, split: str, capacity: int) -> np.ndarray:
    """Numbers of the split's samples that have something to learn; raises UserError where one does not fit into a batch."""
    chosen = data.splits[split]
    chosen = chosen[found.targets[chosen] > 0]
    lengths = data.lengths[chosen]
    if len(lengths) and lengths.max() > capacity:
        worst = int(chosen[np.argmax(lengths)])
        raise UserError(
            f"sample {data[worst].sample_id} has {lengths.max()} tokens, more than train.tokens_per_batch = {capacity}: raise "
            f"train.tokens_per_batch to at least {lengths.max()} or lower prepare.max_length"
        )
    return chosen
