"""Random verifiers shared by all tests of a session, one folder each; see tests/tiny.py. Tests must not write into them."""

from pathlib import Path

import pytest

from tests import tiny

#: files that take minutes, the longest first: where files run side by side, none of them begins last
LONG = """pipeline/test_growth pipeline/test_faults pipeline/test_remotes engines/test_ray drafter/test_evaluate_vllm drafter/test_train
engines/test_vllm pipeline/test_node drafter/test_interrupts test_verifier""".split()


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    rank = {here / f"{name}.py": i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path, len(LONG)))


def _verifier(name: str, **settings):
    @pytest.fixture(scope="session", name=name)
    def build(tmp_path_factory):
        return tiny.make_verifier(tmp_path_factory.mktemp(name), **settings)

    return build


tiny_llama = _verifier("tiny_llama")
tiny_qwen2 = _verifier("tiny_qwen2", arch="qwen2", tied=True)
tiny_qwen3 = _verifier("tiny_qwen3", arch="qwen3")
tiny_deepseek = _verifier("tiny_deepseek", arch="deepseek_v3")
tiny_kimi = _verifier("tiny_kimi", arch="deepseek_v3", nested="kimi_k25")
