"""Bounds what a JSON body costs before it is parsed, while it arrives.

A parser holds the interpreter's lock for as long as it runs, also in a thread. 8 MB of `[]` are 2.6 million lists, which take it
about a second; 8 MB of text take 16 ms. So the values are counted first, in slices, and a body with too many is neither read to its end
nor parsed.
"""

import asyncio

from kvmesh.errors import InvalidRequestError

SLICE_BYTES = 65_536
"""About 0.5 ms of text, 2 ms of the worst input."""
_DROPPED = bytes(each for each in range(256) if each not in b'"[{,')


class JsonCounter:
    """Counts arrays and objects (`containers`) and the commas between values, outside of strings. Of invalid JSON the counts mean nothing."""

    def __init__(self) -> None:
        self.containers = 0
        self.commas = 0
        self._is_in_string = False
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Counts the next part of the body."""
        data = self._rest + data
        # An escape sequence is not cut in two.
        cut = (len(data) - len(data.rstrip(b"\\"))) % 2
        self._rest = data[len(data) - cut :]
        plain = data[: len(data) - cut].replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = plain.translate(None, _DROPPED).split(b'"')
        outside = b"".join(parts[self._is_in_string :: 2])
        commas = outside.count(b",")
        self.commas += commas
        self.containers += len(outside) - commas
        self._is_in_string ^= len(parts) % 2 == 0


class JsonLimits:
    """Checks one body while it arrives."""

    def __init__(self, *, containers_max: int, values_max: int) -> None:
        self._containers_max = containers_max
        self._values_max = values_max
        self._counter = JsonCounter()
        self._seen = 0
        self._counted = 0
        self._brackets = 0
        self._commas = 0

    async def check(self, body: bytes | bytearray) -> None:
        """Raises InvalidRequestError if what has arrived has too many values. `body`: all of it. Yields to the loop between slices."""
        start, self._seen = self._seen, len(body)
        # Brackets and commas in texts are counted too, so most bodies need nothing more.
        self._brackets += body.count(b"[", start) + body.count(b"{", start)
        self._commas += body.count(b",", start)
        if self._brackets <= self._containers_max and self._commas < self._values_max:
            return
        while self._counted < self._seen:
            end = min(self._seen, self._counted + SLICE_BYTES)
            self._counter.feed(bytes(body[self._counted : end]))
            self._counted = end
            self._raise_if_too_many()
            await asyncio.sleep(0)

    def _raise_if_too_many(self) -> None:
        for count, most, what in (
            (self._counter.containers, self._containers_max, "arrays and objects"),
            (self._counter.commas + 1, self._values_max, "values"),
        ):
            if count > most:
                raise InvalidRequestError(f"the body has more than {most} {what}", reason="too_many_values")
