"""Stored responses, on each database: conversations continue in every process, and tenants are isolated from each other."""

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


class TwoStores:
    """Two processes with the same data."""

    def __init__(self, one: ResponseStore, two: ResponseStore, clock: ManualClock) -> None:
        self.one, self.two, self.clock = one, two, clock

    async def put(self, name: str, previous: str | None = None, owner: str = "me", text: str = "hi") -> None:
        body = {"id": name, "previous_response_id": previous, "output": [f"{text} of {name}"]}
        await self.one.put(owner, body, items=[{"item": name}])


@pytest.fixture
async def stores_pair(stores: StoreCase) -> TwoStores:
    clock = ManualClock()
    one, two = [ResponseStore(await stores.responses(), SETTINGS, clock) for _ in range(2)]
    return TwoStores(one, two, clock)


async def test_a_conversation_continues_in_another_process(stores_pair: TwoStores) -> None:
    """A conversation has the items of all its responses, the oldest first, and none of other branches."""
    await stores_pair.put("a")
    await stores_pair.put("b", "a")
    await stores_pair.put("c", "b")
    await stores_pair.put("other branch", "a")
    items = await stores_pair.two.conversation(owner="me", response_id="c")
    assert items == [{"item": "a"}, "hi of a", {"item": "b"}, "hi of b", {"item": "c"}, "hi of c"]
    assert (await stores_pair.two.get(owner="me", response_id="b")).body["output"] == ["hi of b"]


async def test_a_tenant_accesses_only_its_own_responses(stores_pair: TwoStores) -> None:
    """A tenant cannot read, continue or delete another tenant's responses. A chain through another tenant's response is refused."""
    await stores_pair.put("a")
    await stores_pair.put("b", "a", owner="thief")
    for call in (stores_pair.two.get, stores_pair.two.delete, stores_pair.two.conversation):
        with pytest.raises(NotFoundError):
            await call(owner="thief", response_id="a")
    with pytest.raises(InvalidRequestError):
        await stores_pair.two.conversation(owner="thief", response_id="b")


async def test_deleted_and_expired_responses_are_gone(stores_pair: TwoStores) -> None:
    await stores_pair.put("a")
    await stores_pair.put("b", "a")
    await stores_pair.clock.advance(60.0)
    await stores_pair.two.conversation(owner="me", response_id="b")
    await stores_pair.clock.advance(60.0)
    assert await stores_pair.one.sweep() == 0, "both were used 60 s ago"
    await stores_pair.one.delete(owner="me", response_id="a")
    with pytest.raises(InvalidRequestError):
        await stores_pair.two.conversation(owner="me", response_id="b")
    await stores_pair.clock.advance(60.0)
    with pytest.raises(NotFoundError):
        await stores_pair.two.get(owner="me", response_id="b")
    assert await stores_pair.two.sweep() == 1


async def test_chains_are_bounded(stores_pair: TwoStores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "CHAIN_MAX", 4)
    previous = None
    for number in range(5):
        await stores_pair.put(f"r{number}", previous)
        previous = f"r{number}"
    assert len(await stores_pair.two.conversation(owner="me", response_id="r3")) == 8
    with pytest.raises(InvalidRequestError):
        await stores_pair.two.conversation(owner="me", response_id="r4")


async def test_the_owner_with_most_bytes_loses_its_oldest_responses(stores_pair: TwoStores) -> None:
    """The size limit counts the responses of all processes together."""
    await stores_pair.put("lone", owner="lone")
    for number in range(30):
        await stores_pair.put(f"r{number}", owner="flood", text="x" * 1000)
        await stores_pair.clock.advance(0.1)
    assert (await stores_pair.two.get(owner="lone", response_id="lone")).body["id"] == "lone"
    assert (await stores_pair.two.get(owner="flood", response_id="r29")).body["id"] == "r29"
    with pytest.raises(NotFoundError):
        await stores_pair.two.get(owner="flood", response_id="r0")


async def test_storing_again_stores_once(stores_pair: TwoStores) -> None:
    """A transaction runs again if its commit is not acknowledged. The response's bytes count once."""
    for _ in range(100):
        await stores_pair.put("a", text="x" * 1000)
    await stores_pair.put("b")
    assert (await stores_pair.two.get(owner="me", response_id="a")).body["id"] == "a"


async def test_concurrent_operations_lose_no_response(stores_pair: TwoStores) -> None:
    """No response is lost when both processes write, read, continue and delete at the same time."""
    await stores_pair.put("root")

    async def work(store: ResponseStore, number: int) -> None:
        name = f"{store is stores_pair.one}-{number}"
        await store.put("me", {"id": name, "previous_response_id": "root", "output": [name]}, items=[])
        assert await store.conversation(owner="me", response_id=name) == [{"item": "root"}, "hi of root", name]
        if number % 3 == 0:
            await store.delete(owner="me", response_id=name)

    await asyncio.gather(*(work(store, number) for number in range(20) for store in (stores_pair.one, stores_pair.two)))
    kept = await asyncio.gather(
        *(
            stores_pair.two.get(owner="me", response_id=f"{first}-{n}")
            for n in range(20)
            if n % 3
            for first in (True, False)
        )
    )
    assert len(kept) == 26
