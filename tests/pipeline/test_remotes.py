"""Shards travel: other clones, other machines, S3; only new bytes move, and nothing that a remote holds is computed again."""

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.pipeline.conftest import Project
from tests.pipeline.test_growth import extract


def use_remote(project: Project, folder) -> None:
    project.dvc("remote", "modify", "local", "url", str(folder))
    project.commit("remote")


def test_fresh_clone_with_and_without_pull(project, tmp_path):
    use_remote(project, tmp_path / "remote")
    project.set(max_samples=60)
    project.dvc("repro", "extract")
    project.commit("60")
    project.dvc("push")
    before = project.shards()

    pulled = project.clone(tmp_path / "a" / "pulled")
    pulled.dvc("pull", "extract", "prepare", "verifier")
    assert pulled.shards() == before
    assert extract(pulled) == (0, 0)

    bare = project.clone(tmp_path / "b" / "bare")
    bare.set(max_samples=70)
    assert extract(bare) == (6, 1)
    assert bare.log("extract")["reused_from"] == {"remote": 6}
    assert before.items() <= bare.shards().items()


def test_a_remote_out_of_reach_is_not_a_reason_to_recompute_everything(project, tmp_path):
    use_remote(project, tmp_path / "remote")
    project.dvc("push")
    clone = project.clone(tmp_path / "c" / "clone")
    clone.dvc("pull", "prepare", "verifier")
    shutil.rmtree(tmp_path / "remote")
    clone.dvc("remote", "modify", "--local", "local", "url", str(tmp_path / "nowhere" / "remote"))
    clone.set(max_samples=50)
    r = clone.dvc("repro", "extract", check=False)
    assert r.returncode != 0 and "allow_recompute" in r.stderr + r.stdout
    clone.set(extract__allow_recompute=True)
    assert extract(clone) == (0, 5)
    assert project.shards().items() <= clone.shards().items()


def test_streaming_push_lets_a_replacement_machine_continue(project, tmp_path):
    """The first machine never commits; a clone of the repository finds what it had streamed."""
    use_remote(project, tmp_path / "remote")
    project.set(max_samples=70, extract__push_while_extracting=True)
    project.dvc("repro", "extract")
    assert project.log("extract")["shards_pushed"] == 3 and project.log("extract")["push_failures"] == 0
    after = project.shards()
    clone = project.clone(tmp_path / "d" / "clone")  # of the commit before the run; old shards were never pushed
    clone.set(max_samples=70)
    assert extract(clone) == (3, 4)
    assert clone.shards() == after
    project.commit("70")
    pushed = project.dvc("push", "extract").stdout
    assert "5 files pushed" in pushed  # 4 old shards and the list; the 3 streamed ones are found there


@pytest.fixture
def s3(project, tmp_path):
    """A real S3 server on loopback; the project's default remote is a bucket on it."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    server = subprocess.Popen(
        [str(Path(sys.executable).parent / "moto_server"), "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        import boto3

        url = f"http://127.0.0.1:{port}"
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
        client = boto3.client(
            "s3", endpoint_url=url, aws_access_key_id="test", aws_secret_access_key="test", region_name="us-east-1"
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                client.create_bucket(Bucket="bucket")
                break
            except Exception:
                assert time.monotonic() < deadline and server.poll() is None
                time.sleep(0.2)
        project.env |= keys
        project.dvc("remote", "add", "-f", "-d", "s3", "s3://bucket/eagle3dvc")
        project.dvc("remote", "modify", "s3", "endpointurl", url)
        project.dvc("remote", "modify", "s3", "verify", "true")
        project.dvc("remote", "modify", "s3", "jobs", "4")
        project.commit("s3")
        yield client
    finally:
        server.kill()
        server.wait()


def keys_of(client) -> set[str]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket="bucket")
    return {o["Key"] for page in pages for o in page.get("Contents", [])}


def test_s3_moves_only_new_bytes_and_continues(project, s3, tmp_path):
    project.dvc("push", "extract")
    first = keys_of(s3)
    project.set(max_samples=60, extract__push_while_extracting=True)
    project.dvc("repro", "extract")
    streamed = keys_of(s3) - first
    assert (
        len([k for k in streamed if "/files/md5/" in k]) == 2 and len([k for k in streamed if "/eagle3dvc-shards/" in k]) == 2
    )
    project.commit("60")
    assert "1 file pushed" in project.dvc("push", "extract").stdout  # the list; every shard is there
    assert "up to date" in project.dvc("push", "extract").stdout

    # a clone that lost its connection after some objects: the next run fetches the rest and computes nothing
    clone = project.clone(tmp_path / "clone" / "project")
    gone = sorted(k for k in keys_of(s3) if "/files/md5/" in k and not k.endswith(".dir"))[:1]
    kept = {k: s3.get_object(Bucket="bucket", Key=k)["Body"].read() for k in gone}
    for k in gone:
        s3.delete_object(Bucket="bucket", Key=k)
    clone.dvc("pull", "extract", check=False)
    for k, body in kept.items():
        s3.put_object(Bucket="bucket", Key=k, Body=body)
    assert extract(clone)[1] == 0
    assert clone.shards() == project.shards()


def test_a_damaged_remote_object_is_not_taken(project, s3, tmp_path):
    project.dvc("push", "extract", "prepare", "verifier")
    shards = project.shards()
    md5 = shards[sorted(shards)[0]]
    key = f"eagle3dvc/files/md5/{md5[:2]}/{md5[2:]}"
    body = bytearray(s3.get_object(Bucket="bucket", Key=key)["Body"].read())
    body[-1] ^= 1
    s3.put_object(Bucket="bucket", Key=key, Body=bytes(body))
    clone = project.clone(tmp_path / "clone" / "project")
    clone.set(max_samples=50)
    assert extract(clone) == (3, 2)
    assert shards.items() <= clone.shards().items()
