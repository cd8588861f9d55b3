"""Writes docs/use/api-fields.md, the fields of every request body, from the classes that read them; `--check` compares."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from services.frontend.api.openapi.document import REQUESTS, openapi_document

TARGET = Path(__file__).resolve().parents[1] / "docs" / "use" / "api-fields.md"
HEAD = """# Fields of the request bodies

Written by `scripts/api_fields.py` from the classes that read the bodies; `/openapi.json` and `/docs` of a running frontend say the same.
A field that is not listed is refused (`unknown_field`), null means absent, and a refused field may have a value that asks for nothing.
"""
# Larger bounds are those of the type.
_BOUND_MAX = 2**31 - 1

Schema = Mapping[str, Any]


def main() -> int:
    """Writes or compares."""
    text = page()
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(text)
    elif TARGET.read_text() != text:
        print(f"{TARGET.name} is out of date: run python scripts/api_fields.py")
        return 1
    return 0


def page() -> str:
    """The whole page: a section for each body, then one for each object in them."""
    document = openapi_document()
    schemas: dict[str, dict[str, Any]] = document["components"]["schemas"]
    paths = {
        schema.rpartition("/")[2]: f"`{method.upper()} {path}`"
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        for content in operation.get("requestBody", {}).get("content", {}).values()
        for schema in content["schema"].values()
    }
    bodies = [kind.__name__ for kind in REQUESTS]
    inner = sorted({name for body in bodies for name in _used(schemas, body)} - set(bodies))
    sections = [_section(f"{name}: {paths[name]}", schemas[name]) for name in bodies]
    sections += [_section(name, schemas[name]) for name in inner]
    return "\n".join([HEAD, *sections])


def _used(schemas: Mapping[str, Schema], name: str) -> Iterator[str]:
    """Names of all schemas below one."""
    waiting: list[Any] = [schemas[name]]
    seen = {name}
    while waiting:
        value = waiting.pop()
        below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        waiting.extend(each for each in below if isinstance(each, dict | list))
        found = value.get("$ref", "").rpartition("/")[2] if isinstance(value, dict) else ""
        if found and found not in seen:
            seen.add(found)
            waiting.append(schemas[found])
            yield found


def _section(title: str, schema: Schema) -> str:
    needed = schema.get("required", ())
    fields = sorted(schema["properties"].items(), key=lambda pair: pair[0] not in needed)
    taken = [(name, each) for name, each in fields if not _help(each).startswith("Refused: ")]
    rows = [
        f"| `{name}`{' (needed)' if name in needed else ''} | {_words(each)} | {_help(each)} |" for name, each in taken
    ]
    whys = [
        (name, _help(each).removeprefix("Refused: ").rstrip(".")) for name, each in fields if (name, each) not in taken
    ]
    refused = "; ".join(f"`{name}` ({why})" for name, why in whys)
    lines = [f"## {title}", "", "| field | value | |", "|---|---|---|", *rows, ""]
    return "\n".join([*lines, f"Refused: {refused}.", ""] if refused else lines)


def _help(schema: Schema) -> str:
    own = str(schema.get("description", ""))
    return own or " ".join(filter(None, map(_help, schema.get("anyOf", ()))))


def _words(schema: Schema) -> str:
    """A type in words."""
    if name := schema.get("$ref", "").rpartition("/")[2]:
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_words(each) for each in schema["anyOf"] if each != {"type": "null"}))
    if "enum" in schema:
        return " or ".join(f"`{each}`" for each in schema["enum"] if each is not None)
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        items = _words(schema["items"])
        return (
            f"list of {f'({items})' if ' or ' in items else items}{_bounds(schema, 'minItems', 'maxItems', ' entries')}"
        )
    if kind == "string":
        return kind + _bounds(schema, "minLength", "maxLength", " characters")
    if kind == "object":
        return kind + _bounds(schema, "minProperties", "maxProperties", " entries")
    low = "exclusiveMinimum" if "exclusiveMinimum" in schema else "minimum"
    return kind + _bounds(schema, low, "maximum")


def _bounds(schema: Schema, low: str, high: str, unit: str = "") -> str:
    least, most = (
        each if each is None or abs(each) < _BOUND_MAX else None for each in (schema.get(low), schema.get(high))
    )
    if least is None and most is None:
        return ""
    above = "above " if low.startswith("exclusive") else ""
    if most is None:
        return f" (at least {least}{unit})"
    return f" (up to {most}{unit})" if least is None else f" ({above}{least} to {most}{unit})"


if __name__ == "__main__":
    sys.exit(main())
