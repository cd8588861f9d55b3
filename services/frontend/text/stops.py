"""Stop strings in text that comes in pieces.

The answer ends with the match that is complete first; of several that are, with the one that began first. Neither depends
on where the pieces' borders are.
"""

from collections.abc import Sequence


class StopFinder:
    """Lets text through up to a stop string, or up to its end with `includes_stop`, and holds back only what could still become one."""

    __slots__ = ("_held", "_includes_stop", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, includes_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._includes_stop = includes_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """What can be shown now. After a match nothing more comes and `matched` is the stop string."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._includes_stop else start]
        cut = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """What was held back, once the answer ended without a match."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without being all of it."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0
