"""Where the sessions' newest requests went: a preference, no promise. Pure."""

from collections import OrderedDict

from services.router.workers.target import Target

Pair = tuple[Target | None, Target]


class Sessions:
    """Bounded in number and in time; the one unused longest goes first."""

    def __init__(self, *, sessions_max: int, session_s: float) -> None:
        self._pairs: OrderedDict[str, tuple[Pair, float]] = OrderedDict()
        self._sessions_max = sessions_max
        self._session_s = session_s

    def __len__(self) -> int:
        return len(self._pairs)

    def bind(self, session_id: str, prefill: Target | None, decode: Target, now: float) -> None:
        """The session's newest request goes there."""
        self._pairs[session_id] = ((prefill, decode), now + self._session_s)
        self._pairs.move_to_end(session_id)
        if len(self._pairs) > self._sessions_max:
            self._pairs.popitem(last=False)

    def get(self, session_id: str, now: float) -> Pair | None:
        """Where it went last; None: not known, or too long ago."""
        known = self._pairs.get(session_id)
        if known is None:
            return None
        pair, ends_at = known
        if ends_at <= now:
            del self._pairs[session_id]
            return None
        return pair
