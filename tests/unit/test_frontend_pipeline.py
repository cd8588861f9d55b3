"""The request path on virtual time with fake clients of the mesh: phases, failures and cancellation."""

import asyncio
import copy
import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvmesh.client.settings import RetryPolicy
from kvmesh.core import (
    FinishReason,
    Generation,
    Handoff,
    Leg,
    LegFinish,
    ReportKind,
    SamplingParams,
    TokenLogprob,
    WorkerRef,
)
from kvmesh.errors import (
    WORKER_LOST_TWICE,
    WORKER_UNREACHABLE,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    KvLostError,
    LostError,
    MeshError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
    UnsupportedError,
)
from kvmesh.kv.blocks import block_hashes, seed_hash
from kvmesh.rpc.clients import EmbedResult, LegSink
from kvmesh.rpc.revoking import INTENTION_DENIED
from kvmesh.telemetry import TelemetrySettings, Tracing
from services.frontend.access.caller import ANYBODY
from services.frontend.api.http.boundary import error_headers
from services.frontend.models import ServedModel
from services.frontend.pipeline import hedging, prepare, retry_budget
from services.frontend.pipeline.choice_sink import ChoiceSink
from services.frontend.pipeline.continuation import CANNOT_CONTINUE
from services.frontend.pipeline.embed import EmbedRequest
from services.frontend.pipeline.losses import LOSSES_MAX, LostWorkers
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.pipeline.request import Conversation, Ending, Request, RequestResult
from services.frontend.settings import HedgeSettings
from tests.frontend_mesh import (
    FakeLink,
    FakeMesh,
    Faults,
    StaticModels,
    make_pipeline,
    served_model,
    tokens_of,
    write_model,
)
from tests.virtual_loop import run_virtual

TEXT = "Hello! How are you today? naïve 日本語 🙂 one two three"


class RecordingOutlet:
    """Records the choices of a response and checks the order of an outlet's calls."""

    def __init__(self, *, is_whole: bool = False) -> None:
        self.is_whole = is_whole
        self.restarts = 0
        self.texts: dict[int, str] = {}
        self.token_ids: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprob]] = {}
        self.endings: dict[int, Ending] = {}
        self.prompts: dict[int, Sequence[TokenLogprob]] = {}

    def on_restart(self, choice: int) -> None:
        assert self.is_whole
        self.restarts += 1
        for kept in (self.texts, self.token_ids, self.logprobs, self.endings, self.prompts):
            kept.pop(choice, None)  # type: ignore[attr-defined]

    def on_prompt(self, choice: int, logprobs: Sequence[TokenLogprob]) -> None:
        assert choice not in self.prompts and choice not in self.texts
        self.prompts[choice] = logprobs

    def on_text(
        self, choice: int, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        assert choice not in self.endings
        assert logprobs is None or len(logprobs) == len(token_ids)
        self.texts[choice] = self.texts.get(choice, "") + text
        self.token_ids.setdefault(choice, []).extend(token_ids)
        self.logprobs.setdefault(choice, []).extend(logprobs or ())

    def on_end(self, choice: int, ending: Ending) -> None:
        assert choice not in self.endings
        self.endings[choice] = ending


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served_model(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def mesh(model: ServedModel) -> FakeMesh:
    tokens = tokens_of(model.text, TEXT)
    return FakeMesh(answer=lambda _: tokens, step_s=0.01)


def a_request(**values: Any) -> Request:
    sampling = values.pop("sampling", {})
    defaults: dict[str, Any] = {"request_id": "r", "model": "tiny", "prompt": "Hello! How are you"}
    return Request(**{**defaults, **values}, sampling=SamplingParams(**sampling))


async def ask(pipeline: Pipeline, request: Request, outlet: RecordingOutlet) -> RequestResult:
    began_s = pipeline.clock.now()
    model = pipeline.models.find(request.model)
    prepared = await pipeline.prepare(request, model, caller=ANYBODY, began_s=began_s)
    return await pipeline.run(prepared, outlet, began_s=began_s)


def run(
    mesh: FakeMesh, model: ServedModel, request: Request, *, is_whole: bool = False, **settings: Any
) -> tuple[RecordingOutlet, RequestResult | MeshError]:
    """Runs one request on virtual time. Checks that no state remains, and that every placement is settled exactly once."""
    outlet = RecordingOutlet(is_whole=is_whole)

    async def main() -> RequestResult | MeshError:
        pipeline = make_pipeline(mesh, StaticModels([model]), **settings)
        try:
            return await ask(pipeline, request, outlet)
        except MeshError as error:
            return error
        finally:
            await asyncio.sleep(0.1)
            assert pipeline.in_flight == 0
            check_nothing_left(mesh)

    return outlet, run_virtual(main())


def check_nothing_left(mesh: FakeMesh) -> None:
    assert not mesh.running
    assert not mesh.handles
    assert not mesh.prefilling
    assert sorted(ask_id for ask_id, _ in mesh.settled()) == list(range(1, len(mesh.asks) + 1))


def test_a_request_leaves_no_reference_cycle(mesh: FakeMesh, model: ServedModel) -> None:
    """All objects of a request are freed with the last reference, without the garbage collector."""

    def uncollected() -> list[object]:
        return [each for each in gc.garbage if type(each).__module__.startswith(("services.", "kvmesh.", "jinja2."))]

    async def main() -> None:
        pipeline = make_pipeline(mesh, StaticModels([model]))
        prompt = Conversation(messages=[{"role": "user", "content": "Hello!"}])
        for i in range(3):
            await ask(pipeline, a_request(request_id=f"r{i}", prompt=prompt), RecordingOutlet())
            gc.collect()
            gc.set_debug(gc.DEBUG_SAVEALL)
        assert not uncollected()

    try:
        run_virtual(main())
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_a_request_with_two_legs(mesh: FakeMesh, model: ServedModel) -> None:
    """The request has block hashes of the model's block size, a prefill with a handle, all tokens, ordered reports, and usage."""
    outlet, answer = run(mesh, replace(model, files_digest="ab"), a_request())
    assert isinstance(answer, RequestResult)
    assert mesh.asks[0].files_digest == "ab"
    assert outlet.texts == {0: TEXT}
    assert outlet.endings[0].reason is FinishReason.STOP
    assert mesh.prefills == ["r-0p"]
    assert mesh.legs[0].handle is not None
    prompt = model.text.tokenise("Hello! How are you", adds_special_tokens=True)
    assert mesh.asks[0].block_hashes == block_hashes(prompt, 4)
    assert [kind for _, kind in mesh.reports] == [ReportKind.PREFILLED, ReportKind.FIRST_TOKEN, ReportKind.FINISHED]
    assert mesh.reported_cached_tokens == {ReportKind.PREFILLED: 4}
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.output_tokens == len(tokens_of(model.text, TEXT))
    assert answer.usage.cached_tokens == 4
    assert answer.ttft_s == pytest.approx(0.02)


@pytest.mark.parametrize("has_logprobs", [False, True])
def test_usage_and_reports_agree_on_cached_tokens(mesh: FakeMesh, model: ServedModel, has_logprobs: bool) -> None:
    """The usage and `kvmesh explain` show the cached tokens of the worker that computed the prompt, even if there are none.

    If the client requests the prompt's log-probabilities, the decode worker computes the prompt although a prefill worker is placed.
    """
    mesh.prefill_cached, mesh.decode_cached = 0, 3
    served = replace(model, features=model.features | {"prompt_logprobs"})
    _, answer = run(mesh, served, a_request(sampling={"prompt_logprobs": 1} if has_logprobs else {}))
    assert isinstance(answer, RequestResult)
    expected = {ReportKind.FINISHED: 2} if has_logprobs else {ReportKind.PREFILLED: 0}
    assert mesh.reported_cached_tokens == expected
    assert [answer.usage.cached_tokens] == list(expected.values())


def test_requests_get_the_models_defaults_and_no_stop_strings(mesh: FakeMesh, model: ServedModel) -> None:
    """The model's defaults fill unset parameters, the context limits max_tokens, and stop strings are not sent to the worker."""
    run(mesh, model, a_request(sampling={"stop": ("zzz",), "top_p": 0.5}))
    sent = mesh.generations[0]
    assert (sent.sampling.temperature, sent.sampling.top_p, sent.sampling.stop) == (0.5, 0.5, ())
    assert sent.sampling.max_tokens == 512 - len(sent.token_ids)


def test_the_decode_worker_computes_the_prompt_without_a_prefill_worker(mesh: FakeMesh, model: ServedModel) -> None:
    """There is no prefill leg and no handle. The final report has the number of cached tokens."""
    mesh.has_prefill = False
    outlet, _ = run(mesh, model, a_request())
    assert outlet.texts[0] == TEXT
    assert not mesh.prefills
    assert mesh.legs[0].handle is None
    assert mesh.reported_cached_tokens == {ReportKind.FINISHED: 2}


def test_rendezvous_starts_both_legs_together(mesh: FakeMesh, model: ServedModel) -> None:
    """Both legs start at the same time with the same random room, without a handle."""
    mesh.handoff = Handoff.RENDEZVOUS
    outlet, _ = run(mesh, model, a_request())
    assert outlet.texts[0] == TEXT
    assert mesh.prefills == ["r-0p"]
    assert (mesh.rendezvous[0].host, mesh.rendezvous[0].port) == ("p0", 9)
    assert 0 < mesh.rendezvous[0].room < 2**63


def test_choices_have_their_own_prefill_and_seed(mesh: FakeMesh, model: ServedModel) -> None:
    """The legs have the seeds s, s+1 and s+2. The usage counts the prompt once and sums the output tokens."""
    outlet, answer = run(mesh, model, a_request(choices=3, sampling={"seed": 2**63 - 2}))
    assert isinstance(answer, RequestResult)
    assert outlet.texts == {0: TEXT, 1: TEXT, 2: TEXT}
    assert mesh.prefills == ["r-0p", "r-1p", "r-2p"]
    assert [each.sampling.seed for each in mesh.generations] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert answer.usage.output_tokens == 3 * len(tokens_of(model.text, TEXT))
    assert answer.usage.prompt_tokens == len(mesh.generations[0].token_ids)


def test_a_stop_string_ends_the_choice_and_its_leg(mesh: FakeMesh, model: ServedModel) -> None:
    """The text before a stop string is sent, the leg is cancelled, and the router gets a report of success."""
    outlet, answer = run(mesh, model, a_request(sampling={"stop": ("are you", "zzz")}))
    assert isinstance(answer, RequestResult)
    assert outlet.texts[0] == "Hello! How "
    assert outlet.endings[0].stop == "are you"
    assert mesh.cancelled == ["r-0"]
    assert mesh.settled() == [(1, ReportKind.FINISHED)]
    assert answer.usage.output_tokens < len(tokens_of(model.text, TEXT))


def test_tokens_of_one_step_are_one_text(mesh: FakeMesh, model: ServedModel) -> None:
    """Several tokens per step give the same text, stop and log-probabilities as single tokens."""
    request = a_request(sampling={"stop": (" one",), "logprobs": 2})
    one, _ = run(mesh, model, request)
    mesh.tokens_per_step = 7
    many, _ = run(mesh, model, request)
    assert many.texts == one.texts == {0: TEXT.partition(" one")[0]}
    assert many.token_ids == one.token_ids
    assert len(many.logprobs[0]) == len(many.token_ids[0])


def test_a_stop_string_beside_the_end_token_counts_its_own_tokens(mesh: FakeMesh, model: ServedModel) -> None:
    """Tokens after the stop string in the same step are neither returned nor counted."""
    mesh.tokens_per_step = 1000
    for stop in ("are you", "three"):
        outlet, answer = run(mesh, model, a_request(sampling={"stop": (stop,)}))
        assert isinstance(answer, RequestResult) and outlet.endings[0].stop == stop
        assert len(outlet.token_ids[0]) == answer.usage.output_tokens == outlet.endings[0].output_tokens
        assert model.text.decode(outlet.token_ids[0]).startswith(outlet.texts[0] + stop)


def test_min_tokens_delays_stop_strings(mesh: FakeMesh, model: ServedModel) -> None:
    """Stop strings within the first min_tokens tokens are text."""
    outlet, _ = run(mesh, model, a_request(sampling={"stop": ("Hello",), "min_tokens": 2}))
    assert outlet.texts[0] == TEXT


def test_stop_tokens_are_not_text(mesh: FakeMesh, model: ServedModel) -> None:
    """The stop token that ends the answer is counted, but is not in the text."""
    stop = model.text.tokenise("Hello", adds_special_tokens=False)[-1]
    mesh.answer = lambda _: [*model.text.tokenise("A", adds_special_tokens=False), stop]
    outlet, answer = run(mesh, model, a_request(sampling={"stop_token_ids": (stop,)}))
    assert isinstance(answer, RequestResult)
    assert outlet.texts == {0: "A"}
    assert answer.usage.output_tokens == 2


def test_ignore_eos_continues_after_the_end_token(mesh: FakeMesh, model: ServedModel) -> None:
    """With ignore_eos the end-of-sequence token is an ordinary token."""
    hello = model.text.tokenise("Hello", adds_special_tokens=False)
    mesh.answer = lambda _: [*hello, 2, *hello]
    outlet, _ = run(mesh, model, a_request(sampling={"ignore_eos": True, "skip_special_tokens": False}))
    assert outlet.texts[0] == "Hello<|im_end|>Hello"


def test_an_incomplete_character_is_flushed_at_the_end(mesh: FakeMesh, model: ServedModel) -> None:
    """An answer that ends inside a character ends with U+FFFD, and all its tokens are returned."""
    tokens = tokens_of(model.text, "a🙂", ends=False)
    mesh.answer = lambda _: tokens
    outlet, _ = run(mesh, model, a_request(sampling={"max_tokens": len(tokens) - 1}))
    assert outlet.texts[0] == "a\N{REPLACEMENT CHARACTER}"
    assert outlet.token_ids[0] == tokens[:-1]
    assert outlet.endings[0].reason is FinishReason.LENGTH


RETRIED: dict[str, Callable[[], Faults]] = {
    "prefill unavailable": lambda: Faults(prefill=[UnavailableError("x")]),
    "prefill lost": lambda: Faults(prefill=[LostError("x", where="p0"), LostError("x", reason="worker_silent")]),
    "prefill overloaded": lambda: Faults(prefill=[OverloadedError("x")]),
    "link down": lambda: Faults(link=[UnavailableError("x")]),
    "submit refused": lambda: Faults(submit=[OverloadedError("x")]),
    "decode refused": lambda: Faults(leg_after=0, leg_error=UnavailableError("x")),
    "decode lost": lambda: Faults(leg_after=0, leg_error=LostError("x")),
    "handle lost": lambda: Faults(leg_after=0, leg_error=KvLostError("x")),
}


@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("case", RETRIED)
def test_failures_before_the_first_token_are_placed_again(
    mesh: FakeMesh, model: ServedModel, case: str, choices: int
) -> None:
    """After a failure before the first token the failed worker is excluded, handles are released, and the client gets one complete answer."""
    mesh.faults = RETRIED[case]()
    outlet, answer = run(mesh, model, a_request(choices=choices))
    assert isinstance(answer, RequestResult), answer
    assert outlet.texts == dict.fromkeys(range(choices), TEXT)
    assert len(mesh.asks) in (2, 3)
    excluded = mesh.asks[-1].excluded_worker_ids
    assert bool(excluded) == (case != "handle lost")
    assert all(name.startswith("p" if "prefill" in case else "d") for name in excluded)
    assert [ask.attempt for ask in mesh.asks] == list(range(len(mesh.asks)))
    # A worker that still runs the leg of the first attempt would refuse a second leg with the same id.
    names = mesh.prefills
    assert len(set(names)) == len(names)
    assert len({leg.leg_id for leg in mesh.legs}) == len(mesh.legs)


def test_a_refused_submission_releases_the_handle(mesh: FakeMesh, model: ServedModel) -> None:
    """The prompt's blocks are released when the decode worker rejects the leg."""
    mesh.faults = Faults(submit=[OverloadedError("x")])
    run(mesh, model, a_request())
    assert mesh.released == ["r-0p"]


@pytest.mark.parametrize(
    ("error", "released"), [(OverloadedError("x"), ["r-0p"]), (UnavailableError("x"), ["r-0p"]), (LostError("x"), [])]
)
def test_a_leg_that_the_worker_rejects_releases_the_handle(
    mesh: FakeMesh, model: ServedModel, error: MeshError, released: list[str]
) -> None:
    """A worker that rejects a leg has not used the KV. A lost worker may still read it, so in that case the lease frees it."""
    mesh.faults = Faults(leg_after=0, leg_error=error)
    _, answer = run(mesh, model, a_request())
    assert isinstance(answer, RequestResult), answer
    assert mesh.released == released


def test_attempts_are_bounded(mesh: FakeMesh, model: ServedModel) -> None:
    """After placement_attempts rejections the client gets the last failure."""
    mesh.faults = Faults(prefill=[UnavailableError("x", where=f"p{i}") for i in range(9)])
    _, answer = run(mesh, model, a_request(), placement_attempts=2)
    assert isinstance(answer, UnavailableError)
    assert len(mesh.asks) == 2


@pytest.mark.parametrize(("kind", "reason"), [(LostError, "worker_silent"), (UnavailableError, WORKER_UNREACHABLE)])
def test_lost_workers_are_bounded(mesh: FakeMesh, model: ServedModel, kind: type[MeshError], reason: str) -> None:
    """A request fails after `LOSSES_MAX` lost workers. Rejections have a lower limit; several workers may leave before routers notice."""
    mesh.faults = Faults(prefill=[kind("x", reason=reason, where=f"p{i}") for i in range(99)])
    _, answer = run(mesh, model, a_request(), placement_attempts=2)
    assert isinstance(answer, kind) and answer.reason == reason
    assert len(mesh.asks) == LOSSES_MAX


def test_continuations_are_bounded(mesh: FakeMesh, model: ServedModel) -> None:
    """After `continuations_max` continuations the answer ends with the last failure."""
    mesh.faults = Faults(legs=[(1, LostError("x", where=f"d{i}")) for i in range(99)])
    outlet, answer = run(mesh, model, a_request(), continuations_max=3)
    assert isinstance(answer, LostError)
    assert len(mesh.asks) == 4
    assert outlet.token_ids == {0: tokens_of(model.text, TEXT)[:4]}


@pytest.mark.parametrize("place", ["prefill", "decode"])
@pytest.mark.parametrize("reason", ["engine_died", "worker_defect"])
def test_a_request_that_fails_with_two_dead_engines_ends(
    mesh: FakeMesh, model: ServedModel, reason: str, place: str
) -> None:
    """A request under which two engines died is not placed again, whichever workers they ran on, and clients must not retry it."""
    deaths = [LostError("the engine died", reason=reason) for _ in range(2)]
    if place == "prefill":
        mesh.faults = Faults(prefill=list(deaths))
    else:
        mesh.faults = Faults(legs=[(7, error) for error in deaths])
    _, answer = run(mesh, model, a_request(), is_whole=True)
    assert isinstance(answer, InternalError)
    assert answer.reason == WORKER_LOST_TWICE
    assert len(mesh.asks) == 2
    assert RetryPolicy().wait_s(answer, 0, 100.0, generator=random.Random(1)) is None
    assert error_headers(answer) == {"x-should-retry": "false"}


def test_a_request_survives_one_dead_engine(mesh: FakeMesh, model: ServedModel) -> None:
    """A request is answered after one dead engine and several killed workers."""
    mesh.faults = Faults(
        legs=[(5, LostError("x")), (7, LostError("x", reason="engine_died")), (2, LostError("x")), (9, LostError("x"))]
    )
    outlet, answer = run(mesh, model, a_request(), is_whole=True)
    assert isinstance(answer, RequestResult), answer
    assert outlet.texts == {0: TEXT}
    assert len(mesh.asks) == 5


def test_excluded_workers_are_used_again_when_no_others_remain(mesh: FakeMesh, model: ServedModel) -> None:
    """If every worker failed, the exclusions are dropped, because workers may have restarted under the same names."""
    mesh.faults = Faults(legs=[(n, LostError("x")) for n in (1, 2, 3, 4, 5)])
    outlet, answer = run(mesh, model, a_request(), is_whole=True)
    assert isinstance(answer, RequestResult), answer
    assert outlet.texts == {0: TEXT}
    assert [ask.excluded_worker_ids for ask in mesh.asks] == [(), ("d0",), ("d0", "d1"), (), ("d0",), ("d0", "d1")]


def test_the_first_failure_is_returned_when_no_worker_remains(mesh: FakeMesh, model: ServedModel) -> None:
    """If the router has no other worker, the client gets the failure of the first attempt instead of `no_worker`."""
    mesh.faults = Faults(prefill=[LostError("first")], place=[])
    placed = mesh.place

    async def place_once(ask: Any, *, timeout_s: float) -> Any:
        if ask.attempt:
            raise UnavailableError("none left", reason="no_worker")
        return await placed(ask, timeout_s=timeout_s)

    mesh.place = place_once  # type: ignore[method-assign]
    _, answer = run(mesh, model, a_request(), place_timeout_s=2.0)
    assert isinstance(answer, LostError)
    assert answer.message == "first"


@pytest.mark.parametrize(
    "refusal",
    [UnavailableError("x", reason=reason) for reason in ("no_worker", "breakers_open")] + [OverloadedError("full")],
)
@pytest.mark.parametrize("place", ["prefill", "decode"])
def test_a_lost_request_waits_until_a_worker_can_take_it(
    mesh: FakeMesh, model: ServedModel, refusal: MeshError, place: str
) -> None:
    """The request is answered after a few seconds in which the only worker is away or the remaining workers are full."""
    lost = LostError("first")
    mesh.faults = Faults(prefill=[lost]) if place == "prefill" else Faults(legs=[(5, lost)])
    placed, refusals = mesh.place, iter(range(12))

    async def refuse_for_a_while(ask: Any, *, timeout_s: float) -> Any:
        if ask.attempt and next(refusals, None) is not None:
            raise refusal
        return await placed(ask, timeout_s=timeout_s)

    mesh.place = refuse_for_a_while  # type: ignore[method-assign]
    _, answer = run(mesh, model, a_request())
    assert isinstance(answer, RequestResult)


def test_a_denied_request_does_not_wait_for_workers(mesh: FakeMesh, model: ServedModel) -> None:
    """If Consul's intentions deny the frontend's calls, a running request ends immediately instead of waiting for a worker that can take it.
    Its client gets the same error as that of a new request, not the error of a lost worker."""
    mesh.faults = Faults(legs=[(5, LostError("denied", reason=INTENTION_DENIED))])
    placed, refused_at_s = mesh.place, list[float]()

    async def refuse(ask: Any, *, timeout_s: float) -> Any:
        if ask.attempt:
            refused_at_s.append(asyncio.get_running_loop().time())
            raise UnavailableError("no worker's breaker is closed", reason="breakers_open")
        return await placed(ask, timeout_s=timeout_s)

    mesh.place = refuse  # type: ignore[method-assign]
    _, answer = run(mesh, model, a_request())
    assert isinstance(answer, UnavailableError) and answer.reason == INTENTION_DENIED
    # The second attempt may use workers that failed before.
    assert len(refused_at_s) == 2 and refused_at_s[0] == refused_at_s[1]


@pytest.mark.parametrize("reason", ["no_worker", "breakers_open"])
def test_lost_embeddings_wait_until_a_worker_can_take_them(mesh: FakeMesh, model: ServedModel, reason: str) -> None:
    """Lost embeddings wait while the router refuses the second attempt. The final report has the number of cached tokens."""
    mesh.faults = Faults(link=[LostError("first")])
    placed, refusals = mesh.place, iter(range(12))

    async def refuse_for_a_while(ask: Any, *, timeout_s: float) -> Any:
        if ask.attempt and next(refusals, None) is not None:
            raise UnavailableError("none left", reason=reason)
        return await placed(ask, timeout_s=timeout_s)

    mesh.place = refuse_for_a_while  # type: ignore[method-assign]
    embedding_model = replace(model, features=model.features | {"embeddings"}, files_digest="ab")

    async def main() -> EmbedResult:
        pipeline = make_pipeline(mesh, StaticModels([embedding_model]))
        request = EmbedRequest(asked=a_request(), inputs=["Hello", [1, 2, 3]])
        return await pipeline.embed(request, caller=ANYBODY, began_s=pipeline.clock.now())

    answer = run_virtual(main())
    assert len(answer.vectors) == 2
    assert [(ask.attempt, ask.files_digest) for ask in mesh.asks] == [(0, "ab"), (1, "ab")]
    assert mesh.reported_cached_tokens == {ReportKind.FINISHED: answer.usage.cached_tokens} == {ReportKind.FINISHED: 2}
    check_nothing_left(mesh)


def test_an_internal_failure_of_embeddings_is_reported(mesh: FakeMesh, model: ServedModel) -> None:
    """After an exception of the frontend itself the router gets a failure without a worker, so that no worker counts as faulty."""
    embedding_model = replace(model, features=model.features | {"embeddings"})

    async def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    mesh.link = fail  # type: ignore[method-assign]

    async def main() -> None:
        pipeline = make_pipeline(mesh, StaticModels([embedding_model]))
        with pytest.raises(ZeroDivisionError):
            await pipeline.embed(
                EmbedRequest(asked=a_request(), inputs=["Hello"]), caller=ANYBODY, began_s=pipeline.clock.now()
            )

    run_virtual(main())
    assert mesh.settled() == [(1, ReportKind.FAILED)]
    assert mesh.reported_failures == [""]


@pytest.mark.parametrize("choices", [1, 2])
def test_a_failure_that_another_worker_cannot_fix_is_returned(mesh: FakeMesh, model: ServedModel, choices: int) -> None:
    """An internal error is returned immediately, without another placement. The other choices are stopped."""
    error = InternalError("x")
    mesh.faults = Faults(leg_after=3, leg_error=error)
    outlet, answer = run(mesh, model, a_request(choices=choices))
    assert answer is error
    assert len(mesh.asks) == 1
    assert mesh.settled() == [(1, ReportKind.FAILED)]
    assert TEXT.startswith(outlet.texts[0])
    assert not outlet.endings


LOST: dict[str, Callable[[int], Faults]] = {
    "lost": lambda received: Faults(legs=[(received, LostError("x", where="d0"))]),
    "kv lost": lambda received: Faults(legs=[(received, KvLostError("x"))]),
    "draining": lambda received: Faults(legs=[(received, UnavailableError("x", reason="draining"))]),
    "lost twice": lambda received: Faults(legs=[(received, LostError("x")), (1, LostError("x"))]),
    "then prefill": lambda received: Faults(legs=[(received, LostError("x"))], prefill=[*PREFILLED, LostError("x")]),
}
"""How a request loses its worker after the given number of received tokens."""
PREFILLED: Sequence[None] = (None, None, None)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"logprobs": 2}, {"stop": (" three",)}, {"prompt_logprobs": 1}, {"min_tokens": 9}],
    ids=["plain", "logprobs", "stop", "prompt", "min"],
)
@pytest.mark.parametrize("received", [1, 20])
@pytest.mark.parametrize("case", LOST)
def test_an_answer_continues_on_another_worker(
    mesh: FakeMesh, model: ServedModel, case: str, received: int, sampling: dict[str, Any], choices: int, is_whole: bool
) -> None:
    """Texts, tokens, log-probabilities, finish reasons and usage equal those of an answer without the loss, streamed or not."""
    served = replace(model, features=model.features | {"prompt_logprobs"})
    request = a_request(choices=choices, sampling=sampling)
    once, untouched = run(FakeMesh(answer=mesh.answer, step_s=0.01), served, request)
    assert isinstance(untouched, RequestResult)
    mesh.faults = LOST[case](received)
    outlet, answer = run(mesh, served, request, is_whole=is_whole)
    assert isinstance(answer, RequestResult), answer
    assert outlet.texts == once.texts
    assert (outlet.token_ids, outlet.logprobs, outlet.endings, outlet.prompts) == (
        once.token_ids, once.logprobs, once.endings, once.prompts,
    )  # fmt: skip
    assert answer.usage == untouched.usage
    assert answer.ttft_s == untouched.ttft_s
    assert outlet.restarts == 0
    assert len(mesh.asks) > 1 and mesh.settled()[-1][1] is ReportKind.FINISHED
    assert mesh.settled()[0] == (1, ReportKind.FAILED)


def test_the_next_placement_describes_prompt_and_emitted_tokens(mesh: FakeMesh, model: ServedModel) -> None:
    """The ask has the number of prompt and emitted tokens, the hashes of all their blocks, and the number of remaining tokens."""
    mesh.faults = Faults(legs=[(9, LostError("x", where="d0"))])
    run(mesh, replace(model, features=frozenset()), a_request(cache_salt="s", sampling={"max_tokens": 100}))
    first, second = mesh.asks
    generation = mesh.generations[-1]
    tokens = [*generation.token_ids, *generation.emitted_token_ids]
    assert len(generation.emitted_token_ids) == 9
    assert second.prompt_tokens == first.prompt_tokens + 9 == len(tokens)
    assert second.block_hashes == block_hashes(tokens, 4, seed=seed_hash("", "s"))
    assert second.block_hashes[: len(first.block_hashes)] == first.block_hashes
    assert second.expected_output_tokens == 91
    assert second.excluded_worker_ids == ("d0",)


def test_a_finished_choice_gets_no_further_leg(mesh: FakeMesh, model: ServedModel) -> None:
    """After a loss only the unfinished choices continue, each with its own tokens, and the placement counts only these."""
    short, long = tokens_of(model.text, "Hello!"), tokens_of(model.text, TEXT)
    mesh.answer = lambda generation: short if generation.sampling.seed == 8 else long
    mesh.faults = Faults(legs=[(len(short) + 5, LostError("x"))])
    outlet, answer = run(mesh, model, a_request(choices=3, sampling={"seed": 7, "temperature": 1.0}))
    assert isinstance(answer, RequestResult), answer
    assert outlet.texts == {0: TEXT, 1: "Hello!", 2: TEXT}
    assert answer.usage.output_tokens == len(short) + 2 * len(long)
    assert [leg.leg_id for leg in mesh.legs] == ["r-0", "r-1", "r-2", "r-0-1", "r-2-1"]
    assert [ask.choices for ask in mesh.asks] == [3, 2]
    assert [leg.generation.sampling.seed for leg in mesh.legs] == [7, 8, 9, 7, 9]
    counts = [len(leg.generation.emitted_token_ids) for leg in mesh.legs[3:]]
    assert counts[0] > counts[1] > 0, "the first choice must be one prefill ahead"


@pytest.mark.parametrize(("ends", "reason"), [(True, FinishReason.STOP), (False, FinishReason.LENGTH)])
def test_an_answer_that_lacks_only_its_finish_is_complete(
    mesh: FakeMesh, model: ServedModel, ends: bool, reason: FinishReason
) -> None:
    """The worker was lost between the last token and the finish. No engine could continue after that token."""
    tokens = tokens_of(model.text, TEXT, ends=ends)
    mesh.answer = lambda _: tokens
    mesh.faults = Faults(loses_finish=True)
    outlet, answer = run(mesh, model, a_request(sampling={"max_tokens": len(tokens) + ends}))
    assert isinstance(answer, RequestResult), answer
    assert len(mesh.asks) == 1
    assert outlet.texts == {0: TEXT} and outlet.endings[0].reason is reason
    assert answer.usage.output_tokens == len(tokens)


def test_the_last_token_comes_from_a_prefill_worker(mesh: FakeMesh, model: ServedModel) -> None:
    """An answer that lacks one token needs no decode worker."""
    count = len(tokens_of(model.text, TEXT)) - 1
    mesh.faults = Faults(legs=[(count - 1, LostError("x"))])
    outlet, answer = run(mesh, model, a_request(sampling={"max_tokens": count}))
    assert isinstance(answer, RequestResult), answer
    assert outlet.texts == {0: TEXT}
    assert mesh.answered_by_prefill == [2] and mesh.asks[1].expected_output_tokens == 1


def test_an_answer_that_no_engine_can_continue_ends_with_a_reason(mesh: FakeMesh, model: ServedModel) -> None:
    """The client already has a part of the answer, so it gets a typed error that names the field instead of a wrong continuation."""
    refusal = UnsupportedError("a seeded answer cannot be continued", field="generation.sampling.seed")
    mesh.faults = Faults(legs=[(4, LostError("x", where="d0"))], cannot_continue=refusal)
    outlet, answer = run(mesh, model, a_request())
    assert isinstance(answer, LostError)
    assert (answer.reason, answer.field, answer.where) == (CANNOT_CONTINUE, "seed", "d0")
    assert outlet.token_ids == {0: tokens_of(model.text, TEXT)[:4]}
    assert len(mesh.asks) == 2


@pytest.mark.parametrize(("received", "is_whole"), [(4, True), (20, True), (2, False)])
def test_an_answer_that_was_not_sent_yet_restarts(
    mesh: FakeMesh, model: ServedModel, received: int, is_whole: bool
) -> None:
    """If no engine can continue an answer, a unary one restarts, and so does a stream whose text was all held back."""
    stop = ("Hello! How are we",)
    mesh.faults = Faults(legs=[(received, LostError("x"))], cannot_continue=UnsupportedError("no"))
    outlet, answer = run(mesh, model, a_request(sampling={"stop": stop}), is_whole=is_whole)
    assert isinstance(answer, RequestResult), answer
    assert outlet.texts == {0: TEXT} and outlet.token_ids == {0: tokens_of(model.text, TEXT)}
    assert answer.usage.output_tokens == len(outlet.token_ids[0])
    assert outlet.restarts == is_whole
    assert len(mesh.asks) == 3


HEDGES = HedgeSettings(share_max=0.25)


@pytest.fixture
def quick_hedges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowers the limits, so that four prompts are enough and a prompt is hedged after 20 ms."""
    monkeypatch.setattr(hedging, "SAMPLES_MIN", 4)
    monkeypatch.setattr(hedging, "AFTER_S_MIN", 0.02)


def run_hedged(
    mesh: FakeMesh, model: ServedModel, change: Callable[[], None], *, requests: int = 1
) -> tuple[list[RecordingOutlet], Pipeline]:
    """Runs eight requests whose prompts take 10 ms, then `requests` more after `change`. Checks that no state remains."""
    mesh.expected_ttft_s = 0.01
    outlet = [RecordingOutlet() for _ in range(8 + requests)]
    pipelines: list[Pipeline] = []

    async def main() -> None:
        pipelines.append(make_pipeline(mesh, StaticModels([model]), hedge=HEDGES))
        for number, each in enumerate(outlet):
            if number == 8:
                change()
            await ask(pipelines[0], a_request(request_id=f"r{number}"), each)
        await asyncio.sleep(1.0)

    run_virtual(main())
    assert not mesh.running and not mesh.handles
    assert sorted(ask_id for ask_id, _ in mesh.settled()) == list(range(1, len(mesh.asks) + 1))
    assert all(each.token_ids == outlet[0].token_ids for each in outlet)
    return outlet, pipelines[0]


@pytest.mark.usefixtures("quick_hedges")
def test_a_slow_prompt_is_sent_to_a_second_prefill_worker(mesh: FakeMesh, model: ServedModel) -> None:
    """If the second prefill worker is faster, the first leg is cancelled, each placement is settled once, and the tokens are the same."""

    def change() -> None:
        mesh.faults.prefill_s_of["p0"] = 30.0

    _, pipeline = run_hedged(mesh, model, change)
    hedge = mesh.asks[-1]
    assert (hedge.request_id, hedge.excluded_worker_ids, hedge.pinned_decode_worker_id) == ("r8.hedge", ("p0",), "d0")
    assert mesh.cancelled == ["r8-0p"]
    settled = dict(mesh.settled())
    assert (settled[9], settled[10]) == (ReportKind.CANCELLED, ReportKind.FINISHED)
    metrics = pipeline.metrics.of_model("tiny")
    assert (metrics.hedged.value, metrics.hedges_won.value) == (1, 1)


@pytest.mark.usefixtures("quick_hedges")
@pytest.mark.parametrize("second_s", [30.0, 0.03])
def test_a_hedge_that_loses_is_cancelled(mesh: FakeMesh, model: ServedModel, second_s: float) -> None:
    """If the first prefill worker is faster, the second leg is cancelled, or its handle is released if it was ready at the same time."""

    def change() -> None:
        mesh.faults.prefill_s_of.update(p0=0.05, p1=second_s)

    _, pipeline = run_hedged(mesh, model, change)
    assert mesh.cancelled == (["r8-0ph"] if second_s > 1 else [])
    settled = dict(mesh.settled())
    assert (settled[9], settled[10]) == (ReportKind.FINISHED, ReportKind.CANCELLED)
    metrics = pipeline.metrics.of_model("tiny")
    assert (metrics.hedged.value, metrics.hedges_won.value) == (1, 0)


@pytest.mark.usefixtures("quick_hedges")
@pytest.mark.parametrize("fails", ["place", "first", "second"])
def test_a_hedged_prompt_survives_the_failure_of_one_worker(mesh: FakeMesh, model: ServedModel, fails: str) -> None:
    """If no second prefill worker can be placed, or one of the two fails, the other one computes the prompt."""

    def change() -> None:
        mesh.faults.prefill_s_of.update(p0=0.05, p1=0.05)
        if fails == "place":
            mesh.faults.place = []
            asyncio.get_running_loop().call_later(
                0.01, mesh.faults.place.append, OverloadedError("full", reason="router_full")
            )
        elif fails == "first":
            mesh.faults.prefill_ends_with = LostError("gone", where="p0")
        else:
            mesh.faults.prefill = [None, LostError("gone", where="p1")]

    run_hedged(mesh, model, change)
    settled = [kind for _, kind in mesh.settled()[8:]]
    expected = {
        "place": [ReportKind.FINISHED],
        "first": [ReportKind.CANCELLED, ReportKind.FINISHED],
        "second": [ReportKind.FAILED, ReportKind.FINISHED],
    }
    assert settled == expected[fails]


@pytest.mark.usefixtures("quick_hedges")
def test_only_a_share_of_the_prompts_is_hedged(mesh: FakeMesh, model: ServedModel) -> None:
    """At most a quarter of the prompts is hedged, however many are slow."""

    def change() -> None:
        mesh.faults.prefill_s_of.update(p0=0.5, p1=0.6)

    _, pipeline = run_hedged(mesh, model, change, requests=12)
    # After a while the hedging delay adapts to the slow prompts.
    assert 2 <= pipeline.metrics.of_model("tiny").hedged.value <= 4


@pytest.mark.usefixtures("quick_hedges")
def test_a_cancel_reaches_both_prefill_workers(mesh: FakeMesh, model: ServedModel) -> None:
    """Cancelling a hedged request cancels both legs and both reservations."""
    mesh.expected_ttft_s = 0.01

    async def main() -> None:
        pipeline = make_pipeline(mesh, StaticModels([model]), hedge=HEDGES)
        for number in range(8):
            await ask(pipeline, a_request(request_id=f"r{number}"), RecordingOutlet())
        mesh.faults.prefill_s_of.update(p0=30.0, p1=30.0)
        asking = asyncio.create_task(ask(pipeline, a_request(), RecordingOutlet()))
        await asyncio.sleep(1.0)
        assert len(mesh.running) == 2
        asking.cancel()
        await asyncio.sleep(0.1)
        assert asking.cancelled()

    run_virtual(main())
    assert sorted(mesh.cancelled) == ["r-0p", "r-0ph"] and not mesh.running and not mesh.handles
    assert [kind for _, kind in mesh.settled()[8:]] == [ReportKind.CANCELLED] * 2


def finish_apart(mesh: FakeMesh, *, first: str, iterations: int) -> asyncio.Event:
    """Makes the worker `first` compute a prompt in 100 ms, and the other one finish `iterations` of the event loop later.

    Returns an event that is set when `first` finishes.
    """
    prefill, is_over = mesh._prefill, asyncio.Event()

    async def run_apart(leg: Leg, sink: LegSink, worker: WorkerRef) -> LegFinish:
        if worker.worker_id == first:
            await asyncio.sleep(0.1)
            is_over.set()
        else:
            await is_over.wait()
            for _ in range(iterations):
                await asyncio.sleep(0)
        return await prefill(leg, sink, worker)

    mesh.faults.prefill_s_of.update(p0=0.0, p1=0.0)
    mesh._prefill = run_apart  # type: ignore[method-assign]
    return is_over


@pytest.mark.usefixtures("quick_hedges")
@pytest.mark.parametrize("iterations", range(8))
@pytest.mark.parametrize("first", ["p0", "p1"])
def test_the_leg_that_loses_by_little_keeps_no_handle(
    mesh: FakeMesh, model: ServedModel, first: str, iterations: int
) -> None:
    """Both legs of a hedged prompt end at nearly the same time. The handle that is not used is released."""

    def change() -> None:
        finish_apart(mesh, first=first, iterations=iterations)

    run_hedged(mesh, model, change)


@pytest.mark.usefixtures("quick_hedges")
@pytest.mark.parametrize("iterations", range(10))
@pytest.mark.parametrize("apart", [0, 1, 1000])
@pytest.mark.parametrize("first", ["p0", "p1"])
def test_a_cancel_after_a_prefill_keeps_no_handle(
    mesh: FakeMesh, model: ServedModel, first: str, apart: int, iterations: int
) -> None:
    """A cancel may arrive in any iteration of the event loop after a leg has finished: handles are released, placements settled."""
    mesh.expected_ttft_s = 0.01

    async def main() -> None:
        pipeline = make_pipeline(mesh, StaticModels([model]), hedge=HEDGES)
        for number in range(8):
            await ask(pipeline, a_request(request_id=f"r{number}"), RecordingOutlet())
        is_over = finish_apart(mesh, first=first, iterations=apart)
        asking = asyncio.create_task(ask(pipeline, a_request(), RecordingOutlet()))
        await is_over.wait()
        for _ in range(iterations):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.sleep(1.0)
        assert asking.cancelled()

    run_virtual(main())
    check_nothing_left(mesh)
    assert len(mesh.asks) == 10


def test_the_retry_budget_limits_new_placements(
    mesh: FakeMesh, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the budget is spent, a failed request ends with its cause. New requests add to the budget, and continuations do not use it."""
    monkeypatch.setattr(retry_budget, "BURST", 1.0)
    monkeypatch.setattr(retry_budget, "RATIO", 0.5)
    monkeypatch.setattr(retry_budget, "PER_S", 0.0)
    mesh.faults.prefill = [LostError("gone"), None, LostError("gone"), None]
    outlet = [RecordingOutlet() for _ in range(6)]
    outcomes: list[Any] = []

    async def main() -> None:
        pipeline = make_pipeline(mesh, StaticModels([model]))

        async def one(number: int) -> None:
            try:
                outcomes.append(await ask(pipeline, a_request(request_id=f"r{number}"), outlet[number]))
            except MeshError as error:
                outcomes.append(error)

        await one(0)
        await one(1)
        await one(2)
        await one(3)
        mesh.faults.leg_after, mesh.faults.leg_error = 2, LostError("gone")
        await one(4)
        mesh.faults.prefill = [LostError("gone")]
        await one(5)

    run_virtual(main())
    kinds = [each.reason if isinstance(each, MeshError) else "" for each in outcomes]
    assert kinds == ["", "retry_budget_spent", "", "", "", ""], kinds
    refusal = outcomes[1]
    assert isinstance(refusal, OverloadedError) and refusal.retry_after_s == 1.0 and "worker_lost" in refusal.message
    assert outlet[4].token_ids == outlet[0].token_ids
    assert mesh.settled() == [(number + 1, kind) for number, (_, kind) in enumerate(mesh.settled())]


LIMITS: dict[str, dict[str, Any]] = {
    "off": {"continuations_max": 0},
    "age": {"continuation_age_s_max": 0.03},
    "length": {"continuation_tokens_max": 10},
}


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("case", LIMITS)
def test_limits_of_continuation(mesh: FakeMesh, model: ServedModel, case: str, is_whole: bool) -> None:
    """A stream beyond a limit ends with the failure, and a unary answer restarts."""
    mesh.faults = Faults(legs=[(8, LostError("x"))])
    outlet, answer = run(mesh, model, a_request(), is_whole=is_whole, **LIMITS[case])
    if is_whole:
        assert isinstance(answer, RequestResult), answer
        assert outlet.texts == {0: TEXT} and outlet.restarts == 1
        assert not mesh.generations[-1].emitted_token_ids
    else:
        assert isinstance(answer, LostError) and answer.reason == "worker_lost"
        assert len(mesh.asks) == 1


@pytest.mark.parametrize("place", ["prefill", "decode", "decode after tokens"])
@pytest.mark.parametrize("is_calm", [True, False])
def test_a_request_that_kills_processes_is_stopped_after_two(
    mesh: FakeMesh, model: ServedModel, place: str, is_calm: bool
) -> None:
    """The request ends when two workers die before they generate a token, even after others that generated some.

    If an unrelated worker dies too, the request is probably not the cause, and continues.
    """
    deaths = [LostError("x", where=f"w{i}") for i in range(4)]
    outlet = RecordingOutlet()

    async def main() -> RequestResult | MeshError:
        lost_workers = LostWorkers()
        pipeline = make_pipeline(mesh, StaticModels([model]), lost_workers=lost_workers)
        if not is_calm:
            lost_workers.add("other", pipeline.clock.now())
        if place == "prefill":
            mesh.faults = Faults(prefill=[*deaths[:3]])
        elif place == "decode":
            mesh.faults = Faults(legs=[(0, each) for each in deaths[:3]])
        else:
            mesh.faults = Faults(legs=[(7, deaths[0]), *((0, each) for each in deaths[1:])])
        try:
            return await ask(pipeline, a_request(), outlet)
        except MeshError as error:
            return error

    answer = run_virtual(main())
    if is_calm:
        assert isinstance(answer, InternalError) and answer.reason == WORKER_LOST_TWICE
        assert len(mesh.asks) == (3 if place == "decode after tokens" else 2)
    else:
        assert isinstance(answer, RequestResult), answer
        assert outlet.texts == {0: TEXT}


KILLED: dict[str, Faults] = {
    "both between tokens": Faults(legs=[(4, LostError("x", where="a")), (3, LostError("x", where="b"))]),
    "the second before a token": Faults(legs=[(4, LostError("x", where="a")), (0, LostError("x", where="b"))]),
    "tokens in between": Faults(legs=[(n, LostError("x", where=f"w{n}")) for n in (0, 3, 0)]),
    "workers of two roles": Faults(prefill=[LostError("x", where="a")], legs=[(0, LostError("x", where="b"))]),
    "ended streams": Faults(legs=[(0, LostError("x", reason="stream_ended", where=each)) for each in ("a", "b", "c")]),
}


@pytest.mark.parametrize("case", KILLED)
def test_a_request_continues_if_it_did_not_kill_its_workers(mesh: FakeMesh, model: ServedModel, case: str) -> None:
    """A worker that generated tokens of a request was not killed by it, nor was one that ended its stream in order."""
    mesh.faults = copy.deepcopy(KILLED[case])
    outlet, answer = run(mesh, model, a_request())
    assert isinstance(answer, RequestResult), answer
    assert outlet.texts == {0: TEXT}


def test_late_tokens_of_a_failed_leg_are_ignored(mesh: FakeMesh, model: ServedModel) -> None:
    """A leg on a healthy worker is cancelled when another choice is lost, and may still send a step."""
    choices: list[ChoiceSink] = []
    submit = FakeLink.submit_nowait

    def recording(link: FakeLink, leg: Any, sink: Any, *, timeout_s: float) -> Any:
        choices.append(sink)
        return submit(link, leg, sink, timeout_s=timeout_s)

    outlet = RecordingOutlet()

    async def main() -> None:
        pipeline = make_pipeline(mesh, StaticModels([model]))
        running = asyncio.create_task(ask(pipeline, a_request(), outlet))
        await asyncio.sleep(0.2)
        stale = choices[1]
        assert isinstance(stale, ChoiceSink) and stale is not choices[3]
        stale.on_tokens((7,), None, 0.0)
        stale.on_tokens((7, 7), None, 0.0)
        await running

    mesh.faults = Faults(legs=[(5, LostError("x"))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeLink, "submit_nowait", recording)
        run_virtual(main())
    assert outlet.texts == {0: TEXT} and outlet.token_ids == {0: tokens_of(model.text, TEXT)}


def test_spans_link_the_placements(mesh: FakeMesh, model: ServedModel) -> None:
    """Each later placement has a span, which names the failure, links to the previous placement, and is the parent of its legs."""
    exported = InMemorySpanExporter()
    tracing = Tracing(TelemetrySettings(), service="frontend", span_processor=SimpleSpanProcessor(exported))
    mesh.faults = Faults(legs=[(5, LostError("x", where="d0")), (2, LostError("x", where="d1"))])

    async def main() -> None:
        pipeline = make_pipeline(mesh, StaticModels([model]))
        pipeline._tracing = tracing
        await ask(pipeline, a_request(), RecordingOutlet())

    run_virtual(main())
    spans = {span.name + str(span.attributes.get("kvmesh.attempt", "")): span for span in exported.get_finished_spans()}
    assert set(spans) == {"request", "placed_again1", "placed_again2"}
    request, first, second = spans["request"], spans["placed_again1"], spans["placed_again2"]
    assert [link.context.span_id for link in first.links] == [request.context.span_id]
    assert [link.context.span_id for link in second.links] == [first.context.span_id]
    assert first.parent.span_id == second.parent.span_id == request.context.span_id
    assert (first.attributes["kvmesh.failed_at"], first.attributes["kvmesh.emitted_tokens"]) == ("d0", 5)
    assert second.attributes["kvmesh.emitted_tokens"] == 7
    parents = [f"{each.context.span_id:016x}" for each in (request, first, second)]
    assert [ask.traceparent.split("-")[2] for ask in mesh.asks] == parents
    assert [leg.generation.traceparent.split("-")[2] for leg in mesh.legs] == parents


def test_the_gap_during_a_continuation_is_an_inter_token_time(mesh: FakeMesh, model: ServedModel) -> None:
    """The gap of a continuation, from the last token before the loss to the first one after it, counts as an inter-token time."""

    async def main() -> tuple[float, float]:
        pipeline = make_pipeline(mesh, StaticModels([model]))
        began_s = pipeline.clock.now()
        result = await ask(pipeline, a_request(), RecordingOutlet())
        assert result.ttft_s is not None
        return pipeline.metrics.of_model("tiny").gaps.sum_s, pipeline.clock.now() - began_s - result.ttft_s

    mesh.faults = Faults(legs=[(5, LostError("x"))])
    gaps_s, streamed_s = run_virtual(main())
    assert gaps_s == pytest.approx(streamed_s, abs=0.002)


def test_a_new_placement_gets_the_remaining_time(mesh: FakeMesh, model: ServedModel) -> None:
    """A second placement does not extend the request's deadline."""
    mesh.step_s = 1.0
    mesh.faults = Faults(legs=[(4, LostError("x"))])
    _, answer = run(mesh, model, a_request(timeout_s=8.5))
    assert isinstance(answer, DeadlineError)
    assert mesh.timeouts_s == [pytest.approx(7.5), pytest.approx(1.5)]


HELD: dict[str, tuple[str, int, dict[str, Any]]] = {
    "begin of a character": ("🙂 and more", 1, {}),
    "begin of a stop string": (TEXT, 2, {"stop": ["Hello! How are we"]}),
    "stop string across the loss": (TEXT, 2, {"stop": ["Hello! How are you"]}),
}
"""An answer, the number of its tokens before the leg is lost, and the sampling that holds them back."""


@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("case", HELD)
def test_held_back_text_is_kept_across_a_loss(mesh: FakeMesh, model: ServedModel, case: str, choices: int) -> None:
    """An incomplete character and the beginning of a stop string continue with the next leg."""
    text, received, sampling = HELD[case]
    tokens = tokens_of(model.text, text)
    mesh.answer = lambda _: tokens
    request = a_request(choices=choices, sampling=sampling)
    once, _ = run(FakeMesh(answer=mesh.answer, step_s=0.01), model, request)
    mesh.faults = Faults(leg_after=received, leg_error=LostError("x"))
    outlet, answer = run(mesh, model, request)
    assert (1, ReportKind.FIRST_TOKEN) in mesh.reports
    assert mesh.settled() == [(1, ReportKind.FAILED), (2, ReportKind.FINISHED)]
    assert isinstance(answer, RequestResult), answer
    assert (outlet.texts, outlet.token_ids, outlet.endings) == (once.texts, once.token_ids, once.endings)
    assert mesh.asks[-1].excluded_worker_ids == ("d0",)


def test_refusals_of_the_router_are_returned(mesh: FakeMesh, model: ServedModel) -> None:
    """A refusal of the router has the time after which the client may retry."""
    mesh.faults = Faults(place=[UnavailableError("no worker", reason="no_worker")])
    _, answer = run(mesh, model, a_request())
    assert isinstance(answer, UnavailableError)
    assert answer.retry_after_s == 1.0
    assert not mesh.reports


def test_silence_between_tokens_is_an_idle_timeout(mesh: FakeMesh, model: ServedModel) -> None:
    """The idle timeout moves the request to another worker, and the second timeout ends it."""
    mesh.faults = Faults(stalls_after=2)
    _, answer = run(mesh, model, a_request(), idle_timeout_s=5.0)
    assert isinstance(answer, DeadlineError)
    assert answer.reason == "idle_timeout"
    assert mesh.cancelled == ["r-0", "r-0-1"]
    assert mesh.asks[1].excluded_worker_ids == ("d0",)


@pytest.mark.parametrize("received", [0, 2])
def test_an_answer_of_a_silent_worker_continues(mesh: FakeMesh, model: ServedModel, received: int) -> None:
    """The next worker generates the rest of the answer of a stalled engine."""
    mesh.faults = Faults(stalls_after=received)

    async def main() -> RequestResult:
        pipeline = make_pipeline(mesh, StaticModels([model]), idle_timeout_s=5.0, first_token_timeout_s=5.0)
        running = asyncio.create_task(ask(pipeline, a_request(), outlet))
        await asyncio.sleep(1.0)
        mesh.faults.stalls_after = None
        return await running

    outlet = RecordingOutlet()
    assert run_virtual(main()).usage.output_tokens == len(tokens_of(model.text, TEXT))
    assert outlet.texts == {0: TEXT}
    check_nothing_left(mesh)


def test_a_stalled_prefill_worker_is_replaced(mesh: FakeMesh, model: ServedModel) -> None:
    """A prefill worker that sends heartbeats but computes nothing is excluded after the timeout of the first token."""
    mesh.faults = Faults(prefill_hangs=True)

    async def main() -> RequestResult:
        pipeline = make_pipeline(mesh, StaticModels([model]), first_token_timeout_s=5.0)
        running = asyncio.create_task(ask(pipeline, a_request(), RecordingOutlet()))
        await asyncio.sleep(1.0)
        mesh.faults.prefill_hangs = False
        return await running

    assert run_virtual(main()).usage.output_tokens
    assert mesh.asks[1].excluded_worker_ids == ("p0",)
    check_nothing_left(mesh)


def test_a_missing_first_token_is_a_timeout(mesh: FakeMesh, model: ServedModel) -> None:
    """The first token has its own limit, because queues take longer than steps."""
    mesh.faults = Faults(stalls_after=0)
    _, answer = run(mesh, model, a_request(), first_token_timeout_s=3.0, idle_timeout_s=1.0)
    assert isinstance(answer, DeadlineError)


@pytest.mark.parametrize(("received", "silent_s"), [(0, 3.0), (2, 7.0)])
def test_each_timeout_has_its_own_limit(mesh: FakeMesh, model: ServedModel, received: int, silent_s: float) -> None:
    """Before the first token the limit is `first_token_timeout_s`, between two tokens `idle_timeout_s`."""
    mesh.faults = Faults(stalls_after=received)
    ended_s: list[float] = []

    async def main() -> None:
        pipeline = make_pipeline(mesh, StaticModels([model]), first_token_timeout_s=3.0, idle_timeout_s=7.0)
        with pytest.raises(DeadlineError):
            await ask(pipeline, a_request(), RecordingOutlet())
        ended_s.append(pipeline.clock.now())

    run_virtual(main())
    # There are two placements, in which the prefill and each token take a step.
    assert ended_s == [pytest.approx(2 * (mesh.step_s * (1 + received) + silent_s), abs=0.01)]


def test_the_time_between_prefill_and_decode_shortens_the_lease(mesh: FakeMesh, model: ServedModel) -> None:
    """The lease in the handle is shorter by the time since the prefill, so that the decode worker does not rely on freed blocks."""
    mesh.faults = Faults(stands_still_s=12.0)
    _, answer = run(mesh, model, a_request())
    assert isinstance(answer, RequestResult), answer
    assert mesh.legs[0].handle is not None
    assert mesh.legs[0].handle.lease_s == pytest.approx(18.0)


def test_the_deadline_is_enforced_and_passed_on(mesh: FakeMesh, model: ServedModel) -> None:
    """Legs get the remaining time. The request ends at its deadline although tokens arrive."""
    mesh.step_s = 1.0
    _, answer = run(mesh, model, a_request(timeout_s=6.5))
    assert isinstance(answer, DeadlineError)
    assert mesh.timeouts_s[0] == pytest.approx(5.5)
    assert mesh.asks[0].timeout_s == pytest.approx(6.5)


def cancelled_after(mesh: FakeMesh, model: ServedModel, delay_s: float, request: Request) -> RecordingOutlet:
    outlet = RecordingOutlet()

    async def main() -> None:
        pipeline = make_pipeline(mesh, StaticModels([model]))
        task = asyncio.create_task(ask(pipeline, request, outlet))
        await asyncio.sleep(delay_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.01)
        check_nothing_left(mesh)
        assert pipeline.in_flight == 0

    run_virtual(main())
    return outlet


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("handoff", [Handoff.SEQUENTIAL, Handoff.RENDEZVOUS])
@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.015, 0.025, 0.055])
def test_cancel_reaches_every_phase(
    mesh: FakeMesh, model: ServedModel, delay_s: float, handoff: Handoff, choices: int
) -> None:
    """After a cancellation in any phase no state remains, and the router gets a report."""
    mesh.handoff = handoff
    outlet = cancelled_after(mesh, model, delay_s, a_request(choices=choices))
    assert not outlet.endings
    if mesh.asks:
        assert mesh.settled() == [(1, ReportKind.CANCELLED)]


def test_cancel_stops_a_stalled_prefill(mesh: FakeMesh, model: ServedModel) -> None:
    """A prefill leg that hangs is cancelled without waiting for its end."""
    mesh.faults = Faults(prefill_hangs=True)
    cancelled_after(mesh, model, 50.0, a_request())
    assert mesh.settled() == [(1, ReportKind.CANCELLED)]


def test_a_failed_leg_ends_an_attempt_with_running_prefills(mesh: FakeMesh, model: ServedModel) -> None:
    """The failure of the first choice's leg ends the attempt before the last choice's prefill ends."""
    mesh.answer = lambda _: tokens_of(model.text, TEXT)
    mesh.faults = Faults(leg_after=2, leg_error=InternalError("x"), prefill_hangs_after=1)
    _, answer = run(mesh, model, a_request(choices=2))
    assert isinstance(answer, InternalError)


def test_requests_in_flight_are_bounded_and_drain_refuses(mesh: FakeMesh, model: ServedModel) -> None:
    """A request beyond the limit is rejected with a time to retry. A draining frontend finishes its requests."""

    async def main() -> None:
        pipeline = make_pipeline(mesh, StaticModels([model]), requests_max=1)
        first = asyncio.create_task(ask(pipeline, a_request(request_id="a"), RecordingOutlet()))
        await asyncio.sleep(0.05)
        with pytest.raises(OverloadedError) as full:
            await ask(pipeline, a_request(request_id="b"), RecordingOutlet())
        assert full.value.retry_after_s == 1.0
        draining = asyncio.create_task(pipeline.drain())
        await asyncio.sleep(0.01)
        with pytest.raises(UnavailableError) as refused:
            await ask(pipeline, a_request(request_id="c"), RecordingOutlet())
        assert refused.value.reason == "draining"
        assert not draining.done()
        assert (await first).usage.output_tokens
        await draining

    run_virtual(main())


REFUSED: list[tuple[dict[str, Any], type[MeshError], str]] = [
    ({"model": "absent"}, NotFoundError, "model"),
    ({"prompt": ""}, InvalidRequestError, "prompt"),
    ({"prompt": []}, InvalidRequestError, "prompt"),
    ({"prompt": [5, 402]}, InvalidRequestError, "prompt"),
    ({"prompt": [-1]}, InvalidRequestError, "prompt"),
    ({"prompt": [5] * 512}, InvalidRequestError, "prompt"),
    ({"prompt": "word " * 4000}, InvalidRequestError, "prompt"),
    ({"prompt": "x" * 100_000}, InvalidRequestError, "prompt"),
    ({"sampling": {"max_tokens": 512}}, InvalidRequestError, "max_tokens"),
    ({"sampling": {"temperature": float("nan")}}, InvalidRequestError, "temperature"),
    ({"sampling": {"logit_bias": ((402, 1.0),)}}, InvalidRequestError, "logit_bias"),
    ({"sampling": {"stop_token_ids": (402,)}}, InvalidRequestError, "stop_token_ids"),
    ({"sampling": {"prompt_logprobs": 1}}, UnsupportedError, "prompt_logprobs"),
    ({"choices": 17}, InvalidRequestError, "choices"),
    ({"priority": 101}, InvalidRequestError, "priority"),
    ({"cache_salt": "x" * 257}, InvalidRequestError, "cache_salt"),
    ({"adapter": "absent"}, UnsupportedError, "adapter"),
    ({"prompt": Conversation(messages=[{"role": "tool", "content": "x"}])}, InvalidRequestError, "prompt"),
]


@pytest.mark.parametrize(("values", "kind", "field"), REFUSED)
def test_invalid_requests_are_refused_without_a_placement(
    mesh: FakeMesh,
    model: ServedModel,
    values: dict[str, Any],
    kind: type[MeshError],
    field: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests that are invalid are refused with the name of the field, and no placement is requested."""
    # Virtual time does not work with threads.
    monkeypatch.setattr(prepare, "INLINE_CHARACTERS_MAX", 1_000_000)
    _, answer = run(mesh, model, a_request(**values))
    assert isinstance(answer, kind)
    assert answer.field == field
    assert not mesh.asks


def test_a_thousand_requests_repeat_exactly(model: ServedModel) -> None:
    """With virtual time and a seeded random generator, two runs give the same ids, texts and times."""

    def answer(generation: Generation) -> list[int]:
        count = 1 + sum(generation.token_ids) % 40
        return [3 + (i * 7 + len(generation.token_ids)) % 390 for i in range(count)]

    async def main() -> list[object]:
        mesh = FakeMesh(answer=answer, step_s=0.02)
        pipeline = make_pipeline(mesh, StaticModels([model]))

        async def one(i: int) -> object:
            await asyncio.sleep(i * 0.001)
            outlet = RecordingOutlet()
            request = a_request(request_id=pipeline.new_id(), prompt=[5 + i % 300] * (1 + i % 50))
            result = await ask(pipeline, request, outlet)
            return request.request_id, outlet.texts, result.usage, result.ttft_s

        results = await asyncio.gather(*(one(i) for i in range(1000)))
        check_nothing_left(mesh)
        return list(results)

    assert run_virtual(main()) == run_virtual(main())
