"""A limit on the events per second of streams whose events are expensive: those with log-probabilities or token ids."""

from collections.abc import Iterator
from contextlib import contextmanager

GAP_S_MIN = 0.001
"""Shorter gaps are none: a timer costs more than it saves."""


class EventPace:
    """Divides the limit among the open streams: with more of them each has longer gaps, in which its tokens are collected.

    An event of one token costs several times what a further token in it does, most of it in the socket and the JSON around the
    token. Without a limit a few hundred streams take all of the event loop's time, and every other client waits.
    """

    def __init__(self, events_per_s_max: int) -> None:
        self._event_s = 1 / events_per_s_max
        self._open = 0

    @property
    def gap_s(self) -> float:
        """Least time between two events of one stream."""
        gap_s = self._open * self._event_s
        return gap_s if gap_s >= GAP_S_MIN else 0.0

    @contextmanager
    def opened(self) -> Iterator[None]:
        """While a stream is open."""
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
