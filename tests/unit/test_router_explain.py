"""What Explain tells: every candidate, what took each one off, the margin, and what came of it."""

from contextlib import suppress

import pytest

from kvmesh.core import Report, ReportKind
from kvmesh.errors import LostError, MeshError
from kvmesh.rpc.codec.router import from_explanation, to_explanation
from kvmesh.rpc.router.explanations import is_chosen
from services.router.core import RouterCore
from services.router.core_settings import QueueSettings
from services.router.explain import (
    CANDIDATES_MAX,
    REPORTS_MAX,
    DecisionRecord,
    cost_margin,
    explain,
    explain_candidates,
)
from services.router.placement.policies import POLICIES
from tests.unit.router_fleets import ask, core, join, store_blocks


def two_by_two(**options) -> RouterCore:
    router = core(**options)
    for name, role in (("p1", "prefill"), ("p2", "prefill"), ("d1", "decode"), ("d2", "decode")):
        join(router, name, role)
    return router


def decide(router: RouterCore, number: int, **options) -> DecisionRecord:
    options.setdefault("hashes", [1, 2])
    name = options.pop("name", f"r{number}")
    with suppress(MeshError):
        router.ask("f", number, ask(name, options.pop("hashes"), **options), now=0.0, wall=5.0)
    record = router.history.get(name)
    assert record is not None
    return record


def taken_off(record: DecisionRecord) -> dict[str, str]:
    return {
        (candidate.prefill or candidate.decode).worker_id: candidate.removed_by
        for candidate in explain_candidates(record)
        if candidate.removed_by
    }


def test_the_requests_own_filters_are_named():
    """Excluded and pinned workers, beside those that the fleet's state took off."""
    router = two_by_two()
    join(router, "d3", "decode")
    join(router, "p9", "prefill", hash="other")
    router.fleet.disconnected(router.fleet.workers["d3"], "unreachable")
    record = decide(router, 1, excluded_worker_ids=("d1",), pinned_prefill_worker_id="p2")
    assert taken_off(record) == {"d1": "excluded", "p1": "pinned", "d3": "unreachable", "p9": "incompatible"}
    weighed = [candidate for candidate in explain_candidates(record) if not candidate.removed_by]
    assert [(c.prefill.worker_id, c.decode.worker_id) for c in weighed] == [("p2", "d2")]
    assert cost_margin(record.decision) is None


def test_every_worker_of_the_model_is_told_of_exactly_once_or_in_pairs():
    """Nobody is missing: weighed or taken off."""
    router = two_by_two()
    join(router, "d9", "decode", labels={"zone": "b"})
    record = decide(router, 1, excluded_worker_ids=("p1",))
    told = {t.worker_id for c in explain_candidates(record) for t in (c.prefill, c.decode) if t is not None}
    assert told == {"p1", "p2", "d1", "d2", "d9"}


@pytest.mark.parametrize("waits", [True, False])
def test_workers_without_room_are_explained(waits):
    """Placed past a full worker; and queued, or refused because all are full."""
    router = core(requests_per_decode_max=1, history_max=10, queue=QueueSettings(requests_max=int(waits)))
    join(router, "d1", "decode")
    first = decide(router, 1)
    join(router, "d2", "decode")
    second = decide(router, 2)
    assert taken_off(first) == {}
    assert taken_off(second) == {"d1": "full"}
    third = decide(router, 3)
    assert (third.error is None) is waits
    assert taken_off(third) == {"d1": "full", "d2": "full"}


def test_a_refusal_says_who_was_taken_off():
    """Nobody is left: each with its reason."""
    router = two_by_two()
    for name in ("d1", "d2"):
        router.fleet.disconnected(router.fleet.workers[name], "silent")
    record = decide(router, 1)
    assert record.error.reason == "no_worker"
    assert taken_off(record) == {"d1": "silent", "d2": "silent"}
    record = decide(router, 2, name="r2", required_labels={"zone": "a"})
    assert set(taken_off(record).values()) == {"labels"}


def test_what_was_taken_off_then_is_told_although_it_came_back():
    """The explanation is of the decision, not of now."""
    router = two_by_two()
    router.fleet.disconnected(router.fleet.workers["p1"], "unreachable")
    record = decide(router, 1)
    router.fleet.connected(router.fleet.workers["p1"])
    decide(router, 2)
    assert taken_off(record) == {"p1": "unreachable"}


def test_the_margin_is_the_lead_over_the_second_best():
    """0 where there is none, never below."""
    router = two_by_two()
    store_blocks(router.fleet.workers["p1"], [1, 2])
    record = decide(router, 1)
    pairs = [c for c in explain_candidates(record) if not c.removed_by]
    assert cost_margin(record.decision) == pytest.approx(pairs[1].cost - pairs[0].cost)
    assert pairs[0].prefill.worker_id == "p1"
    worse = two_by_two(policy="random")
    assert cost_margin(decide(worse, 1).decision) >= 0


@pytest.mark.parametrize("policy", ["kv", "random"])
def test_the_chosen_pair_is_listed_among_very_many(policy: str):
    """Of 400 pairs that cost the same, and where a draw takes a pair that costs more, the answer has the chosen one."""
    router = core(policy=policy)
    for number in range(20):
        join(router, f"p{number:02d}", "prefill")
        join(router, f"d{number:02d}", "decode")
    store_blocks(router.fleet.workers["p07"], [1, 2])
    for number in range(1, 9):
        record = decide(router, number, hashes=[50 * number, 50 * number + 1])
        told = explain(record)
        assert len([each for each in told.candidates if not each.removed_by]) == CANDIDATES_MAX
        assert sum(is_chosen(each, told) for each in told.candidates) == 1


def test_what_was_observed():
    """The first token's time, and the report that settles even after very many others."""
    router = two_by_two()
    record = decide(router, 1)
    assert record.observed_ttft_s is None
    for kind, elapsed_s in (("prefilled", 0.1), ("first_token", 0.2)):
        router.report("f", 1, Report(kind=ReportKind(kind), elapsed_s=elapsed_s))
    for _ in range(40):
        router.report("f", 1, Report(kind=ReportKind.PROGRESS, elapsed_s=1.0))
    router.report("f", 1, Report(kind=ReportKind.FINISHED, elapsed_s=9.0))
    assert record.observed_ttft_s == 0.2
    assert len(record.reports) == REPORTS_MAX
    assert record.reports[-1].kind is ReportKind.FINISHED


def test_the_placements_before_the_newest_one_are_kept():
    """Of a request that is placed again: where it was, what became of it, and how many tokens each placement computes."""
    router = two_by_two()
    decide(router, 1, name="a")
    failed = Report(kind=ReportKind.FAILED, elapsed_s=2.0, error=LostError("gone"), failed_worker_id="d1")
    router.report("f", 1, failed)
    decide(router, 2, name="a", attempt=1, excluded_worker_ids=("d1",))
    told = from_explanation(to_explanation(explain(decide(router, 3, name="a", attempt=2))))
    assert [(each.attempt, len(each.reports)) for each in told.earlier] == [(0, 1), (1, 0)]
    first = told.earlier[0]
    assert first.placement is not None and first.placement.decode.worker_id in ("d1", "d2")
    assert first.reports[0].error is not None and first.reports[0].error.reason == "worker_lost"
    assert first.prompt_tokens == told.prompt_tokens > 0
    assert told.attempt == 2
    # An ask that is repeated with its number, after the loss of a router, is not another placement.
    assert len(explain(decide(router, 4, name="a", attempt=2)).earlier) == 2


def test_one_of_several_prompts_is_found_by_the_id_the_client_has():
    """Prompts of one completion request are ID.0, ID.1; the client knows ID."""
    router = two_by_two()
    decide(router, 1, name="abc.0")
    decide(router, 2, name="abc.1")
    decide(router, 3, name="abcd")
    assert router.history.get("abc").ask.request_id == "abc.1"
    assert router.history.get("abc.0").ask.request_id == "abc.0"
    assert router.history.get("ab") is None


def test_a_decode_worker_that_does_it_alone_leaves_the_others_out_by_name():
    """Prefill workers, and decode workers that hold less, are taken off by the decision where the prompt is computed."""
    router = two_by_two()
    store_blocks(router.fleet.workers["d1"], [1, 2])
    record = decide(router, 1, tokens=40)
    assert record.placement.prefill is None
    assert record.placement.reasons[0] == "local_prefill"
    assert taken_off(record) == {"p1": "local_prefill", "p2": "local_prefill", "d2": "local_prefill"}
    assert cost_margin(record.decision) is None


def test_a_prefill_worker_whose_takers_the_request_excludes_is_in_no_pair():
    """It was weighed, and nobody is left that could take KV from it."""
    router = two_by_two()
    for name, role in (("p7", "prefill"), ("d7", "decode")):
        join(router, name, role, hash="seven")
    record = decide(router, 1, excluded_worker_ids=("d7",))
    assert taken_off(record) == {"d7": "excluded", "p7": "incompatible"}
    assert {c.prefill.worker_id for c in explain_candidates(record) if not c.removed_by} == {"p1", "p2"}


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_terms_add_up_under_every_policy(policy):
    """Whatever the unit: the sum of its terms is a candidate's cost, and the chosen pair is among them."""
    router = two_by_two(policy=policy)
    for number in range(1, 8):
        record = decide(router, number, pinned_prefill_worker_id="p1", pinned_decode_worker_id="d2")
        assert record.decision is not None
        weighed = [candidate for candidate in explain_candidates(record) if not candidate.removed_by]
        assert weighed
        for candidate in weighed:
            assert sum(value for _, value in candidate.terms) == pytest.approx(candidate.cost)
        chosen = (record.decision.prefill.ref, record.decision.decode.ref)
        assert chosen in [(c.prefill, c.decode) for c in weighed]


def test_the_wait_in_the_queue_is_told_and_counts_in_what_was_observed():
    """Who waited is explained as placed when its turn came; the error of the prediction leaves the wait out."""
    router = core(requests_per_decode_max=1, queue=QueueSettings())
    join(router, "d1", "decode")
    decide(router, 1)
    record = decide(router, 2)
    assert (record.placement, record.error, record.queued_s) == (None, None, None)
    router.report("f", 1, Report(kind=ReportKind.FINISHED, elapsed_s=3.0), now=3.0)
    [answer] = router.drain_queue(now=3.0, wall=9.0)
    record = router.history.get("r2")
    assert (answer.outcome, record.queued_s, record.decided_at_s) == (record.placement, 3.0, 9.0)
    router.report("f", 2, Report(kind=ReportKind.FIRST_TOKEN, elapsed_s=0.5), now=3.5)
    assert record.observed_ttft_s == 3.5
    assert [c.decode.worker_id for c in explain_candidates(record)] == ["d1"]
