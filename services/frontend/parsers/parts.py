"""The parts into which a parser splits an answer. Tuples, since they are created for each token."""

from typing import NamedTuple

TRUNCATED = "tool_call_truncated"
"""The answer ended inside a call."""
MALFORMED = "tool_call_malformed"
"""A call could not be parsed to its end; the text from there on is content."""
ARGUMENTS_MALFORMED = "tool_arguments_malformed"
"""A call's arguments are complete but not a JSON object; they were delivered as the model wrote them."""
UNKNOWN_TOOL = "tool_unknown"
"""A call without a mark names a function that the request does not have; it is content."""

WARNINGS = {
    TRUNCATED: "the answer ended inside a tool call",
    MALFORMED: "text that looked like a tool call could not be read and is content",
    ARGUMENTS_MALFORMED: "the arguments of a tool call are not a JSON object",
    UNKNOWN_TOOL: "a tool call names a function that the request does not have and is content",
}
"""Messages for clients, by reason."""


class Reasoning(NamedTuple):
    """Text of reasoning, which is not part of the content."""

    text: str


class CallBegin(NamedTuple):
    """The beginning of a call. `number` counts from 0; `call_id` is empty unless the model wrote one."""

    number: int
    name: str
    call_id: str = ""


class CallArguments(NamedTuple):
    """The next piece of a call's arguments. The pieces joined are a JSON document unless there is a warning."""

    number: int
    text: str


class Warned(NamedTuple):
    """A problem with the text before it, which was delivered nevertheless. `reason`: a key of WARNINGS."""

    reason: str


Part = str | Reasoning | CallBegin | CallArguments | Warned
"""A `str` is content."""
