"""Fields of request bodies that have no effect: unknown fields, which no API of the frontend declares, and hints that it does not use.

Both are ignored with a warning. With a setting, unknown fields are refused.
"""

import re
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar

from kvmesh.errors import InvalidRequestError
from services.frontend.api.request_body import Body

IGNORED_MAX = 16
"""Fields that are ignored in one body; one more is refused."""
# The names go into a response header.
_HEADER_SAFE = re.compile(r"[\x21-\x2b\x2d-\x7e]{1,128}\Z")
# Everywhere else, as in `response_format`, a field that is ignored could change the answer.
_IGNORABLE = re.compile(
    r"(?:(?:messages|input|tools|system|content|function|tool_calls)(?:\[\d+\])?\.)*(?P<name>[^.\[\]]+)\Z"
)
_SIMILARITY_MIN = 0.84
# Declared by the messages API, and without effect there too: prompts are cached without it.
_WITHOUT_EFFECT = frozenset({"cache_control"})

UNUSED_HINTS = ("prediction",)
"""Fields that are declared and checked, and have no effect. The client gets a warning, because it expects a faster answer."""

Read = TypeVar("Read")


def read_tolerantly(read: Callable[[dict[str, Any]], Read], values: dict[str, Any]) -> tuple[Read, list[str]]:
    """Reads `values` without the unknown fields of its top level, its messages and its tools. Removes them from `values`.

    Returns what `read` returns, and the paths of the fields. Still refused: a field that another API of the frontend
    declares, such as `prompt` in a chat, and a name that is close to a declared one, which is most likely a typing error.
    """
    ignored: list[str] = []
    while True:
        try:
            return read(values), ignored
        except InvalidRequestError as error:
            if error.reason != "unknown_field":
                raise
            _check_ignorable(error)
            if len(ignored) == IGNORED_MAX or not _remove(values, error.field):
                raise
            ignored.append(error.field)


def _check_ignorable(error: InvalidRequestError) -> None:
    match = _IGNORABLE.match(error.field)
    if match is None or not _HEADER_SAFE.match(error.field):
        raise error
    declared = _declared_names()
    if match["name"] in declared:
        raise error
    if similar := get_close_matches(match["name"], declared, n=1, cutoff=_SIMILARITY_MIN):
        raise InvalidRequestError(
            f"{error.message}; did you mean {similar[0]}?", field=error.field, reason=error.reason
        ) from None


@cache
def _declared_names() -> frozenset[str]:
    names: set[str] = set()
    kinds: list[type[Body]] = [Body]
    while kinds:
        kind = kinds.pop()
        names.update(kind.__struct_fields__)
        kinds += kind.__subclasses__()
    return frozenset(names - _WITHOUT_EFFECT)


def _remove(values: Any, path: str) -> bool:
    """Removes the field at `path`, such as `messages[0].mood`. False if it is not there."""
    *parents, name = re.findall(r"[^.\[\]]+", path)
    for each in parents:
        if isinstance(values, list) and each.isdigit() and int(each) < len(values):
            values = values[int(each)]
        elif isinstance(values, dict) and each in values:
            values = values[each]
        else:
            return False
    return isinstance(values, dict) and values.pop(name, _ABSENT) is not _ABSENT


_ABSENT = object()
