"""Pages of lists, as in OpenAI's API."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvmesh.errors import InvalidRequestError

PAGE_MAX = 100
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def numbered_items(items: Sequence[Mapping[str, Any]], response_id: str) -> list[Mapping[str, Any]]:
    """Gives ids to input items that have none, or one that an earlier item has."""
    taken: set[str] = set()
    numbered: list[Mapping[str, Any]] = []
    for i, item in enumerate(items):
        given = item.get("id", "")
        item_id = given if given and given not in taken else f"{_PREFIXES[item['type']]}_in{response_id[5:]}{i}"
        taken.add(item_id)
        numbered.append({**item, "id": item_id, "status": "completed"})
    return numbered


def read_limit(query: Mapping[str, str], *, default: int = 20, limit_max: int = PAGE_MAX) -> int:
    text = query.get("limit")
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= limit_max):
        raise InvalidRequestError(
            f"limit must be an integer from 1 to {limit_max}", field="limit", reason="invalid_value"
        )
    return int(text)


def read_order(query: Mapping[str, str]) -> bool:
    """Returns whether the newest item comes first."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequestError("order must be asc or desc", field="order", reason="invalid_value")
    return order == "desc"


def page_of(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Returns one page of a complete list. InvalidRequestError names the parameter."""
    for name in query:
        if name not in ("limit", "order", "after", "include", "include[]"):
            raise InvalidRequestError(f"unknown parameter: {name[:64]}", field=name[:64], reason="unknown_field")
    limit, after = read_limit(query), query.get("after")
    ordered = list(reversed(items)) if read_order(query) else list(items)
    if after is not None:
        places = [i for i, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise InvalidRequestError("after must be the id of an item", field="after", reason="invalid_value")
        ordered = ordered[places[0] + 1 :]
    return list_body(ordered[:limit], has_more=len(ordered) > limit)


def list_body(data: Sequence[Mapping[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Returns OpenAI's list object."""
    return {
        "object": "list",
        "data": list(data),
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }
