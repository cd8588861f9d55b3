"""Argument values written as plain text between marks, made JSON by the tool's schema.

Text is handed out as it comes; other types when they are whole. What does not fit its type is text.
"""

import ast
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import orjson

from services.frontend.parsers.feed import Doubts, Feed, Found, Malformed, ToPart
from services.frontend.parsers.json_text import inner, quoted
from services.frontend.parsers.marks import Marks
from services.frontend.parsers.parts import TRUNCATED

TEXT = frozenset({"string"})
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\Z")
_NUMBER_CHARACTERS_MAX = 64
ANYTHING: frozenset[str] = frozenset()
"""Nothing is known of the type: JSON if it is that, else text."""


_JSON_TYPES: Mapping[str, str] = {
    **dict.fromkeys(("str", "text", "char", "varchar", "enum"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "uint", "uint32", "uint64", "long", "short", "unsigned"), "integer"),
    **dict.fromkeys(("float", "float32", "float64", "double", "decimal", "num"), "number"),
    "bool": "boolean",
    **dict.fromkeys(("dict", "map", "mapping", "struct"), "object"),
    **dict.fromkeys(("list", "arr", "tuple", "set", "sequence"), "array"),
    **dict.fromkeys(("none", "nil"), "null"),
}
"""Names that clients' schemas give to types, beside those of JSON schema."""


def _json_type(name: str) -> str:
    word = name.strip().lower()
    return _JSON_TYPES.get(word, word)


def types_of(feed: Feed, function: str, parameter: str, *, unknown: frozenset[str] = TEXT) -> frozenset[str]:
    """The JSON types that a parameter may have; `unknown` where its schema does not say."""
    properties = feed.tools.get(function, {}).get("properties")
    schema = properties.get(parameter) if isinstance(properties, Mapping) else None
    return schema_types(schema) or unknown


def schema_types(schema: Any, depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema allows; empty where it does not say."""
    if not isinstance(schema, Mapping) or depth > 4:
        return frozenset()
    found = schema.get("type")
    if isinstance(found, str):
        return frozenset({_json_type(found)})
    if isinstance(found, list):
        return frozenset(_json_type(each) for each in found if isinstance(each, str))
    values = schema.get("enum")
    if isinstance(values, list):
        return TEXT if all(isinstance(value, str) for value in values) else frozenset()
    choices = [each for key in ("anyOf", "oneOf", "allOf") for each in schema.get(key) or ()]
    return frozenset().union(*(schema_types(each, depth + 1) for each in choices))


def stream_typed(
    feed: Feed, ends: Marks, types: frozenset[str], doubts: Doubts | None = None, *, is_padded: bool = False
) -> Found:
    """The value at the cursor, up to a mark, which stays and is returned, as a piece of the last call's arguments.

    `doubts`: which of the marks may be text. `is_padded`: one line end before and one behind the value are layout.
    """
    if is_padded:
        yield from feed.has("\n")
    if types == TEXT or types == {"string", "null"}:
        return (yield from _stream_text(feed, ends, types, doubts, is_padded=is_padded))
    held: list[str] = []
    mark = yield from feed.stream_until(ends, held.append, doubts=doubts)
    text = "".join(held)
    if not mark:
        # Cut off: the arguments are incomplete, and all that the model said of them is in them.
        feed.add_arguments(text)
        raise Malformed(TRUNCATED)
    feed.add_arguments(to_json(text.removesuffix("\n") if is_padded else text, types))
    return mark


def _stream_text(feed: Feed, ends: Marks, types: frozenset[str], doubts: Doubts | None, *, is_padded: bool) -> Found:
    """Text at once; a lone `null` where it may be one, and the last line end, wait for what follows."""
    begun = False
    held = ""

    def emit(text: str) -> None:
        nonlocal begun, held
        held += text
        if "null" in types and not begun and "null\n".startswith(held):
            return
        said = held.removesuffix("\n") if is_padded else held
        held = held[len(said) :]
        if said:
            feed.add_arguments(("" if begun else '"') + inner(said))
            begun = True

    def quick() -> ToPart | None:
        return (lambda text: feed.to_arguments(inner(text))) if begun and not held else None

    mark = yield from feed.stream_until(ends, emit, quick, doubts)
    if not begun and held.removesuffix("\n") == "null" and mark:
        feed.add_arguments("null")
        return mark
    rest = "" if is_padded and held == "\n" else held
    feed.add_arguments(("" if begun else '"') + inner(rest) + ('"' if mark else ""))
    if not mark:
        raise Malformed(TRUNCATED)
    return mark


def to_json(text: str, types: frozenset[str]) -> str:
    """A whole value as JSON text of one of the types; a JSON string where it is none of them."""
    word = text.strip()
    if types <= ANYTHING:
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
        return _from_python(word, types) or _from_escaped(word, types) or quoted(text)
    return _from_digits(word, types) or quoted(text)


def _kind(word: str) -> str:
    """The JSON type of a JSON document; empty when it is none."""
    try:
        value = orjson.loads(word)
    except orjson.JSONDecodeError:
        return ""
    if isinstance(value, bool):
        return "boolean"
    kinds = {int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return kinds[type(value)]


def _from_digits(word: str, types: frozenset[str]) -> str:
    """Numbers that JSON does not allow, such as `+5` and `.5`, and digits for truth values."""
    if "boolean" in types and word in ("0", "1"):
        return "true" if word == "1" else "false"
    if len(word) > _NUMBER_CHARACTERS_MAX or not _NUMBER.match(word):
        return ""
    number = float(word)
    if number.is_integer() and types & {"integer", "number"}:
        return str(int(number))
    return repr(number) if "number" in types and math.isfinite(number) else ""


def _from_escaped(word: str, types: frozenset[str]) -> str:
    """Models escape the quotes of JSON that stands where no quotes are needed."""
    document = word.replace('\\"', '"')
    return document if _kind(document) in types else ""


def _from_python(word: str, types: frozenset[str]) -> str:
    """Models write Python's literals where they mean JSON."""
    try:
        value = ast.literal_eval(word)
        document = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ""
    return document if _kind(document) in types else ""
