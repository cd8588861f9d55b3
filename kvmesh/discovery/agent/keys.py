"""Keys with compare-and-set and locks, and sessions, which expire unless renewed. No I/O; time and ids are arguments."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvmesh.discovery.agent.records import Counter
from kvmesh.errors import NotFoundError, OverloadedError


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """One key. `lock_index` counts acquisitions of its lock; `session` is the present holder, empty when there is none."""

    key: str
    value: bytes
    lock_index: int = 0
    session: str = ""
    create_index: int
    modify_index: int


class Keys:
    """All keys, bounded in number and in total bytes. `index` is that of the last change."""

    def __init__(self, counter: Counter, *, keys_max: int, bytes_max: int) -> None:
        self._counter = counter
        self._keys_max = keys_max
        self._bytes_max = bytes_max
        self.held_bytes = 0
        self._records: dict[str, KeyRecord] = {}
        self._unlockable_until: dict[str, float] = {}
        self.index = counter.value

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: str) -> KeyRecord | None:
        return self._records.get(key)

    def under(self, prefix: str) -> Sequence[KeyRecord]:
        """Returns all records under a prefix, by key."""
        return sorted((r for k, r in self._records.items() if k.startswith(prefix)), key=lambda record: record.key)

    def put(self, key: str, value: bytes, *, expected_index: int | None = None) -> bool:
        """Sets a value; with `expected_index` only if the key's modify_index equals it (0: the key is absent)."""
        old = self._records.get(key)
        if expected_index is not None and expected_index != (old.modify_index if old else 0):
            return False
        self._store(key, value, session=old.session if old else "", lock_index=old.lock_index if old else 0)
        return True

    def delete(self, key: str) -> None:
        """Removes a key. Idempotent."""
        old = self._records.pop(key, None)
        if old is not None:
            self.index = self._counter.advance()
            self.held_bytes -= _size(key, old.value)

    def acquire(self, key: str, session_id: str, value: bytes, *, now: float) -> bool:
        """Takes a key's lock for a session. The holder may repeat it to set a new value."""
        old = self._records.get(key)
        holder = old.session if old else ""
        # The second part is the lock delay; without one it compares `now` with itself.
        if holder not in ("", session_id) or (not holder and now < self._unlockable_until.get(key, now)):
            return False
        lock_index = (old.lock_index if old else 0) + (0 if holder else 1)
        self._store(key, value, session=session_id, lock_index=lock_index)
        self._unlockable_until.pop(key, None)
        return True

    def release(self, key: str, session_id: str, value: bytes) -> bool:
        """Returns a lock and sets the value, as Consul does. False: the session does not hold it."""
        old = self._records.get(key)
        if old is None or not session_id or old.session != session_id:
            return False
        self._store(key, value, session="", lock_index=old.lock_index)
        return True

    def drop_session(self, session_id: str, *, lock_delay_s: float, now: float) -> None:
        """Releases the locks of an ended session. They cannot be acquired for `lock_delay_s`."""
        for record in [record for record in self._records.values() if record.session == session_id]:
            self.index = self._counter.advance()
            self._records[record.key] = replace(record, session="", modify_index=self.index)
            if lock_delay_s > 0:
                self._unlockable_until[record.key] = now + lock_delay_s

    def advance(self, now: float) -> None:
        """Removes lock delays that have passed."""
        self._unlockable_until = {key: until for key, until in self._unlockable_until.items() if until > now}

    def next_deadline(self) -> float | None:
        """When the first lock delay ends."""
        return min(self._unlockable_until.values(), default=None)

    def _store(self, key: str, value: bytes, *, session: str, lock_index: int) -> None:
        old = self._records.get(key)
        held = self.held_bytes + _size(key, value) - (_size(key, old.value) if old else 0)
        if (old is None and len(self._records) >= self._keys_max) or held > self._bytes_max:
            raise OverloadedError("the agent holds no more keys", reason="keys_max")
        self.held_bytes = held
        self.index = self._counter.advance()
        self._records[key] = KeyRecord(
            key=key,
            value=value,
            lock_index=lock_index,
            session=session,
            create_index=old.create_index if old else self.index,
            modify_index=self.index,
        )


def _size(key: str, value: bytes) -> int:
    return len(key) + len(value)


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
