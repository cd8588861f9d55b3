"""Features of the in-memory registry beyond the conformance suite: disconnected clients and virtual time."""

import asyncio
from contextlib import aclosing

import pytest

from kvmesh.discovery.base import Registration
from kvmesh.errors import UnavailableError
from kvmesh.simulation.registry import MemoryAgent
from tests.virtual_loop import run_virtual

MINE = Registration(service="svc", instance_id="svc-1", host="nowhere", port=1, ttl_s=6.0)


def test_a_disconnected_client() -> None:
    """The client's calls fail and its watch yields the last view once, as stale. Another client of the agent is unaffected."""

    async def scenario() -> None:
        agent = MemoryAgent()
        one, other = agent.registry(), agent.registry()
        await one.register(MINE)
        async with aclosing(one.watch("svc")) as views:
            assert len((await anext(views)).instances) == 1
            one.set_reachable(False)
            stale = await anext(views)
            assert (stale.is_stale, len(stale.instances)) == (True, 1)
            with pytest.raises(UnavailableError):
                await one.heartbeat("svc-1")
            await other.set_draining("svc-1", True)
            following = asyncio.ensure_future(anext(views))
            await asyncio.sleep(1.0)
            assert not following.done()
            one.set_reachable(True)
            fresh = await following
            assert not fresh.is_stale and fresh.instances[0].is_draining
        await agent.aclose()

    run_virtual(scenario())


def test_deadlines_use_the_agents_clock() -> None:
    """On virtual time, an instance without heartbeats is deregistered at its time without real waiting."""

    async def scenario() -> list[float]:
        agent = MemoryAgent(connect=lambda check: _UnansweredChannel())  # type: ignore[arg-type,return-value]
        await agent.start()
        registry = agent.registry()
        await registry.register(MINE)
        await registry.heartbeat("svc-1")
        times: list[float] = []
        async with aclosing(registry.watch("svc")) as views:
            async for view in views:
                times.append(asyncio.get_running_loop().time())
                if not view.instances:
                    break
        await agent.aclose()
        return times

    assert run_virtual(scenario())[-1] == pytest.approx(MINE.deregister_after_s, abs=1.0)


class _UnansweredChannel:
    """A channel whose calls never return."""

    async def __aenter__(self) -> "_UnansweredChannel":
        return self

    async def __aexit__(self, *error: object) -> None:
        return None

    def unary_unary(self, *arguments: object, **options: object) -> object:
        async def wait(*_: object, **__: object) -> None:
            await asyncio.Event().wait()

        return wait
