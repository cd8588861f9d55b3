"""What every engine guarantees (`kvmesh.engines.base`), on each engine that can run here.

The reference for tokens is an engine of the same kind that runs alone and computes the prompt itself.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from kvmesh.core import FinishReason, Generation, KvHandle, LegTask, Role
from kvmesh.errors import (
    InvalidRequestError,
    KvLostError,
    MeshError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
    UnsupportedError,
)
from kvmesh.kv.blocks import block_hashes, seed_hash
from tests.conformance.engine_cases import CASES, Fleet
from tests.conformance.engine_driver import EngineDriver, Record

pytestmark = pytest.mark.asyncio(loop_scope="module")
ACCOUNTING = ("simulated", "vllm")
"""Engines that count the blocks of their requests and handles."""
LONG_ANSWER = 1200
"""Length of answers that tests cancel. On a busy machine an engine may run ahead until its output buffer is full (256 steps of vLLM)."""
SINGLE_TOKENS: list[dict[str, Any]] = [
    {},
    {"logprobs": 3},
    {"logit_bias": ((7, 100.0),)},
    {"temperature": 0.9, "seed": 11, "top_k": 40, "top_p": 0.9},
    {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5},
]

CONTINUED: list[tuple[str, dict[str, Any]]] = [
    ("continuation", {"logprobs": 3}),
    ("continuation", {"logit_bias": ((7, 5.0), (9, 5.0))}),
    ("continuation", {"min_tokens": 12, "stop_token_ids": tuple(range(3, 99, 2))}),
    ("continued_penalties", {"presence_penalty": 1.0, "frequency_penalty": 1.5}),
    ("continued_penalties", {"repetition_penalty": 1.5, "presence_penalty": 0.5}),
    ("continued_seed", {"temperature": 1.0, "seed": 11, "top_p": 0.9}),
]
"""The feature that each case needs, and sampling whose next token depends on the number and values of the previous output tokens."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=CASES)
async def fleet(request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        yield await Fleet.start(request.param, stack)


@pytest.fixture(autouse=True)
def ordering_rules(fleet: Fleet) -> AsyncIterator[None]:
    """Checks invariants 1 and 2 after every test: one finish per leg, no token after it, and no output for keys that are not live."""
    yield
    fleet.check()


async def read_or_refused(driver: EngineDriver, generation: Generation, handle: KvHandle) -> Record | None:
    """Runs a request with a handle. Returns None if the engine refused to read it."""
    try:
        record = driver.submit(generation, handle=handle)
    except KvLostError:
        return None
    await driver.wait(record)
    if record.done.reason is FinishReason.ERROR:
        assert isinstance(record.done.error, KvLostError)
        return None
    return record


async def recomputed_or_refused(driver: EngineDriver, generation: Generation, handle: KvHandle) -> Record | None:
    """Accepts both ways in which invariant 4 allows an engine not to read a handle. Returns the record if it recomputed the prompt, else
    None."""
    record = await read_or_refused(driver, generation, handle)
    if record is not None:
        assert record.done.was_recomputed
        assert record.done.usage.transferred_tokens == 0
    return record


def skip_rendezvous(fleet: Fleet, reason: str) -> None:
    if fleet.is_rendezvous:
        pytest.skip(f"rendezvous handoff: {reason}")


class TestTokens:
    @pytest.mark.proves("disaggregation")
    @pytest.mark.parametrize("blocks", [0.1, 1, 1.5, 3, 9.3])
    async def test_handed_off_prompt_gives_the_same_tokens(self, fleet: Fleet, blocks: float) -> None:
        """Greedy output is the same with a prompt computed locally and with one computed by another engine."""
        generation = fleet.greedy(blocks)
        expected = await fleet.alone.run(generation)
        record = await fleet.hand_over(generation)
        assert record.tokens == expected.tokens
        assert len(record.tokens) == 12
        assert record.done.reason is FinishReason.LENGTH
        assert not record.done.was_recomputed
        assert record.done.usage.transferred_tokens > 0

    @pytest.mark.proves("continuation")
    async def test_continuation_gives_the_same_tokens(self, fleet: Fleet) -> None:
        """With tokens emitted by another engine, the engine returns only the rest, and `max_tokens` counts the whole answer."""
        generation = fleet.greedy(2.4, max_tokens=20)
        whole = (await fleet.alone.run(generation)).tokens
        for done in (1, 7, 19):
            rest = replace(generation, emitted_token_ids=whole[:done])
            assert (await fleet.answer(rest)).tokens == whole[done:]

    @pytest.mark.parametrize(
        ("feature", "sampling"),
        [
            pytest.param(feature, sampling, marks=pytest.mark.proves(feature), id=f"{feature}-{'-'.join(sampling)}")
            for feature, sampling in CONTINUED
        ],
    )
    async def test_a_continuation_depends_on_all_output(
        self, fleet: Fleet, feature: str, sampling: dict[str, Any]
    ) -> None:
        """Emitted tokens count as output, on an engine that computes the prompt and on one that pulls it.

        An engine without the feature refuses the leg and names the field.
        """
        for name in sampling:
            if reason := fleet.case.uncontinued.get(name):
                pytest.skip(reason)
        generation = fleet.greedy(2.4, max_tokens=24, **sampling)
        whole = await fleet.alone.run(generation)
        rest = [replace(generation, emitted_token_ids=whole.tokens[:done]) for done in (1, 9, len(whole.tokens) - 1)]
        if feature not in fleet.decode.engine.describe().capabilities.features and feature != "continuation":
            with pytest.raises(UnsupportedError) as caught:
                fleet.alone.submit(rest[1])
            assert caught.value.field.removeprefix("generation.sampling.") in sampling
            return
        for each in rest:
            done = len(each.emitted_token_ids)
            for record in (await fleet.answer(each), await fleet.hand_over(each)):
                assert record.tokens == whole.tokens[done:], done
                assert len(record.logprobs) == len(whole.logprobs[done:])
                for entry, expected in zip(record.logprobs, whole.logprobs[done:], strict=True):
                    # The kernels for prompts and for single tokens sum in different orders.
                    assert entry.logprob == pytest.approx(expected.logprob, abs=1e-3)
                    assert [i for i, _ in entry.alternatives] == [i for i, _ in expected.alternatives]
                assert record.done.reason is whole.done.reason

    async def test_continuation_by_handoff_gives_the_same_tokens(self, fleet: Fleet) -> None:
        """Both legs of a continuation use the emitted tokens."""
        generation = fleet.greedy(2.4, max_tokens=20)
        whole = (await fleet.alone.run(generation)).tokens
        rest = replace(generation, emitted_token_ids=whole[:9])
        record = await fleet.hand_over(rest)
        assert record.tokens == whole[9:]
        assert not record.done.was_recomputed

    async def test_many_at_once(self, fleet: Fleet) -> None:
        """With more requests than the engine runs concurrently, some of them handed off, each gives the same tokens as alone."""
        generations = [fleet.greedy(0.3 + 0.7 * i, max_tokens=3 + 2 * i) for i in range(12)]
        expected = [(await fleet.alone.run(generation)).tokens for generation in generations]
        records = await asyncio.gather(
            *(fleet.answer(each) if i % 2 else fleet.hand_over(each) for i, each in enumerate(generations))
        )
        assert [record.tokens for record in records] == expected

    async def test_max_tokens_one(self, fleet: Fleet) -> None:
        """A request for one token gets one token and a finish."""
        record = await fleet.alone.run(fleet.greedy(1.2, max_tokens=1))
        assert len(record.tokens) == 1
        assert record.done.reason is FinishReason.LENGTH
        assert record.done.usage.output_tokens == 1

    @pytest.mark.parametrize("sampling", SINGLE_TOKENS, ids=lambda sampling: "-".join(sampling) or "greedy")
    async def test_a_prefill_engine_answers_a_single_token(self, fleet: Fleet, sampling: dict[str, Any]) -> None:
        """A prefill engine gives the same single token as both legs do. It leaves no lease and no used block, and caches the prompt."""
        skip_rendezvous(fleet, "its prefill engines do not generate")
        generation = fleet.greedy(2.4, max_tokens=1, **sampling)
        record = await fleet.prefill.run(generation)
        legs = await fleet.decode.run(generation, handle=await fleet.prefill.prefill(generation))
        assert record.tokens == legs.tokens and len(record.tokens) == 1
        assert record.done.reason is legs.done.reason is FinishReason.LENGTH
        assert record.done.usage.output_tokens == 1 and record.done.usage.cached_tokens == 0
        assert record.done.queue_s >= 0 and record.done.handle is None
        for entry, other in zip(record.logprobs, legs.logprobs, strict=True):
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert [token for token, _ in entry.alternatives] == [token for token, _ in other.alternatives]
        again = await fleet.prefill.run(generation)
        assert again.tokens == record.tokens and again.done.usage.cached_tokens >= fleet.block_size
        await fleet.prefill.wait_blocks(0, fleet.case.free_s)
        assert fleet.prefill.engine.load().kv_blocks_leased == 0

    async def test_a_single_token_may_be_a_stop_token(self, fleet: Fleet) -> None:
        """The finish names the stop token, unless `min_tokens` forbids it."""
        skip_rendezvous(fleet, "its prefill engines do not generate")
        generation = fleet.greedy(1.3, max_tokens=1)
        token_id = (await fleet.prefill.run(generation)).tokens[0]
        for min_tokens, reason in ((0, FinishReason.STOP), (1, FinishReason.LENGTH)):
            sampling = replace(generation.sampling, stop_token_ids=(token_id,), min_tokens=min_tokens)
            stopping = replace(generation, sampling=sampling)
            record = await fleet.prefill.run(stopping)
            legs = await fleet.decode.run(stopping, handle=await fleet.prefill.prefill(stopping))
            assert record.tokens == legs.tokens
            assert record.done.reason is legs.done.reason is reason
            assert record.done.stop_token_id == legs.done.stop_token_id == (None if min_tokens else token_id)

    async def test_the_token_after_emitted_ones(self, fleet: Fleet) -> None:
        """A prefill engine answers a continuation that lacks only one token."""
        skip_rendezvous(fleet, "its prefill engines do not generate")
        generation = fleet.greedy(2.4, max_tokens=8)
        whole = (await fleet.alone.run(generation)).tokens
        assert (await fleet.prefill.run(replace(generation, emitted_token_ids=whole[:7]))).tokens == whole[7:]

    async def test_stop_token_ends_the_answer(self, fleet: Fleet) -> None:
        """The answer ends with the first stop token, and the finish names it."""
        generation = fleet.greedy(1.3, max_tokens=16)
        whole = (await fleet.alone.run(generation)).tokens
        stop = whole[5]
        sampling = replace(generation.sampling, stop_token_ids=(stop,))
        record = await fleet.alone.run(replace(generation, sampling=sampling))
        assert record.done.reason is FinishReason.STOP
        assert record.done.stop_token_id == stop
        assert record.tokens == whole[: whole.index(stop) + 1]

    async def test_min_tokens_delays_stop_tokens(self, fleet: Fleet) -> None:
        """No stop token ends an answer before `min_tokens`."""
        generation = fleet.greedy(1.3, max_tokens=16)
        stop = (await fleet.alone.run(generation)).tokens[2]
        sampling = replace(generation.sampling, stop_token_ids=(stop,), min_tokens=9)
        record = await fleet.alone.run(replace(generation, sampling=sampling))
        assert len(record.tokens) >= 9

    @pytest.mark.proves("logprobs")
    async def test_logprobs(self, fleet: Fleet) -> None:
        """Each token has a log-probability, with the requested number of alternatives, the best first. Without the parameter there are none."""
        asked = await fleet.alone.run(fleet.greedy(1.3, max_tokens=6, logprobs=3))
        assert len(asked.logprobs) == len(asked.tokens) == 6
        for token, logprob in zip(asked.tokens, asked.logprobs, strict=True):
            assert logprob.logprob <= 0
            values = [value for _, value in logprob.alternatives]
            assert len(values) == 3
            assert values == sorted(values, reverse=True)
            assert logprob.alternatives[0][0] == token, "greedy takes the best"
        assert (await fleet.alone.run(fleet.greedy(1.3))).logprobs == []

    @pytest.mark.proves("prompt_logprobs")
    async def test_prompt_logprobs(self, fleet: Fleet) -> None:
        """Each prompt token from the second on has an entry before the first output token. A cached prompt gets the same entries, and a
        continuation none."""
        generation = fleet.greedy(3.4, max_tokens=3, prompt_logprobs=2)
        first, again = await fleet.alone.run(generation), await fleet.alone.run(generation)
        assert len(first.prompt_logprobs) == len(generation.token_ids) - 1
        for entry, other in zip(first.prompt_logprobs, again.prompt_logprobs, strict=True):
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-3) and entry.logprob <= 0
            assert len(entry.alternatives) == 2
        continued = await fleet.alone.run(replace(generation, emitted_token_ids=first.tokens[:1]))
        assert continued.tokens == first.tokens[1:] and continued.prompt_logprobs == []

    @pytest.mark.proves("embeddings")
    async def test_embeddings(self, fleet: Fleet) -> None:
        """Embeddings are unit vectors, the same for the same tokens. Engines without them refuse the leg."""
        generation = fleet.greedy(2.5)
        if "embeddings" not in fleet.alone.engine.describe().capabilities.features:
            with pytest.raises(UnsupportedError):
                fleet.alone.submit(generation, task=LegTask.EMBED)
            pytest.skip("refused: such a run proves no embeddings")
        records = [fleet.alone.submit(each, task=LegTask.EMBED) for each in (generation, fleet.greedy(2.5), generation)]
        vectors = [(await fleet.alone.wait(record)).done.embedding for record in records]
        for vector in vectors:
            assert vector is not None and sum(x * x for x in vector) == pytest.approx(1, abs=1e-4)
        assert vectors[0] == vectors[2] != vectors[1]
        assert all(record.tokens == [] for record in records)


class TestUsage:
    async def test_usage_of_a_local_prompt(self, fleet: Fleet) -> None:
        """Usage counts prompt and output tokens. When the request repeats, full blocks come from the cache."""
        generation = fleet.greedy(4.5)
        first = (await fleet.alone.run(generation)).done.usage
        again = (await fleet.alone.run(generation)).done.usage
        assert first.prompt_tokens == again.prompt_tokens == len(generation.token_ids)
        assert first.output_tokens == again.output_tokens == 12
        assert first.cached_tokens == 0
        assert again.cached_tokens == 4 * fleet.block_size
        assert first.transferred_tokens == again.transferred_tokens == 0

    async def test_load_counts_completed_work(self, fleet: Fleet) -> None:
        """A request increases the totals of the load record by its usage, and nothing runs or waits afterwards."""
        generation = fleet.greedy(3.5)
        # A leg of an earlier test may still be in transfer.
        await fleet.decode.wait_blocks(0, fleet.case.free_s)
        before = fleet.decode.engine.load()
        record = await fleet.hand_over(generation)
        await fleet.decode.wait_blocks(0, fleet.case.free_s)
        after = fleet.decode.engine.load()
        assert after.output_tokens_total - before.output_tokens_total == 12
        assert after.transferred_tokens_total - before.transferred_tokens_total == record.done.usage.transferred_tokens
        assert after.running_requests == after.waiting_requests == after.waiting_prompt_tokens == 0
        assert after.step > before.step

    async def test_description(self, fleet: Fleet) -> None:
        """Engines of one kind are compatible, and the description agrees with the load record."""
        prefill, decode = fleet.prefill.engine.describe(), fleet.decode.engine.describe()
        assert prefill.kv_compatibility_hash == decode.kv_compatibility_hash != ""
        assert (prefill.role, decode.role) == (Role.PREFILL, Role.DECODE)
        assert prefill.block_size_tokens == decode.block_size_tokens > 0
        load = fleet.decode.engine.load()
        assert load.kv_blocks_total == decode.kv_blocks_total > 0


class TestCache:
    @pytest.mark.proves("kv_events")
    async def test_events_name_the_prompt_by_mesh_hashes(self, fleet: Fleet) -> None:
        """Invariant 6: the replayed events contain the prompt's full blocks under the hashes that frontends compute."""
        plain = fleet.greedy(3.5)
        salted = replace(fleet.greedy(2.5), cache_salt="tenant")
        await fleet.alone.run(plain)
        await fleet.alone.run(salted)
        size = fleet.block_size
        await fleet.alone.wait_cached(block_hashes(plain.token_ids, size))
        await fleet.alone.wait_cached(block_hashes(salted.token_ids, size, seed=seed_hash("", "tenant")))
        assert not fleet.alone.cached & set(block_hashes(salted.token_ids, size))

    @pytest.mark.proves("tenant_salt")
    async def test_salt_separates_tenants(self, fleet: Fleet) -> None:
        """A tenant does not use another tenant's cached blocks, and gets the same tokens."""
        generation = fleet.greedy(3.5)
        first = await fleet.alone.run(replace(generation, cache_salt="a"))
        other = await fleet.alone.run(replace(generation, cache_salt="b"))
        assert other.done.usage.cached_tokens == 0
        assert other.tokens == first.tokens

    async def test_pulled_blocks_are_cached_on_the_reader(self, fleet: Fleet) -> None:
        """Invariant 6 for blocks that were pulled from another engine."""
        generation = fleet.greedy(3.5)
        await fleet.hand_over(generation)
        await fleet.decode.wait_cached(block_hashes(generation.token_ids, fleet.block_size))

    @pytest.mark.proves("kv_events")
    async def test_evictions_are_reported(self, fleet: Fleet) -> None:
        """Invariant 6: with more prompts than the pool can hold, the blocks of the replayed events stay within the pool."""
        driver = await fleet.another(Role.DECODE)
        description = driver.engine.describe()
        blocks = min(description.kv_blocks_total // 4, description.model.context_tokens_max // fleet.block_size // 2)
        first = fleet.greedy(blocks, max_tokens=2)
        await driver.run(first)
        await driver.wait_cached(block_hashes(first.token_ids, fleet.block_size))
        for _ in range(description.kv_blocks_total // blocks + 1):
            await driver.run(fleet.greedy(blocks, max_tokens=2))
        assert len(driver.cached) <= description.kv_blocks_total
        assert not driver.cached.issuperset(block_hashes(first.token_ids, fleet.block_size))
        again = await driver.run(first)
        assert again.tokens == (await fleet.alone.run(first)).tokens
        assert driver.violations == []
        await driver.aclose()

    @pytest.mark.proves("reset_cache")
    async def test_reset_cache(self, fleet: Fleet) -> None:
        """After a reset nothing is cached, and the events report it. While a request runs, the reset does nothing.

        An engine without the feature raises UnsupportedError.
        """
        if "reset_cache" not in fleet.alone.engine.describe().capabilities.features:
            with pytest.raises(UnsupportedError):
                await fleet.alone.engine.reset_cache()
            return
        generation = fleet.greedy(3.5, max_tokens=LONG_ANSWER)
        running = await fleet.alone.wait_tokens(fleet.alone.submit(generation), 1)
        assert await fleet.alone.engine.reset_cache() is False
        fleet.alone.engine.cancel_nowait(running.key)
        await fleet.alone.wait(running)
        await fleet.alone.wait_blocks(0, fleet.case.free_s)
        assert await fleet.alone.engine.reset_cache() is True
        record = await fleet.alone.run(replace(generation, sampling=replace(generation.sampling, max_tokens=2)))
        assert record.done.usage.cached_tokens == 0
        async with asyncio.timeout(fleet.case.timeout_s):
            while fleet.alone.cached != set(block_hashes(generation.token_ids, fleet.block_size)):
                await asyncio.sleep(0.005)


class TestCancel:
    @pytest.mark.proves("cancellation")
    async def test_decoding(self, fleet: Fleet) -> None:
        """Invariant 3 during decoding: the leg finishes as CANCELLED, and its blocks are free."""
        record = await fleet.alone.wait_tokens(fleet.alone.submit(fleet.greedy(3, max_tokens=LONG_ANSWER)), 3)
        fleet.alone.engine.cancel_nowait(record.key)
        await fleet.alone.wait_blocks(0, fleet.case.free_s)
        assert (await fleet.alone.wait(record)).done.reason is FinishReason.CANCELLED
        assert record.done.usage.output_tokens >= len(record.tokens) >= 3

    @pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8])
    async def test_waiting_or_computing_the_prompt(self, fleet: Fleet, turns: int) -> None:
        """Invariant 3 before the first token, at several moments. A prefill leg leaves no lease."""
        for driver, submit in ((fleet.alone, fleet.alone.submit), (fleet.prefill, fleet.submit_prefill)):
            leased = driver.engine.load().kv_blocks_leased
            record = submit(fleet.greedy(12, max_tokens=LONG_ANSWER))
            for _ in range(turns):
                await asyncio.sleep(0)
            driver.engine.cancel_nowait(record.key)
            await driver.wait(record)
            assert record.done.reason in (FinishReason.CANCELLED, FinishReason.HANDED_OFF)
            if record.done.handle is not None:
                driver.engine.release_nowait(record.done.handle.handle_id)
            await driver.wait_blocks(leased, fleet.case.free_s)

    @pytest.mark.proves("cancellation")
    @pytest.mark.parametrize("turns", [0, 1, 2, 4, 8, 16])
    async def test_pulling(self, fleet: Fleet, turns: int) -> None:
        """Invariant 3 around a pull, at several moments: the blocks are free on both engines."""
        generation = fleet.greedy(6, max_tokens=LONG_ANSWER)
        await fleet.prefill.wait_blocks(0, fleet.case.timeout_s)
        prefill, record = await fleet.begin(generation)
        for _ in range(turns):
            await asyncio.sleep(0)
        fleet.decode.engine.cancel_nowait(record.key)
        await fleet.decode.wait(record)
        assert record.done.reason is FinishReason.CANCELLED
        await fleet.decode.wait_blocks(0, fleet.case.free_s)
        if prefill.finish is not None and prefill.done.handle is not None:
            fleet.prefill.engine.release_nowait(prefill.done.handle.handle_id)
        fleet.prefill.engine.cancel_nowait(prefill.key)
        await fleet.prefill.wait(prefill)
        await fleet.prefill.wait_blocks(0, fleet.case.free_s)

    async def test_requests_waiting_behind_a_full_batch(self, fleet: Fleet) -> None:
        """Cancelling all requests, running and waiting, frees all blocks."""
        records = [fleet.alone.submit(fleet.greedy(2, max_tokens=300)) for _ in range(16)]
        await fleet.alone.wait_tokens(records[0], 2)
        for record in records:
            fleet.alone.engine.cancel_nowait(record.key)
        reasons = [(await fleet.alone.wait(record)).done.reason for record in records]
        # On a busy machine the first requests may finish before the cancel arrives.
        assert set(reasons) <= {FinishReason.CANCELLED, FinishReason.LENGTH}
        assert reasons[-1] is FinishReason.CANCELLED
        await fleet.alone.wait_blocks(0, fleet.case.free_s)

    async def test_unknown_key(self, fleet: Fleet) -> None:
        """A cancel of an unknown key is ignored, because it may cross with the finish."""
        record = await fleet.alone.run(fleet.greedy(1))
        fleet.alone.engine.cancel_nowait(record.key)
        fleet.alone.engine.cancel_nowait(10**9)
        await fleet.alone.run(fleet.greedy(1))


class TestHandles:
    @pytest.fixture(autouse=True)
    def sequential(self, fleet: Fleet) -> None:
        skip_rendezvous(fleet, "it has no handles")

    async def test_pull_frees_the_source(self, fleet: Fleet) -> None:
        """Invariant 5: blocks are leased until they are pulled."""
        generation = fleet.greedy(5)
        await fleet.prefill.wait_blocks(0, fleet.case.timeout_s)
        handle = await fleet.prefill.prefill(generation)
        assert handle.tokens == len(generation.token_ids)
        assert 0 < handle.lease_s <= 30
        load = fleet.prefill.engine.load()
        assert load.kv_blocks_leased == load.kv_blocks_used >= 5
        assert fleet.prefill.engine.leased_handles() == 1
        await fleet.decode.run(generation, handle=handle)
        await fleet.prefill.wait_blocks(0, fleet.case.free_s)
        assert fleet.prefill.engine.leased_handles() == 0

    async def test_held_blocks_are_those_of_the_handle(self, fleet: Fleet) -> None:
        """`kv_blocks_held` counts a handle's blocks, and no other block is in use."""
        if fleet.prefill.engine.describe().capabilities.engine not in ACCOUNTING:
            pytest.skip("it does not show the owners of its blocks")
        await fleet.prefill.wait_blocks(0, fleet.case.timeout_s)
        handle = await fleet.prefill.prefill(fleet.greedy(5))
        async with asyncio.timeout(fleet.case.timeout_s):
            while not (load := fleet.prefill.engine.load()).kv_blocks_held:
                # Engines count the blocks once a second, in a step or when the load is read.
                await asyncio.sleep(0.05)
        assert load.kv_blocks_held == load.kv_blocks_used >= 5 and load.kv_blocks_unaccounted == 0
        fleet.prefill.engine.release_nowait(handle.handle_id)
        await fleet.prefill.wait_blocks(0, fleet.case.free_s)
        assert fleet.prefill.engine.load().kv_blocks_unaccounted == 0

    async def test_release_frees_the_source(self, fleet: Fleet) -> None:
        """Invariant 5: a release frees the handle's blocks. A second release returns False."""
        await fleet.prefill.wait_blocks(0, fleet.case.timeout_s)
        handle = await fleet.prefill.prefill(fleet.greedy(5))
        assert fleet.prefill.engine.release_nowait(handle.handle_id) is True
        await fleet.prefill.wait_blocks(0, fleet.case.free_s)
        assert fleet.prefill.engine.release_nowait(handle.handle_id) is False
        assert fleet.prefill.engine.release_nowait("unknown") is False

    async def test_expiry_frees_the_source_and_the_reader_recomputes(self, fleet: Fleet) -> None:
        """Invariants 4 and 5: without a pull the lease expires and the blocks are free. A late reader computes the prompt itself."""
        generation = fleet.greedy(5)
        source = await fleet.another(Role.PREFILL, lease_s=1.0)
        handle = await source.prefill(generation)
        await source.wait_blocks(0, 1.0 + fleet.case.free_s)
        late = replace(handle, lease_s=0.0)
        if record := await recomputed_or_refused(fleet.decode, generation, late):
            assert record.tokens == (await fleet.alone.run(generation)).tokens
        await source.aclose()

    @pytest.mark.proves("recompute")
    async def test_foreign_compatibility_hash(self, fleet: Fleet) -> None:
        """Invariant 4: KV with another compatibility hash is never read."""
        generation = fleet.greedy(3)
        handle = replace(await fleet.prefill.prefill(generation), compatibility_hash="0" * 16)
        if record := await recomputed_or_refused(fleet.decode, generation, handle):
            assert record.tokens == (await fleet.alone.run(generation)).tokens
        fleet.prefill.engine.release_nowait(handle.handle_id)

    @pytest.mark.parametrize("payload", [b"", b"\x00" * 40, b"{}", b"\xff" * 4000])
    async def test_damaged_payload(self, fleet: Fleet, payload: bytes) -> None:
        """Invariant 4: a malformed payload is refused or the prompt recomputed, and the engine keeps running."""
        generation = fleet.greedy(3)
        handle = await fleet.prefill.prefill(generation)
        await recomputed_or_refused(fleet.decode, generation, replace(handle, payload=payload))
        fleet.prefill.engine.release_nowait(handle.handle_id)
        await fleet.decode.run(fleet.greedy(1))

    @pytest.mark.proves("recompute")
    async def test_dead_source(self, fleet: Fleet) -> None:
        """Invariant 4: if the engine that made the handle has closed, the reader computes the prompt."""
        generation = fleet.greedy(5)
        source = await fleet.another(Role.PREFILL)
        handle = await source.prefill(generation)
        await source.aclose()
        expected = (await fleet.alone.run(generation)).tokens
        async with asyncio.timeout(fleet.case.timeout_s):
            while (record := await read_or_refused(fleet.decode, generation, handle)) is not None:
                assert record.tokens == expected
                await fleet.decode.wait_blocks(0, fleet.case.free_s)
                if record.done.was_recomputed:
                    break
                # Until the reader notices the disconnect, it may still read the blocks.
                assert await fleet.decode.engine.reset_cache()
        await fleet.decode.wait_blocks(0, fleet.case.free_s)

    async def test_released_handle(self, fleet: Fleet) -> None:
        """Blocks that were freed and reused for other prompts never become part of another prompt's answer."""
        generation = fleet.greedy(5)
        handle = await fleet.prefill.prefill(generation)
        fleet.prefill.engine.release_nowait(handle.handle_id)
        if record := await recomputed_or_refused(fleet.decode, generation, replace(handle, lease_s=0.0)):
            assert record.tokens == (await fleet.alone.run(generation)).tokens


class TestRefusals:
    async def test_context_overflow(self, fleet: Fleet) -> None:
        """A prompt that leaves no room for an output token is refused, and leaves no state."""
        limit = fleet.alone.engine.describe().model.context_tokens_max
        with pytest.raises(InvalidRequestError) as caught:
            fleet.alone.submit(fleet.greedy(limit / fleet.block_size + 1))
        assert caught.value.field == "generation.token_ids"
        load = fleet.alone.engine.load()
        assert load.waiting_requests == load.running_requests == 0

    async def test_token_outside_the_vocabulary(self, fleet: Fleet) -> None:
        """Tokens outside the vocabulary and empty prompts are refused."""
        top = fleet.alone.engine.describe().model.vocabulary_size
        for tokens in ([top], [-1], []):
            with pytest.raises(InvalidRequestError):
                fleet.alone.submit(replace(fleet.greedy(1), token_ids=tokens))

    async def test_unknown_adapter(self, fleet: Fleet) -> None:
        """Submitting raises NotFoundError, or UnsupportedError if the engine has no adapters."""
        with pytest.raises((NotFoundError, UnsupportedError)):
            fleet.alone.submit(replace(fleet.greedy(1), adapter="nobody"))
        await fleet.alone.run(fleet.greedy(1))

    async def test_answer_that_is_complete_already(self, fleet: Fleet) -> None:
        """A continuation that already has `max_tokens` tokens is refused."""
        generation = fleet.greedy(1, max_tokens=3)
        with pytest.raises(InvalidRequestError):
            fleet.alone.submit(replace(generation, emitted_token_ids=fleet.prompt(3 / fleet.block_size)))

    async def test_full_queue(self, fleet: Fleet) -> None:
        """Beyond the limits of running and waiting requests, submissions are refused with a time to retry. The accepted ones finish."""
        driver = await fleet.another(Role.DECODE, running_requests_max=2, waiting_requests_max=3)
        records: list[Record] = []
        with pytest.raises(OverloadedError) as caught:  # noqa: PT012 (the loop ends by the error)
            for _ in range(50):
                records.append(driver.submit(fleet.greedy(1, max_tokens=100)))
        assert caught.value.retry_after_s is not None
        # Some may have finished already, if a busy machine paused this test while the engine worked.
        finished_max = driver.engine.load().output_tokens_total // 100
        assert 3 <= len(records) <= 5 + finished_max
        for record in records:
            assert len((await driver.wait(record)).tokens) == 100
        assert driver.violations == []
        await driver.aclose()

    @pytest.mark.proves("sleep")
    async def test_asleep(self, fleet: Fleet) -> None:
        """An engine that can sleep refuses submissions while asleep, and serves again after waking."""
        if "sleep" not in fleet.alone.engine.describe().capabilities.features:
            with pytest.raises(UnsupportedError):
                await fleet.alone.engine.sleep(1)
            return
        await fleet.alone.engine.sleep(1)
        with pytest.raises(UnavailableError):
            fleet.alone.submit(fleet.greedy(1))
        await fleet.alone.engine.wake()
        assert len((await fleet.alone.run(fleet.greedy(1))).tokens) == 12


class TestAdmin:
    @pytest.mark.proves("lora")
    async def test_adapters(self, fleet: Fleet) -> None:
        """A loaded adapter has its own cache and is listed. Unloading is idempotent."""
        engine = fleet.alone.engine
        if not fleet.case.adapter:
            with pytest.raises(MeshError):
                await engine.load_adapter("extra", "/nowhere")
            return
        await engine.load_adapter("extra", fleet.case.adapter)
        assert "extra" in engine.describe().model.adapters
        generation = fleet.greedy(3.5)
        await fleet.alone.run(generation)
        with_adapter = await fleet.alone.run(replace(generation, adapter="extra"))
        assert with_adapter.done.usage.cached_tokens == 0
        await fleet.alone.wait_cached(block_hashes(generation.token_ids, fleet.block_size, seed=seed_hash("extra")))
        await engine.unload_adapter("extra")
        await engine.unload_adapter("extra")
        with pytest.raises(NotFoundError):
            fleet.alone.submit(replace(generation, adapter="extra"))

    @pytest.mark.proves("role_change")
    async def test_set_role(self, fleet: Fleet) -> None:
        """An engine that supports both roles works in the other role after `set_role`. Other engines raise UnsupportedError."""
        driver = await fleet.another(Role.PREFILL)
        if Role.DECODE not in driver.engine.describe().capabilities.roles:
            with pytest.raises(UnsupportedError):
                await driver.engine.set_role(Role.DECODE)
        else:
            await driver.engine.set_role(Role.DECODE)
            assert driver.engine.describe().role is Role.DECODE
            generation = fleet.greedy(3.5)
            record = await driver.run(generation, handle=await fleet.prefill.prefill(generation))
            assert record.tokens == (await fleet.alone.run(generation)).tokens
        await driver.aclose()

    async def test_close_finishes_everything(self, fleet: Fleet) -> None:
        """Closing finishes running and waiting legs as CANCELLED and ends both streams. Closing again does nothing, and submitting is
        refused."""
        driver = await fleet.another(Role.DECODE, running_requests_max=2)
        records = [driver.submit(fleet.greedy(2, max_tokens=500)) for _ in range(6)]
        await driver.wait_tokens(records[0], 1)
        await driver.aclose()
        assert [record.done.reason for record in records] == [FinishReason.CANCELLED] * 6
        assert driver.violations == []
        await driver.engine.aclose()
        with pytest.raises(UnavailableError):
            driver.submit(fleet.greedy(1))
