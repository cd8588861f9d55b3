"""Failing and slow pairs in the pair search: the choice equals that of a slow reference."""

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.core import FailingKvPath
from tests.property.test_placing_costs import SETTINGS_TIMES, fleets, slow_cost, without_ties  # noqa: F401 (a fixture)
from tests.unit.router_fleets import BLOCK

KV_PATHS = st.sampled_from(["good", "good", "failing", "slow"])


@settings(max_examples=80, deadline=None)
@given(fleets(), st.data())
def test_the_cheapest_pair_with_a_working_path_is_chosen(case, data):
    """The factor of a slow pair multiplies its transfer time.

    If a decode worker without any working path is chosen, it computes the prompt itself.
    """
    router, cached, asks = case
    prefills, decodes = ([t for t in router.fleet.targets() if t.worker.role == role] for role in ("prefill", "decode"))
    factors: dict[str, dict[str, float]] = {}
    failing: set[tuple[str, str]] = set()
    for decode in decodes:
        name = decode.ref.worker_id
        states = {prefill.ref.worker_id: data.draw(KV_PATHS) for prefill in prefills}
        factors[name] = {each: data.draw(st.floats(2, 100)) for each, state in states.items() if state == "slow"}
        failing |= {(each, name) for each, state in states.items() if state == "failing"}
        paths = tuple(FailingKvPath(worker_id=each, reason="failed") for each, name_ in failing if name_ == name)
        record = replace(decode.load, failing_kv_paths=paths)
        router.fleet.on_load_record(decode.worker, record, now=0.0)
    router.placer.slow_pairs.factors, router.placer.slow_pairs.version = factors, 1
    unpaired = {
        d.ref.worker_id for d in decodes if all((p.ref.worker_id, d.ref.worker_id) in failing for p in prefills)
    }
    for number, (ask, now) in enumerate(asks, 1):
        expected = {}
        for prefill in prefills:
            for decode in decodes:
                pair = prefill.ref.worker_id, decode.ref.worker_id
                if pair not in failing:
                    factor = factors[pair[1]].get(pair[0], 1.0)
                    times = [(base * factor, per_byte * factor) for base, per_byte in SETTINGS_TIMES]
                    expected[pair] = slow_cost(prefill, decode, ask, cached, now, times)
        placed = router.ask("f", number, ask, now=now, wall=now)
        computing = placed.prefill or placed.decode
        if ask.block_size_tokens == BLOCK:
            cached[computing.worker_id] = len(ask.block_hashes)  # Predicted from now on.
        decision = router.history.get(ask.request_id).decision
        if placed.prefill is None:
            assert placed.reasons[0] == "no_kv_path"
            assert placed.decode.worker_id in unpaired
            assert not expected or decision.cost < min(expected.values())
            continue
        chosen = placed.prefill.worker_id, placed.decode.worker_id
        assert math.isclose(decision.cost, min(expected.values()), rel_tol=1e-9, abs_tol=1e-12)
        assert math.isclose(decision.cost, expected[chosen], rel_tol=1e-9)
        shown = {(each.prefill.worker_id, each.decode.worker_id): each for each in decision.candidates()}
        assert shown.keys() == expected.keys()
        for pair, candidate in shown.items():
            assert math.isclose(candidate.cost, expected[pair], rel_tol=1e-9, abs_tol=1e-12)
            assert math.isclose(sum(value for _, value in candidate.terms), candidate.cost, rel_tol=1e-9, abs_tol=1e-12)
