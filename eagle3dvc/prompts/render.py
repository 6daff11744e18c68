"""Conversations into token ids and loss masks, through the tokenizer's own chat template.

A loss mask is true on what the verifier itself writes when it serves the conversation: every assistant turn from the
first token after the generation prompt up to and including its end-of-turn token, not the whitespace after that, which
the template adds and no model writes. The turns are found from render boundaries: what the template renders up to a turn
(with the generation prompt) and through it. Where the template marks turns with `{% generation %}`, both must agree.

Templates that render a turn differently once it is history (reasoning removed, say) are handled by finding the turn's text
behind its anchored start; a turn whose start the full text does not contain stays unsupervised and is counted.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagle3dvc.errors import UserError
from eagle3dvc.params import Params
from eagle3dvc.prompts.conversations import Conversation, Rejected

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Some templates print today's date where none is given. The same inputs must give the same bytes tomorrow.
TODAY = datetime.datetime(2025, 1, 1)
THINKING = ("enable_thinking", "thinking")  # the names under which templates know the switch
REASONING = ("reasoning_content", "reasoning", "thinking")  # the names under which they look for a message's reasoning
RESERVED = ("conversations", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message")

Span = tuple[int, int]  # characters [start, end) of the rendered text


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tokenised conversation, not yet truncated; `missed` counts assistant turns that could not be supervised."""

    token_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T]
    missed: int = 0


@dataclass(frozen=True, slots=True)
class _Habit:
    closing: str  # what ends every rendering without a generation prompt
    prompts: bool  # whether add_generation_prompt changes anything


def load_tokenizer(folder: str | Path, trust_remote_code: bool = False):
    """The tokenizer in a verifier folder. Raises UserError where there is none that loads."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as e:  # transformers raises many kinds; all mean the same here
        text = " ".join(str(e).split())[:300]
        raise UserError(
            f"{folder} holds no tokenizer that loads ({type(e).__name__}: {text}): run `dvc repro verifier`"
        ) from None


def load_renderer(params: Params, folder: str | Path = "data/verifier") -> Renderer:
    """The renderer for prepare.chat_template, chat_template_kwargs and thinking. Raises UserError."""
    prepare, tokenizer = params.prepare, load_tokenizer(folder, params.verifier.trust_remote_code)
    return Renderer(tokenizer, _template_text(prepare.chat_template), prepare.chat_template_kwargs, prepare.thinking)


def render(conversation: Conversation, tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """(token_ids int32 [T], loss_mask bool [T]) of one conversation; raises Rejected or UserError."""
    [item] = Renderer(tokenizer).encode([conversation])
    if isinstance(item, Rejected):
        raise item
    return item.token_ids, item.loss_mask


def _template_text(value: str | None) -> str | None:
    """prepare.chat_template: the template itself, or the path of a file that holds it."""
    if value is None or "{{" in value or "{%" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(
            f"prepare.chat_template = {value} is neither a template nor a file that can be read "
            f"({getattr(e, 'strerror', None) or e}): give the path of a Jinja file"
        ) from None


def _with_text_arguments(call: dict) -> dict:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


class Renderer:
    """Renders and tokenises conversations with one template; what `encode` is given in batches it tokenises in parallel."""

    def __init__(
        self,
        tokenizer,
        template: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
        thinking: bool | None = None,
    ):
        self.tokenizer, self.thinking = tokenizer, thinking
        self._given, self._kwargs = template, dict(template_kwargs or {})
        self._templates: dict[bool, str] = {}
        self._habits: dict[bool, _Habit] = {}
        self._text_arguments = False  # whether templates see the arguments of tool calls as JSON text
        self._variables = {**tokenizer.special_tokens_map, "strftime_now": TODAY.strftime, **self._kwargs}
        if thinking is not None:
            self._variables = {**dict.fromkeys(THINKING, thinking), **self._variables}
        self._end_marks = tuple({t.content for t in tokenizer.added_tokens_decoder.values() if t.content.strip()})
        self.vocab_size = len(tokenizer)

    def settings(self) -> str:
        """What the rendering depends on besides the tokenizer's files, as sorted JSON."""
        return json.dumps([self._given, self._kwargs, self.thinking], sort_keys=True, default=str)

    def template(self, tools: bool = False) -> str:
        """The chat template in use. Raises UserError where there is none, it is broken or does not take what is set."""
        if tools not in self._templates:
            self._templates[tools] = self._checked(tools)
        return self._templates[tools]

    def _checked(self, tools: bool) -> str:
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            template = self.tokenizer.get_chat_template(self._given, [{}] if tools else None)
        except ValueError:
            raise UserError(
                "the verifier's tokenizer has no chat template: set prepare.chat_template to the path of a Jinja file"
            ) from None
        try:
            render_jinja_template([], chat_template=template)  # compiles it
        except jinja2.TemplateSyntaxError as e:
            raise UserError(
                f"the chat template is broken at line {e.lineno} ({e.message}): set prepare.chat_template"
            ) from None
        for key in self._kwargs:
            if key in RESERVED:
                raise UserError(f"prepare.chat_template_kwargs.{key} is set by the rendering itself: remove it")
            if not re.search(rf"\b{re.escape(key)}\b", template):
                raise UserError(f"prepare.chat_template_kwargs.{key} has no effect: the chat template does not use {key!r}")
        if self.thinking and not re.search(r"\b(enable_)?thinking\b", template):
            raise UserError(
                "prepare.thinking = true has no effect: the chat template uses neither enable_thinking nor thinking; "
                "remove it, or name the template's own switch in prepare.chat_template_kwargs"
            )
        return template

    def text(self, messages: list[dict], tools: list[dict] | None = None, generation_prompt: bool = False) -> str:
        """What the template renders; raises Rejected where it refuses the messages."""
        text, _ = self._render(messages, tools, generation_prompt)
        return text if generation_prompt else self._unclosed(text, tools)

    def prompt_ids(self, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
        """Token ids of messages and the generation prompt: what an engine is given to write the next answer. Raises Rejected."""
        text = self._with_arguments(lambda: self._question(self._plain(messages), tools), messages)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _question(self, messages: list[dict], tools) -> str:
        """The prompt's text; raises Rejected where the template leaves out a part of it or does not begin the answer."""
        text = self.text(messages, tools, generation_prompt=True)
        self._asked(messages, tools, text, messages)
        if not self._habit(messages, tools).prompts:
            answered = self.text([*messages, {"role": "assistant", "content": "1"}], tools)
            turn = answered[len(os.path.commonprefix([text, answered])) :].lstrip()
            if header := next((m for m in self._end_marks if turn.startswith(m) and "think" not in m), None):
                raise Rejected(
                    "no_generation_prompt", f"the chat template ignores add_generation_prompt but writes {header!r} itself"
                )
        return text

    def _render(self, messages, tools, generation_prompt: bool, marks: bool = False) -> tuple[str, list[Span]]:
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            [text], spans = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self.template(bool(tools)),
                return_assistant_tokens_mask=marks,
                add_generation_prompt=generation_prompt,
                **self._variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as e:
            raise Rejected("template_error", f"the chat template refuses it: {' '.join(str(e).split())[:200]}") from None
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise Rejected("invalid_unicode", "its text holds half of a surrogate pair") from None
        return text, spans[0] if spans else []

    def _plain(self, messages: list[dict]) -> list[dict]:
        """Messages as the template is to see them.

        Reasoning goes under every name that templates look for it, and goes away where prepare.thinking is false.
        """
        plain = []
        for message in messages:
            message = dict(message)
            reasoning = message.pop("reasoning_content", None)
            if self.thinking is False and message["role"] == "assistant" and message["content"].lstrip().startswith("<think>"):
                message["content"] = message["content"].rpartition("</think>")[2].lstrip("\n")
            if reasoning and self.thinking is not False:
                message.update(dict.fromkeys(REASONING, reasoning))
            if self._text_arguments and message.get("tool_calls"):
                message["tool_calls"] = [_with_text_arguments(call) for call in message["tool_calls"]]
            plain.append(message)
        return plain

    # --- text and spans

    def locate(self, conversation: Conversation) -> tuple[str, list[Span], int]:
        """(rendered text, spans of what is supervised, number of assistant turns not found); raises Rejected.

        Raises UserError where the template's own marks and the render boundaries disagree.
        """
        return self._with_arguments(lambda: self._locate(conversation), conversation.messages)

    def _with_arguments(self, render: Callable[[], Any], messages: list[dict]) -> Any:
        """What `render` returns; where the template refuses the arguments of tool calls, as it is with them as text."""
        try:
            return render()
        except Rejected as e:
            calls = any("tool_calls" in m for m in messages)
            if e.reason != "template_error" or not calls or self._text_arguments:
                raise
        # vLLM gives templates the arguments of a tool call as a mapping; some (DeepSeek-V3) take only JSON text.
        self._text_arguments = True
        try:
            return render()
        finally:
            self._text_arguments = False

    def _locate(self, conversation: Conversation) -> tuple[str, list[Span], int]:
        messages, tools = self._plain(conversation.messages), conversation.tools
        while messages and messages[-1]["role"] != "assistant":
            messages = messages[:-1]
        if not messages:
            raise Rejected(
                "no_assistant", "it has no assistant turn: nothing to learn from; prepare.responses: verifier writes one"
            )
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        if bool(tools) not in self._habits:
            self._habits[bool(tools)] = self._habit(messages[: turns[0]], tools)
        marked = bool(GENERATION.search(self.template(bool(tools))))
        text, marks = self._render(messages, tools, False, marks=marked)
        text = self._unclosed(text, tools)
        found: list[Span | None] = []
        last_end = 0
        for i in turns:
            span = self._turn(messages, tools, i, text)
            found.append(span if span and span[0] >= last_end else None)
            last_end = found[-1][1] if found[-1] else last_end
        spans = [(span[0], self._end(text, *span)) for span in found if span]
        if marked:
            spans = self._agreed(conversation.where, text, spans, marks, messages, tools, turns, None not in found)
        if not spans:
            raise Rejected(
                "turns_not_found", "the chat template renders its assistant turns in another way once they are history"
            )
        self._nothing_lost(messages, tools, text, dict(zip(turns, found)))
        return text, spans, len(turns) - len(spans)

    def _habit(self, messages: list[dict], tools) -> _Habit:
        """What the template does at the end of every rendering, seen on messages that end with a question."""
        prompt, before = (self._render(messages, tools, flag)[0] for flag in (True, False))
        eos = self.tokenizer.eos_token or ""
        closes = bool(eos) and before.endswith(eos) and not prompt.startswith(before)
        return _Habit(closing=eos if closes else "", prompts=prompt != before)

    def _unclosed(self, text: str, tools) -> str:
        """A finished rendering without what some templates (Phi-3) close it with, which is no part of the last turn."""
        habit = self._habits.get(bool(tools))
        return text.removesuffix(habit.closing) if habit and habit.closing else text

    def _turn(self, messages, tools, i: int, text: str) -> Span | None:
        """Where assistant turn `i` stands in the full text, through everything the template adds to it; None if unsure."""
        prompt = self.text(messages[:i], tools, generation_prompt=True)
        through = text if i == len(messages) - 1 else self.text(messages[: i + 1], tools)
        anchored = text.startswith(prompt)
        if anchored and text.startswith(through) and len(through) > len(prompt):
            return len(prompt), len(through)
        # The turn is rendered in another way in the full text (reasoning removed, say), or the generation prompt holds more
        # than the finished turn does (an opened <think>): look for its visible part, with all that follows, behind its anchor.
        anchor = prompt if anchored else self.text(messages[:i], tools)
        if not text.startswith(anchor):
            return None
        start = len(os.path.commonprefix([prompt, text]))
        own = through[len(os.path.commonprefix([anchor, through])) :]  # the turn, with its header if not anchored
        content = messages[i]["content"].rpartition("</think>")[2].strip()
        at = own.rfind(content) if content else -1
        for visible in (own.rpartition("</think>")[2].lstrip() if "</think>" in own else "", own[at:] if at >= 0 else ""):
            found = text.find(visible, len(anchor)) if visible.strip() else -1
            if found >= 0:
                break
        else:
            return None
        if header := prompt[start:].strip():  # the same header with other whitespace, or one the finished turn lacks
            at = text.find(header, start, found)
            start = at + len(header) if at >= 0 else start
        start = min(start, found)
        if (extra := text[start:found].strip()) and extra not in own:
            return None  # something that is not the template's own stands between the anchor and the answer
        return start, found + len(visible)

    def _end(self, text: str, start: int, end: int) -> int:
        """The end of a turn without the whitespace behind its end-of-turn token."""
        stripped = text[start:end].rstrip()
        return start + len(stripped) if stripped.endswith(self._end_marks) else end

    def _asked(self, messages, tools, text: str, question: list[dict]) -> None:
        """Raises Rejected where the template leaves out the tools, which stand before `question`'s answer, or what was asked."""
        for message in messages:
            if message["role"] in ("system", "user") and message["content"].strip() not in text:
                raise Rejected("not_rendered", f"the chat template leaves out or changes the {message['role']} message")
        if tools and self.text(question, tools, generation_prompt=True) == self.text(question, None, generation_prompt=True):
            raise Rejected("not_rendered", "the chat template leaves out the tools")

    def _nothing_lost(self, messages, tools, text: str, found: dict[int, Span | None]) -> None:
        """Raises Rejected where the template leaves out a part of the conversation that it should have rendered."""
        self._asked(messages, tools, text, messages[: min(found)])
        for i, span in found.items():
            if span is None:
                continue
            answer, turn, habit = messages[i], text[slice(*span)], self._habits[bool(tools)]
            content = answer["content"].rpartition("</think>")[2].strip()
            parts = {"content": content}
            if i == len(messages) - 1:  # templates may drop the reasoning of earlier turns
                parts["reasoning"] = answer.get("reasoning_content", "")
            for call in answer.get("tool_calls", []):
                parts[f"call of {call['function']['name']!r}"] = call["function"]["name"]
            for name, part in parts.items():
                if part.strip() not in turn:
                    hint = " (prepare.thinking: false drops it)" if name == "reasoning" else ""
                    raise Rejected(
                        "not_rendered", f"the chat template leaves out or changes the {name} of message {i + 1}{hint}"
                    )
            header = next((m for m in self._end_marks if turn.lstrip().startswith(m) and not content.startswith(m)), None)
            if content and header and not habit.prompts and "think" not in header:
                raise Rejected(
                    "no_generation_prompt", f"the chat template ignores add_generation_prompt but writes {header!r} itself"
                )

    def _agreed(self, where, text, spans, marks, messages, tools, turns, complete: bool) -> list[Span]:
        """The spans, checked against the template's own marks.

        Marks may hold the generation prompt or lack the end-of-turn token: templates differ in that, and what is served
        decides. Anything else that only one of the two holds raises UserError. Turns whose boundaries were not found
        are taken from the marks.
        """
        ours, theirs, free = np.zeros((3, len(text)), bool)
        for a, b in marks:
            theirs[a:b] = True
        for a, b in spans:
            ours[a:b] = True
            mark = max((m for m in self._end_marks if text.endswith(m, a, b)), key=len, default="")
            free[b - len(mark) : b] = True
        if complete:
            for i, (a, _) in zip(turns, spans):
                if not (ours[:a] == theirs[:a]).all():  # else nothing to excuse, and a render saved
                    free[len(os.path.commonprefix([self.text(messages[:i], tools), text])) : a] = True
            wrong = (ours != theirs) & ~free
        else:
            spans = spans + [(a, self._end(text, a, b)) for a, b in marks if not ours[a:b].any()]
            wrong = ours & ~theirs & ~free
        wrong = [at for at in np.flatnonzero(wrong).tolist() if not text[at].isspace()]
        if wrong:
            at, who = wrong[0], "the template's {% generation %} marks"
            side = (
                f"inside the assistant turn but outside {who}" if ours[at] else f"inside {who} but outside the assistant turn"
            )
            raise UserError(
                f"{where}: the loss masks disagree: {text[at : at + 40]!r} is {side}; "
                f"set prepare.chat_template to a template whose marks cover the answers only"
            )
        return sorted(spans)

    # --- tokens

    def encode(self, conversations: Sequence[Conversation]) -> list[Encoded | Rejected]:
        """Each conversation tokenised with its mask, or the reason it cannot be used; in the order given."""
        results: list[Any] = [None] * len(conversations)
        located = []
        for i, conversation in enumerate(conversations):
            try:
                if conversation.token_ids is not None:
                    results[i] = self.given_tokens(conversation)
                else:
                    located.append((i, *self.locate(conversation)))
            except Rejected as e:
                results[i] = e
        texts = [text for _, text, _, _ in located]
        tokenise = self._fast if self.tokenizer.is_fast else self._slow
        for (i, _, _, missed), item in zip(located, tokenise(texts, [spans for _, _, spans, _ in located])):
            results[i] = item if isinstance(item, Rejected) else Encoded(*item, missed)
        return results

    def given_tokens(self, conversation: Conversation) -> Encoded:
        """A row that came as tokens, checked. Raises Rejected."""
        if (top := int(conversation.token_ids.max())) >= self.vocab_size:
            raise Rejected(
                "token_out_of_range", f"input_ids holds {top}, the verifier's tokenizer has {self.vocab_size} tokens"
            )
        if not conversation.loss_mask.any():
            raise Rejected("empty_mask", "its loss_mask is all zero")
        return Encoded(conversation.token_ids.astype(np.int32), conversation.loss_mask)

    def _fast(self, texts: list[str], spans: list[list[Span]]):
        """A token is supervised when its first character lies in a span."""
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        for encoding, text_spans in zip(backend.encode_batch(texts, add_special_tokens=False), spans):
            n = len(encoding.ids)
            ends = np.fromiter(itertools.chain.from_iterable(encoding.offsets), np.int64, 2 * n).reshape(n, 2)
            starts, ends = ends[:, 0], ends[:, 1]
            mask = np.zeros(n, bool)
            for a, b in text_spans:
                # Some tokenizers trim whitespace off offsets: a token of whitespace alone is then empty, at its own end.
                empty = starts == ends
                mask |= np.where(empty, (a < starts) & (starts <= b), (a <= starts) & (starts < b))
            yield np.array(encoding.ids, np.int32), mask

    def _slow(self, texts: list[str], spans: list[list[Span]]):
        """Without offsets: the tokens before a boundary are those of the text before it, if they begin the whole."""
        for text, text_spans in zip(texts, spans):
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            mask = np.zeros(len(ids), bool)
            bounds = []
            for boundary in itertools.chain.from_iterable(text_spans):
                before = self.tokenizer.encode(text[:boundary], add_special_tokens=False)
                if ids[: len(before)] != before:
                    bounds = None
                    break
                bounds.append(len(before))
            if bounds is None:
                yield Rejected("boundary_in_token", "a turn begins or ends inside a token, and this tokenizer gives no offsets")
                continue
            for a, b in zip(bounds[::2], bounds[1::2]):
                mask[a:b] = True
            yield np.array(ids, np.int32), mask
