"""The vLLM adapter on real engines, each in its own process, with KV over real NIXL."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import ClientSession

from kvmesh.core import Constraint, ConstraintKind, FinishReason, Generation, LegTask, Role, SamplingParams
from kvmesh.engines.vllm.handles import pack, unpack
from kvmesh.engines.vllm.registration import VLLM
from kvmesh.engines.vllm.settings import VllmSettings
from kvmesh.errors import (
    InvalidRequestError,
    KvLostError,
    LostError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from kvmesh.kv.blocks import block_hashes, seed_hash
from kvmesh.worker.fork_server import ForkedChild, ForkServer
from tests.integration.mesh import children_of, is_running, stop_process
from tests.integration.vllm_drive import TIMEOUT_S, Drive, greedy
from tests.integration.vllm_model import add_tokenizer, make_adapter, make_model
from tests.integration.vllm_process import RemoteEngine
from tests.parts import ROOT, require_part
from tests.patience import PATIENCE_S
from tests.servers import adjacent_free_ports, free_ports

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.vllm, pytest.mark.timeout(600)]
module_fixture = pytest_asyncio.fixture(scope="module", loop_scope="module")
Make = Callable[..., Awaitable[Drive]]
CANCEL_S = PATIENCE_S
"""A cancel takes about 20 ms on an idle machine."""
LONG_LEASE_S = 2 * PATIENCE_S
"""The end of a lease must not end a wait for a cancel or a release."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "llama")


@module_fixture
async def server() -> AsyncIterator[ForkServer]:
    require_part("vllm")
    require_part("nixl")
    server = await ForkServer.start(VLLM.preload)
    yield server
    await server.aclose()


@pytest.fixture(scope="module")
def settings(model: Path) -> Callable[..., VllmSettings]:
    def make(role: str, **more: Any) -> VllmSettings:
        values = {"model": str(model), "role": role, "dtype": "float32", "kv_cache_bytes": 16 << 20, **more}
        return VllmSettings(**values)

    return make


FIRST_PULL_S = 25.0
"""The first pull between two workers includes UCX's connection set-up, which takes seconds on a busy machine."""


@module_fixture
async def pair(
    server: ForkServer, settings: Callable[..., VllmSettings], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Drive, Drive]]:
    """A prefill and a decode engine for all tests without side effects."""
    folder = tmp_path_factory.mktemp("pair")
    made = [settings(role, pull_timeout_s=FIRST_PULL_S, lease_s=LONG_LEASE_S) for role in ("prefill", "decode")]
    drives = [Drive(RemoteEngine(server, each, folder)) for each in made]
    await asyncio.gather(*(drive.start() for drive in drives))
    await connect(*drives)
    yield drives[0], drives[1]
    await asyncio.gather(*(drive.aclose() for drive in drives))


@pytest_asyncio.fixture(loop_scope="module")
async def make(server: ForkServer, settings: Callable[..., VllmSettings], tmp_path: Path) -> AsyncIterator[Make]:
    """Returns a function that starts further engines for one test."""
    drives: list[Drive] = []

    async def start(role: str, *, environ: Mapping[str, str] | None = None, **more: Any) -> Drive:
        drive = Drive(RemoteEngine(server, settings(role, **more), tmp_path, environ=environ))
        drives.append(drive)
        return await drive.start()

    yield start
    await asyncio.gather(*(drive.aclose() for drive in drives))


async def connect(prefill: Drive, decode: Drive) -> None:
    """Sets up the connection between two engines. The first pull may take longer than a short `pull_timeout_s`, or than `FIRST_LIMIT_S`."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            got = await decode.decode(greedy(50), await prefill.prefill(greedy(50)))
            if got.finish is not None and not got.finish.was_recomputed:
                break
            await reset(decode)
    await asyncio.gather(prefill.idle(), decode.idle())


async def wait_published(drive: Drive, generation: Generation, *, seed: int | None = None) -> None:
    """Waits for the events of the prompt's blocks, which may arrive after its answer."""
    blocks = (
        block_hashes(generation.token_ids, 32) if seed is None else block_hashes(generation.token_ids, 32, seed=seed)
    )
    async with asyncio.timeout(PATIENCE_S):
        while not drive.cached().issuperset(blocks):
            await asyncio.sleep(0.01)


async def reset(*drives: Drive) -> None:
    for drive in drives:
        await drive.idle()
        assert await drive.engine.reset_cache()


@pytest.mark.parametrize("length", [1, 10, 31, 32, 33, 64, 95, 200, 800])
async def test_handoff_gives_the_local_answer_and_computes_no_block_twice(
    pair: tuple[Drive, Drive], length: int
) -> None:
    """The decode engine gives the tokens that it would give alone, and pulls the prompt instead of computing it."""
    prefill, decode = pair
    generation = greedy(length, seed=length)
    await reset(prefill, decode)
    alone = await decode.decode(generation)
    await reset(decode)
    before, before_prefill = decode.engine.load(), prefill.engine.load()
    handle = await prefill.prefill(generation)
    got = await decode.decode(generation, handle)
    load, load_prefill = decode.engine.load(), prefill.engine.load()
    assert got.tokens == alone.tokens
    assert got.finish is not None
    assert got.finish.reason is FinishReason.LENGTH
    assert not got.finish.was_recomputed
    # vLLM computes a prompt's last token again to sample after it, and does not count a transfer of only that token.
    transferred = length if length > 1 else 0
    assert got.finish.usage.transferred_tokens == transferred
    assert got.finish.usage.output_tokens == 12
    assert load.prompt_tokens_total - before.prompt_tokens_total == 1, "only the last token, to sample after it"
    assert load.transferred_tokens_total - before.transferred_tokens_total == transferred
    assert load_prefill.prompt_tokens_total - before_prefill.prompt_tokens_total == length
    await prefill.idle()


async def test_many_handoffs_at_once(pair: tuple[Drive, Drive]) -> None:
    """Pulls of one step do not mix their blocks."""
    prefill, decode = pair
    generations = [greedy(20 + 37 * index, seed=100 + index) for index in range(8)]
    alone = [got.tokens for got in await asyncio.gather(*map(decode.decode, generations))]
    await reset(prefill, decode)
    handles = await asyncio.gather(*map(prefill.prefill, generations))
    got = await asyncio.gather(*map(decode.decode, generations, handles))
    assert [each.tokens for each in got] == alone
    assert not any(each.finish.was_recomputed for each in got if each.finish)
    await asyncio.gather(prefill.idle(), decode.idle())


async def test_a_cached_prefix_is_not_pulled_again(pair: tuple[Drive, Drive]) -> None:
    """If the decode engine has the first blocks cached, only the rest is pulled. The answer is the same."""
    prefill, decode = pair
    long, short = greedy(200, seed=7), greedy(96, seed=7)
    await reset(prefill, decode)
    alone = await decode.decode(long)
    await reset(decode)
    await decode.decode(short)
    got = await decode.decode(long, await prefill.prefill(long))
    assert got.tokens == alone.tokens
    assert got.finish is not None
    assert (got.finish.usage.cached_tokens, got.finish.usage.transferred_tokens) == (96, 104)
    await prefill.idle()


async def test_events_contain_cached_and_pulled_blocks(pair: tuple[Drive, Drive]) -> None:
    """Both engines publish a prompt's full blocks under the mesh's hashes, and a cache reset immediately."""
    prefill, decode = pair
    generation = greedy(200, seed=11, tokens=1, cache_salt="tenant")
    names = set(block_hashes(generation.token_ids, 32, seed=seed_hash("", "tenant")))
    await reset(prefill, decode)
    await decode.decode(generation, await prefill.prefill(generation))
    await asyncio.gather(prefill.idle(), decode.idle())
    async with asyncio.timeout(PATIENCE_S):
        while not (prefill.cached() == decode.cached() == names):
            await asyncio.sleep(0.01)
    await reset(prefill, decode)
    async with asyncio.timeout(PATIENCE_S):
        while prefill.cached() or decode.cached():
            await asyncio.sleep(0.01)


async def test_events_follow_eviction(make: Make) -> None:
    """With a small cache that evicts, events still match the cache: a published prefix is a cache hit."""
    engine = await make("decode", context_tokens_max=512, kv_cache_bytes=640 << 10)
    blocks = engine.engine.describe().kv_blocks_total
    for seed in range(12):
        await engine.decode(greedy(300, seed=200 + seed, tokens=2))
    await engine.idle()
    await wait_published(engine, greedy(300, seed=211))
    assert 0 < len(engine.cached()) <= blocks
    assert len(engine.events) > 12
    for seed in (10, 11):
        generation = greedy(300, seed=200 + seed, tokens=2)
        published = 0
        for name in block_hashes(generation.token_ids, 32):
            if name not in engine.cached():
                break
            published += 32
        got = await engine.decode(generation)
        assert got.finish is not None
        assert got.finish.usage.cached_tokens == published
        await wait_published(engine, generation)
    assert published > 0


async def test_unequal_block_sizes_are_refused(pair: tuple[Drive, Drive], make: Make) -> None:
    """vLLM alone gives wrong tokens here. With kvmesh the compatibility hash differs, and the handle is rejected."""
    prefill, _ = pair
    decode = await make("decode", block_size_tokens=64)
    handle = await prefill.prefill(greedy(100))
    assert handle.compatibility_hash != decode.engine.describe().kv_compatibility_hash
    # A prompt of 100 tokens has different numbers of blocks on both sides. For one of 20 only the hash differs.
    short = await prefill.prefill(greedy(20))
    for its, generation in ((handle, greedy(100)), (short, greedy(20))):
        with pytest.raises(KvLostError) as caught:
            decode.submit(LegTask.GENERATE, generation, handle=its)
        assert caught.value.reason == "kv_incompatible"
        assert prefill.engine.release_nowait(its.handle_id)


async def test_a_handle_of_another_prompt_is_refused(pair: tuple[Drive, Drive]) -> None:
    """With other tokens, another salt or a damaged payload the KV would be wrong, so it is not read, even if the length is equal."""
    prefill, decode = pair
    handle = await prefill.prefill(greedy(100, seed=1))
    for generation, its in (
        (greedy(100, seed=2), handle),
        (greedy(100, seed=1, cache_salt="other"), handle),
        (greedy(99, seed=1), handle),
        (greedy(100, seed=1), replace(handle, payload=handle.payload[:-9])),
        (greedy(100, seed=1), replace(handle, payload=b"[]")),
        (greedy(100, seed=1), replace(handle, format="vllm/0/nixl-0")),
    ):
        with pytest.raises(KvLostError):
            decode.submit(LegTask.GENERATE, generation, handle=its)
    assert prefill.engine.release_nowait(handle.handle_id)
    await prefill.idle()


async def test_a_late_handle_is_not_pulled(pair: tuple[Drive, Drive]) -> None:
    """If the rest of its lease is shorter than the margin, the prompt is computed."""
    prefill, decode = pair
    generation = greedy(100, seed=3)
    alone = await decode.decode(generation)
    await reset(decode)
    handle = await prefill.prefill(generation)
    got = await decode.decode(generation, replace(handle, lease_s=1.9))
    assert got.tokens == alone.tokens
    assert got.finish is not None
    assert got.finish.was_recomputed
    assert got.finish.usage.transferred_tokens == 0
    assert prefill.engine.release_nowait(handle.handle_id)
    await prefill.idle()


async def test_a_pull_after_the_lease_has_ended_gives_no_wrong_token(make: Make, pair: tuple[Drive, Drive]) -> None:
    """A stopped frontend has a handle whose lease seems valid, but the blocks belong to other prompts."""
    times = {"lease_s": 1.0, "pull_timeout_s": 0.9}
    prefill, decode = await asyncio.gather(make("prefill", kv_cache_bytes=4 << 20, **times), make("decode", **times))
    generation = greedy(300, seed=21)
    alone = (await pair[1].decode(generation)).tokens
    await decode.decode(greedy(50), await prefill.prefill(greedy(50)))
    handle = await prefill.prefill(generation)
    await prefill.idle()
    blocks = prefill.engine.load().kv_blocks_total
    for seed in range(22, 22 + blocks // 9):
        prefill.engine.release_nowait((await prefill.prefill(greedy(300, seed=seed))).handle_id)
    got = await decode.decode(generation, replace(handle, lease_s=30.0))
    assert got.tokens == alone
    assert got.finish is not None
    assert got.finish.was_recomputed
    await decode.idle()


async def test_late_bytes_do_not_reach_other_requests(make: Make, pair: tuple[Drive, Drive]) -> None:
    """The prefill process is stopped, so the pull is abandoned. When the process continues, it still sends the bytes, and other requests keep
    their tokens."""
    more = {"kv_cache_bytes": 4 << 20, "environ": {"UCX_TLS": "tcp,self"}, "lease_s": 60.0, "pull_timeout_s": 1.0}
    prefill, decode = await asyncio.gather(make("prefill", **more), make("decode", **more))
    await decode.decode(greedy(50), await prefill.prefill(greedy(50)))
    await asyncio.gather(prefill.idle(), reset(decode))
    others = [greedy(300, seed=seed) for seed in range(30, 42)]
    alone = [(await pair[1].decode(other)).tokens for other in others]
    generation = greedy(1800, seed=29)
    handle = await prefill.prefill(generation)
    await stop_process(prefill.remote.pid)
    try:
        got = await decode.decode(generation, handle)
        assert got.finish is not None
        assert got.finish.was_recomputed
        # Blocks of the abandoned pull would be among those that these requests use.
        assert [(await decode.decode(other)).tokens for other in others] == alone
    finally:
        os.kill(prefill.remote.pid, signal.SIGCONT)
    await decode.idle()
    assert [(await decode.decode(other)).tokens for other in others] == alone


async def test_a_handle_is_pulled_once(pair: tuple[Drive, Drive]) -> None:
    """The blocks are freed after the first pull. A second one with the same handle computes the prompt."""
    prefill, decode = pair
    generation = greedy(300, seed=22)
    handle = await prefill.prefill(generation)
    first = await decode.decode(generation, handle)
    await prefill.idle()
    await reset(decode)
    second = await decode.decode(generation, handle)
    assert second.tokens == first.tokens
    assert first.finish is not None
    assert second.finish is not None
    assert (first.finish.was_recomputed, second.finish.was_recomputed) == (False, True)


async def test_a_handle_without_a_hold_is_not_pulled(pair: tuple[Drive, Drive]) -> None:
    """Without a hold nothing proves that its blocks are still held."""
    prefill, decode = pair
    generation = greedy(300, seed=23)
    handle = await prefill.prefill(generation)
    name, parameters = unpack(handle.payload)
    del parameters["hold"]
    got = await decode.decode(generation, replace(handle, payload=pack(name, parameters)))
    assert got.finish is not None
    assert got.finish.was_recomputed
    assert prefill.engine.release_nowait(handle.handle_id)


async def test_a_lease_ends(make: Make) -> None:
    """Blocks that are not pulled are freed when the lease ends, and count as leased until then."""
    lease_s = 2.0
    prefill = await make("prefill", lease_s=lease_s, pull_timeout_s=1.0)
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            began = time.monotonic()
            handle = await prefill.prefill(greedy(100))
            load = await prefill.until(lambda load: load.kv_blocks_leased == 4 or not load.kv_blocks_used)
            if load.kv_blocks_leased:
                break
            # This process got no CPU until the lease had ended.
    assert handle.lease_s == lease_s
    assert load.kv_blocks_used == 4
    await prefill.idle()
    assert time.monotonic() - began > lease_s - 0.1
    assert prefill.engine.load().kv_blocks_leased == 0
    assert not prefill.engine.release_nowait(handle.handle_id)


async def test_a_released_handle_frees_its_blocks(pair: tuple[Drive, Drive]) -> None:
    """A release ends the lease within a step. A second release, or one after a pull, does nothing."""
    prefill, decode = pair
    generation = greedy(300, seed=5, tokens=2)
    handle = await prefill.prefill(generation)
    assert prefill.engine.release_nowait(handle.handle_id)
    await prefill.idle(CANCEL_S)
    assert not prefill.engine.release_nowait(handle.handle_id)
    pulled = await prefill.prefill(generation)
    await decode.decode(generation, pulled)
    await prefill.idle(CANCEL_S)
    assert not prefill.engine.release_nowait(pulled.handle_id)
    assert not prefill.engine.release_nowait("unknown")


async def test_a_queued_handle_outlives_its_lease(make: Make, pair: tuple[Drive, Drive]) -> None:
    """While a leg waits for capacity, heartbeats keep the prefill side's blocks: no recompute, right tokens."""
    # A busy machine may pause an engine for seconds between two heartbeats.
    short = {"lease_s": 6.0, "pull_timeout_s": 5.9}
    prefill, decode = await make("prefill", **short), await make("decode", running_requests_max=1, **short)
    generation = greedy(100, seed=9)
    alone = (await pair[1].decode(generation)).tokens
    await connect(prefill, decode)
    # Several, so that one of them still runs after the sleep.
    blockers = [decode.submit(LegTask.GENERATE, greedy(10, tokens=2000)) for _ in range(8)]
    await decode.got[blockers[0]].first.wait()
    key = decode.submit(LegTask.GENERATE, generation, handle=await prefill.prefill(generation))
    await asyncio.sleep(1.2 * short["lease_s"])
    assert prefill.engine.load().kv_blocks_leased == 4
    for blocker in blockers:
        decode.engine.cancel_nowait(blocker)
    got = await decode.result(key)
    assert got.tokens == alone
    assert got.finish is not None
    assert not got.finish.was_recomputed
    await prefill.idle()


async def test_a_hung_prefill_process_is_given_up(make: Make, pair: tuple[Drive, Drive]) -> None:
    """vLLM alone would wait forever. Here the leg computes its prompt after the deadline, others continue, and both sides free the blocks.

    The engines have never connected in the first case, and have pulled before in the second.
    """
    times = {"lease_s": 60.0, "pull_timeout_s": 4.0}
    prefill, decode = await asyncio.gather(make("prefill", **times), make("decode", **times))
    for seed, have_met in ((13, False), (113, True)):
        generation = greedy(300, seed=seed)
        alone = (await pair[1].decode(generation)).tokens
        if have_met:
            await decode.decode(greedy(50), await prefill.prefill(greedy(50)))
        handle = await prefill.prefill(generation)
        await stop_process(prefill.remote.pid)
        try:
            began = time.monotonic()
            key = decode.submit(LegTask.GENERATE, generation, handle=handle)
            other = await decode.decode(greedy(40, seed=14))
            assert other.finish is not None
            got = await decode.result(key)
            assert got.tokens == alone
            assert got.finish is not None
            if got.finish.was_recomputed:
                assert time.monotonic() - began > 3.9
                assert got.finish.usage.transferred_tokens == 0
            else:
                # Connected engines may read a stopped process's memory without its help, and then the KV is the right one.
                assert have_met
                assert got.finish.usage.transferred_tokens > 0
        finally:
            os.kill(prefill.remote.pid, signal.SIGCONT)
        # A transfer in progress keeps its blocks until the process continues.
        await decode.idle()
        await prefill.idle()
        assert (await decode.decode(generation)).tokens == alone


async def test_a_pull_from_a_hung_process_can_be_cancelled(make: Make) -> None:
    """The finish comes immediately. The blocks are freed once the peer can no longer write to them."""
    # Over TCP, because an engine that shares memory with a stopped process may read that, and finish before the cancel.
    more = {"environ": {"UCX_TLS": "tcp,self"}, "lease_s": LONG_LEASE_S, "pull_timeout_s": LONG_LEASE_S - 1.0}
    prefill, decode = await asyncio.gather(make("prefill", **more), make("decode", **more))
    await decode.decode(greedy(50), await prefill.prefill(greedy(50)))
    handle = await prefill.prefill(greedy(300, seed=15))
    await stop_process(prefill.remote.pid)
    try:
        key = decode.submit(LegTask.GENERATE, greedy(300, seed=15), handle=handle)
        await decode.until(lambda load: load.kv_blocks_used > 0)
        decode.engine.cancel_nowait(key)
        got = await decode.result(key, CANCEL_S)
        assert got.finish is not None
        assert got.finish.reason is FinishReason.CANCELLED
    finally:
        os.kill(prefill.remote.pid, signal.SIGCONT)
    await decode.idle()
    assert (await decode.decode(greedy(300, seed=15))).tokens


@pytest.mark.parametrize("have_met", [True, False])
async def test_a_dead_prefill_process_is_given_up(make: Make, pair: tuple[Drive, Drive], have_met: bool) -> None:
    """The process is killed between prefill and pull. The leg computes its prompt within the deadline, even if the two never connected."""
    times = {"lease_s": 10.0, "pull_timeout_s": 1.0}
    prefill, decode = await asyncio.gather(make("prefill", **times), make("decode", **times))
    generation = greedy(200, seed=17)
    alone = (await pair[1].decode(generation)).tokens
    if have_met:
        await decode.decode(greedy(50), await prefill.prefill(greedy(50)))
    handle = await prefill.prefill(generation)
    await prefill.remote.kill()
    got = await decode.decode(generation, handle)
    assert got.tokens == alone
    assert got.finish is not None
    assert got.finish.was_recomputed
    assert got.finish.usage.transferred_tokens == 0
    await decode.idle()


async def test_a_running_answer_outlives_its_source(make: Make, pair: tuple[Drive, Drive]) -> None:
    """After the pull, the source may die and its lease may end. Later legs from the dead source are recomputed."""
    times = {"lease_s": 3.0, "pull_timeout_s": 2.9}
    prefill, decode = await asyncio.gather(make("prefill", **times), make("decode", **times))
    long, short = greedy(100, seed=33, tokens=1900), greedy(100, seed=34)
    expected = (await pair[1].decode(long)).tokens
    # After the handshake a pull begins and ends within one step, so that it cannot be observed in progress.
    await connect(prefill, decode)
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            before = decode.engine.load().transferred_tokens_total
            key = decode.submit(LegTask.GENERATE, long, handle=await prefill.prefill(long))
            await decode.got[key].first.wait()
            if decode.engine.load().transferred_tokens_total > before:
                break
            # On a busy machine the pull may take longer than its timeout.
            decode.engine.cancel_nowait(key)
            await decode.result(key)
            await reset(decode)
    handle = await prefill.prefill(short)
    await prefill.remote.kill()
    failed = await decode.decode(short, handle)
    assert failed.finish is not None
    assert failed.finish.was_recomputed
    got = await decode.result(key)
    assert got.tokens == expected
    assert got.finish is not None
    assert not got.finish.was_recomputed


async def test_cancel_frees_both_sides(pair: tuple[Drive, Drive]) -> None:
    """A cancel frees the blocks during decoding, after the submission of a handle, and during prefill. Cancels of finished or unknown legs
    are ignored."""
    prefill, decode = pair
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            running = decode.submit(LegTask.GENERATE, greedy(100, tokens=1900))
            await decode.got[running].first.wait()
            decode.engine.cancel_nowait(running)
            finish = (await decode.result(running, CANCEL_S)).finish
            assert finish is not None
            # If this process gets no CPU for seconds, the answer ends before the cancel.
            if finish.reason is not FinishReason.LENGTH:
                break
    assert finish.reason is FinishReason.CANCELLED
    await decode.idle(CANCEL_S)
    handle = await prefill.prefill(greedy(300, seed=19))
    pulling = decode.submit(LegTask.GENERATE, greedy(300, seed=19), handle=handle)
    decode.engine.cancel_nowait(pulling)
    await decode.result(pulling, CANCEL_S)
    prefilling = prefill.submit(LegTask.PREFILL, greedy(1500, seed=20))
    prefill.engine.cancel_nowait(prefilling)
    got = await prefill.result(prefilling, CANCEL_S)
    assert got.finish is not None
    if got.finish.handle is not None:
        assert prefill.engine.release_nowait(got.finish.handle.handle_id)
    await asyncio.gather(prefill.idle(CANCEL_S), decode.idle(CANCEL_S))
    prefill.engine.cancel_nowait(prefilling)
    decode.engine.cancel_nowait(4711)


async def test_a_bad_adapter_does_not_end_the_engine(make: Make, tmp_path: Path) -> None:
    """An invalid LoRA path would end vLLM. Here an invalid adapter is rejected when it is loaded, and an unknown one when it is used."""
    engine = await make("decode", enable_lora=True)
    with pytest.raises(NotFoundError):
        await engine.engine.load_adapter("absent", str(tmp_path / "absent"))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text("{}")
    with pytest.raises(InvalidRequestError):
        await engine.engine.load_adapter("broken", str(broken))
    for name in ("absent", "broken"):
        with pytest.raises(NotFoundError):
            engine.submit(LegTask.GENERATE, greedy(10, adapter=name))
    await engine.engine.unload_adapter("absent")
    assert (await engine.decode(greedy(10))).tokens


async def test_a_dying_engine_raises(make: Make) -> None:
    """A step that raises ends the stream with LostError. Later submissions are rejected, and closing works."""
    engine = await make("decode")
    engine.submit(LegTask.GENERATE, greedy(10, tokens=2000))
    await engine.remote.break_engine()
    async with asyncio.timeout(PATIENCE_S):
        while engine.failure is None:
            await asyncio.sleep(0.01)
    assert isinstance(engine.failure, LostError)
    with pytest.raises(UnavailableError):
        engine.submit(LegTask.GENERATE, greedy(10))


async def test_roles_can_be_switched(make: Make) -> None:
    """An engine started for both roles works in either. One started for a single role rejects the other."""
    both, own = await asyncio.gather(
        make("decode", pull_timeout_s=FIRST_PULL_S),
        make("decode", can_switch_role=False, pull_timeout_s=FIRST_PULL_S),
    )
    await both.engine.set_role(Role.PREFILL)
    assert both.engine.describe().role is Role.PREFILL
    await connect(both, own)
    handle = await both.prefill(greedy(100, seed=21))
    assert (await own.decode(greedy(100, seed=21), handle)).finish.was_recomputed is False  # type: ignore[union-attr]
    with pytest.raises(UnsupportedError):
        await own.engine.set_role(Role.PREFILL)
    with pytest.raises(UnsupportedError):
        await own.engine.sleep(1)


async def test_an_idle_engine_uses_little_cpu(pair: tuple[Drive, Drive]) -> None:
    """By default NIXL's progress thread would use a whole core per engine."""
    for drive in pair:
        await drive.idle()
    began, before = time.monotonic(), [cpu_s(drive.remote.pid) for drive in pair]
    await asyncio.sleep(1.5)
    spent = [cpu_s(drive.remote.pid) - start for drive, start in zip(pair, before, strict=True)]
    # About 0.02 on an idle machine.
    assert max(spent) < 0.2 * (time.monotonic() - began), spent


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_a_continuation_repeats_nothing(pair: tuple[Drive, Drive]) -> None:
    """With emitted tokens the engine continues the answer, greedy and with a repetition penalty."""
    _, decode = pair
    for penalty in (None, 1.3):
        whole = greedy(50, seed=23, tokens=20)
        whole = replace(whole, sampling=replace(whole.sampling, repetition_penalty=penalty))
        tokens = (await decode.decode(whole)).tokens
        rest = await decode.decode(replace(whole, emitted_token_ids=tokens[:8]))
        assert tokens[:8] + rest.tokens == tokens


async def test_continuations_beside_other_requests(pair: tuple[Drive, Drive]) -> None:
    """Rows of the batch move when requests join and end. Each continuation keeps its own counts and random generator."""
    _, decode = pair
    generations = [
        replace(
            greedy(40, seed=100 + i),
            sampling=SamplingParams(
                temperature=1.0 if i % 2 else 0.0, seed=i, max_tokens=12 + 3 * i, ignore_eos=True, presence_penalty=0.3 * i,
            ),
        )
        for i in range(6)
    ]  # fmt: skip
    wholes = await asyncio.gather(*(decode.decode(each) for each in generations))
    rests = [
        replace(each, emitted_token_ids=whole.tokens[: 3 * i])
        for i, (each, whole) in enumerate(zip(generations, wholes, strict=True))
    ]
    continued = await asyncio.gather(*(decode.decode(each) for each in (*rests, *generations)))
    for i, (rest, whole) in enumerate(zip(continued, wholes, strict=False)):
        assert rest.tokens == whole.tokens[3 * i :], i
    assert [each.tokens for each in continued[6:]] == [each.tokens for each in wholes]


async def test_a_continuation_to_the_end_of_the_context(pair: tuple[Drive, Drive]) -> None:
    """The limit applies to the whole answer, whether it is given or results from the context length."""
    _, decode = pair
    context = decode.engine.describe().model.context_tokens_max
    for limit in (20, None):
        whole = replace(
            greedy(context - 20, seed=31), sampling=SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True)
        )
        tokens = (await decode.decode(whole)).tokens
        assert len(tokens) == 20
        rest = await decode.decode(replace(whole, emitted_token_ids=tokens[:15]))
        assert rest.tokens == tokens[15:]
        assert rest.finish is not None and rest.finish.reason is FinishReason.LENGTH


@pytest.mark.proves("seed", "logit_bias", engine="vllm")
async def test_sampling_reaches_the_engine(pair: tuple[Drive, Drive]) -> None:
    """Seed, stop tokens, bias, log-probabilities and minimum length have their effects."""
    _, decode = pair
    base = greedy(40, seed=25)
    seeded = replace(base, sampling=SamplingParams(temperature=1.0, seed=7, max_tokens=16, ignore_eos=True))
    first, again = await decode.decode(seeded), await decode.decode(seeded)
    assert first.tokens == again.tokens
    assert first.tokens != (await decode.decode(replace(base, sampling=replace(seeded.sampling, seed=8)))).tokens
    tokens = (await decode.decode(base)).tokens
    stopped = await decode.decode(replace(base, sampling=replace(base.sampling, stop_token_ids=[tokens[4]])))
    assert stopped.finish is not None
    assert stopped.finish.reason is FinishReason.STOP
    assert stopped.finish.stop_token_id == tokens[4]
    assert stopped.tokens == tokens[: tokens.index(tokens[4]) + 1]
    biased = await decode.decode(replace(base, sampling=replace(base.sampling, logit_bias=[(99, 100.0)])))
    assert set(biased.tokens) == {99}
    ended = await decode.decode(
        replace(base, sampling=SamplingParams(temperature=0.0, max_tokens=8, logit_bias=[(1, 100.0)], min_tokens=3))
    )
    assert ended.finish is not None
    assert (len(ended.tokens), ended.finish.stop_token_id, ended.finish.reason) == (4, 1, FinishReason.STOP)
    published = await decode.decode(replace(base, sampling=replace(base.sampling, logprobs=3)))
    assert published.tokens == tokens
    assert len(published.logprobs) == len(tokens)
    assert all(
        each.alternatives[0] == (token, each.logprob) for each, token in zip(published.logprobs, tokens, strict=True)
    )
    assert all(len(each.alternatives) == 3 for each in published.logprobs)


@pytest.mark.proves("priority", engine="vllm")
async def test_the_largest_priority_goes_first(make: Make) -> None:
    """Of two waiting requests, the later one with the larger priority runs first."""
    engine = await make("decode", running_requests_max=1)
    blocker = engine.submit(LegTask.GENERATE, greedy(10, tokens=2000))
    await engine.got[blocker].first.wait()
    low = engine.submit(LegTask.GENERATE, greedy(10, seed=1, tokens=30, priority=-5))
    high = engine.submit(LegTask.GENERATE, greedy(10, seed=2, tokens=30, priority=5))
    # Both requests wait now, however late the test received the first one's token.
    await engine.until(lambda load: load.waiting_requests == 2)
    engine.engine.cancel_nowait(blocker)
    for key in (high, low):
        await engine.result(key)
    # The order of the outputs, because this process may receive many at once.
    order = [key for output in engine.outputs for key in output.keys if key in (high, low)]
    assert order.index(low) > order.index(high)


@pytest.mark.parametrize(
    ("generation", "field"),
    [
        (greedy(3000), "generation.token_ids"),
        (greedy(5, token_ids=[99999]), "generation.token_ids"),
        (greedy(5, token_ids=[]), "generation.token_ids"),
        (greedy(5, sampling=SamplingParams(temperature=-1.0)), "generation.sampling.temperature"),
        (greedy(5, sampling=SamplingParams(max_tokens=0)), "generation.sampling.max_tokens"),
        (greedy(5, sampling=SamplingParams(logit_bias=[(99999, 1.0)])), "generation.sampling.logit_bias"),
        (greedy(5, sampling=SamplingParams(stop_token_ids=[99999])), "generation.sampling.stop_token_ids"),
    ],
)
async def test_bad_input_names_its_field(pair: tuple[Drive, Drive], generation: Any, field: str) -> None:
    """Invalid input is rejected before vLLM's scheduler gets it, and the engine continues."""
    with pytest.raises(InvalidRequestError) as caught:
        pair[1].submit(LegTask.GENERATE, generation)
    assert caught.value.field == field
    assert len((await pair[1].decode(greedy(10))).tokens) == 12


async def test_the_compatibility_hash_depends_on_the_weights(
    pair: tuple[Drive, Drive], make: Make, tmp_path: Path
) -> None:
    """Engines with the same model have equal hashes. Other weights of the same shape give another hash."""
    own = {drive.engine.describe().kv_compatibility_hash for drive in pair}
    assert len(own) == 1
    other = await make("decode", model=str(make_model(tmp_path / "other", seed=1)))
    assert other.engine.describe().kv_compatibility_hash not in own


async def test_the_preload_keeps_the_process_safe_to_fork(server: ForkServer, tmp_path: Path) -> None:
    """The process has one thread and has not imported gRPC, which each child imports itself."""
    log = tmp_path / "preloaded.txt"
    async with asyncio.timeout(60):
        assert await server.wait(await server.spawn("tests.integration.vllm_preloaded", log=str(log))) == 0
    assert log.read_text().splitlines()[-1] == "1"


TITLE = "VLLM::Worker"
"""Ranks set it after the imports, before they start the device."""
# On a busy machine one rank may have its title before the other one imports.
MARKS = {"importing": ("multiprocessing.spawn", TITLE), "starting": (TITLE,)}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("stage", ["importing", "starting"])
async def test_ranks_die_with_an_engine_that_is_killed_while_it_starts(
    server: ForkServer, settings: Callable[..., VllmSettings], tmp_path: Path, stage: str
) -> None:
    """The kernel kills a rank with its engine. A rank that still imports vLLM ends before it starts its device."""
    remote = RemoteEngine(server, settings("decode", tensor_parallel_size=2), tmp_path)
    starting = asyncio.create_task(remote.start())
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while len(ranks := ranks_of(remote, MARKS[stage])) < 2:
                assert not starting.done(), starting
                await asyncio.sleep(0.01)
        # Only the kernel can end a stopped process.
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)
        os.kill(remote.pid, signal.SIGKILL)
        if stage == "importing":
            assert await server.wait(child_of(remote)) == -signal.SIGKILL
            for rank in ranks:
                os.kill(rank, signal.SIGCONT)
        async with asyncio.timeout(TIMEOUT_S):
            while any(is_running(rank) for rank in ranks):
                await asyncio.sleep(0.02)
        log = remote.log.read_text(errors="replace")
        assert "WorkerProc" not in log, log
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
        await asyncio.gather(starting, return_exceptions=True)
        await remote.aclose()


def child_of(remote: RemoteEngine) -> ForkedChild:
    assert remote.child is not None
    return remote.child


def ranks_of(remote: RemoteEngine, marks: Sequence[str]) -> list[int]:
    """Returns the rank processes that vLLM has started and whose command has one of the marks."""
    if remote.child is None:
        return []
    return [pid for pid in children_of(remote.pid) if any(mark in command_of(pid) for mark in marks)]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.proves("multi_rank", engine="vllm")
@pytest.mark.slow
@pytest.mark.timeout(500)
async def test_unequal_ranks_exchange_kv_and_die_with_their_engine(pair: tuple[Drive, Drive], make: Make) -> None:
    """Handoffs from one rank to two and from two to one give the same tokens as one engine, with KV that was transferred.

    Tensor-parallel ranks are processes. They end when the engine is killed.
    """
    wide = await make("prefill", tensor_parallel_size=2, pull_timeout_s=FIRST_PULL_S, lease_s=LONG_LEASE_S)
    for role, prefill, decode in ((Role.PREFILL, wide, pair[1]), (Role.DECODE, pair[0], wide)):
        await wide.engine.set_role(role)
        assert len({each.engine.describe().kv_compatibility_hash for each in (prefill, decode)}) == 1
        await connect(prefill, decode)
        for length in (33, 200):
            generation = greedy(length, seed=length)
            await reset(prefill, decode)
            alone = await decode.decode(generation)
            await reset(decode)
            got = await decode.decode(generation, await prefill.prefill(generation))
            assert got.tokens == alone.tokens
            assert len(got.tokens) == 12
            assert got.finish is not None and not got.finish.was_recomputed
            assert got.finish.usage.transferred_tokens > 0
    handle = await wide.prefill(greedy(100))
    assert wide.engine.release_nowait(handle.handle_id)
    await wide.idle(CANCEL_S)
    ranks = children_of(wide.remote.pid)
    assert len(ranks) >= 2
    os.kill(wide.remote.pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        while any(is_running(pid) for pid in ranks):
            await asyncio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.proves("multi_node", engine="vllm")
async def test_ranks_on_two_machines(pair: tuple[Drive, Drive], make: Make, model: Path, tmp_path: Path) -> None:
    """One rank on each of two machines gives the same tokens as one engine. The second machine serves only its metrics. If it dies, the
    engine is lost."""
    address, metrics_port = f"127.0.0.1:{adjacent_free_ports()}", free_ports(1)[0]
    flags = (
        *("--engine", "vllm", "--model", str(model), "--vllm-dtype", "float32"),
        *("--vllm-kv-cache-bytes", str(16 << 20), "--no-vllm-has-kv-transfer", "--vllm-tensor-parallel-size", "2"),
        *("--vllm-nodes", "2", "--vllm-node-rank", "1", "--vllm-nodes-address", address),
        *("--telemetry-metrics-port", str(metrics_port)),
    )
    log = tmp_path / "follower.txt"
    with log.open("wb") as output:
        follower = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.decode", *flags, cwd=ROOT, stdout=output, stderr=output
        )
    try:
        options = {"has_kv_transfer": False, "tensor_parallel_size": 2}
        leader = await make("decode", nodes=2, nodes_address=address, **options)
        for length in (20, 200):
            generation = greedy(length, seed=length)
            assert (await leader.decode(generation)).tokens == (await pair[1].decode(generation)).tokens
        async with ClientSession() as session, session.get(f"http://127.0.0.1:{metrics_port}/metrics") as response:
            assert response.status == 200
        follower.kill()
        async with asyncio.timeout(PATIENCE_S):
            while leader.failure is None:
                await asyncio.sleep(0.02)
        assert isinstance(leader.failure, LostError)
    finally:
        if follower.returncode is None:
            follower.kill()
        await follower.wait()


@pytest.mark.proves("structured_output", "continued_structured_output", engine="vllm")
async def test_structured_output_and_its_refusal(
    make: Make, pair: tuple[Drive, Drive], model: Path, tmp_path: Path
) -> None:
    """With a tokenizer the engine enforces choices and expressions, also in continuations. Without one it rejects constraints."""
    with_tokenizer = add_tokenizer(make_model(tmp_path / "model", context=512))
    engine = await make("decode", model=str(with_tokenizer))
    base = greedy(20)
    for constraint, pattern in (
        (Constraint(kind=ConstraintKind.CHOICE, options=("yes", "no")), r"yes|no"),
        (Constraint(kind=ConstraintKind.REGEX, text="[a-c]{3}x"), r"[a-c]{3}x"),
    ):
        sampling = SamplingParams(temperature=0.0, max_tokens=20, constraint=constraint)
        got = await engine.decode(replace(base, sampling=sampling))
        text = "".join(chr(token - 2) for token in got.tokens if token > 1)
        assert re.fullmatch(pattern, text), text
        assert got.finish is not None
        assert got.finish.reason is FinishReason.STOP
        # The grammar reads the emitted tokens before it constrains the rest.
        for done in range(1, len(text)):
            rest = await engine.decode(replace(base, sampling=sampling, emitted_token_ids=got.tokens[:done]))
            assert got.tokens[:done] + rest.tokens == got.tokens, (text, done)
        foreign = await engine.decode(replace(base, sampling=sampling, emitted_token_ids=[ord("?") + 2]))
        assert foreign.finish is not None and foreign.finish.error is not None
        assert foreign.finish.error.reason == "constraint_unmet"
    bad = replace(base, sampling=SamplingParams(constraint=Constraint(kind=ConstraintKind.REGEX, text="[")))
    with pytest.raises(InvalidRequestError):
        engine.submit(LegTask.GENERATE, bad)
    with pytest.raises(UnsupportedError):
        pair[1].submit(LegTask.GENERATE, bad)
    assert (await engine.decode(base)).tokens


def ranged(count: int, kind: str = "integer") -> Constraint:
    """Returns a schema whose compilation costs about 200 per field."""
    fields = {f"f{i}": {"type": kind, "minimum": -(10**12) + i, "maximum": 10**15 + i} for i in range(count)}
    document = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return Constraint(kind=ConstraintKind.JSON_SCHEMA, text=json.dumps(document))


async def test_costly_constraints_delay_no_other_tokens(make: Make, tmp_path: Path) -> None:
    """Constraints are validated outside the engine's loop, so that other legs continue. A refusal is the leg's finish, and a cancel ends the
    validation."""
    folder = add_tokenizer(make_model(tmp_path / "model", context=2048))
    engine = await make("decode", model=str(folder), grammar_wait_s_max=TIMEOUT_S)
    base = greedy(20)

    def costly(constraint: Constraint, tokens: int) -> int:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, constraint=constraint)
        return engine.submit(LegTask.GENERATE, replace(base, sampling=sampling))

    free = engine.submit(LegTask.GENERATE, greedy(20, tokens=1900))
    await engine.got[free].first.wait()
    before = len(engine.got[free].tokens)
    # Its answer is long, because the validation may end before this process sends the cancel.
    cancelled, allowed, refused = costly(ranged(200), 1900), costly(ranged(60), 8), costly(ranged(60, "nothing"), 8)
    engine.engine.cancel_nowait(cancelled)
    finish = (await engine.result(cancelled)).finish
    assert finish is not None and finish.reason is FinishReason.CANCELLED and finish.error is None
    got = await engine.result(allowed)
    assert got.finish is not None and got.finish.reason is FinishReason.LENGTH
    assert "".join(chr(token - 2) for token in got.tokens).startswith("{")
    assert len(engine.got[free].tokens) > before
    refusal = (await engine.result(refused)).finish
    assert refusal is not None and isinstance(refusal.error, InvalidRequestError)
    assert refusal.error.field == "generation.sampling.constraint"
    # The second time the result is cached.
    again = await engine.result(costly(ranged(60), 8))
    assert again.tokens == got.tokens
    with pytest.raises(InvalidRequestError):
        costly(ranged(60, "nothing"), 8)
    engine.engine.cancel_nowait(free)
    await engine.result(free)


@pytest.mark.proves("embeddings", engine="vllm")
async def test_embeddings_of_a_pooling_model(make: Make, model: Path, tmp_path: Path) -> None:
    """Embeddings are unit vectors, equal for equal tokens. A pooling model does not generate."""
    engine = await make("decode", runner="pooling", has_kv_transfer=False)
    features = engine.engine.describe().capabilities.features
    assert "embeddings" in features and "logprobs" not in features
    prompts = [greedy(length, seed=length) for length in (20, 33, 200, 20)]
    got = [await engine.result(engine.submit(LegTask.EMBED, each)) for each in prompts]
    vectors = [each.finish.embedding for each in got if each.finish is not None]
    assert all(vector is not None and abs(sum(x * x for x in vector) - 1) < 1e-3 for vector in vectors)
    assert vectors[0] == pytest.approx(vectors[3], abs=1e-5)
    assert vectors[0] != pytest.approx(vectors[1], abs=1e-2)
    assert all(each.finish is not None and each.finish.usage.prompt_tokens for each in got)
    with pytest.raises(UnsupportedError):
        engine.submit(LegTask.GENERATE, prompts[0])
    await engine.idle()


async def test_prompt_logprobs(pair: tuple[Drive, Drive]) -> None:
    """Each prompt token from the second on has an entry, also for a cached prompt and for one that takes many steps."""
    decode = pair[1]
    for length in (33, 33, 700):
        generation = greedy(length, seed=4, tokens=2)
        sampling = replace(generation.sampling, prompt_logprobs=2)
        got = await decode.decode(replace(generation, sampling=sampling))
        assert len(got.prompt_logprobs) == length - 1
        assert all(each.logprob <= 0 and len(each.alternatives) == 2 for each in got.prompt_logprobs)
    with pytest.raises(UnsupportedError):
        pair[1].submit(LegTask.EMBED, generation)


async def test_cancel_at_any_moment_leaves_nothing(pair: tuple[Drive, Drive]) -> None:
    """Cancels at random times before, during and after the pull: each leg finishes once, and no block is left."""
    prefill, decode = pair
    random = Random(4)
    await reset(prefill, decode)
    for round_ in range(40):
        generation = greedy(random.choice((20, 100, 400)), seed=300 + round_, tokens=3)
        handle = await prefill.prefill(generation)
        key = decode.submit(LegTask.GENERATE, generation, handle=handle)
        await asyncio.sleep(random.choice((0, 0, 0.001, 0.003, 0.006, 0.01)))
        decode.engine.cancel_nowait(key)
        await decode.result(key, CANCEL_S)
    await decode.idle(CANCEL_S)
    await prefill.idle(CANCEL_S)


async def test_closing_finishes_running_legs(make: Make) -> None:
    """Running legs finish as cancelled, the streams end, and the process exits."""
    engine = await make("decode")
    keys = [engine.submit(LegTask.GENERATE, greedy(10, seed=seed, tokens=2000)) for seed in range(3)]
    await engine.got[keys[0]].first.wait()
    await engine.aclose()
    finishes = [engine.got[key].finish for key in keys]
    assert [finish.reason for finish in finishes if finish] == [FinishReason.CANCELLED] * 3
    assert engine.failure is None
    assert engine.remote.child.exit.result() == 0


@pytest.mark.parametrize(
    ("more", "error", "word"),
    [
        ({"block_size_tokens": 48}, InvalidRequestError, "multiple of 32"),
        ({"engine_arguments": {"no_such_thing": 1}}, InvalidRequestError, "no_such_thing"),
        ({"engine_arguments": {"dtype": "float99"}}, InvalidRequestError, "float99"),
        ({"model": "/no/such/model"}, InvalidRequestError, "/no/such/model"),
        ({"kv_cache_bytes": 1024}, InvalidRequestError, "not enough"),
        ({"side_channel_host": "192.0.2.1"}, UnavailableError, "192.0.2.1"),
        ({"side_channel_port": -1}, UnavailableError, "in use"),
    ],
)
async def test_a_failed_start_names_the_cause(
    make: Make, more: dict[str, Any], error: type[Exception], word: str
) -> None:
    """The start does not hang, and its error names the setting or the value."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        if "side_channel_port" in more:
            more = {"side_channel_port": taken.getsockname()[1]}
        with pytest.raises(error, match=word):
            await make("decode", **more)


@pytest.mark.proves("lora", engine="vllm")
async def test_an_adapter_changes_the_answer_and_its_kv_is_handed_off(make: Make, tmp_path: Path) -> None:
    """With a LoRA adapter on both engines, a handoff gives the adapter's own answer, which differs from the base model's. KV events have
    separate hashes for the adapter. After it is unloaded, it is unknown."""
    source = str(make_adapter(tmp_path / "adapter"))
    options = {"enable_lora": True, "pull_timeout_s": FIRST_PULL_S}
    prefill, decode = await asyncio.gather(make("prefill", **options), make("decode", **options))
    await connect(prefill, decode)
    for drive in (prefill, decode):
        await drive.engine.load_adapter("tuned", source)
        await drive.engine.load_adapter("tuned", source)
    assert decode.engine.describe().model.adapters == ("tuned",)
    base, tuned = greedy(100, seed=31), greedy(100, seed=31, adapter="tuned")
    plain, alone = await decode.decode(base), await decode.decode(tuned)
    assert plain.tokens != alone.tokens
    await wait_published(decode, tuned, seed=seed_hash("tuned"))
    await reset(decode)
    got = await decode.decode(tuned, await prefill.prefill(tuned))
    assert got.tokens == alone.tokens
    assert got.finish is not None
    assert got.finish.usage.transferred_tokens == 100
    running = decode.submit(LegTask.GENERATE, greedy(10, tokens=300, adapter="tuned"))
    await decode.got[running].first.wait()
    await decode.engine.unload_adapter("tuned")
    with pytest.raises(NotFoundError):
        decode.submit(LegTask.GENERATE, tuned)
    assert len((await decode.result(running)).tokens) == 300
    assert (await decode.decode(base)).tokens == plain.tokens
