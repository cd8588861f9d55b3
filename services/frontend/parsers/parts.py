"""The parts into which a parser splits an answer. Tuples, since they are created for each token."""

from typing import NamedTuple

TRUNCATED = "tool_call_truncated"
"""The answer ended inside a call."""
MALFORMED = "tool_call_malformed"
"""What looked like a call could not be read on; the text from there on is content."""
ARGUMENTS_MALFORMED = "tool_arguments_malformed"
"""A call's arguments are whole and are not JSON; they were delivered as the model wrote them."""
UNKNOWN_TOOL = "tool_unknown"
"""A call without any mark names a function that the request does not have; it is content."""

WARNINGS = {
    TRUNCATED: "the answer ended inside a tool call",
    MALFORMED: "text that looked like a tool call could not be read and is content",
    ARGUMENTS_MALFORMED: "the arguments of a tool call are not a JSON object",
    UNKNOWN_TOOL: "a tool call names a function that the request does not have and is content",
}
"""Messages by reason."""


class Reasoning(NamedTuple):
    """Text of reasoning, which is not part of the content."""

    text: str


class CallBegin(NamedTuple):
    """A call whose name is known. `number` counts from 0; `call_id` is empty unless the model gave one."""

    number: int
    name: str
    call_id: str = ""


class CallArguments(NamedTuple):
    """The next piece of a call's arguments; the pieces joined are one JSON document if the answer is whole."""

    number: int
    text: str


class Warned(NamedTuple):
    """Something was wrong with what came before; `reason` is one of the words above. Nothing was dropped."""

    reason: str


Part = str | Reasoning | CallBegin | CallArguments | Warned
"""A `str` is content."""
