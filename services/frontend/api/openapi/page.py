"""/docs: the document as an HTML page without scripts and external resources."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem; }
h1, h2 { font-weight: 600; } h2 { border-bottom: 1px solid var(--line); margin-top: 2.5rem; }
details { border: 1px solid var(--line); border-radius: .4rem; margin: .5rem 0; padding: .4rem .8rem; }
summary { cursor: pointer; } code, .type { font-family: ui-monospace, monospace; font-size: .9em; }
.method { display: inline-block; min-width: 4em; font-weight: 600; text-transform: uppercase; }
.type { opacity: .75; } table { border-collapse: collapse; width: 100%; margin: .4rem 0 .8rem; }
td { border-top: 1px solid var(--line); padding: .25rem .5rem .25rem 0; vertical-align: top; }
td:first-child { white-space: nowrap; } .refused { opacity: .6; }
""".strip()
_HEAD = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    f"<title>kvmesh API</title><style>{STYLE}</style></head><body>"
)


def docs_page(document: Mapping[str, Any]) -> str:
    """Returns the HTML page of an OpenAPI document."""
    return "".join(_page(document))


def _page(document: Mapping[str, Any]) -> Iterator[str]:
    schemas = document["components"]["schemas"]
    yield _HEAD
    yield f"<h1>{escape(document['info']['title'])} API</h1><p>{escape(document['info']['description'])}</p>"
    yield '<p>For machines: <a href="/openapi.json"><code>/openapi.json</code></a></p>'
    for tag in document["tags"]:
        yield f"<h2>{escape(tag['name'])}</h2>"
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                if tag["name"] in operation["tags"]:
                    yield from _operation(path=path, method=method, operation=operation, schemas=schemas)
    yield "<h2>Objects</h2>"
    for name, schema in schemas.items():
        yield f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>{_fields(schema)}</details>'
    yield "</body></html>"


def _operation(*, path: str, method: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f'<details id="{escape(operation["operationId"])}"><summary><span class="method">{escape(method)}</span>'
        f"<code>{escape(path)}</code> {escape(operation['summary'])}</summary>"
    )
    if operation["parameters"]:
        rows = "".join(_row(each["name"], each["schema"], each["required"]) for each in operation["parameters"])
        yield f"<p>Parameters</p><table>{rows}</table>"
    body = operation.get("requestBody")
    if body is not None:
        for kind, content in body["content"].items():
            yield f"<p>Body, <code>{escape(kind)}</code></p>{_fields(_resolved(content['schema'], schemas))}"
    for status, answer in operation["responses"].items():
        kinds = "; ".join(f"<code>{escape(kind)}</code> {_type(each.get('schema', {}))}"
                          for kind, each in answer["content"].items())  # fmt: skip
        yield f"<p><b>{escape(status)}</b> {escape(answer['description'])} {kinds}</p>"
    yield "</details>"


def _resolved(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    found: Mapping[str, Any] = schemas[name] if name else schema
    return found


def _fields(schema: Mapping[str, Any]) -> str:
    properties = schema.get("properties")
    if not properties:
        return f"<p>{_type(schema)}</p>"
    needed = schema.get("required", ())
    ordered = sorted(properties.items(), key=lambda pair: (pair[0] not in needed, _is_refused(pair[1])))
    return f"<table>{''.join(_row(name, each, name in needed) for name, each in ordered)}</table>"


def _is_refused(schema: Mapping[str, Any]) -> bool:
    return str(schema.get("description", "")).startswith("Refused")


def _row(name: str, schema: Mapping[str, Any], is_needed: bool) -> str:
    help_text = escape(_help(schema))
    mark = " <b>needed</b>" if is_needed else ""
    kind = ' class="refused"' if _is_refused(schema) else ""
    return f"<tr{kind}><td><code>{escape(name)}</code>{mark}</td><td>{_type(schema)} {help_text}</td></tr>"


def _help(schema: Mapping[str, Any]) -> str:
    """Returns the description of a schema, or those of its alternatives."""
    own = str(schema.get("description", ""))
    return own or " ".join(filter(None, map(_help, schema.get("anyOf", ()))))


def _type(schema: Mapping[str, Any]) -> str:
    """Returns a short description of a schema's type."""
    if name := schema.get("$ref", "").rpartition("/")[2]:
        return f'<a class="type" href="#{escape(name)}">{escape(name)}</a>'
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(each) for each in schema["anyOf"]))
    return f'<span class="type">{escape(_words(schema))}</span>{_items(schema)}'


def _words(schema: Mapping[str, Any]) -> str:
    if "const" in schema:
        return repr(schema["const"])
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    kind = schema.get("type", "any")
    kinds = kind if isinstance(kind, list) else [kind]
    names = " or ".join(each for each in kinds if each != "null") or "null"
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    is_plain = low is None or abs(low) >= 2**31 - 1
    bounds = "" if is_plain and (high is None or abs(high) >= 2**31 - 1) else f" {low}..{high}"
    return names + bounds


def _items(schema: Mapping[str, Any]) -> str:
    items = schema.get("items")
    return f" of {_type(items)}" if items else ""
