"""The waiting queue: by priority, then by arrival, with removal."""

from heapq import heapify, heappop, heappush

from kvmesh.engines.simulated.leg_state import LegState, Phase

SLACK = 64


class WaitingQueue:
    """Legs in phase WAITING. Legs that left the phase are skipped; the caller reports them with `discount`."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], LegState]] = []
        self._live = 0
        self.prompt_tokens = 0

    def __len__(self) -> int:
        return self._live

    def push(self, leg: LegState) -> None:
        heappush(self._heap, (leg.rank, leg))
        self._live += 1
        self.prompt_tokens += len(leg.tokens)

    def peek(self) -> LegState | None:
        """The leg whose turn it is."""
        while self._heap:
            leg = self._heap[0][1]
            if leg.phase is Phase.WAITING:
                return leg
            heappop(self._heap)
        return None

    def pop(self) -> None:
        """Removes the leg that `peek` gave."""
        self.discount(heappop(self._heap)[1])

    def discount(self, leg: LegState) -> None:
        """Subtracts a leg that leaves the queue or was cancelled in it."""
        self._live -= 1
        self.prompt_tokens -= len(leg.tokens)
        if len(self._heap) > 2 * self._live + SLACK:
            self._heap = [entry for entry in self._heap if entry[1].phase is Phase.WAITING]
            heapify(self._heap)
