"""The draft vocabulary: which verifier tokens the drafter can propose.

A drafter with a pruned vocabulary has a smaller, faster head; a token outside it can never be drafted. `d2t` (int64 [draft])
holds offsets: draft id i is verifier id i + d2t[i]. `t2d` (bool [verifier vocabulary]) marks the verifier ids it contains.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle3dvc.errors import UserError


@dataclass(frozen=True)
class DraftVocab:
    """d2t int64 [draft], t2d bool [vocabulary]; identity when the drafter has the whole vocabulary."""

    d2t: torch.Tensor
    t2d: torch.Tensor

    @property
    def size(self) -> int:
        return len(self.d2t)

    @property
    def pruned(self) -> bool:
        return len(self.d2t) != len(self.t2d)

    @property
    def ids(self) -> torch.Tensor:
        """Verifier id of every draft id, int64 [draft], ascending."""
        return torch.arange(len(self.d2t)) + self.d2t

    def coverage(self, counts: np.ndarray) -> float:
        """Share of the counted tokens ([vocabulary]) that can be drafted; 1.0 where nothing was counted."""
        total = int(counts.sum())
        return float(counts[self.t2d.numpy()].sum() / total) if total else 1.0

    def save(self, path: Path) -> None:
        from safetensors.torch import save_file

        save_file({"d2t": self.d2t.contiguous(), "t2d": self.t2d.contiguous()}, path)


def check(d2t: torch.Tensor, t2d: torch.Tensor, where: str) -> DraftVocab:
    """The pair as a DraftVocab; raises UserError where the two do not describe the same tokens."""
    vocab = DraftVocab(d2t.long().cpu(), t2d.bool().cpu())
    ids = vocab.ids
    if len(ids) == 0 or ids.min() < 0 or ids.max() >= len(vocab.t2d) or not torch.equal(ids, torch.where(vocab.t2d)[0]):
        raise UserError(
            f"{where}: d2t and t2d do not describe the same ascending list of tokens: the vocabulary map is damaged or of another "
            "verifier; take both from the checkpoint they were trained with"
        )
    return vocab


def choose(counts: np.ndarray, size: int, required: Iterable[int] = ()) -> DraftVocab:
    """The `size` most frequent tokens of `counts` (int64 [vocabulary]); ties go to the lower id, so the choice is reproducible.

    required: ids that are in whatever their count (end-of-turn tokens). Where fewer than `size` tokens occur, the lowest unused
    ids fill up. Raises UserError where size is larger than the vocabulary.
    """
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    vocabulary = len(counts)
    if size > vocabulary:
        raise UserError(
            f"train.draft_vocab_size = {size} is larger than the verifier's vocabulary of {vocabulary}: "
            f"set train.draft_vocab_size to at most {vocabulary}"
        )
    if size == vocabulary:
        return DraftVocab(torch.zeros(size, dtype=torch.long), torch.ones(vocabulary, dtype=torch.bool))
    required = sorted({int(i) for i in required if 0 <= int(i) < vocabulary})
    if len(required) > size:
        raise UserError(
            f"train.draft_vocab_size = {size} is smaller than the {len(required)} end and special tokens it must hold: raise it"
        )
    first = int(counts.max(initial=0)) + 1  # more frequent than anything: chosen before all others
    frequency = {int(i): int(counts[i]) for i in np.flatnonzero(counts)} | dict.fromkeys(required, first)
    return DraftVocab(*build_vocab_mappings_from_distribution(frequency, size, vocabulary))


def required_ids(verifier: str | Path, counts: np.ndarray) -> list[int]:
    """End tokens of the verifier, and the special tokens that occur among the supervised tokens (`counts`, [vocabulary]).

    A drafter that cannot draft the end of a turn loses the last draft of every answer.
    """
    folder, found = Path(verifier), set()

    def read(name: str) -> dict[str, Any]:
        path = folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    for name in ("config.json", "generation_config.json"):
        eos = read(name).get("eos_token_id")
        found.update(eos if isinstance(eos, list) else [eos] if eos is not None else [])
    added = [t for t in read("tokenizer.json").get("added_tokens", []) if t.get("special")]
    decoder = read("tokenizer_config.json").get("added_tokens_decoder", {})
    special = {t["id"] for t in added} | {int(i) for i, t in decoder.items() if t.get("special")}
    return sorted(found | {i for i in special if i < len(counts) and counts[i] > 0})
