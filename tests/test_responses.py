"""Answers written by the verifier: turn by turn, kept, recovered, and their states from the same engine session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

from eagle3dvc import engines, params, prompts, responses, verifier
from eagle3dvc.engines.transformers_generate import generate
from eagle3dvc.errors import UserError
from eagle3dvc.hidden_states import extract
from eagle3dvc.prompts.render import load_renderer, load_tokenizer
from eagle3dvc.prompts.shards import iter_samples, shard_files
from eagle3dvc.responses import Answer, AnswerStore
from tests.engines import models

STOP = 257
MAX_NEW = 16


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads cost more than they give on matrices this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def talker(tmp_path_factory):
    """A random verifier that writes printable text and often ends: the stop token's logit is near the largest of the others."""
    folder = tmp_path_factory.mktemp("talker")
    model = models.save_model("llama", folder)
    with torch.no_grad():
        characters = sorted(pre_tokenizers.ByteLevel.alphabet())
        odd = [i for i in range(models.VOCAB) if i >= 256 or not ("!" <= characters[i] <= "~")]
        h = model.model(torch.randint(0, 256, (4, 64))).last_hidden_state.flatten(0, 1)
        mean, best = h.mean(0), model.lm_head(h).amax(-1).mean()
        model.lm_head.weight[odd] = -mean
        model.lm_head.weight[STOP] = mean / mean.square().sum() * best * 1.2
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def project(talker, tmp_path, monkeypatch):
    """An empty project folder with data/verifier, and `make(**prepare)` for params."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_ROOT", str(tmp_path / "state"))
    rows = tmp_path / "rows.jsonl"
    with open(rows, "w") as f:
        for i in range(40):
            f.write(json.dumps({"turns": [f"question {i}?", f"and {i + 1}?"], "category": "x"}) + "\n")

    def make(max_samples=6, extract=None, **prepare):
        settings = {
            "sources": [{"path": "rows.jsonl"}],
            "watch": "rows.jsonl",
            "responses": "verifier",
            "max_length": 200,
            "max_new_tokens": MAX_NEW,
            "temperature": 1.0,
            "samples_per_shard": 4,
            **prepare,
        }
        data = {
            "max_samples": max_samples,
            "verifier": {"model": str(talker), "watch": str(talker)},
            "prepare": settings,
            "extract": {"engine": "transformers", **(extract or {})},
        }
        return params.parse(data)

    verifier.build(make(), "data/verifier")
    return make


def build(p, log=None):
    return prompts.build(p, "data/verifier", "data/prompts", log=log if log is not None else {})


def no_engine(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the engine was started")

    monkeypatch.setattr(engines, "make", refuse)


def spans(sample):
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.loss_mask.astype(int), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


@pytest.fixture(scope="session")
def alone(talker):
    """The answer to one prompt that nothing else is computed with."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(talker, dtype=torch.float32)
    settings = dict(temperature=1.0, top_p=1.0, seed=0, stop_token_ids=[STOP], batch_tokens=1)
    return lambda prompt: generate(model, [prompt], max_new_tokens=MAX_NEW, **settings)[0]


# ---------------------------------------------------------------- the store


def test_store_keeps_answers_and_cuts_torn_ends(tmp_path):
    path = tmp_path / "answers.log"
    store = AnswerStore(path)
    store.add([1, 2], Answer([7, 8, 9], True))
    store.add([3], Answer([5] * 4, False))
    store.close()
    whole = path.read_bytes()
    first = len(whole) - (24 + 16 + 8)
    for cut in range(first, len(whole)):
        path.write_bytes(whole[:cut])
        store = AnswerStore(path)
        assert store.get([1, 2], 10) == Answer([7, 8, 9], True)
        assert store.get([3], 4) is None
        store.add([3], Answer([5] * 4, False))
        store.close()
        assert path.read_bytes() == whole


def test_a_damaged_record_is_not_believed(tmp_path):
    path = tmp_path / "answers.log"
    store = AnswerStore(path)
    store.add([1], Answer([7, 8, 9], True))
    store.close()
    raw = bytearray(path.read_bytes())
    for bit in range(0, 8 * len(raw), 7):
        raw[bit // 8] ^= 1 << bit % 8
        path.write_bytes(raw)
        store = AnswerStore(path)
        assert len(store) == 0
        store.close()
        raw[bit // 8] ^= 1 << bit % 8


def test_what_stands_behind_damage_is_kept(tmp_path, capsys):
    """One flipped bit, and a record that a killed process left half of while another one went on writing."""
    path = tmp_path / "answers.log"
    one, other = AnswerStore(path), AnswerStore(path)
    for i in range(20):
        (one, other)[i % 2].add([i], Answer([i, 1, 0, 7], i % 3 == 0))
        if i == 9:
            os.write(other._fd, path.read_bytes()[5:25])
    assert one.get([4], 4) == Answer([4, 1, 0, 7], False), "where it stands, though another process appends in between"
    one.close(), other.close()
    raw = bytearray(path.read_bytes())
    raw[3] ^= 1
    path.write_bytes(raw)
    store = AnswerStore(path)
    assert [i for i in range(20) if store.get([i], 4) != Answer([i, 1, 0, 7], i % 3 == 0)] == [0]
    assert f"{24 + 16 + 8 + 20} damaged bytes" in capsys.readouterr().err
    store.close()
    assert path.read_bytes() == raw


def test_the_better_of_two_answers_counts_whichever_came_first(tmp_path):
    ended, cut, longer = Answer([7] * 5, True), Answer([8] * 3, False), Answer([9] * 9, False)
    for n, order in enumerate(([ended, cut, longer], [cut, ended, longer], [longer, cut, ended], [cut, longer, ended])):
        path = tmp_path / f"{n}.log"
        stores = [AnswerStore(path) for _ in order]  # processes that do not see each other's answers
        for store, answer in zip(stores, order, strict=True):
            store.add([1], answer)
            store.close()
        store = AnswerStore(path)
        assert store.get([1], 20) == ended
        store.close()
    store = AnswerStore(tmp_path / "same.log")
    store.add([1], longer)
    store.add([1], ended)  # another engine's: the longer limit that was asked for is answered
    assert store.get([1], 20) == ended
    store.add([1], Answer([6] * 12, True))
    assert store.get([1], 20) == ended
    store.close()


def test_answers_under_other_limits():
    ended, cut = Answer([1, 2, STOP], True), Answer([1, 2, 3], False)
    assert ended.within(3) == ended.within(50) == ended
    assert ended.within(2) == cut.within(2) == Answer([1, 2], False)
    assert cut.within(3) == cut
    assert cut.within(4) is None  # more would have to be generated


# ---------------------------------------------------------------- samples


def test_every_turn_is_what_the_verifier_writes(project, alone):
    metrics = build(project())
    samples = list(iter_samples("data/prompts"))
    assert metrics["samples"] == len(samples) == 6
    assert metrics["answers"] == sum(len(spans(s)) for s in samples) > 6  # some conversations went on to the second turn
    for sample in samples:
        ids = sample.token_ids.tolist()
        for a, b in spans(sample):
            assert ids[a:b] == alone(ids[:a])
        assert spans(sample)[-1][1] == len(ids)


def test_the_prompt_of_the_second_turn_is_the_rendered_history(project):
    build(project())
    tokenizer = load_tokenizer("data/verifier")
    two = [s for s in iter_samples("data/prompts") if len(spans(s)) == 2]
    assert two
    for sample in two:
        (_, end), (start, _) = spans(sample)
        between = tokenizer.decode(sample.token_ids[end:start].tolist())
        assert between.startswith("\n<|im_start|>user\nand ") and between.endswith("?<|im_end|>\n<|im_start|>assistant\n")


def test_a_system_prompt_is_not_answered(project):
    """Neither prepare.system_prompt nor a row's own: the first answer follows the first question."""
    build(project(system_prompt="Be brief."))
    tokenizer = load_tokenizer("data/verifier")
    for sample in iter_samples("data/prompts"):
        prompt = tokenizer.decode(sample.token_ids[: spans(sample)[0][0]].tolist())
        assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nquestion ")
        assert prompt.endswith("?<|im_end|>\n<|im_start|>assistant\n") and prompt.count("assistant") == 1


def test_reasoning_removed_from_history_gives_two_samples(project, monkeypatch):
    """A template that shows the last answer whole and earlier ones without their thoughts."""
    template = Path("thinking.jinja")
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
    )
    p = project(chat_template=str(template), watch=".", max_samples=2, max_new_tokens=20)
    tokens = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    written = [tokens[c] for c in "hm</think>yes"] + [STOP]

    class Scripted:
        """An engine that always answers the same: what is tested is what becomes of it."""

        name, version = "scripted", "1"

        def prove(self, head): ...

        def generate(self, prompts, *, done, **kwargs):
            for i in range(len(prompts)):
                done(i, written)

        def extract(self, requests):
            yield from ()

        def close(self): ...

    monkeypatch.setattr(engines, "make", lambda *a: Scripted())
    monkeypatch.setattr(responses.Responder, "extract", lambda self, folder: None)
    metrics = build(p)
    samples = list(iter_samples("data/prompts"))
    assert metrics["answers"] == 4 and len(samples) == 2  # two conversations of two turns; max_samples counts samples
    tokenizer = load_tokenizer("data/verifier")
    first, second = (tokenizer.decode(s.token_ids.tolist()) for s in samples)
    assert first.endswith("<think>hm</think>yes<|im_end|>")
    assert second.count("<think>") == 1 and "assistant\nyes<|im_end|>" in second
    for sample in samples:
        ((a, b),) = spans(sample)
        assert sample.token_ids[a:b].tolist() == written


def test_tool_calls_stay_and_are_not_learned(project):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    messages = [{"role": "user", "content": "1+1?"}, call, {"role": "tool", "content": "2"}]
    Path("rows.jsonl").write_text(json.dumps({"messages": [*messages, {"role": "assistant", "content": "It is 2."}]}) + "\n")
    template = Path("tools.jinja")
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    build(project(max_samples=1, watch=".", chat_template=str(template)))
    (sample,) = iter_samples("data/prompts")
    text = load_tokenizer("data/verifier").decode(sample.token_ids[: spans(sample)[0][0]].tolist())
    assert len(spans(sample)) == 1 and "assistant\nadd<|im_end|>" in text and "tool\n2<|im_end|>" in text


def test_cut_off_answers_are_counted_and_kept_or_dropped(project):
    kept = build(project(max_new_tokens=8))
    assert kept["answers_cut_off"] > 0 and kept["samples"] == 6
    dropped = build(project(max_new_tokens=8, keep_truncated=False, max_rejected_fraction=1.0))
    assert dropped["rejected_by_reason"]["answer_cut_off"] > 0
    assert all(s.token_ids[-1] == STOP for s in iter_samples("data/prompts"))


# ---------------------------------------------------------------- what is never done twice


def test_growth_generates_only_new_answers(project, monkeypatch):
    log = {}
    build(project(4), log)
    few, first = [f.read_bytes() for f in shard_files("data/prompts")], log["answers_generated"]
    log = {}
    metrics = build(project(8), log)
    many = [f.read_bytes() for f in shard_files("data/prompts")]
    assert many[0] == few[0] and log["answers_reused"] >= first
    assert log["answers_reused"] + log["answers_generated"] == metrics["answers"]
    no_engine(monkeypatch)
    log = {}
    build(project(8), log)
    assert log["answers_generated"] == 0 and [f.read_bytes() for f in shard_files("data/prompts")] == many


def test_a_killed_run_keeps_its_answers(project, tmp_path):
    """SIGKILL in the middle of generation, from inside the callback of the third answer."""
    script = """
import os, signal, sys
from pathlib import Path
from eagle3dvc import params, prompts, responses
real, count = responses.AnswerStore.add, 0
def add(self, prompt, answer):
    global count
    real(self, prompt, answer)
    count += 1
    if count == 3:
        os.kill(os.getpid(), signal.SIGKILL)
responses.AnswerStore.add = add
prompts.build(params.parse(__import__("json").loads(sys.argv[1])), "data/verifier", "data/prompts")
"""
    p = project()
    env = {**os.environ, "PYTHONPATH": str(Path(responses.__file__).parents[1])}
    killed = subprocess.run([sys.executable, "-c", script, p.model_dump_json()], env=env, capture_output=True)
    assert killed.returncode == -9 and not Path("data/prompts").exists()
    log = {}
    metrics = build(p, log)
    assert log["answers_generated"] == metrics["answers"] - 3


def test_states_come_from_the_same_session(project, monkeypatch):
    """After prepare the extract stage finds every shard; they are those that extract would compute by itself."""
    p = project()
    log = {}
    build(p, log)
    assert log["shards_computed"] == 2
    own = {f.name: f.read_bytes() for f in Path("state/.dvc/tmp/eagle3dvc/shards").iterdir()}
    with monkeypatch.context() as m:
        no_engine(m)
        log = {}
        extract.build(p, log)
        assert log["shards_computed"] == 0
    for f in Path("state/.dvc/tmp/eagle3dvc/shards").iterdir():
        f.unlink()
    for f in Path("data/hidden_states").iterdir():
        f.unlink()
    extract.build(p, {})
    assert {f.name: f.read_bytes() for f in Path("state/.dvc/tmp/eagle3dvc/shards").iterdir()} == own


@pytest.fixture
def commit_and_lose_the_log(project, monkeypatch):
    """A DVC repository; the call leaves data/prompts and its answers in DVC's cache only."""

    def run(*args):
        done = subprocess.run(args, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    run("git", "init", "-q")
    run(sys.executable, "-m", "dvc", "init", "-q")
    monkeypatch.setenv("DVC_ROOT", ".")

    def lose():
        Path("dvc.yaml").write_text("stages:\n  prepare:\n    cmd: test -d data/prompts\n    outs:\n    - data/prompts\n")
        run(sys.executable, "-m", "dvc", "commit", "-q", "-f", "prepare")
        for f in Path(".dvc/tmp/eagle3dvc/answers").iterdir():
            f.unlink()
        subprocess.run(["rm", "-rf", "data/prompts"], check=True)

    return lose


def test_answers_come_back_from_dvc(project, monkeypatch, commit_and_lose_the_log):
    """The log is lost (another machine, say): the files in DVC's cache hold every answer, those of dropped samples too."""
    p = project(max_new_tokens=8, keep_truncated=False, max_rejected_fraction=0.9)
    build(p)
    want = [f.read_bytes() for f in shard_files("data/prompts")]
    commit_and_lose_the_log()
    no_engine(monkeypatch)
    log = {}
    metrics = build(p, log)
    assert metrics["answers_cut_off"] > 0
    assert log["answers_recovered"] == metrics["answers"] + metrics["answers_cut_off"]
    assert [f.read_bytes() for f in shard_files("data/prompts")] == want


def test_a_damaged_answer_in_the_cache_of_dvc_is_written_again(project, commit_and_lose_the_log):
    p = project()
    build(p)
    want = {f.name: f.read_bytes() for f in Path("data/prompts").rglob("*.parquet")}
    commit_and_lose_the_log()
    (stored,) = (f for f in Path(".dvc/cache/files/md5").rglob("*") if f.is_file() and f.read_bytes() == want["00000.parquet"])
    raw = bytearray(stored.read_bytes())
    raw[len(raw) // 4] ^= 1
    stored.chmod(0o644)
    stored.write_bytes(raw)
    with pytest.raises(UserError, match="answers are not in the cache.*allow_recompute"):  # no remote has them either
        build(p)
    log = {}
    build(project(extract={"allow_recompute": True}), log)
    assert log["answers_recovered"] == 0 and log["answers_generated"] > 0
    assert {f.name: f.read_bytes() for f in Path("data/prompts").rglob("*.parquet")} == want
    assert not stored.exists()


def asked(project, rows, **prepare):
    """(metrics, log, rejected rows) of rows of our own."""
    Path("rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    log = {}
    metrics = build(project(max_samples=len(rows), max_rejected_fraction=1.0, **prepare), log)
    return metrics, log, [json.loads(line) for line in Path("data/prompts/rejected.jsonl").read_text().splitlines()]


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    ("row", "template", "reason"),
    [
        ({"messages": [{"role": "user", "content": "1+1?"}, CALL]}, "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT, "nothing_to_answer"),
        ({"prompt": "half \ud800"}, None, "invalid_unicode"),
        ({"input_ids": [1, 99999, 4], "loss_mask": [0, 0, 1]}, None, "token_out_of_range"),
        (
            {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?"}]},
            "{% for m in messages %}{% if m.role != 'system' %}" + TURN + "{% endif %}{% endfor %}" + PROMPT,
            "not_rendered",
        ),
        ({"prompt": "Why?"}, "{% for m in messages %}" + TURN + "{% endfor %}", "no_generation_prompt"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_rejected_with_its_reason(project, row, template, reason):
    fine = {"prompt": "What is it?"}
    ok = reason != "no_generation_prompt"
    rows = [fine, row] if ok else [row, {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]}]
    metrics, _, rejected = asked(project, rows, chat_template=template)
    assert (metrics["samples"], metrics["rejected"]) == (1, 1)
    assert [r["reason"] for r in rejected] == [reason]
    assert metrics["answers_cut_off"] >= 0


def test_templates_that_take_the_arguments_of_calls_as_text(project):
    template = (
        "{% for m in messages %}{% if m.tool_calls %}{{ 'CALL' + m.tool_calls[0]['function']['arguments'] }}<|im_end|>"
        "{% else %}" + TURN + "{% endif %}{% endfor %}" + PROMPT
    )
    messages = [{"role": "user", "content": "1+1?"}, CALL, {"role": "tool", "content": "2"}]
    metrics, _, _ = asked(project, [{"messages": messages}], chat_template=template)
    assert metrics["samples"] == 1 and metrics["rejected"] == 0


def test_equal_prompts_are_asked_once(project):
    metrics, log, _ = asked(project, [{"prompt": "the same"}] * 9)
    assert (metrics["samples"], metrics["duplicates"], log["answers_generated"]) == (1, 8, 1)


def test_other_settings_have_other_answers(project):
    p = project()
    info = verifier.load_info("data/verifier")
    base = responses.settings(p, info, [STOP])
    key = responses.settings_key
    assert key(responses.settings(project(max_new_tokens=99), info, [STOP])) == key(base)
    assert key(responses.settings(project(temperature=0.0), info, [STOP])) != key(base)
    assert key(responses.settings(project(extract={"dtype": "bfloat16"}), info, [STOP])) != key(base)
    assert key(responses.settings(p, info, [STOP, 1])) != key(base)


def test_a_verifier_without_a_stop_token_is_an_error(project, monkeypatch):
    p = project()
    renderer = load_renderer(p, "data/verifier")
    renderer.tokenizer.eos_token = None
    monkeypatch.setattr(type(renderer), "text", lambda self, *a, **k: "2 and nothing")
    for name in ("config.json", "generation_config.json"):
        path = Path("data/verifier") / name
        if path.exists():
            path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": None}))
    with pytest.raises(UserError, match="no token that ends an answer"):
        responses.stop_token_ids(renderer, Path("data/verifier"))
