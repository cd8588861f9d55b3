"""The agent's state and the rules between its parts. No I/O; time and ids are arguments.

1. A key's lock is held by a live session or by none.
2. `advance(now)` leaves nothing due at `now`.
"""

from kvmesh.discovery.agent.catalog import Catalog
from kvmesh.discovery.agent.keys import ConsulSessions, Keys
from kvmesh.discovery.agent.records import Counter
from kvmesh.discovery.settings import AgentSettings
from kvmesh.errors import NotFoundError


class AgentState:
    """Services, keys and sessions, which share one index."""

    def __init__(self, settings: AgentSettings, *, first_index: int = 1) -> None:
        self._counter = Counter(first_index)
        self.catalog = Catalog(self._counter, services_max=settings.services_max)
        self.keys = Keys(self._counter, keys_max=settings.keys_max, bytes_max=settings.keys_bytes_max)
        self.sessions = ConsulSessions(self._counter, sessions_max=settings.sessions_max)

    @property
    def index(self) -> int:
        """The index of the last change of any kind."""
        return self._counter.value

    def acquire(self, key: str, session_id: str, value: bytes, *, now: float) -> bool:
        """Takes a lock. NotFoundError when the session is gone."""
        if self.sessions.get(session_id) is None:
            raise NotFoundError(f'invalid session "{session_id}"')
        return self.keys.acquire(key, session_id=session_id, value=value, now=now)

    def destroy_session(self, session_id: str, now: float) -> None:
        """Ends a session and releases its locks. Idempotent."""
        session = self.sessions.remove(session_id)
        if session is not None:
            self.keys.drop_session(session_id, lock_delay_s=session.definition.lock_delay_s, now=now)

    def advance(self, now: float) -> None:
        """Applies everything that is due by `now`."""
        self.catalog.advance(now)
        for session in self.sessions.overdue(now):
            self.destroy_session(session.session_id, now)
        self.keys.advance(now)

    def next_deadline(self) -> float | None:
        """When `advance` is due next; None: not until something changes."""
        times = (self.catalog.next_deadline(), self.sessions.next_deadline(), self.keys.next_deadline())
        return min((time for time in times if time is not None), default=None)
