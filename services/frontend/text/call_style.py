"""How a chat template wants earlier tool calls of the assistant.

Hugging Face's convention is arguments as an object; some models' own templates put them together with strings and so want
JSON text, and some show calls only where the message has no content at all. Which it is, is tried out once per template.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
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
    """`is_text`: arguments are JSON text. `is_bare`: a message with calls and no text has None for its content."""

    is_text: bool = False
    is_bare: bool = False

    def apply(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages as the template wants them; the same ones where nothing differs."""
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


STYLES = (CallStyle(), CallStyle(is_text=True), CallStyle(is_bare=True), CallStyle(is_text=True, is_bare=True))


def _with_text(call: Message) -> Message:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def find_style(render: Callable[[Sequence[Message]], str | None]) -> CallStyle:
    """The first style with which a template shows a call and its arguments; `render` gives None where it fails."""
    for style in STYLES:
        text = render(style.apply(PROBE))
        if text is not None and _NAME in text and _VALUE in text:
            return style
    return STYLES[0]
