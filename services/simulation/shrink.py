"""Finds a short schedule that still fails: delta debugging over faults and requests (Zeller and Hildebrandt, 2002)."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from services.simulation.schedule import RequestPlan, Schedule

T = TypeVar("T")
RUNS_MAX = 150
PLAIN = {"is_text": False, "min_tokens": None, "logprobs": None, "prompt_logprobs": None, "stop": (), "logit_bias": (), "cache_salt": "",
         "has_tools": False, "priority": 0, "session_id": "", "adapter": "", "seed": None}  # fmt: skip
"""What a request is without anything special."""


class Shrinker:
    """`fails` plays a schedule. At most `runs_max` schedules are played."""

    def __init__(self, fails: Callable[[Schedule], bool], *, runs_max: int = RUNS_MAX) -> None:
        self._fails = fails
        self._runs_left = runs_max
        self.runs = 0

    def shrink(self, schedule: Schedule) -> Schedule:
        """Returns the shortest schedule found that fails; the given one if nothing shorter does."""
        while self._runs_left > 0:
            shorter = self._round(schedule)
            if shorter == schedule:
                break
            schedule = shorter
        return schedule

    def _round(self, schedule: Schedule) -> Schedule:
        schedule = replace(
            schedule, faults=self._shortest(schedule.faults, lambda some: replace(schedule, faults=some))
        )
        schedule = replace(
            schedule, requests=self._shortest(schedule.requests, lambda some: replace(schedule, requests=some))
        )
        return self._simpler(schedule)

    def _shortest(self, items: tuple[T, ...], make: Callable[[tuple[T, ...]], Schedule]) -> tuple[T, ...]:
        """Removes parts of the items as long as the schedule fails without them; parts halve when none can be removed."""
        size = len(items)
        while size >= 1 and items:
            start = 0
            while start < len(items):
                # `start` stays after a removal: other items have taken the place.
                fewer = items[:start] + items[start + size :]
                if self._try(make(fewer)):
                    items = fewer
                else:
                    start += size
            size //= 2
        return items

    def _simpler(self, schedule: Schedule) -> Schedule:
        """Returns the requests without anything special."""
        for number in range(len(schedule.requests)):
            schedule = self._try_request(schedule, number, replace(schedule.requests[number], **PLAIN))  # type: ignore[arg-type]
            schedule = self._try_request(schedule, number, replace(schedule.requests[number], choices=1))
        return schedule

    def _try_request(self, schedule: Schedule, number: int, plan: RequestPlan) -> Schedule:
        if plan == schedule.requests[number]:
            return schedule
        requests = (*schedule.requests[:number], plan, *schedule.requests[number + 1 :])
        simpler = replace(schedule, requests=requests)
        return simpler if self._try(simpler) else schedule

    def _try(self, schedule: Schedule) -> bool:
        if self._runs_left <= 0:
            return False
        self._runs_left -= 1
        self.runs += 1
        return self._fails(schedule)
