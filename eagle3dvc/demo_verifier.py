"""The demo verifier: a small Llama trained on demo conversations, so that everything runs with nothing to download.

It is a real checkpoint in Hugging Face's native layout (own byte-level BPE, ChatML template), which transformers and vLLM
load like any other. Training is one thread on fixed data in a fixed order: the same machine gives the same bytes, and on
matrices this small one thread is also faster than two. It does not depend on the pipeline's seed: changing the seed
changes the prompts, not the model under them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from eagle3dvc.params import DemoVerifier
from eagle3dvc.prompts import demo
from eagle3dvc.stage import write_json

STREAM = "verifier"  # the stream of conversations it learns from; no pipeline seed, an integer, gives the same ones
MAX_LENGTH = 2048
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# {% generation %} marks what the model writes: the answer and the end-of-turn token after it.
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}
{%- if message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + (call.function or call) | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}
{{- '\\n' }}
{%- else %}
{{- message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def tokenizer(vocab_size: int, conversations: int = 4000):
    """A byte-level BPE tokenizer with a ChatML template, trained on the first demo conversations.

    Returns a transformers tokenizer of exactly `vocab_size` tokens: 3 special ones, 256 bytes and merges. End of
    sequence is `<|im_end|>`; `<|endoftext|>` is padding and beginning of sequence, which the template never writes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rows = islice(demo.conversations(STREAM), conversations)
    # roles stand in the template, not in the conversations: every role must have its tokens
    roles = "system\nuser\nassistant\ntool\n"
    texts = (roles + "\n".join(m["content"] for m in row["messages"]) for row in rows)
    with _environment(TOKENIZERS_PARALLELISM="false"):
        bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
    )


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {k: os.environ.get(k) for k in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def batches(tok, steps: int, batch_size: int) -> Iterator[tuple[Any, Any]]:
    """(input_ids, labels), both int64 [batch_size, T], padded on the right; labels are -100 except on answers.

    Conversations are sorted by length within windows of 32 batches, so that little is padded, and the batches of a window
    are shuffled with a fixed seed.
    """
    import random

    import torch

    stream, rng = demo.conversations(STREAM), random.Random(STREAM)
    pad, done = tok.pad_token_id, 0
    while done < steps:
        window = min(32, steps - done)
        rows = []
        for row in islice(stream, window * batch_size):
            encoded = tok.apply_chat_template(
                row["messages"], return_dict=True, return_assistant_tokens_mask=True, truncation=True
            )
            rows.append((encoded["input_ids"], encoded["assistant_masks"]))
        rows.sort(key=lambda r: len(r[0]))
        groups = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
        rng.shuffle(groups)
        for group in groups:
            length = max(len(ids) for ids, _ in group)
            ids = torch.tensor([i + [pad] * (length - len(i)) for i, _ in group])
            mask = torch.tensor([m + [0] * (length - len(m)) for _, m in group], dtype=torch.bool)
            yield ids, ids.masked_fill(~mask, -100)
        done += window


def start_with_copying(model) -> None:
    """Set the first two layers' attention to an induction circuit (Olsson et al. 2022), in place.

    Copying a word from the question takes a head that looks at the token before and a head in a later layer that finds
    where the present token stood before and copies what followed. Random weights find these two together only after
    thousands of steps, which a minute does not hold; from here on they are trained like all other weights.

    The residual stream is cut into quarters: the token itself, the one before, the one before that, the copied one.
    Element 0 is the same for all tokens, so that the heads of layer 0 have something to build position-only scores on.
    """
    import torch

    config = model.config
    heads, quarter = config.num_attention_heads, config.hidden_size // 4
    head_dim = config.hidden_size // heads
    half, n = head_dim // 2, quarter - 1
    frequency = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)  # radians a position, falling
    size, constant = 0.5, 4.0  # of the embedding's elements; element 0 in units of it
    embed = model.model.embed_tokens.weight
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    with torch.no_grad():
        embed[:, 1:quarter] *= size / config.initializer_range
        embed[:, 0] = constant * size

        # Layer 0, heads 0 and 1: attend 1 and 2 tokens back, write what stands there into quarters 1 and 2.
        # A query and a key turned by `back` positions against each other score highest at that distance.
        rms = ((constant**2 + n) / config.hidden_size) ** 0.5  # of the input, in units of `size`
        fast = torch.arange(half) < max(2, half // 4)
        peak = 4.0 * head_dim**0.5 / ((constant / rms) ** 2 * (1 - frequency[fast].cos()).sum())
        wave = torch.where(fast, peak.sqrt(), 0.0)
        carried = min(n, head_dim)
        for head, back in enumerate((1, 2)):
            rows = slice(head * head_dim, (head + 1) * head_dim)
            for projection in (first.q_proj, first.k_proj, first.v_proj):
                projection.weight[rows] = 0
            first.o_proj.weight[:, rows] = 0
            first.q_proj.weight[rows, 0] = torch.cat((wave, torch.zeros(half)))
            turn = back * frequency
            first.k_proj.weight[rows, 0] = torch.cat((wave * turn.cos(), wave * turn.sin()))
            values, target = torch.arange(carried), back * quarter + 1 + torch.arange(carried)
            first.v_proj.weight[head * head_dim + values, 1 + values] = 1.0
            first.o_proj.weight[target, head * head_dim + values] = rms

        # Layer 1, every head: look where (token before, token before that) equal the present (token, token before), in
        # the slowly turning pairs, so that distance matters little; copy the token there into quarter 3.
        rms = ((constant**2 + 3 * n) / config.hidden_size) ** 0.5
        slow = torch.arange(3 * half // 8, half)
        slow = torch.cat((slow, slow + half))
        match = (0.8 * head_dim**0.5) ** 0.5 * rms
        generator = torch.Generator().manual_seed(0)
        for head in range(heads):
            rows = slice(head * head_dim, (head + 1) * head_dim)
            for projection in (second.q_proj, second.k_proj, second.v_proj):
                projection.weight[rows] *= 0.1
            second.o_proj.weight[:, rows] *= 0.1
            for i, there in enumerate((slow[0::2], slow[1::2])):
                some = 1 + torch.randperm(n, generator=generator)[: len(there)]
                there = head * head_dim + there[: len(some)]
                second.q_proj.weight[there, i * quarter + some] = match
                second.k_proj.weight[there, (i + 1) * quarter + some] = match
            copied = torch.arange(1, quarter)[head::heads]
            values = head * head_dim + torch.arange(len(copied))
            second.v_proj.weight[values, copied] = 1.0
            second.o_proj.weight[3 * quarter + copied, values] = size * rms
        model.lm_head.weight[:, 3 * quarter + 1 : 4 * quarter] = 0.3 * embed[:, 1:quarter] / size


def train(settings: DemoVerifier, progress=None):
    """Train it; returns (model in eval mode, float32, tokenizer). `progress(step, loss)` is called after each step."""
    import torch
    from torch.nn import functional as F
    from transformers import LlamaConfig, LlamaForCausalLM

    tok = tokenizer(settings.vocab_size)
    config = LlamaConfig(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=tok.bos_token_id,
        eos_token_id=tok.eos_token_id,
        pad_token_id=tok.pad_token_id,
        dtype="float32",
    )
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).train()
        start_with_copying(model)
        decay = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), fused=True)
        warmup = max(1, settings.steps // 20)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda s: min((s + 1) / warmup, max(0.02, 1 - s / settings.steps))
        )
        for step, (ids, labels) in enumerate(batches(tok, settings.steps, settings.batch_size)):
            # causal attention and padding on the right: what is padded is never attended to by what counts
            hidden = model.model(ids, use_cache=False).last_hidden_state[:, :-1]  # [B, T-1, H]
            target = labels[:, 1:]
            learnt = target != -100
            loss = F.cross_entropy(model.lm_head(hidden[learnt]), target[learnt])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if progress is not None:
                progress(step, loss.item())
    return model.eval(), tok


def build(settings: DemoVerifier, folder: str | Path, progress=None) -> None:
    """Train the demo verifier and save model, tokenizer and generation config into `folder` (made if missing)."""
    from transformers import GenerationConfig

    model, tok = train(settings, progress)
    model.generation_config = GenerationConfig(
        do_sample=False,
        bos_token_id=tok.bos_token_id,
        eos_token_id=tok.eos_token_id,
        pad_token_id=tok.pad_token_id,
    )
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    # the name that transformers 4, which older engines bring, knows this class by; transformers 5 reads both
    path = Path(folder) / "tokenizer_config.json"
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"})
