"""The fast evaluation of the cost equals a slow reference, candidate by candidate, as docs/understand/routing-cost.md defines it."""

import math
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.core import Ask, LoadRecord, PerformanceProfile, Report, ReportKind
from services.router.core import RouterCore
from services.router.core_settings import CoreSettings
from services.router.index.cached_tokens import deepest_prefixes, tokens_by_bit
from services.router.placement import pair_search
from services.router.queue.admission import Queued
from services.router.workers.cost_settings import CostSettings
from services.router.workers.handoff_times import BYTES_PER_S, HANDOFF_S, Distance
from services.router.workers.worker import OUTPUT_TOKENS, Target
from tests.index_checks import matches
from tests.unit.router_fleets import BLOCK, join, store_blocks

COST = CostSettings(learning=False)
FAR_APART = CoreSettings(cost=COST, local_prefill_tokens_max=0, prefill_congested_s=1e9)


@pytest.fixture(scope="module", autouse=True)
def without_ties() -> Iterator[None]:
    """Makes the router choose the cheapest candidate, so that there is one right answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair_search, "TIE_RATIO", 0.0)
        yield


def slow_distance(first: Target, second: Target) -> Distance:
    zones = [t.worker.labels.get("zone", "") for t in (first, second)]
    hosts = [t.worker.address.rpartition(":")[0] for t in (first, second)]
    if zones[0] != zones[1]:
        return Distance.FAR
    return Distance.HOST if hosts[0] == hosts[1] else Distance.ZONE


def slow_held(target: Target, ask: Ask, cached: dict[str, int]) -> int:
    if target.block_size_tokens != ask.block_size_tokens:
        return 0
    return min(cached.get(target.ref.worker_id, 0) * BLOCK, ask.prompt_tokens - 1)


SETTINGS_TIMES = [(HANDOFF_S, 1 / each) for each in BYTES_PER_S.values()]


def slow_cost(
    prefill: Target, decode: Target, ask: Ask, cached: dict[str, int], now: float, times=SETTINGS_TIMES
) -> float:
    """Returns the cost of one pair, term by term."""
    base_s, per_token_s, per_pair_s = prefill.coefficients.prefill.values
    uncached = ask.prompt_tokens - slow_held(prefill, ask, cached)
    queue_s = max(prefill.done_s - now, COST.overdue_ratio * prefill.prefill_s_in_flight)
    prefill_s = base_s + per_token_s * uncached + per_pair_s * uncached * (ask.prompt_tokens - uncached / 2)
    moved = (ask.prompt_tokens - slow_held(decode, ask, cached)) * prefill.coefficients.kv_bytes_per_token
    handoff_s, s_per_byte = times[slow_distance(prefill, decode)]
    transfer_s = handoff_s + moved * s_per_byte
    _, per_request_s, per_kv_token_s = decode.coefficients.decode.values
    output = ask.expected_output_tokens or OUTPUT_TOKENS
    newcomer_tokens = ask.prompt_tokens + output
    to_newcomer_s = per_request_s * decode.requests_active + per_kv_token_s * decode.kv_tokens_active
    to_others_s = decode.requests_active * (per_request_s + per_kv_token_s * newcomer_tokens)
    decode_s = COST.decode_weight * output * max(1, ask.choices) * (to_newcomer_s + to_others_s)
    return queue_s + prefill_s + transfer_s + decode.wait_s() + decode_s


def make_fleet(draw: st.DrawFn, *, far: bool, pairs: bool) -> RouterCore:
    router = RouterCore(FAR_APART, router_id="r", generator=Random(1))
    seconds = st.floats(1e-5, 1e-2)
    for role, count in (("prefill", draw(st.integers(1, 4))), ("decode", draw(st.integers(1, 4)))):
        for i in range(count):
            name = f"{role[0]}{i}"
            profile = PerformanceProfile(
                prefill_base_s=draw(seconds),
                prefill_s_per_token=draw(seconds) / 10,
                prefill_s_per_token_pair=1e-8 if pairs else 0.0,
                decode_s_per_request=draw(seconds) / 10,
                decode_s_per_kv_token=draw(st.floats(0, 1e-6)),
                kv_bytes_per_token=100_000,
            )
            zone = {"zone": draw(st.sampled_from("ab"))} if far else {}
            host = draw(st.sampled_from(["h1", "h2"])) if far else name
            worker = join(router, name, role, profile=profile, labels=zone, address=f"{host}:{i}")
            [target] = worker.targets
            running = draw(st.integers(0, 6))
            slots = draw(st.sampled_from([0, 4, 100]))
            record = LoadRecord(
                worker_id=name,
                epoch=1,
                running_requests=running,
                running_requests_max=slots,
                kv_blocks_used=draw(st.integers(0, 50)),
                kv_blocks_total=1000,
                waiting_requests=draw(st.integers(0, 2)),
                waiting_prompt_tokens=draw(st.integers(0, 500)),
            )
            router.fleet.on_load_record(worker, record, now=0.0)
            assert target.column >= 0
    return router


@st.composite
def fleets(draw: st.DrawFn) -> tuple[RouterCore, dict[str, int], list[tuple[Ask, float]]]:
    router = make_fleet(draw, far=draw(st.booleans()), pairs=draw(st.booleans()))
    hashes = list(range(1, 9))
    cached = {}
    for name, worker in router.fleet.workers.items():
        if depth := draw(st.integers(0, 8)):
            store_blocks(worker, hashes[:depth])
            cached[name] = depth
    asks = []
    now = 0.0
    for number in range(draw(st.integers(1, 6))):
        now += draw(st.floats(0, 0.02))
        ask = Ask(
            request_id=f"r{number}",
            model="demo",
            prompt_tokens=8 * BLOCK + draw(st.integers(0, 40)),
            block_hashes=hashes,
            block_size_tokens=draw(st.sampled_from([BLOCK, BLOCK, BLOCK, 32])),
            expected_output_tokens=draw(st.sampled_from([0, 50])),
            choices=draw(st.integers(1, 2)),
        )
        asks.append((ask, now))
    return router, cached, asks


@settings(max_examples=150, deadline=None)
@given(fleets())
def test_the_fast_cost_equals_the_reference(case):
    """The chosen pair is the cheapest by the reference, and so are its cost and all costs that Explain shows."""
    router, cached, asks = case
    for number, (ask, now) in enumerate(asks, 1):
        # Decisions change the costs, so the expected costs are computed first.
        targets = list(router.fleet.targets())
        expected = {
            (p.ref.worker_id, d.ref.worker_id): slow_cost(p, d, ask, cached, now)
            for p in targets
            for d in targets
            if p.worker.role == "prefill" and d.worker.role == "decode"
        }
        placed = router.ask("f", number, ask, now=now, wall=now)
        if ask.block_size_tokens == BLOCK:
            cached[placed.prefill.worker_id] = len(ask.block_hashes)  # Predicted from now on.
        decision = router.history.get(ask.request_id).decision
        assert math.isclose(decision.cost, min(expected.values()), rel_tol=1e-9, abs_tol=1e-12)
        assert math.isclose(decision.cost, expected[placed.prefill.worker_id, placed.decode.worker_id], rel_tol=1e-9)
        explained = {
            (each.prefill.worker_id, each.decode.worker_id): (each.cost, each.terms) for each in decision.candidates()
        }
        assert explained.keys() == expected.keys()
        for pair, (cost, terms) in explained.items():
            assert math.isclose(cost, expected[pair], rel_tol=1e-9, abs_tol=1e-12)
            assert math.isclose(sum(value for _, value in terms), cost, rel_tol=1e-9, abs_tol=1e-12)
            assert [name for name, _ in terms] == ["queue", "prefill", "wait", "decode", "transfer"]


@settings(max_examples=60, deadline=None)
@given(
    fleets(), st.lists(st.tuples(st.integers(1, 6), st.sampled_from(list(ReportKind)), st.floats(0, 0.1)), max_size=12)
)
def test_sums_equal_the_open_reservations(case, reports):
    """For any reports in any order, the sums are those of the reservations, and end at zero."""
    router, _, asks = case
    for number, (ask, now) in enumerate(asks, 1):
        router.ask("f", number, ask, now=now, wall=now)
    for number, kind, elapsed_s in reports:
        router.report("f", number, Report(kind=kind, elapsed_s=elapsed_s))
    open_s = {}
    for reservation in router.book:
        if not reservation.is_prefilled:
            computing = reservation.prefill or reservation.decode
            open_s[computing] = open_s.get(computing, 0.0) + reservation.prefill_s
    for target in router.fleet.targets():
        assert target.prefill_s_in_flight == pytest.approx(open_s.get(target, 0.0), abs=1e-9)
    for number in range(1, len(asks) + 1):
        router.report("f", number, Report(kind=ReportKind.CANCELLED, elapsed_s=0.2))
    for target in router.fleet.targets():
        sums = (target.requests_in_flight, target.prompt_tokens_in_flight, target.kv_blocks_in_flight)
        assert (*sums, target.prefill_s_in_flight) == (0, 0, 0, 0.0)


def grown_fleet(seed: int) -> RouterCore:
    """Makes a fleet of up to 24 workers on a few hosts of one or two zones."""
    chance = Random(seed)
    hosts, zones = chance.choice([2, 5, 99]), chance.choice([1, 2])
    router = RouterCore(CoreSettings(), router_id="r", generator=Random(seed))
    for i in range(chance.randint(2, 24)):
        role, host = ("prefill", "decode")[i % 2], chance.randrange(hosts)
        labels = {"zone": str(host % zones)}
        profile = PerformanceProfile(
            prefill_base_s=0.004 + 0.00001 * chance.random(), prefill_s_per_token_pair=chance.choice([0.0, 1e-8])
        )
        worker = join(router, f"w{i:02}", role, labels=labels, address=f"h{host}:{i}", profile=profile)
        record = LoadRecord(worker_id=f"w{i:02}", epoch=1, running_requests_max=chance.choice([2, 9]))
        router.fleet.on_load_record(worker, record, now=0.0)
        store_blocks(worker, range(1, 1 + chance.randint(1, 60)))
    return router


def slow_cached(router: RouterCore, target: Target, ask: Ask) -> int:
    """Returns the cached blocks of a prompt, checked block by block, with predictions."""
    index, bit = router.index, target.bits[target.rank]
    predicted = max(
        (match.depth for match in matches(index.predicted, ask.block_hashes) if match.holders >> bit & 1), default=0
    )
    known = next(
        (i for i, block in enumerate(ask.block_hashes) if not index.device.holds(bit, block)), len(ask.block_hashes)
    )
    return max(known, predicted)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_the_cheapest_pair_is_found_in_fleets_with_hosts_zones_and_sessions(seed):
    """For any distances, cached blocks, full workers, learned times and sessions, the chosen pair is the cheapest by the reference."""
    router, chance, now = grown_fleet(seed), Random(seed + 1), 0.0
    targets = list(router.fleet.targets())
    for number in range(1, 40):
        now += chance.choice([0.0, 0.001, 0.05])
        ask = Ask(
            request_id=f"r{number}",
            model="demo",
            prompt_tokens=1000 + chance.randrange(100),
            block_hashes=range(1, 1 + chance.randint(0, 62)),
            block_size_tokens=BLOCK,
            session_id=chance.choice(["", "a", "b"]),
        )
        router.index.device.prefixes(ask.block_hashes)  # Enters pending runs for the checks of single blocks below.
        cached = {target.ref.worker_id: slow_cached(router, target, ask) for target in targets}
        session = router.placer.sessions.get(ask.session_id, now) or (None, None)
        expected = {
            (p, d): slow_cost(p, d, ask, cached, now, times=router.placer.handoffs.times)
            + COST.preference_s * ((session[0] not in (None, p)) + (session[1] not in (None, d)))
            for p in targets
            for d in targets
            if p.worker.role == "prefill" and d.worker.role == "decode" and p.takes_prompts and d.takes_requests
        }
        placed = router.ask("f", number, ask, now=now, wall=now)
        if isinstance(placed, Queued):
            continue
        decision = router.history.get(ask.request_id).decision
        if decision.prefill is not None:
            assert math.isclose(decision.cost, min(expected.values()), rel_tol=1e-9)
            assert math.isclose(decision.cost, expected[decision.prefill, decision.decode], rel_tol=1e-9)
        kind = chance.choice([ReportKind.PREFILLED, ReportKind.FIRST_TOKEN, ReportKind.FINISHED])
        router.report("f", chance.randint(1, number), Report(kind=kind, elapsed_s=chance.random()))


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(st.integers(0, 40), st.integers(1, 9)),
    st.dictionaries(st.integers(0, 40), st.integers(1, 9)),
)
def test_the_deeper_of_stored_and_predicted_prefixes_counts(known, predicted):
    """Each holder gets the tokens of its longer prefix, whatever sets of holders there are."""

    def as_sets(by_bit: dict[int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        depths = tuple(sorted(set(by_bit.values())))
        return depths, tuple(sum(1 << bit for bit, depth in by_bit.items() if depth == each) for each in depths)

    depths, sets = deepest_prefixes(as_sets(known), as_sets(predicted))
    held = tokens_by_bit((depths, sets), BLOCK, 6).tolist()
    assert held == [float(BLOCK * max(known.get(bit, 0), predicted.get(bit, 0))) for bit in range(48)]
