"""Leases on handed-out KV, with their expiry. Has no clock."""

from dataclasses import dataclass, field
from heapq import heappop, heappush


@dataclass(slots=True, kw_only=True)
class LeaseTable:
    """Handles by id with their expiry.

    1. A handle is in the table from `add` until `remove` or `collect_expired`.
    2. `collect_expired` returns each handle at most once.

    Memory is proportional to the leases of the last lease time. A lease may name the leg that made the handle.
    """

    _expiry_s: dict[str, float] = field(default_factory=dict)
    _queue: list[tuple[float, str]] = field(default_factory=list)
    _leg_ids: dict[str, str] = field(default_factory=dict)
    _handle_ids: dict[str, str] = field(default_factory=dict)
    """By leg."""

    def add(self, handle_id: str, expires_at_s: float, *, leg_id: str = "") -> None:
        self._expiry_s[handle_id] = expires_at_s
        if leg_id:
            self._leg_ids[handle_id], self._handle_ids[leg_id] = leg_id, handle_id
        heappush(self._queue, (expires_at_s, handle_id))

    def remove(self, handle_id: str) -> bool:
        """Ends a lease early. False: there is no such lease."""
        self._forget_leg(handle_id)
        return self._expiry_s.pop(handle_id, None) is not None

    def handle_of(self, leg_id: str) -> str | None:
        """Returns the handle that a leg made, while its lease lasts."""
        return self._handle_ids.get(leg_id)

    def _forget_leg(self, handle_id: str) -> None:
        leg_id = self._leg_ids.pop(handle_id, "")
        if leg_id and self._handle_ids.get(leg_id) == handle_id:
            del self._handle_ids[leg_id]

    def expires_at_s(self, handle_id: str) -> float | None:
        """Returns the end of a lease; None: there is no such lease."""
        return self._expiry_s.get(handle_id)

    def collect_expired(self, now_s: float) -> list[str]:
        """Removes expired leases and returns their handles."""
        expired: list[str] = []
        while self._queue and self._queue[0][0] <= now_s:
            expires_at_s, handle_id = heappop(self._queue)
            # A lease that was removed early leaves its entry in the queue.
            if self._expiry_s.get(handle_id) == expires_at_s:
                self._forget_leg(handle_id)
                del self._expiry_s[handle_id]
                expired.append(handle_id)
        return expired

    def __len__(self) -> int:
        return len(self._expiry_s)

    def handle_ids(self) -> list[str]:
        return list(self._expiry_s)
