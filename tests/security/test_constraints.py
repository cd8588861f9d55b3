"""A constraint that is expensive to compile reaches no engine, and one that makes a worker silent reaches no second worker."""

import asyncio
import json
import threading
from typing import Any

import aiohttp
import pytest

from kvmesh import constraint_costs
from kvmesh.clock import SystemClock
from kvmesh.constraint_costs import COST_MAX, check_constraint, pattern_cost
from kvmesh.core import Ask, Constraint, ConstraintKind, SamplingParams
from kvmesh.errors import (
    WORKER_LOST_TWICE,
    InternalError,
    InvalidRequestError,
    LostError,
    NotFoundError,
    UnavailableError,
)
from services.frontend.models import ServedModel
from services.frontend.pipeline.losses import LostWorkers
from services.frontend.pipeline.placements import SILENT_WORKER_RETURNS_S, RequestPlacements
from services.frontend.pipeline.request import Request
from services.frontend.pipeline.retry_budget import RetryBudget
from services.frontend.settings import PipelineSettings
from tests.frontend_mesh import FakeMesh, served_model, write_model
from tests.security.rig import BODY, CHAT, frontend
from tests.virtual_loop import run_virtual
from tests.work import at_most_lines
from tests.worker_rig import RawFrontend, make_leg, running_worker, submission


def schema_of(document: Any) -> Constraint:
    return Constraint(kind=ConstraintKind.JSON_SCHEMA, text=json.dumps(document))


def problem_of(constraint: Constraint) -> str:
    try:
        check_constraint(constraint, "f")
    except InvalidRequestError as error:
        return f"{error.reason} of {error.field}".removesuffix(" of f")
    return ""


def regex(pattern: str) -> Constraint:
    return Constraint(kind=ConstraintKind.REGEX, text=pattern)


def ranged(count: int) -> dict[str, Any]:
    """The schema that makes a worker silent if it has 3 000 fields."""
    fields = {f"f{i}": {"type": "integer", "minimum": -(10**12) + i, "maximum": 10**15 + i * 7} for i in range(count)}
    return {"type": "object", "properties": fields, "required": list(fields)}


LINES_MAX = 150_000
"""Four times as many as the estimate of 3 000 ranged integers takes. The automata of these constraints have up to a billion states."""
NESTED: dict[str, Any] = {"type": "string"}
for _ in range(6):
    NESTED = {"type": "array", "minItems": 100, "items": NESTED}
DEEP: dict[str, Any] = {}
for _ in range(300):
    DEEP = {"properties": {"a": DEEP}}


@pytest.mark.parametrize(
    "constraint",
    [
        schema_of(ranged(3000)),
        schema_of(NESTED),
        schema_of(DEEP),
        schema_of({"enum": ["x" * 40 + str(i) for i in range(3000)]}),
        schema_of({"type": "string", "pattern": "(a{1000}){1000}"}),
        schema_of({"type": "string", "maxLength": 10**9}),
        regex("((a{100}){100}){100}"),
        regex("[a-z]{99999}"),
        regex("(" * 3 + "ab" + "){50}" * 3),
        Constraint(kind=ConstraintKind.GRAMMAR, text='root ::= ("a"{1000} "b"){1000}'),
        Constraint(kind=ConstraintKind.CHOICE, options=tuple("x" * 100 + str(i) for i in range(1000))),
    ],
)
def test_expensive_constraints_are_refused_at_once(constraint: Constraint) -> None:
    """The cost is estimated from the text alone, with far less work than an engine needs to compile it."""
    constraint_costs._verdicts.clear()
    with at_most_lines(LINES_MAX):
        assert problem_of(constraint) == "constraint_too_complex"


@pytest.mark.parametrize(
    "document",
    [
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}}},
        {"properties": {"x": {"allOf": [{"$ref": "#/properties/x"}]}}},
    ],
)
def test_a_circular_reference_is_invalid(document: Any) -> None:
    assert problem_of(schema_of(document)) == "invalid_value"


@pytest.mark.parametrize(
    "document",
    [
        True,
        {},
        ranged(100),
        {"$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
        {"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "integer"}]},
        {"$defs": {"a": {"type": "null"}}, "properties": {str(i): {"$ref": "#/$defs/a"} for i in range(500)}},
        {"$ref": "#/$defs/missing"},
        {"type": "string", "pattern": "^[A-Z]{2,3}-\\d{1,10}$", "maxLength": 5000},
        {"type": "array", "items": {"type": "object", "properties": {"a": {"minimum": 0}}}, "maxItems": 100},
        {"properties": {f"p{i}": {"type": "string", "description": "x" * 200} for i in range(1000)}},
    ],
)
def test_usual_schemas_are_allowed(document: Any) -> None:
    """Schemas that applications use, including recursion through properties or items, are within the limits."""
    assert problem_of(schema_of(document)) == ""


@pytest.mark.parametrize(
    ("pattern", "cost"),
    [
        ("", 0),
        ("abc", 3),
        ("a{10}", 10),
        ("(ab){3,5}", 10),
        ("(a{3}){4}", 12),
        (r"\{9\}x", 4),
        ("[a]{7,}b", 8),
        ("a{x}", 4),
        ("((a", 1),
        ("[abc", 1),
        ("a{ 1, 3 }", 3),
        (")}{", 3),
    ],
)
def test_the_cost_of_a_pattern_is_about_its_states(pattern: str, cost: int) -> None:
    assert pattern_cost(pattern) == cost


@pytest.fixture(scope="module")
def constrained_model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    features = frozenset({"structured_output"})
    return served_model(write_model(tmp_path_factory.mktemp("model")), features=features)


async def test_the_client_gets_400_with_the_field(constrained_model: ServedModel) -> None:
    """A refused schema is not placed. A schema within the limit is served."""
    async with frontend(constrained_model) as rig, aiohttp.ClientSession() as session:
        for document, status, code in (
            (ranged(3000), 400, "constraint_too_complex"),
            ({"$ref": "#"}, 400, "invalid_value"),
            (ranged(10), 200, None),
        ):
            body = {
                **BODY,
                "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": document}},
            }
            async with session.post(rig.url + CHAT, json=body) as response:
                answer = await response.json()
                assert (response.status, answer.get("error", {}).get("code")) == (status, code), answer
                if code:
                    assert answer["error"]["param"].startswith("response_format")
        assert len(rig.mesh.asks) == 1
    assert COST_MAX < 3000 * 200


SILENT = LostError("silent", reason="worker_silent", where="w")
AWAY = UnavailableError("away", reason="worker_unreachable")


def placements_of(constraint: Constraint | None) -> tuple[RequestPlacements, FakeMesh]:
    """Returns the placements of a request that was placed once."""
    request = Request(request_id="r", model="m", prompt="x", sampling=SamplingParams(constraint=constraint))
    mesh, clock, settings = FakeMesh(answer=lambda _: [2]), SystemClock(), PipelineSettings()
    ask = Ask(request_id="r", model="m", prompt_tokens=1)
    placements = RequestPlacements(
        request, ask, router=mesh, clock=clock, settings=settings, lost_workers=LostWorkers(),
        budget=RetryBudget(0.0), deadline_s=clock.now() + 600.0,
    )  # fmt: skip
    placements.next(ask, SILENT, emitted_tokens=1)
    return placements, mesh


@pytest.mark.parametrize("again", [SILENT, LostError("gone", where="w")])
@pytest.mark.parametrize("is_prefill", [False, True])
def test_a_request_that_silences_a_worker_is_not_retried_on_another(again: LostError, is_prefill: bool) -> None:
    """A request with a constraint that makes its worker silent is retried on this worker only. A second loss fails it.

    The worker may be compiling the constraint, which must not stop another worker too.
    """

    async def main() -> None:
        placements, mesh = placements_of(schema_of({}))
        placements.count_failure(SILENT, failed_worker_id="w", has_progress=False, is_prefill=is_prefill)
        for _ in range(3):
            await placements.place()
            pins = (mesh.asks[-1].pinned_prefill_worker_id, mesh.asks[-1].pinned_decode_worker_id)
            assert pins == (("w", "") if is_prefill else ("", "w"))
            assert mesh.asks[-1].excluded_worker_ids == ()
            placements.count_failure(AWAY, failed_worker_id="w", has_progress=False, is_prefill=is_prefill)
        with pytest.raises(InternalError) as refused:
            placements.count_failure(again, failed_worker_id="w", has_progress=False, is_prefill=is_prefill)
        assert refused.value.reason == WORKER_LOST_TWICE

    run_virtual(main())


@pytest.mark.parametrize("is_placed", [True, False])
def test_a_worker_that_stays_silent_ends_the_request(is_placed: bool) -> None:
    """A request that waits for a silent worker fails after SILENT_WORKER_RETURNS_S, whether or not the router can place it there."""

    async def fail(placements: RequestPlacements) -> None:
        while True:
            await placements.place()
            await asyncio.sleep(1.0)
            placements.count_failure(AWAY, failed_worker_id="w", has_progress=False)

    async def main() -> float:
        placements, mesh = placements_of(schema_of({}))
        placements.count_failure(SILENT, failed_worker_id="w", has_progress=False)
        if not is_placed:
            absences = [UnavailableError("away", reason="no_worker"), NotFoundError("gone", reason="worker_not_found")]
            mesh.faults.place = [*absences * 500]
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(InternalError) as refused:
            await fail(placements)
        assert refused.value.reason == WORKER_LOST_TWICE
        return asyncio.get_running_loop().time() - began_s

    assert run_virtual(main()) == pytest.approx(SILENT_WORKER_RETURNS_S, abs=2.0)


@pytest.mark.parametrize(
    ("constraint", "error", "has_progress"),
    [(None, SILENT, False), (schema_of({}), SILENT, True), (schema_of({}), LostError("gone", where="w"), False)],
)
def test_other_failures_are_retried_on_another_worker(
    constraint: Constraint | None, error: LostError, has_progress: bool
) -> None:
    """Without a constraint, after the first token, or after a broken connection, the request is retried on another worker."""

    async def main() -> None:
        placements, mesh = placements_of(constraint)
        placements.count_failure(error, failed_worker_id="w", has_progress=has_progress)
        await placements.place()
        assert mesh.asks[-1].excluded_worker_ids == ("w",)
        assert mesh.asks[-1].pinned_decode_worker_id == ""

    run_virtual(main())


def properties(count: int, prefix: str) -> dict[str, Any]:
    return {"type": "object", "properties": {f"{prefix}{i}_{count}": {"type": "string"} for i in range(count)}}


def recorded_threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Replaces the estimator. Returns the list of threads that estimate costs, which grows with each estimate."""
    estimate, threads = constraint_costs._estimate, list[threading.Thread]()

    def record(constraint: Constraint) -> constraint_costs.Verdict:
        threads.append(threading.current_thread())
        return estimate(constraint)

    monkeypatch.setattr(constraint_costs, "_estimate", record)
    return threads


@pytest.mark.parametrize(("count", "is_inline"), [(20, True), (4000, False)])
async def test_a_worker_estimates_long_schemas_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, count: int, is_inline: bool
) -> None:
    """A worker estimates the cost of a long schema in a thread, so that the steps of its other requests continue."""
    threads = recorded_threads(monkeypatch)
    constraint = schema_of(properties(count, "leg"))
    sampling = SamplingParams(max_tokens=1, constraint=constraint)
    async with running_worker("grpc") as rig:
        raw = await RawFrontend.attach(rig.channel)
        await raw.send(submission(1, make_leg("r1", sampling=sampling)))
        await raw.read_finishes(1)
        raw.call.cancel()
    assert [each is threading.main_thread() for each in threads] == [is_inline]


@pytest.mark.parametrize(("count", "is_inline"), [(20, True), (4000, False)])
async def test_the_frontend_estimates_long_schemas_off_the_event_loop(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, count: int, is_inline: bool
) -> None:
    """A thread estimates the cost of a long schema once. The event loop uses the verdict, which is cached by digest."""
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": properties(count, "http")}}
    threads = recorded_threads(monkeypatch)
    before = set(constraint_costs._verdicts)
    async with (
        frontend(model) as rig,
        aiohttp.ClientSession() as session,
        session.post(rig.url + CHAT, json=BODY | {"response_format": form}) as response,
    ):
        # The model of these tests has no structured output, which is checked last.
        assert (await response.json())["error"]["code"] == "unsupported"
    assert [each is threading.main_thread() for each in threads] == [is_inline]
    assert [len(digest) for digest in set(constraint_costs._verdicts) - before] == [32]
