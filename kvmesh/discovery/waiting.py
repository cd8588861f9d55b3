"""Waiting for time or for an event, whichever comes first, on an injected clock."""

import asyncio

from kvmesh.clock import Clock


async def sleep_unless(clock: Clock, delay_s: float, event: asyncio.Event) -> bool:
    """Sleeps `delay_s`, less when `event` gets set; True when it is set. Leaves no task behind when cancelled."""
    if event.is_set():
        return True
    sleeper = asyncio.ensure_future(clock.sleep(delay_s))
    waiter = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((sleeper, waiter), return_when=asyncio.FIRST_COMPLETED)
    finally:
        sleeper.cancel()
        waiter.cancel()
    return event.is_set()
