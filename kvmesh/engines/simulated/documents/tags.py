"""Makes up texts of structural tags (xgrammar's format): a tree of literals, schemas and expressions."""

import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from kvmesh.engines.simulated.documents import refused
from kvmesh.engines.simulated.documents.regex import make_match
from kvmesh.engines.simulated.documents.schema import make_instance
from kvmesh.engines.simulated.documents.words import make_words

Format = Mapping[str, Any]


def make_tagged(document: Any, random: Random) -> str:
    form = document.get("format") if isinstance(document, dict) else None
    return _make(form, random)


def _make(form: Any, random: Random) -> str:
    if not isinstance(form, dict) or not isinstance(form.get("type"), str):
        raise refused("a structural tag without a format", is_wrong=True)
    make = _FORMATS.get(form["type"])
    if make is None:
        raise refused(f"a structural tag with {form['type'][:64]!r}")
    try:
        return make(form, random)
    except (KeyError, TypeError, IndexError) as error:
        raise refused(f"a broken structural tag ({error})", is_wrong=True) from error


def _tag(form: Format, random: Random) -> str:
    end = form["end"]
    return str(form["begin"]) + _make(form["content"], random) + (end if isinstance(end, str) else random.choice(end))


def _tags(form: Format, random: Random) -> str:
    count = 1 if form.get("stop_after_first") else random.randint(1, 2)
    separator = str(form.get("separator", ""))
    return separator.join(_make({"type": "tag", **random.choice(form["tags"])}, random) for _ in range(count))


# xgrammar's styles of tool arguments: one parameter with its key, whether it is text, and its value.
_STYLES = {
    "qwen_xml": "<parameter={key}>\n{value}\n</parameter>\n",
    "minimax_xml": '<parameter name="{key}">{value}</parameter>\n',
    "deepseek_xml": '<｜DSML｜parameter name="{key}" string="{is_text}">{value}</｜DSML｜parameter>\n',
    "glm_xml": "<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
}


def _arguments(form: Format, random: Random) -> str:
    made, style = make_instance(form["json_schema"], random), form.get("style", "json")
    if style == "json":
        return json.dumps(made, ensure_ascii=False)
    if style not in _STYLES or not isinstance(made, dict):
        raise refused(f"a structural tag with {str(style)[:64]!r}")
    return "".join(_parameter(_STYLES[style], key=key, value=value) for key, value in made.items())


def _parameter(style: str, key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    text = value if is_text else json.dumps(value, ensure_ascii=False)
    return style.format(key=key, is_text=json.dumps(is_text), value=text)


_FORMATS: Mapping[str, Callable[[Format, Random], str]] = {
    "const_string": lambda form, random: str(form["value"]),
    "json_schema": _arguments,
    "regex": lambda form, random: make_match(form["pattern"], random),
    "any_text": lambda form, random: make_words(random, low=0, high=None),
    "sequence": lambda form, random: "".join(_make(each, random) for each in form["elements"]),
    "or": lambda form, random: _make(random.choice(form["elements"]), random),
    "tag": _tag,
    "triggered_tags": _tags,
    "tags_with_separator": _tags,
}
