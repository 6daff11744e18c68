import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle3dvc.errors import UserError
from eagle3dvc.prompts import shards


def samples(n, seed=0):
    rng, made = np.random.default_rng(seed), []
    for i in range(n):
        ids = rng.integers(0, 1000, rng.integers(1, 40)).astype(np.int32)
        mask = rng.random(len(ids)) < 0.5
        name = shards.sample_id(ids, mask)
        made.append(shards.Sample(name, ids, mask, f"source{i % 2}", shards.split_of(name, 0.3)))
    return made


def same(a, b):
    return (
        (a.sample_id, a.source, a.split) == (b.sample_id, b.source, b.split)
        and a.token_ids.dtype == np.int32
        and a.loss_mask.dtype == bool
        and np.array_equal(a.token_ids, b.token_ids)
        and np.array_equal(a.loss_mask, b.loss_mask)
    )


def test_round_trip_and_same_bytes(tmp_path):
    made = samples(25)
    shards.write_shard(tmp_path / "a.parquet", made)
    shards.write_shard(tmp_path / "b.parquet", list(made))
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    back = shards.read_shard(tmp_path / "a.parquet")
    assert len(back) == 25
    assert all(same(a, b) for a, b in zip(made, back))


def test_columns_are_as_documented(tmp_path):
    shards.write_shard(tmp_path / "a.parquet", samples(3))
    types = {f.name: str(f.type) for f in pq.read_schema(tmp_path / "a.parquet")}
    assert types == {
        "sample_id": "string",
        "token_ids": "list<element: int32>",
        "loss_mask": "list<element: bool>",
        "source": "string",
        "split": "string",
    }


def test_writer_numbers_shards_and_iter_reads_them_in_order(tmp_path):
    made = samples(23)
    writer = shards.ShardWriter(tmp_path, 10)
    for sample in made:
        writer.add(sample)
    writer.flush()
    writer.flush()  # nothing pending: nothing written
    assert [s["file"] for s in writer.shards] == ["00000.parquet", "00001.parquet", "00002.parquet"]
    assert [s["samples"] for s in writer.shards] == [10, 10, 3]
    assert sum(s["tokens"] for s in writer.shards) == sum(len(s.token_ids) for s in made)
    assert [s.sample_id for s in shards.iter_samples(tmp_path)] == [s.sample_id for s in made]
    heldout = [s.sample_id for s in made if s.split == "heldout"]
    assert 0 < len(heldout) < 23
    assert [s.sample_id for s in shards.iter_samples(tmp_path, "heldout")] == heldout


def test_shard_files_sort_by_number(tmp_path):
    for name in ("99999.parquet", "100000.parquet", "00000.parquet", "notes.parquet"):
        (tmp_path / name).touch()
    assert [f.name for f in shards.shard_files(tmp_path)] == ["00000.parquet", "99999.parquet", "100000.parquet"]


def test_sample_id_depends_on_tokens_and_mask():
    ids, mask = np.arange(5, dtype=np.int32), np.array([0, 1, 1, 0, 1], bool)
    assert len(shards.sample_id(ids, mask)) == 32
    assert shards.sample_id(ids, mask) == shards.sample_id(ids.astype(np.int64), mask)
    assert len({shards.sample_id(ids, mask), shards.sample_id(ids, ~mask), shards.sample_id(ids[::-1].copy(), mask)}) == 3


def test_split_follows_the_fraction_and_only_grows():
    names = [s.sample_id for s in samples(2000, seed=1)]
    held = {f: {n for n in names if shards.split_of(n, f) == "heldout"} for f in (0.0, 0.1, 0.3)}
    assert not held[0.0]
    assert held[0.1] < held[0.3]
    assert 140 < len(held[0.1]) < 260


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda p: p.unlink(), "does not exist: run `dvc repro prepare`"),
        (lambda p: p.write_bytes(p.read_bytes()[:-30]), "is not a readable prompt shard"),
        (lambda p: pq.write_table(pa.table({"a": [1]}), p), "has the columns a: int64, not those of a prompt shard"),
    ],
)
def test_damaged_shards_are_refused(tmp_path, damage, message):
    path = tmp_path / "00000.parquet"
    shards.write_shard(path, samples(3))
    damage(path)
    with pytest.raises(UserError, match=message):
        shards.read_shard(path)


def test_folder_without_shards_or_manifest_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no prompt shard"):
        shards.shard_files(tmp_path)
    with pytest.raises(UserError, match="manifest.json does not exist"):
        shards.read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(UserError, match="has format 99, this version reads 1"):
        shards.read_manifest(tmp_path)
