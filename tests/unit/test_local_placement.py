"""Placement without a router: which workers qualify, and that requests spread evenly."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.core import Ask, Handoff
from kvmesh.discovery.base import Health, Instance
from kvmesh.errors import OverloadedError, UnavailableError
from services.frontend.model_cards import Described, WorkerCard
from services.frontend.pipeline import local_placement
from services.frontend.pipeline.local_placement import LocalPlacer

SEQUENTIAL, RENDEZVOUS = (Handoff.SEQUENTIAL,), (Handoff.RENDEZVOUS,)


def worker(worker_id: str, role: str, *, key: str = "k", **changes: Any) -> Described:
    own = {"health": Health.PASSING, "is_draining": False}
    own |= {name: changes.pop(name) for name in list(changes) if name in own}
    meta = {"role": role, "epoch": "7", "kv_compatibility_hash": key, **changes.pop("meta", {})}
    card = {"handoffs": SEQUENTIAL, "features": ("logprobs",), **changes}
    return (
        Instance(service=role, instance_id=worker_id, host="h", port=1, meta=meta, tags=(), **own),
        WorkerCard(name="m", source="m", context_tokens_max=100, vocabulary_size=10, **card),
    )


def ask(**changes: Any) -> Ask:
    return Ask(request_id="r", model="m", prompt_tokens=100, **changes)


def placed(workers: list[Described], **changes: Any) -> tuple[str, str, Handoff | None]:
    placement = LocalPlacer().place(ask(**changes), workers)
    prefill = placement.prefill.worker_id if placement.prefill is not None else ""
    return prefill, placement.decode.worker_id, placement.handoff


def test_pairs_have_compatible_kv() -> None:
    """Pairs have the same KV layout. If no prefill worker has the decode worker's layout, the decode worker computes the prompt."""
    assert placed([worker("p", "prefill"), worker("d", "decode")]) == ("p", "d", Handoff.SEQUENTIAL)
    assert placed([worker("p", "prefill", key="other"), worker("d", "decode")]) == ("", "d", None)
    meeting = {"handoffs": RENDEZVOUS}
    prefill = worker("p", "prefill", rendezvous_address="h:2", **meeting)
    assert placed([prefill, worker("d", "decode", requires_prefill=True, **meeting)]) == ("p", "d", Handoff.RENDEZVOUS)
    with pytest.raises(UnavailableError):
        placed([worker("p", "prefill", key="other"), worker("d", "decode", requires_prefill=True)])


@pytest.mark.parametrize(
    ("unfit", "ask_changes"),
    [
        ({"is_draining": True}, {}),
        ({"health": Health.CRITICAL}, {}),
        ({}, {"excluded_worker_ids": ("d",)}),
        ({}, {"required_features": ("seed",)}),
        ({}, {"adapter": "a"}),
        ({}, {"required_labels": {"zone": "a"}}),
        ({}, {"files_digest": "other"}),
        ({}, {"pinned_decode_worker_id": "e"}),
    ],
)
def test_workers_that_cannot_serve_a_request_are_not_used(unfit: dict[str, Any], ask_changes: dict[str, Any]) -> None:
    """A worker that drains, fails its check, is excluded or lacks what the request needs is not used."""
    fit = {
        "features": ("seed",),
        "adapters": ("a",),
        "files_digest": "other",
        "meta": {"label-zone": "a"},
    }
    assert placed([worker("d", "decode", **unfit), worker("e", "decode", **fit)], **ask_changes)[1] == "e"
    with pytest.raises(UnavailableError):
        placed([worker("d", "decode", **unfit)], **ask_changes)


@given(st.lists(st.booleans(), max_size=60))
def test_requests_spread_evenly(settles: list[bool]) -> None:
    """The numbers of requests differ by at most one while no request ends, and are zero after all have ended."""
    placer = LocalPlacer()
    workers = [worker(name, role) for role in ("prefill", "decode") for name in (f"{role}-0", f"{role}-1", f"{role}-2")]
    running = []
    for settles_one in settles:
        if settles_one and running:
            placer.settle(running.pop(0))
        else:
            running.append(placer.place(ask(), workers))
            counts = [placer.in_flight(f"decode-{number}") for number in range(3)]
            assert max(counts) - min(counts) <= 1 + sum(settles)
    for placement in running:
        placer.settle(placement)
    assert all(placer.in_flight(instance.instance_id) == 0 for instance, _ in workers)


def test_full_workers_get_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker at its limit is refused further requests, because there is no queue without a router."""
    monkeypatch.setattr(local_placement, "REQUESTS_PER_WORKER_MAX", 1)
    placer = LocalPlacer()
    placer.place(ask(), [worker("d", "decode")])
    with pytest.raises(OverloadedError):
        placer.place(ask(), [worker("d", "decode")])
