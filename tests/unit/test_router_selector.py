"""The choice among candidates of nearly equal cost, and the workers of sessions."""

from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from services.router.placement import sessions as sessions_module
from services.router.placement.pair_search import Selector
from services.router.placement.sessions import Sessions
from services.router.workers.cost_settings import CostSettings


def target(requests: int, placed_last: int = 0) -> Any:
    """Returns an object with the attributes of a target that the selector reads."""
    return SimpleNamespace(requests_in_flight=requests, placed_last=placed_last)


def taken(costs: list[float], targets: list[Any], held: list[float] | None = None) -> set[int | None]:
    """Returns all indices that a hundred choices give."""
    selector = Selector(CostSettings(), Random(1), estimates_time=True)
    tokens = np.zeros(len(costs)) if held is None else np.array(held)
    return {selector.choose(np.array(costs), tokens, targets) for _ in range(100)}


@pytest.mark.parametrize(
    ("costs", "targets", "places"),
    [
        ([1.0, 1.04], [target(0), target(5)], {0}),  # The other candidate has more requests.
        ([1.0, 1.04], [target(5), target(0)], {0, 1}),
        ([1.0, 1.04], [target(0, placed_last=9), target(0, placed_last=3)], {0, 1}),
        ([1.0, 1.04], [target(0, placed_last=3), target(0, placed_last=9)], {0}),
        ([1.0, 1.06], [target(5), target(0)], {0}),  # The costs differ by more than the ratio.
        ([np.inf, np.inf], [target(0), target(0)], {None}),
    ],
)
def test_the_less_loaded_of_nearly_equal_candidates_is_taken(
    costs: list[float], targets: list[Any], places: set[int]
) -> None:
    """Of the cheapest candidate and a drawn one, the selector takes the one with fewer requests, else the one whose last request is older."""
    assert taken(costs, targets) == places


def test_candidates_with_different_cached_tokens_are_not_equal() -> None:
    """The cheapest candidate is taken, however close the costs are."""
    assert taken([1.0, 1.04], [target(5), target(0)], held=[64.0, 0.0]) == {0}
    assert taken([1.0, 1.04], [target(5), target(0)], held=[64.0, 64.0]) == {0, 1}


def test_sessions_are_bounded_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session that was unused for longest is removed first. A session that is too old is ignored."""
    monkeypatch.setattr(sessions_module, "SESSIONS_MAX", 2)
    sessions, worker = Sessions(session_s=10.0), target(0)
    for number, name in enumerate(("a", "b")):
        sessions.bind(name, None, worker, now=float(number))
    sessions.bind("a", None, worker, now=2.0)
    sessions.bind("c", None, worker, now=3.0)
    assert len(sessions) == 2
    assert sessions.get("b", 3.0) is None
    assert sessions.get("a", 11.9) == (None, worker)
    assert sessions.get("a", 12.0) is None
    assert len(sessions) == 1
