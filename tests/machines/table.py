"""The table of the effects of faults on requests, in Markdown, and the goals of each row."""

from collections.abc import Sequence

from tests.machines.faults import UNTOUCHED, Effect
from tests.machines.traffic import HANGS, WRONG

FIRST_LATE_S_MAX = 2.0
NORMAL_GOAL_S = 5.0
COLUMNS = (
    "fault", "requests", "errors", "errors without another way", "longest first", "longest later", "late later",
    "longest untouched", "normal after", "wrong tokens", "goals",
)  # fmt: skip


def missed_goals(effect: Effect) -> Sequence[str]:
    """Returns the goals that the mesh missed for requests that had a worker to run on.

    The goals are: no errors, no wrong tokens, no request that hangs. The first affected requests are at most 2 s late; later ones, and those on
    other paths, are not late. Requests take the usual time 5 s after the end of the fault.
    """
    ways = effect.kinds_with_workers
    first_late_s = effect.first.of(*ways).longest_s - effect.usual_s
    late = effect.later.of(*ways).late(effect.limit_s)
    untouched_late = effect.all.of(UNTOUCHED).late(effect.limit_s)
    found = {
        f"{effect.all.count(WRONG)} wrong": effect.all.count(WRONG),
        f"{effect.all.count(HANGS)} hang": effect.all.count(HANGS),
        f"{_errors(effect, ways)} errors": _errors(effect, ways),
        f"first {first_late_s:.1f} s late": first_late_s > FIRST_LATE_S_MAX,
        f"{late} later ones late": late,
        f"{untouched_late} untouched late": untouched_late,
        f"normal after {effect.normal_s:.1f} s": effect.normal_s > NORMAL_GOAL_S,
    }
    return [text for text, is_missed in found.items() if is_missed]


def table(effects: Sequence[Effect]) -> str:
    """Returns a row for each fault. Times are in seconds. A request is late if it takes a second longer than usual."""
    return "\n".join([*head(), *(line(row(effect)) for effect in effects)])


def head() -> Sequence[str]:
    """Returns the lines above the first row."""
    return [line(COLUMNS), line(["---"] * len(COLUMNS))]


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def row(effect: Effect) -> Sequence[str]:
    ways = effect.kinds_with_workers
    return (
        effect.fault,
        str(len(effect.all.samples)),
        str(_errors(effect, ways)),
        _without_another_way(effect, ways) or "-",
        f"{effect.first.of(*ways).longest_s:.1f}",
        f"{effect.later.of(*ways).longest_s:.1f}",
        str(effect.later.of(*ways).late(effect.limit_s)),
        f"{effect.all.of(UNTOUCHED).longest_s:.1f}",
        f"{effect.normal_s:.1f}",
        str(effect.all.count(WRONG)),
        ", ".join(missed_goals(effect)) or "met",
    )


def _without_another_way(effect: Effect, ways: Sequence[str]) -> str:
    """Returns the errors of requests for which the fault leaves no worker, and the duration of the longest request."""
    return "; ".join(
        f"{kind} {', '.join(f'{count} x {code}' for code, count in errors.items())} ({effect.all.of(kind).longest_s:.1f} s)"
        for kind, errors in effect.errors.items()
        if kind not in ways
    )


def _errors(effect: Effect, kinds: Sequence[str]) -> int:
    return sum(sum(errors.values()) for kind, errors in effect.errors.items() if kind in kinds)
