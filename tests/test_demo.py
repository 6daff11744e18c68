"""Demo conversations never change and never repeat much; the demo verifier is the same bytes each time and can copy."""

import subprocess
import sys
from itertools import islice

import pytest
import torch

from eagle3dvc import demo_verifier, verifier
from eagle3dvc.params import DemoVerifier, parse
from eagle3dvc.prompts import demo

SMALL = {"layers": 7, "hidden_size": 64, "heads": 2, "intermediate_size": 96, "vocab_size": 400, "steps": 3, "batch_size": 2}


def text(row):
    return repr(row["messages"])


def test_conversations_are_a_prefix():
    first = list(islice(demo.conversations(0), 50))
    assert list(islice(demo.conversations(0), 200))[:50] == first
    assert demo.conversation(0, 49) == first[49]
    assert list(islice(demo.conversations(1), 50)) != first


def test_conversations_do_not_depend_on_the_process():
    code = "from itertools import islice; from eagle3dvc.prompts import demo; print(list(islice(demo.conversations(3), 20)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert eval(out.stdout) == list(islice(demo.conversations(3), 20))


def test_conversations_are_varied_and_well_formed():
    rows = list(islice(demo.conversations(0), 5000))
    assert len({text(r) for r in rows}) > 0.97 * len(rows)
    kinds = set()
    for row in rows:
        roles = [m["role"] for m in row["messages"]]
        kinds.add((roles[0] == "system", min(len(roles), 6)))
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2)
        assert turns
        assert all(m["content"].strip() == m["content"] != "" for m in row["messages"])
    assert {(True, 3), (True, 5), (False, 2), (False, 4), (False, 6)} <= kinds
    training = {text(r) for r in islice(demo.conversations(demo_verifier.STREAM), 5000)}
    assert len(training & {text(r) for r in rows}) < 0.1 * len(rows)


def test_eval_prompts_cover_all_tasks():
    prompts = demo.eval_prompts(0, 3 * len(demo.TASKS))
    assert len({p["category"] for p in prompts}) == len(demo.TASKS)
    assert all([m["role"] for m in p["messages"]] == ["user"] and p["reference"] for p in prompts)
    assert demo.eval_prompts(0, 5) == prompts[:5]


def test_answers_are_right():
    """The arithmetic, orders and counts in the references are true."""
    for row in demo.eval_prompts(0, 700):
        ask, answer, task = row["messages"][0]["content"], row["reference"], row["category"]
        numbers = [int(w) for w in ask.replace("?", "").replace(".", "").split() if w.isdigit()]
        if task in ("addition", "multiplication"):
            a, b = numbers
            assert f"The answer is {a + b if task == 'addition' else a * b}." in answer
        elif task == "subtraction":
            assert f"The answer is {max(numbers) - min(numbers)}." in answer
        elif task in ("repeat", "reverse", "sort"):
            words = ask.rstrip(".").split(": ")[1].split(", ")
            right = {"repeat": words, "reverse": words[::-1], "sort": sorted(words)}[task]
            assert f": {', '.join(right)}." in answer


@pytest.fixture(scope="module")
def tokenizer():
    return demo_verifier.tokenizer(600, conversations=300)


def test_template_masks_what_the_model_writes(tokenizer):
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1 plus 2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3.", "reasoning_content": "one and two"},
    ]
    out = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = out["input_ids"], out["assistant_masks"]
    spans, start = [], None
    for i, m in enumerate([*mask, 0]):
        if m and start is None:
            start = i
        elif not m and start is not None:
            spans.append(tokenizer.decode(ids[start:i]))
            start = None
    assert spans == [
        '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
        "<think>\none and two\n</think>\n\nIt is 3.<|im_end|>",
    ]
    prompt = tokenizer.apply_chat_template(messages[:2], add_generation_prompt=True, tokenize=False)
    assert tokenizer.apply_chat_template(messages, tokenize=False).startswith(prompt)
    assert tokenizer.decode(ids).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")


def test_tokenizer(tokenizer):
    assert len(tokenizer) == 600
    for line in ("Zürich 東京 🙂 <tag>\n\tx", "Hello, I am Anna."):
        assert tokenizer.decode(tokenizer(line)["input_ids"]) == line
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_start_with_copying():
    """Before any training, a random sequence that repeats is continued right: the circuit works."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=1024, hidden_size=128, intermediate_size=384, num_hidden_layers=8, num_attention_heads=4)
    ).eval()
    ids = torch.randint(3, 1024, (8, 20)).repeat(1, 2)

    def right():
        with torch.no_grad():
            return (model(ids).logits[:, 20:-1].argmax(-1) == ids[:, 21:]).float().mean().item()

    assert right() < 0.05
    demo_verifier.start_with_copying(model)
    assert right() > 0.8


def test_training_lowers_the_loss():
    losses = []
    settings = DemoVerifier(**SMALL | {"steps": 40, "batch_size": 4})
    demo_verifier.train(settings, lambda step, loss: losses.append(loss))
    assert len(losses) == 40
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_demo_verifier_same_bytes_and_loadable(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    params = parse({"max_samples": 1, "verifier": {"demo": SMALL}})
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    info = verifier.build(params, tmp_path / "a")
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), state)
    other = parse({"max_samples": 1, "seed": 5, "verifier": {"demo": SMALL}})
    code = (
        f"import sys; from eagle3dvc import params, verifier;verifier.build(params.parse({other.model_dump()!r}), sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "b"], check=True)
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
    assert info.identity.startswith("demo:")
    assert verifier.model_path(params, info) == str(tmp_path / "a")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    tok = AutoTokenizer.from_pretrained(tmp_path / "a")
    ids = tok.apply_chat_template(
        demo.eval_prompts(0, 1)[0]["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**ids, max_new_tokens=4, do_sample=False)
    assert out.shape[1] > ids["input_ids"].shape[1]
    assert model.generation_config.eos_token_id == tok.eos_token_id == tok.convert_tokens_to_ids("<|im_end|>")
