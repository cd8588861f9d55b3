"""The shape in which a chat template expects messages: their content, and the earlier tool calls of the assistant.

Hugging Face passes templates what the client sent. Many templates support only plain strings and would print a list in Python's
notation; others loop over content parts and show nothing of a plain string. Arguments of tool calls are objects by convention;
some models' own templates concatenate them with strings and so need JSON text, and some show calls only in messages without
content. Each template is probed once when it is loaded: templates loop in too many ways (over parameters of macros, slices,
filtered lists) to derive the shape from their source.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.frontend.pipeline.request import Message, text_of

Render = Callable[[Sequence[Message]], str | None]
"""Renders messages; returns None if the template raises."""
_NAME, _VALUE = "probed_function", "probed_value"
PROBE: Sequence[Message] = (
    {"role": "user", "content": "question"},
    {
        "role": "assistant",
        "content": "",
        # Nine characters, since Mistral's templates insist on them.
        "tool_calls": [
            {"id": "abc012345", "type": "function", "function": {"name": _NAME, "arguments": {"key": _VALUE}}},
        ],
    },
    {"role": "tool", "content": "result", "tool_call_id": "abc012345", "name": _NAME},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStyle:
    """`is_text`: arguments are JSON text. `is_bare`: the content of a message with calls and without text is None."""

    is_text: bool = False
    is_bare: bool = False

    def apply(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Returns the messages with tool calls in this style; the same object if nothing changes."""
        if not (self.is_text or self.is_bare):
            return messages
        return [self._message(message) if message.get("tool_calls") else message for message in messages]

    def _message(self, message: Message) -> Message:
        changed = dict(message)
        if self.is_bare and not changed.get("content"):
            changed["content"] = None
        if self.is_text:
            changed["tool_calls"] = [_with_text(call) for call in message["tool_calls"]]
        return changed


CALL_STYLES = (CallStyle(), CallStyle(is_text=True), CallStyle(is_bare=True), CallStyle(is_text=True, is_bare=True))


def _with_text(call: Message) -> Message:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def find_call_style(render: Render) -> CallStyle:
    """Returns the first style with which the template shows a call and its arguments."""
    for style in CALL_STYLES:
        text = render(style.apply(PROBE))
        if text is not None and _NAME in text and _VALUE in text:
            return style
    return CALL_STYLES[0]


_FIRST, _SECOND = "probed first", "probed second"
_QUESTION: Message = {"role": "user", "content": "question"}
_LEAKS = ('"text"', "'text'")
"""Occur in a prompt that shows the list itself instead of its parts."""
_NONE = "None"

# Messages before and after the probed one: many templates refuse other orders of roles.
_PLACES: Mapping[str, tuple[Sequence[Message], Sequence[Message]]] = {
    "user": ((), ()),
    "system": ((), (_QUESTION,)),
    "developer": ((), (_QUESTION,)),
    "assistant": ((_QUESTION,), (_QUESTION,)),
    "tool": (PROBE[:2], ()),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentStyle:
    """`parts`: roles whose content may be a list of parts. `only_parts`: roles whose content must be one.

    `takes_none`: whether the assistant's content may be None, by whether the message has tool calls.
    """

    parts: frozenset[str] = frozenset()
    only_parts: frozenset[str] = frozenset()
    takes_none: Mapping[bool, bool]

    def apply(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Returns the messages with content in this style; the same object if nothing changes."""
        if not self.only_parts and all(type(message["content"]) is str for message in messages):
            return messages
        return [self._message(message) for message in messages]

    def _message(self, message: Message) -> Message:
        content, role = message["content"], message["role"]
        if content is None:
            return message if self.takes_none["tool_calls" in message] else {**message, "content": ""}
        if isinstance(content, str):
            return {**message, "content": _parts(content)} if role in self.only_parts else message
        return message if role in self.parts else {**message, "content": text_of(content)}


def find_content_style(render: Render) -> ContentStyle:
    """Probes the template with strings, parts and None for each role."""
    parts, only_parts = set(), set()
    for role in _PLACES:
        shown = _probe(render, role, _parts(_FIRST, _SECOND))
        if shown is None or not 0 <= shown.find(_FIRST) < shown.find(_SECOND) or any(leak in shown for leak in _LEAKS):
            continue
        parts.add(role)
        if _FIRST not in (_probe(render, role, _FIRST) or ""):
            only_parts.add(role)
    return ContentStyle(
        parts=frozenset(parts),
        only_parts=frozenset(only_parts),
        takes_none={has_calls: _takes_none(render, has_calls=has_calls) for has_calls in (True, False)},
    )


def _probe(render: Render, role: str, content: Any) -> str | None:
    before, after = _PLACES[role]
    own = PROBE[2] if role == "tool" else {"role": role}
    return render([*before, {**own, "content": content}, *after])


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _takes_none(render: Render, *, has_calls: bool) -> bool:
    """Returns whether the template renders a message without content, and does not print the word None for it."""
    before, after = (PROBE[:1], PROBE[2:]) if has_calls else _PLACES["assistant"]
    own = PROBE[1] if has_calls else {"role": "assistant"}
    absent, empty = (render([*before, {**own, "content": content}, *after]) for content in (None, ""))
    return absent is not None and absent.count(_NONE) == (empty or "").count(_NONE)
