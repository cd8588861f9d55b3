"""Requests that want one token: the prefill worker answers them, and nothing of them reaches a decode worker."""

import asyncio
from dataclasses import replace

import pytest

from kvmesh.core import FinishReason, Handoff, ReportKind
from kvmesh.errors import DeadlineError, LostError, MeshError, OverloadedError, UnavailableError
from services.frontend.models import ServedModel
from services.frontend.pipeline.request import RequestResult
from tests.frontend_mesh import FakeMesh, Faults, StaticModels, make_pipeline, tokens_of
from tests.unit.test_frontend_pipeline import TEXT, Heard, a_request, ask, cancelled_after, mesh, model, run

__all__ = ["mesh", "model"]
ANSWERED = [ReportKind.PREFILLED, ReportKind.FINISHED]
TWO_LEGS = [ReportKind.PREFILLED, ReportKind.FIRST_TOKEN, ReportKind.FINISHED]


def kinds(mesh: FakeMesh) -> list[ReportKind]:
    return [kind for _, kind in mesh.reports]


def first_text(model: ServedModel) -> str:
    return model.text.detokeniser(skip_special_tokens=True).push(tokens_of(model.text, TEXT)[:1])


def test_the_prefill_worker_answers(mesh: FakeMesh, model: ServedModel) -> None:
    """No leg, no handle; the client sees what decode would have given, and usage and reports say so."""
    heard, answer = run(mesh, model, a_request(sampling={"max_tokens": 1, "logprobs": 2}))
    assert isinstance(answer, RequestResult)
    assert heard.texts == {0: first_text(model)}
    assert len(heard.logprobs[0]) == 1
    assert heard.endings[0].reason is FinishReason.LENGTH
    assert mesh.prefills == ["r-0"] and not mesh.legs and not mesh.released
    assert kinds(mesh) == ANSWERED and mesh.answered_by_prefill == [1]
    assert mesh.reported_cached_tokens == {ReportKind.PREFILLED: 4}
    assert (answer.usage.output_tokens, answer.usage.cached_tokens) == (1, 4)
    assert answer.ttft_s == pytest.approx(0.01)


def test_the_same_as_by_two_legs(mesh: FakeMesh, model: ServedModel) -> None:
    """Whether or not the prefill worker can."""
    wanted = a_request(sampling={"max_tokens": 1, "logprobs": 1})
    heard, answer = run(mesh, model, wanted)
    other = FakeMesh(answer=mesh.answer, step_s=0.01, prefill_answers=False)
    heard_there, answer_there = run(other, model, wanted)
    assert isinstance(answer, RequestResult) and isinstance(answer_there, RequestResult)
    assert (heard_there.texts, heard_there.endings) == (heard.texts, heard.endings)
    assert heard_there.logprobs == heard.logprobs
    assert answer_there.usage == answer.usage
    assert kinds(other) == TWO_LEGS and not other.answered_by_prefill
    assert [leg.handle is not None for leg in other.legs] == [True]


@pytest.mark.parametrize("case", ["more tokens", "rendezvous", "no prefill worker"])
def test_others_need_their_decode_worker(mesh: FakeMesh, model: ServedModel, case: str) -> None:
    """Two tokens, legs that meet, and prompts that a decode worker computes."""
    mesh.handoff = Handoff.RENDEZVOUS if case == "rendezvous" else Handoff.SEQUENTIAL
    mesh.has_prefill = case != "no prefill worker"
    _, answer = run(mesh, model, a_request(sampling={"max_tokens": 2 if case == "more tokens" else 1}))
    assert isinstance(answer, RequestResult)
    assert len(mesh.legs) == 1 and not mesh.answered_by_prefill


def test_every_choice_is_answered(mesh: FakeMesh, model: ServedModel) -> None:
    """One after the other, each with a seed of its own."""
    heard, answer = run(mesh, model, a_request(choices=3, sampling={"max_tokens": 1, "seed": 7, "temperature": 1.0}))
    assert isinstance(answer, RequestResult) and answer.usage.output_tokens == 3
    assert heard.texts == dict.fromkeys(range(3), first_text(model)) and len(heard.endings) == 3
    assert mesh.prefills == ["r-0", "r-1", "r-2"] and not mesh.legs
    assert [generation.sampling.seed for generation in mesh.generations] == [7, 8, 9]
    assert kinds(mesh) == ANSWERED


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("answers", [True, False])
def test_a_scored_prompt(mesh: FakeMesh, model: ServedModel, choices: int, answers: bool) -> None:
    """Its log-probabilities come with the token, from the prefill worker or else from the decode worker."""
    mesh.prefill_answers = answers
    model = replace(model, features=model.features | {"prompt_logprobs"})
    asked = a_request(choices=choices, sampling={"max_tokens": 1, "prompt_logprobs": 1})
    heard, answer = run(mesh, model, asked)
    assert isinstance(answer, RequestResult)
    assert sorted(heard.prompts) == list(range(choices))
    assert len(mesh.legs) == (0 if answers else choices) and not mesh.released
    assert not any(leg.handle for leg in mesh.legs)


def test_a_stop_string_and_a_stop_token(mesh: FakeMesh, model: ServedModel) -> None:
    """The text is cut as ever."""
    text = first_text(model)
    heard, _ = run(mesh, model, a_request(sampling={"max_tokens": 1, "stop": (text,)}))
    assert (heard.texts.get(0, ""), heard.endings[0].stop) == ("", text)
    mesh.answer = lambda _: [2]
    heard, _ = run(FakeMesh(answer=mesh.answer), model, a_request(sampling={"max_tokens": 1}))
    assert (heard.texts.get(0, ""), heard.endings[0].reason) == ("", FinishReason.STOP)


@pytest.mark.parametrize("error", [UnavailableError("x"), LostError("x"), OverloadedError("x")])
@pytest.mark.parametrize("choices", [1, 2])
def test_a_failure_is_placed_again(mesh: FakeMesh, model: ServedModel, error: MeshError, choices: int) -> None:
    """On another prefill worker, as long as nothing was shown; the blamed one is left out."""
    mesh.faults = Faults(prefill=[error])
    heard, answer = run(mesh, model, a_request(choices=choices, sampling={"max_tokens": 1}))
    assert isinstance(answer, RequestResult) and answer.usage.output_tokens == choices
    assert heard.texts == dict.fromkeys(range(choices), first_text(model))
    assert list(mesh.asks[1].excluded_worker_ids) == ["p0"]
    assert kinds(mesh) == [ReportKind.FAILED, *ANSWERED]


def test_what_was_shown_is_not_shown_again(mesh: FakeMesh, model: ServedModel) -> None:
    """When the second choice fails, the first one has its answer and gets no further leg."""
    mesh.faults = Faults(prefill=[None, LostError("gone")])
    heard, answer = run(mesh, model, a_request(choices=2, sampling={"max_tokens": 1}))
    assert isinstance(answer, RequestResult) and answer.usage.output_tokens == 2
    assert heard.texts == dict.fromkeys(range(2), first_text(model))
    assert mesh.prefills == ["r-0", "r-1", "r-1-1"]
    assert [ask.choices for ask in mesh.asks] == [2, 1]


def test_cancel_and_deadline(mesh: FakeMesh, model: ServedModel) -> None:
    """Nothing is left of it and the router is told."""
    mesh.faults = Faults(prefill_hangs=True)
    cancelled_after(mesh, model, 0.05, a_request(sampling={"max_tokens": 1}))
    assert mesh.settled() == [(1, ReportKind.CANCELLED)]


def test_the_deadline_holds(mesh: FakeMesh, model: ServedModel) -> None:
    """Also of a prefill worker that answers late."""
    mesh.step_s = 0.2
    _, error = run(mesh, model, a_request(timeout_s=0.0, sampling={"max_tokens": 1}))
    assert isinstance(error, DeadlineError)
    assert kinds(mesh) == [ReportKind.FAILED]


def test_many_at_once(mesh: FakeMesh, model: ServedModel) -> None:
    """Each has its own answer and one end."""

    async def main() -> list[RequestResult]:
        pipeline = make_pipeline(mesh, StaticModels([model]))
        wanted = [a_request(request_id=f"r{i}", sampling={"max_tokens": 1}) for i in range(50)]
        return await asyncio.gather(*(ask(pipeline, each, Heard()) for each in wanted))

    answers = asyncio.run(main())
    assert sum(answer.usage.output_tokens for answer in answers) == 50
    assert len(mesh.settled()) == 50 and not mesh.legs
