"""Turns SIGTERM and SIGINT into events."""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence

from kvmesh.event_log import event_logger
from kvmesh.lifecycle.parts import Part
from kvmesh.lifecycle.runner import LifecycleSettings, run_parts

_log = event_logger(__name__)
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def stop_on_signals(stop: asyncio.Event, hurry: asyncio.Event) -> Iterator[None]:
    """Inside, the first signal sets `stop`, a second one `hurry`. For the main thread only."""

    def received(number: signal.Signals) -> None:
        _log.info("signal_received", signal=number.name, is_second=stop.is_set())
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, received, number)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def run_until_signalled(
    parts: Sequence[Part],
    *,
    on_ready: Callable[[], Awaitable[None]] | None = None,
    drain: Callable[[], Awaitable[None]] | None = None,
    settings: LifecycleSettings | None = None,
) -> None:
    """`run_parts` until SIGTERM or SIGINT. A second signal shortens the stop."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    with stop_on_signals(stop, hurry):
        await run_parts(parts, stop=stop, hurry=hurry, on_ready=on_ready, drain=drain, settings=settings)
