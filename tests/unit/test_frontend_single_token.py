"""Requests for one token: the prefill worker answers them, without a decode worker."""

import asyncio
from dataclasses import replace

import pytest

from kvmesh.core import FinishReason, Handoff, ReportKind
from kvmesh.errors import DeadlineError, LostError, MeshError, OverloadedError, UnavailableError
from services.frontend.models import ServedModel
from services.frontend.pipeline.request import RequestResult
from tests.frontend_mesh import FakeMesh, Faults, StaticModels, make_pipeline, tokens_of
from tests.unit.test_frontend_pipeline import TEXT, RecordingOutlet, a_request, ask, cancelled_after, mesh, model, run

__all__ = ["mesh", "model"]
ANSWERED = [ReportKind.PREFILLED, ReportKind.FINISHED]
TWO_LEGS = [ReportKind.PREFILLED, ReportKind.FIRST_TOKEN, ReportKind.FINISHED]


def kinds(mesh: FakeMesh) -> list[ReportKind]:
    return [kind for _, kind in mesh.reports]


def first_text(model: ServedModel) -> str:
    return model.text.detokeniser(skip_special_tokens=True).push(tokens_of(model.text, TEXT)[:1])


def test_the_prefill_worker_answers(mesh: FakeMesh, model: ServedModel) -> None:
    """There is no decode leg and no handle. The client gets the same answer as from a decode worker, with usage and reports."""
    outlet, answer = run(mesh, model, a_request(sampling={"max_tokens": 1, "logprobs": 2}))
    assert isinstance(answer, RequestResult)
    assert outlet.texts == {0: first_text(model)}
    assert len(outlet.logprobs[0]) == 1
    assert outlet.endings[0].reason is FinishReason.LENGTH
    assert mesh.prefills == ["r-0"] and not mesh.legs and not mesh.released
    assert kinds(mesh) == ANSWERED and mesh.answered_by_prefill == [1]
    assert mesh.reported_cached_tokens == {ReportKind.PREFILLED: 4}
    assert (answer.usage.output_tokens, answer.usage.cached_tokens) == (1, 4)
    assert answer.ttft_s == pytest.approx(0.01)


def test_the_result_is_the_same_as_with_two_legs(mesh: FakeMesh, model: ServedModel) -> None:
    """A request gives the same tokens and usage as one with two legs, whether or not the prefill worker can answer single tokens."""
    wanted = a_request(sampling={"max_tokens": 1, "logprobs": 1})
    outlet, answer = run(mesh, model, wanted)
    other = FakeMesh(answer=mesh.answer, step_s=0.01, prefill_answers=False)
    other_outlet, answer_there = run(other, model, wanted)
    assert isinstance(answer, RequestResult) and isinstance(answer_there, RequestResult)
    assert (other_outlet.texts, other_outlet.endings) == (outlet.texts, outlet.endings)
    assert other_outlet.logprobs == outlet.logprobs
    assert answer_there.usage == answer.usage
    assert kinds(other) == TWO_LEGS and not other.answered_by_prefill
    assert [leg.handle is not None for leg in other.legs] == [True]


@pytest.mark.parametrize("case", ["more tokens", "rendezvous", "no prefill worker"])
def test_other_requests_need_a_decode_worker(mesh: FakeMesh, model: ServedModel, case: str) -> None:
    """A decode worker is needed for two tokens, for a rendezvous, and if no prefill worker is placed."""
    mesh.handoff = Handoff.RENDEZVOUS if case == "rendezvous" else Handoff.SEQUENTIAL
    mesh.has_prefill = case != "no prefill worker"
    _, answer = run(mesh, model, a_request(sampling={"max_tokens": 2 if case == "more tokens" else 1}))
    assert isinstance(answer, RequestResult)
    assert len(mesh.legs) == 1 and not mesh.answered_by_prefill


def test_every_choice_is_answered(mesh: FakeMesh, model: ServedModel) -> None:
    """Each choice has its own prefill, one after the other, and its own seed."""
    outlet, answer = run(mesh, model, a_request(choices=3, sampling={"max_tokens": 1, "seed": 7, "temperature": 1.0}))
    assert isinstance(answer, RequestResult) and answer.usage.output_tokens == 3
    assert outlet.texts == dict.fromkeys(range(3), first_text(model)) and len(outlet.endings) == 3
    assert mesh.prefills == ["r-0", "r-1", "r-2"] and not mesh.legs
    assert [generation.sampling.seed for generation in mesh.generations] == [7, 8, 9]
    assert kinds(mesh) == ANSWERED


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("answers", [True, False])
def test_prompt_logprobs_with_one_token(mesh: FakeMesh, model: ServedModel, choices: int, answers: bool) -> None:
    """The prompt's log-probabilities are returned with the token, by the prefill worker if it can answer and otherwise by the decode worker."""
    mesh.prefill_answers = answers
    model = replace(model, features=model.features | {"prompt_logprobs"})
    request = a_request(choices=choices, sampling={"max_tokens": 1, "prompt_logprobs": 1})
    outlet, answer = run(mesh, model, request)
    assert isinstance(answer, RequestResult)
    assert sorted(outlet.prompts) == list(range(choices))
    assert len(mesh.legs) == (0 if answers else choices) and not mesh.released
    assert not any(leg.handle for leg in mesh.legs)


def test_a_stop_string_and_a_stop_token(mesh: FakeMesh, model: ServedModel) -> None:
    """A stop string and a stop token end the answer as they do with two legs."""
    text = first_text(model)
    outlet, _ = run(mesh, model, a_request(sampling={"max_tokens": 1, "stop": (text,)}))
    assert (outlet.texts.get(0, ""), outlet.endings[0].stop) == ("", text)
    mesh.answer = lambda _: [2]
    outlet, _ = run(FakeMesh(answer=mesh.answer), model, a_request(sampling={"max_tokens": 1}))
    assert (outlet.texts.get(0, ""), outlet.endings[0].reason) == ("", FinishReason.STOP)


@pytest.mark.parametrize("error", [UnavailableError("x"), LostError("x"), OverloadedError("x")])
@pytest.mark.parametrize("choices", [1, 2])
def test_a_failure_is_placed_again(mesh: FakeMesh, model: ServedModel, error: MeshError, choices: int) -> None:
    """A failure before any output is placed on another prefill worker, and the failed worker is excluded."""
    mesh.faults = Faults(prefill=[error])
    outlet, answer = run(mesh, model, a_request(choices=choices, sampling={"max_tokens": 1}))
    assert isinstance(answer, RequestResult) and answer.usage.output_tokens == choices
    assert outlet.texts == dict.fromkeys(range(choices), first_text(model))
    assert list(mesh.asks[1].excluded_worker_ids) == ["p0"]
    assert kinds(mesh) == [ReportKind.FAILED, *ANSWERED]


def test_finished_choices_are_not_generated_again(mesh: FakeMesh, model: ServedModel) -> None:
    """When the second choice fails, the first one keeps its answer and gets no further leg."""
    mesh.faults = Faults(prefill=[None, LostError("gone")])
    outlet, answer = run(mesh, model, a_request(choices=2, sampling={"max_tokens": 1}))
    assert isinstance(answer, RequestResult) and answer.usage.output_tokens == 2
    assert outlet.texts == dict.fromkeys(range(2), first_text(model))
    assert mesh.prefills == ["r-0", "r-1", "r-1-1"]
    assert [ask.choices for ask in mesh.asks] == [2, 1]


def test_cancellation(mesh: FakeMesh, model: ServedModel) -> None:
    """A cancelled request leaves no state, and the router gets a report."""
    mesh.faults = Faults(prefill_hangs=True)
    cancelled_after(mesh, model, 0.05, a_request(sampling={"max_tokens": 1}))
    assert mesh.settled() == [(1, ReportKind.CANCELLED)]


def test_the_deadline_is_enforced(mesh: FakeMesh, model: ServedModel) -> None:
    """The deadline also ends a request whose prefill worker answers late."""
    mesh.step_s = 0.2
    _, error = run(mesh, model, a_request(timeout_s=0.0, sampling={"max_tokens": 1}))
    assert isinstance(error, DeadlineError)
    assert kinds(mesh) == [ReportKind.FAILED]


def test_many_concurrent_requests(mesh: FakeMesh, model: ServedModel) -> None:
    """Each request has its own answer and is settled once."""

    async def main() -> list[RequestResult]:
        pipeline = make_pipeline(mesh, StaticModels([model]))
        wanted = [a_request(request_id=f"r{i}", sampling={"max_tokens": 1}) for i in range(50)]
        return await asyncio.gather(*(ask(pipeline, each, RecordingOutlet()) for each in wanted))

    answers = asyncio.run(main())
    assert sum(answer.usage.output_tokens for answer in answers) == 50
    assert len(mesh.settled()) == 50 and not mesh.legs
