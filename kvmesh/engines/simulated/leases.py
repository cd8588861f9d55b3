"""Leases on handed-out blocks. All are equally long, so they end in order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvmesh.engines.simulated.blocks import BlockPool


@dataclass(frozen=True, slots=True)
class Lease:
    """Blocks of one handle."""

    blocks: Sequence[int]
    ends_at_s: float


@dataclass(slots=True)
class Leases:
    """The leases of an engine's pool, by handle id."""

    pool: BlockPool
    _leases: dict[str, Lease] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._leases)

    def handle_ids(self) -> Sequence[str]:
        """Returns the handles whose blocks are leased, the oldest first."""
        return tuple(self._leases)

    def blocks(self) -> Iterator[Sequence[int]]:
        """Returns the blocks of each handle."""
        return (lease.blocks for lease in self._leases.values())

    def add(self, handle_id: str, blocks: Sequence[int], ends_at_s: float) -> None:
        """Takes over one reference on each block."""
        self.pool.lease(blocks)
        self._leases[handle_id] = Lease(blocks, ends_at_s)

    def end(self, handle_id: str) -> bool:
        """Drops a handle's reference on its blocks. False: there is no such lease."""
        lease = self._leases.pop(handle_id, None)
        if lease is None:
            return False
        self.pool.end_lease(lease.blocks)
        return True

    def expire(self, now_s: float) -> int:
        """Ends expired leases. Returns their number."""
        expired = 0
        while self._leases:
            handle_id, lease = next(iter(self._leases.items()))
            if lease.ends_at_s > now_s:
                break
            expired += self.end(handle_id)
        return expired

    def next_end_s(self) -> float | None:
        """When the next lease expires; None: there are no leases."""
        return next(iter(self._leases.values())).ends_at_s if self._leases else None
