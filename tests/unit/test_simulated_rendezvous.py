"""The rendezvous handoff of the simulated engine, on one pair of engines: queues, failures, cancellation, retraction."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from kvmesh.clock import SystemClock
from kvmesh.core import FinishReason, Generation, Handoff, LegTask, Rendezvous, Role
from kvmesh.engines.base import EngineRequest
from kvmesh.engines.simulated.blocks import BlockPool
from kvmesh.engines.simulated.constrained_answers import ScriptWriter
from kvmesh.engines.simulated.engine import SimulatedEngine
from kvmesh.engines.simulated.leg_state import SimulatedLeg
from kvmesh.engines.simulated.memory import KvMemory
from kvmesh.engines.simulated.model_card import read_card
from kvmesh.engines.simulated.rendezvous.queues import DecodeQueues
from kvmesh.engines.simulated.rendezvous.wire import FAKE_HOST
from kvmesh.engines.simulated.settings import SimulatedSettings
from kvmesh.engines.simulated.validation import make_leg
from kvmesh.errors import InvalidRequestError, KvLostError, UnsupportedError
from kvmesh.simulation.faulty_engine import Die, FaultyEngine
from kvmesh.simulation.kv_transport import MemoryKvNetwork, MemoryTransport
from kvmesh.simulation.rendezvous import PORT, MemoryRendezvousNetwork, MemoryWire
from tests.conformance.engine_driver import EngineDriver, Record, greedy
from tests.patience import PATIENCE_S
from tests.virtual_loop import run_virtual

ROOMS = count(1)
PATIENT = {"handshake_timeout_s": PATIENCE_S, "pull_timeout_s": PATIENCE_S, "lease_s": 2 * PATIENCE_S}


@dataclass
class Pair:
    """A prefill engine `p`, a decode engine `d`, and one engine that does both, as a reference."""

    prefill: EngineDriver
    decode: EngineDriver
    alone: EngineDriver
    kv: MemoryKvNetwork

    def both(self, generation: Generation, *, port: int = PORT) -> tuple[Record, Record]:
        """Submits both legs."""
        where = Rendezvous(host="p", port=port, room=next(ROOMS))
        decode = self.decode.submit(generation, rendezvous=where)
        return self.prefill.submit(generation, task=LegTask.PREFILL, rendezvous=where), decode

    async def answer(self, generation: Generation) -> Record:
        prefill, decode = self.both(generation)
        assert (await self.prefill.wait(prefill)).done.reason is FinishReason.HANDED_OFF, prefill.done
        assert not prefill.tokens and prefill.done.handle is None
        return await self.decode.wait(decode)

    async def check_free(self) -> None:
        for driver in (self.prefill, self.decode):
            await driver.wait_blocks(0, PATIENCE_S)
            load = driver.engine.load()
            assert (load.bootstrapping_requests, load.sending_requests, load.preallocating_requests) == (0, 0, 0)
            assert (load.receiving_requests, load.retracted_requests, load.running_requests) == (0, 0, 0)
            assert driver.violations == []


Make = Callable[..., Awaitable[Pair]]


@asynccontextmanager
async def pairs() -> AsyncIterator[Make]:
    """Yields a function that starts a pair. Closes all engines at the end."""
    async with AsyncExitStack() as stack:

        async def start(*, decode: dict[str, Any] | None = None, latency_s: float = 0.0, **changes: Any) -> Pair:
            kv = MemoryKvNetwork(clock=SystemClock(), latency_s=latency_s)
            rooms = MemoryRendezvousNetwork(latency_s=latency_s)
            base = {"kv_blocks": 256, "context_tokens_max": 2048, "time_factor": 0.0, **PATIENT, **changes}

            async def engine(role: Role, name: str, **more: Any) -> EngineDriver:
                settings = SimulatedSettings(role=role.value, handoff="rendezvous", **{**base, **more})
                wire = MemoryWire(rooms, name)
                driver = EngineDriver(FaultyEngine(settings, SystemClock(), MemoryTransport(kv), wire=wire), PATIENCE_S)
                stack.push_async_callback(driver.aclose)
                return await driver.start()

            alone = EngineDriver(SimulatedEngine(SimulatedSettings(**base), SystemClock()), PATIENCE_S)
            stack.push_async_callback(alone.aclose)
            return Pair(
                prefill=await engine(Role.PREFILL, "p"),
                decode=await engine(Role.DECODE, "d", **(decode or {})),
                alone=await alone.start(),
                kv=kv,
            )

        yield start


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    async with pairs() as start:
        yield start


def prompt(tokens: int, seed: int = 1) -> list[int]:
    return [(seed * 7919 + 31 * i) % 30_000 for i in range(tokens)]


def ask(tokens: int, seed: int = 1, max_tokens: int = 24, **sampling: Any) -> Generation:
    return greedy("demo", prompt(tokens, seed), max_tokens, **sampling)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 200, 800])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"logprobs": 2}, {"logit_bias": ((7, 100.0),)}, {"temperature": 0.9, "seed": 3}, {"max_tokens": 1}],
)
async def test_a_pair_gives_the_tokens_of_one_engine(make: Make, tokens: int, sampling: dict[str, Any]) -> None:
    """All tokens, including the first, and their log-probabilities are equal. The decode engine computes no prompt."""
    pair = await make()
    wanted = await pair.alone.run(ask(tokens, **sampling))
    for _ in range(2):  # In the second round parts of the prompt are cached on both sides.
        record = await pair.answer(ask(tokens, **sampling))
        assert (record.tokens, record.logprobs) == (wanted.tokens, wanted.logprobs)
        assert record.done.reason is wanted.done.reason
    load = pair.decode.engine.load()
    assert load.prompt_tokens_total == 0 and load.transferred_tokens_total >= tokens
    await pair.check_free()


async def test_usage_and_scores_of_the_prompt(make: Make) -> None:
    """The prefill leg returns the log-probabilities of the prompt. Both legs report the cached tokens of the prefill engine."""
    pair = await make()
    await pair.answer(ask(100))
    prefill, decode = pair.both(ask(100, prompt_logprobs=1))
    await pair.prefill.wait(prefill)
    await pair.decode.wait(decode)
    wanted = await pair.alone.run(ask(100, prompt_logprobs=1))
    assert prefill.prompt_logprobs == wanted.prompt_logprobs and len(prefill.prompt_logprobs) == 99
    assert decode.done.usage.cached_tokens == prefill.done.usage.cached_tokens == 96
    await pair.check_free()


async def test_descriptions_announce_the_rendezvous(make: Make) -> None:
    """The descriptions of both engines have what routers need to pair them."""
    pair = await make()
    prefill, decode = pair.prefill.engine.describe(), pair.decode.engine.describe()
    assert prefill.capabilities.handoffs == decode.capabilities.handoffs == (Handoff.RENDEZVOUS,)
    assert (prefill.rendezvous_address, decode.rendezvous_address) == (f"p:{PORT}", "")
    assert (prefill.requires_prefill, decode.requires_prefill) == (False, True)
    assert prefill.kv_compatibility_hash == decode.kv_compatibility_hash
    assert "embeddings" not in decode.capabilities.features


async def test_invalid_legs_are_refused(make: Make) -> None:
    """Legs beyond the capacity, without a rendezvous or of the other role are refused at submission, by field."""
    pair = await make(kv_blocks=16)
    where = Rendezvous(host="p", port=PORT, room=1)
    for driver, task in ((pair.prefill, LegTask.PREFILL), (pair.decode, LegTask.GENERATE)):
        with pytest.raises(InvalidRequestError) as refused:
            driver.submit(ask(257), task=task, rendezvous=where)
        assert refused.value.field == "generation.token_ids"
        with pytest.raises(InvalidRequestError) as refused:
            driver.submit(ask(20), task=task)
        assert refused.value.field == "rendezvous"
    with pytest.raises(UnsupportedError):
        pair.prefill.submit(ask(20), rendezvous=where)
    with pytest.raises(UnsupportedError):
        pair.decode.submit(ask(20), task=LegTask.EMBED)
    with pytest.raises(UnsupportedError):
        pair.alone.submit(ask(20), rendezvous=where)
    await pair.check_free()


def test_a_leg_without_a_counterpart_times_out() -> None:
    """A single leg, or a pair with a wrong port, ends with KvLostError after `handshake_timeout_s` and frees its blocks. The same engines still
    serve a complete pair within that time."""

    async def main() -> None:
        async with pairs() as make:
            pair = await make(handshake_timeout_s=0.05)
            lonely = pair.decode.submit(ask(100), rendezvous=Rendezvous(host="p", port=PORT, room=next(ROOMS)))
            assert isinstance((await pair.decode.wait(lonely)).done.error, KvLostError)
            where = Rendezvous(host="p", port=PORT, room=next(ROOMS))
            lonely = pair.prefill.submit(ask(100), task=LegTask.PREFILL, rendezvous=where)
            assert isinstance((await pair.prefill.wait(lonely)).done.error, KvLostError)
            prefill, decode = pair.both(ask(100), port=PORT + 1)
            assert isinstance((await pair.decode.wait(decode)).done.error, KvLostError)
            assert isinstance((await pair.prefill.wait(prefill)).done.error, KvLostError)
            await pair.check_free()
            assert (await pair.answer(ask(100))).tokens == (await pair.alone.run(ask(100))).tokens

    run_virtual(main())


async def test_either_leg_may_arrive_late(make: Make) -> None:
    """Within the timeout either leg waits for the other."""
    pair = await make()
    for first in (pair.prefill, pair.decode):
        where = Rendezvous(host="p", port=PORT, room=next(ROOMS))
        task = {pair.prefill.engine: LegTask.PREFILL, pair.decode.engine: LegTask.GENERATE}
        second = pair.decode if first is pair.prefill else pair.prefill
        early = first.submit(ask(50), task=task[first.engine], rendezvous=where)
        for _ in range(20):
            await asyncio.sleep(0)
        late = second.submit(ask(50), task=task[second.engine], rendezvous=where)
        await first.wait(early)
        await second.wait(late)
        assert {early.done.reason, late.done.reason} == {FinishReason.HANDED_OFF, FinishReason.LENGTH}
    await pair.check_free()


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("delays", [0, 1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 30])
async def test_cancellation_in_each_queue(make: Make, side: str, delays: int) -> None:
    """A cancelled leg frees its blocks. Its counterpart ends with KvLostError, unless it already has the KV."""
    pair = await make(latency_s=0.0005, handshake_timeout_s=0.2)
    prefill, decode = pair.both(ask(300, max_tokens=400))
    for _ in range(delays):
        await asyncio.sleep(0.0003)
    driver, record = (pair.prefill, prefill) if side == "prefill" else (pair.decode, decode)
    driver.engine.cancel_nowait(record.key)
    await driver.wait(record)
    other, counterpart = (pair.decode, decode) if side == "prefill" else (pair.prefill, prefill)
    await other.wait(counterpart)
    if record.done.reason is FinishReason.CANCELLED:
        ended = (FinishReason.LENGTH,) if side == "prefill" else (FinishReason.HANDED_OFF,)
        assert counterpart.done.reason in (FinishReason.ERROR, *ended)
        assert counterpart.done.error is None or isinstance(counterpart.done.error, KvLostError)
    await pair.check_free()


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("delays", [0, 2, 4, 6, 8, 12, 16])
async def test_loss_of_an_engine_in_each_queue(make: Make, side: str, delays: int) -> None:
    """A leg whose counterpart's engine died ends with KvLostError or succeeds, and its blocks are free."""
    pair = await make(latency_s=0.0005, handshake_timeout_s=0.3, pull_timeout_s=60.0)
    prefill, decode = pair.both(ask(300, max_tokens=400))
    for _ in range(delays):
        await asyncio.sleep(0.0003)
    dying, other = (pair.prefill, pair.decode) if side == "prefill" else (pair.decode, pair.prefill)
    record = decode if side == "prefill" else prefill
    assert isinstance(dying.engine, FaultyEngine)
    dying.engine.inject(Die())
    await other.wait(record)
    assert record.done.error is None or isinstance(record.done.error, KvLostError)
    await other.wait_blocks(0, PATIENCE_S)


@pytest.mark.parametrize("fault", ["fails_pulls", "hangs_pulls"])
async def test_a_failed_transfer_fails_both_legs(make: Make, fault: str) -> None:
    pair = await make(pull_timeout_s=0.05)
    setattr(pair.kv, fault, True)
    prefill, decode = pair.both(ask(100))
    assert isinstance((await pair.decode.wait(decode)).done.error, KvLostError)
    assert isinstance((await pair.prefill.wait(prefill)).done.error, KvLostError)
    assert not decode.tokens
    await pair.check_free()


async def test_retracted_legs_keep_their_tokens(make: Make) -> None:
    """If the answers exceed the memory, some legs are retracted. Each still has exactly the tokens of an engine with enough memory."""
    pair = await make(decode={"kv_blocks": 40, "reserved_output_tokens": 16}, context_tokens_max=512)
    asked = [ask(60 + 7 * i, seed=i, max_tokens=200, logprobs=1) for i in range(12)]
    legs = [pair.both(generation) for generation in asked]
    for (prefill, decode), generation in zip(legs, asked, strict=True):
        await pair.prefill.wait(prefill)
        await pair.decode.wait(decode)
        wanted = await pair.alone.run(generation)
        assert decode.tokens == wanted.tokens and decode.logprobs == wanted.logprobs
        assert decode.done.usage.output_tokens == 200
    load = pair.decode.engine.load()
    assert load.preempted_requests_total > 0 and load.prompt_tokens_total == 0
    await pair.check_free()


async def test_a_retracted_leg_resumes_and_its_blocks_are_cached_again(make: Make) -> None:
    """The leg is retracted in the step in which the other leg ends, so that no other leg triggers steps. Its restored blocks serve later
    prompts."""
    pair = await make(decode={"kv_blocks": 5, "reserved_output_tokens": 0}, context_tokens_max=64)
    first = replace(ask(31, seed=1, max_tokens=3), priority=1)
    second = ask(31, seed=2, max_tokens=20)
    legs = [pair.both(second), pair.both(first)]
    for _, decode in legs:
        await pair.decode.wait(decode)
    assert pair.decode.engine.load().preempted_requests_total == 1
    assert legs[0][1].tokens == (await pair.alone.run(second)).tokens
    for generation in (second, first):
        record = await pair.answer(generation)
        assert record.tokens == (await pair.alone.run(generation)).tokens
    # Only the last block of the prompt was not cached.
    assert record.done.usage.transferred_tokens < 31
    await pair.check_free()


async def test_a_full_decode_engine_reports_its_queue(make: Make) -> None:
    """Requests that wait for blocks count as `preallocating_requests`. Their prefill legs wait without blocks, and cancelling frees all."""
    # A prompt takes 19 blocks, and 13 more are reserved for its answer.
    pair = await make(decode={"kv_blocks": 52}, context_tokens_max=512, reserved_output_tokens=200, time_factor=1.0)
    legs = [pair.both(ask(300, seed=i, max_tokens=200)) for i in range(4)]
    await pair.decode.wait_tokens(legs[0][1], 2)
    for prefill, decode in legs[1:]:
        assert prefill.finish is None and decode.finish is None
    load = pair.decode.engine.load()
    assert (load.preallocating_requests, load.running_requests, load.waiting_requests) == (3, 1, 0)
    load = pair.prefill.engine.load()
    assert (load.bootstrapping_requests, load.kv_blocks_used, load.waiting_prompt_tokens) == (3, 0, 900)
    for prefill, decode in legs:
        pair.decode.engine.cancel_nowait(decode.key)
        pair.prefill.engine.cancel_nowait(prefill.key)
    for prefill, decode in legs:
        await pair.prefill.wait(prefill)
        await pair.decode.wait(decode)
    await pair.check_free()


async def test_an_incompatible_decode_engine_gets_no_kv(make: Make) -> None:
    """A decode engine of another model revision is refused, even if a router paired it."""
    pair = await make(decode={"revision": "other"})
    prefill, decode = pair.both(ask(100))
    error = (await pair.decode.wait(decode)).done.error
    assert isinstance(error, KvLostError) and error.reason == "rendezvous_refused"
    pair.prefill.engine.cancel_nowait(prefill.key)
    await pair.prefill.wait(prefill)
    await pair.check_free()


async def test_a_fake_transfer_transfers_nothing(make: Make) -> None:
    """Both legs run without a counterpart. The tokens are wrong, which shows that real legs depend on the transferred KV."""
    pair = await make()
    fake = Rendezvous(host=FAKE_HOST, port=1, room=1)
    wanted = await pair.alone.run(ask(100))
    prefill = pair.prefill.submit(ask(100), task=LegTask.PREFILL, rendezvous=fake)
    assert (await pair.prefill.wait(prefill)).done.reason is FinishReason.HANDED_OFF
    decode = await pair.decode.wait(pair.decode.submit(ask(100), rendezvous=fake))
    assert len(decode.tokens) == len(wanted.tokens) and decode.tokens != wanted.tokens
    await pair.check_free()
    assert (await pair.answer(ask(100))).tokens == wanted.tokens


async def test_a_fake_worker_refuses_client_requests() -> None:
    """It announces no handoff, so that no router pairs it."""
    settings = SimulatedSettings(handoff="rendezvous", kv_transport="fake", time_factor=0.0, role="decode")
    driver = await EngineDriver(SimulatedEngine(settings, SystemClock()), PATIENCE_S).start()
    description = driver.engine.describe()
    assert description.capabilities.handoffs == () and description.requires_prefill
    fake = Rendezvous(host=FAKE_HOST, port=1, room=1)
    with pytest.raises(UnsupportedError) as refused:
        driver.submit(ask(10), rendezvous=replace(fake, host="p"))
    assert refused.value.reason == "fake_transfer"
    assert len((await driver.wait(driver.submit(ask(10), rendezvous=fake))).tokens) == 24
    await driver.aclose()


def test_a_restored_leg_has_its_saved_kv_in_new_blocks() -> None:
    """Its named blocks can be reused afterwards, so their content must match their names."""
    settings = SimulatedSettings(kv_blocks=8, context_tokens_max=64)
    request = EngineRequest(
        key=1, leg_id="l", task=LegTask.GENERATE, generation=ask(40), rendezvous=Rendezvous(host="p", port=1, room=1)
    )
    card, token_range = read_card(settings)
    leg = make_leg(request, order=0, settings=settings, card=card, token_range=token_range, writer=ScriptWriter(""))
    pool, memory = BlockPool(8), KvMemory(8, settings.kv_bytes_per_block, 0)
    resumed: list[tuple[SimulatedLeg, int]] = []
    queues = DecodeQueues(
        settings=settings, pool=pool, memory=memory, signals=[], decoding=list, resume=lambda *each: resumed.append(each)
    )  # fmt: skip
    leg.blocks, leg.named_blocks = pool.allocate(3), 2
    memory.write(leg.blocks, [*leg.names, 0], np.array([11, 22, 33], np.uint64))
    pool.name(leg.blocks, 0, leg.names[:2], parent=None)
    queues.retract(leg, 99)
    assert (pool.available, queues.retracted) == (8, 1)
    pool.evict_idle()
    others = pool.allocate(5)
    memory.write(list(range(8)), [0] * 8, np.zeros(8, np.uint64))
    assert queues.allocate() and resumed == [(leg, 99)]
    assert memory.read_parts(leg.blocks[:2]).tolist() == [11, 22]
    assert memory.guards(leg.blocks[:2])[0].tolist() == leg.names
    assert pool.match(leg.names) == leg.blocks[:2] and not set(others) & set(leg.blocks)
