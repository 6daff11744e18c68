"""The prepare stage: rows of all sources, one pass, into prompt shards, a manifest and the list of rejected rows.

One pass in the sources' order, batch by batch: normalise, render, tokenise, truncate, drop what was seen before, choose the
split, write. Memory holds one batch, one unfinished shard and 16 bytes a sample seen; where the verifier answers also the
answers, 4 bytes a token.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from eagle3dvc.errors import UserError
from eagle3dvc.params import Params
from eagle3dvc.prompts import shards
from eagle3dvc.prompts.conversations import Conversation, Rejected, from_row
from eagle3dvc.prompts.render import Encoded, Renderer, load_renderer
from eagle3dvc.prompts.sources import Row, mixed, open_sources, shuffled
from eagle3dvc.stage import put_folder, root, write_json

_BATCH = 256  # rows rendered and tokenised together
_DRY = 100_000  # an endless source that gave no new sample in so many rows has no more
_NOT_TOKENIZER = ("verifier.json", "config.json", "generation_config.json")


def build(
    params: Params,
    verifier: str | Path = "data/verifier",
    out: str | Path = "data/prompts",
    notice: Callable[[str], None] = print,
    log: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write `out` from prepare.sources with the tokenizer in the folder `verifier`; returns the stage's metrics.

    What lies at `out` is replaced only by a finished folder. Raises UserError for anything that makes the whole run
    useless: a source that cannot be read, no usable row, more than prepare.max_rejected_fraction of them rejected.
    """
    _check_length(params.prepare.max_length, Path(verifier))
    out = Path(out)
    unfinished = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a run that was killed
    sources = open_sources(params)
    log = {} if log is None else log

    @cache  # when a row needs it: unreadable files say so within a second
    def renderer() -> Renderer:
        began = time.monotonic()
        made = load_renderer(params, verifier)
        log["seconds_tokenizer"] = round(time.monotonic() - began, 3)
        return made

    unfinished.mkdir(parents=True)
    try:
        with _responder(params, verifier, renderer, log, out) as responder:
            run = _Run(params, renderer, unfinished, notice, responder)
            began, before = time.monotonic(), log.get("seconds_tokenizer", 0.0)
            run.take_all(sources)
            metrics = run.finish(Path(verifier))
            apart = sum(log.get(f"seconds_{k}", 0.0) for k in ("tokenizer", "load_engine", "answers")) - before
            # what more samples add to, less what is fixed or has a rate of its own; `plan` reads it
            log["seconds_growing"] = round(max(0.0, time.monotonic() - began - apart), 3)
            if responder is not None:
                responder.save(unfinished)
            put_folder(unfinished, out)
            if responder is not None:
                responder.extract(out)  # the engine is loaded: the states of what it wrote come from the same session
    except UserError:
        rejected = unfinished / "rejected.jsonl"
        if rejected.is_file() and rejected.stat().st_size:
            kept = root() / "logs" / "rejected.jsonl"
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(rejected, kept)
        raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return metrics


def _responder(params: Params, verifier: str | Path, renderer: Callable[[], Renderer], log: dict[str, Any], out: Path):
    """What writes the answers, a context manager; it gives None where the answers are those of the data set."""
    if params.prepare.responses == "dataset":
        return nullcontext()
    from eagle3dvc.responses import Responder
    from eagle3dvc.verifier import load_info

    return Responder(params, load_info(verifier), renderer(), log, str(out))


class _Run:
    """One pass: what has been accepted, rejected and seen so far."""

    def __init__(self, params: Params, renderer: Callable[[], Renderer], folder: Path, notice, responder=None):
        self.responder = responder
        self.params, self.prepare, self.renderer, self.folder, self.notice = params, params.prepare, renderer, folder, notice
        self.writer = shards.ShardWriter(folder, self.prepare.samples_per_shard)
        self.rejected = open(folder / "rejected.jsonl", "w", encoding="utf-8")  # noqa: SIM115 - closed in finish
        self.seen: set[int] = set()
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.by_source: dict[str, Counter[str]] = {}
        self.revisions: dict[str, str] = {}  # commits of the Hub datasets
        self.first_rejected: str | None = None

    def take_all(self, sources) -> None:
        endless = any(source.endless for source in sources)
        self.by_source = {source.name: Counter() for source in sources}
        self.revisions = {source.name: source.revision for source in sources if source.revision}
        for source in sources:
            self.by_source[source.name].update(samples=0)
            if source.note:
                self.notice(f"prepare: {source.note}")
        try:
            dry = 0
            rows = shuffled(mixed(sources, self._ended), self.prepare.shuffle_buffer, self.params.seed)
            for where, item in self._encoded(rows):
                dry = 0 if self._take(where, item) else dry + 1
                if self.counts["samples"] == self.params.max_samples or (endless and dry == _DRY):
                    return
                self._check_rejected(self.params.max_samples)
        finally:
            self.rejected.close()

    def _ended(self, source, rows: int) -> None:
        self.notice(f"prepare: the source {source.name} has no more than {rows} rows")

    def _encoded(self, rows: Iterator[Row]) -> Iterator[tuple[Row, Encoded | Rejected]]:
        """Rows in order, each with its tokens or the reason it is rejected."""
        while batch := list(islice(rows, self._batch())):
            items: list[Conversation | Rejected] = []
            for row in batch:
                try:
                    items.append(from_row(row, self.prepare.system_prompt))
                except Rejected as e:
                    items.append(e)
            usable = [x for x in items if isinstance(x, Conversation)]
            encoded = iter((self.responder or self.renderer()).encode(usable) if usable else [])
            for row, item in zip(batch, items):
                got = next(encoded) if isinstance(item, Conversation) else item
                for sample in got if isinstance(got, list) else [got]:
                    yield row, sample

    def _batch(self) -> int:
        """Rows taken together; where the verifier answers, no more than are wanted, and many, for full engine batches."""
        return min(4096, self.params.max_samples - self.counts["samples"]) if self.responder else _BATCH

    def _take(self, row: Row, item: Encoded | Rejected) -> bool:
        """Accept or reject one row; true if it became a sample."""
        if isinstance(item, Rejected):
            return self._reject(row, item)
        token_ids, loss_mask = item.token_ids, item.loss_mask
        if truncated := len(token_ids) > (limit := self.prepare.max_length):
            if not self.prepare.keep_truncated:
                return self._reject(row, Rejected("too_long", f"it has {len(token_ids)} tokens, prepare.max_length is {limit}"))
            token_ids, loss_mask = token_ids[:limit], loss_mask[:limit]
        if not loss_mask.any():
            reason = "truncated_before_answer" if truncated else "empty_mask"
            return self._reject(row, Rejected(reason, f"no supervised token in its first {len(token_ids)} tokens"))
        name = shards.sample_id(token_ids, loss_mask)
        if (key := int(name, 16)) in self.seen:
            self.counts["duplicates"] += 1
            return False
        self.seen.add(key)
        split = shards.split_of(name, self.prepare.heldout_fraction)
        self.writer.add(shards.Sample(name, token_ids, loss_mask, row.source, split))
        self.counts.update(
            samples=1,
            tokens=len(token_ids),
            supervised_tokens=int(loss_mask.sum()),
            truncated=int(truncated),
            unsupervised_turns=item.missed,
            heldout_samples=int(split == shards.HELDOUT),
        )
        self.by_source[row.source].update(samples=1, tokens=len(token_ids))
        if self.counts["samples"] % 10_000 == 0:
            self.notice(f"prepare: {self.counts['samples']:,} of {self.params.max_samples:,} samples")
        return True

    def _reject(self, row: Row, why: Rejected) -> bool:
        self.reasons[why.reason] += 1
        self.first_rejected = self.first_rejected or f"{row.where}: {why.reason}: {why.detail}"
        line = {"source": row.source, "row": row.number, "where": row.where, "reason": why.reason, "detail": why.detail}
        self.rejected.write(json.dumps(line) + "\n")
        return False

    def _check_rejected(self, samples: int) -> None:
        """Raises UserError once the rejected rows exceed their share of `samples` accepted ones.

        With max_samples in place of those accepted so far this is exact as well as early: no later row could bring the
        share below the limit.
        """
        rejected, limit = self.reasons.total(), self.prepare.max_rejected_fraction
        if rejected <= limit * (rejected + samples):
            return
        accepted, kinds = self.counts["samples"], ", ".join(f"{n} {reason}" for reason, n in self.reasons.most_common())
        raise UserError(
            f"{rejected} of {rejected + accepted} rows rejected ({kinds}), more than prepare.max_rejected_fraction = {limit} "
            f"allows; the first is {self.first_rejected}; all are listed in logs/rejected.jsonl"
        )

    def finish(self, verifier: Path) -> dict[str, Any]:
        """Write the last shard and the manifest; returns the metrics. Raises UserError where there is nothing to keep."""
        self._check_rejected(self.counts["samples"])
        if not self.counts["samples"]:
            raise UserError(f"no row of prepare.sources can be used; the first is {self.first_rejected}")
        self.writer.flush()
        counts = {key: self.counts[key] for key in ("samples", "tokens", "supervised_tokens", "heldout_samples")}
        missing = self.params.max_samples - counts["samples"]
        metrics = {
            **counts,
            "rejected": self.reasons.total(),
            "rejected_by_reason": dict(sorted(self.reasons.items())),
            **{key: self.counts[key] for key in ("duplicates", "truncated", "unsupervised_turns")},
            "missing_samples": missing,
            "by_source": {name: dict(sorted(c.items())) for name, c in self.by_source.items()},
            **({"revisions": self.revisions} if self.revisions else {}),
            **(self.responder.counts if self.responder else {}),
        }
        manifest = {
            "format": shards.FORMAT,
            **counts,
            "shards": self.writer.shards,
            "max_length": self.prepare.max_length,
            "responses": self.prepare.responses,
            **({"answers": self.responder.key} if self.responder else {}),
            "tokenizer": _fingerprint(self.renderer(), verifier),
        }
        write_json(self.folder / "manifest.json", manifest)
        self._tell(metrics)
        return metrics

    def _tell(self, metrics: dict[str, Any]) -> None:
        if metrics["missing_samples"]:
            self.notice(
                f"prepare: the sources hold only {metrics['samples']:,} usable samples of the {self.params.max_samples:,} "
                f"asked for in max_samples; all of them are used"
            )
        if metrics["unsupervised_turns"]:
            self.notice(
                f"prepare: {metrics['unsupervised_turns']:,} earlier assistant turns are not supervised: "
                f"the chat template renders them in another way once they are history"
            )
        if self.prepare.heldout_fraction and not metrics["heldout_samples"]:
            self.notice("prepare: the held-out split is empty: raise prepare.heldout_fraction or max_samples")
        self.notice(
            f"prepare: {metrics['samples']:,} samples ({metrics['heldout_samples']:,} held out), {metrics['tokens']:,} tokens, "
            f"{metrics['supervised_tokens']:,} supervised; {metrics['rejected']:,} rows rejected, "
            f"{metrics['duplicates']:,} duplicates dropped, {metrics['truncated']:,} truncated"
        )


def _check_length(max_length: int, verifier: Path) -> None:
    """Raises UserError where samples may be longer than the verifier can read: its states would mean nothing."""
    config = verifier / "config.json"
    longest = json.loads(config.read_text(encoding="utf-8")).get("max_position_embeddings") if config.is_file() else None
    if longest and max_length > longest:
        raise UserError(
            f"prepare.max_length = {max_length} is more than the verifier's {longest} positions (max_position_embeddings): "
            f"set it to {longest} or less"
        )


def _fingerprint(renderer: Renderer, folder: Path) -> str:
    """Hash of the tokenizer's files, and of the template and settings that render with it."""
    import xxhash

    digest = xxhash.xxh3_128()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name not in _NOT_TOKENIZER and path.suffix != ".safetensors":
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(renderer.settings().encode())
    return digest.hexdigest()
