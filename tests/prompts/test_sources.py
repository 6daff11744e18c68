import gzip
import itertools
import json
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from eagle3dvc.errors import UserError
from eagle3dvc.params import Params, Source
from eagle3dvc.prompts import sources

ROWS = [{"prompt": f"question {i} ä€😀", "completion": "x" * (i % 7), "n": i} for i in range(50)]
PACK = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


def params(*specs, watch, **prepare):
    return Params(max_samples=10, prepare={"sources": list(specs), "watch": str(watch), **prepare})


def rows_of(path, **source):
    [opened] = sources.open_sources(params({"path": str(path), **source}, watch=path))
    return list(opened.rows())


def serialised(kind):
    if kind == ".jsonl":
        return "\n".join(json.dumps(r, ensure_ascii=False) for r in ROWS).encode()
    if kind == ".json":
        return json.dumps(ROWS, indent=1).encode()
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(ROWS), sink)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("kind", [".jsonl", ".json", ".parquet"])
def test_every_format_gives_the_same_rows(tmp_path, kind, packed):
    path = tmp_path / f"mine{kind}{packed}"
    path.write_bytes(PACK[packed](serialised(kind)))
    rows = rows_of(path)
    assert [r.data for r in rows] == ROWS
    assert {r.source for r in rows} == {"mine"}
    assert rows[6].where == f"{path} {'line' if kind == '.jsonl' else 'row'} 7"


def test_name_is_taken_from_the_parameter_first(tmp_path):
    path = tmp_path / "a.b.jsonl"
    path.write_text('{"a": 1}')
    assert rows_of(path)[0].source == "a.b"
    assert rows_of(path, name="other")[0].source == "other"


def test_json_lines_skip_blank_lines_and_a_byte_order_mark_but_count_them(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n{"a": "x\xe2\x80\xa8y"}')  # U+2028 ends no line
    assert [(r.number, r.data) for r in rows_of(path)] == [(1, {"a": 1}), (4, {"a": "x\u2028y"})]


def test_json_file_may_hold_objects_one_after_the_other(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": 1}\n{"a":\n 2}{"a": 3}\n')
    assert [r.data["a"] for r in rows_of(path)] == [1, 2, 3]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_json_is_read_the_same_in_pieces_of_any_size(tmp_path, monkeypatch, chunk):
    path = tmp_path / "a.json"
    path.write_bytes(b"\xef\xbb\xbf \n" + json.dumps(ROWS, ensure_ascii=False, indent=1).encode() + b"\n ")
    monkeypatch.setattr(sources, "_CHUNK", chunk)
    assert [r.data for r in rows_of(path)] == ROWS


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b"", "a.jsonl is empty: it holds no row"),
        ("a.jsonl", b"\n \n", "a.jsonl is empty: it holds no row"),
        ("a.json", b"", "a.json is empty: it holds no row"),
        ("a.json", b" [ ] ", "a.json is empty: it holds no row"),
        ("a.parquet", b"", "a.parquet is empty: it holds no row"),
        ("a.jsonl", b'{"a": 1}\n{"a": 2\n{"a": 3}\n', "a.jsonl line 2: broken JSON"),
        ("a.jsonl", b"{}\n" + b"[" * 100_000 + b"\n", r"a.jsonl line 2: broken JSON \(nested too deeply\)"),
        ("a.json", b'[{"a": 1},\n{"a": 2}\n', r"a.json line 3: broken JSON \(the array does not end\)"),
        ("a.json", b'[{"a": 1}\n{"a": 2}]', r"a.json line 2: broken JSON \(a comma or \] expected\)"),
        ("a.json", b'[{"a": 1},\n{"a": }]', "a.json line 2: broken JSON"),
        ("a.json", b'[{"a": 1},\n]', "a.json line 2: broken JSON"),
        ("a.json", b'[{"a": 1}]\n\nx', r"a.json line 3: broken JSON \(text after the end of the array\)"),
        ("a.json", b'{"a": "not ended\n', "a.json line 1: broken JSON"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "a.jsonl line 2: not UTF-8 .byte 0xff.: convert the file to UTF-8"),
        ("a.json", b'[{"a": 1},\n{"a": "\xe4"}]', "a.json line 2: not UTF-8 .byte 0xe4."),
        ("a.jsonl", '{"a": 1}\n'.encode("utf-16"), "a.jsonl line 1: not UTF-8"),
        ("a.parquet", b"PAR1 this is no parquet PAR1", "a.parquet is not readable parquet"),
        ("a.jsonl.gz", b"not gzip at all", "a.jsonl.gz cannot be read"),
        ("a.jsonl.gz", gzip.compress(json.dumps(ROWS).encode())[:-20], "a.jsonl.gz cannot be read .*[Tt]runcated"),
        ("a.jsonl.zst", zstandard.compress(json.dumps(ROWS).encode())[:-20], "a.jsonl.zst cannot be read"),
        ("a.txt", b"hello", r"a.txt is not of a known kind: give .jsonl, .json, .parquet \(plain, .gz or .zst\)"),
        ("a.jsonl.bz2", b"hello", "a.jsonl.bz2 is not of a known kind"),
    ],
)
def test_bad_files_are_named_with_the_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        rows_of(tmp_path / name)


@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_no_cut_of_a_packed_file_goes_unnoticed(tmp_path, packed):
    whole = PACK[packed](serialised(".jsonl"))
    path = tmp_path / f"a.jsonl{packed}"
    for length in random.Random(0).sample(range(1, len(whole)), 40):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError):
            rows_of(path)


@pytest.mark.parametrize("path", ["./none.jsonl", "/none", "a/b/c", "none.parquet", "some where", "~/none.json"])
def test_missing_paths_are_not_taken_for_datasets(path):
    with pytest.raises(UserError, match=r"prepare.sources\[0\]: .*none|prepare.sources\[0\]: .*does not exist"):
        sources.open_sources(Params(max_samples=1, prepare={"sources": [{"path": path}]}))


def test_folder_is_read_to_the_bottom_in_order_of_path(tmp_path):
    for name in ("b/2.jsonl", "a.jsonl", "b/1.json", ".hidden/x.jsonl", "README.md", ".x.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"file": name}))
    [opened] = sources.open_sources(params({"path": str(tmp_path)}, watch=tmp_path))
    rows = list(opened.rows())
    assert opened.note == f"{tmp_path}: 3 files are read; not of a known kind or hidden: .hidden/x.jsonl, .x.jsonl, README.md"
    assert [r.data["file"] for r in rows] == ["a.jsonl", "b/1.json", "b/2.jsonl"]
    assert {r.source for r in rows} == {tmp_path.name}


def test_folder_without_data_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("nothing")
    with pytest.raises(UserError, match="holds no file of a known kind"):
        rows_of(tmp_path)


def test_two_sources_of_one_name_are_refused(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.jsonl").write_text("{}")
    specs = [{"path": str(tmp_path / f / "train.jsonl")} for f in ("a", "b")]
    with pytest.raises(UserError, match=r"prepare.sources\[1\] and prepare.sources\[0\] are both called 'train'"):
        sources.open_sources(params(*specs, watch=tmp_path))
    specs[1]["name"] = "other"
    assert [s.name for s in sources.open_sources(params(*specs, watch=tmp_path))] == ["train", "other"]


def test_arrow_fills_are_dropped_but_json_nulls_stay(tmp_path):
    rows = [{"m": [{"role": "user", "name": None, "x": {"a": 1}}]}, {"m": [{"role": "user", "name": "n", "x": {"b": 2}}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[0]))
    assert rows_of(tmp_path / "a.parquet")[0].data == {"m": [{"role": "user", "x": {"a": 1}}]}
    assert rows_of(tmp_path / "a.jsonl")[0].data == rows[0]


# --- mixing


def numbered(name, weight, n=None):
    count = itertools.count(1) if n is None else range(1, n + 1)
    return sources.OpenSource(name, lambda: (sources.Row(name, i, f"{name} {i}", i) for i in count), weight)


def test_mixing_keeps_proportions_at_every_moment():
    taken = [r.source for r in islice(sources.mixed([numbered("a", 3.0), numbered("b", 1.0), numbered("c", 0.5)]), 900)]
    for n in range(1, 901):
        for name, share in (("a", 3 / 4.5), ("b", 1 / 4.5), ("c", 0.5 / 4.5)):
            assert abs(taken[:n].count(name) - n * share) < 1.5, (n, name)


def test_mixing_goes_on_when_a_source_ends_and_says_so():
    ended = []
    rows = list(sources.mixed([numbered("a", 1.0, 3), numbered("b", 1.0, 9)], lambda s, n: ended.append((s.name, n))))
    assert [r.source for r in rows[:6]] == ["a", "b", "a", "b", "a", "b"]
    assert [r.number for r in rows if r.source == "b"] == list(range(1, 10))
    assert ended == [("a", 3), ("b", 9)]


def test_shuffle_is_a_permutation_that_depends_on_seed_and_not_on_how_much_is_taken():
    def run(seed, take=None):
        return [r.number for r in islice(sources.shuffled(numbered("a", 1.0, 500).rows(), 64, seed), take)]

    whole = run(1)
    assert sorted(whole) == list(range(1, 501))
    assert whole == run(1)
    assert run(1, 200) == whole[:200]
    assert run(2) != whole
    assert whole[:20] != list(range(1, 21))
    assert [r.number for r in sources.shuffled(numbered("a", 1.0, 5).rows(), 0, 1)] == [1, 2, 3, 4, 5]


# --- datasets, from a local folder in the Hub's layout: the same code that reads the Hub, without a network


@pytest.fixture
def hub_folder(tmp_path):
    folder = tmp_path / "ds"
    (folder / "data").mkdir(parents=True)
    table = pa.table({"prompt": [f"q{i}" for i in range(20)], "completion": [f"a{i}" for i in range(20)]})
    pq.write_table(table, folder / "data" / "train-00000-of-00001.parquet")
    return folder


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("streaming", [True, False])
def test_datasets_give_rows_in_order(hub_folder, streaming):
    opened = sources.hub_source(Source(path=str(hub_folder), name="mine", streaming=streaming))
    rows = list(opened.rows())
    assert [r.data for r in rows] == [{"prompt": f"q{i}", "completion": f"a{i}"} for i in range(20)]
    assert rows[3].where == f"{hub_folder} split train row 4"
    assert rows[0].source == "mine"
    assert opened.note.endswith("split train has no revision in prepare.sources: what it holds may change")


@pytest.fixture
def hub(hub_folder, monkeypatch):
    """A server that answers as the Hub does when asked what a revision of the dataset `some/data` is; `load_dataset` reads a local
    copy. Yields the revisions that were loaded."""
    import datasets
    import huggingface_hub

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            known = {"/api/datasets/some/data": "a" * 40, "/api/datasets/some/data/revision/v2": "b" * 40}
            sha = known.get(self.path.split("?")[0])
            body = json.dumps({"id": "some/data", "sha": sha} if sha else {"error": "no such thing"}).encode()
            self.send_response(200 if sha else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(huggingface_hub.hf_api.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    loaded, load = [], datasets.load_dataset

    def load_dataset(path, config, *, split, revision, streaming):
        loaded.append(revision)
        return load(str(hub_folder), config, split=split, streaming=streaming)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    yield loaded
    server.shutdown()


@pytest.mark.parametrize(("revision", "commit"), [(None, "a" * 40), ("v2", "b" * 40), ("c" * 40, "c" * 40), ("gone", None)])
def test_a_dataset_is_read_at_the_commit_that_is_recorded(hub, revision, commit):
    opened = sources.hub_source(Source(path="some/data", revision=revision))
    assert opened.revision == commit
    assert hub == [commit or revision]
    assert (opened.note or "").endswith(f"it is at {commit} now, set `revision` to that") == (revision is None)


def test_the_metrics_record_the_commit(hub, tmp_path, verifier, monkeypatch):
    from eagle3dvc import prompts

    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    asked = Params(max_samples=5, prepare={"sources": [{"path": "some/data", "name": "mine"}]})
    metrics = prompts.build(asked, verifier, tmp_path / "out", notice=lambda text: None)
    assert metrics["revisions"] == {"mine": "a" * 40}


def test_dataset_errors_name_it(hub_folder):
    with pytest.raises(UserError, match=r"the dataset .*ds split nosuch cannot be loaded .*nosuch.*check path, config, split"):
        sources.hub_source(Source(path=str(hub_folder), split="nosuch"))


def test_dataset_with_images_is_refused(tmp_path):
    import datasets

    features = datasets.Features({"text": datasets.Value("string"), "picture": datasets.Image()})
    folder = tmp_path / "pictures"
    folder.mkdir()
    data = datasets.Dataset.from_dict({"text": ["a"], "picture": [None]}, features=features)
    data.to_parquet(str(folder / "train.parquet"))
    with pytest.raises(UserError, match="has the column 'picture' of type Image: only text is supported"):
        sources.hub_source(Source(path=str(folder)))


def test_dataset_that_cannot_be_reached_is_an_error(monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    message = r"prepare.sources\[0\]: the dataset nobody/nothing split train cannot be loaded .* that the Hub can be reached"
    with pytest.raises(UserError, match=message):
        sources.open_sources(Params(max_samples=1, prepare={"sources": [{"path": "nobody/nothing"}]}))
