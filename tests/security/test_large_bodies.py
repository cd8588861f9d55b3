"""Values in large bodies are counted before the bodies are parsed, and tenants take turns in parsing them."""

import asyncio
import json
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import InvalidRequestError, OverloadedError
from kvmesh.rpc.codec.json_texts import SLICE_BYTES, JsonCounter
from services.frontend.api.http import request_bytes
from services.frontend.api.http.large_bodies import LARGE_BYTES, LargeBodies
from services.frontend.api.http.request_bytes import JsonLimits
from services.frontend.models import ServedModel
from services.frontend.settings import FrontendSettings, HttpSettings
from tests.patience import PATIENCE_S
from tests.security.rig import CHAT, Connection, Rig, frontend, head_of

VALUES = st.recursive(
    st.none() | st.integers(0, 9) | st.text(alphabet='ab\\"[]{},: \n', max_size=12),
    lambda each: st.lists(each, max_size=5) | st.dictionaries(st.text(alphabet='a"\\[,', max_size=4), each, max_size=4),
    max_leaves=60,
)


def counted(body: bytes, size: int = SLICE_BYTES) -> tuple[int, int]:
    counter = JsonCounter()
    for start in range(0, len(body), size):
        counter.feed(body[start : start + size])
    return counter.containers, counter.commas


def containers_in(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(containers_in, value.values()))
    return 1 + sum(map(containers_in, value)) if isinstance(value, list) else 0


def commas_in(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max(0, len(inner) - 1) + sum(map(commas_in, inner))


@given(value=VALUES, size=st.integers(1, 40))
def test_the_counts_are_those_of_the_parsed_value(value: Any, size: int) -> None:
    """The counts equal those of the parsed value, for any division into slices and any strings."""
    assert counted(json.dumps(value).encode(), size) == (containers_in(value), commas_in(value))


@given(value=VALUES, size=st.integers(1, 40), containers_max=st.integers(0, 20), values_max=st.integers(1, 30))
async def test_the_limits_are_exact_however_the_body_arrives(
    value: Any, size: int, containers_max: int, values_max: int
) -> None:
    body, limits = json.dumps(value).encode(), JsonLimits()
    refused = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_bytes, "CONTAINERS_MAX", containers_max)
        patch.setattr(request_bytes, "VALUES_MAX", values_max)
        for end in range(size, len(body) + size, size):
            try:
                await limits.check(body[:end])
            except InvalidRequestError:
                refused = True
                break
    assert refused == (containers_in(value) > containers_max or commas_in(value) >= values_max)


async def test_text_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets inside a prompt do not count against the limits."""
    body = orjson.dumps({"prompt": "f([x[0], {1, 2}])" * 100_000})
    assert counted(body) == (1, 0)
    monkeypatch.setattr(request_bytes, "CONTAINERS_MAX", 1)
    monkeypatch.setattr(request_bytes, "VALUES_MAX", 1)
    await JsonLimits().check(body)


def attack_bodies() -> list[tuple[str, bytes]]:
    size = 7_900_000
    start, end = b'{"model":"tiny","messages":[', b"]}"
    return [
        ("lists", start + b"[]," * (size // 3) + b"[]" + end),
        ("objects", start + b"{}," * (size // 3) + b"{}" + end),
        ("numbers", start + b"0," * (size // 2) + b"0" + end),
        ("strings", start + b'"",' * (size // 3) + b'""' + end),
        ("nested", start + b"[" * 4_000_000 + b"]" * 3_900_000 + end),
    ]


async def status_of(rig: Rig, session: aiohttp.ClientSession, data: bytes) -> tuple[int, str]:
    async with session.post(
        rig.url + CHAT, data=BytesIO(data), headers={"Content-Type": "application/json"}
    ) as response:
        return response.status, (await response.json()).get("error", {}).get("code")


@pytest.mark.parametrize(("name", "data"), attack_bodies())
async def test_a_body_of_millions_of_values_is_not_parsed(model: ServedModel, name: str, data: bytes) -> None:
    """A body with millions of values is refused before it is parsed."""
    async with frontend(model) as rig, aiohttp.ClientSession() as session:
        assert await status_of(rig, session, data) == (400, "too_many_values")


async def test_counting_values_does_not_block_the_event_loop(model: ServedModel) -> None:
    """Other tasks run between two slices of a large body."""
    data = orjson.dumps({"model": "tiny", "messages": [{"role": "user", "content": "[" * 7_000_000}]})
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    slices = len(data) // SLICE_BYTES
    async with frontend(model) as rig, aiohttp.ClientSession() as session:
        counting = asyncio.create_task(count_turns())
        # The prompt is far longer than the context.
        assert (await status_of(rig, session, data))[0] == 400
        counting.cancel()
    assert turns > slices


async def test_bodies_within_the_limits_are_read(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body with exactly the maximum number of containers is accepted, and one more is refused."""
    monkeypatch.setattr(request_bytes, "CONTAINERS_MAX", 1000)
    async with frontend(model) as rig, aiohttp.ClientSession() as session:
        for count, wanted in ((999, 200), (1000, 400)):
            body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "metadata": {}, "max_tokens": 1}
            data = json.dumps({**body, "unknown": [[]] * (count - 4), "padding": "[" * 20_000}).encode()
            status, _ = await status_of(rig, session, data)
            assert status == wanted


async def test_tenants_alternate_and_leave_most_of_the_loop_to_other_work() -> None:
    """A tenant with many large bodies delays another tenant's body by one. Parsing uses a bounded share of the time."""
    bodies, order = LargeBodies(1 << 30), []

    async def read(tenant: str) -> None:
        async with bodies.turn(tenant, LARGE_BYTES + 1):
            parse(tenant)

    def parse(tenant: str) -> None:
        order.append(tenant)
        time.sleep(0.01)

    began = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as tasks:
        for tenant in ["flood"] * 6 + ["other"] * 2:
            tasks.create_task(read(tenant))
    assert order == ["flood", "flood", "other", "flood", "other", "flood", "flood", "flood"]
    assert asyncio.get_running_loop().time() - began >= 8 * 0.01 + 7 * 0.03
    assert bodies.waiting_bytes == 0


async def test_waiting_bodies_have_a_limit_and_can_be_cancelled() -> None:
    """One tenant's waiting bodies are limited to a quarter of the bytes. A cancelled wait lets the next one proceed."""
    bodies = LargeBodies(8 * LARGE_BYTES)
    size = LARGE_BYTES + 1
    async with bodies.turn("a", size):
        waiting = asyncio.create_task(_enter(bodies, "b", size))
        behind = asyncio.create_task(_enter(bodies, "c", size))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await _enter(bodies, "a", size)
        waiting.cancel()
    await behind
    await asyncio.wait({waiting})
    assert waiting.cancelled() and bodies.waiting_bytes == 0
    await _enter(bodies, "b", size)


async def test_small_bodies_do_not_wait_for_large_ones(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with small bodies are answered while a large body waits for its turn."""
    monkeypatch.setattr("services.frontend.api.http.large_bodies.PAUSE_FACTOR", 1e9)
    small, large = (
        json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x" * size}], "max_tokens": 1}).encode()
        for size in (1, LARGE_BYTES)
    )
    async with frontend(model) as rig, aiohttp.ClientSession() as session:
        await status_of(rig, session, large)
        waiting = asyncio.create_task(status_of(rig, session, large))
        async with asyncio.timeout(PATIENCE_S):
            status, _ = await status_of(rig, session, small)
        assert status == 200 and not waiting.done()
        waiting.cancel()


async def test_incomplete_bodies_are_limited_per_tenant(model: ServedModel, keys: Path) -> None:
    """Incomplete large bodies of a tenant are limited like waiting ones, and other tenants' bodies are still accepted."""
    settings = FrontendSettings(http=HttpSettings(bodies_bytes_max=32 << 20))
    values = {"Content_Type": "application/json", "Authorization": "Bearer good", "Content_Length": "8000000"}
    async with frontend(model, keys=keys, settings=settings) as rig, aiohttp.ClientSession() as session:
        opened = [await Connection.open(rig.http_port) for _ in range(6)]
        for connection in opened:
            connection.writer.write(head_of(**values) + b" " * 7_900_000)
        answers = [asyncio.create_task(connection.head()) for connection in opened]
        done, _ = await asyncio.wait(answers, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        assert b" 503 " in done.pop().result()
        head = {"Authorization": "Bearer zip"}
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 100_000}]}
        async with session.post(rig.url + CHAT, json=body, headers=head) as response:
            # It was read: only its prompt is too long.
            assert (await response.json())["error"]["code"] == "context_length_exceeded"
        for answer in answers:
            answer.cancel()
        await asyncio.wait(answers)


async def _enter(bodies: LargeBodies, tenant: str, size: int) -> None:
    async with bodies.turn(tenant, size):
        pass
