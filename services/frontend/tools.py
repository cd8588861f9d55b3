"""Tool calls in an answer's text, in the Hermes format:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

What looks like a call and does not parse is text again: nothing the model said is dropped but the blanks around calls.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import orjson

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """One whole call; `arguments` is a JSON document."""

    index: int
    name: str
    arguments: str


Part = str | ParsedCall


class HermesParser:
    """Splits a text that comes in pieces into content and calls. The parts do not depend on where the pieces end.

    Blanks are held back until it is known whether a call or text follows them.
    """

    __slots__ = ("_held", "_in_call", "calls")

    def __init__(self) -> None:
        self._held = ""
        self._in_call = False
        self.calls = 0

    def push(self, text: str) -> list[Part]:
        """The parts that are certain now. Neighbouring texts may come as several parts."""
        self._held += text
        return list(self._parts())

    def _parts(self) -> Iterator[Part]:
        while True:
            mark = CLOSE if self._in_call else OPEN
            before, found, after = self._held.partition(mark)
            if not found:
                break
            self._held = after
            if not self._in_call:
                if text := before.rstrip():
                    yield text
            else:
                yield self._call(before) or OPEN + before + CLOSE
            self._in_call = not self._in_call
        if not self._in_call and (text := self._certain()):
            yield text

    def _certain(self) -> str:
        """The content in `_held` that belongs to no mark and is not blanks before one, taken out."""
        held = self._held
        cut = len(held)
        for length in range(min(len(OPEN) - 1, len(held)), 0, -1):
            if held.endswith(OPEN[:length]):
                cut -= length
                break
        text = held[:cut].rstrip()
        self._held = held[len(text) :]
        return text

    def flush(self) -> list[Part]:
        """The rest. A call may lack its closing mark: models stop right after the JSON."""
        held, self._held = self._held, ""
        if self._in_call:
            self._in_call = False
            return [self._call(held) or OPEN + held]
        # Blanks after the last call say nothing; in an answer without calls they are its text.
        return [held] if held.strip() or (held and not self.calls) else []

    def _call(self, text: str) -> ParsedCall | None:
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            return None
        if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            document = arguments
        elif isinstance(arguments, dict):
            document = orjson.dumps(arguments).decode()
        else:
            return None
        self.calls += 1
        return ParsedCall(index=self.calls - 1, name=name, arguments=document)
