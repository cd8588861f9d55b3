"""Pages of lists, as in OpenAI's API."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvmesh.checks import is_whole_number
from kvmesh.errors import InvalidRequestError
from services.frontend.api.request_body import invalid_value

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


def refuse_unknown_parameters(query: Mapping[str, str], known: Collection[str]) -> None:
    for name in query:
        if name not in known:
            raise InvalidRequestError(f"unknown parameter: {name[:64]}", field=name[:64], reason="unknown_field")


def read_limit(query: Mapping[str, str], *, default: int = 20, limit_max: int = PAGE_MAX) -> int:
    text = query.get("limit")
    if text is None:
        return default
    if not (is_whole_number(text) and len(text) < 10 and 1 <= int(text) <= limit_max):
        raise invalid_value("limit", wanted=f"an integer from 1 to {limit_max}")
    return int(text)


def read_order(query: Mapping[str, str]) -> bool:
    """Returns whether the newest item comes first."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid_value("order", wanted="asc or desc")
    return order == "desc"


def page_of(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Returns one page of a complete list. InvalidRequestError names the parameter."""
    refuse_unknown_parameters(query, ("limit", "order", "after", "include", "include[]"))
    limit, after = read_limit(query), query.get("after")
    ordered = list(reversed(items)) if read_order(query) else list(items)
    if after is not None:
        places = [i for i, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise invalid_value("after", wanted="the id of an item")
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
