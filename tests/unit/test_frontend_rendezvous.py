"""Requests whose two legs start together: which worker is excluded, what is placed again, and the order of the results."""

from dataclasses import replace
from random import Random

import pytest

from kvmesh.core import FinishReason, Handoff, LegTask, ReportKind, WorkerRef
from kvmesh.errors import InternalError, KvLostError, LostError, MeshError
from services.frontend.models import ServedModel
from services.frontend.pipeline.leg_factory import rendezvous_at
from services.frontend.pipeline.request import RequestResult
from tests.frontend_mesh import FakeMesh, Faults
from tests.unit.test_frontend_pipeline import TEXT, a_request, mesh, model, run

__all__ = ["mesh", "model"]
FAILED, FINISHED = ReportKind.FAILED, ReportKind.FINISHED


@pytest.fixture(autouse=True)
def rendezvous(mesh: FakeMesh) -> None:
    mesh.handoff = Handoff.RENDEZVOUS


def excluded(mesh: FakeMesh) -> list[tuple[str, ...]]:
    return [tuple(request.excluded_worker_ids) for request in mesh.asks]


@pytest.mark.parametrize(
    ("faults", "blamed", "reported"),
    [
        (Faults(prefill_ends_with=LostError("x")), "p0", "p0"),
        (Faults(prefill_ends_with=KvLostError("no decode worker came")), "d0", ""),
        (Faults(leg_after=0, leg_error=LostError("x"), prefill_s=1.0), "d0", "d0"),
        (Faults(leg_after=0, leg_error=KvLostError("no prefill worker came"), prefill_s=1.0), "p0", ""),
    ],
    ids=["prefill lost", "prefill without counterpart", "decode lost", "decode without counterpart"],
)
def test_the_first_failure_ends_both_legs_and_the_request_is_placed_again(
    mesh: FakeMesh, model: ServedModel, faults: Faults, blamed: str, reported: str
) -> None:
    """The worker that caused the failure is excluded. A leg that lost its counterpart blames the counterpart.

    That blame is uncertain, so the report to the router does not name the counterpart, and its breaker stays closed.
    """
    mesh.step_s, mesh.faults = 0.05, faults
    if faults.prefill_ends_with is not None:
        faults.prefill_s = 0.01
    outlet, answer = run(mesh, model, a_request())
    assert isinstance(answer, RequestResult)
    assert outlet.texts[0] == TEXT
    assert excluded(mesh) == [(), (blamed,)]
    assert mesh.settled() == [(1, FAILED), (2, FINISHED)]
    assert len(mesh.cancelled) == 1
    assert mesh.reported_failures == [reported]
    assert mesh.rendezvous[0].room != mesh.rendezvous[1].room


@pytest.mark.parametrize("error", [LostError("x"), KvLostError("x")])
def test_after_the_first_token_the_prefill_leg_may_fail(mesh: FakeMesh, model: ServedModel, error: MeshError) -> None:
    """A failure of the prefill leg after the first token is ignored, because the decode worker has the KV by then."""
    mesh.faults = Faults(prefill_s=0.035, prefill_ends_with=error)
    outlet, answer = run(mesh, model, a_request())
    assert isinstance(answer, RequestResult)
    assert outlet.texts[0] == TEXT
    assert mesh.settled() == [(1, FINISHED)]


def test_a_decode_leg_that_is_silent_after_the_handoff_fails(mesh: FakeMesh, model: ServedModel) -> None:
    """The leg fails after `HANDOFF_TIMEOUT_S`, not after the much longer `first_token_timeout_s`."""
    mesh.faults = Faults(stalls_after=0)
    _, answer = run(mesh, model, a_request(), placement_attempts=2)
    assert isinstance(answer, KvLostError) and answer.reason == "handoff_timeout"
    assert excluded(mesh) == [(), ("d0",)]
    assert mesh.settled() == [(1, FAILED), (2, FAILED)]


def test_a_slow_prefill_is_not_a_silent_decode_worker(mesh: FakeMesh, model: ServedModel) -> None:
    """The handoff timeout counts from the end of the prefill leg."""
    mesh.step_s, mesh.faults = 7.0, Faults(prefill_s=4.0)
    outlet, answer = run(mesh, model, a_request())
    assert isinstance(answer, RequestResult)
    assert outlet.texts[0] == TEXT


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("max_tokens", [1, 40])
@pytest.mark.parametrize("prefill_s", [0.001, 0.035, 2.0])
def test_the_prefill_leg_scores_the_prompt(
    mesh: FakeMesh, model: ServedModel, prefill_s: float, max_tokens: int, choices: int
) -> None:
    """The log-probabilities of the prompt precede the decode leg's tokens, whichever leg is faster. The decode leg does not compute them."""
    model = replace(model, features=model.features | {"prompt_logprobs"})
    mesh.faults = Faults(prefill_s=prefill_s)
    request = a_request(choices=choices, sampling={"prompt_logprobs": 1, "max_tokens": max_tokens})
    outlet, answer = run(mesh, model, request)
    assert isinstance(answer, RequestResult)
    scores = [len(outlet.prompts[choice]) for choice in range(choices)]
    assert scores == [len(mesh.legs[0].generation.token_ids) - 1] * choices
    assert all(leg.generation.sampling.prompt_logprobs is None for leg in mesh.legs)
    wanted = 1 if max_tokens == 1 else len(outlet.token_ids[0])
    assert [len(outlet.token_ids[choice]) for choice in range(choices)] == [wanted] * choices
    assert outlet.endings[0].reason in (FinishReason.LENGTH, FinishReason.STOP)


def test_a_failed_decode_leg_ends_the_attempt_while_tokens_are_held_back(mesh: FakeMesh, model: ServedModel) -> None:
    """A failed decode leg ends the attempt although its tokens wait for the prompt's log-probabilities."""
    model = replace(model, features=model.features | {"prompt_logprobs"})
    mesh.faults = Faults(prefill_s=5.0, leg_after=2, leg_error=LostError("x"))
    outlet, answer = run(mesh, model, a_request(sampling={"prompt_logprobs": 1}))
    assert isinstance(answer, RequestResult)
    assert outlet.texts[0] == TEXT
    assert excluded(mesh) == [(), ("d0",)]


def test_each_choice_has_its_own_room(mesh: FakeMesh, model: ServedModel) -> None:
    run(mesh, model, a_request(choices=3))
    rooms = {rendezvous.room for rendezvous in mesh.rendezvous}
    assert len(rooms) == 3 and rooms != {Random(7).getrandbits(63)}


@pytest.mark.parametrize("handoff", [Handoff.SEQUENTIAL, Handoff.RENDEZVOUS])
def test_each_leg_names_its_rank(mesh: FakeMesh, model: ServedModel, handoff: Handoff) -> None:
    mesh.handoff, mesh.ranks, mesh.prefill_answers = handoff, (3, 1), False
    _, answer = run(mesh, model, a_request())
    assert isinstance(answer, RequestResult)
    assert sorted(mesh.leg_ranks) == sorted([(LegTask.PREFILL, 3), (LegTask.GENERATE, 1)])
    if handoff is Handoff.RENDEZVOUS:
        assert mesh.rendezvous[0].prefill_data_parallel_rank == 3


@pytest.mark.parametrize("address", ["", "p0", ":9", "p0:", "p0:²"])
def test_a_rendezvous_address_without_a_port_is_refused(address: str) -> None:
    """The error names the worker that published the address."""
    with pytest.raises(InternalError, match="p0"):
        rendezvous_at(address, WorkerRef(worker_id="p0", address="p0:1"), room=1)
