"""Answers written by the verifier itself (`prepare.responses: verifier`).

A drafter learns to predict what its verifier writes, so the verifier (re)writes every assistant turn, turn by turn: the
prompt of a turn is what it would be served, history included, and what it answers is kept token by token.

An answer belongs to the hash of its prompt's tokens under one set of generation settings. It is looked for in the log of
finished answers (`<DVC_ROOT>/.dvc/tmp/eagle3dvc/answers`), then in `data/prompts/answers` of earlier runs in DVC's cache and
remote; only what exists nowhere is generated. The engine starts at the first such answer, and before it ends it also
computes the hidden states of the new prompt shards, so that the extract stage finds them done: a 1T verifier loads once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import struct
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from eagle3dvc import engines, stage
from eagle3dvc.errors import UserError
from eagle3dvc.params import Params
from eagle3dvc.progress import ShardProgress
from eagle3dvc.prompts.conversations import Conversation, Rejected
from eagle3dvc.prompts.render import Encoded, Renderer
from eagle3dvc.verifier import VerifierInfo, layer_ids, load_head

FORMAT = 1
FILE_ANSWERS = 4096
_HEAD = struct.Struct("<16sII")  # key, number of tokens, 1 if the answer ended by itself
_CHECK = struct.Struct("<Q")  # xxh3_64 of what stands before it
_THOUGHT = "</think>"


@dataclass(frozen=True, slots=True)
class Answer:
    """token_ids: what the verifier wrote, its stop token included. ended: it stopped by itself, not at a limit."""

    token_ids: Sequence[int]
    ended: bool

    def within(self, limit: int) -> Answer | None:
        """This answer as it would be with at most `limit` new tokens; None where that takes generating more."""
        if len(self.token_ids) > limit:
            return Answer(self.token_ids[:limit], False)
        return self if self.ended or len(self.token_ids) == limit else None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the tokens of an answer begin in the log, how many they are, and whether the verifier stopped by itself."""

    at: int
    count: int
    ended: bool

    def better_than(self, other: _Place) -> bool:
        return not other.ended and (self.ended or self.count > other.count)


@dataclass(frozen=True, slots=True)
class Turn:
    prompt: list[int]
    answer: Answer


def settings(params: Params, info: VerifierInfo, stop: Sequence[int]) -> dict[str, Any]:
    """All that an answer depends on beside its prompt. Not max_new_tokens: a longer limit only ever goes on."""
    p = params.prepare
    sampled = {"temperature": p.temperature, "top_p": p.top_p, "seed": params.seed} if p.temperature > 0 else {}
    numerics = {k: v for k, v in engines.numerics(params).items() if v is not None}
    return {"format": FORMAT, "identity": info.identity, "numerics": numerics, "stop": sorted(stop), **sampled}


def settings_key(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:24]


def _sum(record: bytes) -> int:
    return xxhash.xxh3_64_intdigest(record)


def prompt_key(prompt: Sequence[int]) -> bytes:
    """16 bytes that name a prompt."""
    return xxhash.xxh3_128_digest(np.asarray(prompt, dtype="<i4").tobytes())


class AnswerStore:
    """Finished answers of one set of settings, in one append-only file; memory holds where each stands, not its tokens.

    A record is one write, so a killed run keeps every finished answer; the file is fsynced at least once a second and at the
    end. Torn and damaged records are passed over when the file is opened, at its end cut off. Several processes may append at
    the same time; of several answers to one prompt the first that ended counts, else the longest.
    """

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._known: dict[bytes, _Place] = {}
        self._synced = time.monotonic()
        self._load()

    def _load(self) -> None:
        raw = self.path.read_bytes()
        at = end = damaged = 0  # end: of the last whole record
        while at + _HEAD.size + _CHECK.size <= len(raw):
            key, count, ended = _HEAD.unpack_from(raw, at)
            check = at + _HEAD.size + 4 * count
            if ended > 1 or check + _CHECK.size > len(raw) or _sum(raw[at:check]) != _CHECK.unpack_from(raw, check)[0]:
                at += 1
                continue
            place = _Place(at + _HEAD.size, count, bool(ended))
            if self._better(key, place):
                self._known[key] = place
            damaged += at - end
            at = end = check + _CHECK.size
        exclusive = True
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            exclusive = False  # another run writes here: what looks torn is its record under way
        if end < len(raw) and exclusive:
            print(f"note: {self.path} has a torn end; {len(raw) - end} bytes dropped", file=sys.stderr, flush=True)
            os.ftruncate(self._fd, end)
        if damaged:
            print(f"note: {self.path} has {damaged} damaged bytes; their answers are lost", file=sys.stderr, flush=True)
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def _better(self, key: bytes, new: _Place) -> bool:
        old = self._known.get(key)
        return old is None or new.better_than(old)

    def __len__(self) -> int:
        return len(self._known)

    def get(self, prompt: Sequence[int], limit: int) -> Answer | None:
        known = self._known.get(prompt_key(prompt))
        if known is None:
            return None
        return Answer(np.frombuffer(os.pread(self._fd, 4 * known.count, known.at), "<i4").tolist(), known.ended).within(limit)

    def add(self, prompt: Sequence[int], answer: Answer) -> None:
        self.add_key(prompt_key(prompt), answer)

    def add_key(self, key: bytes, answer: Answer) -> None:
        new = _Place(0, len(answer.token_ids), answer.ended)
        if not self._better(key, new):
            return
        record = _HEAD.pack(key, len(answer.token_ids), answer.ended) + np.asarray(answer.token_ids, "<i4").tobytes()
        record += _CHECK.pack(_sum(record))
        if os.write(self._fd, record) != len(record):
            raise OSError(28, "no space left on the disk", str(self.path))
        at = os.lseek(self._fd, 0, os.SEEK_CUR) - len(record)  # where it was appended, whoever else appends
        self._known[key] = replace(new, at=at + _HEAD.size)
        if time.monotonic() - self._synced > 1:
            self.sync()

    def sync(self) -> None:
        os.fsync(self._fd)
        self._synced = time.monotonic()

    def close(self) -> None:
        self.sync()
        os.close(self._fd)


def stop_token_ids(renderer: Renderer, folder: Path) -> list[int]:
    """Ids that end an answer: those the checkpoint names and the end-of-turn token of its chat template."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        if path.exists():
            ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    tokenizer = renderer.tokenizer
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    with contextlib.suppress(Rejected):
        text = renderer.text([{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}])
        after = tokenizer.encode(text[text.rfind("2") + 1 :].lstrip(), add_special_tokens=False)
        if after and after[0] in tokenizer.added_tokens_decoder:
            found.add(after[0])
    if not found:
        raise UserError(
            f"{folder} names no token that ends an answer (eos_token_id in config.json or generation_config.json, the chat "
            "template's end of turn): prepare.responses = verifier needs one"
        )
    return sorted(found)


def _schema():
    import pyarrow as pa

    return pa.schema([("prompt", pa.binary(16)), ("token_ids", pa.list_(pa.int32())), ("ended", pa.bool_())])


def write_answers(folder: Path, used: Sequence[tuple[bytes, Answer]]) -> None:
    """Write answers in order, FILE_ANSWERS a file; the same answers give the same bytes, more of them the same first files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    for start in range(0, len(used), FILE_ANSWERS):
        keys, answers = zip(*used[start : start + FILE_ANSWERS], strict=True)
        columns = [list(keys), [a.token_ids for a in answers], [a.ended for a in answers]]
        table = pa.Table.from_arrays([pa.array(c, f.type) for c, f in zip(columns, _schema(), strict=True)], schema=_schema())
        path = folder / f"{start // FILE_ANSWERS:05d}.parquet"
        pq.write_table(table, path, compression="zstd", compression_level=3, use_dictionary=False, write_statistics=False)


def read_answers(file: bytes) -> Iterator[tuple[bytes, Answer]]:
    """(key of the prompt, answer) of one file's content; nothing where it is no such file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(pa.BufferReader(file))
    except (pa.ArrowException, OSError):
        return
    if table.schema.equals(_schema()):
        for row in table.to_pylist():
            yield row["prompt"], Answer(row["token_ids"], row["ended"])


class Responder:
    """Writes the answers of conversations and turns them into samples; see :meth:`encode`.

    Use as a context manager. `log` is filled with what differs from run to run, `counts` with what the same inputs give.
    """

    def __init__(self, params: Params, info: VerifierInfo, renderer: Renderer, log: dict[str, Any], out: str = "data/prompts"):
        self.params, self.info, self.renderer, self.log, self.out = params, info, renderer, log, out
        self.stop = stop_token_ids(renderer, info.folder)
        self.settings = settings(params, info, self.stop)
        self.key = settings_key(self.settings)
        self.store = AnswerStore(stage.work_dir("answers") / f"{self.key}.log")
        self.counts: Counter[str] = Counter(answers=0, answer_tokens=0, answers_cut_off=0)
        self.engine: engines.Engine | None = None
        self.used: list[tuple[bytes, Answer]] = []  # in the order of the conversations
        self._recovered = False
        self._work: Counter[str] = Counter()

    def __enter__(self) -> Responder:
        return self

    def __exit__(self, *exc) -> None:
        self.store.close()
        if self.engine is not None:
            self.engine.close()
        self.log |= {f"answers_{k}": self._work[k] for k in ("reused", "recovered", "generated", "tokens_generated")}

    # -- conversations -> samples ------------------------------------------------------------------------------------

    def encode(self, conversations: Sequence[Conversation]) -> list[list[Encoded] | Rejected]:
        """The samples of each conversation, or the reason it cannot be used; in the order given.

        A conversation gives one sample, with the mask on every answer in it. Where the chat template shows an earlier answer
        differently once it is history (reasoning removed), that answer is in a sample of its own.
        """
        results: list[Any] = [None] * len(conversations)
        running: dict[int, Generator] = {}
        asked: dict[int, tuple[list[int], int]] = {}
        used: list[list[tuple[bytes, Answer]]] = [[] for _ in conversations]
        for i, conversation in enumerate(conversations):
            running[i] = self._dialogue(conversation)

        def advance(i: int, answer: Answer | None) -> None:
            try:
                asked[i] = running[i].send(answer)
            except StopIteration as end:
                results[i] = self._samples(end.value) or Rejected(
                    "nothing_to_answer", "no turn of it is the verifier's to write: calls of tools stay as they are"
                )
                del running[i]
            except Rejected as e:
                results[i] = e
                del running[i]

        for i in list(running):
            advance(i, None)
        while running:
            order = sorted(running)
            answers = self._answers([asked[i] for i in order])
            for i, answer in zip(order, answers, strict=True):
                used[i].append((prompt_key(asked[i][0]), replace(answer, token_ids=np.array(answer.token_ids, np.int32))))
                advance(i, answer)
        self.used += [entry for entries in used for entry in entries]
        return results

    def save(self, folder: str | Path) -> None:
        """Write every answer that was used, those of dropped samples too, so that no later run has to generate them."""
        first: dict[bytes, Answer] = {}
        for key, answer in self.used:
            first.setdefault(key, answer)
        write_answers(Path(folder) / "answers", list(first.items()))

    def _dialogue(self, conversation: Conversation) -> Generator[tuple[list[int], int], Answer, list[Turn]]:
        """Yields (prompt, largest number of new tokens), takes the answer; returns the turns. Raises Rejected."""
        turns: list[Turn] = []
        if conversation.token_ids is not None:  # tokens without messages: what stands before the first answer is the prompt
            first = int(np.argmax(conversation.loss_mask))
            self.renderer.given_tokens(conversation)
            if first == 0:
                raise Rejected("empty_mask", "its loss_mask leaves no prompt to answer")
            yield from self._ask(conversation.token_ids[:first].tolist(), turns)
            return turns
        history: list[dict[str, Any]] = []
        script = [*conversation.messages, *({"role": "user", "content": q} for q in conversation.pending)]
        for i, message in enumerate(script):
            following = script[i + 1]["role"] if i + 1 < len(script) else None
            if message["role"] == "assistant":
                if message.get("tool_calls") or following == "tool":
                    history.append(message)  # the tool's result that follows belongs to this very call
                continue
            history.append(message)
            if message["role"] == "system":
                continue  # nothing has been asked yet
            if following in ("user", None) or (following == "assistant" and not self._calls_tool(script, i + 1)):
                answer = yield from self._ask(self.renderer.prompt_ids(history, conversation.tools), turns)
                if answer is None or not answer.ended:
                    return turns
                history.append(self._message(answer))
        return turns

    @staticmethod
    def _calls_tool(script: list[dict[str, Any]], i: int) -> bool:
        return bool(script[i].get("tool_calls")) or (i + 1 < len(script) and script[i + 1]["role"] == "tool")

    def _ask(self, prompt: list[int], turns: list[Turn]) -> Generator[tuple[list[int], int], Answer, Answer | None]:
        """Ask for one answer and record the turn; None where it is not to be kept. Raises Rejected where no turn is left."""
        p = self.params.prepare
        limit = min(p.max_new_tokens, p.max_length - len(prompt))
        if limit < 1:
            if not turns:
                raise Rejected("too_long", f"its prompt has {len(prompt)} tokens, prepare.max_length is {p.max_length}")
            return None
        answer = yield prompt, limit
        if not answer.ended:
            self.counts["answers_cut_off"] += 1
            if not p.keep_truncated:
                if not turns:
                    raise Rejected("answer_cut_off", f"its answer did not end within {limit} tokens")
                return None
        self.counts["answers"] += 1
        self.counts["answer_tokens"] += len(answer.token_ids)
        turns.append(Turn(prompt, answer))
        return answer

    def _message(self, answer: Answer) -> dict[str, Any]:
        """The answer as history: its text, with the reasoning apart, as a server's reasoning parser leaves it."""
        text = self.renderer.tokenizer.decode(answer.token_ids[:-1], skip_special_tokens=False)
        if _THOUGHT not in text:
            return {"role": "assistant", "content": text.strip()}
        thought, _, content = text.rpartition(_THOUGHT)
        return {
            "role": "assistant",
            "content": content.strip(),
            "reasoning_content": thought.removeprefix("<think>").strip(),
        }

    @staticmethod
    def _samples(turns: list[Turn]) -> list[Encoded]:
        samples: list[Encoded] = []
        left = list(turns)
        while left:
            ids = left[-1].prompt + left[-1].answer.token_ids
            mask = np.zeros(len(ids), bool)
            uncovered = []
            for turn in left:
                whole = turn.prompt + turn.answer.token_ids
                if ids[: len(whole)] == whole:
                    mask[len(turn.prompt) : len(whole)] = True
                else:
                    uncovered.append(turn)
            samples.insert(0, Encoded(np.array(ids, np.int32), mask))
            left = uncovered
        return samples

    # -- answers -----------------------------------------------------------------------------------------------------

    def _answers(self, asked: Sequence[tuple[list[int], int]]) -> list[Answer]:
        found = [self.store.get(prompt, limit) for prompt, limit in asked]
        if None in found and not self._recovered:
            self._recover()
            found = [self.store.get(prompt, limit) for prompt, limit in asked]
        self._work["reused"] += sum(a is not None for a in found)
        absent = [i for i, a in enumerate(found) if a is None]
        if not absent:
            return found
        missing = list({prompt_key(asked[i][0]): i for i in reversed(absent)}.values())[::-1]  # each prompt once
        engine = self._started()
        p = self.params.prepare
        prompts, limits = [asked[i][0] for i in missing], [asked[i][1] for i in missing]
        with ShardProgress("answers", len(missing), sum(limits), unit="answers") as progress:

            def done(k: int, ids: list[int]) -> None:
                answer = Answer(ids, bool(ids) and ids[-1] in self.stop)
                if not ids or len(ids) > limits[k] or not (answer.ended or len(ids) == limits[k]):
                    raise UserError(
                        f"engine {engine.name} ended an answer after {len(ids)} tokens without a stop token (limit {limits[k]})"
                    )
                self.store.add(prompts[k], answer)
                self._work["generated"] += 1
                self._work["tokens_generated"] += len(ids)
                progress.advance(limits[k], 4 * len(ids), len(ids))

            began = time.monotonic()
            engine.generate(
                prompts,
                max_new_tokens=limits,
                temperature=p.temperature,
                top_p=p.top_p,
                seed=self.params.seed,
                stop_token_ids=self.stop,
                done=done,
            )
        self.log["seconds_answers"] = round(self.log.get("seconds_answers", 0.0) + time.monotonic() - began, 3)
        self.store.sync()
        for i in absent:
            found[i] = self.store.get(*asked[i])
            if found[i] is None:
                raise UserError(f"engine {engine.name} never gave an answer that was asked for ({len(asked[i][0])} tokens)")
        return found

    def _started(self) -> engines.Engine:
        if self.engine is None:
            started = time.monotonic()
            self.engine = engines.make(self.params, self.info, layer_ids(self.info, self.params))
            self.engine.prove(load_head(self.info.folder))
            self.log["seconds_load_engine"] = round(time.monotonic() - started, 3)
        return self.engine

    def _recover(self) -> None:
        """Take over the answers of earlier runs: DVC's cache first, then the remote.

        Raises UserError where dvc.lock names prompts that only an unreachable remote has.
        """
        from eagle3dvc.hidden_states import dvc_repo

        self._recovered = True
        repo = dvc_repo.DvcRepo.open()
        if repo is None:
            return
        locked = dvc_repo.locked_dirs(self.out)
        absent = [m for m in locked if not repo.object_path(m).exists()]
        before, seen = len(self.store), set()
        try:
            repo.fetch(absent)
            for folder in locked:
                if not repo.object_path(folder).exists():
                    continue
                files = dict(dvc_repo.read_listing(repo.object_path(folder)))
                repo.fetch([m for name, m in files.items() if name == "manifest.json"])
                if not self._made_here(repo, files.get("manifest.json")):
                    continue
                parts = [m for name, m in files.items() if name.startswith("answers/") and m not in seen]
                seen.update(parts)
                repo.fetch(parts)
                for md5 in parts:
                    for key, answer in read_answers(self._whole(repo, md5)):
                        self.store.add_key(key, answer)
        except dvc_repo.Unreachable as e:
            if not self.params.extract.allow_recompute:
                raise UserError(
                    f"dvc.lock names prompts ({self.out}) whose answers are not in the cache, and {e}: repair the remote, or set "
                    "extract.allow_recompute to true to generate answers again"
                ) from e
        self._work["recovered"] = len(self.store) - before
        self.store.sync()

    @staticmethod
    def _whole(repo: Any, md5: str) -> bytes:
        """The content of an object of DVC's cache; a damaged one is removed and fetched again, empty where it is nowhere else."""
        path = repo.object_path(md5)
        for _ in range(2):
            content = path.read_bytes() if path.exists() else b""
            if not content or hashlib.md5(content).hexdigest() == md5:
                return content
            print(f"note: {path} is damaged and removed; its answers are fetched or written again", file=sys.stderr, flush=True)
            path.unlink()
            repo.fetch([md5])
        return b""

    def _made_here(self, repo: Any, md5: str | None) -> bool:
        """Whether a manifest says its answers have exactly these settings."""
        if md5 is None or not repo.object_path(md5).exists():
            return False
        try:
            return json.loads(repo.object_path(md5).read_bytes()).get("answers") == self.key
        except (ValueError, AttributeError):
            return False

    # -- hidden states in the same engine session --------------------------------------------------------------------

    def extract(self, prompts: str | Path) -> None:
        """Where the engine runs, compute what the extract stage would compute for the shards in `prompts`.

        The states are a prefill of the finished samples, as the extract stage would do it, so they and their keys are the same
        wherever the answers came from; a prefill is a small part of the time that writing the answers took.
        """
        if self.engine is None:
            return
        from eagle3dvc.hidden_states import extract
        from eagle3dvc.hidden_states.store import Store

        ids = layer_ids(self.info, self.params)
        planned = extract.plan(self.params, self.info, ids, prompts)
        store = Store(allow_recompute=self.params.extract.allow_recompute)
        found = store.find_all(p.key for p in planned)
        missing = {p.key: p for p in planned if p.key not in found}
        uploads = extract.Uploads(store, self.params.extract.push_while_extracting)
        try:
            for done in extract.compute(
                self.params, self.info, ids, list(missing.values()), store, self.log, engine=self.engine
            ):
                uploads.add(done)
        finally:
            uploads.finish()
        tokens = sum(p.tokens for p in missing.values())
        self.log |= {"shards_computed": len(missing), "shards_pushed": uploads.pushed, "tokens_computed": tokens}
