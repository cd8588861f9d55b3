"""Converts text and file values to checked values of a setting's type."""

import json
import math
from enum import StrEnum
from typing import Any

from kvmesh.settings.declare import Spec

_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def from_text(spec: Spec, text: str) -> Any:
    """Returns the value of a flag or variable. ValueError with the end of a sentence about the setting."""
    if spec.is_optional and text == "":
        return None
    if spec.type is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if spec.type is dict:
        return _object(text)
    if spec.type is bool:
        if text.lower() not in _WORDS:
            raise ValueError(f"must be true or false, not {_shown(spec, text)}")
        return _WORDS[text.lower()]
    if spec.type is int or spec.type is float:
        return checked(spec, _number(spec, text))
    return checked(spec, text)


def from_file(spec: Spec, value: Any) -> Any:
    """Returns the value from a TOML file. Types must match, except that an integer is accepted for a float."""
    if spec.type is float and type(value) is int:
        value = float(value)
    if spec.type is tuple and isinstance(value, list) and all(isinstance(part, str) for part in value):
        return tuple(value)
    expected = str if issubclass(spec.type, str) else spec.type
    if type(value) is not expected:
        raise ValueError(f"must be {_type_words(spec)}, not {_shown(spec, value)}")
    return checked(spec, value)


def checked(spec: Spec, value: Any) -> Any:
    """Returns the value, if it is within the setting's limits. Text becomes a member of a StrEnum setting."""
    if spec.choices and value not in spec.choices:
        # An empty choice is what the setting has when it is left out.
        raise ValueError(f"must be one of {', '.join(filter(None, spec.choices))}, not {_shown(spec, value)}")
    if issubclass(spec.type, StrEnum):
        return spec.type(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"must be a finite number, not {_shown(spec, value)}")
    if spec.min is not None and value < spec.min:
        raise ValueError(f"must be at least {spec.min:g}, not {_shown(spec, value)}")
    if spec.max is not None and value > spec.max:
        raise ValueError(f"must be at most {spec.max:g}, not {_shown(spec, value)}")
    return value


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    return value


def _number(spec: Spec, text: str) -> int | float:
    try:
        return int(text) if spec.type is int else float(text)
    except ValueError:
        raise ValueError(f"must be {_type_words(spec)}, not {_shown(spec, text)}") from None


def _shown(spec: Spec, value: Any) -> str:
    if spec.is_secret:
        return "what was given"
    return repr(value) if len(repr(value)) <= 80 else repr(value)[:80] + "..."


def _type_words(spec: Spec) -> str:
    words = {int: "an integer", float: "a number", bool: "true or false", tuple: "a list of strings", dict: "a table"}
    return words.get(spec.type, "a string")
