"""Leader election: one leader at a time, growing fencing tokens, and no leader without the registry."""

import asyncio

import pytest

from kvmesh.core.planning import Fence
from kvmesh.discovery.leader import LeaderElection, read_leader
from kvmesh.errors import UnsupportedError
from kvmesh.simulation.registry import MemoryAgent
from services.simulation.world import VirtualClock
from tests.virtual_loop import run_virtual

KEY = "kvmesh/planner/leader"
TTL_S = 10.0


def member(agent: MemoryAgent, name: str, clock: VirtualClock) -> tuple[LeaderElection, "asyncio.Task[None]", object]:
    registry = agent.registry()
    election = LeaderElection(registry, KEY, member_id=name, clock=clock, ttl_s=TTL_S)
    return election, asyncio.create_task(election.run()), registry


async def ended(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.wait([task])


def test_a_leader_that_leaves_is_replaced_immediately() -> None:
    """There are never two leaders. The new leader's token is larger, and both members know the leader."""

    async def play() -> None:
        clock = VirtualClock()
        agent = MemoryAgent(clock=clock)
        await agent.start()
        first, first_task, _ = member(agent, "a", clock)
        await clock.sleep(1)
        second, second_task, _ = member(agent, "b", clock)
        await clock.sleep(30)
        assert (first.is_leader, second.is_leader, second.leader_id) == (True, False, "a")
        token = first.fencing_token
        await ended(first_task)
        await first.aclose()
        assert not first.is_leader and not first.fencing_token
        await clock.sleep(TTL_S / 2)
        assert second.is_leader and second.fencing_token > token
        await ended(second_task)
        await second.aclose()
        await agent.aclose()

    run_virtual(play())


def test_a_stopped_leader_loses_the_lead_before_another_member_gets_it() -> None:
    """The stopped leader's own clock ends its lead, without the registry. The fence refuses its earlier token."""

    async def play() -> None:
        clock = VirtualClock()
        agent = MemoryAgent(clock=clock)
        await agent.start()
        first, first_task, _ = member(agent, "a", clock)
        await clock.sleep(1)
        second, second_task, _ = member(agent, "b", clock)
        await clock.sleep(5)
        token = first.fencing_token
        assert token
        # Nothing of a stopped process runs.
        await ended(first_task)
        while not second.is_leader:
            assert clock.now() < 60
            await clock.sleep(0.1)
        assert not first.fencing_token and second.fencing_token > token
        fence = Fence()
        fence.check(token)
        fence.check(second.fencing_token)
        with pytest.raises(UnsupportedError) as refusal:
            fence.check(token)
        assert (refusal.value.reason, refusal.value.field) == ("not_leader", "fencing_token")
        await ended(second_task)
        await agent.aclose()

    run_virtual(play())


def test_tokens_grow_if_the_registry_loses_its_state_and_a_clock_is_behind() -> None:
    """The registry loses the token, and the clock of the next leader is a day behind. The next leader has seen the earlier token."""

    async def play() -> None:
        clock, slow = VirtualClock(), VirtualClock()
        slow.skew_s = -86_400.0
        agent = MemoryAgent(clock=clock)
        await agent.start()
        first, first_task, _ = member(agent, "a", clock)
        await clock.sleep(1)
        second, second_task, _ = member(agent, "b", slow)
        await clock.sleep(5)
        token = first.fencing_token
        await ended(first_task)
        agent.lose_state()
        while not second.is_leader:
            assert clock.now() < 60
            await clock.sleep(0.1)
        assert second.fencing_token > token > 0
        await ended(second_task)
        await agent.aclose()

    run_virtual(play())


def test_no_member_leads_without_the_registry() -> None:
    """The lead ends after the TTL of the session. The member leads again when the registry is reachable."""

    async def play() -> None:
        clock = VirtualClock()
        agent = MemoryAgent(clock=clock)
        await agent.start()
        election, task, registry = member(agent, "a", clock)
        await clock.sleep(5)
        token = election.fencing_token
        assert election.is_leader
        registry.set_reachable(False)  # type: ignore[attr-defined]
        await clock.sleep(TTL_S + 1)
        assert not election.is_leader
        registry.set_reachable(True)  # type: ignore[attr-defined]
        await clock.sleep(3 * TTL_S)
        assert election.is_leader and election.fencing_token > token
        await ended(task)
        await agent.aclose()

    run_virtual(play())


def test_an_invalid_value_names_no_leader() -> None:
    """An invalid value, which another program could write to the key, is parsed as no leader."""
    for value in (b"", b"[]", b'{"id": 1}', b"\xff"):
        assert (read_leader(value).member_id, read_leader(value).token) == ("", 0)
