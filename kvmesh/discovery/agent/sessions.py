"""Sessions: leases by time. No I/O; time and ids are arguments."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.discovery.agent.counter import Counter
from kvmesh.errors import NotFoundError, OverloadedError


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionDefinition:
    """What its maker asked for. `ttl_s` None: it ends only when destroyed."""

    name: str
    ttl_s: float | None
    lock_delay_s: float
    deletes_keys: bool


@dataclass(slots=True, kw_only=True)
class Session:
    """A session now."""

    session_id: str
    definition: SessionDefinition
    expires_at: float | None
    create_index: int


class Sessions:
    """All sessions, by id."""

    def __init__(self, counter: Counter, *, sessions_max: int) -> None:
        self._counter = counter
        self._sessions_max = sessions_max
        self._sessions: dict[str, Session] = {}
        self._index = counter.value

    @property
    def index(self) -> int:
        """The index of the last session made or ended."""
        return self._index

    def __len__(self) -> int:
        return len(self._sessions)

    def create(self, session_id: str, definition: SessionDefinition, now: float) -> Session:
        if len(self._sessions) >= self._sessions_max:
            raise OverloadedError(f"the agent holds {self._sessions_max} sessions", reason="sessions_max")
        self._index = self._counter.advance()
        session = Session(session_id=session_id, definition=definition, expires_at=None, create_index=self._index)
        self._sessions[session_id] = session
        return self.renew(session_id, now)

    def renew(self, session_id: str, now: float) -> Session:
        """Lets the session's time begin anew. NotFoundError when it is gone."""
        session = self._sessions.get(session_id)
        if session is None:
            raise NotFoundError(f"Session id '{session_id}' not found")
        ttl_s = session.definition.ttl_s
        session.expires_at = None if ttl_s is None else now + ttl_s
        return session

    def remove(self, session_id: str) -> Session | None:
        """Ends a session; its locks are the caller's to free."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._index = self._counter.advance()
        return session

    def get(self, session_id: str) -> Session | None:
        return self._sessions.get(session_id)

    def all(self) -> Sequence[Session]:
        """All sessions, oldest first."""
        return sorted(self._sessions.values(), key=lambda session: session.create_index)

    def overdue(self, now: float) -> Sequence[Session]:
        """The sessions whose time is up."""
        return [s for s in self.all() if s.expires_at is not None and s.expires_at <= now]

    def next_deadline(self) -> float | None:
        """When the next session's time is up."""
        times = (session.expires_at for session in self._sessions.values())
        return min((time for time in times if time is not None), default=None)
