"""What the answer must match: OpenAI's `response_format` and vLLM's `structured_outputs` and `guided_*`, as one constraint."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import orjson
from msgspec import Meta

from kvmesh.core import Constraint, ConstraintKind
from kvmesh.errors import InvalidRequestError
from kvmesh.rpc.codec.sampling import DOCUMENT_BYTES_MAX, OPTION_CHARACTERS_MAX, OPTIONS_MAX, REGEX_BYTES_MAX
from services.frontend.api.request_body import AnyObject, Body, FieldError, Ignored, refuse_fields, refused, wrong

Document = Annotated[AnyObject | str, Meta(description="A JSON object, as it is or in a string.")]
Options = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=OPTION_CHARACTERS_MAX)]],
    Meta(min_length=1, max_length=OPTIONS_MAX),
]
Pattern = Annotated[str, Meta(min_length=1)]


class JsonSchemaFormat(Body, kw_only=True):
    """`response_format.json_schema`."""

    schema: Document
    name: Ignored = None
    description: Ignored = None
    strict: Ignored = None


class ResponseFormat(Body, kw_only=True):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: Annotated[Any, Meta(description="Of a structural tag.")] = None
    structures: Annotated[Any, Meta(description="Of a structural tag.")] = None
    triggers: Annotated[Any, Meta(description="Of a structural tag.")] = None

    def __post_init__(self) -> None:
        if self.type == "json_schema" and self.json_schema is None:
            raise FieldError("json_schema", "must be an object")
        for name in _OF_TAG:
            if self.type != "structural_tag" and getattr(self, name) is not None:
                raise FieldError(name, "must be absent unless the type is structural_tag")


_OF_TAG = ("format", "structures", "triggers")


class StructuredOutputs(Body, kw_only=True):
    """`structured_outputs`: exactly one of the kinds."""

    json: Document | None = None
    json_object: bool | None = None
    regex: Pattern | None = None
    choice: Options | None = None
    grammar: Pattern | None = None
    structural_tag: Document | None = None
    disable_any_whitespace: Annotated[Any, refused("the engine chooses", False)] = None
    disable_additional_properties: Annotated[Any, refused("the engine chooses", False)] = None
    whitespace_pattern: Annotated[Any, refused("the engine chooses")] = None

    def __post_init__(self) -> None:
        refuse_fields(self)


def one_constraint(given: Sequence[tuple[str, Any]]) -> tuple[Constraint | None, str]:
    """The constraint, None for free text, and the field that asks for it. `given`: names of `SOURCES` and their values.

    Two of them contradict each other.
    """
    found = [(constraint, name) for name, value in given if (constraint := SOURCES[name](value, name)) is not None]
    if len(found) > 1:
        names = f"{found[0][1]} and {found[1][1]}"
        raise InvalidRequestError(f"{names} cannot both be given", field=found[1][1], reason="invalid_value")
    return found[0] if found else (None, "response_format")


def _response_format(value: ResponseFormat, name: str) -> Constraint | None:
    if value.type == "json_object":
        return Constraint(kind=ConstraintKind.JSON_OBJECT)
    if value.type == "json_schema":
        assert value.json_schema is not None, "ResponseFormat checks it"
        return json_schema(value.json_schema.schema, f"{name}.json_schema.schema")
    if value.type == "structural_tag":
        parts = {each: part for each in _OF_TAG if (part := getattr(value, each)) is not None}
        return _structural_tag({"type": value.type, **parts}, name)
    return None


def _structured_outputs(value: StructuredOutputs, name: str) -> Constraint | None:
    found = [
        constraint
        for kind, read in _KINDS.items()
        if (given := getattr(value, kind)) is not None and (constraint := read(given, f"{name}.{kind}")) is not None
    ]
    if len(found) != 1:
        raise wrong(name, "an object with exactly one of " + ", ".join(_KINDS))
    return found[0]


def json_schema(value: AnyObject | str, name: str) -> Constraint:
    """The answer is a JSON document of a schema. InvalidRequestError when `value` is none or too large."""
    return _document(value, name, ConstraintKind.JSON_SCHEMA)


def _structural_tag(value: AnyObject | str, name: str) -> Constraint:
    return _document(value, name, ConstraintKind.STRUCTURAL_TAG)


def _document(value: AnyObject | str, name: str, kind: ConstraintKind) -> Constraint:
    document = _parsed(value) if isinstance(value, str) else value
    if not isinstance(document, dict):
        raise wrong(name, "a JSON object")
    data = orjson.dumps(document)
    if len(data) > DOCUMENT_BYTES_MAX:
        raise wrong(name, f"a document of at most {DOCUMENT_BYTES_MAX} bytes")
    return Constraint(kind=kind, text=data.decode())


def _parsed(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _json_object(value: bool, name: str) -> Constraint | None:
    return Constraint(kind=ConstraintKind.JSON_OBJECT) if value else None


def _regex(value: str, name: str) -> Constraint:
    return _text(value, name, ConstraintKind.REGEX, REGEX_BYTES_MAX)


def _grammar(value: str, name: str) -> Constraint:
    return _text(value, name, ConstraintKind.GRAMMAR, DOCUMENT_BYTES_MAX)


def _text(text: str, name: str, kind: ConstraintKind, bytes_max: int) -> Constraint:
    if not 1 <= len(text.encode()) <= bytes_max:
        raise wrong(name, f"a string of 1 to {bytes_max} bytes")
    return Constraint(kind=kind, text=text)


def _choice(value: list[str], name: str) -> Constraint:
    return Constraint(kind=ConstraintKind.CHOICE, options=tuple(value))


_KINDS: Mapping[str, Callable[[Any, str], Constraint | None]] = {
    "json": json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}
SOURCES: Mapping[str, Callable[[Any, str], Constraint | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": json_schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
}
"""Readers of the fields that ask for a constraint."""
