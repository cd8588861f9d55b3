"""The loop of the simulated engine: pace, backpressure, faults, model card."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvmesh.clock import Clock, SystemClock
from kvmesh.core import FinishReason, LegTask, Role
from kvmesh.engines.simulated.engine import SimulatedEngine
from kvmesh.engines.simulated.leases import Lease
from kvmesh.engines.simulated.model_card import read_card, widest_gap
from kvmesh.engines.simulated.settings import SimulatedSettings, StepProfile
from kvmesh.errors import InvalidRequestError, LostError, NotFoundError, OverloadedError, UnavailableError
from kvmesh.kv.transport import Piece
from kvmesh.simulation.faulty_engine import Die, FaultyEngine, LoseKv, Refuse, Stall
from kvmesh.simulation.kv_transport import MemoryKvNetwork, MemoryTransport
from services.simulation.ledger import expected_tokens
from tests.conformance.engine_driver import EngineDriver, greedy
from tests.conformance.manual_clock import ManualClock
from tests.patience import PATIENCE_S

Start = Callable[..., Awaitable[EngineDriver]]


class SteppedClock:
    """A clock that only sleeps advance. It records each sleep."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.sleeps: list[float] = []

    def now(self) -> float:
        return self.time_s

    def wall(self) -> float:
        return self.time_s

    async def sleep(self, delay_s: float) -> None:
        self.sleeps.append(delay_s)
        self.time_s += delay_s
        await asyncio.sleep(0)


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    drivers: list[EngineDriver] = []
    network = MemoryKvNetwork(clock=SystemClock())

    async def make(clock: Clock | None = None, **changes: Any) -> EngineDriver:
        patient = {"pull_timeout_s": PATIENCE_S, "lease_s": 2 * PATIENCE_S}
        sizes = {"kv_blocks": 256, "context_tokens_max": 2048}
        settings = SimulatedSettings(**{**patient, **sizes, "time_factor": 0.0, **changes})
        engine = FaultyEngine(settings, clock or SystemClock(), MemoryTransport(network), fault_seed=3)
        drivers.append(EngineDriver(engine, PATIENCE_S))
        return await drivers[-1].start()

    yield make
    for driver in drivers:
        await driver.aclose()


def engine_of(driver: EngineDriver) -> FaultyEngine:
    assert isinstance(driver.engine, FaultyEngine)
    return driver.engine


class TestPace:
    async def test_step_times_follow_the_profile(self, start: Start, clock: SteppedClock) -> None:
        """A step takes the base time plus the time per prompt token or per decoding request, scaled by the factor."""
        profile = StepProfile(base_s=1.0, per_prefill_token_s=0.5, per_decode_request_s=0.25)
        driver = await start(clock, profile=profile, time_factor=2.0)
        await driver.run(greedy("demo", [5] * 10, 3))
        assert clock.sleeps[:3] == [2 * (1 + 5), 2 * 1.25, 2 * 1.25]

    async def test_prompts_and_attention_take_time(self, start: Start, clock: SteppedClock) -> None:
        """A prompt of 10 tokens in one step takes its fixed times and the time of 50 pairs of a token and an earlier one."""
        profile = StepProfile(
            base_s=1.0,
            per_prefill_token_s=0.5,
            per_decode_request_s=0.0,
            per_prompt_s=0.25,
            per_prefill_step_s=2.0,
            per_token_pair_s=0.125,
        )
        driver = await start(clock, profile=profile, time_factor=1.0)
        await driver.run(greedy("demo", [5] * 10, 2))
        assert clock.sleeps[:2] == [1 + 10 * 0.5 + 0.25 + 2.0 + 50 * 0.125, 1.0]

    @pytest.mark.parametrize(("event_loop", "ends_at_s"), [("normal", 4 * 3.0), ("overlap", 4 * 2.0 + 1.0)])
    async def test_results_are_processed_after_a_step_or_during_the_next(
        self, start: Start, clock: SteppedClock, event_loop: str, ends_at_s: float
    ) -> None:
        """With steps of 2 s and a processing time of 1 s, overlapping steps wait only for the processing of the last one."""
        profile = StepProfile(base_s=2.0, per_prefill_token_s=0.0, per_decode_request_s=0.0)
        driver = await start(clock, profile=profile, time_factor=1.0, event_loop=event_loop, processing_s=1.0)
        generation = greedy("demo", [5] * 10, 4)
        assert (await driver.run(generation)).tokens == expected_tokens(generation, engine_of(driver).token_range, 4)
        assert clock.time_s == ends_at_s

    async def test_a_cancellation_is_answered_with_the_running_step(self, start: Start) -> None:
        """The output of a step contains the finishes of cancellations during the step. Blocks are free at once."""
        clock = ManualClock()
        driver = await start(clock, time_factor=1.0, profile=StepProfile(base_s=1.0, per_prefill_token_s=0.0))
        kept, dropped = (driver.submit(greedy("demo", [token] * 20, 50)) for token in (5, 6))
        await clock.advance(0.5)
        driver.engine.cancel_nowait(dropped.key)
        assert driver.engine.load().kv_blocks_used == 2
        await clock.advance(0.6)
        assert dropped.done.reason is FinishReason.CANCELLED
        assert len(dropped.tokens) == len(kept.tokens) == 1
        assert driver.violations == []
        driver.engine.cancel_nowait(kept.key)
        await clock.advance(1.0)
        assert kept.done.reason is FinishReason.CANCELLED

    async def test_unaccounted_blocks_are_counted(self, start: Start, clock: SteppedClock) -> None:
        """A leaked block, which is neither free nor held, counts 1. A block that is both free and held counts -1."""
        driver = await start(clock)
        await driver.run(greedy("demo", [5] * 40, 3))
        load = driver.engine.load()
        assert (load.kv_blocks_unaccounted, load.kv_blocks_held) == (0, 0) and load.kv_blocks_cached > 0
        assert isinstance(driver.engine, FaultyEngine)
        pool = driver.engine.scheduler.pool
        leaked = pool.allocate(3)
        clock.time_s += 2.0
        assert driver.engine.load().kv_blocks_unaccounted == 3
        pool.drop(leaked)
        driver.engine.scheduler.leases._leases["handle"] = Lease(leaked[:2], 1e9)
        assert driver.engine.load().kv_blocks_unaccounted == -2

    async def test_factor_zero_never_sleeps(self, start: Start, clock: SteppedClock) -> None:
        """No time passes on the clock of an engine that runs as fast as possible."""
        driver = await start(clock)
        records = [driver.submit(greedy("demo", [i + 3] * 50, 40)) for i in range(20)]
        for record in records:
            await driver.wait(record)
        assert clock.sleeps == []

    async def test_other_tasks_run_at_factor_zero(self, start: Start) -> None:
        """Another task runs between two steps."""
        driver = await start()
        record = driver.submit(greedy("demo", [5], 300))
        iterations = 0
        while record.finish is None:
            iterations += 1
            await asyncio.sleep(0)
        assert iterations >= 300

    async def test_an_idle_engine_makes_no_steps(self, start: Start) -> None:
        """Also with a lease outstanding and a request that cannot run yet, the engine makes no steps."""
        driver = await start(kv_blocks=4, context_tokens_max=64, lease_s=1000.0)
        handle = await driver.prefill(greedy("demo", [5] * 60))
        blocked = driver.submit(greedy("demo", [6] * 20, 2))
        for _ in range(5):
            await asyncio.sleep(0)
        before = driver.engine.load().step
        for _ in range(50):
            await asyncio.sleep(0)
        assert driver.engine.load().step == before
        driver.engine.release_nowait(handle.handle_id)
        assert (await driver.wait(blocked)).done.reason is FinishReason.LENGTH

    async def test_a_slow_consumer_pauses_the_engine(self) -> None:
        """The buffer between engine and consumer is bounded, and no output is lost when the consumer resumes."""
        settings = SimulatedSettings(output_buffer_steps=4, time_factor=0.0)
        engine = SimulatedEngine(settings, SystemClock())
        driver = EngineDriver(engine, PATIENCE_S)
        await engine.start()
        record = driver.submit(greedy("demo", [5], 50))
        for _ in range(100):
            await asyncio.sleep(0)
        assert engine.load().output_tokens_total == settings.output_buffer_steps
        reader = asyncio.create_task(driver._read_steps())
        assert len((await driver.wait(record)).tokens) == 50
        await engine.aclose()
        await reader


class TestClose:
    @pytest.mark.parametrize("ends", ["cancelled", "pulled"])
    async def test_pending_releases_are_sent_at_close(self, start: Start, ends: str) -> None:
        """A closing engine releases the handles that it will not pull again, so that their blocks do not stay leased until the lease expires."""
        source = await start(role="prefill", lease_s=1000.0)
        target = await start()
        generation = greedy("demo", [5] * 60, 4)
        handle = await source.prefill(generation)
        record = target.submit(generation, handle=handle)
        if ends == "pulled":
            await target.wait(record)
        else:
            target.engine.cancel_nowait(record.key)
            assert source.engine.load().kv_blocks_leased
        await target.engine.aclose()
        assert not source.engine.load().kv_blocks_leased


class TestSleep:
    async def test_sleeping_requests_pause_and_can_be_cancelled(self, start: Start) -> None:
        """A sleeping engine computes nothing and answers cancellations. After waking the remaining request continues with the right tokens."""
        driver = await start()
        kept, dropped = (driver.submit(greedy("demo", [token] * 20, 200)) for token in (5, 6))
        await driver.wait_tokens(kept, 3)
        await driver.engine.sleep(1)
        driver.engine.cancel_nowait(dropped.key)
        assert (await driver.wait(dropped)).done.reason is FinishReason.CANCELLED
        count = len(kept.tokens)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(kept.tokens) == count < 200
        await driver.engine.wake()
        expected = expected_tokens(greedy("demo", [5] * 20), engine_of(driver).token_range, 200)
        assert (await driver.wait(kept)).tokens == expected


class TestEvents:
    async def test_a_slow_reader_gets_a_snapshot(self) -> None:
        """When the buffer of events overflows, the replayed events still give the content of the cache."""
        settings = SimulatedSettings(kv_event_buffer_blocks=8, kv_blocks=64, context_tokens_max=1000, time_factor=0.0)
        engine = SimulatedEngine(settings, SystemClock())
        driver = EngineDriver(engine, PATIENCE_S)
        await engine.start()
        reader = asyncio.create_task(driver._read_steps())
        for first in range(3, 400):
            await driver.run(greedy("demo", [first] * 100, 2))
        # A snapshot has at most an event for each block, and at most eight blocks changed since.
        assert len(engine._events._events) <= 1 + 64 + 8
        events = asyncio.create_task(driver._read_events())
        await engine.aclose()
        await asyncio.gather(reader, events)
        assert driver.cached == engine.scheduler.pool.cached_names()
        assert driver.violations == []


class TestFaults:
    async def test_a_stall_delays_the_next_step(self, start: Start, clock: SteppedClock) -> None:
        driver = await start(clock)
        engine_of(driver).inject(Stall(duration_s=7.0))
        await driver.run(greedy("demo", [5], 3))
        assert clock.sleeps == [7.0]

    async def test_refusals_are_drawn_from_the_seed(self, start: Start) -> None:
        """About the given fraction is refused, the same requests for the same seed, and none after the fault ends."""
        outcomes = []
        for _ in range(2):
            driver = await start(waiting_requests_max=1000)
            engine_of(driver).inject(Refuse(fraction=0.3))
            refused = []
            for i in range(200):
                try:
                    driver.submit(greedy("demo", [5], 1))
                except OverloadedError:
                    refused.append(i)
            outcomes.append(refused)
            engine_of(driver).inject(Refuse(fraction=0.0))
            driver.submit(greedy("demo", [5], 1))
        assert outcomes[0] == outcomes[1]
        assert 30 < len(outcomes[0]) < 90

    async def test_lost_kv_is_recomputed(self, start: Start) -> None:
        """If the blocks of a valid handle are lost, the tokens are still right. The next handle works again."""
        prefill, decode = await start(role="prefill"), await start()
        engine_of(prefill).inject(LoseKv(handles=1))
        for is_lost in (True, False):
            generation = greedy("demo", [5 + is_lost] * 100)
            record = await decode.run(generation, handle=await prefill.prefill(generation))
            assert record.done.was_recomputed is is_lost
            assert record.tokens == expected_tokens(generation, engine_of(decode).token_range, 12)
            await prefill.wait_blocks(0, PATIENCE_S)

    async def test_the_death_of_an_engine_is_reported(self, start: Start) -> None:
        """The consumer gets LostError, submissions are refused, and the engine's KV can no longer be read."""
        prefill, decode = await start(role="prefill"), await start()
        generation = greedy("demo", [5] * 100)
        handle = await prefill.prefill(generation)
        prefill.submit(greedy("demo", [6] * 100), task=LegTask.PREFILL)
        engine_of(prefill).inject(Die())
        async with asyncio.timeout(PATIENCE_S):
            while prefill.error is None:
                await asyncio.sleep(0)
        assert isinstance(prefill.error, LostError)
        with pytest.raises(UnavailableError):
            prefill.submit(generation)
        record = await decode.run(generation, handle=handle)
        assert record.done.was_recomputed

    async def test_a_hanging_pull_is_abandoned(self, start: Start) -> None:
        """After its deadline the prompt is computed."""
        prefill, decode = await start(role="prefill"), await start(pull_timeout_s=0.02)
        generation = greedy("demo", [5] * 100)
        handle = await prefill.prefill(generation)
        transport = engine_of(decode)._transport
        assert isinstance(transport, MemoryTransport)
        transport._network.hangs_pulls = True
        record = await decode.run(generation, handle=handle)
        assert record.done.was_recomputed
        assert record.tokens == expected_tokens(generation, engine_of(decode).token_range, 12)

    async def test_an_unexpected_error_of_a_pull_ends_the_engine(self, start: Start) -> None:
        """Otherwise the request would wait forever, and its blocks would leak."""
        prefill = await start(role="prefill")
        settings = replace(engine_of(prefill).settings, role="decode")
        engine = SimulatedEngine(settings, SystemClock(), _BrokenTransport(MemoryKvNetwork(clock=SystemClock())))
        decode = await EngineDriver(engine, PATIENCE_S).start()
        generation = greedy("demo", [5] * 100)
        decode.submit(generation, handle=await prefill.prefill(generation))
        async with asyncio.timeout(PATIENCE_S):
            while decode.error is None:
                await asyncio.sleep(0)
        assert isinstance(decode.error, LostError)
        await decode.aclose()


class _BrokenTransport(MemoryTransport):
    """A transport whose pulls raise an unexpected error."""

    async def _pull(self, peer: bytes, pieces: Sequence[Piece], timeout_s: float) -> None:
        raise RuntimeError("a defect")


class TestSettings:
    def test_the_card_is_read_from_a_model_directory(self, tmp_path: Path) -> None:
        """The sizes, the end-of-sequence tokens and the widest range of ordinary ids come from the files."""
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100, "max_position_embeddings": 64}))
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
        (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": i} for i in (0, 1, 2, 98, 99)]}))
        card, token_range = read_card(SimulatedSettings(model_dir=str(tmp_path)))
        assert (card.vocabulary_size, card.context_tokens_max, card.eos_token_ids) == (100, 64, (2, 0))
        assert (token_range.first_id, token_range.span) == (3, 95)

    def test_a_missing_model_directory_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(NotFoundError):
            read_card(SimulatedSettings(model_dir=str(tmp_path)))

    def test_the_token_range_excludes_eos(self) -> None:
        """A vocabulary with only the end-of-sequence token is refused."""
        with pytest.raises(InvalidRequestError):
            read_card(SimulatedSettings(vocabulary_size=1, eos_token_id=0))
        assert widest_gap({2, 9}, 10) == (3, 6)

    async def test_an_engine_without_a_transport_announces_no_handoff(self) -> None:
        """It has the decode role only."""
        engine = SimulatedEngine(SimulatedSettings(), SystemClock())
        assert engine.describe().capabilities.handoffs == ()
        assert engine.describe().capabilities.roles == (Role.DECODE,)
