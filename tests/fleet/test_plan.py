"""The plan: calibration against the known run, scaling rules, budgets, and plans from a run's own logs."""

import json

import pytest
from typer.testing import CliRunner

from eagle3dvc.cli import app
from eagle3dvc.errors import UserError
from eagle3dvc.fleet import measurement as M
from eagle3dvc.fleet import plan as P
from eagle3dvc.fleet.measurement import Range

KIMI = M.measurement("kimi-k2.5-local")
LOCAL, B300 = M.hardware("rtxpro6000x8"), M.hardware("b300x8")


def test_the_known_run_is_reproduced_on_its_own_hardware():
    seconds = {(line.stage, line.what): line.seconds for line in P.make(KIMI, 1000, LOCAL, LOCAL).lines}
    assert seconds["extract", "load the verifier"] == Range.of(22.5 * 60)
    assert seconds["extract", "hidden states"].low == pytest.approx(2.9 * 60, rel=0.02)
    assert seconds["train", "optimizer steps"].high == pytest.approx(27.7 * 60, rel=0.02)


@pytest.mark.parametrize("samples", [50_000, 75_000, 100_000])
def test_calibration_on_an_nvl8_of_b300(samples):
    plan = P.make(KIMI, samples, LOCAL, B300)
    assert 6 <= plan.hours.low <= plan.hours.high <= 18
    assert 180 <= plan.cost.low <= plan.cost.high <= 900
    assert plan.price_per_hour == Range(30, 50)
    assert plan.hidden_state_bytes == pytest.approx(samples * 503 * 57344)
    assert all(m.fits for m in plan.memory)


def test_every_line_says_what_it_hangs_on_and_the_total_is_their_sum():
    plan = P.make(KIMI, 100_000, LOCAL, B300)
    assert all(line.hangs_on for line in plan.lines)
    assert plan.seconds.high == pytest.approx(sum(line.seconds.high for line in plan.lines if not line.beside))
    assert plan.seconds.low == pytest.approx(sum(r.low for r in plan.stage_seconds().values()))


def seconds_of(plan, what):
    (line,) = [line for line in plan.lines if line.what == what]
    return line.seconds


def changed(hardware, **figures):
    return M.Hardware.model_validate({**hardware.model_dump(), **figures, "name": "changed"})


def test_what_limits_each_part():
    """Twice one rate of the target shortens the parts that it limits, and no others."""
    base = P.make(KIMI, 100_000, LOCAL, B300)
    parts = {line.what for line in base.lines}

    def shortened(**figures):
        other = P.make(KIMI, 100_000, LOCAL, changed(B300, **figures))
        return {w for w in parts if seconds_of(other, w) != seconds_of(base, w)}

    assert shortened(dense_bf16_tflops=4500) == {"hidden states", "optimizer steps"}
    assert shortened(memory_bandwidth_gb_s=16000) == {"optimizer steps"}
    assert shortened(allreduce_gb_s=[1000, 1600]) == {"hidden states"}
    assert shortened(disk_read_gb_s=[8, 24]) == {"load the verifier"}
    network = {"download the verifier", "hidden states, while others run"}
    assert shortened(network_gb_s=[2, 6]) == network
    # a slow disk is the limit of extraction whatever the GPUs do
    slow = changed(B300, disk_write_gb_s=0.5)
    assert seconds_of(P.make(KIMI, 100_000, LOCAL, slow), "hidden states") == Range.of(100_000 * 503 * 57344 / 0.5e9)


def test_launch_time_does_not_shrink_on_a_faster_gpu():
    endless = changed(B300, dense_bf16_tflops=1e9, memory_bandwidth_gb_s=1e9, disk_read_gb_s=1e6)
    train = seconds_of(P.make(KIMI, 1000, LOCAL, endless), "optimizer steps")
    assert train.low == pytest.approx(9972 * 0.010, rel=0.01)
    assert train.high == pytest.approx(9972 * 0.020, rel=0.01)


def test_push_is_waited_for_only_where_it_outlasts_the_work():
    fast = P.make(KIMI, 10_000, LOCAL, B300, bandwidth_gb_s=10)
    slow = P.make(KIMI, 10_000, LOCAL, B300, bandwidth_gb_s=0.001)
    assert not [line for line in fast.lines if line.stage == "push" and not line.beside]
    (left,) = [line for line in slow.lines if line.stage == "push" and not line.beside]
    assert 0 < left.seconds.low < 10_000 * 503 * 57344 / 1e6
    without = KIMI.model_copy(update={"push_while_extracting": False})
    assert P.make(without, 10_000, LOCAL, B300, bandwidth_gb_s=10).seconds.low > fast.seconds.low


@pytest.mark.parametrize("gb_s", [0.01, 0.05, 0.06, 0.2, 1.0])
@pytest.mark.parametrize("repeat", [Range.of(1), M.REPEAT])
def test_a_push_beside_other_work_takes_the_longer_of_the_two(gb_s, repeat):
    m = KIMI.model_copy(update={"repeat": repeat})
    plan = P.make(m, 50_000, LOCAL, B300, bandwidth_gb_s=gb_s)
    lines = [line for line in plan.lines if line.what != P.LEFT and not line.beside]
    work = [line.seconds for line in lines if line.stage in ("extract", "train") and line.what != P.LOAD]
    other = [line.seconds for line in lines if line.stage not in ("extract", "train") or line.what == P.LOAD]
    longer = sum(work, M.ZERO).at_least(plan.push_seconds)
    assert plan.seconds.pair() == pytest.approx((sum(other, M.ZERO) + longer).pair())


def test_samples_that_exist_are_not_computed_again():
    plan = P.make(KIMI, 4000, LOCAL, LOCAL, have=1000)
    assert seconds_of(plan, "hidden states").low == pytest.approx(3000 * 503 / 2912)
    all_there = P.make(KIMI, 4000, LOCAL, LOCAL, have=4000)
    assert "hidden states" not in {line.what for line in all_there.lines}
    assert "load the verifier" not in {line.what for line in all_there.lines}


def test_answers_and_batch_size():
    base, answers = P.make(KIMI, 1000, LOCAL, LOCAL), P.make(KIMI, 1000, LOCAL, LOCAL, answers=True)
    assert seconds_of(answers, "answers by the verifier") == Range(300 * 1000 / 1500, 450 * 1000 / 600)
    assert answers.seconds.low > base.seconds.low
    packed = P.make(KIMI, 1000, LOCAL, LOCAL, tokens_per_step=2 * 504)
    assert packed.steps == pytest.approx(9972 / 2, rel=0.01)
    train = seconds_of(packed, "optimizer steps")
    assert (train.low, train.high) == pytest.approx((9972 / 12, 9972 / 6), rel=0.01)


def test_largest_is_the_edge_of_the_budget():
    def plan_for(n):
        return P.make(KIMI, n, LOCAL, B300)

    found = P.largest(plan_for, budget=500, hours=12)
    for name, end in (("sure", "high"), ("at_best", "low")):
        n = found[name]
        fits = [getattr(plan_for(k).cost, end) <= 500 and getattr(plan_for(k).hours, end) <= 12 for k in (n, n + 1)]
        assert fits == [True, False]
    assert P.largest(plan_for, budget=1, hours=None)["sure"] == 0


def test_largest_fits_the_disk():
    plan_for = lambda n: P.make(KIMI, n, LOCAL, B300)  # noqa: E731
    most = P.largest(plan_for, 1e9, None)
    assert most["sure"] == most["at_best"]
    assert plan_for(most["sure"]).storage_bytes <= B300.disk_tb * 1e12 < plan_for(most["sure"] + 1).storage_bytes


def test_serving_projection():
    local = P.serving(KIMI.serving, LOCAL, LOCAL)
    assert local.baseline.pair() == pytest.approx([82.5, 82.5])
    # one round: a verifying step and three drafting steps for 2.69 to 3.34 tokens
    assert local.with_drafter.low == pytest.approx(82.5 * 2.69 / (1.15 + 3 * 0.08))
    assert local.with_drafter.high == pytest.approx(82.5 * 3.34 / (1 + 3 * 0.03))
    assert local.acceptance_needed.low > 4, "with 3 draft tokens a round gives at most 4"
    b300 = P.serving(KIMI.serving, LOCAL, B300)
    assert b300.with_drafter.low <= 340 <= b300.with_drafter.high
    assert b300.allreduce_share.high < 0.515


@pytest.mark.parametrize("name", M.names(M.HARDWARE))
def test_built_in_profiles(name):
    profile = M.hardware(name)
    assert profile.name == name and profile.gpus == 8
    assert profile.as_of is not None, "prices from memory say so"
    assert f"estimates of {profile.as_of}" in "".join(P.describe(P.make(KIMI, 10, LOCAL, profile), KIMI, None, None))
    assert P.make(KIMI, 50_000, LOCAL, profile).hours.low > 0


def test_own_profile_and_measurement_by_path(tmp_path):
    text = (M.HARDWARE / "h100x8.yaml").read_text().replace("gpus: 8", "gpus: 4").replace("h100x8", "mine")
    (tmp_path / "mine.yaml").write_text(text)
    mine = M.hardware(str(tmp_path / "mine.yaml"))
    assert mine.gpus == 4
    half = P.make(KIMI, 50_000, LOCAL, mine)
    full = P.make(KIMI, 50_000, LOCAL, M.hardware("h100x8"))
    assert seconds_of(half, "optimizer steps").low > 1.5 * seconds_of(full, "optimizer steps").low
    assert not half.memory[0].fits


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ("gpus: 8", "gpus"),
        ("dense_bf16_tflops: 989", "dense_bf16_tflops"),
        ("disk_tb: 15", "disk_tb"),
    ],
)
def test_bad_profiles_name_the_key(tmp_path, edit, message):
    text = (M.HARDWARE / "h100x8.yaml").read_text()
    for broken in (text.replace(edit, f"{edit.split(':')[0]}: -1"), text.replace(edit, ""), text.replace(edit, f"x{edit}")):
        (tmp_path / "bad.yaml").write_text(broken)
        with pytest.raises(UserError, match=message):
            M.hardware(str(tmp_path / "bad.yaml"))


@pytest.mark.parametrize("value", ["[2, 1]", "[1]", "[-1, 2]", ".inf", ".nan", "true", "fast", "0"])
def test_bad_figures(tmp_path, value):
    text = (M.HARDWARE / "h100x8.yaml").read_text().replace("network_gb_s: [0.5, 2]", f"network_gb_s: {value}")
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(UserError, match="network_gb_s"):
        M.hardware(str(tmp_path / "bad.yaml"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bytes_per_token", ".inf"),
        ("verifier_bytes", ".inf"),
        ("prepare.fixed_share", "1.5"),
        ("train.fixed_share", "[0, 2]"),
        ("extract.allreduce_share", "[0.4, 1.6]"),
    ],
)
def test_bad_measurements_name_the_key(tmp_path, key, value):
    text = (M.MEASUREMENTS / "kimi-k2.5-local.yaml").read_text()
    block, _, name = key.rpartition(".")
    start = text.index(f"\n{block}:") if block else 0
    at = text.index(f"{name}:", start)
    (tmp_path / "bad.yaml").write_text(f"{text[:at]}{name}: {value}{text[text.index(chr(10), at) :]}")
    with pytest.raises(UserError, match=key):
        M.measurement(str(tmp_path / "bad.yaml"))


def test_figures_out_of_bounds_are_one_sentence():
    m = KIMI.model_copy(update={"train": KIMI.train.model_copy(update={"steps_per_second": Range.of(1e-320)})})
    with pytest.raises(UserError, match="out of bounds"):
        P.make(m, 1000, LOCAL, B300)


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(UserError, match="did you mean b300x8"):
        M.hardware("b300x9")


# ------------------------------------------------------------------------------------------------------------ from logs
def run(root, samples, tokens_computed, seconds, more=None):
    """The logs and metrics of one `dvc repro`, as the stages write them; `seconds` by stage, `more` of the log by stage."""
    logs, metrics = root / "logs", root / "metrics"
    logs.mkdir(exist_ok=True)
    metrics.mkdir(exist_ok=True)
    steps = samples // 10
    written = {
        "verifier": ({}, {"layers": 8}),
        "prepare": ({}, {"samples": samples, "tokens": samples * 40}),
        "extract": (
            {"tokens_computed": tokens_computed, "seconds_load": 5.0, "seconds_extract": tokens_computed / 2000},
            {"samples": samples, "tokens": samples * 40, "bytes_per_token": 1024.0, "bytes": samples * 40 * 1024},
        ),
        "train": (
            {"steps_per_second": 4.0, "steps_computed": steps, "seconds": steps / 4.0},
            {"steps": steps, "acceptance_length": 2.5},
        ),
        "export": ({}, {}),
        "evaluate": ({}, {"samples": min(200, samples // 10), "acceptance_length": 2.6}),
    }
    for stage, (log, metric) in written.items():
        entry = {
            "stage": stage,
            "seconds": seconds[stage],
            "seconds_stage": seconds[stage],
            "hardware": {"cpus": 2, "gpus": []},
            "metrics": metric,
            **log,
            **(more or {}).get(stage, {}),
        }
        (logs / f"{stage}.json").write_text(json.dumps(entry))
        (metrics / f"{stage}.json").write_text(json.dumps(metric))
        with open(logs / "history.jsonl", "a") as f:
            f.write(json.dumps(entry) + "\n")


def own(project):
    """What the logs measured, without the spread between two runs of the same."""
    m = M.measurement(str(project / "logs"))
    assert m.repeat == M.REPEAT
    return m.model_copy(update={"repeat": Range.of(1)})


def times(samples, computed):
    """A machine with known costs: fixed parts, and parts a sample, a token, a step."""
    return {
        "verifier": 60.0,
        "prepare": 2.0 + samples * 0.004,
        "extract": 7.0 + computed / 2000,
        "train": 10.0 + samples // 10 / 4.0,
        "export": 3.0,
        "evaluate": 4.0 + min(200, samples // 10) * 0.05,
    }


@pytest.fixture
def project(tmp_path):
    (tmp_path / "params.yaml").write_text("max_samples: 1000\nseed: 0\n")
    return tmp_path


def test_plan_from_own_logs_within_30_percent_at_four_times(project):
    run(project, 1000, 40_000, times(1000, 40_000))
    plan = P.make(own(project), 4000)
    truth = times(4000, 160_000)
    total = sum(truth.values())
    assert plan.seconds.low <= total <= plan.seconds.high
    assert plan.seconds.middle == pytest.approx(total, rel=0.3)
    assert plan.cost is None and plan.hardware is None
    by_stage = plan.stage_seconds()
    assert by_stage["extract"].pair() == pytest.approx([truth["extract"]] * 2)
    for stage in truth:
        assert by_stage[stage].low * 0.999 <= truth[stage] <= by_stage[stage].high * 1.001, stage


def test_two_sizes_separate_fixed_from_growing_costs(project):
    run(project, 500, 20_000, times(500, 20_000))
    run(project, 1000, 20_000, times(1000, 20_000))
    plan = P.make(own(project), 4000)
    for stage, seconds in times(4000, 160_000).items():
        assert plan.stage_seconds()[stage].pair() == pytest.approx([seconds] * 2), stage


def recorded(samples, computed):
    """What the stages log of their own parts on the machine of `times`: one run is enough to tell fixed from growing."""
    steps, walks = samples // 10, 11 * min(64, samples // 10) * 0.01
    return {
        "prepare": {"seconds_growing": samples * 0.004},
        "evaluate": {"seconds_growing": min(200, samples // 10) * 0.05},
        "train": {
            "seconds_validation": walks,
            "seconds_checkpoints": steps * 0.02,
            "seconds_stage": 10.0 + steps / 4.0 + walks + steps * 0.02,
        },
    }


@pytest.mark.parametrize("samples", [300, 1000])
def test_one_run_that_logged_its_parts_gives_the_time_of_four_times_the_samples(project, samples):
    """300 samples have 30 held out, 1,200 have 120: the walks grow up to train.eval_samples, evaluation up to its own limit."""
    run(project, samples, 40 * samples, times(samples, 40 * samples), recorded(samples, 40 * samples))
    metric = project / "metrics" / "train.json"
    metric.write_text(json.dumps({**json.loads(metric.read_text()), "heldout_samples": min(64, samples // 10)}))
    plan = P.make(own(project), 4 * samples, have=samples)
    truth = times(4 * samples, 3 * 40 * samples)
    truth["train"] = recorded(4 * samples, 0)["train"]["seconds_stage"]
    del truth["verifier"]
    for stage, seconds in truth.items():
        assert plan.stage_seconds()[stage].pair() == pytest.approx([seconds] * 2), stage


def test_a_cold_start_does_not_count_as_the_usual_fixed_cost(project):
    for start in (2.0, 30.0, 2.5):
        run(
            project,
            1000,
            40_000,
            {**times(1000, 40_000), "prepare": start + 4.0},
            {**recorded(1000, 40_000), "prepare": {"seconds_growing": 4.0}},
        )
    plan = P.make(own(project), 2000)
    assert plan.stage_seconds()["prepare"].low == pytest.approx(2.5 + 8.0)


def test_logs_of_a_run_whose_verifier_wrote_the_answers(project):
    """It computes the states in the same session, so extract found every shard; the plan loads the verifier once."""
    (project / "params.yaml").write_text("max_samples: 1000\nseed: 0\nprepare:\n  responses: verifier\n")
    session = {
        "seconds_stage": 3.0 + 4.0 + 7.0 + 50.0 + 20.0,
        "seconds_growing": 4.0,
        "seconds_load_engine": 7.0,
        "seconds_answers": 50.0,
        "answers_tokens_generated": 30_000,
        "seconds_extract": 20.0,
        "tokens_computed": 40_000,
    }
    run(
        project,
        1000,
        0,
        {**times(1000, 0), "extract": 1.5},
        {"prepare": session, "extract": {"seconds_load": None, "seconds_extract": None}},
    )
    metric = project / "metrics" / "prepare.json"
    metric.write_text(json.dumps({**json.loads(metric.read_text()), "answer_tokens": 30_000}))
    args = ["plan", "--samples", "4000", "--from", str(project / "logs"), "--json"]
    data = json.loads(CliRunner().invoke(app, args, catch_exceptions=False).stdout)
    assert data["have"] == 1000
    prepare = 3.0 + 16.0 + 7.0 + 150.0 + 60.0
    assert data["stages"]["prepare"] == pytest.approx([0.85 * prepare, 1.15 * prepare], abs=0.05)
    assert data["stages"]["extract"] == pytest.approx([0.85 * 1.5, 1.15 * 1.5], abs=0.01)
    assert [line["what"] for line in data["lines"]].count("load the verifier") == 1


def test_a_plan_from_own_logs_counts_what_is_here_already(project):
    run(project, 1000, 40_000, times(1000, 40_000))

    def planned(*more):
        args = ["plan", "--samples", "4000", "--from", str(project / "logs"), "--json", *more]
        return json.loads(CliRunner().invoke(app, args, catch_exceptions=False).stdout)

    assert planned()["have"] == 1000 and planned("--have", "0")["have"] == 0
    assert sum(planned()["stages"]["extract"]) / 2 == pytest.approx(times(4000, 120_000)["extract"], abs=0.01)
    assert "verifier" in planned("--have", "0")["stages"] and "verifier" not in planned()["stages"]
    M.save(M.measurement(str(project / "logs")), project / "mine.yaml")  # the cache of another machine
    args = ["plan", "--samples", "4000", "--from", str(project / "mine.yaml"), "--json"]
    assert json.loads(CliRunner().invoke(app, args, catch_exceptions=False).stdout)["have"] == 0


def test_growing_on_the_same_machine_counts_only_new_samples(project):
    run(project, 1000, 40_000, times(1000, 40_000))
    plan = P.make(own(project), 4000, have=1000)
    truth = times(4000, 120_000)
    assert plan.stage_seconds()["extract"].low == pytest.approx(truth["extract"])
    assert "verifier" not in plan.stage_seconds()


def test_a_run_that_reused_everything_does_not_hide_the_one_that_measured(project):
    run(project, 1000, 40_000, times(1000, 40_000))
    run(project, 1000, 0, {**times(1000, 0), "extract": 0.5})
    assert M.measurement(str(project / "logs")).extract.tokens_per_second == Range.of(2000)


def test_logs_without_a_measured_extraction_are_refused(project):
    run(project, 1000, 0, {**times(1000, 0), "extract": 0.5})
    with pytest.raises(UserError, match="reused finished shards"):
        M.measurement(str(project / "logs"))


def test_unfinished_or_damaged_logs_are_refused(project):
    (project / "logs").mkdir()
    with pytest.raises(UserError, match="no finished run of the prepare stage"):
        M.measurement(str(project / "logs"))
    run(project, 1000, 40_000, times(1000, 40_000))
    with open(project / "logs" / "history.jsonl", "a") as f:
        f.write('{"stage": "train", "secon')  # a machine died here
    M.measurement(str(project / "logs"))
    (project / "logs" / "train.json").write_text("{")
    with pytest.raises(UserError, match=r"train\.json is not readable JSON"):
        M.measurement(str(project / "logs"))


@pytest.mark.parametrize(
    ("stage", "change"),
    [
        ("train", {"hardware": "a GPU"}),
        ("train", {"hardware": {"gpus": 8 * ["H100"]}}),
        ("train", {"steps_per_second": "fast"}),
        ("train", {"seconds_validation": 1.0}),
        ("prepare", {"seconds_growing": None, "seconds_stage": None, "seconds": None}),
        ("prepare", {"seconds_growing": "all"}),
        ("extract", {"seconds_stage": "long"}),
        ("extract", {"seconds_load": -5}),
        ("evaluate", {"engine": {"batch_size": 1, "speedup": 2.0}}),
        ("evaluate", {"engine": "vllm"}),
        ("export", {"seconds_stage": 1e309}),
    ],
)
def test_odd_logs_are_one_sentence(project, stage, change):
    run(project, 1000, 40_000, times(1000, 40_000), {stage: change})
    with pytest.raises(UserError, match="logs"):
        M.measurement(str(project / "logs"))


def test_logs_of_another_verifier_are_refused(project):
    """After `profile apply` logs/ are still the demo's, and a plan from them would be of the demo."""
    run(project, 1000, 40_000, times(1000, 40_000))

    def lock(model, made, read):
        stages = {
            "verifier": {
                "params": {"params.yaml": {"verifier": {"model": model}}},
                "outs": [{"path": "data/verifier", "md5": made}],
            },
            "prepare": {"params": {"params.yaml": {"prepare": {}}}},
            "extract": {"params": {"params.yaml": {"extract": {}}}, "deps": [{"path": "data/verifier", "md5": read}]},
        }
        (project / "dvc.lock").write_text(json.dumps({"stages": stages}))  # JSON is YAML

    lock("demo", "a", "a")
    M.measurement(str(project / "logs"))
    lock("demo", "b", "a")
    with pytest.raises(UserError, match="another verifier"):
        M.measurement(str(project / "logs"))
    lock("org/large", "a", "a")
    with pytest.raises(UserError, match=r"verifier\.model differs"):
        M.measurement(str(project / "logs"))
    (project / "dvc.lock").write_text("{")
    M.measurement(str(project / "logs"))


def test_no_logs_yet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="run `dvc repro` first"):
        M.measurement("logs")


def test_cpu_logs_cannot_be_scaled_to_a_gpu_machine(project):
    run(project, 1000, 40_000, times(1000, 40_000))
    with pytest.raises(UserError, match="leave --hardware out"):
        P.make(own(project), 4000, None, B300)


def test_saved_measurement_gives_the_same_plan(project):
    run(project, 1000, 40_000, times(1000, 40_000))
    m = M.measurement(str(project / "logs"))
    M.save(m, project / "mine.yaml")
    again = M.measurement(str(project / "mine.yaml"))
    assert P.make(again, 4000).as_dict() == P.make(m, 4000).as_dict()


def test_gpu_logs_are_matched_to_their_profile(project):
    """And a plan for another machine says whether verifier and drafter fit its GPUs."""
    (project / "data" / "verifier").mkdir(parents=True)
    with open(project / "data" / "verifier" / "model.safetensors", "wb") as f:
        f.truncate(100 * 10**9)  # sparse
    run(project, 1000, 40_000, times(1000, 40_000), {"train": {"drafter_parameters": 10**9}})
    path = project / "logs" / "train.json"
    entry = json.loads(path.read_text())
    entry["hardware"]["gpus"] = [{"name": "NVIDIA RTX PRO 6000 Blackwell Server Edition", "memory_bytes": 1}] * 8
    path.write_text(json.dumps(entry))
    m = own(project)
    assert m.hardware == "rtxpro6000x8"
    plan = P.make(m, 4000, LOCAL, B300)
    verifier, training = plan.memory
    assert verifier.need_gb == Range(100 / 8 + 3, 100 / 8 + 10) and training.need_gb == Range(18 + 4, 18 + 30)
    assert verifier.fits and training.fits
    # 5 s were measured, of which nobody knows what is start-up: the disk of the target gives the low end, all of it the high one
    load = seconds_of(plan, "load the verifier")
    assert load.pair() == pytest.approx([100 / 12, 5 + 100 / 4])


def test_what_logs_do_not_say_is_a_range_on_other_hardware(project):
    run(project, 1000, 40_000, times(1000, 40_000))
    assert (alone := own(project)).extract.allreduce_share == Range.of(0)
    (project / "params.yaml").write_text("max_samples: 1000\nseed: 0\nextract:\n  tensor_parallel_size: 8\n")
    m = own(project)
    assert P.make(m, 4000).as_dict() == P.make(alone, 4000).as_dict(), "nothing is scaled on the machine itself"
    states = {k: seconds_of(P.make(v, 4000, LOCAL, B300), "hidden states") for k, v in (("alone", alone), ("several", m))}
    assert states["several"].low < states["alone"].low and states["several"].high == states["alone"].high
    steps = seconds_of(P.make(m, 4000, LOCAL, B300), "optimizer steps")
    assert steps.high > 0.02 * 400, "launching the kernels of 400 steps does not get faster"


def test_serving_from_an_engine_run(project):
    engine = {
        "batch_size": 1,
        "speedup": 2.0,
        "acceptance_length": 2.6,
        "baseline_tokens_per_second": 50.0,
        "draft_tokens": 3,
    }
    run(project, 1000, 40_000, times(1000, 40_000), {"evaluate": {"engine": engine}})
    serving = M.measurement(str(project / "logs")).serving
    assert P.serving(serving, LOCAL, LOCAL).with_drafter.pair() == pytest.approx([100.0, 100.0])
    better = P.serving(serving, LOCAL, LOCAL, acceptance_length=Range.of(3.25))
    assert better.with_drafter.pair() == pytest.approx([125.0, 125.0])
    ratio = B300.memory_bandwidth_gb_s / LOCAL.memory_bandwidth_gb_s
    assert P.serving(serving, LOCAL, B300).with_drafter.pair() == pytest.approx([100.0, 100.0 * ratio])


# --------------------------------------------------------------------------------------------------------- command line
def test_command_line_json():
    args = "plan --samples 100000 --hardware b300x8 --from kimi-k2.5-local --budget 500 --hours 12 --json".split()
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    data = json.loads(result.stdout)
    assert result.exit_code == 0 and data["samples"] == 100_000
    assert data["largest_samples"]["sure"] < data["largest_samples"]["at_best"]
    assert 6 <= data["hours"][0] <= data["hours"][1] <= 18
    assert {line["stage"] for line in data["lines"]} >= {"node", "prepare", "extract", "train", "export", "evaluate", "push"}


def test_command_line_text_names_inputs_and_total():
    result = CliRunner().invoke(app, "plan --samples 100000 --hardware b300x8".split(), catch_exceptions=False)
    assert (
        "measured: kimi-k2.5-local" in result.stdout and "disk write" in result.stdout and "$30 - $50 an hour" in result.stdout
    )


@pytest.mark.parametrize(
    "args",
    [
        "--samples 0",
        "--samples 1" + 400 * "0",
        "--samples 10 --bandwidth 0",
        "--samples 10 --bandwidth 1e-320",
        "--samples 10 --budget -1",
        "--samples 1 --have -1",
        "--samples 1 --save /",
        "--samples 1 --save no-such-folder/x.yaml",
    ],
)
def test_command_line_refuses(args):
    with pytest.raises(UserError):
        CliRunner().invoke(app, ["plan", "--hardware", "b300x8", *args.split()], catch_exceptions=False)
