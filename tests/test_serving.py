"""How one engine is driven: what is in flight and whose counters are whose. A stand-in counts here; tests/drafter/test_evaluate_vllm.py
has the engine itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from eagle3dvc import serving
from eagle3dvc.engines import vllm_compat
from eagle3dvc.errors import UserError


class Engine:
    """Stands for vLLM's LLM and its engine: a step gives every request in flight one token and counts one draft; a prompt [n, ...]
    asks for n tokens."""

    def __init__(self):
        self.left, self.said, self.seen, self.drafts = {}, {}, [], 0
        self.llm_engine = self

    def get_metrics(self):
        return [SimpleNamespace(name="vllm:spec_decode_num_drafts", value=self.drafts)]

    def add(self, name, prompt):
        self.left[name], self.said[name] = prompt[0], []

    def step(self):
        self.seen.append(len(self.left))
        self.drafts += len(self.left)
        for name in self.left:
            self.left[name] -= 1
            self.said[name].append(7)
        ended = [name for name, n in self.left.items() if n == 0]
        for name in ended:
            del self.left[name]
        return [SimpleNamespace(finished=True, request_id=n, outputs=[SimpleNamespace(token_ids=self.said[n])]) for n in ended]


@pytest.fixture
def engine(monkeypatch) -> Engine:
    monkeypatch.setattr(vllm_compat, "add_request", lambda engine, name, prompt, params: engine.add(name, prompt))
    return Engine()


SPEC = serving.Spec([[n, 5] for n in (3, 1, 2, 4, 2, 1)], ["b", "a", "b", "a", "c", "c/d"], max_new_tokens=9)


def test_a_batch_holds_prompts_of_all_groups(engine):
    figures, answers = serving.decode(engine, SPEC, 4, None, "0")
    assert engine.seen == [4, 4, 4, 1], "full while prompts are left, though no group has more than two"
    assert list(map(len, answers)) == [3, 1, 2, 4, 2, 1] and figures["tokens"] == 13
    assert figures["counters"]["drafts"] == 13 and figures["groups"] == {}, "the engine's counters do not know the group"


def test_one_at_a_time_is_counted_by_group(engine):
    figures, answers = serving.decode(engine, SPEC, 1, None, "0")
    assert set(engine.seen) == {1} and list(map(len, answers)) == [3, 1, 2, 4, 2, 1]
    found = {name: (g["drafts"], g["tokens"], g["prompts"]) for name, g in figures["groups"].items()}
    assert found == {"a": (5, 5, 2), "b": (5, 5, 2), "c": (2, 2, 1), "c/d": (1, 1, 1)}
    assert figures["counters"]["drafts"] == figures["tokens"] == 13


def test_a_batch_larger_than_the_prompts_is_refused(tmp_path):
    spec = serving.Spec([[1]] * 3, ["a"] * 3, 4, batch_sizes=[1, 4])
    with pytest.raises(UserError, match="a batch size of 4 needs as many prompts, there are 3"):
        serving.measure(spec, tmp_path / "log")
