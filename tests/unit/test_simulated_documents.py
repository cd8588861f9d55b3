"""Generated documents match their constraint for every seed, or the constraint is refused by field."""

import json
import re
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.core import Constraint, ConstraintKind
from kvmesh.engines.simulated.constrained_answers import make_document
from kvmesh.errors import InvalidRequestError, UnsupportedError

NAMES = st.sampled_from(["a", "b", "name", "größe", "x y"])


def bounded(low: str, high: str, values: st.SearchStrategy[int]) -> st.SearchStrategy[dict[str, int]]:
    """Two bounds in the right order: both, either or none."""
    pairs = st.tuples(values, values).map(lambda pair: {low: min(pair), high: max(pair)})
    return st.one_of(pairs, pairs.map(lambda found: {low: found[low]}), pairs.map(lambda found: {high: found[high]}),
                     st.just({}))  # fmt: skip


LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({"const": {"a": [1, "x"]}}),
    st.lists(st.one_of(st.integers(), st.text(max_size=5), st.booleans()), min_size=1, max_size=4).map(
        lambda found: {"enum": found}
    ),
    bounded("minimum", "maximum", st.integers(-1000, 1000)).map(lambda found: {"type": "integer", **found}),
    bounded("minimum", "maximum", st.integers(-1000, 1000)).map(lambda found: {"type": "number", **found}),
    st.integers(-50, 50).map(lambda low: {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": low + 1}),
    st.integers(1, 9).map(lambda step: {"type": "integer", "multipleOf": step, "minimum": 3, "maximum": 40}),
    bounded("minLength", "maxLength", st.integers(0, 40)).map(lambda found: {"type": "string", **found}),
    st.sampled_from(["date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "uri", "hostname"]).map(
        lambda form: {"type": "string", "format": form}
    ),
    st.sampled_from([r"^[A-Z]{2}\d+$", r"a+b?", r"(yes|no)!"]).map(lambda text: {"type": "string", "pattern": text}),
    st.just({"type": ["string", "null"]}),
)


def nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    objects = st.dictionaries(NAMES, inner, max_size=4).flatmap(
        lambda found: st.sets(st.sampled_from(sorted(found) or ["a"])).map(
            lambda needed: {
                "type": "object",
                "properties": found,
                "required": sorted(needed & found.keys()),
                "additionalProperties": False,
            }
        )
    )
    arrays = st.tuples(inner, bounded("minItems", "maxItems", st.integers(0, 4))).map(
        lambda found: {"type": "array", "items": found[0], **found[1]}
    )
    choices = st.lists(inner, min_size=1, max_size=3).map(lambda found: {"anyOf": found})
    return st.one_of(objects, arrays, choices)


SCHEMAS = st.recursive(LEAVES, nested, max_leaves=12)


def made(kind: ConstraintKind, text: str, seed: int = 0, options: tuple[str, ...] = ()) -> str:
    return make_document(Constraint(kind=kind, text=text, options=options), Random(seed))


@settings(max_examples=300, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_generated_instances_are_valid(schema: dict[str, Any], seed: int) -> None:
    """An independent validator accepts the instance of each schema, including formats."""
    value = json.loads(made(ConstraintKind.JSON_SCHEMA, json.dumps(schema), seed))
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    validator(schema, format_checker=validator.FORMAT_CHECKER).validate(value)


TREE = {"$ref": "#/$defs/node", "$defs": {"node": {
    "type": "object", "required": ["value"], "additionalProperties": False,
    "properties": {"value": {"type": "integer"}, "left": {"$ref": "#/$defs/node"}, "right": {"$ref": "#/$defs/node"}},
}}}  # fmt: skip


@pytest.mark.parametrize(
    "schema",
    [
        TREE,
        {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 3, "uniqueItems": True},
        {"type": "object", "minProperties": 3},
        {"type": "object", "required": ["x"], "additionalProperties": {"type": "integer"}},
        {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                   {"properties": {"a": {"minimum": 5}}, "required": ["b"]}]},
        {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False, "minItems": 2},
        True,
        {},
    ],
)  # fmt: skip
def test_recursive_and_combined_schemas_are_satisfied(schema: Any) -> None:
    """Recursion ends, and references and merged rules hold."""
    for seed in range(50):
        value = json.loads(made(ConstraintKind.JSON_SCHEMA, json.dumps(schema), seed))
        jsonschema.Draft202012Validator(schema).validate(value)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(yes|no)[a-f0-9]{3,5}\.?", r"\w+@\w+\.(com|org)", r"([ab])\1[^x]", r"^\d{4}-\d\d$", r"^a|b$", r"[^\W\d_]{3}",
        r"(?:ab)*c", r"(?P<x>a)(?P=x)", r"\s?\S\D", r"", r"日本[語字]",
    ],
)  # fmt: skip
def test_generated_texts_match_their_expression(pattern: str) -> None:
    """The expression matches the whole text."""
    for seed in range(50):
        text = made(ConstraintKind.REGEX, pattern, seed)
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize("pattern", [r"(?=a)b", r"a\bb", r"a$b", r"(?!a)", r"(a)?(?(1)b|c)", r"a{70000}"])
def test_unsupported_expressions_are_refused(pattern: str) -> None:
    """A refusal is better than a text that may not match."""
    with pytest.raises((UnsupportedError, InvalidRequestError)) as caught:
        made(ConstraintKind.REGEX, pattern, 1)
    assert caught.value.field == "generation.sampling.constraint"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "dependentRequired": {"a": ["b"]}}, {"not": {}}, {"$ref": "http://x/y"}, {"$ref": "#/$defs/no"},
        {"$ref": "#"}, {"type": "strange"}, {"minimum": "x"}, {"type": "integer", "minimum": 5, "maximum": 3}, 7, [],
        {"properties": 5}, {"enum": []}, {"type": "array", "minItems": 10**9}, {"type": "string", "minLength": 10**9},
        {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"$ref": "#"}}, "required": ["a", "b"]},
        {"type": "string", "format": "unheard-of"}, {"type": "object", "required": 5},
        {"allOf": [{"type": "string"}, {"type": "integer"}]}, {"anyOf": [{"not": {}}]},
        {"type": "string", "pattern": "a", "minLength": 5}, {"type": "number", "multipleOf": 0},
    ],
)  # fmt: skip
def test_unsupported_schemas_are_refused(schema: Any) -> None:
    """Unknown keywords, contradictions, endless recursion and invalid values are an error with the field, in bounded time."""
    with pytest.raises((UnsupportedError, InvalidRequestError)) as caught:
        made(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
    assert caught.value.field == "generation.sampling.constraint"


def test_other_kinds_of_constraints() -> None:
    """A choice gives one of the options, and a structural tag gives its content. A grammar is refused."""
    assert {made(ConstraintKind.CHOICE, "", seed, ("a", "b")) for seed in range(20)} == {"a", "b"}
    assert isinstance(json.loads(made(ConstraintKind.JSON_OBJECT, "")), dict)
    form = {"type": "sequence", "elements": [
        {"type": "const_string", "value": "<a>"}, {"type": "regex", "pattern": "[0-9]{3}"},
        {"type": "or", "elements": [{"type": "const_string", "value": "x"}, {"type": "any_text"}]},
    ]}  # fmt: skip
    document = json.dumps({"type": "structural_tag", "format": form})
    assert re.match(r"<a>[0-9]{3}", made(ConstraintKind.STRUCTURAL_TAG, document))
    for broken in ({}, {"format": {"type": "unknown"}}, {"format": {"type": "tag"}}):
        with pytest.raises((UnsupportedError, InvalidRequestError)):
            made(ConstraintKind.STRUCTURAL_TAG, json.dumps(broken))
    with pytest.raises(UnsupportedError):
        made(ConstraintKind.GRAMMAR, "root ::= 'a'")
