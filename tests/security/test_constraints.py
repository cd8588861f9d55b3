"""A constraint that is expensive to compile reaches no engine, and one that silences a worker reaches no second one."""

import json
import time
from typing import Any

import aiohttp
import pytest

from kvmesh.constraint_costs import COST_MAX, check_constraint, pattern_cost
from kvmesh.core import Constraint, ConstraintKind, SamplingParams
from kvmesh.errors import InternalError, InvalidRequestError, LostError
from services.frontend.models import ServedModel
from services.frontend.pipeline.losses import LostWorkers
from services.frontend.pipeline.placements import RequestPlacements
from services.frontend.pipeline.request import Request
from services.frontend.settings import PipelineSettings
from tests.conformance.manual_clock import ManualClock
from tests.frontend_mesh import FakeMesh, served_model, write_model
from tests.security.rig import BODY, CHAT, frontend


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
    """The schema that silenced a worker, of 3 000 fields."""
    fields = {f"f{i}": {"type": "integer", "minimum": -(10**12) + i, "maximum": 10**15 + i * 7} for i in range(count)}
    return {"type": "object", "properties": fields, "required": list(fields)}


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
    """From the text alone, in far less time than an engine takes for it."""
    began = time.process_time()
    assert problem_of(constraint) == "constraint_too_complex"
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "document",
    [
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}}},
        {"properties": {"x": {"allOf": [{"$ref": "#/properties/x"}]}}},
    ],
)
def test_a_reference_that_leads_back_to_itself_is_invalid(document: Any) -> None:
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
    """Recursion through properties or items included."""
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
    """Nothing is placed. A schema within the limit is served."""
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


async def test_a_request_that_silences_a_worker_is_not_tried_on_another() -> None:
    """If it has a constraint: the worker may be compiling it. Others are placed again, as before."""

    def placements(constraint: Constraint | None) -> RequestPlacements:
        request = Request(request_id="r", model="m", prompt="x", sampling=SamplingParams(constraint=constraint))
        mesh: Any = FakeMesh(answer=lambda _: [2])
        return RequestPlacements(
            request, None, router=mesh, clock=ManualClock(), settings=PipelineSettings(), lost_workers=LostWorkers(), deadline_s=1.0  # type: ignore[arg-type]
        )  # fmt: skip

    silent = LostError("silent", reason="worker_silent")
    with pytest.raises(InternalError) as refused:
        placements(schema_of({})).count_failure(silent, failed_worker_id="w", has_progress=False)
    assert refused.value.reason == "worker_lost_twice"
    placements(None).count_failure(silent, failed_worker_id="w", has_progress=False)
    placements(schema_of({})).count_failure(silent, failed_worker_id="w", has_progress=True)
    placements(schema_of({})).count_failure(LostError("gone"), failed_worker_id="w", has_progress=False)
