"""Where a forced answer is over although the model goes on.

Grammars allow blanks between any two tokens of JSON, and a model that is done with its call may write nothing else up to
`max_tokens`.
"""

from services.frontend.pipeline.request import Conversation, Request, ToolMode
from services.frontend.text.stops import StopFinder

BLANKS_MAX = 64
"""Blanks in a row between two calls; no layout needs more."""


class CallEnd:
    """Ends a forced answer at the blanks behind a complete call, with the interface of a StopFinder.

    Where no other call may follow, the first blank ends the answer; else more than `BLANKS_MAX` do. `matched` is empty then:
    no stop string was found. `stops` sees the text first. An answer that does not begin with its bracket is left alone.
    """

    __slots__ = ("_blanks", "_blanks_max", "_depth", "_is_complete", "_is_escaped", "_is_off", "_is_string", "_level",
                 "_stops", "matched")  # fmt: skip

    def __init__(self, stops: StopFinder | None, *, is_list: bool, takes_more: bool) -> None:
        self._stops = stops
        self._level = 1 if is_list else 0
        """How many brackets are open around a call."""
        self._blanks_max = BLANKS_MAX if takes_more else 0
        self._depth = self._blanks = 0
        self._is_string = self._is_escaped = self._is_complete = self._is_off = False
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """What can be shown now. After the end nothing more comes and `matched` is not None."""
        if self.matched is not None:
            return ""
        if self._stops is not None:
            text, self.matched = self._stops.push(text), self._stops.matched
        for i, character in enumerate(text):
            if self._is_off:
                break
            if self._ends_with(character):
                self.matched = ""
                return text[:i]
        return text

    def flush(self) -> str:
        """What was held back, once the answer ended without a match."""
        return self._stops.flush() if self._stops is not None else ""

    def _ends_with(self, character: str) -> bool:
        """Reads one character. True when it is a blank that ends the answer."""
        if self._is_string:
            self._is_string = self._is_escaped or character != '"'
            self._is_escaped = character == "\\" and not self._is_escaped
            return False
        if character.isspace():
            self._blanks += 1
            # Behind the list's own bracket nothing may follow.
            return self._is_complete and self._blanks > (self._blanks_max if self._depth else 0)
        self._blanks = 0
        if character in "{[":
            self._depth += 1
        elif not self._depth:
            self._is_off = True
        elif character in "}]":
            self._depth -= 1
            self._is_complete = self._depth <= self._level
        elif character == ",":
            self._is_complete = False
        elif character == '"':
            self._is_string = True
        return False


def call_end(request: Request, stops: StopFinder | None) -> CallEnd | StopFinder | None:
    """What ends an answer to this request; `stops` where no call is forced. With `min_tokens` the client asks for blanks."""
    prompt = request.prompt
    if not isinstance(prompt, Conversation) or not prompt.tools or request.sampling.min_tokens:
        return stops
    choice = prompt.tool_choice
    if not choice.is_forced:
        return stops
    is_list = choice.mode is ToolMode.REQUIRED
    return CallEnd(stops, is_list=is_list, takes_more=is_list and choice.is_parallel)
