"""Constraints of the answer: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`, SGLang's `regex` and `ebnf`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import orjson
from msgspec import Meta

from kvmesh.core import Constraint, ConstraintKind
from kvmesh.errors import InvalidRequestError
from kvmesh.rpc.codec.sampling import DOCUMENT_BYTES_MAX, OPTION_CHARACTERS_MAX, OPTIONS_MAX, REGEX_BYTES_MAX
from services.frontend.api.request_body import (
    Body,
    FieldError,
    Ignored,
    JsonObject,
    RefusingBody,
    invalid_value,
    object_in,
    refused,
)

Document = Annotated[JsonObject | str, Meta(description="A JSON object, or a string that contains one.")]
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
    format: Annotated[Any, Meta(description="Part of a structural tag.")] = None
    structures: Annotated[Any, Meta(description="Part of a structural tag.")] = None
    triggers: Annotated[Any, Meta(description="Part of a structural tag.")] = None

    def __post_init__(self) -> None:
        if self.type == "json_schema" and self.json_schema is None:
            raise FieldError("json_schema", message="must be an object")
        for name in _OF_TAG:
            if self.type != "structural_tag" and getattr(self, name) is not None:
                raise FieldError(name, message="must be absent unless the type is structural_tag")


_OF_TAG = ("format", "structures", "triggers")


class StructuredOutputs(RefusingBody, kw_only=True):
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


def one_constraint(given: Sequence[tuple[str, Any]]) -> tuple[Constraint | None, str]:
    """Returns the constraint, None for free text, and the field that asks for it. `given`: names of `SOURCES` with values.

    Raises InvalidRequestError if two fields ask for a constraint.
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
        return _document({"type": value.type, **parts}, name, ConstraintKind.STRUCTURAL_TAG)
    return None


def _structured_outputs(value: StructuredOutputs, name: str) -> Constraint | None:
    found = [
        constraint
        for kind, read in _READERS.items()
        if (given := getattr(value, kind)) is not None and (constraint := read(given, f"{name}.{kind}")) is not None
    ]
    if len(found) != 1:
        raise invalid_value(name, wanted="an object with exactly one of " + ", ".join(_READERS))
    return found[0]


def json_schema(value: JsonObject | str, name: str) -> Constraint:
    """Returns a constraint to documents of a schema. Raises InvalidRequestError if `value` is not an object or too large."""
    return _document(value, name, ConstraintKind.JSON_SCHEMA)


def _document(value: JsonObject | str, name: str, kind: ConstraintKind) -> Constraint:
    document = object_in(value) if isinstance(value, str) else value
    if document is None:
        raise invalid_value(name, wanted="a JSON object")
    data = orjson.dumps(document)
    if len(data) > DOCUMENT_BYTES_MAX:
        raise invalid_value(name, wanted=f"a document of at most {DOCUMENT_BYTES_MAX} bytes")
    return Constraint(kind=kind, text=data.decode())


def _text(*, text: str, name: str, kind: ConstraintKind, bytes_max: int) -> Constraint:
    if not 1 <= len(text.encode()) <= bytes_max:
        raise invalid_value(name, wanted=f"a string of 1 to {bytes_max} bytes")
    return Constraint(kind=kind, text=text)


Reader = Callable[[Any, str], Constraint | None]
"""Reads the value of a field, whose name is the second argument. Returns None if it asks for nothing."""
_READERS: Mapping[str, Reader] = {
    "json": json_schema,
    "json_object": lambda value, _: Constraint(kind=ConstraintKind.JSON_OBJECT) if value else None,
    "regex": lambda value, name: _text(text=value, name=name, kind=ConstraintKind.REGEX, bytes_max=REGEX_BYTES_MAX),
    "choice": lambda value, _: Constraint(kind=ConstraintKind.CHOICE, options=tuple(value)),
    "grammar": lambda value, name: _text(
        text=value, name=name, kind=ConstraintKind.GRAMMAR, bytes_max=DOCUMENT_BYTES_MAX
    ),
    "structural_tag": lambda value, name: _document(value, name, ConstraintKind.STRUCTURAL_TAG),
}
SOURCES: Mapping[str, Reader] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    **{f"guided_{kind}": _READERS[kind] for kind in ("json", "regex", "choice", "grammar")},
    "regex": _READERS["regex"],
    "ebnf": _READERS["grammar"],
}
"""Readers of the fields that ask for a constraint."""
