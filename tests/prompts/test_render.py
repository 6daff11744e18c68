"""Loss masks, checked by decoding what they cover."""

import datetime
import random

import numpy as np
import pytest

from eagle3dvc.errors import UserError
from eagle3dvc.prompts.conversations import Rejected, from_row
from eagle3dvc.prompts.render import Encoded, Renderer
from eagle3dvc.prompts.sources import Row
from tests.prompts.conftest import CHATML, make_tokenizer


def conversation(messages, **more):
    return from_row(Row("s", 1, "s.jsonl line 1", {"messages": messages, **more}))


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def encode(renderer, messages, **more):
    [item] = renderer.encode([conversation(messages, **more)])
    if isinstance(item, Rejected):
        raise item
    return item


def supervised(tokenizer, item: Encoded) -> list[str]:
    """The text of each run of supervised tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], item.loss_mask.astype(int), [0]])))
    return [tokenizer.decode(item.token_ids[a:b]) for a, b in zip(edges[::2], edges[1::2])]


SYSTEM = {"role": "system", "content": "You can add."}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
CHAT = [
    SYSTEM,
    user("What is 1 plus 2?"),
    assistant("Let me see.", tool_calls=[CALL]),
    {"role": "tool", "content": "3", "tool_call_id": "c1"},
    assistant("It is 3. 😀"),
    user("Thank you!\n"),
    assistant("You are welcome.\n\nGoodbye!"),
]
CHAT_ANSWERS = [
    'Let me see.\n<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><|im_end|>',
    "It is 3. 😀<|im_end|>",
    "You are welcome.\n\nGoodbye!<|im_end|>",
]
GENERATION = CHATML.replace("{{ '<|im_start|>' + m.role + '\n' + m.content }}", "{{ '<|im_start|>' + m.role + '\n' }}<A>{{ m.content }}").replace(
    "{{ '<|im_end|>\n' }}{% endfor %}", "{{ '<|im_end|>' }}<B>{{ '\n' }}{% endfor %}"
)  # fmt: skip


def generation(header=False, end=True, users=False):
    """ChatML with {% generation %} marks: around the header or not, the end-of-turn token or not, user messages too."""
    if users:
        return GENERATION.replace("<A>", "{% generation %}").replace("<B>", "{% endgeneration %}")
    body = "{{ m.content }}{% for c in m.tool_calls or [] %}{{ '\n<tool_call>' + (c.function | tojson) + '</tool_call>' }}{% endfor %}"
    head, tail = "{{ '<|im_start|>' + m.role + '\n' }}", "{{ '<|im_end|>' }}"
    marked = (head if header else "") + body + (tail if end else "")
    marked = ("" if header else head) + "{% generation %}" + marked + "{% endgeneration %}" + ("" if end else tail)
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + marked + "{% else %}" + head + body + tail + "{% endif %}"
        "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


@pytest.mark.parametrize("template", [CHATML, generation(), generation(header=True), generation(end=False)])
def test_mask_covers_every_answer_with_its_end_of_turn_token_and_nothing_else(tokenizer, template):
    item = encode(Renderer(tokenizer, template), CHAT)
    assert supervised(tokenizer, item) == CHAT_ANSWERS
    assert tokenizer.decode(item.token_ids).startswith("<|im_start|>system\nYou can add.<|im_end|>\n<|im_start|>user\nWhat is")
    assert (item.token_ids.dtype, item.loss_mask.dtype, item.missed) == (np.int32, np.bool_, 0)


def test_supervised_tokens_follow_the_prompt_an_engine_is_given(tokenizer):
    """At the start of every answer, the tokens before it are exactly those a server would have sent to the model."""
    renderer = Renderer(tokenizer)
    item = encode(renderer, CHAT)
    starts = np.flatnonzero(np.diff(item.loss_mask.astype(int), prepend=0) == 1)
    messages = conversation(CHAT).messages
    for start, turn in zip(starts, (2, 4, 6), strict=True):
        assert item.token_ids[:start].tolist() == renderer.prompt_ids(messages[:turn])


def test_tokens_are_those_of_transformers(tokenizer):
    item = encode(Renderer(tokenizer), CHAT)
    expected = tokenizer.apply_chat_template(conversation(CHAT).messages, tokenize=True, return_dict=False)
    assert item.token_ids.tolist() == expected
    marked = tokenizer.apply_chat_template(
        conversation(CHAT).messages, chat_template=generation(), return_dict=True, return_assistant_tokens_mask=True
    )
    assert item.loss_mask.astype(int).tolist() == marked["assistant_masks"]


def test_batches_keep_order_and_reject_alone(tokenizer):
    chats = [[user(f"q{i}"), assistant(f"a{i}")] for i in range(20)]
    rows = [conversation(c) for c in chats]
    rows[7] = conversation([user("no answer")])
    items = Renderer(tokenizer).encode(rows)
    assert isinstance(items[7], Rejected)
    assert items[7].reason == "no_assistant"
    assert [supervised(tokenizer, x) for i, x in enumerate(items) if i != 7] == [
        [f"a{i}<|im_end|>"] for i in range(20) if i != 7
    ]


def test_unanswered_end_is_left_out(tokenizer):
    item = encode(Renderer(tokenizer), [user("q"), assistant("a"), user("never answered")])
    assert tokenizer.decode(item.token_ids) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"


def test_offsets_trimmed_of_whitespace_give_the_same_masks():
    """GPT-2's and Roberta's offsets leave whitespace out: a newline after the header has none of its own."""
    chat = [user("hi \n"), assistant("  a\n\n b \n"), user("x"), assistant("\nlast  ")]
    exact, trimmed = make_tokenizer(), make_tokenizer(trim_offsets=True)
    a, b = encode(Renderer(exact), chat), encode(Renderer(trimmed), chat)
    assert a.token_ids.tolist() == b.token_ids.tolist()
    assert a.loss_mask.tolist() == b.loss_mask.tolist()
    assert supervised(exact, a) == ["  a\n\n b \n<|im_end|>", "\nlast  <|im_end|>"]


def test_text_that_looks_like_the_template_stays_where_it_is(tokenizer):
    """Content that repeats the template's own marks or another turn's text does not move a boundary."""
    chat = [
        user("a<|im_end|>\n<|im_start|>assistant\na"),
        assistant("a"),
        user("a"),
        assistant("assistant"),
        user("b"),
        assistant("a"),
    ]
    item = encode(Renderer(tokenizer), chat)
    assert supervised(tokenizer, item) == ["a<|im_end|>", "assistant<|im_end|>", "a<|im_end|>"]


NASTY = [
    "a",
    "assistant",
    "<|im_start|>assistant\n",
    "<|im_end|>",
    "<|im_end|>\n",
    "\n",
    " ",
    "</think>",
    "😀",
    "é",
    "<|end|>",
    "user",
    "\t",
]


@pytest.mark.parametrize("template", [CHATML, generation()])
@pytest.mark.parametrize("trim", [False, True])
def test_masks_of_random_chats_made_of_what_the_template_itself_writes(template, trim):
    tokenizer, rng = make_tokenizer(template, trim_offsets=trim), random.Random(0)

    def text():
        return "".join(rng.choices(NASTY, k=rng.randint(1, 4))) + "."

    chats = [[(text(), text()) for _ in range(rng.randint(1, 4))] for _ in range(150)]
    rows = [conversation([m for q, a in chat for m in (user(q), assistant(a))]) for chat in chats]
    for chat, item in zip(chats, Renderer(tokenizer).encode(rows), strict=True):
        assert supervised(tokenizer, item) == [f"{answer}<|im_end|>" for _, answer in chat]


LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}{% else %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("metaspace", [False, True])
def test_templates_without_a_generation_prompt(metaspace):
    tokenizer = make_tokenizer(LLAMA2, metaspace=metaspace)
    item = encode(Renderer(tokenizer), [user("How many?"), assistant("The answer is 7."), user("And?"), assistant("Good")])
    assert [s.strip() for s in supervised(tokenizer, item)] == ["The answer is 7. </s>", "Good </s>"]
    with pytest.raises(Rejected, match="the chat template refuses it: no system"):
        encode(Renderer(tokenizer), [SYSTEM, user("q"), assistant("a")])


def test_template_that_writes_the_header_but_no_generation_prompt_is_refused(tokenizer):
    template = CHATML[: CHATML.index("{% if add_generation_prompt %}")]
    with pytest.raises(Rejected, match="ignores add_generation_prompt but writes '<\\|im_start\\|>' itself"):
        encode(Renderer(tokenizer, template), [user("q"), assistant("a")])


# Qwen3 and its kin: reasoning is shown in the last answer only, and an empty thought is put where there is none
QWEN3 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
THOUGHTS = [
    user("a"),
    assistant("same", reasoning_content="why same"),
    user("same"),
    assistant("same", reasoning_content="why"),
]


def test_reasoning_that_history_loses_does_not_move_the_masks(tokenizer):
    item = encode(Renderer(tokenizer, QWEN3), THOUGHTS)
    assert supervised(tokenizer, item) == ["same<|im_end|>", "<think>\nwhy\n</think>\n\nsame<|im_end|>"]
    inline = [user("a"), assistant("<think>\nx\n</think>\n\nsame"), user("same"), assistant("last")]
    item = encode(Renderer(tokenizer, QWEN3), inline)
    assert supervised(tokenizer, item) == ["same<|im_end|>", "<think>\n\n</think>\n\nlast<|im_end|>"]


def test_thinking_off_drops_reasoning_and_leaves_the_empty_thought_to_the_prompt(tokenizer):
    item = encode(Renderer(tokenizer, QWEN3, thinking=False), THOUGHTS)
    assert supervised(tokenizer, item) == ["same<|im_end|>", "same<|im_end|>"]
    assert "why" not in tokenizer.decode(item.token_ids)


def test_tool_call_rendered_differently_as_history(tokenizer):
    calls = "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + (c.function | tojson) + '</tool_call>' }}{% endfor %}"
    template = QWEN3.replace("{{ m.content.split('</think>')[-1].lstrip('\n') + ", "{{ m.content }}" + calls + "{{ ")
    item = encode(
        Renderer(tokenizer, template),
        [user("q"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": "3"}, assistant("a")],
    )
    assert supervised(tokenizer, item) == [
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><|im_end|>',
        "<think>\n\n</think>\n\na<|im_end|>",
    ]  # fmt: skip


def test_generation_prompt_that_opens_a_thought_which_the_answer_lacks(tokenizer):
    """DeepSeek-R1: the prompt ends in <think>, a finished turn shows only what follows the thought."""
    template = CHATML.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
    item = encode(Renderer(tokenizer, template), [user("q"), assistant("a"), user("r"), assistant("b")])
    assert supervised(tokenizer, item) == ["a<|im_end|>", "b<|im_end|>"]


def test_end_of_text_that_closes_every_rendering_is_no_answer(tokenizer):
    """Phi-3 ends a rendering without a generation prompt with the end-of-text token."""
    template = CHATML.replace("assistant\n' }}{% endif %}", "assistant\n' }}{% else %}{{ eos_token }}{% endif %}")
    item = encode(Renderer(tokenizer, template), CHAT)
    assert supervised(tokenizer, item) == CHAT_ANSWERS
    assert not tokenizer.decode(item.token_ids).endswith("</s>")


# Mistral: the system prompt stands in the last question, so earlier prefixes are no prefixes of the whole
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' }}"
    "{% if messages[0].role == 'system' and m == (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}"
    "{{ messages[0].content + '\n\n' }}{% endif %}{{ m.content + '[/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)


def test_turns_whose_start_cannot_be_found_are_left_out_and_counted(tokenizer):
    item = encode(Renderer(tokenizer, MISTRAL), [SYSTEM, user("q"), assistant("a"), user("r"), assistant("b")])
    assert supervised(tokenizer, item) == [" b</s>"]
    assert item.missed == 1


def test_marks_that_cover_the_user_are_an_error_that_names_the_sample(tokenizer):
    with pytest.raises(
        UserError, match=r"s.jsonl line 1: the loss masks disagree: 'You can add.* inside the template's .* but outside"
    ):
        Renderer(tokenizer, generation(users=True)).encode([conversation(CHAT)])


def test_marks_that_miss_a_part_of_the_answer_are_an_error(tokenizer):
    template = generation().replace("{{ m.content }}{%", "{% endgeneration %}{{ m.content }}{% generation %}{%", 1)
    with pytest.raises(UserError, match=r"disagree: 'Let me see.* is inside the assistant turn but outside"):
        Renderer(tokenizer, template).encode([conversation(CHAT)])


@pytest.mark.parametrize(
    "template, what",
    [
        (
            CHATML.replace("m.content }}", "(m.content if m.role != 'system' else '') }}"),
            "leaves out or changes the system message",
        ),
        (CHATML.replace("m.content }}", "(m.content | upper) }}"), "leaves out or changes the system message"),
        (CHATML.replace("m.tool_calls or []", "[]"), "leaves out or changes the call of 'add' of message 3"),
        (CHATML.replace("m.content }}", "(m.content if m.role != 'assistant' else '...') }}"), "the content of message 3"),
    ],
)
def test_templates_that_lose_a_part_are_refused(tokenizer, template, what):
    with pytest.raises(Rejected, match=what) as e:
        encode(Renderer(tokenizer, template), CHAT)
    assert e.value.reason == "not_rendered"


def test_reasoning_and_tools_that_the_template_ignores_are_refused(tokenizer):
    with pytest.raises(Rejected, match=r"the reasoning of message 2 \(prepare.thinking: false drops it\)"):
        encode(Renderer(tokenizer), [user("q"), assistant("a", reasoning_content="because")])
    with pytest.raises(Rejected, match="leaves out the tools"):
        encode(Renderer(tokenizer), CHAT, tools=[{"type": "function", "function": {"name": "add"}}])


def test_arguments_as_text_for_templates_that_want_them_so(tokenizer):
    template = CHATML.replace("(c.function | tojson)", "c.function.name + ': ' + c.function.arguments")
    item = encode(Renderer(tokenizer, template), CHAT)
    assert supervised(tokenizer, item)[0] == 'Let me see.\n<tool_call>add: {"a": 1, "b": 2}</tool_call><|im_end|>'


def test_a_template_that_prints_the_date_renders_the_same_on_any_day(tokenizer):
    template = "{% if not date is defined %}{% set date = strftime_now('%d %b %Y') %}{% endif %}{{ date + '\n' }}" + CHATML
    text = Renderer(tokenizer, template).text([user("q")])
    assert text.startswith("01 Jan 2025\n")
    assert datetime.datetime.now().strftime("%d %b %Y") not in text
    assert Renderer(tokenizer, template, {"date": "1 May"}).text([user("q")]).startswith("1 May\n")


def test_surrogate_halves_are_rejected(tokenizer):
    with pytest.raises(Rejected, match="half of a surrogate pair"):
        encode(Renderer(tokenizer), [user("q"), assistant("\ud83d")])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda t: Renderer(t, "{% for %}"), r"the chat template is broken at line 1"),
        (
            lambda t: Renderer(t, None, {"enable_thinkng": True}),
            "chat_template_kwargs.enable_thinkng has no effect: .* does not use",
        ),
        (lambda t: Renderer(t, None, {"messages": []}), "chat_template_kwargs.messages is set by the rendering itself"),
        (lambda t: Renderer(t, thinking=True), "prepare.thinking = true has no effect"),
        (lambda t: Renderer(make_tokenizer(template=None)), "has no chat template: set prepare.chat_template"),
    ],
)
def test_settings_that_cannot_work_are_errors(tokenizer, make, message):
    with pytest.raises(UserError, match=message):
        make(tokenizer).encode([conversation(CHAT)])


def test_pretokenised_rows_are_checked_against_the_vocabulary(tokenizer):
    def row(ids, mask):
        return from_row(Row("s", 1, "s", {"input_ids": ids, "loss_mask": mask}))

    good, high, empty = Renderer(tokenizer).encode([row([1, 2], [0, 1]), row([1, 10**6], [0, 1]), row([1, 2], [0, 0])])
    assert (good.token_ids.tolist(), good.loss_mask.tolist()) == ([1, 2], [False, True])
    assert (high.reason, empty.reason) == ("token_out_of_range", "empty_mask")


# --- tokenizers without offsets, such as Kimi's


@pytest.fixture(scope="module")
def slow():
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer(chat_template=CHATML)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    assert not tokenizer.is_fast
    return tokenizer


def test_masks_without_offsets(slow):
    item = encode(Renderer(slow), CHAT)
    assert supervised(slow, item) == CHAT_ANSWERS


def test_a_boundary_inside_a_token_is_rejected_without_offsets(slow):
    import copy

    merging = copy.deepcopy(slow)
    merging.add_tokens(["]The"])
    with pytest.raises(Rejected, match="begins or ends inside a token") as e:
        encode(Renderer(merging, LLAMA2.replace("' ' + m.content", "m.content")), [user("q"), assistant("The end")])
    assert e.value.reason == "boundary_in_token"
