"""How a chat template wants the content of messages: as a text or as a list of parts, and whether it may be None.

Hugging Face gives templates what the client sent. Many templates know texts only and would print a list as Python writes
it; some loop over parts and show nothing of a text. Which it is, per role, is tried out once per template: templates loop in
too many ways (over macros' parameters, slices, filtered lists) for their source to tell.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.frontend.pipeline.request import Message, text_of
from services.frontend.text.call_style import PROBE

_FIRST, _SECOND = "probed first", "probed second"
_QUESTION: Message = {"role": "user", "content": "question"}
_LEAKS = ('"text"', "'text'")
"""In a prompt that shows a list instead of its parts."""
_NONE = "None"

# Where the probed message stands among others; templates insist on an order of roles.
_PLACES: Mapping[str, tuple[Sequence[Message], Sequence[Message]]] = {
    "user": ((), ()),
    "system": ((), (_QUESTION,)),
    "developer": ((), (_QUESTION,)),
    "assistant": ((_QUESTION,), (_QUESTION,)),
    "tool": (PROBE[:2], ()),
}

Render = Callable[[Sequence[Message]], str | None]
"""Makes a prompt; None where the template fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentStyle:
    """`parts`: roles whose parts are shown one by one. `only_parts`: roles of which nothing else is shown.

    `takes_none`: whether the assistant's content may be None in a message with calls, and in one without.
    """

    parts: frozenset[str] = frozenset()
    only_parts: frozenset[str] = frozenset()
    takes_none: Mapping[bool, bool]

    def apply(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages as the template wants them; the same ones where nothing differs."""
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


PLAIN = ContentStyle(takes_none={True: False, False: False})
"""Texts only."""


def find_content_style(render: Render) -> ContentStyle:
    """What a template makes of texts, parts and None."""
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
    """Whether a message without content is rendered, and nothing is shown in its place."""
    before, after = (PROBE[:1], PROBE[2:]) if has_calls else _PLACES["assistant"]
    own = PROBE[1] if has_calls else {"role": "assistant"}
    absent, empty = (render([*before, {**own, "content": content}, *after]) for content in (None, ""))
    return absent is not None and absent.count(_NONE) == (empty or "").count(_NONE)
