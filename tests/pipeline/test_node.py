"""A rented node: a fresh clone with nothing but the S3 remote grows the data four times, dies halfway, and is replaced."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from tests.pipeline.test_remotes import keys_of, s3  # noqa: F401  the fixture

pytestmark = pytest.mark.slow


def node(machine):
    """`eagle3dvc node`, what `make node` runs."""
    r = machine.run("eagle3dvc", "node", "--json")
    return json.loads(r.stdout)


def test_growth_on_a_node_that_is_replaced_halfway(project, s3, tmp_path):  # noqa: F811
    project.dvc("push")
    old = project.shards()
    # on the owner's machine: four times the samples, streamed as they are made, into git; nothing is run there
    project.set(max_samples=160, extract__push_while_extracting=True)
    project.commit("hero run")

    first = project.clone(tmp_path / "first" / "project")
    ready = node(first)
    assert ready["run"][:3] == ["prepare", "extract", "train"]
    assert ready["pulled"] == ["data/verifier"]
    assert not (first.root / "data" / "hidden_states").exists(), "terabytes would have been pulled before they are asked for"
    run = first.popen(*ready["command"].split())
    deadline = time.monotonic() + 400
    while not streamed(s3):
        assert run.poll() is None and time.monotonic() < deadline, run.stdout.read()
        time.sleep(0.1)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    there = streamed(s3)
    assert 1 <= len(there) <= 12

    second = project.clone(tmp_path / "second" / "project")
    ready = node(second)
    second.dvc("repro", "--allow-missing", "extract")
    log = second.log("extract")
    assert log["shards_reused"] >= len(old) + len(there)
    assert log["shards_reused"] + log["shards_computed"] == 16
    assert log["tokens_computed"] < second.metrics("extract")["tokens"] * 12 / 16 + 1
    assert log["shards_pushed"] == log["shards_computed"] and log["push_failures"] == 0
    assert old.items() <= second.shards().items(), "the owner's shards, byte for byte"
    assert second.run("eagle3dvc", "verify").returncode == 0
    # the list of the directory is all that is left to push
    before = {k for k in keys_of(s3) if "/files/md5/" in k}
    second.dvc("push", "extract")
    assert {k.endswith(".dir") for k in {k for k in keys_of(s3) if "/files/md5/" in k} - before} == {True}


def streamed(client):
    return {k for k in keys_of(client) if "/eagle3dvc-shards/" in k}
