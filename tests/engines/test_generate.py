"""Answers of the transformers engine: batches give what single prompts give."""

import pytest
import torch
from transformers import GenerationConfig

from eagle3dvc import engines
from eagle3dvc.engines.transformers_generate import GumbelNoise, batches, generate
from tests.engines import models

LENGTHS = [3, 40, 7, 7, 25, 1]
LIMITS = [9, 2, 6, 12, 5, 8]


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def model(request, tmp_path_factory):
    return models.save_model(request.param, tmp_path_factory.mktemp(request.param))


def test_batches_stay_within_the_budget():
    prompts = [[0] * n for n in LENGTHS]
    found = batches(prompts, LIMITS, 60)
    assert sorted(i for b in found for i in b) == list(range(len(prompts)))
    assert all(len(b) == 1 or len(b) * max(LENGTHS[i] + LIMITS[i] for i in b) <= 60 for b in found)


def test_greedy_batches_equal_single_prompts(model):
    prompts = [p.tolist() for p in models.prompts(LENGTHS)]
    seen = {}
    settings = dict(temperature=0.0, top_p=1.0, seed=0, stop_token_ids=[257], batch_tokens=100)
    answers = generate(model, prompts, max_new_tokens=LIMITS, done=lambda i, ids: seen.setdefault(i, ids), **settings)
    assert [seen[i] for i in range(len(prompts))] == answers
    for prompt, answer, limit in zip(prompts, answers, LIMITS, strict=True):
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=limit, do_sample=False, eos_token_id=257, pad_token_id=0)
        assert answer == alone[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "own",
    [
        {"suppress_tokens": [257]},
        {"min_new_tokens": 12},
        {"forced_eos_token_id": 257},
        {"no_repeat_ngram_size": 1},
    ],
    ids=lambda own: next(iter(own)),
)
def test_the_generation_config_of_a_checkpoint_changes_no_answer(tmp_path, own):
    prompts = [p.tolist() for p in models.prompts(LENGTHS)]
    model = models.save_model("llama", tmp_path)
    with torch.no_grad():
        model.lm_head.weight[257] *= 3  # it often ends
    settings = dict(max_new_tokens=12, temperature=0.0, top_p=1.0, seed=0, stop_token_ids=[257], batch_tokens=200)
    plain = generate(model, prompts, **settings)
    assert any(len(a) < 12 for a in plain)
    model.generation_config = GenerationConfig(**own)
    assert generate(model, prompts, **settings) == plain


def test_samples_depend_on_prompt_and_seed_only(model):
    prompts = [p.tolist() for p in models.prompts(LENGTHS)]
    settings = dict(max_new_tokens=8, temperature=1.0, top_p=0.9, stop_token_ids=[257], batch_tokens=200)
    together = generate(model, prompts, seed=1, **settings)
    assert [generate(model, [p], seed=1, **settings)[0] for p in prompts] == together
    assert generate(model, prompts, seed=2, **settings) != together


def test_samples_follow_the_softmax(model):
    """One token after the same prompt under 2,000 seeds: frequencies within five standard errors of the probabilities."""
    prompt, n = models.prompts([6])[0].tolist(), 2000
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[:, -1]
    noise = GumbelNoise([engines.sample_seed(seed, prompt) for seed in range(n)])
    drawn = noise(None, logits.expand(n, -1)).argmax(-1)
    settings = dict(max_new_tokens=1, temperature=1.0, top_p=1.0, stop_token_ids=[], batch_tokens=7)
    assert [generate(model, [prompt], seed=s, **settings)[0][0] for s in range(3)] == drawn[:3].tolist()
    p = logits[0].softmax(-1)
    error = (torch.bincount(drawn, minlength=len(p)) / n - p).abs()
    assert (error <= 5 * (p * (1 - p) / n).sqrt() + 1 / n).all()
