"""The goals that `python -m tests.machines` checks for each fault."""

import pytest

from tests.machines.faults import FIRST, SECOND, TOUCHED, UNTOUCHED, Effect
from tests.machines.table import missed_goals, table
from tests.machines.traffic import HANGS, RIGHT, WRONG, Sample, Samples


def sample(client: str = FIRST, wait_s: float = 0.1, outcome: str = RIGHT) -> Sample:
    return Sample(client=client, began_s=0.0, wait_s=wait_s, outcome=outcome)


def effect(
    first: tuple[Sample, ...] = (), later: tuple[Sample, ...] = (), *, fault: str = "cut Consul", normal_s: float = 1.0
) -> Effect:
    whole = Samples([*first, *later])
    return Effect(
        fault=fault, first=Samples(first), later=Samples(later), all=whole, usual_s=0.1, normal_s=normal_s
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "goal"),
    [
        (effect((sample(wait_s=2.2),)), "first 2.1 s late"),
        (effect(later=(sample(SECOND, wait_s=1.2),)), "1 later ones late"),
        (effect((sample(UNTOUCHED, wait_s=1.2),)), "1 untouched late"),
        (effect((sample(outcome="503 no_worker"),)), "1 errors"),
        (effect((sample(TOUCHED, outcome=WRONG),)), "1 wrong"),
        (effect((sample(TOUCHED, outcome=HANGS),)), "1 hang"),
        (effect(normal_s=5.1), "normal after 5.1 s"),
    ],
)
def test_each_goal_can_be_missed(found: Effect, goal: str) -> None:
    assert missed_goals(found) == [goal]
    assert goal in table([found]).splitlines()[-1]


def test_results_that_meet_the_goals() -> None:
    """Requests without a usable worker may fail or wait."""
    lost = sample(outcome="503 paths_open", wait_s=10.0)
    pinned = sample(TOUCHED, outcome="503 kv_path_failing", wait_s=3.0)
    found = effect((sample(SECOND, wait_s=2.0), pinned), (lost,), fault="cut frontend-1, decode")
    assert missed_goals(found) == []
    assert "1 x 503 paths_open (10.0 s)" in table([found])
