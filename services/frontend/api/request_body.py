"""Declares and checks request bodies.

One class per request type (a `Body`) declares the fields, their types, limits and descriptions. `read_body` checks a JSON
object against it with msgspec, and `/openapi.json` is made from the same classes. A field that is null counts as absent.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
import orjson
from msgspec import Meta, Struct

from kvmesh.errors import InvalidRequestError, MeshError, UnsupportedError
from kvmesh.rpc.codec.json_texts import NESTING_MAX, JsonTexts, is_nested_too_deeply

INTEGER_MAX = 2**63 - 1
TOKENS_MAX = 2**31 - 1
_NAME_CHARACTERS_MAX = 128
_WHAT_CHARACTERS_MAX = 256
_MISSING = "Object missing required field `"
_UNKNOWN = "Object contains unknown field `"
# msgspec's messages for a type that no class of a union has, and for one that a class does not allow.
_UNKNOWN_KINDS = ("Invalid value ", "Invalid enum value ")
# msgspec's message for a wrong value: a sentence, then the path if there is one.
_PROBLEM = re.compile(r"(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?", re.DOTALL)
# The elements of these lists have types of their own, so an error names the element; other errors name the list.
_INDEX = re.compile(r"(?<!content)(?<!input)(\[[^\]]*\])+\Z")

ModelName = Annotated[str, Meta(min_length=1, max_length=256)]
Count = Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
"""A number of tokens."""
TokenId = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]
Metadata = Annotated[dict[str, str], Meta(max_length=16)]
JsonObject = dict[str, Any]
Ignored = Annotated[Any, Meta(description="Accepted; changes nothing.")]


class Body(Struct, forbid_unknown_fields=True):
    """An object of a request. Unknown fields are refused: ignoring one would silently change the answer."""


class RefusingBody(Body):
    """An object with fields that are `refused`."""

    def __post_init__(self) -> None:
        """Raises FieldError for the first `refused` field that has a value."""
        group, reasons = _refused_fields(type(self))
        for name, value in group.given(self):
            why, neutral = reasons[name]
            if not any(value == each and type(value) is type(each) for each in neutral):
                raise FieldError(name, message=f"is not supported: {why}", kind=UnsupportedError)


class ModelBody(RefusingBody, kw_only=True):
    """A request that names a model."""

    model: Annotated[
        ModelName | None, Meta(description="A model's or an adapter's name; may be absent where one model is served.")
    ] = None

    def model_name(self) -> str:
        """Returns the name. Raises InvalidRequestError if it is absent."""
        if self.model is None:
            raise invalid_value("model", wanted="a model's name")
        return self.model


class FieldError(ValueError):
    """Raised by `__post_init__` of a Body. `read_body` converts it to the client's error and puts the object's path in front."""

    def __init__(self, field: str, message: str, kind: type[MeshError] = InvalidRequestError) -> None:
        super().__init__(message)
        self.field = field
        self.message = message
        self.kind = kind


Kind = TypeVar("Kind", bound=Body)


def parse_object(body: bytes) -> dict[str, Any]:
    """Parses a JSON object. Refuses also invalid UTF-8, NaN, numbers beyond double and nesting beyond NESTING_MAX."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}", reason="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object", reason="invalid_json")
    if body.count(b"{") + body.count(b"[") > NESTING_MAX and is_nested_too_deeply(value):
        raise InvalidRequestError(f"the body is nested more than {NESTING_MAX} levels deep", reason="invalid_json")
    return value


def object_in(text: str) -> JsonObject | None:
    """Parses a string that contains a JSON object; None if it contains anything else. For several strings of a request see `JsonTexts`."""
    return JsonTexts().object_in(text)


def read_body(kind: type[Kind], values: Mapping[str, Any], prefix: str = "") -> Kind:
    """Checks an object against its class. Raises InvalidRequestError and UnsupportedError, which name `prefix` + the field."""
    try:
        return msgspec.convert(values, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _client_error(error, prefix) from None


def _client_error(error: msgspec.ValidationError, prefix: str) -> MeshError:
    match = _PROBLEM.fullmatch(str(error))
    assert match is not None, "the pattern matches everything"
    what, path = match["what"][:_WHAT_CHARACTERS_MAX], prefix + (match["path"] or "")
    below = f"{path}." if match["path"] else path
    cause = error.__cause__
    if isinstance(cause, FieldError):
        name = below + cause.field
        return _named_error(cause.kind, name, message=f"{name} {cause.message}")
    if what.startswith(_MISSING):
        name = below + what.removeprefix(_MISSING).removesuffix("`")
        return _named_error(InvalidRequestError, name, message=f"{name} is required")
    if what.startswith(_UNKNOWN):
        name = (below + what.removeprefix(_UNKNOWN).removesuffix("`"))[:_NAME_CHARACTERS_MAX]
        return InvalidRequestError(f"unknown field: {name}", field=name, reason="unknown_field")
    if what.startswith(_UNKNOWN_KINDS) and path.endswith("].type"):
        return _named_error(UnsupportedError, path, message=f"{path} {what.partition(' value ')[2]} is not supported")
    path = _INDEX.sub("", path)
    return _named_error(InvalidRequestError, path, message=f"{path}: {what[0].lower()}{what[1:]}")


def _named_error(kind: type[MeshError], name: str, message: str) -> MeshError:
    return kind(message, field=name, reason="invalid_value" if kind is InvalidRequestError else "")


def invalid_value(name: str, wanted: str) -> InvalidRequestError:
    """Returns the error for a field that must be `wanted`."""
    return InvalidRequestError(f"{name} must be {wanted}", field=name, reason="invalid_value")


def refused(why: str, *neutral: Any) -> Meta:
    """Declares a known field that is not supported. Null and the values in `neutral` ask for nothing and are accepted."""
    return Meta(description=f"Refused: {why}.", extra={"why": why, "neutral": neutral})


class FieldGroup:
    """Some fields of a body. Reading them in one call takes a third of the time of a loop."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        # An `attrgetter` of one name returns no tuple.
        self._values: Callable[[Body], tuple[Any, ...]] = lambda body: tuple(getattr(body, name) for name in names)
        if len(names) > 1:
            self._values = attrgetter(*names)
        self._nothing = (None,) * len(names)

    def given(self, body: Body) -> Sequence[tuple[str, Any]]:
        """Returns the names and values of the fields that are present."""
        values = self._values(body)
        if values == self._nothing:
            return ()
        return [(name, value) for name, value in zip(self._names, values, strict=True) if value is not None]


@cache
def _refused_fields(kind: type[Body]) -> tuple[FieldGroup, Mapping[str, tuple[str, tuple[Any, ...]]]]:
    reasons = {
        name: (meta.extra["why"], meta.extra["neutral"])
        for name, hint in get_type_hints(kind, include_extras=True).items()
        for meta in getattr(hint, "__metadata__", ())
        if meta.extra
    }
    return FieldGroup(list(reasons)), reasons
