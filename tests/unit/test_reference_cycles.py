"""Work per request, load record or lost worker leaves no reference cycles, because services run the garbage collector rarely."""

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvmesh.clock import SystemClock, awake_timeout
from kvmesh.core import Role, WorkerRef
from kvmesh.errors import UnavailableError
from kvmesh.lifecycle.process import collect_young_objects
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.leg_link import GrpcLegLink, GrpcLegLinks
from kvmesh.rpc.settings import RpcSettings
from services.router.serving.silence_timeout import silence_timeout
from tests.patience import PATIENCE_S
from tests.servers import closed_port
from tests.worker_rig import wait_until

ROUNDS = 1000
"""Other objects of the process, such as those of gRPC's threads, leave fewer cycles meanwhile."""


@contextmanager
def without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def enter_awake_timeout() -> None:
    async with awake_timeout(60.0):
        await asyncio.sleep(0)


async def enter_silence_timeout() -> None:
    async with silence_timeout(60.0, reading_s=1.0):
        await asyncio.sleep(0)


@pytest.mark.parametrize("enter", [enter_awake_timeout, enter_silence_timeout], ids=lambda enter: enter.__name__)
async def test_a_timeout_leaves_no_cycle(enter: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Every request enters `awake_timeout`, and every load record of a worker enters `silence_timeout`."""
    with without_collections():
        for _ in range(ROUNDS):
            await enter()
        assert gc.collect() < ROUNDS


@pytest.mark.parametrize("enter", [awake_timeout, lambda limit_s: silence_timeout(limit_s, reading_s=limit_s)])
async def test_a_timeout_cancels_its_block(enter: Callable[[float], Any]) -> None:
    """An expired timeout raises TimeoutError and does not cancel the task after its block."""
    with pytest.raises(TimeoutError):
        async with enter(0.01):
            await asyncio.Event().wait()
    await asyncio.sleep(0)


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


async def test_cycles_of_libraries_are_collected() -> None:
    """`collect_young_objects` frees a cycle while automatic collection is off."""
    with without_collections():
        freed = weakref.ref(_Cycle())
        assert freed() is not None
        collecting = asyncio.create_task(collect_young_objects(0.0))
        while freed() is not None:
            await asyncio.sleep(0)
        collecting.cancel()


async def test_a_link_that_cannot_be_opened_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed links leave no objects, because frontends retry a lost worker repeatedly."""
    channels = ChannelPool(settings=RpcSettings())
    links = GrpcLegLinks(channels, frontend_id="f", clock=SystemClock())
    made: list[weakref.ref[GrpcLegLink]] = []
    init = GrpcLegLink.__init__

    def init_and_record(link: GrpcLegLink, *arguments: Any, **options: Any) -> None:
        made.append(weakref.ref(link))
        init(link, *arguments, **options)

    monkeypatch.setattr(GrpcLegLink, "__init__", init_and_record)
    with closed_port() as port, without_collections():
        for epoch in range(1, 6):
            worker = WorkerRef(worker_id="gone", address=f"127.0.0.1:{port}", epoch=epoch)
            with pytest.raises(UnavailableError):
                await links.link(worker, Role.DECODE, timeout_s=PATIENCE_S)
        await links.aclose()
        # gRPC's thread may still report the end of a call.
        await wait_until(lambda: not any(link() for link in made), "no link is left")
    assert made
    await channels.aclose()
