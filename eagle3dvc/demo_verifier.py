"""The demo verifier: a small Llama trained on demo conversations, so that everything runs with nothing to download.

It is a real checkpoint in Hugging Face's native layout (own byte-level BPE, ChatML template), which transformers and vLLM
load like any other. Training is one thread on fixed data in a fixed order: the same machine gives the same bytes, and on
matrices this small one thread is also faster than two. It does not depend on the pipeline's seed: changing the seed
changes the prompts, not the model under them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from eagle3dvc.params import DemoVerifier
from eagle3dvc.prompts import demo

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
        decay = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), fused=True)
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
