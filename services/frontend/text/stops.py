"""Finds stop strings in text that comes in pieces.

The answer ends at the match that is complete first; of several, at the one that began first. The result does not depend on
where pieces end.
"""

from collections.abc import Sequence


class StopFinder:
    """Passes text on up to a stop string, or up to its end with `includes_stop`. Holds back only a possible start of one."""

    __slots__ = ("_held", "_includes_stop", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, includes_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._includes_stop = includes_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Returns the text that can be passed on now. After a match it is empty and `matched` is the stop string."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            # By the end first, then by the start.
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._includes_stop else start]
        cut = len(text) - max((_overlap(text, stop=stop) for stop in self._stops), default=0)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Returns the text held back, after an answer that ended without a match."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0
