"""The exact greedy acceptance length of a drafter, without an engine.

Chain drafting with K tokens from position i sees the true text x_0..x_{i+1} and the verifier's states g_0..g_i. While its drafts
are accepted they equal the text, so one teacher-forced pass gives the drafts of every position at once; a walk then visits the
positions an engine would visit: start at the last token before an answer, move on by accepted + 1. This reproduces vLLM's
counters (drafts, accepted, per position) exactly in float32. Averaging over all positions instead counts long accepted runs
again and again and reports far too much.

A token outside the draft vocabulary cannot be drafted and so counts as wrong. What lies past the end of an answer cannot be
verified and counts as not accepted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from eagle3dvc.drafter import guards
from eagle3dvc.drafter.data import BLOCK, assemble, model_inputs, pack
from eagle3dvc.errors import UserError

WALK_ROWS = 2048  # rows of one pass on a CPU: attention is quadratic in them
HEAD_ROWS = 1024  # rows whose full-vocabulary logits exist at a time


@dataclass(frozen=True)
class Acceptance:
    """Counters of a walk.

    drafts: chains started. accepted: drafted tokens accepted. by_position: accepted at draft position 1..K. by_source: the same
    a source ({"drafts", "accepted", "by_position", "acceptance_length"}). supervised, agreed: answer tokens, and those of them that
    are the verifier's own greedy choice. per_sample: int64 [samples, 2] of drafts and accepted, in no particular order.
    loss_sum, targets: the training loss of the same pass summed over its targets; 0 targets where it was not asked for.
    """

    drafts: int
    accepted: int
    by_position: list[int]
    by_source: dict[str, dict[str, Any]]
    supervised: int
    agreed: int
    per_sample: np.ndarray
    loss_sum: float = 0.0
    targets: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens an engine emits a verification step: 1 + accepted / drafts."""
        return 1 + self.accepted / self.drafts

    @property
    def greedy_agreement(self) -> float:
        """Share of the answer tokens that are the verifier's own greedy choice; 1.0 for its own answers."""
        return self.agreed / self.supervised if self.supervised else 0.0

    @property
    def loss(self) -> float | None:
        return self.loss_sum / self.targets if self.targets else None

    @property
    def rate_by_position(self) -> list[float]:
        """Share of the chains whose draft 1..K was accepted; they add up to acceptance_length - 1."""
        return [n / self.drafts for n in self.by_position]

    def interval(self, resamples: int = 1000, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
        """Bootstrap confidence interval of the acceptance length; whole samples are drawn, since their chains hang together."""
        return bootstrap(self.per_sample, resamples, level, seed)


def bootstrap(per_sample: np.ndarray, resamples: int, level: float, seed: int) -> tuple[float, float]:
    """Percentile interval of 1 + accepted / drafts. per_sample: [samples, 2] of drafts and accepted."""
    rng, n = np.random.default_rng(seed), len(per_sample)
    lengths = np.empty(resamples)
    for i in range(resamples):
        drafts, accepted = per_sample[rng.integers(0, n, n)].sum(0)
        lengths[i] = 1 + accepted / drafts if drafts else 1.0
    low, high = np.quantile(lengths, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def accepted_lengths(
    drafts: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor, greedy: torch.Tensor | None
) -> torch.Tensor:
    """How many of the K drafts from each position would be accepted; int64 [T].

    drafts: verifier ids [K, T]; drafts[j-1, i] is for token i + 1 + j. tokens, mask: the text and what of it is the answer, [T].
    greedy: None where the text is the verifier's own greedy output, else its choice for token p + 1 at p, [T]: a draft is then
    accepted when it is that choice, and the chain goes on only while the choice is also the text.
    """
    depth, length = drafts.shape
    counts = torch.zeros(length, dtype=torch.long)
    alive = torch.zeros(length, dtype=torch.bool)
    alive[:-1] = mask[1:]
    for j in range(1, depth + 1):
        left = length - 1 - j  # positions that have a token i + 1 + j
        if left <= 0:
            break
        alive[left:] = False
        alive[:left] &= mask[1 + j :]
        text = tokens[1 + j :]
        want = text if greedy is None else greedy[j : j + left]
        alive[:left] &= drafts[j - 1, :left] == want
        counts += alive
        if greedy is not None:
            alive[:left] &= want == text
    return counts


def spans(mask: np.ndarray) -> list[tuple[int, int]]:
    """[first, past-the-last) of every run of supervised tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def visit(counts: np.ndarray, mask: np.ndarray, depth: int, tail: int = 0) -> tuple[int, np.ndarray]:
    """Walk the answers of one sample: (chains started, accepted by draft position int64 [depth]).

    tail: so many last tokens of every answer start no chain (they may still be accepted); an engine told to stop after n tokens
    stops like this when the text goes on.
    """
    chains, reached = 0, np.zeros(depth + 1, dtype=np.int64)
    for first, end in spans(mask):
        i = max(first - 1, 0)
        while i + 1 < end - tail - 1:
            n = int(counts[i])
            chains += 1
            reached[n] += 1
            i += n + 1
    # accepted at position j: chains with at least j accepted
    return chains, reached[::-1].cumsum()[::-1][1:].copy()


def _to(head: Any, device: torch.device) -> Any:
    moved = {f.name: v.to(device) for f in dataclasses.fields(head) if torch.is_tensor(v := getattr(head, f.name))}
    return dataclasses.replace(head, **moved)


def _groups(samples: Iterable[Any], capacity: int) -> Iterable[list[Any]]:
    """Samples in the order given, packed over a window so that no more than a few batches are in memory."""
    window: list[Any] = []
    rows = 0
    for sample in samples:
        window.append(sample)
        rows += len(sample.token_ids)
        if rows >= 8 * capacity:
            yield from _packed(window, capacity)
            window, rows = [], 0
    if window:
        yield from _packed(window, capacity)


def _packed(window: list[Any], capacity: int) -> Iterable[list[Any]]:
    lengths = np.asarray([len(s.token_ids) for s in window])
    for batch in pack(lengths, max(capacity, int(lengths.max()))):
        yield [window[i] for i in batch]


def walk(drafter: Any, head: Any, samples: Iterable[Any], draft_tokens: int, on_policy: bool, **options: Any) -> Acceptance:
    """:func:`count`, which see for the arguments; raises UserError where no sample has an answer of at least two tokens."""
    with guards.uncompiled():
        return checked(count(drafter, head, samples, draft_tokens, on_policy, **options))


def checked(found: Acceptance) -> Acceptance:
    if not found.drafts:
        raise UserError(
            "no held-out sample has an answer of at least two tokens, so no acceptance length can be measured: raise "
            "prepare.heldout_fraction or max_samples"
        )
    return found


def merge(parts: Sequence[Acceptance]) -> Acceptance:
    """The counters of several walks over different samples, added up."""
    sources: dict[str, np.ndarray] = {}
    for part in parts:
        for name, row in part.by_source.items():
            counts = np.asarray([row["drafts"], *row["by_position"]], dtype=np.int64)
            sources[name] = sources[name] + counts if name in sources else counts
    return _acceptance(
        sources,
        len(parts[0].by_position),
        supervised=sum(p.supervised for p in parts),
        agreed=sum(p.agreed for p in parts),
        per_sample=np.concatenate([p.per_sample for p in parts]),
        loss_sum=sum(p.loss_sum for p in parts),
        targets=sum(p.targets for p in parts),
    )


def _acceptance(by_source: dict[str, np.ndarray], depth: int, **rest: Any) -> Acceptance:
    total = sum(by_source.values(), np.zeros(depth + 1, dtype=np.int64))
    return Acceptance(
        drafts=int(total[0]),
        accepted=int(total[1:].sum()),
        by_position=[int(n) for n in total[1:]],
        by_source={s: _source(row) for s, row in sorted(by_source.items())},
        **rest,
    )


@torch.no_grad()
def count(
    drafter: Any,
    head: Any,
    samples: Iterable[Any],
    draft_tokens: int,
    on_policy: bool,
    *,
    tail: int = 0,
    rows: int | None = None,
    loss_kwargs: dict[str, Any] | None = None,
) -> Acceptance:
    """Count what greedy chain drafting with `draft_tokens` drafts would accept on the samples.

    drafter: Eagle3DraftModel in eval mode. head: the verifier's Head (for its greedy choices). samples: items of the reader, with
    hidden_states [T, layers, H], token_ids [T], loss_mask [T] (the answers), source. on_policy: the text is the verifier's own
    greedy output. rows: packed rows a pass. loss_kwargs: model arguments (ttt_step_loss_decay, loss_config) to compute the
    training loss in the same pass.
    """
    device = drafter.embed_tokens.weight.device
    dtype = drafter.fc.weight.dtype
    head = _to(head, device)
    capacity = rows or (WALK_ROWS if device.type == "cpu" else 4 * WALK_ROWS)
    per_sample: list[tuple[int, int]] = []
    by_source: dict[str, np.ndarray] = {}
    supervised = agreed = 0
    loss_sum, targets = 0.0, 0
    for group in _groups(samples, capacity):
        used = sum(len(s.token_ids) for s in group)
        padded = used if device.type == "cpu" else -(-max(used, capacity) // BLOCK) * BLOCK
        host = assemble(group, ttt_steps=draft_tokens, rows=padded, dtype=dtype if device.type == "cpu" else _stored(group))
        batch = {k: v.to(device) for k, v in host.items()}
        batch["states"] = batch["states"].to(dtype)  # after the copy, which moves half as many bytes
        inputs = model_inputs(batch, group[0].hidden_states.shape[1])
        last = batch["states"][:used, -head.norm.shape[0] :]
        choice = torch.cat([head.logits(part.float()).argmax(-1) for part in last.split(HEAD_ROWS)]).cpu()
        if loss_kwargs is None:
            inputs.pop("verifier_last_hidden_states")
            drafts = drafter(**inputs, ttt_steps=draft_tokens)
        else:
            drafts, loss, _ = drafter(**inputs, ttt_steps=draft_tokens, **loss_kwargs)
            n = int(host["loss_mask"].sum())
            loss_sum, targets = loss_sum + float(loss) * n, targets + n
        drafts = torch.stack([d[0] for d in drafts])[:, :used]
        if drafter.use_draft_vocab:
            drafts = drafts + drafter.d2t[drafts]
        drafts, at = drafts.cpu(), 0
        for sample in group:
            length = len(sample.token_ids)
            tokens, mask = torch.as_tensor(sample.token_ids).long(), torch.as_tensor(sample.loss_mask).bool()
            greedy = choice[at : at + length]
            counts = accepted_lengths(drafts[:, at : at + length], tokens, mask, None if on_policy else greedy)
            chains, reached = visit(counts.numpy(), mask.numpy(), draft_tokens, tail)
            at += length
            supervised += int(mask[1:].sum())
            agreed += int((mask[1:] & (greedy[:-1] == tokens[1:])).sum())
            per_sample.append((chains, int(reached.sum())))
            row = by_source.setdefault(sample.source, np.zeros(draft_tokens + 1, dtype=np.int64))
            row += np.concatenate([[chains], reached])
    return _acceptance(
        by_source,
        draft_tokens,
        supervised=supervised,
        agreed=agreed,
        per_sample=np.asarray(per_sample, dtype=np.int64).reshape(-1, 2),
        loss_sum=loss_sum,
        targets=targets,
    )


def _stored(group: Sequence[Any]) -> torch.dtype:
    return group[0].hidden_states.dtype


def _source(row: np.ndarray) -> dict[str, Any]:
    drafts, accepted = int(row[0]), int(row[1:].sum())
    return {
        "drafts": drafts,
        "accepted": accepted,
        "by_position": [int(n) for n in row[1:]],
        "acceptance_length": 1 + accepted / drafts if drafts else 1.0,
    }
