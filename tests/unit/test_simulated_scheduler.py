"""The scheduler with time as an argument: its invariants hold for any order of submissions, cancellations, pulls and steps."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvmesh.core import Constraint, ConstraintKind, FinishReason, Generation, KvHandle, LegTask, SamplingParams
from kvmesh.engines.base import EngineFinish, EngineRequest
from kvmesh.engines.simulated.model_card import read_card
from kvmesh.engines.simulated.scheduler import Scheduler
from kvmesh.engines.simulated.settings import SimulatedSettings, StepProfile
from kvmesh.engines.simulated.step import PullOrder, Step
from kvmesh.errors import InvalidRequestError, KvLostError, OverloadedError, UnsupportedError
from services.simulation.ledger import expected_tokens

BLOCK = 4
SMALL = SimulatedSettings(
    block_size_tokens=BLOCK,
    kv_blocks=24,
    kv_bytes_per_block=32,
    context_tokens_max=64,
    step_tokens_max=10,
    running_requests_max=4,
    waiting_requests_max=8,
    lease_s=5.0,
    vocabulary_size=500,
)


class Bench:
    """A scheduler, and a record of its outputs."""

    def __init__(self, **changes: Any) -> None:
        self.settings = replace(SMALL, **changes)
        self.card, self.range = read_card(self.settings)
        self.scheduler = Scheduler(
            self.settings, self.card, self.range, incarnation="i", compatibility_hash="c", has_transport=True
        )
        self.scheduler.peer = b"peer"
        self.tokens: dict[int, list[int]] = {}
        self.finishes: dict[int, EngineFinish] = {}
        self.pulls: list[PullOrder] = []
        self.now_s = 0.0

    def submit(
        self, key: int, generation: Generation, task: LegTask = LegTask.GENERATE, handle: KvHandle | None = None
    ) -> None:
        self.scheduler.submit(
            EngineRequest(key=key, leg_id=str(key), task=task, generation=generation, handle=handle), self.now_s
        )
        self.tokens[key] = []

    def step(self) -> Step:
        step = self.scheduler.step(self.now_s)
        self.pulls += step.pulls
        start = 0
        for key, count in zip(step.keys, step.counts or [1] * len(step.keys), strict=True):
            assert key not in self.finishes, "a leg has a token after its finish"
            self.tokens[key] += step.token_ids[start : start + count]
            start += count
        for finish in step.finishes:
            assert finish.key not in self.finishes, "a leg has two finishes"
            self.finishes[finish.key] = finish
        self.check()
        return step

    def check(self) -> None:
        counts = self.scheduler.pool.counts()
        assert counts.free + counts.cached + counts.held + counts.leased == self.settings.kv_blocks
        assert min(counts.free, counts.cached, counts.held, counts.leased) >= 0
        assert self.scheduler.counts()[0] <= self.settings.running_requests_max

    def run(self, steps_max: int = 500) -> None:
        for _ in range(steps_max):
            if not self.step().has_progress:
                return
        raise AssertionError("the scheduler still makes progress after all steps")

    def expected(self, generation: Generation) -> list[int]:
        left = (generation.sampling.max_tokens or 0) - len(generation.emitted_token_ids)
        return expected_tokens(generation, self.range, left)


def generation(tokens: list[int], max_tokens: int = 6, **changes: Any) -> Generation:
    sampling = SamplingParams(max_tokens=max_tokens, **changes.pop("sampling", {}))
    return Generation(model="demo", token_ids=tokens, sampling=sampling, **changes)


def copy_kv(source: Bench, target: Bench, order: PullOrder) -> None:
    """Copies the blocks of a pull, as a transport does."""
    mine = order.blocks[order.first : len(order.payload)]
    for theirs, block in zip(order.payload.blocks[order.first :], mine, strict=True):
        target.scheduler.memory._words[block] = source.scheduler.memory._words[theirs]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 40), st.integers(1, 20), st.integers(0, 3)),
        st.tuples(st.just("prefill"), st.integers(1, 40), st.just(0), st.integers(0, 3)),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.just(0), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 6), st.just(0), st.just(0)),
        st.tuples(st.just("wait"), st.integers(1, 6), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(actions=ACTIONS, per_step=st.integers(1, 3))
@example(  # A preempted leg that is admitted again at once needs a block in the same step as before.
    actions=[("submit", 32, 10, 0), ("submit", 4, 10, 0), ("prefill", 1, 0, 0), ("prefill", 37, 0, 1)],
    per_step=3,
)
def test_any_order_of_actions(actions: list[tuple[str, int, int, int]], per_step: int) -> None:
    """Each leg ends once with the right tokens, also with preemption, and in the end no block is held or leased."""
    bench = Bench(decode_tokens_per_step=per_step)
    asked: dict[int, Generation] = {}
    for number, (kind, a, b, family) in enumerate(actions):
        if kind in ("submit", "prefill"):
            asked[number] = generation([family * 50 + i + 3 for i in range(a)], max(b, 1), priority=family)
            try:
                bench.submit(number, asked[number], LegTask.PREFILL if kind == "prefill" else LegTask.GENERATE)
            except OverloadedError:
                del asked[number]
        elif kind == "cancel":
            bench.scheduler.cancel(a)
        elif kind == "step":
            for _ in range(a):
                bench.step()
        else:
            bench.now_s += a
    for _ in range(50):
        bench.run()
        bench.now_s += SMALL.lease_s
    assert set(bench.finishes) == set(asked)
    for key, finish in bench.finishes.items():
        expected = bench.expected(asked[key])
        if finish.reason is FinishReason.LENGTH:
            assert bench.tokens[key] == expected
        else:
            assert finish.reason in (FinishReason.CANCELLED, FinishReason.HANDED_OFF)
            assert bench.tokens[key] == expected[: len(bench.tokens[key])]
        assert finish.usage.output_tokens == len(bench.tokens[key])
    counts = bench.scheduler.pool.counts()
    assert (counts.held, counts.leased) == (0, 0)
    assert bench.scheduler.counts() == (0, 0, 0)


class TestBatching:
    def test_a_long_prompt_is_computed_in_chunks(self) -> None:
        """No step computes more tokens than its budget."""
        bench = Bench()
        bench.submit(1, generation(list(range(3, 38))))
        chunks = [bench.step().prefill_tokens for _ in range(4)]
        assert chunks == [10, 10, 10, 5]
        assert len(bench.tokens[1]) == 1

    def test_a_step_stays_within_its_time_budget(self) -> None:
        """Chunks are as long as the time budget allows beside the decoding requests. With a budget that is too short prompts still advance."""
        profile = StepProfile(base_s=1.0, per_prefill_token_s=0.125, per_decode_request_s=0.5)
        bench = Bench(profile=profile, step_budget_s=8.0, time_factor=2.0, step_tokens_max=100)
        bench.submit(1, generation(list(range(3, 53)), max_tokens=3))
        assert [bench.step().prefill_tokens for _ in range(3)] == [24, 24, 2]
        bench.submit(2, generation(list(range(103, 133))))
        assert [bench.step().prefill_tokens for _ in range(2)] == [20, 10]
        bench = Bench(profile=profile, step_budget_s=0.5, step_tokens_max=100)
        bench.submit(1, generation(list(range(3, 23))))
        assert [bench.step().prefill_tokens for _ in range(2)] == [16, 4]

    def test_decoding_continues_beside_a_prompt(self) -> None:
        """A running answer gets a token in each step while the rest of the budget computes a prompt."""
        bench = Bench()
        bench.submit(1, generation([5], max_tokens=10))
        bench.step()
        bench.submit(2, generation(list(range(3, 30))))
        steps = [bench.step() for _ in range(3)]
        assert [step.prefill_tokens for step in steps] == [9, 9, 9]
        assert all(1 in step.keys for step in steps)

    @pytest.mark.proves("priority", engine="simulated")
    def test_the_highest_priority_is_admitted_first(self) -> None:
        """Among equal priorities the earlier request is first."""
        bench = Bench(running_requests_max=1)
        for key, priority in ((1, 0), (2, 0), (3, 7)):
            bench.submit(key, generation([key + 3], max_tokens=2, priority=priority))
        bench.run()
        assert list(bench.finishes) == [3, 1, 2]

    def test_preemption_when_blocks_run_out(self) -> None:
        """The leg with the lowest rank is preempted, ends later, and has the tokens of an undisturbed run."""
        bench = Bench(kv_blocks=8, context_tokens_max=32)
        asked = {key: generation([key * 7 + i for i in range(9)], max_tokens=20) for key in (1, 2)}
        for key, item in asked.items():
            bench.submit(key, item)
        bench.run()
        assert bench.scheduler.preempted_total > 0
        assert list(bench.finishes) == [1, 2]
        assert bench.tokens == {key: bench.expected(item) for key, item in asked.items()}

    def test_leases_may_hold_all_blocks(self) -> None:
        """If all blocks are leased, steps make no progress until the lease expires."""
        bench = Bench(kv_blocks=4, context_tokens_max=16)
        bench.submit(1, generation(list(range(3, 18))), LegTask.PREFILL)
        while 1 not in bench.finishes:
            bench.step()
        bench.submit(2, generation([3, 4, 5], max_tokens=2))
        assert not bench.step().has_progress
        bench.now_s = SMALL.lease_s
        bench.run()
        assert bench.finishes[2].reason is FinishReason.LENGTH


class TestTokens:
    def test_a_token_follows_the_formula(self) -> None:
        """The token is first_id + (1*5 + 2*6 + 3*7) mod span, with the range from 3 to 499."""
        bench = Bench()
        bench.submit(1, generation([5, 6, 7], max_tokens=1))
        bench.run()
        assert bench.tokens[1] == [3 + (5 + 12 + 21) % 497]

    @pytest.mark.proves("seed", engine="simulated")
    def test_a_seed_matters_unless_greedy(self) -> None:
        """A seed changes the answer of a sampling request and not of a greedy one."""
        answers = []
        for sampling in ({}, {"seed": 4}, {"seed": 5}, {"seed": 5, "temperature": 0.0}):
            bench = Bench()
            item = generation([9, 9, 9], sampling=sampling)
            bench.submit(1, item)
            bench.run()
            assert bench.tokens[1] == bench.expected(item)
            answers.append(tuple(bench.tokens[1]))
        assert len(set(answers)) == 3
        assert answers[0] == answers[3]

    def test_eos_ends_the_answer(self) -> None:
        """The end-of-sequence token is the token at `eos_after_tokens` of the whole answer, but not before `min_tokens`, and not with
        `ignore_eos`."""
        cases: list[tuple[Generation, int, FinishReason]] = [
            (generation([5], 20), 4, FinishReason.STOP),
            (generation([5], 20, emitted_token_ids=[7, 7]), 2, FinishReason.STOP),
            (generation([5], 20, sampling={"min_tokens": 9}), 10, FinishReason.STOP),
            (generation([5], 20, sampling={"ignore_eos": True}), 20, FinishReason.LENGTH),
            (generation([5], 3), 3, FinishReason.LENGTH),
        ]
        for item, count, reason in cases:
            bench = Bench(eos_after_tokens=4)
            bench.submit(1, item)
            bench.run()
            finish = bench.finishes[1]
            assert (len(bench.tokens[1]), finish.reason) == (count, reason)
            assert (bench.tokens[1][-1] == 2) == (finish.stop_token_id == 2) == (reason is FinishReason.STOP)


class TestLimits:
    def test_waiting_requests_are_bounded(self) -> None:
        """A request beyond the limit is refused with a retry delay and leaves no state behind."""
        bench = Bench()
        for key in range(8):
            bench.submit(key, generation([5, key + 6]))
        with pytest.raises(OverloadedError) as refused:
            bench.submit(8, generation([5, 50]))
        assert refused.value.reason == "queue_full"
        assert refused.value.retry_after_s
        assert bench.scheduler.counts()[1] == 8
        bench.run()
        assert set(bench.finishes) == set(range(8))


class TestCachedPrompt:
    @pytest.mark.parametrize(("length", "cached"), [(7, 4), (8, 4), (9, 8)])
    def test_the_last_token_of_a_cached_prompt_is_computed(self, length: int, cached: int) -> None:
        """The first token of the answer is sampled from it, so a fully cached prompt is computed from its last block on."""
        bench, item = Bench(), generation(list(range(3, 3 + length)))
        for key in (1, 2):
            bench.submit(key, item)
            bench.run()
            assert bench.tokens[key] == bench.expected(item)
        assert [bench.finishes[key].usage.cached_tokens for key in (1, 2)] == [0, cached]


class TestHandoff:
    def handed_off(self, tokens: list[int]) -> tuple[Bench, Generation, KvHandle]:
        source, item = Bench(), generation(tokens)
        source.submit(1, item, LegTask.PREFILL)
        source.run()
        handle = source.finishes[1].handle
        assert handle is not None
        return source, item, handle

    def pulling(self, item: Generation, handle: KvHandle, **changes: Any) -> Bench:
        bench = Bench(**changes)
        bench.submit(1, item, handle=handle)
        bench.step()
        assert len(bench.pulls) == 1
        return bench

    @pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 30])
    def test_valid_kv_is_used(self, length: int) -> None:
        """The tokens are computed from the pulled bytes, and no prompt token is computed."""
        source, item, handle = self.handed_off(list(range(3, 3 + length)))
        bench = self.pulling(item, handle)
        copy_kv(source, bench, bench.pulls[0])
        assert bench.scheduler.pull_ended(bench.pulls[0], None)
        bench.run()
        assert bench.tokens[1] == bench.expected(item)
        assert bench.scheduler.prompt_tokens_total == 0
        assert bench.finishes[1].usage.transferred_tokens == length

    @pytest.mark.parametrize("harm", ["not copied", "one word", "other filling", "error"])
    def test_invalid_kv_is_recomputed(self, harm: str) -> None:
        """If blocks are lost, changed or rewritten, or the pull fails, the prompt is computed."""
        source, item, handle = self.handed_off(list(range(3, 20)))
        bench = self.pulling(item, handle)
        order = bench.pulls[0]
        if harm == "other filling":
            memory, block = source.scheduler.memory, order.payload.blocks[-1]
            guards, _ = memory.guards([block])
            memory.write([block], guards.tolist(), memory.read_parts([block]))
        if harm != "not copied":
            copy_kv(source, bench, order)
        if harm == "one word":
            bench.scheduler.memory._words[order.leg.blocks[2], -1] += 2
        assert bench.scheduler.pull_ended(order, KvLostError("gone") if harm == "error" else None)
        bench.run()
        assert bench.tokens[1] == bench.expected(item)
        assert bench.finishes[1].was_recomputed
        assert bench.finishes[1].usage.transferred_tokens == 0

    def test_without_checks_invalid_kv_gives_wrong_tokens(self) -> None:
        """This shows that the answer depends on the bytes."""
        _, item, handle = self.handed_off(list(range(3, 20)))
        bench = self.pulling(item, handle, verify_kv=False)
        bench.scheduler.pull_ended(bench.pulls[0], None)
        bench.run()
        assert bench.tokens[1] != bench.expected(item)

    def test_a_cancelled_leg_keeps_its_blocks_until_the_pull_stops(self) -> None:
        """Invariant 3 of the scheduler: blocks that a pull may still write to are not reused."""
        _, item, handle = self.handed_off(list(range(3, 20)))
        bench = self.pulling(item, handle)
        bench.scheduler.cancel(1)
        assert bench.scheduler.aborted_pulls == [bench.pulls[0].leg]
        assert bench.scheduler.pool.counts().held == 5
        assert bench.scheduler.releases == [(b"peer", handle.handle_id)]
        bench.scheduler.pull_ended(bench.pulls[0], KvLostError("stopped"))
        assert bench.scheduler.pool.counts().held == 0
        bench.run()
        assert bench.finishes[1].reason is FinishReason.CANCELLED

    @pytest.mark.parametrize("is_cancelled", [False, True])
    def test_an_overdue_pull_keeps_its_blocks_but_not_its_leg(self, is_cancelled: bool) -> None:
        """A suspended source may still send later, so the prompt is computed in other blocks, and the blocks of the pull stay held until it
        ends."""
        source, item, handle = self.handed_off(list(range(3, 20)))
        bench = self.pulling(item, handle)
        order = bench.pulls[0]
        bench.scheduler.pull_overdue(order)
        assert bench.scheduler.aborted_pulls == [order.leg]
        assert bench.scheduler.releases == [(b"peer", handle.handle_id)]
        if is_cancelled:
            bench.scheduler.cancel(1)
        bench.scheduler.pull_overdue(order)
        bench.run()
        assert bench.scheduler.pool.counts().held == 5
        copy_kv(source, bench, order)
        assert not bench.scheduler.pull_ended(order, KvLostError("stopped"))
        assert bench.scheduler.pool.counts().held == 0
        if is_cancelled:
            assert bench.finishes[1].reason is FinishReason.CANCELLED
            return
        assert bench.tokens[1] == bench.expected(item)
        assert bench.finishes[1].was_recomputed

    def test_an_expired_handle_is_not_pulled(self) -> None:
        """From the moment its lease expires, its blocks may belong to another prompt."""
        _, item, handle = self.handed_off(list(range(3, 20)))
        bench = Bench()
        bench.submit(1, item, handle=handle)
        bench.now_s = handle.lease_s
        bench.run()
        assert not bench.pulls
        assert bench.finishes[1].was_recomputed
        assert bench.tokens[1] == bench.expected(item)

    def test_only_missing_blocks_are_pulled(self) -> None:
        """Blocks that the reader has cached are not transferred."""
        source, item, handle = self.handed_off(list(range(3, 20)))
        bench = Bench()
        bench.submit(7, generation(list(range(3, 12)), max_tokens=1))
        bench.run()
        bench.submit(1, item, handle=handle)
        bench.step()
        assert bench.pulls[0].first == 2
        copy_kv(source, bench, bench.pulls[0])
        assert bench.scheduler.pull_ended(bench.pulls[0], None)
        bench.run()
        assert bench.tokens[1] == bench.expected(item)
        assert bench.finishes[1].usage.transferred_tokens == 17 - 8


class TestBias:
    @pytest.mark.proves("logit_bias", engine="simulated")
    def test_a_bias_changes_the_answer(self) -> None:
        """+100 forces a token, -100 bans it, and the following tokens follow from the changed answer."""
        plain = generation([5, 6, 7], 12)
        bench = Bench()
        unbiased = bench.expected(plain)
        bans = tuple((token, -100.0) for token in unbiased)
        for key, bias in enumerate(((), ((77, 100.0),), bans, ((77, 0.3),)), start=1):
            asked = generation([5, 6, 7], 12, sampling={"logit_bias": bias})
            bench.submit(key, asked)
            bench.run()
            assert bench.tokens[key] == bench.expected(asked)
        assert bench.tokens[1] == unbiased
        assert bench.tokens[2] == [77] * 12
        assert not set(unbiased) & set(bench.tokens[3])
        assert bench.finishes[3].reason is FinishReason.LENGTH

    def test_eos_can_be_forced(self) -> None:
        """A bias of +100 on the end-of-sequence token ends the answer, unless `ignore_eos` is set."""
        bench = Bench()
        (eos,) = bench.card.eos_token_ids
        for key, ignores in ((1, False), (2, True)):
            asked = generation([5, 6, 7], 4, sampling={"logit_bias": ((eos, 100.0),), "ignore_eos": ignores})
            bench.submit(key, asked)
            bench.run()
        assert (bench.tokens[1], bench.finishes[1].reason) == ([eos], FinishReason.STOP)
        assert (bench.tokens[2], bench.finishes[2].reason) == ([eos] * 4, FinishReason.LENGTH)


class TestSubmission:
    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            (
                {"sampling": {"constraint": Constraint(kind=ConstraintKind.JSON_OBJECT)}},
                "generation.sampling.constraint",
            ),
            ({"data_parallel_rank": 1}, "generation.data_parallel_rank"),
        ],
    )
    def test_unsupported_features_are_refused_by_field(self, changes: dict[str, Any], field: str) -> None:
        """No parameter of a request is ignored silently."""
        with pytest.raises(UnsupportedError) as caught:
            Bench().submit(1, generation([5], **changes))
        assert caught.value.field == field

    def test_a_key_in_use_is_refused(self) -> None:
        """The key can be reused after its finish."""
        bench = Bench()
        bench.submit(1, generation([5], max_tokens=1))
        with pytest.raises(InvalidRequestError):
            bench.submit(1, generation([5]))
        bench.run()
        bench.finishes.clear()
        bench.submit(1, generation([5]))

    @pytest.mark.parametrize("change", [{"kv_bytes_per_block": 33}, {"step_tokens_max": 100}])
    def test_inconsistent_settings_are_refused(self, change: dict[str, Any]) -> None:
        """The error names the setting."""
        with pytest.raises(InvalidRequestError, match=next(iter(change))):
            SimulatedSettings(**change)
