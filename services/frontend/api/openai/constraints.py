"""What the answer must match: OpenAI's `response_format` and vLLM's `structured_outputs` and `guided_*`, as one constraint."""

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from kvmesh.core import Constraint, ConstraintKind
from kvmesh.errors import InvalidRequestError
from kvmesh.rpc.codec.sampling import DOCUMENT_BYTES_MAX, OPTION_CHARACTERS_MAX, OPTIONS_MAX, REGEX_BYTES_MAX
from services.frontend.api.openai.fields import Fields

_RESPONSE_FORMAT = "response_format"
_REFUSED = ("guided_decoding_backend", "guided_whitespace_pattern")
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")


def read_constraint(fields: Fields) -> tuple[Constraint | None, str]:
    """The constraint, None for free text, and the field that asked for it. Two of them contradict each other."""
    if fields.lacks(_NAMES):
        return None, _RESPONSE_FORMAT
    found = [(constraint, name) for name, read in _SOURCES.items() if (constraint := read(fields, name)) is not None]
    if len(found) > 1:
        names = f"{found[0][1]} and {found[1][1]}"
        raise InvalidRequestError(f"{names} cannot both be given", field=found[1][1], reason="invalid_value")
    for name in _REFUSED:
        fields.refuse(name, "the engine chooses")
    return found[0] if found else (None, _RESPONSE_FORMAT)


def _response_format(fields: Fields, name: str) -> Constraint | None:
    value = fields.object(name)
    if value is None:
        return None
    form = Fields(value, f"{name}.")
    kind = form.choice("type", _FORMATS)
    if kind is None:
        raise form.wrong("type", "one of " + ", ".join(_FORMATS))
    if kind == "structural_tag":
        return _document(fields, name, ConstraintKind.STRUCTURAL_TAG)
    schema = form.object("json_schema")
    form.finish()
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint(kind=ConstraintKind.JSON_OBJECT)
    if schema is None:
        raise form.wrong("json_schema", "an object")
    inner = Fields(schema, form.name("json_schema."))
    inner.ignore(("name", "description", "strict"))
    constraint = _document(inner, "schema", ConstraintKind.JSON_SCHEMA)
    inner.finish()
    if constraint is None:
        raise inner.wrong("schema", "a JSON Schema")
    return constraint


def _structured_outputs(fields: Fields, name: str) -> Constraint | None:
    value = fields.object(name)
    if value is None:
        return None
    inner = Fields(value, f"{name}.")
    found = [constraint for kind, read in _KINDS.items() if (constraint := read(inner, kind)) is not None]
    for option in ("disable_any_whitespace", "disable_additional_properties"):
        inner.refuse(option, "the engine chooses", (False,))
    inner.refuse("whitespace_pattern", "the engine chooses")
    inner.finish()
    if len(found) != 1:
        raise fields.wrong(name, "an object with exactly one of " + ", ".join(_KINDS))
    return found[0]


def _schema(fields: Fields, name: str) -> Constraint | None:
    return _document(fields, name, ConstraintKind.JSON_SCHEMA)


def _tag(fields: Fields, name: str) -> Constraint | None:
    return _document(fields, name, ConstraintKind.STRUCTURAL_TAG)


def _document(fields: Fields, name: str, kind: ConstraintKind) -> Constraint | None:
    """A JSON object, as it is or in a string."""
    value = fields.take(name)
    if value is None:
        return None
    document = _parsed(value) if isinstance(value, str) else value
    if not isinstance(document, dict):
        raise fields.wrong(name, "a JSON object")
    text = orjson.dumps(document).decode()
    if len(text.encode()) > DOCUMENT_BYTES_MAX:
        raise fields.wrong(name, f"a document of at most {DOCUMENT_BYTES_MAX} bytes")
    return Constraint(kind=kind, text=text)


def _parsed(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _json_object(fields: Fields, name: str) -> Constraint | None:
    return Constraint(kind=ConstraintKind.JSON_OBJECT) if fields.flag(name) else None


def _regex(fields: Fields, name: str) -> Constraint | None:
    return _text(fields, name, ConstraintKind.REGEX, REGEX_BYTES_MAX)


def _grammar(fields: Fields, name: str) -> Constraint | None:
    return _text(fields, name, ConstraintKind.GRAMMAR, DOCUMENT_BYTES_MAX)


def _text(fields: Fields, name: str, kind: ConstraintKind, bytes_max: int) -> Constraint | None:
    text = fields.text(name)
    if text is None:
        return None
    if not 1 <= len(text.encode()) <= bytes_max:
        raise fields.wrong(name, f"a string of 1 to {bytes_max} bytes")
    return Constraint(kind=kind, text=text)


def _choice(fields: Fields, name: str) -> Constraint | None:
    value = fields.take(name)
    if value is None:
        return None
    if not isinstance(value, list) or not 1 <= len(value) <= OPTIONS_MAX:
        raise fields.wrong(name, f"a list of 1 to {OPTIONS_MAX} strings")
    if not all(isinstance(each, str) and 1 <= len(each) <= OPTION_CHARACTERS_MAX for each in value):
        raise fields.wrong(name, f"a list of strings of 1 to {OPTION_CHARACTERS_MAX} characters")
    return Constraint(kind=ConstraintKind.CHOICE, options=tuple(value))


Read = Callable[[Fields, str], Constraint | None]

_KINDS: Mapping[str, Read] = {
    "json": _schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _tag,
}
_SOURCES: Mapping[str, Read] = {
    _RESPONSE_FORMAT: _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
}
_NAMES = frozenset((*_SOURCES, *_REFUSED))
