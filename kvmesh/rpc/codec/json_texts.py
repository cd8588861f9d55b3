"""JSON documents that are texts inside of requests, such as the arguments of earlier tool calls.

To a parser of the request they are texts, whose brackets do not count. A parser holds the interpreter's lock for as long as it runs: 8 MB of
`[]` are 2.6 million lists, which take it about a second. So the arrays and objects are counted before a text is parsed.
"""

from typing import Any

import orjson

from kvmesh.errors import InvalidRequestError

CONTAINERS_MAX = 50_000
"""Arrays and objects in the texts of one request together; parsing this many takes about 25 ms."""
VALUES_MAX = 200_000
"""Other values in them, which take as long."""
NESTING_MAX = 200
"""Arrays and objects inside each other. orjson reads 1 024 and writes 254, and parts of a request are written again."""
SLICE_BYTES = 65_536
"""About 0.5 ms of text, 2 ms of the worst input."""
_DROPPED = bytes(each for each in range(256) if each not in b'"[{,')


class JsonCounter:
    """Counts arrays and objects (`containers`) and the commas between values, outside of strings. Of invalid JSON the counts mean nothing."""

    containers = commas = 0
    _is_in_string = False
    _rest = b""

    def feed(self, data: bytes) -> None:
        """Counts the next part of the body."""
        data = self._rest + data
        # An escape sequence is not cut in two.
        cut = (len(data) - len(data.rstrip(b"\\"))) % 2
        self._rest = data[len(data) - cut :]
        # Escaped backslashes first: a backslash that remains before a quote escapes it.
        plain = data[: len(data) - cut].replace(b"\\\\", b"").replace(b'\\"', b"")
        # Without escapes every quote begins or ends a string, so every other part is outside of strings.
        parts = plain.translate(None, _DROPPED).split(b'"')
        outside = b"".join(parts[self._is_in_string :: 2])
        commas = outside.count(b",")
        self.commas += commas
        self.containers += len(outside) - commas
        # An even number of parts: an odd number of quotes.
        self._is_in_string ^= len(parts) % 2 == 0


class JsonTexts:
    """Parses the JSON texts of one request."""

    _containers = _commas = 0

    def object_in(self, text: str) -> dict[str, Any] | None:
        """Returns the object; None if the text contains anything else. Raises InvalidRequestError for too many values."""
        brackets = self._count(text)
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            return None
        is_object = isinstance(value, dict) and (brackets <= NESTING_MAX or not is_nested_too_deeply(value))
        return value if is_object else None

    def _count(self, text: str) -> int:
        """Returns the number of arrays and objects, or more."""
        # Brackets and commas in strings are counted too, so most texts need nothing more.
        brackets, commas = text.count("[") + text.count("{"), text.count(",")
        if self._containers + brackets > CONTAINERS_MAX or self._commas + commas > VALUES_MAX:
            brackets, commas = self._count_exactly(text)
        self._containers += brackets
        self._commas += commas
        return brackets

    def _count_exactly(self, text: str) -> tuple[int, int]:
        data, counter = text.encode("utf-8", "replace"), JsonCounter()
        for start in range(0, len(data), SLICE_BYTES):
            counter.feed(data[start : start + SLICE_BYTES])
            for count, most, what in (
                (self._containers + counter.containers, CONTAINERS_MAX, "arrays and objects"),
                (self._commas + counter.commas, VALUES_MAX, "values"),
            ):
                if count > most:
                    message = f"the JSON texts in the request have more than {most} {what}"
                    raise InvalidRequestError(message, reason="too_many_values")
        return counter.containers, counter.commas


def is_nested_too_deeply(value: dict[str, Any]) -> bool:
    level: list[Any] = [value]
    for _ in range(NESTING_MAX):
        parts = (each.values() if isinstance(each, dict) else each for each in level)
        level = [part for each in parts for part in each if isinstance(part, dict | list)]
        if not level:
            return False
    return True
