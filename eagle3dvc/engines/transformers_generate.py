"""Answers with transformers' own `generate`: batches of similar length, padded on the left, one seed a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from eagle3dvc import engines


class GumbelNoise(LogitsProcessor):
    """Adds seeded Gumbel noise, row by row: the arg max of the sum is a sample of the softmax.

    So a sampled answer depends on its prompt and the seed, not on what else is in the batch.
    """

    def __init__(self, seeds: Sequence[int]):
        self.generators = [torch.Generator().manual_seed(s) for s in seeds]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        uniform = torch.stack([torch.rand(scores.shape[-1], generator=g) for g in self.generators])
        noise = -torch.log(-torch.log(uniform.clamp_(1e-20, 1 - 1e-7)))
        return scores.float() + noise.to(scores.device)


def batches(prompts: Sequence[Sequence[int]], limits: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices in batches of similar length whose padded size, answers included, stays within batch_tokens."""
    found: list[list[int]] = []
    size = 0
    for i in sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i)):
        size = max(size, len(prompts[i]) + limits[i])
        if not found or size * (len(found[-1]) + 1) > batch_tokens:
            found.append([])
            size = len(prompts[i]) + limits[i]
        found[-1].append(i)
    return found


@torch.inference_mode()
def generate(
    model: torch.nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    temperature: float,
    top_p: float,
    seed: int,
    stop_token_ids: Sequence[int],
    batch_tokens: int,
    done: Callable[[int, list[int]], None] | None = None,
) -> list[list[int]]:
    """See :meth:`eagle3dvc.engines.Engine.generate`. The model loses its own generation_config.

    That file of a checkpoint is not part of an answer's key, and vLLM does not read it, so nothing of it may count here:
    transformers would fill from it whatever is left open below (suppressed tokens, least lengths, forced ends).
    """
    model.generation_config = GenerationConfig()
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    stop = set(stop_token_ids)
    answers: list[list[int]] = [[] for _ in prompts]
    for rows in batches(prompts, limits, batch_tokens):
        longest = max(len(prompts[i]) for i in rows)
        ids = torch.zeros((len(rows), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(rows):
            ids[row, longest - len(prompts[i]) :] = torch.as_tensor(prompts[i])
            mask[row, longest - len(prompts[i]) :] = 1
        warpers = LogitsProcessorList()
        if temperature > 0:
            warpers += [TemperatureLogitsWarper(temperature), TopPLogitsWarper(top_p)]
            warpers.append(GumbelNoise([engines.sample_seed(seed, prompts[i]) for i in rows]))
        settings = GenerationConfig(
            max_new_tokens=max(limits[i] for i in rows),
            do_sample=False,
            num_beams=1,
            eos_token_id=sorted(stop) or None,
            pad_token_id=0,
        )
        out = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=settings,
            logits_processor=warpers,
        )[:, longest:].tolist()
        for i, row in zip(rows, out, strict=True):
            row = row[: limits[i]]
            end = next((k for k, token in enumerate(row) if token in stop), len(row) - 1)
            answers[i] = row[: end + 1]
            if done is not None:
                done(i, answers[i])
    return answers
