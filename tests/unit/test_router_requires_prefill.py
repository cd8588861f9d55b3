"""Decode workers that cannot compute prompts are placed with a prefill worker, or not at all."""

from dataclasses import replace

import pytest

from kvmesh.core import Handoff, LoadRecord, Report, ReportKind
from kvmesh.errors import LostError, OverloadedError, UnavailableError
from services.router.core import RouterCore
from tests.unit.router_fleets import ask, core, join

RENDEZVOUS = {"handoffs": (Handoff.RENDEZVOUS,), "hash": "sglang"}


def rendezvous_pair(**settings: object) -> RouterCore:
    router = core(**settings)
    join(router, "p1", "prefill", rendezvous="p1:9000", **RENDEZVOUS)
    join(router, "d1", "decode", requires_prefill=True, **RENDEZVOUS)
    return router


def place(router: RouterCore, number: int, wanted=None, *, now: float = 0.0):
    return router.ask("f", number, wanted or ask(f"r{number}", [1, 2]), now=now, wall=now)


@pytest.mark.parametrize("tokens", [1, 5, 60_000])
def test_no_local_prefill_however_short_or_late(tokens: int):
    """A prefill worker is used for very short prompts, and even if it is congested."""
    router = rendezvous_pair(prefill_congested_s=0.0)
    for number in range(1, 5):
        placed = place(router, number, ask(f"r{number}", tokens=tokens))
        assert placed.prefill is not None and placed.prefill.worker_id == "p1"
        assert (placed.handoff, placed.rendezvous_address) == (Handoff.RENDEZVOUS, "p1:9000")


def test_without_a_prefill_worker_the_request_is_refused():
    """The refusal has its own reason and a retry delay, also if the request excludes the only prefill worker."""
    router = core()
    join(router, "d1", "decode", requires_prefill=True, **RENDEZVOUS)
    with pytest.raises(UnavailableError) as refused:
        place(router, 1)
    assert refused.value.reason == "no_prefill_worker" and refused.value.retry_after_s
    router = rendezvous_pair()
    with pytest.raises(UnavailableError) as refused:
        place(router, 1, ask("r1", [1], excluded_worker_ids=("p1",)))
    assert refused.value.reason == "no_prefill_worker"


def test_a_prefill_worker_without_a_rendezvous_address_is_not_used():
    router = core()
    join(router, "p1", "prefill", **RENDEZVOUS)
    join(router, "d1", "decode", requires_prefill=True, **RENDEZVOUS)
    with pytest.raises(UnavailableError):
        place(router, 1)


def test_pairs_are_of_one_engine():
    """In a mesh of two engines each pair is of one engine. When a prefill worker is lost, the other engine's decode worker serves."""
    router = rendezvous_pair()
    join(router, "p2", "prefill", hash="vllm")
    join(router, "d2", "decode", hash="vllm")
    pairs = set()
    for number in range(1, 60):
        placed = place(router, number, ask(f"r{number}", [number], tokens=400))
        pairs.add((placed.prefill.worker_id if placed.prefill else "", placed.decode.worker_id))
    assert {("p1", "d1"), ("p2", "d2")} <= pairs <= {("p1", "d1"), ("p2", "d2"), ("", "d2")}
    router.fleet.unregister("p1")
    for number in range(60, 80):
        assert place(router, number, ask(f"r{number}", tokens=400)).decode.worker_id == "d2"


def test_a_full_pair_is_refused_as_full():
    """The decode worker does not compute prompts for its full prefill worker."""
    router = rendezvous_pair(prompt_tokens_per_prefill_max=100)
    place(router, 1, ask("r1", tokens=200))
    with pytest.raises(OverloadedError):
        place(router, 2, ask("r2", tokens=200))


def test_a_paused_prefill_worker_gets_a_probe():
    """If breakers leave no prefill worker, a request probes one before its pause ends, as for decode workers."""
    router = rendezvous_pair()
    number = 0

    def fail(now: float) -> None:
        nonlocal number
        number += 1
        place(router, number, ask(f"r{number}", [number]), now=now)
        failed = Report(kind=ReportKind.FAILED, elapsed_s=0.1, error=LostError("x"), failed_worker_id="p1")
        router.report("f", number, failed, now=now)

    for _ in range(5):
        fail(0.0)
    fail(1.1)  # The first pause is over. The probe fails, so the second pause takes two seconds.
    with pytest.raises(UnavailableError):
        place(router, 500, now=1.5)
    assert place(router, 501, now=2.2).prefill.worker_id == "p1"


def load(**values: int) -> LoadRecord:
    return LoadRecord(worker_id="d1", epoch=1, sequence=1, kv_blocks_total=1000, running_requests_max=64, **values)


def test_a_decode_worker_whose_preallocation_queue_grows_is_full():
    """It is full regardless of its running batch and blocks, even if this router placed no requests there."""
    router = rendezvous_pair()
    worker = router.fleet.workers["d1"]
    for queues in ({"preallocating_requests": 3}, {"preallocating_requests": 1, "retracted_requests": 2}):
        router.fleet.on_load_record(worker, load(running_requests=1, **queues))
        with pytest.raises(OverloadedError):
            place(router, 1)
    router.fleet.on_load_record(worker, load(running_requests=1, preallocating_requests=2))
    place(router, 1)


def test_queued_requests_raise_the_cost():
    """A decode worker with an empty preallocation queue is preferred to one with as many requests of which some are queued."""
    router = rendezvous_pair()
    join(router, "d0", "decode", requires_prefill=True, **RENDEZVOUS)
    blocked = load(running_requests=4, preallocating_requests=2)
    router.fleet.on_load_record(router.fleet.workers["d0"], replace(blocked, worker_id="d0"))
    router.fleet.on_load_record(router.fleet.workers["d1"], load(running_requests=6))
    assert {place(router, number, ask(f"r{number}", [number])).decode.worker_id for number in range(1, 5)} == {"d1"}
