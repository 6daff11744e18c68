"""Random verifiers shared by all tests of a session, one folder each; see tests/tiny.py. Tests must not write into them."""

import pytest

from tests import tiny


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
