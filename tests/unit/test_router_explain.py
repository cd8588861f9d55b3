"""Explanations of decisions: every candidate, the filter that removed a worker, the margin, and the observed outcome."""

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


def removed_workers(record: DecisionRecord) -> dict[str, str]:
    return {
        (candidate.prefill or candidate.decode).worker_id: candidate.removed_by
        for candidate in explain_candidates(record)
        if candidate.removed_by
    }


def test_filters_of_the_request_are_explained():
    """Workers that the request excludes, or does not pin, are listed with the filter, like those that the state of the fleet removes."""
    router = two_by_two()
    join(router, "d3", "decode")
    join(router, "p9", "prefill", hash="other")
    router.fleet.disconnected(router.fleet.workers["d3"], "unreachable")
    record = decide(router, 1, excluded_worker_ids=("d1",), pinned_prefill_worker_id="p2")
    assert removed_workers(record) == {"d1": "excluded", "p1": "pinned", "d3": "unreachable", "p9": "incompatible"}
    scored = [candidate for candidate in explain_candidates(record) if not candidate.removed_by]
    assert [(c.prefill.worker_id, c.decode.worker_id) for c in scored] == [("p2", "d2")]
    assert cost_margin(record.decision) is None


def test_every_worker_of_the_model_is_explained():
    """Every worker of the model is listed, either as a candidate or as removed."""
    router = two_by_two()
    join(router, "d9", "decode", labels={"zone": "b"})
    record = decide(router, 1, excluded_worker_ids=("p1",))
    explanation = {t.worker_id for c in explain_candidates(record) for t in (c.prefill, c.decode) if t is not None}
    assert explanation == {"p1", "p2", "d1", "d2", "d9"}


@pytest.mark.parametrize("waits", [True, False])
def test_workers_without_room_are_explained(waits):
    """A full worker is listed as removed when the request is placed elsewhere, queued or refused."""
    router = core(requests_per_decode_max=1, history_max=10, queue=QueueSettings(requests_max=int(waits)))
    join(router, "d1", "decode")
    first = decide(router, 1)
    join(router, "d2", "decode")
    second = decide(router, 2)
    assert removed_workers(first) == {}
    assert removed_workers(second) == {"d1": "full"}
    third = decide(router, 3)
    assert (third.error is None) is waits
    assert removed_workers(third) == {"d1": "full", "d2": "full"}


def test_a_refusal_lists_the_removed_workers():
    """If no worker remains, each worker is listed with the filter that removed it."""
    router = two_by_two()
    for name in ("d1", "d2"):
        router.fleet.disconnected(router.fleet.workers[name], "silent")
    record = decide(router, 1)
    assert record.error.reason == "no_worker"
    assert removed_workers(record) == {"d1": "silent", "d2": "silent"}
    record = decide(router, 2, name="r2", required_labels={"zone": "a"})
    assert set(removed_workers(record).values()) == {"labels"}


def test_an_explanation_shows_the_state_at_the_decision():
    """A worker that was removed at the time of the decision is listed so even after it has recovered."""
    router = two_by_two()
    router.fleet.disconnected(router.fleet.workers["p1"], "unreachable")
    record = decide(router, 1)
    router.fleet.connected(router.fleet.workers["p1"])
    decide(router, 2)
    assert removed_workers(record) == {"p1": "unreachable"}


def test_the_margin_is_the_lead_over_the_second_best():
    """The margin is never negative, also for a policy that does not choose the lowest cost."""
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
    """The bounded list of candidates contains the chosen pair, among 400 pairs of equal cost and after a random choice of a costlier pair."""
    router = core(policy=policy)
    for number in range(20):
        join(router, f"p{number:02d}", "prefill")
        join(router, f"d{number:02d}", "decode")
    store_blocks(router.fleet.workers["p07"], [1, 2])
    for number in range(1, 9):
        record = decide(router, number, hashes=[50 * number, 50 * number + 1])
        explanation = explain(record)
        assert len([each for each in explanation.candidates if not each.removed_by]) == CANDIDATES_MAX
        assert sum(is_chosen(each, explanation) for each in explanation.candidates) == 1


def test_observed_times_and_reports_are_recorded():
    """The record keeps the time of the first token, and the settling report even after many other reports."""
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


def test_earlier_placements_of_a_request_are_kept():
    """The explanation of a request that was placed again lists each earlier placement with its reports and prompt tokens."""
    router = two_by_two()
    decide(router, 1, name="a")
    failed = Report(kind=ReportKind.FAILED, elapsed_s=2.0, error=LostError("gone"), failed_worker_id="d1")
    router.report("f", 1, failed)
    decide(router, 2, name="a", attempt=1, excluded_worker_ids=("d1",))
    explanation = from_explanation(to_explanation(explain(decide(router, 3, name="a", attempt=2))))
    assert [(each.attempt, len(each.reports)) for each in explanation.earlier] == [(0, 1), (1, 0)]
    first = explanation.earlier[0]
    assert first.placement is not None and first.placement.decode.worker_id in ("d1", "d2")
    assert first.reports[0].error is not None and first.reports[0].error.reason == "worker_lost"
    assert first.prompt_tokens == explanation.prompt_tokens > 0
    assert explanation.attempt == 2
    # An ask that a frontend repeats with the same attempt, after the loss of a router, is not another placement.
    assert len(explain(decide(router, 4, name="a", attempt=2)).earlier) == 2


def test_one_of_several_prompts_is_found_by_the_clients_id():
    """The prompts of one completion request have the ids ID.0 and ID.1, and the client knows only ID. ID finds the newest of them."""
    router = two_by_two()
    decide(router, 1, name="abc.0")
    decide(router, 2, name="abc.1")
    decide(router, 3, name="abcd")
    assert router.history.get("abc").ask.request_id == "abc.1"
    assert router.history.get("abc.0").ask.request_id == "abc.0"
    assert router.history.get("ab") is None


def test_local_prefill_is_explained_as_removing_the_other_workers():
    """If a decode worker computes the prompt, the other workers are listed as removed by `local_prefill`."""
    router = two_by_two()
    store_blocks(router.fleet.workers["d1"], [1, 2])
    record = decide(router, 1, tokens=40)
    assert record.placement.prefill is None
    assert record.placement.reasons[0] == "local_prefill"
    assert removed_workers(record) == {"p1": "local_prefill", "p2": "local_prefill", "d2": "local_prefill"}
    assert cost_margin(record.decision) is None


def test_a_prefill_worker_without_a_compatible_decode_worker_is_removed():
    """If the request excludes all decode workers that are compatible with a prefill worker, that prefill worker is listed as incompatible."""
    router = two_by_two()
    for name, role in (("p7", "prefill"), ("d7", "decode")):
        join(router, name, role, hash="seven")
    record = decide(router, 1, excluded_worker_ids=("d7",))
    assert removed_workers(record) == {"d7": "excluded", "p7": "incompatible"}
    assert {c.prefill.worker_id for c in explain_candidates(record) if not c.removed_by} == {"p1", "p2"}


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_terms_add_up_under_every_policy(policy):
    """The terms of each candidate add up to its cost, and the chosen pair is one of the candidates."""
    router = two_by_two(policy=policy)
    for number in range(1, 8):
        record = decide(router, number, pinned_prefill_worker_id="p1", pinned_decode_worker_id="d2")
        assert record.decision is not None
        scored = [candidate for candidate in explain_candidates(record) if not candidate.removed_by]
        assert scored
        for candidate in scored:
            assert sum(value for _, value in candidate.terms) == pytest.approx(candidate.cost)
        chosen = (record.decision.prefill.ref, record.decision.decode.ref)
        assert chosen in [(c.prefill, c.decode) for c in scored]


def test_the_explanation_includes_the_time_in_the_queue():
    """A queued request is explained as of its placement. The observed time to the first token includes the time in the queue."""
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
