"""A tokenizer of its own for the prompt tests: byte-level BPE trained on demo conversations, with a ChatML template."""

import json
from itertools import islice

import pytest

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>' + (c.function | tojson) + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(template=CHATML, trim_offsets=False, metaspace=False):
    """A fast tokenizer of about 600 tokens; offsets may be trimmed of whitespace, as those of GPT-2 and Roberta are."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    from eagle3dvc.prompts import demo

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>" if metaspace else None))
    if metaspace:
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=[] if metaspace else pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (m["content"] for c in islice(demo.conversations(0), 200) for m in c["messages"])
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def verifier(tmp_path_factory, tokenizer):
    """A verifier folder as far as prepare looks at it: a tokenizer and the number of positions."""
    folder = tmp_path_factory.mktemp("verifier")
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    return folder


@pytest.fixture
def write_jsonl(tmp_path):
    def write(rows, name="data.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


def question(i):
    """A row that is unlike any other."""
    return {"prompt": f"What comes after {i}?", "completion": f"After {i} comes {i + 1}."}
