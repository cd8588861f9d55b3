"""Several data-parallel ranks behind one worker: each rank has its own cache, queue and load, behind one engine protocol."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from kvmesh.clock import SystemClock
from kvmesh.core import FinishReason, Generation, KvEvent, KvStored, LegTask, Rendezvous, Role
from kvmesh.engines.ranked import RankedEngine
from kvmesh.engines.simulated.settings import SimulatedSettings, StepProfile
from kvmesh.errors import InvalidRequestError, LostError, UnsupportedError
from kvmesh.kv.blocks import block_hashes
from kvmesh.kv.paths import KvPaths
from kvmesh.simulation.faulty_engine import Die, FaultyEngine
from kvmesh.simulation.kv_transport import MemoryKvNetwork, MemoryTransport
from kvmesh.simulation.rendezvous import MemoryRendezvousNetwork, MemoryWire
from tests.conformance.engine_driver import EngineDriver, greedy
from tests.patience import PATIENCE_S

SETTINGS = SimulatedSettings(
    profile=StepProfile(base_s=0.001),
    kv_blocks=256,
    context_tokens_max=2048,
    pull_timeout_s=PATIENCE_S,
    lease_s=2 * PATIENCE_S,
)
PROMPT = list(range(40, 105))
RANKS = 2
_HOSTS = count()
Start = Callable[..., Awaitable[EngineDriver]]


class RankDriver(EngineDriver):
    """A driver that also records the cached blocks of each rank."""

    def __init__(self, engine: RankedEngine) -> None:
        super().__init__(engine, PATIENCE_S)
        self.cached_by_rank: list[set[int]] = [set() for _ in range(RANKS)]

    def _on_event(self, event: KvEvent) -> None:
        if isinstance(event, KvStored):
            self.cached_by_rank[event.data_parallel_rank].update(event.block_hashes)

    async def wait_cached_on(self, rank: int, hashes: list[int]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not self.cached_by_rank[rank].issuperset(hashes):
                await asyncio.sleep(0.005)


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    network, rooms = MemoryKvNetwork(clock=SystemClock()), MemoryRendezvousNetwork()
    async with AsyncExitStack() as stack:

        async def make(**changes: Any) -> EngineDriver:
            settings = replace(SETTINGS, **changes)
            paths = KvPaths(pull_timeout_s=settings.pull_timeout_s)
            is_rendezvous = settings.handoff == "rendezvous"
            engines = [
                FaultyEngine(
                    replace(settings, data_parallel_rank=rank),
                    SystemClock(),
                    MemoryTransport(network),
                    wire=MemoryWire(rooms, f"host-{next(_HOSTS)}") if is_rendezvous else None,
                    paths=paths,
                )
                for rank in range(RANKS)
            ]
            driver = RankDriver(RankedEngine(engines, paths))
            stack.push_async_callback(driver.aclose)
            return await driver.start()

        yield make


def on(rank: int | None, prompt: list[int] = PROMPT, max_tokens: int = 8) -> Generation:
    return replace(greedy("demo", prompt, max_tokens), data_parallel_rank=rank)


async def test_each_rank_has_a_cache(start: Start) -> None:
    """A repeated prompt is cached on its first rank only, and KV events name the rank."""
    driver = await start()
    assert isinstance(driver, RankDriver)
    first = await driver.run(on(1))
    again, other = await driver.run(on(1)), await driver.run(on(0))
    assert first.tokens == again.tokens == other.tokens and len(first.tokens) == 8
    assert (again.done.usage.cached_tokens, other.done.usage.cached_tokens) == (64, 0)
    other_prompt = list(range(300, 340))
    await driver.run(on(1, other_prompt))
    await driver.wait_cached_on(1, list(block_hashes(other_prompt, 16)))
    assert not driver.cached_by_rank[0] & set(block_hashes(other_prompt, 16))
    assert driver.violations == []


async def test_each_rank_has_a_load(start: Start) -> None:
    """A request counts in the load of its rank, and once in the load of the worker. A cancellation reaches the right rank."""
    driver = await start()
    records = [driver.submit(on(1, max_tokens=1500)) for _ in range(3)]
    for record in records:
        await driver.wait_tokens(record, 1)
    loads, whole = driver.engine.rank_loads(), driver.engine.load()
    assert [load.data_parallel_rank for load in loads] == [0, 1]
    assert [load.running_requests for load in loads] == [0, 3]
    assert (whole.running_requests, whole.kv_blocks_total) == (3, 2 * SETTINGS.kv_blocks)
    for record in records:
        driver.engine.cancel_nowait(record.key)
        assert (await driver.wait(record)).done.reason is FinishReason.CANCELLED
    await driver.wait_blocks(0, PATIENCE_S)


async def test_requests_without_a_rank_are_spread_over_the_ranks(start: Start) -> None:
    driver = await start()
    records = [driver.submit(on(None, max_tokens=1500)) for _ in range(4)]
    for record in records:
        await driver.wait_tokens(record, 1)
    assert [load.running_requests for load in driver.engine.rank_loads()] == [2, 2]
    for record in records:
        driver.engine.cancel_nowait(record.key)


async def test_an_unknown_rank_is_refused(start: Start) -> None:
    """The error names the field. A refused leg leaves no state behind, no matter whether the worker or the rank refuses it."""
    driver = await start()
    with pytest.raises(InvalidRequestError) as caught:
        driver.submit(on(2))
    assert caught.value.field == "generation.data_parallel_rank"
    with pytest.raises(InvalidRequestError):
        driver.submit(on(1, [10**9]))
    assert len((await driver.run(on(1))).tokens) == 8
    assert driver.engine._ranks == {}  # type: ignore[attr-defined]


async def test_a_handle_can_be_pulled_by_any_rank(start: Start) -> None:
    """Any decode rank pulls from any prefill rank, and a released handle is freed on its rank."""
    prefill, decode, alone = await start(role="prefill"), await start(), await start()
    expected = (await alone.run(on(0))).tokens
    for source, reader in ((0, 1), (1, 0), (1, 1)):
        prompt = [token + 200 * source + 400 * reader for token in PROMPT]
        handle = await prefill.prefill(on(source, prompt))
        record = await decode.run(on(reader, prompt), handle=handle)
        assert record.done.usage.transferred_tokens > 0 and not record.done.was_recomputed
        assert record.tokens == (await alone.run(on(0, prompt))).tokens
    assert expected
    await prefill.wait_blocks(0, PATIENCE_S)
    handle = await prefill.prefill(on(1, [9] * 40))
    assert prefill.engine.leased_handles() == 1
    assert prefill.engine.release_nowait(handle.handle_id)
    await prefill.wait_blocks(0, PATIENCE_S)


async def test_each_rank_has_a_bootstrap_server(start: Start) -> None:
    """Each rank has its own bootstrap server, which refuses a leg for another rank."""
    prefill = await start(role="prefill", handoff="rendezvous", handshake_timeout_s=PATIENCE_S)
    decode, alone = await start(handoff="rendezvous", handshake_timeout_s=PATIENCE_S), await start()
    addresses = prefill.engine.describe().rank_rendezvous_addresses
    assert len(set(addresses)) == RANKS

    async def meet(address: str, rank: int, prompt: list[int]) -> Any:
        host, _, port = address.rpartition(":")
        where = Rendezvous(host=host, port=int(port), room=prompt[0], prefill_data_parallel_rank=rank)
        leg = decode.submit(on(1 - rank, prompt), rendezvous=where)
        source = prefill.submit(on(rank, prompt), task=LegTask.PREFILL, rendezvous=where)
        await asyncio.gather(prefill.wait(source), decode.wait(leg))
        return leg

    for rank, address in enumerate(addresses):
        prompt = [token + 200 * rank for token in PROMPT]
        assert (await meet(address, rank, prompt)).tokens == (await alone.run(on(0, prompt))).tokens
    host, _, port = addresses[0].rpartition(":")
    wrong = Rendezvous(host=host, port=int(port), room=7, prefill_data_parallel_rank=1)
    leg = await decode.wait(decode.submit(on(0), rendezvous=wrong))
    assert leg.done.error is not None and "rank" in leg.done.error.message
    await decode.wait_blocks(0, PATIENCE_S)
    await prefill.wait_blocks(0, PATIENCE_S)


async def test_the_loss_of_one_rank_is_the_loss_of_the_engine(start: Start) -> None:
    """When one rank dies, the consumer of the engine's outputs gets LostError."""
    driver = await start()
    rank = driver.engine._engines[1]  # type: ignore[attr-defined]
    assert isinstance(rank, FaultyEngine)
    rank.inject(Die())
    async with asyncio.timeout(PATIENCE_S):
        await driver._tasks[0]
    assert isinstance(driver.error, LostError)


async def test_deliver_merges_the_outputs_of_all_ranks(start: Start) -> None:
    """`deliver` passes the outputs of all ranks to one function, and ends with an error when one rank fails."""
    driver = await start()
    driver._tasks[0].cancel()
    finished: list[int] = []
    delivery = asyncio.create_task(
        driver.engine.deliver(lambda output: finished.extend(finish.key for finish in output.finishes))
    )
    for rank in (0, 1):
        driver.submit(on(rank))
    async with asyncio.timeout(PATIENCE_S):
        while len(finished) < 2:
            await asyncio.sleep(0.005)
        driver.engine._engines[0].inject(Die())  # type: ignore[attr-defined]
        with pytest.raises(LostError):
            await delivery
    await asyncio.wait(driver._tasks[:1])
    driver._tasks.pop(0)


async def test_ranks_change_their_role_together(start: Start) -> None:
    """If one rank cannot change its role, the ranks that already changed revert to the old role."""
    driver = await start()
    await driver.engine.set_role(Role.PREFILL)
    assert driver.engine.describe().role is Role.PREFILL
    await driver.engine.set_role(Role.DECODE)
    unsupported = await start(handoff="rendezvous")
    mixed = RankedEngine(
        [*driver.engine._engines, *unsupported.engine._engines],  # type: ignore[attr-defined]
        KvPaths(pull_timeout_s=SETTINGS.pull_timeout_s),
    )
    with pytest.raises(UnsupportedError):
        await mixed.set_role(Role.PREFILL)
    assert {each.describe().role for each in driver.engine._engines} == {Role.DECODE}  # type: ignore[attr-defined]
