import numpy as np
import pytest

from eagle3dvc.prompts.conversations import Rejected, from_row
from eagle3dvc.prompts.sources import Row


def convert(data, system_prompt=None):
    return from_row(Row("s", 3, "s.jsonl line 3", data), system_prompt)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "Be brief."}
QA = [user("q"), assistant("a")]


@pytest.mark.parametrize(
    "row, messages",
    [
        ({"messages": QA}, QA),
        ({"messages": [SYSTEM, *QA], "id": 5, "prompt": "another"}, [SYSTEM, *QA]),
        ({"messages": '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]'}, QA),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, QA),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "Be brief."},
            [SYSTEM, *QA],
        ),
        ({"conversations": QA}, QA),
        ({"prompt": "q", "completion": "a"}, QA),
        ({"prompt": [SYSTEM, user("q")], "completion": [assistant("a")]}, [SYSTEM, *QA]),
        ({"prompt": "q"}, [user("q")]),
        ({"instruction": "q", "input": "", "output": "a"}, QA),
        ({"instruction": "q", "output": "a"}, QA),
        ({"instruction": "q", "input": "about this", "output": "a"}, [user("q\n\nabout this"), assistant("a")]),
        ({"turns": ["q", "q2"], "reference": ["a", "a2"]}, [*QA, user("q2"), assistant("a2")]),
        ({"turns": ["q"], "reference": "a"}, QA),
        ({"turns": ["q", "q2"], "reference": ["a"]}, [*QA, user("q2")]),
        ({"turns": ["q", "q2"], "reference": ["a", ""]}, [*QA, user("q2")]),
        ({"turns": ["q"], "reference": [""]}, [user("q")]),
        ({"turns": ["q"], "reference": None}, [user("q")]),
        ({"messages": [{"role": "developer", "content": "Be brief."}, *QA]}, [SYSTEM, *QA]),
        ({"messages": [{"role": "system", "content": " "}, *QA]}, QA),
        (
            {"messages": [user([{"type": "text", "text": "q"}, {"type": "text", "text": "r"}]), assistant("a")]},
            [user("q\nr"), QA[1]],
        ),
        (
            {"messages": [user("q"), assistant("a", reasoning="because")]},
            [user("q"), assistant("a", reasoning_content="because")],
        ),
        ({"messages": [user("q"), assistant("a", tool_calls=None, reasoning_content="")]}, QA),
    ],
)
def test_every_shape_becomes_messages(row, messages):
    conversation = convert(row)
    assert conversation.messages == messages
    assert (conversation.source, conversation.number, conversation.where) == ("s", 3, "s.jsonl line 3")


def test_unanswered_questions_wait_in_pending():
    conversation = convert({"turns": ["q", "q2", "q3"]})
    assert (conversation.messages, conversation.pending) == ([user("q")], ["q2", "q3"])
    conversation = convert({"turns": ["q", "q2", "q3"], "reference": ["a"]})
    assert (conversation.messages, conversation.pending) == ([*QA, user("q2")], ["q3"])


def test_system_prompt_is_for_rows_without_one():
    assert convert({"prompt": "q", "completion": "a"}, "Be brief.").messages == [SYSTEM, *QA]
    other = {"role": "system", "content": "Be long."}
    assert convert({"messages": [other, *QA]}, "Be brief.").messages == [other, *QA]


def test_tool_calls_come_out_in_one_form():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    tools = [{"type": "function", "function": {"name": "add"}}]
    openai = {
        "messages": [
            user("q"),
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "content": "2", "tool_call_id": "c1"},
            assistant("a"),
        ],
        "tools": '[{"type": "function", "function": {"name": "add"}}]',
    }
    conversation = convert(openai)
    assert conversation.messages[1] == assistant("", tool_calls=[{**call, "id": "c1"}])
    assert conversation.messages[2] == {"role": "tool", "content": "2", "tool_call_id": "c1"}
    assert conversation.tools == tools
    sharegpt = {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "a"},
        ],
        "tools": tools,
    }
    conversation = convert(sharegpt)
    assert conversation.messages == [
        user("q"),
        assistant("", tool_calls=[call]),
        {"role": "tool", "content": "2"},
        assistant("a"),
    ]
    assert conversation.tools == tools


def test_pretokenised_rows_are_taken_as_they_are():
    conversation = convert({"input_ids": [5, 6, 7], "loss_mask": [0, True, 1], "messages": QA})
    assert conversation.token_ids.tolist() == [5, 6, 7]
    assert conversation.loss_mask.tolist() == [False, True, True]
    assert conversation.loss_mask.dtype == np.bool_
    assert conversation.messages is None


@pytest.mark.parametrize(
    "row, reason, detail",
    [
        ({"text": "x", "id": 1}, "unknown_shape", r"the keys found are text, id; known shapes are messages .* input_ids \+ loss_mask"),
        ({}, "unknown_shape", "the keys found are none"),
        ([1], "unknown_shape", "a row must be an object, found list"),
        ({"messages": []}, "empty_content", "no messages"),
        ({"messages": 5}, "wrong_type", "messages must be a list, found int"),
        ({"messages": "hello"}, "wrong_type", "messages must be a list, found text that is not JSON"),
        ({"messages": ["hello"]}, "wrong_type", "message 1 must be an object, found str"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown_role", "message 1 has the role 'narrator'; known are system"),
        ({"messages": [{"content": "x"}]}, "unknown_role", "message 1 has the role None"),
        ({"messages": [user(7)]}, "wrong_type", "message 1: content must be text or a list of parts, found int"),
        ({"messages": [user([{"type": "image_url", "image_url": {}}])]}, "not_text", "message 1: a content part of type 'image_url'"),
        ({"messages": [user("  "), assistant("a")]}, "empty_content", r"message 1 \(user\) has no content"),
        ({"messages": [user("q"), assistant("")]}, "empty_content", r"message 2 \(assistant\) has no content"),
        ({"prompt": "q", "completion": ""}, "empty_content", "message 2"),
        ({"prompt": "q", "completion": ["a"]}, "wrong_type", "found str and list"),
        ({"instruction": "q", "input": 5, "output": "a"}, "wrong_type", "found str and int"),
        ({"messages": [assistant("a")]}, "roles_out_of_order", "message 1 is assistant at the start: system or user expected"),
        ({"messages": [*QA, assistant("b")]}, "roles_out_of_order", "message 3 is assistant after assistant: user or tool expected"),
        ({"messages": [user("a"), user("b"), assistant("c")]}, "roles_out_of_order", "message 2 is user after user: assistant"),
        ({"messages": [user("a"), SYSTEM, assistant("c")]}, "roles_out_of_order", "message 2 is system after user"),
        ({"messages": [SYSTEM]}, "no_question", "a system message only"),
        ({"turns": ["q"], "reference": ["a", "b"]}, "roles_out_of_order", "1 turns but 2 references"),
        ({"messages": [user("q"), assistant("", tool_calls=[{"function": {"arguments": "{}"}}])]}, "bad_tool_call", "message 2: a tool"),
        ({"messages": [user("q"), assistant("", tool_calls=[{"name": "f", "arguments": "{"}])]}, "bad_tool_call", "JSON object"),
        ({"messages": QA, "tools": ["add"]}, "wrong_type", "tools must be a list of objects"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "wrong_length", "2 input_ids and 1 loss_mask values"),
        ({"input_ids": [], "loss_mask": []}, "wrong_length", "0 input_ids"),
        ({"input_ids": ["a"], "loss_mask": [1]}, "wrong_type", "input_ids must be a list of token ids"),
        ({"input_ids": [1], "loss_mask": [2]}, "wrong_type", "loss_mask must hold 0 and 1 only"),
        ({"input_ids": [-1], "loss_mask": [1]}, "token_out_of_range", "no token id"),
    ],
)  # fmt: skip
def test_unusable_rows_say_why(row, reason, detail):
    with pytest.raises(Rejected, match=detail) as e:
        convert(row)
    assert e.value.reason == reason
