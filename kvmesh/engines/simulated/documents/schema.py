"""Makes up instances of JSON Schemas. Keywords outside `KNOWN` are refused: an instance might violate one that was ignored."""

import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from kvmesh.engines.simulated.documents import refused
from kvmesh.engines.simulated.documents.regex import make_match
from kvmesh.engines.simulated.documents.words import FORMATS, WORDS, make_words
from kvmesh.errors import MeshError

DEPTH_MAX = 64
OPTIONAL_DEPTH_MAX = 4
"""Below this depth optional parts are left out, so that recursive schemas end."""
ITEMS_MORE = 2
SIZE_MAX = 4096
VALUES_MAX = 20_000
"""Values per document: nested schemas can require astronomically many."""
ANNOTATIONS = frozenset(
    "title description default examples $schema $id $comment $defs definitions deprecated readOnly writeOnly strict".split()
)
KNOWN = ANNOTATIONS | frozenset(
    (
        "$ref allOf anyOf oneOf const enum type properties required additionalProperties minProperties maxProperties "
        "propertyNames patternProperties items prefixItems minItems maxItems uniqueItems minLength maxLength pattern format "
        "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf nullable"
    ).split()
)
Schema = Mapping[str, Any]


def make_instance(schema: Any, random: Random) -> Any:
    return _SchemaMaker(schema, random).make(schema, 0)


class _SchemaMaker:
    """Makes one document. References point into `root`."""

    def __init__(self, root: Any, random: Random) -> None:
        self._root = root
        self._random = random
        self._values = 0

    def make(self, schema: Any, depth: int) -> Any:
        self._values += 1
        if self._values > VALUES_MAX:
            raise refused(f"a schema that takes more than {VALUES_MAX} values")
        if depth > DEPTH_MAX:
            raise refused(f"a schema nested deeper than {DEPTH_MAX}")
        if schema is True:
            return self._random.choice(WORDS)
        if not isinstance(schema, dict):
            raise refused("a schema that is neither an object nor true", is_wrong=True)
        schema = self._merged(schema, depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._random.choice(_list(schema, "enum"))
        for word in ("anyOf", "oneOf"):
            if word in schema:
                return self._any_of(schema, word, depth)
        return _TYPES[self._type(schema)](self, schema, depth)

    def _merged(self, schema: Schema, depth: int) -> Schema:
        """Returns the schema with `$ref` and `allOf` merged into it."""
        unknown = sorted(set(schema) - KNOWN)
        if unknown:
            raise refused(f"a schema with {unknown[0][:64]!r}")
        parts: list[Schema] = [{key: value for key, value in schema.items() if key not in ("$ref", "allOf")}]
        if "$ref" in schema:
            parts.append(self._resolved(schema["$ref"]))
        parts += _list(schema, "allOf") if "allOf" in schema else []
        if len(parts) == 1:
            return schema
        if depth > DEPTH_MAX:
            raise refused("references without end", is_wrong=True)
        return _merge([parts[0], *(self._merged(part, depth + 1) for part in parts[1:])])

    def _resolved(self, reference: Any) -> Schema:
        value = self._root
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise refused("a reference to another document")
        for part in reference[1:].strip("/").split("/") if reference != "#" else ():
            # In this order, or `~01` would become `/` (RFC 6901, section 4).
            name = part.replace("~1", "/").replace("~0", "~")
            value = value.get(name) if isinstance(value, dict) else None
        if not isinstance(value, dict):
            raise refused(f"a reference to nothing: {reference[:64]}", is_wrong=True)
        return value

    def _any_of(self, schema: Schema, word: str, depth: int) -> Any:
        """Returns a random alternative; from OPTIONAL_DEPTH_MAX on the first one that can be made."""
        rest = {key: value for key, value in schema.items() if key != word}
        options = _list(schema, word)
        first = self._random.randrange(len(options))
        failure: MeshError | None = None
        for option in [*options[first:], *options[:first]] if depth < OPTIONAL_DEPTH_MAX else options:
            try:
                return self.make(_merge([rest, self._merged(option, depth + 1)]), depth + 1)
            except MeshError as error:
                failure = error
        assert failure is not None
        raise failure

    def _type(self, schema: Schema) -> str:
        kinds = schema.get("type")
        if isinstance(kinds, list):
            # Null only if nothing else is allowed: other values test clients better.
            kinds = self._random.choice([kind for kind in kinds if kind != "null"] or kinds)
        if kinds is None:
            kinds = next((kind for kind, words in _IMPLIED.items() if words & schema.keys()), "string")
        if kinds not in _TYPES:
            raise refused(f"the type {kinds!r}", is_wrong=True)
        return str(kinds)

    def object(self, schema: Schema, depth: int) -> dict[str, Any]:
        properties = schema.get("properties", {})
        required = schema.get("required", ())
        if not isinstance(properties, dict) or not all(isinstance(name, str) for name in required):
            raise refused("properties that are none", is_wrong=True)
        if "propertyNames" in schema or "patternProperties" in schema:
            raise refused("a schema with rules for names of properties")
        most = schema.get("maxProperties", math.inf)
        value: dict[str, Any] = {}
        for name, inner in properties.items():
            is_needed = name in required or len(value) < schema.get("minProperties", 0)
            if name in required or (len(value) < most and (is_needed or self._wants_more(depth))):
                value[name] = self.make(inner, depth + 1)
        more = schema.get("additionalProperties", True)
        for name in required:
            if name not in value:
                value[name] = self.make(more, depth + 1)
        for word in WORDS:
            if len(value) >= schema.get("minProperties", 0):
                break
            if word not in properties and more is not False:
                value[word] = self.make(more, depth + 1)
        if not schema.get("minProperties", 0) <= len(value) <= most:
            raise refused("bounds of properties that cannot be kept", is_wrong=True)
        return value

    def array(self, schema: Schema, depth: int) -> list[Any]:
        first = _list(schema, "prefixItems") if "prefixItems" in schema else []
        low = schema.get("minItems", 0)
        high = min(schema.get("maxItems", math.inf), max(low, len(first), 1) + (ITEMS_MORE if depth < 2 else 0))
        more = schema.get("items", True)
        if low > SIZE_MAX:
            raise refused(f"more than {SIZE_MAX} items")
        wanted = self._random.randint(low, int(max(low, high))) if depth < OPTIONAL_DEPTH_MAX else low
        values: list[Any] = []
        tries = 0
        while len(values) < wanted and not (more is False and len(values) >= len(first)):
            inner = first[len(values)] if len(values) < len(first) else more
            value = self.make(inner, depth + 1)
            tries += 1
            if not (schema.get("uniqueItems") and value in values):
                values.append(value)
            elif tries > 20 + 4 * wanted:
                break
        if len(values) < low:
            raise refused("bounds of items that cannot be kept", is_wrong=True)
        return values

    def string(self, schema: Schema, depth: int) -> str:
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        if low > SIZE_MAX:
            raise refused(f"strings of more than {SIZE_MAX} characters")
        if "pattern" in schema:
            if not isinstance(schema["pattern"], str):
                raise refused("a pattern that is no string", is_wrong=True)
            # A JSON Schema pattern may match anywhere, so a text that matches as a whole is valid.
            text = make_match(schema["pattern"], self._random)
        elif schema.get("format") in FORMATS:
            text = FORMATS[schema["format"]](self._random)
        elif "format" in schema:
            raise refused(f"the format {str(schema['format'])[:64]!r}")
        else:
            text = make_words(self._random, low=low, high=high)
        if not low <= len(text) <= (len(text) if high is None else high):
            raise refused("bounds of a string together with its form")
        return text

    def integer(self, schema: Schema, depth: int) -> int:
        return int(self._number(schema, step=1))

    def number(self, schema: Schema, depth: int) -> float:
        value = self._number(schema, step=0.5)
        return int(value) if float(value).is_integer() else value

    def _number(self, schema: Schema, step: float) -> float:
        """Returns a multiple of the step within the bounds, near zero or near a bound."""
        step = schema.get("multipleOf", step)
        low = _bound(schema, word="minimum", strict="exclusiveMinimum", choose=max, step=step)
        high = _bound(schema, word="maximum", strict="exclusiveMaximum", choose=min, step=-step)
        if low is None and high is None:
            low, high = 0, 100 * step
        elif low is None:
            low = high - 100 * step  # type: ignore[operator]  # one of the two is there
        elif high is None:
            high = low + 100 * step
        first, last = math.ceil(low / step), math.floor(high / step)  # type: ignore[operator]
        if first > last:
            if step == 0.5 and "multipleOf" not in schema and low <= high:  # type: ignore[operator]
                return (low + high) / 2  # type: ignore[operator]
            raise refused("bounds of a number that cannot be kept", is_wrong=True)
        return step * self._random.randint(first, min(last, first + 1000))

    def boolean(self, schema: Schema, depth: int) -> bool:
        return self._random.random() < 0.5

    def null(self, schema: Schema, depth: int) -> None:
        return None

    def _wants_more(self, depth: int) -> bool:
        return depth < OPTIONAL_DEPTH_MAX and self._random.random() < 0.5


def _list(schema: Schema, word: str) -> list[Any]:
    value = schema[word]
    if not isinstance(value, list) or not value:
        raise refused(f"{word} that is no list", is_wrong=True)
    return value


def _bound(
    schema: Schema, *, word: str, strict: str, choose: Callable[[float, float], float], step: float
) -> float | None:
    found = [schema[word]] if word in schema else []
    if strict in schema and not isinstance(schema[strict], bool):
        found.append(schema[strict] + step)
    # JSON Schema draft 4: a flag beside `minimum` or `maximum`.
    elif schema.get(strict) is True and found:
        found = [found[0] + step]
    if not all(isinstance(each, int | float) for each in found):
        raise refused(f"{word} that is no number", is_wrong=True)
    return None if not found else found[0] if len(found) == 1 else choose(*found)


def _merge(parts: Sequence[Schema]) -> Schema:
    """Returns one schema with the keywords of all. Where two have the same keyword, both hold."""
    merged: dict[str, Any] = {}
    for part in parts:
        for word, value in part.items():
            merged[word] = _both(word, merged[word], value) if word in merged else value
    return merged


def _both(word: str, one: Any, other: Any) -> Any:
    if one == other or word in ANNOTATIONS:
        return one
    if word == "properties":
        return {
            **one,
            **{name: {"allOf": [one[name], value]} if name in one else value for name, value in other.items()},
        }
    if word == "required":
        return [*one, *other]
    if word in ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"):
        return max(one, other)
    if word in ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"):
        return min(one, other)
    if word in ("type", "enum"):
        common = [each for each in _listed(one) if each in _listed(other)]
        if not common:
            raise refused(f"two rules of {word} that exclude each other", is_wrong=True)
        return common
    if word == "additionalProperties" and False in (one, other):
        return False
    raise refused(f"two rules of {word} for one value")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


_TYPES: Mapping[str, Callable[[_SchemaMaker, Schema, int], Any]] = {
    "object": _SchemaMaker.object,
    "array": _SchemaMaker.array,
    "string": _SchemaMaker.string,
    "integer": _SchemaMaker.integer,
    "number": _SchemaMaker.number,
    "boolean": _SchemaMaker.boolean,
    "null": _SchemaMaker.null,
}
_IMPLIED: Mapping[str, frozenset[str]] = {
    "object": frozenset(("properties", "required", "additionalProperties", "minProperties", "maxProperties")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems", "uniqueItems")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
}
