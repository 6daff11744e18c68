"""The cache as training reads it: by sample, checked on first use, for any number of shards."""

import os
import pickle
import resource

import numpy as np
import pytest
import torch

from eagle3dvc.errors import UserError
from eagle3dvc.hidden_states import check, inspect
from eagle3dvc.hidden_states.format import ShardBuffer, ShardRequest, shard_key
from eagle3dvc.hidden_states.reader import Damaged, HiddenStates
from eagle3dvc.prompts.shards import Sample, sample_id, write_shard

LAYERS, HIDDEN = 2, 8


def make_cache(root, shards=3, per_shard=4, identity="t:v", stored="float32", start=0):
    (root / "hidden_states").mkdir(parents=True, exist_ok=True)
    (root / "prompts").mkdir(exist_ok=True)
    rng = np.random.default_rng(start)
    want = []
    for k in range(start, start + shards):
        samples = []
        for i in range(per_shard):
            tokens = rng.integers(0, 100, rng.integers(2, 9)).astype(np.int32)
            mask = np.arange(len(tokens)) >= 1
            samples.append(Sample(sample_id(tokens, mask), tokens, mask, f"s{i % 2}", "heldout" if i == 1 else "train"))
        write_shard(root / "prompts" / f"{k:05d}.parquet", samples)
        token_ids = [s.token_ids for s in samples]
        header = {
            "identity": identity,
            "layer_ids": [2, 4],
            "stored_dtype": stored,
            "numerics": {},
            "engine": "t",
            "engine_version": "1",
        }
        key = shard_key(identity, [2, 4], stored, {}, token_ids)
        buffer = ShardBuffer(ShardRequest(key, token_ids, header, HIDDEN, root / f"hidden_states/{k:05d}-{key}.safetensors"))
        for i, t in enumerate(token_ids):
            x = torch.from_numpy(rng.standard_normal((len(t), LAYERS, HIDDEN)).astype(np.float32))
            buffer.put(i, x)
            want.append((samples[i], x))
        buffer.finish()
    return want


def open_cache(root, **kw) -> HiddenStates:
    return HiddenStates(root / "hidden_states", root / "prompts", **kw)


def test_random_access_splits_and_pickling(tmp_path):
    want = make_cache(tmp_path)
    data = open_cache(tmp_path)
    assert len(data) == 12 and data.layer_ids == [2, 4] and data.identity == "t:v" and data.hidden_size == HIDDEN
    assert data.splits["heldout"].tolist() == [1, 5, 9]
    assert sorted([*data.splits["train"], *data.splits["heldout"]]) == list(range(12))
    again = pickle.loads(pickle.dumps(data))
    for source in (data, again):
        for i in np.random.default_rng(0).permutation(12):
            sample, x = want[i]
            item = source[i]
            assert torch.equal(item.hidden_states, x)
            assert item.token_ids.tolist() == sample.token_ids.tolist() and item.token_ids.dtype == torch.int64
            assert item.loss_mask.tolist() == sample.loss_mask.tolist()
            assert (item.sample_id, item.source, item.split) == (sample.sample_id, sample.source, sample.split)
            source.release(i)
    assert [len(s.token_ids) for s, _ in want] == data.lengths.tolist()
    with pytest.raises(IndexError):
        data[12]


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_damage_is_found_on_first_use_only_where_it_is(tmp_path):
    make_cache(tmp_path)
    flip(sorted((tmp_path / "hidden_states").iterdir())[1], at=-64)  # the states of sample 3: 48 bytes of index stand behind
    data = open_cache(tmp_path)
    for i in [*range(7), *range(8, 12)]:
        data[i]
    with pytest.raises(Damaged, match="00001-.* sample 3 .*verify --repair"):
        data[7]
    open_cache(tmp_path, verify=False)[7]


def test_caches_that_do_not_belong_together(tmp_path):
    make_cache(tmp_path / "a")
    make_cache(tmp_path / "a", shards=1, start=3, identity="other:v")
    with pytest.raises(UserError, match="mixes two configurations"):
        list(open_cache(tmp_path / "a"))
    make_cache(tmp_path / "b")
    next((tmp_path / "b/prompts").glob("00002*")).unlink()
    with pytest.raises(UserError, match="shard 00002 is in only one of them"):
        open_cache(tmp_path / "b")
    # the same number of samples with other tokens
    make_cache(tmp_path / "c")
    make_cache(tmp_path / "d", start=7)
    for old, new in zip(sorted((tmp_path / "c/prompts").iterdir()), sorted((tmp_path / "d/prompts").iterdir())):
        old.write_bytes(new.read_bytes())
    with pytest.raises(UserError, match="other tokens"):
        list(open_cache(tmp_path / "c"))
    (tmp_path / "e/hidden_states").mkdir(parents=True)
    with pytest.raises(UserError):
        open_cache(tmp_path / "e")


def test_more_shards_than_file_descriptors(tmp_path):
    make_cache(tmp_path, shards=300, per_shard=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
    try:
        data = open_cache(tmp_path)
        assert sum(len(item.token_ids) for item in data) == data.lengths.sum()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_verify_reports_every_kind_of_damage(tmp_path):
    make_cache(tmp_path, shards=6)
    files = sorted((tmp_path / "hidden_states").iterdir())
    with pytest.raises(UserError, match="--prompts FOLDER"):
        check.verify(tmp_path / "hidden_states", tmp_path / "promptz", None)
    with pytest.raises(UserError, match="--verifier FOLDER"):
        check.verify(tmp_path / "hidden_states", tmp_path / "prompts", tmp_path / "nothing")
    report = check.verify(tmp_path / "hidden_states", tmp_path / "prompts", None)
    assert (report.shards, report.samples, report.bad) == (6, 24, {})
    assert check.verify(tmp_path / "hidden_states", tmp_path / "prompts", None, fraction=0.25).samples == 6
    flip(files[0], at=-64)
    files[1].write_bytes(files[1].read_bytes()[:-10])
    os.rename(files[2], files[2].with_name("00002-" + "0" * 24 + ".safetensors"))
    files[3].unlink()
    flip(files[4], 20)
    os.rename(tmp_path / "prompts/00005.parquet", tmp_path / "prompts/00009.parquet")
    files[5].with_name("00006-" + "1" * 24 + ".safetensors").mkdir()
    report = check.verify(tmp_path / "hidden_states", tmp_path / "prompts", None)
    bad = report.bad
    # only what is itself damaged may be removed by a repair: not what is missing, surplus or no file
    assert {os.path.basename(k)[:5] for k in report.damaged} == {"00000", "00001", "00002", "00004"}
    reasons = {os.path.basename(k)[:5]: v for k, v in bad.items()}
    assert "does not match its checksum" in reasons["00000"]
    assert "bytes where its header says" in reasons["00001"]
    assert "do not agree on its key" in reasons["00002"]
    assert "has no hidden-state shard" in reasons["00003"] and "has no hidden-state shard" in reasons["00009"]
    assert "header or index" in reasons["00004"]
    assert "no prompt shard 00005" in reasons["00005"]
    assert "cannot be read" in reasons["00006"]
    assert len(bad) == 8


def test_inspect(tmp_path, capsys):
    make_cache(tmp_path)
    summary = inspect.inspect(tmp_path / "hidden_states", tmp_path)
    assert (summary["shards"], summary["samples"], summary["layer_ids"]) == (3, 12, [2, 4])
    assert summary["bytes"] == sum(f.stat().st_size for f in (tmp_path / "hidden_states").iterdir())
    one = inspect.inspect(sorted((tmp_path / "hidden_states").iterdir())[0], tmp_path)
    assert (one["shards"], one["samples"]) == (1, 4)
    prompts = inspect.inspect(tmp_path / "prompts", tmp_path)
    assert prompts["by_split"] == {"train": 9, "heldout": 3} and prompts["tokens"] == summary["tokens"]
    inspect.show(summary, as_json=False)
    assert "bytes_per_token" in capsys.readouterr().out
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(UserError, match="holds neither"):
        inspect.inspect(tmp_path / "x.txt")
    with pytest.raises(UserError, match="does not exist"):
        inspect.inspect(tmp_path / "nothing")


def test_rows_that_json_cannot_hold_are_named(tmp_path):
    from eagle3dvc.prompts.sources import _json_lines

    for text, why in (('{"a": ' + "1" * 5000 + "}", "too many digits"), ("[" * 100_000, "nested too deeply")):
        (tmp_path / "x.jsonl").write_text('{"a": 1}\n' + text + "\n")
        with pytest.raises(UserError, match=f"line 2: broken JSON .*{why}"):
            list(_json_lines(tmp_path / "x.jsonl"))
