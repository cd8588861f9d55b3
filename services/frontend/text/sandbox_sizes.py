"""Bounds of what methods and filters of a template return, computed before they are called. Pure.

Each function gets the value, the arguments and the limit, and returns an upper bound of the result's characters or entries; `TOO_LARGE` if
there is none. Methods and filters without a bound here return no more than a few times what they get.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

TOO_LARGE = 1 << 62
_DIGITS = re.compile(r"\d+")
_INDENT_MAX = 64
Bound = Callable[[Any, Sequence[Any], int], int]


def _width(value: Any, arguments: Sequence[Any], limit: int) -> int:
    return max([0, *(each for each in arguments if isinstance(each, int))])


def _tabs(value: Any, arguments: Sequence[Any], limit: int) -> int:
    return int(len(value) + value.count("\t") * (_width(value, arguments, limit) or 8))


def _replaced(value: Any, arguments: Sequence[Any], limit: int) -> int:
    if len(arguments) < 2 or not all(isinstance(each, str) for each in (value, *arguments[:2])):
        return 0
    old, new = arguments[:2]
    return len(value) + (value.count(old) if old else len(value) + 1) * len(new)


def joined(separator: Any, items: Sequence[Any], limit: int) -> int:
    """Returns the length of the items joined."""
    between = len(separator) if isinstance(separator, str) else 0
    return sum(between + (len(each) if isinstance(each, str) else 32) for each in items)


def _formatted(value: Any, arguments: Sequence[Any], limit: int) -> int:
    """Returns a bound of the length of formatted text. A width can be in the format or, with `*` and nested fields, be an argument."""
    widths = [int(each[:12]) for each in _DIGITS.findall(value)] if isinstance(value, str) else []
    widths += [abs(each) for each in arguments if isinstance(each, int)]
    texts = [len(each) for each in arguments if isinstance(each, str)]
    fields = value.count("{") + value.count("%") if isinstance(value, str) else 0
    return (len(value) if isinstance(value, str) else 0) + fields * max([0, *widths, *texts])


def formatted(value: Any, operand: Any) -> int:
    """Returns the length of `value % operand`."""
    values = operand.values() if isinstance(operand, dict) else operand if isinstance(operand, tuple) else (operand,)
    return _formatted(value, list(values), 0)


def _indented(value: Any, arguments: Sequence[Any], limit: int) -> int:
    lines = str(value).count("\n") + 1 if isinstance(value, str) else 1
    prefix = max(
        [4, *(each for each in arguments if isinstance(each, int)), *(len(a) for a in arguments if isinstance(a, str))]
    )
    return len(str(value)) + lines * prefix


def _spaced(value: Any, arguments: Sequence[Any], limit: int) -> int:
    """JSON with an indent: each entry is on a line of its own."""
    return TOO_LARGE if any(isinstance(each, int) and each > _INDENT_MAX for each in arguments) else 0


def _refused(value: Any, arguments: Sequence[Any], limit: int) -> int:
    return TOO_LARGE


def _digits(value: Any, arguments: Sequence[Any], limit: int) -> int:
    return TOO_LARGE if _width(value, arguments, limit) > 300 else 0


def _summed(value: Any, arguments: Sequence[Any], limit: int) -> int:
    """Only numbers: sums of lists take the square of their length."""
    return 0 if all(isinstance(each, int | float) for each in arguments) else TOO_LARGE


METHODS: Mapping[str, Bound] = {
    "ljust": _width,
    "rjust": _width,
    "center": _width,
    "zfill": _width,
    "to_bytes": _width,
    "expandtabs": _tabs,
    "replace": _replaced,
    "format": _formatted,
    "format_map": _refused,
    "translate": _refused,
}
"""Methods of strings, bytes and numbers. `join` is bounded where its items are known."""
FILTERS: Mapping[str, Bound] = {
    "batch": _width,
    "center": _width,
    "format": _formatted,
    "indent": _indented,
    "replace": _replaced,
    "round": _digits,
    "slice": _width,
    "sum": _summed,
    "tojson": _spaced,
    "wordwrap": _indented,
}
REMOVED_FILTERS = ("pprint", "urlize", "xmlattr")
"""No chat template has a use for them, and their cost has no simple bound."""


def items_of(value: Any, limit: int) -> list[Any]:
    """Returns at most `limit + 1` items of an iterable."""
    return list(islice(iter(value), limit + 1))
