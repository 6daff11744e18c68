"""Rows of every kind of source, in an order that depends on nothing but the sources: files, folders, datasets, `demo`.

Sources are mixed by weight and, if asked, passed through a shuffle buffer. Neither depends on how many rows are taken, so
the rows of a small run are the first rows of a large one. Rows are read as they are needed and never held together.
"""

from __future__ import annotations

import codecs
import heapq
import io
import json
import random
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3dvc.errors import UserError
from eagle3dvc.params import Params, Source

FORMATS = (".jsonl", ".json", ".parquet")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
KNOWN = ", ".join(FORMATS) + " (plain, .gz or .zst)"
_CHUNK = 1 << 20
_LARGEST_ROW = 1 << 28  # characters; a JSON array row that has not ended by then is taken for broken


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it was read, and where: `where` is "alpaca.jsonl line 3", "a.parquet row 7" (both from 1) and so on."""

    source: str
    number: int  # position within its file or dataset, from 1
    where: str
    data: Any


@dataclass(frozen=True)
class OpenSource:
    """A source that exists; `rows()` reads it from its start. An endless source never runs out of rows.

    `note` is what the user should hear of it, though it is no error. `revision`: the commit of a Hub dataset, None where there is
    none or it is not known.
    """

    name: str
    rows: Callable[[], Iterator[Row]]
    weight: float
    endless: bool = False
    note: str | None = None
    revision: str | None = None


def open_sources(params: Params) -> list[OpenSource]:
    """Every source of prepare.sources, checked to exist. Raises UserError naming the source and what to do."""
    opened = [open_source(source, params.seed, f"prepare.sources[{i}]") for i, source in enumerate(params.prepare.sources)]
    names: dict[str, int] = {}
    for i, source in enumerate(opened):
        if (first := names.setdefault(source.name, i)) != i:
            raise UserError(
                f"prepare.sources[{i}] and prepare.sources[{first}] are both called {source.name!r}: "
                f"give one of them another `name`"
            )
    return opened


def mixed(sources: list[OpenSource], on_end: Callable[[OpenSource, int], None] = lambda source, rows: None) -> Iterator[Row]:
    """Rows of all sources in proportion to their weights: always from the source that is furthest behind its share.

    A source that ends is left out from then on; `on_end(source, rows)` hears of it.
    """
    queue = [(0.5 / source.weight, i) for i, source in enumerate(sources)]
    heapq.heapify(queue)
    iterators, taken = [source.rows() for source in sources], [0] * len(sources)
    while queue:
        _, i = queue[0]
        if (row := next(iterators[i], None)) is None:
            heapq.heappop(queue)
            on_end(sources[i], taken[i])
            continue
        taken[i] += 1
        heapq.heapreplace(queue, ((taken[i] + 0.5) / sources[i].weight, i))
        yield row


def shuffled(rows: Iterable[Row], buffer: int, seed: int) -> Iterator[Row]:
    """Rows drawn at random out of a buffer of `buffer` rows that is refilled from the stream; 0 keeps the order."""
    if not buffer:
        yield from rows
        return
    rng, held = random.Random(f"shuffle:{seed}"), []
    for row in rows:
        if len(held) < buffer:
            held.append(row)
            continue
        i = rng.randrange(buffer)
        held[i], row = row, held[i]
        yield row
    rng.shuffle(held)
    yield from held


def open_source(source: Source, seed: int, parameter: str) -> OpenSource:
    """One source, checked to exist; `parameter` is where it stands in params.yaml. Raises UserError."""
    if source.path == "demo":
        return OpenSource(source.name or "demo", lambda: _demo_rows(source.name or "demo", seed), source.weight, endless=True)
    path = Path(source.path).expanduser()
    if path.exists():
        files = _files(path, parameter)
        name = source.name or (path.resolve().name if path.is_dir() else path.name.removesuffix(_suffix(path)))
        return OpenSource(name, lambda: _file_rows(name, files, parameter), source.weight, note=_left_out(path, files))
    looks_local = source.path.startswith((".", "/", "~")) or source.path.count("/") > 1 or path.suffix.lower() in (
        *FORMATS, *COMPRESSIONS, ".txt", ".csv", ".tsv", ".arrow", ".xz", ".zip", ".tar", ".bz2", ".ndjson"
    )  # fmt: skip
    if looks_local or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source.path):
        raise UserError(
            f"{parameter}: {source.path} does not exist: give `demo`, a file, a folder or a Hugging Face dataset id"
        )
    return hub_source(source, parameter)


# --- demo


def _demo_rows(name: str, seed: int) -> Iterator[Row]:
    from eagle3dvc.prompts import demo

    for n, conversation in enumerate(demo.conversations(seed), 1):
        yield Row(name, n, f"demo conversation {n}", conversation)


# --- files


def _suffix(path: Path) -> str:
    """The part of a file's name that says how to read it (".jsonl.gz"); raises KeyError if unknown."""
    lower = path.name.lower()
    for packed in ("", *COMPRESSIONS):
        for kind in FORMATS:
            if lower.endswith(kind + packed):
                return path.name[-len(kind + packed) :]
    raise KeyError(path.name)


def _known(path: Path) -> bool:
    try:
        return bool(_suffix(path))
    except KeyError:
        return False


def _files(path: Path, parameter: str) -> list[Path]:
    """The data files of a file or folder (searched to the bottom, hidden names left out), sorted by path."""
    if not path.is_dir():
        if not _known(path):
            raise UserError(f"{parameter}: {path} is not of a known kind: give {KNOWN}")
        return [path]
    files = sorted(
        (f for f in path.rglob("*") if f.is_file() and _known(f) and not any(p[0] == "." for p in f.relative_to(path).parts)),
        key=lambda f: f.relative_to(path).as_posix(),
    )
    if not files:
        raise UserError(f"{parameter}: the folder {path} holds no file of a known kind: put {KNOWN} there")
    return files


def _left_out(path: Path, files: list[Path]) -> str | None:
    """Which files of a folder are not read, in words."""
    others = sorted(f.relative_to(path).as_posix() for f in set(path.rglob("*")) - set(files) if f.is_file())
    if not others:
        return None
    return f"{path}: {len(files)} files are read; not of a known kind or hidden: {', '.join(others[:5])}" + ", ..." * (
        len(others) > 5
    )


def _file_rows(name: str, files: list[Path], parameter: str) -> Iterator[Row]:
    for path in files:
        kind = next(k for k in FORMATS if _suffix(path).lower().startswith(k))
        read = {".jsonl": _json_lines, ".json": _json_values, ".parquet": _parquet_rows}[kind]
        count = 0
        try:
            for number, unit, data in read(path):
                count += 1
                yield Row(name, number, f"{path} {unit} {number}", data)
        except OSError as e:
            raise UserError(f"{path} cannot be read ({e.strerror or e}): check the file, or fetch it again") from None
        if not count:
            raise UserError(f"{path} is empty: it holds no row; remove it from {parameter.partition('[')[0]} or fill it")


def _bytes_of(path: Path) -> io.BufferedReader:
    """The file's bytes, unpacked by the ending of its name. Unlike zstandard's reader, Arrow's refuses a cut-off file."""
    import pyarrow as pa

    compression = COMPRESSIONS.get(path.suffix.lower())
    return io.BufferedReader(pa.input_stream(str(path), compression=compression), buffer_size=_CHUNK)


def _not_utf8(path: Path, line: int, e: UnicodeDecodeError) -> UserError:
    return UserError(f"{path} line {line}: not UTF-8 (byte 0x{e.object[e.start]:02x}): convert the file to UTF-8")


def _broken(path: Path, line: int, e: Exception) -> UserError:
    if isinstance(e, json.JSONDecodeError):
        what = f"{e.msg}, column {e.colno}"
    else:
        what = "nested too deeply" if isinstance(e, RecursionError) else "a number of too many digits"
    return UserError(f"{path} line {line}: broken JSON ({what}): repair or remove that line")


def _json_lines(path: Path) -> Iterator[tuple[int, str, Any]]:
    with _bytes_of(path) as stream:
        for n, line in enumerate(stream, 1):
            if n == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            try:
                data = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as e:
                raise _not_utf8(path, n, e) from None
            except (ValueError, RecursionError) as e:
                raise _broken(path, n, e) from None
            yield n, "line", data


def _json_values(path: Path) -> Iterator[tuple[int, str, Any]]:
    """The elements of one JSON array, or JSON objects one after the other; read piece by piece, never whole."""
    decoder, utf8 = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8-sig")()
    text, pos, line, eof, array, number = "", 0, 1, False, None, 0
    with _bytes_of(path) as stream:

        def refill() -> None:
            nonlocal text, pos, eof, line
            line += text.count("\n", 0, pos)
            raw = stream.read(max(_CHUNK, len(text) - pos))
            eof = not raw
            try:
                text, pos = text[pos:] + utf8.decode(raw, final=eof), 0
            except UnicodeDecodeError as e:
                at = line + text.count("\n", pos) + e.object.count(b"\n", 0, e.start)
                raise _not_utf8(path, at, e) from None

        def broken(what: str, at: int) -> UserError:
            return UserError(f"{path} line {line + text.count(chr(10), 0, at)}: broken JSON ({what}): repair the file")

        after_value = False  # inside an array: a comma or the end must follow
        while True:
            while pos < len(text) and text[pos] in " \t\r\n":
                pos += 1
            if pos == len(text):
                if eof:
                    break
                refill()
                continue
            if array == "ended":
                raise broken("text after the end of the array", pos)
            if array is None:
                array = text[pos] == "["
                pos += array
                continue
            if array and text[pos] == "]" and (after_value or not number):
                array, pos = "ended", pos + 1
                continue
            if array and after_value:
                if text[pos] != ",":
                    raise broken("a comma or ] expected", pos)
                pos, after_value = pos + 1, False
                continue
            try:
                data, pos = decoder.raw_decode(text, pos)
            except RecursionError:
                raise broken("nested too deeply", pos) from None
            except json.JSONDecodeError as e:
                if eof or len(text) - pos > _LARGEST_ROW:
                    raise broken(e.msg, e.pos) from None
                refill()
                continue
            except ValueError:
                raise broken("a number of too many digits", pos) from None
            number, after_value = number + 1, True
            yield number, "row", data
    if array is True:
        raise broken("the array does not end", pos)


def drop_nulls(value: Any) -> Any:
    """A copy without the keys whose value is null: Arrow gives every struct the fields of all others, filled with nulls."""
    if isinstance(value, dict):
        return {k: drop_nulls(v) for k, v in value.items() if v is not None}
    return [drop_nulls(v) for v in value] if isinstance(value, list) else value


def _parquet_rows(path: Path) -> Iterator[tuple[int, str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.stat().st_size:
        return
    with tempfile.TemporaryFile() as unpacked:
        file: Any = path
        if path.suffix.lower() in COMPRESSIONS:  # parquet is read from its end, so it must be unpacked first
            with _bytes_of(path) as stream:
                while chunk := stream.read(_CHUNK):
                    unpacked.write(chunk)
            file = unpacked
        try:
            n = 0
            for batch in pq.ParquetFile(file).iter_batches(batch_size=256):
                for data in batch.to_pylist():
                    n += 1
                    yield n, "row", drop_nulls(data)
        except (pa.ArrowException, OSError) as e:
            raise UserError(f"{path} is not readable parquet ({str(e).splitlines()[0]}): fetch or write it again") from None


# --- Hugging Face datasets


def commit_of(source: Source) -> str | None:
    """The commit that a Hub dataset's revision (default: its main branch) stands for now; None for a folder and where the Hub
    cannot be asked: `datasets` may still have a copy, and if not, says why.
    """
    if source.revision is not None and re.fullmatch("[0-9a-f]{40}", source.revision):
        return source.revision
    if Path(source.path).exists():
        return None
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(source.path, revision=source.revision).sha
    except Exception:  # offline, no such dataset, no access: a dozen kinds
        return None


def hub_source(source: Source, parameter: str = "prepare.sources") -> OpenSource:
    """A dataset read through `datasets` (an id, or a local folder in the Hub's layout).

    Raises UserError where it cannot be loaded or where a column holds what is no text (images, sound).
    """
    import datasets

    label = " ".join(filter(None, (source.path, source.config, f"split {source.split}")))
    commit = commit_of(source)
    try:
        dataset = datasets.load_dataset(
            source.path, source.config, split=source.split, revision=commit or source.revision, streaming=source.streaming
        )
    except Exception as e:  # datasets raises errors of a dozen kinds; each has a message worth showing
        text = " ".join(str(e).split())[:300]
        raise UserError(
            f"{parameter}: the dataset {label} cannot be loaded ({type(e).__name__}: {text}): "
            f"check path, config, split and revision, and that the Hub can be reached"
        ) from None
    for column, feature in (dataset.features or {}).items():
        if type(feature).__name__ not in ("Value", "List", "LargeList", "Sequence", "ClassLabel", "dict", "list", "Json"):
            raise UserError(
                f"{parameter}: the dataset {label} has the column {column!r} of type {type(feature).__name__}: "
                f"only text is supported; use a text dataset or a copy without that column"
            )
    name = source.name or (f"{source.path}:{source.config}" if source.config else source.path)

    def rows() -> Iterator[Row]:
        n, iterator = 0, iter(dataset)
        while True:
            try:
                data = next(iterator)
            except StopIteration:
                break
            except Exception as e:
                text = " ".join(str(e).split())[:300]
                raise UserError(
                    f"the dataset {label} failed after row {n} ({type(e).__name__}: {text}): run again, or set streaming: false"
                ) from None
            n += 1
            yield Row(name, n, f"{label} row {n}", drop_nulls(data))
        if not n:
            raise UserError(f"{parameter}: the dataset {label} is empty: it holds no row")

    note = None
    if source.revision is None:
        now = f"; it is at {commit} now, set `revision` to that" if commit else ""
        note = f"the dataset {label} has no revision in {parameter}: what it holds may change{now}"
    return OpenSource(name, rows, source.weight, note=note, revision=commit)
