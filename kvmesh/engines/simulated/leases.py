"""Handed-out blocks until they are pulled, released or the lease ends. Leases are equally long, so they end in order."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmesh.engines.simulated.blocks import BlockPool


@dataclass(frozen=True, slots=True)
class Lease:
    """Blocks of one handle."""

    blocks: Sequence[int]
    ends_at_s: float


@dataclass(slots=True)
class Leases:
    """All leases of an engine over its pool."""

    pool: BlockPool
    _leases: dict[str, Lease] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, handle_id: str, blocks: Sequence[int], ends_at_s: float) -> None:
        """Takes over one reference on each block."""
        self.pool.lease(blocks)
        self._leases[handle_id] = Lease(blocks, ends_at_s)

    def end(self, handle_id: str) -> bool:
        """Frees a handle's blocks. False: there is no such lease."""
        lease = self._leases.pop(handle_id, None)
        if lease is None:
            return False
        self.pool.end_lease(lease.blocks)
        return True

    def blocks_of(self, handle_id: str) -> Sequence[int]:
        """A handle's blocks; none when there is no such lease."""
        lease = self._leases.get(handle_id)
        return lease.blocks if lease is not None else ()

    def expire(self, now_s: float) -> int:
        """Ends the leases that are over; how many."""
        over = 0
        while self._leases:
            handle_id, lease = next(iter(self._leases.items()))
            if lease.ends_at_s > now_s:
                break
            over += self.end(handle_id)
        return over

    def next_end_s(self) -> float | None:
        """When the next lease is over."""
        return next(iter(self._leases.values())).ends_at_s if self._leases else None
