"""What happened in a run, line by line, and a hash of all of it."""

import hashlib
import struct
from collections.abc import Callable

_CROSSING = struct.Struct("<dd")


class Trace:
    """Lines of (time, event, ids), and the time of every crossing of the network.

    Two runs are equal when their hashes are: a message that takes another turn anywhere changes the hash.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._digest = hashlib.sha256()
        self.lines: list[str] = []
        self.crossings = 0

    def note(self, event: str, *ids: object) -> None:
        """Something happened now."""
        line = f"{self._now():.6f} #{self.crossings} {event} {' '.join(map(str, ids))}"
        self.lines.append(line)
        self._digest.update(line.encode())

    def crossed(self, latency_s: float) -> None:
        """A message left for the other side of a link."""
        self.crossings += 1
        self._digest.update(_CROSSING.pack(self._now(), latency_s))

    @property
    def hash(self) -> str:
        """Of everything so far."""
        return self._digest.hexdigest()
