"""The rooms of a prefill engine: which leg waits where, and who waits for a leg that has not come yet."""

import asyncio

from kvmesh.engines.simulated.leg_state import SimulatedLeg


class Rooms:
    """A room belongs to one leg and lets one counterpart in, once."""

    def __init__(self) -> None:
        self._legs: dict[int, SimulatedLeg] = {}
        self._awaited: dict[int, asyncio.Future[SimulatedLeg]] = {}

    def enter(self, room: int, leg: SimulatedLeg) -> None:
        """Gives the leg to the counterpart that waits for it, or keeps it until one comes."""
        waiting = self._awaited.get(room)
        if waiting is not None and not waiting.done():
            waiting.set_result(leg)
        else:
            self._legs[room] = leg

    def leave(self, room: int, leg: SimulatedLeg) -> None:
        if self._legs.get(room) is leg:
            del self._legs[room]

    async def wait(self, room: int) -> SimulatedLeg:
        """The leg of the room. Waits until it comes."""
        if (leg := self._legs.pop(room, None)) is not None:
            return leg
        future: asyncio.Future[SimulatedLeg] = asyncio.get_running_loop().create_future()
        self._awaited[room] = future
        try:
            return await future
        finally:
            if self._awaited.get(room) is future:
                del self._awaited[room]
