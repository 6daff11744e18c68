"""The shard format: every bit is under a checksum, same inputs give same bytes, and safetensors reads what we write."""

import hashlib
import json
import pickle
import random
import shutil
import threading

import numpy as np
import pytest
import torch
from safetensors import safe_open

from eagle3dvc.errors import UserError
from eagle3dvc.hidden_states import format as fmt
from eagle3dvc.hidden_states.check import check_shard
from eagle3dvc.hidden_states.reader import Damaged, Shard

LENGTHS = [7, 2, 33, 5]
LAYERS, HIDDEN = 3, 16


def tokens(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 1000, n).astype(np.int32) for n in LENGTHS]


def states(seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(n, LAYERS, HIDDEN, generator=g) * 10 for n in LENGTHS]


def request(folder, stored="bfloat16", seed=0, engine_version="1"):
    ids = [2, 4, 8]
    key = fmt.shard_key("test:v", ids, stored, {"dtype": "float32"}, tokens(seed))
    header = {
        "identity": "test:v",
        "layer_ids": ids,
        "stored_dtype": stored,
        "numerics": {"dtype": "float32"},
        "engine": "t",
        "engine_version": engine_version,
    }
    return fmt.ShardRequest(key, tokens(seed), header, HIDDEN, folder / f"{key}.safetensors")


def write(folder, order=(0, 1, 2, 3), **kw):
    buffer = fmt.ShardBuffer(request(folder, **kw))
    for i in order:
        buffer.put(i, states()[i])
    return buffer.finish()


@pytest.mark.parametrize("stored", list(fmt.DTYPES))
def test_round_trip(tmp_path, stored):
    done = write(tmp_path, stored=stored)
    shard = Shard(done.path)
    assert done.md5 == hashlib.md5(done.path.read_bytes()).hexdigest()
    assert done.bytes == done.path.stat().st_size
    assert (done.tokens, done.samples, len(shard)) == (sum(LENGTHS), 4, 4)
    for i, x in enumerate(states()):
        assert np.array_equal(shard.token_ids(i), tokens()[i])
        if stored == "float8_e4m3fn":
            # e4m3 has 3 mantissa bits: half a step is 1/16 of the value, and the smallest step is amax/448/512 of the row
            bound = x.abs() / 16 + x.abs().amax(-1, keepdim=True) / 448 / 512 + x.abs() / 128
            assert ((shard.states(i).float() - x).abs() <= bound).all()
        else:
            assert torch.equal(shard.states(i), x.to(getattr(torch, stored)))
        shard.check(i)


def test_safetensors_reads_it(tmp_path):
    done = write(tmp_path, stored="float32")
    with safe_open(done.path, "pt") as f:
        assert torch.equal(f.get_tensor("hidden_states"), torch.cat(states()))
        assert f.get_tensor("token_ids").tolist() == np.concatenate(tokens()).tolist()
        assert f.get_tensor("offsets").tolist() == [0, 7, 9, 42, 47]
        assert list(f.metadata()) == [fmt.META]
        meta = json.loads(f.metadata()[fmt.META])
    assert meta["key"] == done.key and meta["layer_ids"] == [2, 4, 8] and meta["format"] == fmt.FORMAT


def test_same_inputs_same_bytes_in_any_order(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert write(tmp_path / "a").md5 == write(tmp_path / "b", order=[2, 0, 3, 1]).md5


@pytest.mark.parametrize("stored", list(fmt.DTYPES))
def test_streamed_in_pieces_gives_the_same_file(tmp_path, stored):
    """Whatever is written early: the same bytes and md5, and no file of its name before the end."""
    want = write(tmp_path, stored=stored).path.read_bytes()
    buffer = fmt.ShardBuffer(request(tmp_path / "b", stored=stored))
    buffer.request.path.parent.mkdir()
    for i, ready in zip([1, 0, 3, 2], [0, 2, 2, 4], strict=True):
        buffer.put(i, states()[i])
        assert buffer.ready == ready
        buffer.stream(buffer.ready)
        assert buffer.written == ready and buffer.pending == 0 and not buffer.request.path.exists()
    done = buffer.finish()
    assert done.path.read_bytes() == want and done.md5 == hashlib.md5(want).hexdigest()


def test_a_streamed_file_that_fails_leaves_nothing(tmp_path):
    buffer = fmt.ShardBuffer(request(tmp_path))
    buffer.put(0, states()[0])
    buffer.stream(1)
    assert [p.suffix for p in tmp_path.iterdir()] == [".tmp"]
    with pytest.raises(RuntimeError, match="never extracted"):
        buffer.finish()
    assert list(tmp_path.iterdir()) == []


def test_key_depends_on_what_bytes_depend_on():
    base = ("v", [2, 4, 8], "bfloat16", {"dtype": "float32"}, tokens())
    key = fmt.shard_key(*base)
    assert key == fmt.shard_key("v", [2, 4, 8], "bfloat16", {"dtype": "float32", "quantization": None}, tokens())
    changed = [
        ("w", *base[1:]),
        ("v", [2, 5, 8], *base[2:]),
        (*base[:2], "float32", *base[3:]),
        (*base[:3], {"dtype": "bfloat16"}, base[4]),
        (*base[:4], tokens(1)),
        (*base[:4], tokens()[:3]),
        # the same tokens cut into other samples
        (*base[:4], [np.concatenate(tokens()[:2]), *tokens()[2:]]),
    ]
    keys = {fmt.shard_key(*c) for c in changed}
    assert len(keys) == len(changed) and key not in keys


def test_key_of_name():
    key = "0123456789abcdef01234567"
    assert fmt.key_of_name(f"data/hidden_states/00012-{key}.safetensors") == key
    assert fmt.key_of_name(f"{key}.safetensors") == key
    for other in ("model.safetensors", f"{key}.parquet", f"00000-{key[:-1]}.safetensors", f"00000-{key[:-1]}g.safetensors"):
        assert fmt.key_of_name(other) is None


@pytest.mark.parametrize("stored", ["bfloat16", "float8_e4m3fn"])
def test_every_flipped_bit_is_found(tmp_path, stored):
    """By `verify` and by a reader that checks each sample on first use, wherever the bit lies."""
    done = write(tmp_path, stored=stored)
    data = bytearray(done.path.read_bytes())
    rng = random.Random(0)
    layout = fmt.ShardBuffer(request(tmp_path, stored=stored)).layout
    # 200 positions over the file: the header's length field, its text, offsets and tokens, states, all that stands behind them
    edges = [0, 8, layout.offsets_at, layout.states_at, layout.padding_at, len(data)]
    places = [rng.randrange(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True) for _ in range(40)]
    for at in places:
        bit = 1 << rng.randrange(8)
        data[at] ^= bit
        bad = tmp_path / "bad" / done.path.name
        bad.parent.mkdir(exist_ok=True)
        bad.write_bytes(data)
        data[at] ^= bit
        with pytest.raises(Damaged):
            check_shard(bad, None)
        with pytest.raises(Damaged):
            shard = Shard(bad)
            for i in range(len(shard)):
                shard.check(i)
    check_shard(done.path, None)


@pytest.mark.parametrize("keep", [0, 5, 8, 100, 0.5, 0.999])
def test_truncated_file(tmp_path, keep):
    done = write(tmp_path)
    data = done.path.read_bytes()
    done.path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(Damaged, match=done.key):
        Shard(done.path)


def test_missing_doubled_and_not_finite_samples(tmp_path):
    buffer = fmt.ShardBuffer(request(tmp_path))
    buffer.put(0, states()[0])
    with pytest.raises(RuntimeError, match="twice"):
        buffer.put(0, states()[0])
    with pytest.raises(RuntimeError, match="never extracted"):
        buffer.finish()
    for stored in fmt.DTYPES:
        for bad in (float("nan"), float("inf")):
            buffer = fmt.ShardBuffer(request(tmp_path, stored=stored))
            for i, x in enumerate(states()):
                if i == 2:
                    x[4, 1, 3] = bad
                buffer.put(i, x)
            with pytest.raises(UserError, match="sample 2 .* not finite"):
                buffer.finish()
    assert list(tmp_path.iterdir()) == []


def test_disk_full_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(fmt.os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_storage_is_reused_without_traces(tmp_path):
    """A pinned buffer that held another shard before gives the same bytes as a fresh one."""
    want = write(tmp_path)
    storage = torch.full((want.bytes + 1000,), 255, dtype=torch.uint8)
    want.path.unlink()
    buffer = fmt.ShardBuffer(request(tmp_path), storage)
    for i, x in enumerate(states()):
        buffer.put(i, x)
    assert buffer.finish().md5 == want.md5


def test_shard_pickles_and_keeps_no_descriptor(tmp_path):
    import os

    done = write(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    shards = [Shard(done.path) for _ in range(50)]
    assert len(os.listdir("/proc/self/fd")) == before
    again = pickle.loads(pickle.dumps(shards[0]))
    assert torch.equal(again.states(2), shards[0].states(2))


def test_views_are_zero_copy_and_survive_release(tmp_path):
    done = write(tmp_path, stored="float32")
    shard = Shard(done.path)
    x = shard.states(2)
    assert x.data_ptr() == shard.states(2).data_ptr()
    before = x.clone()
    shard.release(2)
    assert torch.equal(x, before)


def test_renamed_shard_is_found(tmp_path):
    done = write(tmp_path)
    other = tmp_path / f"00000-{'0' * 24}.safetensors"
    shutil.copy(done.path, other)
    with pytest.raises(Damaged, match="do not agree on its key"):
        check_shard(other, None)


def test_an_error_of_hashing_is_an_error_of_writing(tmp_path, monkeypatch):
    """Else a file would carry the md5 of half of it."""

    class Broken:
        def update(self, piece):
            raise MemoryError("no room to hash")

    file = fmt.DurableFile(tmp_path / "a")
    file.write(memoryview(b"whole"))
    monkeypatch.setattr(file, "_md5", Broken())
    with pytest.raises(MemoryError, match="no room"):
        file.write(memoryview(b"half"))
    file.abort()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_ends_hashing_too(tmp_path, monkeypatch):
    monkeypatch.setattr(fmt, "_CHUNK", 1000)
    file = fmt.DurableFile(tmp_path / "a")
    hashed, began = [], threading.Event()

    class Slow:
        def update(self, piece):
            began.set()
            hashed.append(len(piece))
            full.wait(10)

    full = threading.Event()

    class Full:
        def write(self, piece):
            began.wait(10)
            full.set()
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    real = file._file
    monkeypatch.setattr(file, "_md5", Slow())
    monkeypatch.setattr(file, "_file", Full())
    with pytest.raises(OSError, match="No space"):
        file.write(memoryview(bytes(10_000_000)))
    assert sum(hashed) < 10_000_000 and not [t for t in threading.enumerate() if t.name == "md5"]
    real.close()
    file.abort()
    assert not list(tmp_path.iterdir())
