"""One normalised conversation out of a row of any known shape (docs/data.md shows each).

A conversation may end without an answer: `prepare.responses: dataset` needs one, `verifier` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eagle3dvc.params import Params
from eagle3dvc.prompts.sources import Row, mixed, open_sources, shuffled

SHAPES = (
    "messages (role/content); conversations (from/value); prompt + completion; instruction (+ input) + output; "
    "turns + reference; input_ids + loss_mask"
)
ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model", "bing", "bard"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response", "ipython"), "tool"),
    "function_call": "function_call",
}


class Rejected(Exception):
    """A row that cannot be used: `reason` is a word to count by, `detail` says what is wrong with this row."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as chat templates take them, or, for pre-tokenised rows, token ids and mask; and where they came from.

    A message has `role` (system, user, assistant, tool) and `content` (a string), and where the row had them
    `reasoning_content`, `tool_calls` (arguments as a mapping), `tool_call_id` and `name`. Messages may end with a question
    that nobody has answered; `pending` are the questions to be asked after that one.
    """

    source: str
    number: int
    where: str
    messages: list[dict[str, Any]] | None = None
    pending: list[str] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    token_ids: np.ndarray | None = None  # int64 [T]
    loss_mask: np.ndarray | None = None  # bool [T]


def conversations(params: Params) -> Iterator[Conversation]:
    """Normalised conversations of prepare.sources, in their lasting order.

    Raises UserError for a source that cannot be read and Rejected at the first unusable row; a caller that goes on past
    such rows takes `sources` rows and `from_row` itself, as `prepare.build` does.
    """
    rows = shuffled(mixed(open_sources(params)), params.prepare.shuffle_buffer, params.seed)
    return (from_row(row, params.prepare.system_prompt) for row in rows)


def from_row(row: Row, system_prompt: str | None = None) -> Conversation:
    """The conversation of one row; `system_prompt` is put first where the row has none. Raises Rejected."""
    data = row.data
    if not isinstance(data, dict):
        raise Rejected("unknown_shape", f"a row must be an object, found {type(data).__name__}")
    if data.get("input_ids") is not None and data.get("loss_mask") is not None:
        ids, mask = _tokens(data["input_ids"], data["loss_mask"])
        return Conversation(row.source, row.number, row.where, token_ids=ids, loss_mask=mask)
    messages = [_message(i, item) for i, item in enumerate(_items(data), 1)]
    system = data.get("system")
    if not (isinstance(system, str) and system.strip()):
        system = system_prompt
    messages = [m for m in messages if m["role"] != "system" or m["content"].strip()]
    if not messages:
        raise Rejected("empty_content", "it has no messages")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    pending = []
    while len(messages) > 1 and messages[-1]["role"] == messages[-2]["role"] == "user":
        pending.insert(0, messages.pop()["content"])
    _check_order(messages)
    return Conversation(row.source, row.number, row.where, messages, pending, _tools(data.get("tools")))


def _items(data: dict[str, Any]) -> list[Any]:
    """The messages of a row, still as the row has them."""
    for key in ("messages", "conversations", "conversation"):
        if (items := data.get(key)) is not None:
            return _list(items, key)
    if (turns := data.get("turns")) is not None:
        return _turns(_list(turns, "turns"), data.get("reference"))
    if (instruction := data.get("instruction")) is not None:
        extra = data.get("input")
        if not isinstance(instruction, str) or not isinstance(extra, str | None):
            raise Rejected("wrong_type", f"instruction and input must be text, found {_types(data, 'instruction', 'input')}")
        question = f"{instruction}\n\n{extra}" if extra and extra.strip() else instruction
        return _pair(question, data.get("output"))
    if (prompt := data.get("prompt")) is not None:
        completion = data.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str | None):
            return _pair(prompt, completion)
        if isinstance(prompt, list) and isinstance(completion, list | None):  # both as lists of messages
            return prompt + (completion or [])
        raise Rejected(
            "wrong_type",
            f"prompt and completion must both be text or both lists of messages, found {_types(data, 'prompt', 'completion')}",
        )
    found = ", ".join(map(str, list(data)[:12])) or "none"
    raise Rejected("unknown_shape", f"the keys found are {found}; known shapes are {SHAPES}")


def _types(data: dict[str, Any], *keys: str) -> str:
    return " and ".join(type(data.get(key)).__name__ for key in keys)


def _list(value: Any, key: str) -> list[Any]:
    """A list, given as such or as JSON text (some datasets keep nested columns that way)."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise Rejected("wrong_type", f"{key} must be a list, found text that is not JSON") from None
    if not isinstance(value, list):
        raise Rejected("wrong_type", f"{key} must be a list, found {type(value).__name__}")
    return value


def _pair(question: Any, answer: Any) -> list[dict[str, Any]]:
    items = [{"role": "user", "content": question}]
    return items if answer is None else [*items, {"role": "assistant", "content": answer}]


def _turns(turns: list[Any], reference: Any) -> list[dict[str, Any]]:
    """Questions and, as far as there are any, their answers."""
    answers = [reference] if isinstance(reference, str) else (_list(reference, "reference") if reference is not None else [])
    if len(answers) > len(turns):
        raise Rejected("roles_out_of_order", f"there are {len(turns)} turns but {len(answers)} references")
    blank = next((i for i, a in enumerate(answers) if a is None or (isinstance(a, str) and not a.strip())), len(answers))
    answers, items = answers[:blank], []  # benchmarks leave the reference of a question blank that has none
    for i, turn in enumerate(turns):
        items.append({"role": "user", "content": turn})
        if i < len(answers):
            items.append({"role": "assistant", "content": answers[i]})
    return items


def _text(content: Any, where: str) -> str:
    """The text of a message's content: a string, or a list of parts, which are joined by newlines as vLLM does."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Rejected("wrong_type", f"{where}: content must be text or a list of parts, found {type(content).__name__}")
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise Rejected("not_text", f"{where}: a content part of type {kind!r} is not text")
        texts.append(text)
    return "\n".join(texts)


def _message(i: int, item: Any) -> dict[str, Any]:
    """One message in the form templates take; `i` counts from 1."""
    if not isinstance(item, dict):
        raise Rejected("wrong_type", f"message {i} must be an object, found {type(item).__name__}")
    where, name = f"message {i}", item.get("role", item.get("from"))
    role = ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise Rejected("unknown_role", f"{where} has the role {name!r}; known are {', '.join(ROLES)}")
    content = _text(item.get("content", item.get("value")), where)
    if role == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": _tool_calls(content, where)}
    message: dict[str, Any] = {"role": role, "content": content}
    for key in ("name", "tool_call_id"):
        if item.get(key):
            message[key] = item[key]
    if role == "assistant":
        reasoning = item.get("reasoning_content") or item.get("reasoning")
        if isinstance(reasoning, str) and reasoning.strip():
            message["reasoning_content"] = reasoning
        if item.get("tool_calls"):
            message["tool_calls"] = _tool_calls(item["tool_calls"], where)
    if role in ("user", "assistant") and not content.strip() and not message.get("tool_calls"):
        raise Rejected("empty_content", f"{where} ({role}) has no content")
    return message


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's form with the arguments as a mapping, which is how vLLM hands them to chat templates."""
    try:
        calls = json.loads(value) if isinstance(value, str) else value
        normal = []
        for call in calls if isinstance(calls, list) else [calls]:
            function = dict(call.get("function") or {k: call[k] for k in ("name", "arguments") if k in call})
            arguments = function.get("arguments")
            arguments = json.loads(arguments) if isinstance(arguments, str) and arguments.strip() else arguments
            function["arguments"] = arguments or {}
            if not isinstance(function["name"], str) or not isinstance(function["arguments"], dict):
                raise TypeError
            normal.append({"type": "function", **({"id": call["id"]} if call.get("id") else {}), "function": function})
        return normal
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise Rejected("bad_tool_call", f"{where}: a tool call must have a name and arguments that are a JSON object") from None


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if not value:
        return None
    tools = _list(value, "tools")
    if not all(isinstance(tool, dict) for tool in tools):
        raise Rejected("wrong_type", "tools must be a list of objects")
    return tools or None


def _check_order(messages: list[dict[str, Any]]) -> None:
    """System first if at all, then the user, then assistant and user in turn; tool results follow an assistant."""
    allowed = {"start": ("system", "user"), "system": ("user",), "user": ("assistant",), "assistant": ("user", "tool")}
    allowed["tool"] = ("tool", "assistant")
    last = "start"
    for i, message in enumerate(messages, 1):
        if message["role"] not in allowed[last]:
            after = "at the start" if last == "start" else f"after {last}"
            raise Rejected(
                "roles_out_of_order", f"message {i} is {message['role']} {after}: {' or '.join(allowed[last])} expected"
            )
        last = message["role"]
    if last == "system":
        raise Rejected("no_question", "it has a system message only")


def _tokens(ids: Any, mask: Any) -> tuple[np.ndarray, np.ndarray]:
    for name, value, kinds in (("input_ids", ids, int), ("loss_mask", mask, (bool, int))):
        if not isinstance(value, list) or not all(isinstance(x, kinds) for x in value):
            raise Rejected("wrong_type", f"{name} must be a list of {'token ids' if name == 'input_ids' else '0 and 1'}")
    if not ids or len(ids) != len(mask):
        raise Rejected("wrong_length", f"there are {len(ids)} input_ids and {len(mask)} loss_mask values")
    if not all(0 <= x < 2**31 for x in ids):
        raise Rejected("token_out_of_range", "input_ids holds a value that is no token id")
    if not set(mask) <= {0, 1}:
        raise Rejected("wrong_type", "loss_mask must hold 0 and 1 only")
    return np.array(ids, np.int64), np.array(mask, bool)
