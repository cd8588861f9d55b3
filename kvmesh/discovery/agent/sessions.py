"""Sessions, which expire unless renewed. No I/O; time and ids are arguments."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.discovery.agent.records import Counter
from kvmesh.errors import NotFoundError, OverloadedError


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionDefinition:
    """A session as requested. `ttl_s` None: it ends only when destroyed."""

    name: str
    ttl_s: float | None
    lock_delay_s: float


@dataclass(slots=True, kw_only=True)
class ConsulSession:
    """A session's state."""

    session_id: str
    definition: SessionDefinition
    expires_at: float | None
    create_index: int


class ConsulSessions:
    """All sessions by id, in the order of their creation. `index` is that of the last change."""

    def __init__(self, counter: Counter, *, sessions_max: int) -> None:
        self._counter = counter
        self._sessions_max = sessions_max
        self._sessions: dict[str, ConsulSession] = {}
        self.index = counter.value

    def __len__(self) -> int:
        return len(self._sessions)

    def create(self, session_id: str, definition: SessionDefinition, now: float) -> ConsulSession:
        if len(self._sessions) >= self._sessions_max:
            raise OverloadedError(f"the agent holds {self._sessions_max} sessions", reason="sessions_max")
        self.index = self._counter.advance()
        session = ConsulSession(session_id=session_id, definition=definition, expires_at=None, create_index=self.index)
        self._sessions[session_id] = session
        return self.renew(session_id, now)

    def renew(self, session_id: str, now: float) -> ConsulSession:
        """Restarts the session's TTL. NotFoundError when the session is gone."""
        session = self._sessions.get(session_id)
        if session is None:
            raise NotFoundError(f"Session id '{session_id}' not found")
        ttl_s = session.definition.ttl_s
        session.expires_at = None if ttl_s is None else now + ttl_s
        return session

    def remove(self, session_id: str) -> ConsulSession | None:
        """Ends a session. The caller releases its locks."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self.index = self._counter.advance()
        return session

    def get(self, session_id: str) -> ConsulSession | None:
        return self._sessions.get(session_id)

    def overdue(self, now: float) -> Sequence[ConsulSession]:
        """Expired sessions, the oldest first."""
        return [s for s in self._sessions.values() if s.expires_at is not None and s.expires_at <= now]

    def next_deadline(self) -> float | None:
        """When the next session expires."""
        times = (session.expires_at for session in self._sessions.values())
        return min((time for time in times if time is not None), default=None)
