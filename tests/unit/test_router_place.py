"""Decisions beyond the transcript: policies, limits, pins, labels, ranks, local prefill."""

from collections import Counter
from itertools import pairwise
from random import Random

import pytest

from kvmesh.core import Handoff, LoadRecord, Report, ReportKind
from kvmesh.core.planning import PlacementBounds
from kvmesh.errors import (
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
    UnsupportedError,
)
from services.router.core import RouterCore
from services.router.core_settings import CoreSettings
from services.router.explain import explain_candidates
from services.router.workers import reservations
from tests.unit.router_fleets import ask, core, description, join, store_blocks


def place(router: RouterCore, number: int, what=None, *, now: float = 0.0):
    return router.ask("f", number, what or ask(f"r{number}", [1, 2]), now=now, wall=now)


def finish(router: RouterCore, number: int) -> None:
    assert router.report("f", number, Report(kind=ReportKind.FINISHED, elapsed_s=1.0)) is not None


def two_by_two(**options) -> RouterCore:
    router = core(**options)
    for name, role in (("p1", "prefill"), ("p2", "prefill"), ("d1", "decode"), ("d2", "decode")):
        join(router, name, role)
    return router


def test_round_robin_takes_turns():
    """Each worker gets every second request, and the pairs are not always the same by accident of order."""
    router = two_by_two(policy="round_robin")
    placed = [place(router, number) for number in range(1, 9)]
    assert Counter(p.prefill.worker_id for p in placed) == {"p1": 4, "p2": 4}
    assert all(a.decode.worker_id != b.decode.worker_id for a, b in pairwise(placed))
    assert placed[0].reasons == ("round_robin",)


def test_least_loaded_goes_where_the_fewest_requests_are():
    """Told load and own placements count, whichever is more."""
    router = two_by_two(policy="least_loaded")
    router.fleet.on_load_record(router.fleet.workers["d1"], LoadRecord(worker_id="d1", epoch=1, running_requests=3))
    placed = [place(router, number).decode.worker_id for number in range(1, 5)]
    assert placed[:3] == ["d2", "d2", "d2"]


def test_random_repeats_with_its_seed_and_uses_everybody():
    """The generator is the only source of chance."""

    def run() -> list[str]:
        router = two_by_two(policy="random")
        return [place(router, number).decode.worker_id for number in range(1, 41)]

    assert run() == run()
    assert set(run()) == {"d1", "d2"}


def test_equal_costs_are_broken_by_the_generator():
    """An idle fleet does not send every first request to the same worker."""
    firsts = set()
    for seed in range(20):
        router = RouterCore(CoreSettings(), router_id="r", generator=Random(seed))
        for name in ("p1", "p2", "p3"):
            join(router, name, "prefill")
        join(router, "d1", "decode")
        firsts.add(place(router, 1).prefill.worker_id)
    assert firsts == {"p1", "p2", "p3"}


def test_equal_prompts_spread_once_the_queue_outweighs_the_overlap():
    """A hot prefix on a cold fleet: nobody starves, nobody takes all."""
    router = two_by_two()
    store_blocks(router.fleet.workers["p1"], [1, 2])
    what = [ask(f"r{n}", [1, 2], tokens=48) for n in range(1, 13)]
    placed = Counter(place(router, n, what[n - 1]).prefill.worker_id for n in range(1, 13))
    assert placed["p1"] >= placed["p2"] > 0


def test_local_prefill_when_decode_holds_nearly_all():
    """Off by default; with a bound, a decode worker that lacks no more computes the rest itself."""
    for bound, alone in ((0, False), (15, False), (16, True)):
        router = two_by_two(local_prefill_tokens_max=bound)
        store_blocks(router.fleet.workers["d2"], [1, 2])
        placement = place(router, 1, ask("r1", [1, 2, 3]))
        assert (placement.prefill is None) is alone
        if alone:
            assert placement.decode.worker_id == "d2"
            assert placement.reasons == ("local_prefill", "kv_overlap")
            assert placement.cached_tokens == 32


def test_hashes_of_another_block_size_match_nothing():
    """Equal numbers name different blocks when the size differs."""
    router = two_by_two()
    store_blocks(router.fleet.workers["p1"], [1, 2])
    assert place(router, 1, ask("r1", [1, 2], block_size_tokens=32, tokens=64)).cached_tokens == 0


def test_the_last_token_is_never_cached():
    """A fully held prompt still has its last token to compute."""
    router = two_by_two()
    store_blocks(router.fleet.workers["p1"], [1, 2])
    assert place(router, 1, ask("r1", [1, 2])).cached_tokens == 31


def test_full_workers_refuse_with_a_time():
    """Requests per decode worker and tokens per prefill worker are bounded; an idle prefill worker takes any prompt."""
    router = core(requests_per_decode_max=3, prompt_tokens_per_prefill_max=40)
    join(router, "p1", "prefill")
    join(router, "d1", "decode")
    assert place(router, 1, ask("r1", [1, 2, 3, 4])).prefill is not None
    assert place(router, 2, ask("r2", [5, 6, 7])).reasons[0] == "prefill_congested"
    with pytest.raises(OverloadedError) as refusal:
        place(router, 3)
    assert (refusal.value.reason, refusal.value.retry_after_s, refusal.value.request_id) == ("workers_full", 1.0, "r3")
    router.report("f", 1, Report(kind=ReportKind.PREFILLED, elapsed_s=0.1))
    assert place(router, 3).prefill is not None
    with pytest.raises(OverloadedError):
        place(router, 4)
    finish(router, 1)
    finish(router, 2)
    place(router, 4)


def test_a_reservation_is_reported_of_by_its_own_frontend_only():
    """An id that another frontend learnt, by mistake or not, ends nothing."""
    router = two_by_two()
    placed = place(router, 1)
    note = Report(kind=ReportKind.FINISHED, elapsed_s=1.0, reservation_id=placed.reservation_id)
    assert router.report("another", 1, note) is None
    assert len(router.book) == 1
    assert router.report("f", 1, note) is not None
    assert len(router.book) == 0


def test_the_routers_own_bound(monkeypatch):
    """Reservations are bounded over all workers together."""
    monkeypatch.setattr(reservations, "RESERVATIONS_MAX", 1)
    router = two_by_two()
    place(router, 1)
    with pytest.raises(OverloadedError) as refusal:
        place(router, 2)
    assert refusal.value.reason == "router_full"


def test_pins_and_exclusions():
    """Pinned workers are used or nobody is; an excluded one is not used."""
    router = two_by_two()
    placed = place(router, 1, ask("r1", [1], pinned_prefill_worker_id="p2", pinned_decode_worker_id="d2"))
    assert (placed.prefill.worker_id, placed.decode.worker_id, placed.reasons) == ("p2", "d2", ("pinned",))
    placed = place(router, 2, ask("r2", [1], excluded_worker_ids=("p1", "d1")))
    assert (placed.prefill.worker_id, placed.decode.worker_id) == ("p2", "d2")
    for field in ("pinned_decode_worker_id", "pinned_prefill_worker_id"):
        with pytest.raises(NotFoundError) as refusal:
            place(router, 3, ask("r3", [1], **{field: "d9"}))
        assert refusal.value.field == field
    router.fleet.disconnected(router.fleet.workers["d2"], "unreachable")
    with pytest.raises(UnavailableError):
        place(router, 4, ask("r4", [1], pinned_decode_worker_id="d2"))
    with pytest.raises(UnavailableError):
        place(router, 5, ask("r5", [1], excluded_worker_ids=("d1",)))


def test_a_pinned_prefill_worker_is_used_for_short_prompts_too():
    """A prompt that a decode worker would compute by itself goes where its sender wants it."""
    router = two_by_two()
    assert place(router, 1, ask("r1", [], tokens=8)).prefill is None
    placed = place(router, 2, ask("r2", [], tokens=8, pinned_prefill_worker_id="p2"))
    assert placed.prefill is not None and placed.prefill.worker_id == "p2"


def test_labels_are_required_or_preferred():
    """Required labels filter, preferred ones lean; labels nobody carries are refused as unsupported."""
    router = core()
    join(router, "d1", "decode", labels={"zone": "a"})
    join(router, "d2", "decode", labels={"zone": "b"})
    for number in range(1, 4):
        placed = place(router, number, ask(f"r{number}", [1], required_labels={"zone": "b"}))
        assert placed.decode.worker_id == "d2"
        finish(router, number)
    assert place(router, 9, ask("r9", [1], preferred_labels={"zone": "a"})).decode.worker_id == "d1"
    with pytest.raises(UnsupportedError) as refusal:
        place(router, 10, ask("r10", [1], required_labels={"zone": "c"}))
    assert refusal.value.field == "required_labels"


def test_workers_with_other_files_are_not_used():
    """A prompt stays with workers of the tokenizer that made it, prefill included. Without a digest every worker serves."""
    router = core()
    for name, role, files in (
        ("d-old", "decode", "aa"),
        ("d-new", "decode", "bb"),
        ("d-none", "decode", ""),
        ("p-old", "prefill", "aa"),
        ("p-new", "prefill", "bb"),
    ):
        join(router, name, role, files=files)
    long_prompt = list(range(1, 60))
    for number in range(1, 6):
        placed = place(router, number, ask(f"r{number}", long_prompt, files_digest="bb"))
        assert (placed.prefill.worker_id, placed.decode.worker_id) == ("p-new", "d-new")
    asked = ask("r6", long_prompt, files_digest="bb")
    removed = {worker.worker_id: reason for worker, reason in router.placer.removed(asked)}
    assert removed == {"d-old": "files", "d-none": "files", "p-old": "files"}
    with pytest.raises(UnavailableError, match="files"):
        place(router, 7, ask("r7", long_prompt, files_digest="cc"))
    assert {place(router, n, ask(f"r{n}", [n])).decode.worker_id for n in range(8, 30)} == {"d-old", "d-new", "d-none"}


def test_ranks_are_placed_on_one_by_one():
    """Each data-parallel rank has its own cache and its own load."""
    router = core()
    worker = join(router, "d1", "decode", ranks=2)
    router.index.device.store(worker.feed.bits[0], [1])
    router.index.device.store(worker.feed.bits[1], [1, 2])
    assert place(router, 1, ask("r1", [1, 2, 3])).decode.data_parallel_rank == 1
    placed = [place(router, n, ask(f"r{n}", [7, 8])).decode.data_parallel_rank for n in range(2, 6)]
    assert set(placed) == {0, 1}


def test_a_pin_names_a_worker_or_one_of_its_ranks():
    router = core()
    join(router, "d1", "decode", ranks=2)
    join(router, "d2", "decode", ranks=2)
    for rank in (0, 1):
        placed = [
            place(router, 2 * n + rank, ask(f"r{n}{rank}", [n], pinned_decode_worker_id=f"d1/{rank}")) for n in range(5)
        ]
        assert {(each.decode.worker_id, each.decode.data_parallel_rank) for each in placed} == {("d1", rank)}
    placed = [place(router, 50 + n, ask(f"w{n}", [n], pinned_decode_worker_id="d2")) for n in range(8)]
    assert {(each.decode.worker_id, each.decode.data_parallel_rank) for each in placed} == {("d2", 0), ("d2", 1)}
    for unknown in ("d1/2", "d1/", "d3/0", "d1/x"):
        with pytest.raises(NotFoundError):
            place(router, 90, ask("r9", [1], pinned_decode_worker_id=unknown))


def test_the_address_of_a_rank():
    """Ranks that do not share a bootstrap server are met at their own."""
    router = core()
    join(
        router, "p1", "prefill", ranks=2, handoffs=(Handoff.RENDEZVOUS,), rendezvous="p1:9000",
        rank_rendezvous=("p1:9000", "p1:9001"),
    )  # fmt: skip
    join(router, "d1", "decode", handoffs=(Handoff.RENDEZVOUS,))
    for rank, address in ((0, "p1:9000"), (1, "p1:9001")):
        placed = place(router, rank, ask(f"r{rank}", [rank], pinned_prefill_worker_id=f"p1/{rank}"))
        assert (placed.prefill.data_parallel_rank, placed.rendezvous_address) == (rank, address)


def test_an_engine_without_events_is_remembered():
    """Its own placements stand for its cache, and never more blocks than it has."""
    router = core()
    worker = join(router, "d1", "decode", features=(), kv_blocks=3)
    place(router, 1, ask("r1", [1, 2]))
    assert worker.feed.trust == "approximate"
    assert place(router, 2, ask("r2", [1, 2, 3])).cached_tokens == 32
    place(router, 3, ask("r3", [7, 8]))
    assert worker.feed.blocks <= 3


def test_a_rendezvous_pair_is_told_where_to_meet():
    """The handoff is the engines' own; both legs learn the prefill side's address."""
    router = core()
    join(router, "p1", "prefill", handoffs=(Handoff.RENDEZVOUS,), rendezvous="p1:9000")
    join(router, "d1", "decode", handoffs=(Handoff.RENDEZVOUS,))
    placed = place(router, 1)
    assert (placed.handoff, placed.rendezvous_address) == (Handoff.RENDEZVOUS, "p1:9000")
    join(router, "d0", "decode", handoffs=(Handoff.SEQUENTIAL,))
    assert place(router, 2, ask("r2", [1], pinned_decode_worker_id="d0")).prefill is None


def test_reservations_come_to_zero_whatever_happens():
    """Finished, failed, cancelled, expired, orphaned: the workers' sums return to where they were."""
    router = two_by_two(reservation_grace_s=5)
    place(router, 1)
    place(router, 2, ask("r2", [1], timeout_s=3.0))
    place(router, 3)
    place(router, 4)
    finish(router, 1)
    assert [r.request_id for r in router.expire(now=3.0)] == ["r2"]
    router.on_stream_ended("f", now=4.0)
    router.report("f", 3, Report(kind=ReportKind.PROGRESS, elapsed_s=1.0))
    assert [r.request_id for r in router.expire(now=9.0)] == ["r4"]
    router.report("f", 3, Report(kind=ReportKind.FAILED, elapsed_s=1.0))
    for target in router.fleet.targets():
        sums = (target.requests_in_flight, target.prompt_tokens_in_flight, target.kv_blocks_in_flight)
        assert sums == (0, 0, 0)
    assert router.report("f", 3, Report(kind=ReportKind.FINISHED, elapsed_s=1.0)) is None
    assert len(router.book) == 0


def test_numbers_in_use():
    """A number in use is refused for another request, taken over for the same one, and free again after the stream."""
    router = two_by_two()
    place(router, 1)
    with pytest.raises(InvalidRequestError):
        place(router, 1, ask("other", [1]))
    place(router, 1)
    assert len(router.book) == 1
    router.on_stream_ended("f", now=0.0)
    place(router, 1, ask("other", [1]))
    assert len(router.book) == 1


def test_the_number_of_a_frontend_that_reported_to_a_peer_is_free():
    """The frontend moved to a peer and died there; its successor counts from one."""
    router = two_by_two()
    place(router, 1)
    router.book.get_own("f", 1).keeper = "router-2"
    place(router, 1, ask("other", [1]))
    assert [each.request_id for each in router.book] == ["other"]


def test_explanations_hold_terms_that_add_up():
    """Best first, the chosen pair at the top, filtered workers last with the filter's name."""
    router = two_by_two()
    store_blocks(router.fleet.workers["p1"], [1])
    join(router, "p9", "prefill", hash="other")
    placement = place(router, 1)
    choice = router.history.get("r1").decision
    found = explain_candidates(router.history.get("r1"))
    assert len(found) == 5
    assert (found[0].prefill, found[0].cost) == (placement.prefill, choice.cost)
    for candidate in found[:4]:
        assert sum(value for _, value in candidate.terms) == pytest.approx(candidate.cost)
    assert (found[4].prefill.worker_id, found[4].removed_by) == ("p9", "incompatible")


def test_the_history_is_bounded():
    """The oldest placement is forgotten first."""
    router = two_by_two(history_max=2)
    for number in range(1, 4):
        place(router, number)
    assert router.history.get("r1") is None
    assert router.history.get("r3") is not None


def test_a_worker_that_began_anew_has_nothing_in_flight():
    """Old reservations settle on the old process's books and do not spoil the new one's."""
    router = core()
    join(router, "d1", "decode")
    place(router, 1)
    join(router, "d1", "decode", epoch=2)
    [target] = router.fleet.workers["d1"].targets
    assert target.requests_in_flight == 0
    finish(router, 1)
    assert target.requests_in_flight == 0


def test_a_policy_that_does_not_count_seconds_keeps_prompts_on_prefill_workers():
    """However long their queue: a pair that takes two turns is not dearer than one worker that takes one."""
    for policy in ("round_robin", "least_loaded", "random", "power_of_two"):
        router = core(policy=policy)
        for i in range(2):
            join(router, f"p{i}", "prefill")
            join(router, f"d{i}", "decode")
        placed = [place(router, number, ask(f"r{number}", tokens=60_000)) for number in range(1, 7)]
        assert all(placement.prefill is not None for placement in placed), policy


def test_the_planner_deflects_prompts_up_to_its_bound_where_that_is_cheaper():
    """Both prefill workers are busy for less than a congestion: with the bound a decode worker computes short prompts.

    Longer ones and other models still go through a prefill worker, an idle prefill worker is still used, and 0 ends it.
    """
    router = two_by_two(prefill_congested_s=1e9)
    model = ask("r", [1]).model
    router.placer.set_bounds(model, PlacementBounds(deflect_tokens=300))
    for number in range(1, 41):
        place(router, number, ask(f"r{number}", [1000 + number], tokens=4000))
    placement = place(router, 41, ask("r41", [1], tokens=300))
    assert placement.prefill is None
    assert placement.reasons[0] == "deflected"
    assert place(router, 42, ask("r42", [2], tokens=301)).prefill is not None
    # The bound holds for longer prompts than one step of the decode worker has room for, as the planner counts with the mean of the steps.
    router.placer.set_bounds(model, PlacementBounds(deflect_tokens=3000))
    assert place(router, 44, ask("r44", [4], tokens=3000)).reasons[0] == "deflected"
    router.placer.set_bounds(model, PlacementBounds())
    router.placer.set_bounds("other", PlacementBounds(deflect_tokens=300))
    assert place(router, 43, ask("r43", [3], tokens=300)).prefill is not None


def test_a_worker_that_left_cannot_come_back_by_its_description():
    """A description that was on its way when the worker left changes nothing: its targets would take requests for ever."""
    router = core()
    left = join(router, "d1", "decode")
    targets = left.targets
    router.fleet.unregister("d1")
    router.fleet.describe(left, description("d1", "decode", ranks=2))
    assert left.targets is targets and all(target.column < 0 for target in targets)
