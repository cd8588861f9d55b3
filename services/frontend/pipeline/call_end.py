"""Ends a forced answer at its last call.

Grammars allow white space between any two tokens of JSON. A model that has finished its call may generate nothing but white
space up to `max_tokens`.
"""

from services.frontend.pipeline.request import Conversation, Request, ToolMode
from services.frontend.text.stops import StopFinder

BLANKS_MAX = 64
"""Blanks in a row between two calls; no layout needs more."""


class CallEnd:
    """Ends a forced answer at white space after a complete call. Has the interface of a StopFinder.

    If no other call may follow, the first blank ends the answer, else more than `BLANKS_MAX` do. `matched` is then empty,
    since no stop string was found. `stops` processes the text first. An answer that does not begin with a bracket is not
    ended.
    """

    __slots__ = ("_blanks", "_blanks_max", "_depth", "_is_complete", "_is_escaped", "_is_off", "_is_string", "_level",
                 "_stops", "matched")  # fmt: skip

    def __init__(self, stops: StopFinder | None, *, is_list: bool, takes_more: bool) -> None:
        self._stops = stops
        self._level = 1 if is_list else 0
        """Number of brackets that are open around a call."""
        self._blanks_max = BLANKS_MAX if takes_more else 0
        self._depth = self._blanks = 0
        self._is_string = self._is_escaped = self._is_complete = self._is_off = False
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Returns the text that can be passed on now; nothing after the end, where `matched` is not None."""
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
        """Returns the text held back, after an answer that ended without a match."""
        return self._stops.flush() if self._stops is not None else ""

    def _ends_with(self, character: str) -> bool:
        """Reads one character. Returns True if it is a blank that ends the answer."""
        if self._is_string:
            self._is_string = self._is_escaped or character != '"'
            self._is_escaped = character == "\\" and not self._is_escaped
            return False
        if character.isspace():
            self._blanks += 1
            # Nothing may follow the bracket that closes the list.
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


def make_stop_finder(request: Request) -> CallEnd | StopFinder | None:
    """Returns the finder of the answer's end; None without stop strings and forced calls.

    With `min_tokens` the client wants a forced answer to continue after its call.
    """
    stops = None
    if request.sampling.stop:
        stops = StopFinder(request.sampling.stop, includes_stop=request.includes_stop)
    prompt = request.prompt
    if not isinstance(prompt, Conversation) or not prompt.tools or request.sampling.min_tokens:
        return stops
    choice = prompt.tool_choice
    if not choice.is_forced:
        return stops
    is_list = choice.mode is ToolMode.REQUIRED
    return CallEnd(stops, is_list=is_list, takes_more=is_list and choice.is_parallel)
