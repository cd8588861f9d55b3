"""Stored responses, on each database: conversations go on in every process, and no tenant sees or displaces another's."""

import asyncio

import pytest

from kvmesh.errors import InvalidRequestError, NotFoundError
from services.frontend.settings import ResponsesSettings
from services.frontend.stores import responses
from services.frontend.stores.responses import ResponseStore
from tests.conformance.manual_clock import ManualClock
from tests.conformance.store_cases import StoreCase, cluster, stores

__all__ = ["cluster", "stores"]

SETTINGS = ResponsesSettings(ttl_s=100.0, stored_bytes_max=20_000)


class Bench:
    """Two processes over the same data."""

    def __init__(self, one: ResponseStore, two: ResponseStore, clock: ManualClock) -> None:
        self.one, self.two, self.clock = one, two, clock

    async def put(self, name: str, previous: str | None = None, owner: str = "me", text: str = "hi") -> None:
        body = {"id": name, "previous_response_id": previous, "output": [f"{text} of {name}"]}
        await self.one.put(owner, body, items=[{"item": name}])


@pytest.fixture
async def bench(stores: StoreCase) -> Bench:
    clock = ManualClock()
    one, two = [ResponseStore(await stores.responses(), SETTINGS, clock) for _ in range(2)]
    return Bench(one, two, clock)


async def test_a_conversation_goes_on_in_another_process(bench: Bench) -> None:
    """All items, oldest first; a branch has its own."""
    await bench.put("a")
    await bench.put("b", "a")
    await bench.put("c", "b")
    await bench.put("other branch", "a")
    items = await bench.two.conversation(owner="me", response_id="c")
    assert items == [{"item": "a"}, "hi of a", {"item": "b"}, "hi of b", {"item": "c"}, "hi of c"]
    assert (await bench.two.get(owner="me", response_id="b")).body["output"] == ["hi of b"]


async def test_a_tenant_finds_only_its_own(bench: Bench) -> None:
    """Neither reads, nor continues, nor deletes another's; a chain that leads to another's has a gap."""
    await bench.put("a")
    await bench.put("b", "a", owner="thief")
    for call in (bench.two.get, bench.two.delete, bench.two.conversation):
        with pytest.raises(NotFoundError):
            await call(owner="thief", response_id="a")
    with pytest.raises(InvalidRequestError):
        await bench.two.conversation(owner="thief", response_id="b")


async def test_deleted_and_expired_ones_are_gone(bench: Bench) -> None:
    await bench.put("a")
    await bench.put("b", "a")
    await bench.clock.advance(60.0)
    await bench.two.conversation(owner="me", response_id="b")
    await bench.clock.advance(60.0)
    assert await bench.one.sweep() == 0, "both were used 60 s ago"
    await bench.one.delete(owner="me", response_id="a")
    with pytest.raises(InvalidRequestError):
        await bench.two.conversation(owner="me", response_id="b")
    await bench.clock.advance(60.0)
    with pytest.raises(NotFoundError):
        await bench.two.get(owner="me", response_id="b")
    assert await bench.two.sweep() == 1


async def test_chains_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "CHAIN_MAX", 4)
    previous = None
    for number in range(5):
        await bench.put(f"r{number}", previous)
        previous = f"r{number}"
    assert len(await bench.two.conversation(owner="me", response_id="r3")) == 8
    with pytest.raises(InvalidRequestError):
        await bench.two.conversation(owner="me", response_id="r4")


async def test_the_owner_who_has_most_loses_its_oldest(bench: Bench) -> None:
    """The size holds for all processes together."""
    await bench.put("lone", owner="lone")
    for number in range(30):
        await bench.put(f"r{number}", owner="flood", text="x" * 1000)
        await bench.clock.advance(0.1)
    assert (await bench.two.get(owner="lone", response_id="lone")).body["id"] == "lone"
    assert (await bench.two.get(owner="flood", response_id="r29")).body["id"] == "r29"
    with pytest.raises(NotFoundError):
        await bench.two.get(owner="flood", response_id="r0")


async def test_storing_again_stores_once(bench: Bench) -> None:
    """A transaction whose commit is not acknowledged runs again; its bytes count once."""
    for _ in range(100):
        await bench.put("a", text="x" * 1000)
    await bench.put("b")
    assert (await bench.two.get(owner="me", response_id="a")).body["id"] == "a"


async def test_many_at_once_lose_none(bench: Bench) -> None:
    """Writers of both processes, readers and conversations of the same responses."""
    await bench.put("root")

    async def work(store: ResponseStore, number: int) -> None:
        name = f"{store is bench.one}-{number}"
        await store.put("me", {"id": name, "previous_response_id": "root", "output": [name]}, items=[])
        assert await store.conversation(owner="me", response_id=name) == [{"item": "root"}, "hi of root", name]
        if number % 3 == 0:
            await store.delete(owner="me", response_id=name)

    await asyncio.gather(*(work(store, number) for number in range(20) for store in (bench.one, bench.two)))
    kept = await asyncio.gather(
        *(bench.two.get(owner="me", response_id=f"{first}-{n}") for n in range(20) if n % 3 for first in (True, False))
    )
    assert len(kept) == 26
