"""The pair of workers that each session's newest request went to. Pure; times are arguments."""

from collections import OrderedDict

from services.router.workers.worker import Target

SESSIONS_MAX = 65_536
"""Sessions that are remembered: all that are active within `session_s` at a hundred new ones a second, in some 25 MB."""
SessionPair = tuple[Target | None, Target]
"""Prefill and decode target."""


class Sessions:
    """Bounded in number and time. Beyond the number the session that is unused for the longest time is forgotten."""

    def __init__(self, *, session_s: float) -> None:
        self._pairs: OrderedDict[str, tuple[SessionPair, float]] = OrderedDict()
        self._session_s = session_s

    def __len__(self) -> int:
        return len(self._pairs)

    def bind(self, session_id: str, prefill: Target | None, decode: Target, *, now: float) -> None:
        self._pairs[session_id] = ((prefill, decode), now + self._session_s)
        self._pairs.move_to_end(session_id)
        if len(self._pairs) > SESSIONS_MAX:
            self._pairs.popitem(last=False)

    def get(self, session_id: str, now: float) -> SessionPair | None:
        """Returns the pair. None: the session is empty, unknown or too old."""
        known = self._pairs.get(session_id) if session_id else None
        if known is None:
            return None
        pair, ends_at = known
        if ends_at <= now:
            del self._pairs[session_id]
            return None
        return pair
