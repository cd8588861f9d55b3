"""How long to wait after failures in a row."""

from collections.abc import Callable


class Backoff:
    """Doubles from `first_s` to `max_s`; each delay is cut by up to half at random, so that clients come back apart."""

    def __init__(self, *, first_s: float, max_s: float, random: Callable[[], float]) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._random = random
        self._ceiling_s = first_s

    def next_s(self) -> float:
        """The delay after one more failure."""
        delay_s = min(self._ceiling_s, self._max_s) * (1.0 - 0.5 * self._random())
        self._ceiling_s = min(self._ceiling_s * 2.0, self._max_s)
        return delay_s

    def reset(self) -> None:
        """To be called after a success."""
        self._ceiling_s = self._first_s
