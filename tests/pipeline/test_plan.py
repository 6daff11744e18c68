"""The plan from real logs: planned again, the same samples take what they took."""

import json

import pytest


def test_planning_the_same_samples_gives_the_times_that_were_logged(finished_project):
    args = ("eagle3dvc", "plan", "--samples", "40", "--have", "0", "--from", "logs", "--json")
    planned = json.loads(finished_project.run(*args).stdout)["stages"]
    assert planned.keys() == {"verifier", "prepare", "extract", "train", "export", "evaluate"}
    for stage, (low, high) in planned.items():  # the rates in the logs are rounded
        took = finished_project.log(stage)["seconds_stage"]
        assert low < took < high and (low + high) / 2 == pytest.approx(took, rel=0.01, abs=0.05), stage


def test_stages_log_which_of_their_seconds_grow(finished_project):
    for stage in ("prepare", "evaluate"):
        log = finished_project.log(stage)
        assert 0 < log["seconds_growing"] < log["seconds_stage"], stage
    train = finished_project.log("train")
    assert train["drafter_parameters"] > 1000
    parts = [train[k] for k in ("seconds", "seconds_validation", "seconds_checkpoints")]
    assert min(parts) > 0 and sum(parts) < train["seconds_stage"]
