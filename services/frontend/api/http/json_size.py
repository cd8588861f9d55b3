"""Bounds what a JSON body costs before it is parsed. Pure.

A parser holds the interpreter's lock for as long as it runs, also in a thread. 8 MB of `[]` are 2.6 million lists, which take it
about a second; 8 MB of text take 16 ms. So the values are counted first, in slices, and a body with too many is not parsed.
"""

from collections.abc import Iterator

SLICE_BYTES = 65_536
"""About 0.5 ms of text, 2 ms of the worst input."""
_UNCHECKED_BYTES = 16_384
_DROPPED = bytes(each for each in range(256) if each not in b'"[{,')


def may_exceed(body: bytes, *, containers_max: int, values_max: int) -> bool:
    """Returns whether the body may have more arrays and objects, or more values, than allowed. Counts text in strings too."""
    if len(body) <= _UNCHECKED_BYTES:
        return False
    return body.count(b"[") + body.count(b"{") > containers_max or body.count(b",") >= values_max


class JsonCounter:
    """Counts arrays and objects (`containers`) and the commas between values, outside of strings. Of invalid JSON the counts mean nothing."""

    def __init__(self) -> None:
        self.containers = 0
        self.commas = 0
        self._is_in_string = False

    def count(self, body: bytes) -> Iterator[None]:
        """Counts the body, one slice per item, so that the caller can do other work between them."""
        start = 0
        while start < len(body):
            end = start + SLICE_BYTES
            piece = body[start:end]
            if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
                # An escape sequence is not cut in two.
                piece = body[start : end + 1]
            start += len(piece)
            self._count_slice(piece)
            yield

    def _count_slice(self, piece: bytes) -> None:
        plain = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = plain.translate(None, _DROPPED).split(b'"')
        outside = b"".join(parts[self._is_in_string :: 2])
        commas = outside.count(b",")
        self.commas += commas
        self.containers += len(outside) - commas
        self._is_in_string ^= len(parts) % 2 == 0
