"""vLLM itself loads the export, both ways, says what the verifier says and counts what the walk counts (two engine starts)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import world

from eagle3dvc import evaluate, serving
from eagle3dvc.drafter import export, train
from eagle3dvc.drafter import model as drafter_model
from eagle3dvc.drafter.acceptance import walk
from eagle3dvc.errors import UserError
from eagle3dvc.hidden_states.reader import HiddenStates
from eagle3dvc.params import Params
from eagle3dvc.verifier import load_head

pytestmark = pytest.mark.vllm
K, PROMPT, LENGTH, HELDOUT, HIDDEN, VOCAB = 3, 6, 40, 12, 64, 256
# one thread that is not tied to a core: on a busy machine threads that wait for each other there take minutes a sentence
ENV = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Served:
    root: Path
    params: Params
    texts: np.ndarray  # int32 [HELDOUT, PROMPT + LENGTH + K]: the verifier's own greedy answers
    spec: serving.Spec  # what was asked of it
    first: serving.Result  # the drafter beside the verifier, as the stage asks for it
    alone: serving.Result  # nothing but the export's folder

    @property
    def folders(self) -> dict[str, str]:
        return {
            k: str(self.root / v) for k, v in (("hidden", "hidden_states"), ("prompts", "prompts"), ("verifier", "verifier"))
        }


def verifier_model() -> torch.nn.Module:
    """Like the world's, with heads of 32, the smallest that vLLM's CPU attention takes, and answers that can be learnt."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=world.LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.08,
        rms_norm_eps=1e-5,
        rope_theta=50000.0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 1.5)
    return model


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Served:
    root = tmp_path_factory.mktemp("served")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DVC_ROOT", str(root))
        patch.chdir(root)
        for name, value in (("HIDDEN", HIDDEN), ("VOCAB", VOCAB)):
            patch.setattr(world, name, value)
        model = verifier_model()
        world.write_verifier(model, root / "verifier")
        texts = world.answers(model, 60 + HELDOUT, PROMPT, LENGTH + K, seed=1)
        mask = np.arange(texts.shape[1]) >= PROMPT
        splits = ["train"] * 60 + ["heldout"] * HELDOUT
        world.write_data(model, root, list(texts), [mask] * len(texts), splits)
        params = world.params(draft_vocab_size=200, epochs=12, tokens_per_batch=512)
        settings = {"samples": HELDOUT, "max_new_tokens": LENGTH, "batch_sizes": [1, 4, 8], "draft_tokens": K}
        params = params.model_copy(
            update={
                "evaluate": params.evaluate.model_copy(update=settings),
                "verifier": params.verifier.model_copy(update={"model": str(root / "verifier")}),
            }
        )
        folders = {"hidden": "hidden_states", "prompts": "prompts", "verifier": "verifier"}
        train.build(params, out="models/drafter", curves="curves", **folders)
        export.build(params, "models/export", "models/drafter", **folders)

        samples = evaluate.heldout(HELDOUT, "hidden_states", "prompts")
        _, specs = evaluate.engine_specs(params, Path("models/export/speculators"), samples, "verifier")
        endless = dataclasses.replace(specs[K], stop_token_ids=[], env=ENV)  # what the walk is compared with never ends early
        first = serving.measure(endless, root / "first.log")

        hub = ENV | evaluate.stand_in("tests/tiny", root / "verifier", root / "hub")
        alone = dataclasses.replace(endless, model=None, draft_tokens=0, batch_sizes=[4], env=hub)
        alone = serving.measure(alone, root / "alone.log")
    return Served(root, params, texts[60:], endless, first, alone)


def walked(served: Served):
    data = HiddenStates(served.folders["hidden"], served.folders["prompts"])
    drafter = drafter_model.load(served.root / "models/export/speculators", served.folders["verifier"])
    items = [data[int(i)] for i in data.splits["heldout"]]
    return walk(drafter, load_head(served.folders["verifier"]), items, K, True, tail=K)


@pytest.mark.parametrize("which", ["first", "alone"])
def test_outputs_are_plain_greedy_decoding(served, which):
    result = getattr(served, which)
    wanted = [row[PROMPT : PROMPT + LENGTH].tolist() for row in served.texts]
    assert result.outputs == wanted


@pytest.mark.parametrize(("which", "run"), [("first", 0), ("first", 1), ("first", 2), ("alone", 0)])
def test_counters_are_those_of_the_walk(served, which, run):
    found, wanted = getattr(served, which).counters(run), walked(served)
    assert found == {"drafts": wanted.drafts, "accepted": wanted.accepted, "by_position": wanted.by_position}
    assert wanted.acceptance_length > 1.2, "a drafter that is never right would agree too"


def test_counters_are_kept_apart_by_source(served):
    wanted = walked(served).by_source
    groups = served.first.runs[0]["groups"]
    assert {s: (g["drafts"], g["accepted"], g["by_position"]) for s, g in groups.items()} == {
        s: (w["drafts"], w["accepted"], w["by_position"]) for s, w in wanted.items()
    }
    assert [run["groups"] for run in served.first.runs[1:]] == [{}, {}], "larger batches hold several sources at once"


def test_the_folder_alone_serves_its_verifier(served):
    assert served.alone.model == "tests/tiny"
    assert served.alone.runs[0]["tokens"] == HELDOUT * LENGTH


def test_comparison_with_plain_decoding(served):
    """What goes to the log; the plain engine's figures are those of the same run at half the speed."""
    slow = [{**r, "tokens_per_second": r["tokens_per_second"] / 2} for r in served.first.runs]
    plain = dataclasses.replace(served.first, runs=slow, outputs=[*served.first.outputs[:-1], [0]])
    log = evaluate.compare(plain, {K: served.first}, K, "float32", LENGTH)
    assert log["speedup"] == 2.0 and log["identical_outputs"] == HELDOUT - 1 and log["prompts"] == HELDOUT
    assert log["acceptance_length"] == pytest.approx(walked(served).acceptance_length, abs=1e-4)
    assert [row["batch_size"] for row in log["table"]] == [1, 4, 8]
    assert log["by_group"].keys() == {"source-0", "source-1"}


def test_failure_names_the_cause_and_the_log(served, tmp_path):
    """Refused while vLLM reads its arguments, before any engine starts."""
    spec = serving.Spec([[1, 2]], ["a"], 4, model=str(tmp_path / "nothing"))
    with pytest.raises(UserError, match=r"vLLM failed serving .*nothing: .*; its log is .*x\.log"):
        serving.measure(spec, tmp_path / "x.log")


def proof(served, tmp_path, results, answers=None, **extract):
    """evaluate.exact for what the engines gave; `answers`: those of the plain engine, by default the verifier's own."""
    params = served.params.model_copy(update={"extract": served.params.extract.model_copy(update=extract)})
    answers = [row[PROMPT:].tolist() for row in served.texts] if answers is None else answers
    return evaluate.exact(
        params,
        served.root / "models/export/speculators",
        served.folders["verifier"],
        served.spec,
        answers,
        {name: (K, result) for name, result in results.items()},
        tmp_path,
    )


def test_the_stage_proves_that_counters_and_answers_agree(served, tmp_path):
    found = proof(served, tmp_path, {"3": served.first, "alone": served.alone})
    wanted = walked(served)
    for row in found.values():
        assert row["equal"] and row["identical_outputs"] == row["prompts"] == HELDOUT
        assert row["engine"] == row["walk"]
        assert row["walk"] == {"drafts": wanted.drafts, "accepted": wanted.accepted, "by_position": wanted.by_position}


def off_by_one(result: serving.Result) -> serving.Result:
    runs = [dict(run) for run in result.runs]
    runs[-1]["counters"] = runs[-1]["counters"] | {"accepted": runs[-1]["counters"]["accepted"] + 1}
    return dataclasses.replace(result, runs=runs)


def test_one_accepted_draft_more_is_an_error(served, tmp_path):
    with pytest.raises(UserError, match="counters must be the walk's"):
        proof(served, tmp_path, {"3": off_by_one(served.first)})


def test_another_answer_is_an_error(served, tmp_path):
    answers = [row[PROMPT:].tolist() for row in served.texts]
    answers[0], answers[1] = answers[1], answers[0]
    with pytest.raises(UserError, match=f"{HELDOUT - 2} of {HELDOUT} answers"):
        proof(served, tmp_path, {"3": served.first}, answers)


def test_in_bfloat16_a_difference_is_reported(served, tmp_path):
    row = proof(served, tmp_path, {"3": off_by_one(served.first)}, dtype="bfloat16")["3"]
    assert not row["equal"] and row["identical_outputs"] == HELDOUT
