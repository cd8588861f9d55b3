"""Moves an engine between the prefill and the decode pool: its legs end first, since an SGLang scheduler has one role at a time."""

import asyncio
from collections.abc import Awaitable, Callable, Collection

from kvmesh.core import Role
from kvmesh.engines.sglang.messages import CallResult
from kvmesh.errors import UnavailableError

SWITCH_TIMEOUT_S = 20.0
"""Longest wait for the scheduler, whose transfers and their releases may outlive the legs. Longer than it waits for an aborted transfer."""
SWITCH_RETRY_S = 0.05
ANSWER_TIMEOUT_S = 60.0
"""Longest wait for one answer. The first switch makes a NIXL agent and registers the KV memory."""
LEGS_TIMEOUT_S = 10.0
"""From the cancel of the last legs to their ends."""


class LegCount:
    """Whether an engine has legs."""

    def __init__(self) -> None:
        self._are_gone = asyncio.Event()
        self._are_gone.set()

    def update(self, legs: Collection[int]) -> None:
        if legs:
            self._are_gone.clear()
        else:
            self._are_gone.set()

    async def wait_gone(self, timeout_s: float) -> bool:
        """Returns False if some are left after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._are_gone.wait()
        except TimeoutError:
            return False
        return True


async def end_legs(legs: LegCount, wait_s: float, move: Callable[[], None]) -> None:
    """Waits for the legs, then ends the rest by `move`. UnavailableError if the engine does not end them."""
    if await legs.wait_gone(wait_s):
        return
    move()
    if not await legs.wait_gone(LEGS_TIMEOUT_S):
        raise UnavailableError("the engine did not end its requests in time", reason="role_busy")


async def switch(call: Callable[[str, str], Awaitable[CallResult]], role: Role) -> None:
    """Asks the scheduler until it is idle.

    UnavailableError if it is not idle in time: its role has not changed. TimeoutError if it does not answer: its role is unknown.
    """
    last_s = asyncio.get_running_loop().time() + SWITCH_TIMEOUT_S
    while True:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            answer = await call("set_role", role.value)
        if answer.is_done:
            return
        if asyncio.get_running_loop().time() > last_s:
            raise UnavailableError(f"the engine cannot change its role: {answer.problem}", reason="role_busy")
        await asyncio.sleep(SWITCH_RETRY_S)
