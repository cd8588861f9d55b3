"""Bounds what a JSON body costs before it is parsed, while it arrives.

A parser holds the interpreter's lock for as long as it runs, also in a thread. 8 MB of `[]` are 2.6 million lists, which take it
about a second; 8 MB of text take 16 ms. So the values are counted first, in slices, and a body with too many is neither read to its end
nor parsed.
"""

import asyncio

from kvmesh.errors import InvalidRequestError
from kvmesh.rpc.codec.json_texts import SLICE_BYTES, JsonCounter


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
