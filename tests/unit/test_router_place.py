"""Placement beyond the transcript: policies, limits, pins, labels, ranks, local prefill."""

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
    """Each worker gets every second request of its role."""
    router = two_by_two(policy="round_robin")
    placed = [place(router, number) for number in range(1, 9)]
    assert Counter(p.prefill.worker_id for p in placed) == {"p1": 4, "p2": 4}
    assert all(a.decode.worker_id != b.decode.worker_id for a, b in pairwise(placed))
    assert placed[0].reasons == ("round_robin",)


def test_least_loaded_takes_the_worker_with_the_fewest_requests():
    """The load of a worker is the larger of the reported requests and the router's own placements."""
    router = two_by_two(policy="least_loaded")
    router.fleet.on_load_record(router.fleet.workers["d1"], LoadRecord(worker_id="d1", epoch=1, running_requests=3))
    placed = [place(router, number).decode.worker_id for number in range(1, 5)]
    assert placed[:3] == ["d2", "d2", "d2"]


def test_random_repeats_with_its_seed_and_uses_all_workers():
    """The generator is the only source of randomness."""

    def run() -> list[str]:
        router = two_by_two(policy="random")
        return [place(router, number).decode.worker_id for number in range(1, 41)]

    assert run() == run()
    assert set(run()) == {"d1", "d2"}


def test_the_generator_breaks_ties():
    """Routers with different seeds send the first request of an idle fleet to different workers."""
    firsts = set()
    for seed in range(20):
        router = RouterCore(CoreSettings(), router_id="r", generator=Random(seed))
        for name in ("p1", "p2", "p3"):
            join(router, name, "prefill")
        join(router, "d1", "decode")
        firsts.add(place(router, 1).prefill.worker_id)
    assert firsts == {"p1", "p2", "p3"}


def test_equal_prompts_spread_once_the_queue_outweighs_the_overlap():
    """Requests with a hot prefix also use the worker that has not cached it."""
    router = two_by_two()
    store_blocks(router.fleet.workers["p1"], [1, 2])
    what = [ask(f"r{n}", [1, 2], tokens=48) for n in range(1, 13)]
    placed = Counter(place(router, n, what[n - 1]).prefill.worker_id for n in range(1, 13))
    assert placed["p1"] >= placed["p2"] > 0


def test_local_prefill_when_decode_has_cached_nearly_all():
    """A decode worker computes the prompt itself if at most `local_prefill_tokens_max` tokens are not cached there. 0 turns this off."""
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
    """Equal hashes name different blocks if the block size differs."""
    router = two_by_two()
    store_blocks(router.fleet.workers["p1"], [1, 2])
    assert place(router, 1, ask("r1", [1, 2], block_size_tokens=32, tokens=64)).cached_tokens == 0


def test_the_last_token_is_never_cached():
    """Even if all blocks of a prompt are cached, its last token must be computed."""
    router = two_by_two()
    store_blocks(router.fleet.workers["p1"], [1, 2])
    assert place(router, 1, ask("r1", [1, 2])).cached_tokens == 31


def test_full_workers_refuse_with_a_retry_delay():
    """Requests per decode worker and tokens per prefill worker are bounded. An idle prefill worker accepts any prompt."""
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


def test_only_its_own_frontend_can_settle_a_reservation():
    """A report of another frontend with the reservation's id is ignored."""
    router = two_by_two()
    placed = place(router, 1)
    note = Report(kind=ReportKind.FINISHED, elapsed_s=1.0, reservation_id=placed.reservation_id)
    assert router.report("another", 1, note) is None
    assert len(router.book) == 1
    assert router.report("f", 1, note) is not None
    assert len(router.book) == 0


def test_reservations_of_a_router_are_bounded(monkeypatch):
    """The bound counts the reservations on all workers together."""
    monkeypatch.setattr(reservations, "RESERVATIONS_MAX", 1)
    router = two_by_two()
    place(router, 1)
    with pytest.raises(OverloadedError) as refusal:
        place(router, 2)
    assert refusal.value.reason == "router_full"


def test_pins_and_exclusions():
    """A request with a pin is placed on the pinned workers or refused, and is never placed on an excluded worker."""
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
    """The pin overrides the rule that a decode worker computes a short prompt by itself."""
    router = two_by_two()
    assert place(router, 1, ask("r1", [], tokens=8)).prefill is None
    placed = place(router, 2, ask("r2", [], tokens=8, pinned_prefill_worker_id="p2"))
    assert placed.prefill is not None and placed.prefill.worker_id == "p2"


def test_labels_are_required_or_preferred():
    """Required labels filter, preferred labels lower the cost, and labels that no worker has are refused as unsupported."""
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
    """A request is placed only on workers with the model files of its tokenizer. A request without a digest can use every worker."""
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


def test_ranks_are_separate_candidates():
    """Each data-parallel rank has its own cache and load."""
    router = core()
    worker = join(router, "d1", "decode", ranks=2)
    router.index.device.store(worker.feed.bits[0], [1])
    router.index.device.store(worker.feed.bits[1], [1, 2])
    assert place(router, 1, ask("r1", [1, 2, 3])).decode.data_parallel_rank == 1
    placed = [place(router, n, ask(f"r{n}", [7, 8])).decode.data_parallel_rank for n in range(2, 6)]
    assert set(placed) == {0, 1}


def test_a_pin_is_a_worker_or_one_of_its_ranks():
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
    """If ranks have separate bootstrap servers, the placement has the address of the chosen rank's server."""
    router = core()
    join(
        router, "p1", "prefill", ranks=2, handoffs=(Handoff.RENDEZVOUS,), rendezvous="p1:9000",
        rank_rendezvous=("p1:9000", "p1:9001"),
    )  # fmt: skip
    join(router, "d1", "decode", handoffs=(Handoff.RENDEZVOUS,))
    for rank, address in ((0, "p1:9000"), (1, "p1:9001")):
        placed = place(router, rank, ask(f"r{rank}", [rank], pinned_prefill_worker_id=f"p1/{rank}"))
        assert (placed.prefill.data_parallel_rank, placed.rendezvous_address) == (rank, address)


def test_the_cache_of_an_engine_without_events_is_approximated():
    """Its placements approximate its cache, with at most as many blocks as it has."""
    router = core()
    worker = join(router, "d1", "decode", features=(), kv_blocks=3)
    place(router, 1, ask("r1", [1, 2]))
    assert worker.feed.trust == "approximate"
    assert place(router, 2, ask("r2", [1, 2, 3])).cached_tokens == 32
    place(router, 3, ask("r3", [7, 8]))
    assert worker.feed.blocks <= 3


def test_a_rendezvous_placement_has_the_prefill_address():
    """Both legs need the address of the prefill worker. A decode worker without this handoff is placed alone."""
    router = core()
    join(router, "p1", "prefill", handoffs=(Handoff.RENDEZVOUS,), rendezvous="p1:9000")
    join(router, "d1", "decode", handoffs=(Handoff.RENDEZVOUS,))
    placed = place(router, 1)
    assert (placed.handoff, placed.rendezvous_address) == (Handoff.RENDEZVOUS, "p1:9000")
    join(router, "d0", "decode", handoffs=(Handoff.SEQUENTIAL,))
    assert place(router, 2, ask("r2", [1], pinned_decode_worker_id="d0")).prefill is None


def test_all_reservations_are_released():
    """After finished, failed, cancelled, expired and orphaned requests the sums of all workers are zero."""
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


def test_an_ask_number_in_use_is_refused_or_taken_over():
    """A number in use is refused for another request and taken over for the same one. It is free again when the stream ends."""
    router = two_by_two()
    place(router, 1)
    with pytest.raises(InvalidRequestError):
        place(router, 1, ask("other", [1]))
    place(router, 1)
    assert len(router.book) == 1
    router.on_stream_ended("f", now=0.0)
    place(router, 1, ask("other", [1]))
    assert len(router.book) == 1


def test_ask_numbers_of_a_restarted_frontend_are_free():
    """If a frontend moved to a peer and died there, its successor counts from one and reuses its ask numbers here."""
    router = two_by_two()
    place(router, 1)
    router.book.get_own("f", 1).keeper = "router-2"
    place(router, 1, ask("other", [1]))
    assert [each.request_id for each in router.book] == ["other"]


def test_explained_candidates_are_sorted_and_complete():
    """The chosen pair is first, the terms of each candidate add up to its cost, and removed workers are last with the filter's name."""
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
    """The oldest placement is removed first."""
    router = two_by_two(history_max=2)
    for number in range(1, 4):
        place(router, number)
    assert router.history.get("r1") is None
    assert router.history.get("r3") is not None


def test_a_restarted_worker_has_nothing_in_flight():
    """Settling a reservation of the old process does not change the counts of the new one."""
    router = core()
    join(router, "d1", "decode")
    place(router, 1)
    join(router, "d1", "decode", epoch=2)
    [target] = router.fleet.workers["d1"].targets
    assert target.requests_in_flight == 0
    finish(router, 1)
    assert target.requests_in_flight == 0


def test_policies_without_times_keep_prompts_on_prefill_workers():
    """Their costs are not times, so they never prefer a single decode worker over a pair because of the prefill queue."""
    for policy in ("round_robin", "least_loaded", "random", "power_of_two"):
        router = core(policy=policy)
        for i in range(2):
            join(router, f"p{i}", "prefill")
            join(router, f"d{i}", "decode")
        placed = [place(router, number, ask(f"r{number}", tokens=60_000)) for number in range(1, 7)]
        assert all(placement.prefill is not None for placement in placed), policy


def test_short_prompts_are_deflected_within_the_planners_bound():
    """With a bound of the planner, and busy but not congested prefill workers, a decode worker computes short prompts.

    Longer prompts and other models still use a prefill worker, and so does every prompt without a bound.
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
    # The bound may exceed the room in one step of the decode worker, because the planner uses the mean over the steps.
    router.placer.set_bounds(model, PlacementBounds(deflect_tokens=3000))
    assert place(router, 44, ask("r44", [4], tokens=3000)).reasons[0] == "deflected"
    router.placer.set_bounds(model, PlacementBounds())
    router.placer.set_bounds("other", PlacementBounds(deflect_tokens=300))
    assert place(router, 43, ask("r43", [3], tokens=300)).prefill is not None


def test_a_late_description_does_not_restore_a_removed_worker():
    """Otherwise the targets of a worker that is no longer registered would get requests forever."""
    router = core()
    left = join(router, "d1", "decode")
    targets = left.targets
    router.fleet.unregister("d1")
    router.fleet.describe(left, description("d1", "decode", ranks=2))
    assert left.targets is targets and all(target.column < 0 for target in targets)
