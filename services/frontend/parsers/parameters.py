"""Parameters of calls that are written as plain text between marks, converted to JSON by the tool's schema.

Text is delivered as it comes; values of other types when they are whole. A value that does not fit its type is text.
"""

import ast
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import orjson

from services.frontend.parsers.feed import Feed, Malformed, Steps, ToPart, ValueEnds
from services.frontend.parsers.json_text import inner, quoted
from services.frontend.parsers.parts import TRUNCATED

TEXT = frozenset({"string"})
ANYTHING: frozenset[str] = frozenset()
"""The type is unknown: a value that is JSON is unchanged, any other is text."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\Z")
_NUMBER_CHARACTERS_MAX = 64
_SCHEMA_DEPTH_MAX = 4
# Names that clients' schemas give to types, in addition to those of JSON schema.
_JSON_TYPES: Mapping[str, str] = {
    **dict.fromkeys(("str", "text", "char", "varchar", "enum"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "uint", "uint32", "uint64", "long", "short", "unsigned"), "integer"),
    **dict.fromkeys(("float", "float32", "float64", "double", "decimal", "num"), "number"),
    "bool": "boolean",
    **dict.fromkeys(("dict", "map", "mapping", "struct"), "object"),
    **dict.fromkeys(("list", "arr", "tuple", "set", "sequence"), "array"),
    **dict.fromkeys(("none", "nil"), "null"),
}


def types_of(feed: Feed, function: str, parameter: str, *, unknown: frozenset[str] = TEXT) -> frozenset[str]:
    """Returns the JSON types that a parameter may have; `unknown` if its schema does not say."""
    properties = feed.tools.get(function, {}).get("properties")
    schema = properties.get(parameter) if isinstance(properties, Mapping) else None
    return schema_types(schema) or unknown


def schema_types(schema: Any, depth: int = 0) -> frozenset[str]:
    """Returns the JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping) or depth > _SCHEMA_DEPTH_MAX:
        return frozenset()
    found = schema.get("type")
    if isinstance(found, str):
        found = [found]
    if isinstance(found, list):
        words = [each.strip().lower() for each in found if isinstance(each, str)]
        return frozenset(_JSON_TYPES.get(word, word) for word in words)
    values = schema.get("enum")
    if isinstance(values, list):
        return TEXT if all(isinstance(value, str) for value in values) else frozenset()
    choices = [each for key in ("anyOf", "oneOf", "allOf") for each in schema.get(key) or ()]
    return frozenset().union(*(schema_types(each, depth + 1) for each in choices))


def begin_parameter(feed: Feed, name: str) -> None:
    """Delivers the name of the call's next parameter."""
    feed.add_arguments(f"{', ' if feed.has_arguments else '{'}{quoted(name)}: ")
    feed.has_arguments = True


def end_parameters(feed: Feed) -> None:
    """Delivers the end of the call's arguments."""
    feed.add_arguments("}" if feed.has_arguments else "{}")


def stream_parameter(
    feed: Feed, name: str, ends: ValueEnds, *, types: frozenset[str], is_padded: bool = False
) -> Steps:
    """Delivers a parameter whose value is at the cursor, and consumes the closing mark, which may be missing.

    `is_padded`: one line break before and one after the value are layout.
    """
    begin_parameter(feed, name)
    if is_padded:
        yield from feed.has("\n")
    yield from stream_value(feed, ends, types, is_padded=is_padded)
    yield from feed.has(ends.closing)
    feed.settle()


def stream_value(feed: Feed, ends: ValueEnds, types: frozenset[str], *, is_padded: bool = False) -> Steps:
    """Delivers a value as JSON of one of the types, from the cursor up to a mark. `is_padded`: its last line break is layout."""
    if types == TEXT or types == {"string", "null"}:
        yield from _stream_text(feed, ends, types, is_padded=is_padded)
        return
    held: list[str] = []
    mark = yield from feed.stream_until(ends.marks, held.append, ends=ends)
    text = "".join(held)
    if not mark:
        # The arguments are incomplete; everything that the model wrote has been delivered.
        feed.add_arguments(text)
        raise Malformed(TRUNCATED)
    feed.add_arguments(to_json(text.removesuffix("\n") if is_padded else text, types))


def _stream_text(feed: Feed, ends: ValueEnds, types: frozenset[str], *, is_padded: bool) -> Steps:
    """Delivers text immediately, except text whose meaning depends on the next text:

    `null` alone where null is allowed, and the last line break.
    """
    begun = False
    held = ""

    def emit(text: str) -> None:
        nonlocal begun, held
        held += text
        # May become `null`, alone or with the line break of the layout.
        if "null" in types and not begun and "null\n".startswith(held):
            return
        certain = held.removesuffix("\n") if is_padded else held
        held = held[len(certain) :]
        if certain:
            feed.add_arguments(("" if begun else '"') + inner(certain))
            begun = True

    def quick() -> ToPart | None:
        return (lambda text: feed.to_arguments(inner(text))) if begun and not held else None

    mark = yield from feed.stream_until(ends.marks, emit, quick, ends=ends)
    if not begun and held.removesuffix("\n") == "null" and mark:
        feed.add_arguments("null")
        return
    rest = "" if is_padded and held == "\n" else held
    feed.add_arguments(("" if begun else '"') + inner(rest) + ('"' if mark else ""))
    if not mark:
        raise Malformed(TRUNCATED)


def to_json(text: str, types: frozenset[str]) -> str:
    """Converts a whole value to JSON text of one of the types; to a JSON string if it is none of them."""
    word = text.strip()
    if not types:
        return word if _kind(word) else quoted(text)
    if "null" in types and word.lower() in ("null", "none"):
        return "null"
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower()
    kind = _kind(word)
    if kind in types or (kind == "integer" and "number" in types):
        return word
    if kind == "number" and "integer" in types and float(word).is_integer():
        return str(int(float(word)))
    if types & {"object", "array"} and not kind:
        # Models escape the quotes of JSON where no quotes are needed.
        unescaped = word.replace('\\"', '"')
        return _from_python(word, types) or (unescaped if _kind(unescaped) in types else quoted(text))
    return _from_digits(word, types) or quoted(text)


def _kind(word: str) -> str:
    """Returns the JSON type of a JSON document; empty if it is none."""
    try:
        value = orjson.loads(word)
    except orjson.JSONDecodeError:
        return ""
    kinds: Mapping[type, str] = {
        bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null",
    }  # fmt: skip
    return kinds[type(value)]


def _from_digits(word: str, types: frozenset[str]) -> str:
    """Converts numbers that JSON does not allow, such as `+5` and `.5`, and digits for booleans. Empty if it is neither."""
    if "boolean" in types and word in ("0", "1"):
        return "true" if word == "1" else "false"
    if len(word) > _NUMBER_CHARACTERS_MAX or not _NUMBER.match(word):
        return ""
    number = float(word)
    if number.is_integer() and types & {"integer", "number"}:
        return str(int(number))
    return repr(number) if "number" in types and math.isfinite(number) else ""


def _from_python(word: str, types: frozenset[str]) -> str:
    """Converts a Python literal, which models write in place of JSON. Empty if it is none of these types."""
    try:
        document = json.dumps(ast.literal_eval(word), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        # The documentation of literal_eval lists all of these for malformed input.
        return ""
    return document if _kind(document) in types else ""
