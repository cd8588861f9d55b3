"""KV events travel together, in order, and none waits longer than one interval."""

import asyncio
import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.core import KvEvent, KvRemoved
from kvmesh.worker.kv_batcher import EVENTS_MAX, KvEventBatcher
from tests.virtual_loop import run_virtual

INTERVAL_S = 0.02


def event(number: int) -> KvEvent:
    return KvRemoved(block_hashes=[number])


async def told(pauses_s: list[float]) -> list[tuple[float, list[KvEvent]]]:
    """What is passed on, and when, if an event comes after each pause."""
    loop = asyncio.get_running_loop()
    given_on: list[tuple[float, list[KvEvent]]] = []
    changes = KvEventBatcher(lambda events: given_on.append((loop.time(), list(events))), INTERVAL_S)
    for number, pause_s in enumerate(pauses_s):
        await asyncio.sleep(pause_s)
        changes.put_nowait([event(number)])
    await asyncio.sleep(2 * INTERVAL_S)
    return given_on


@given(st.lists(st.floats(0, 0.05), max_size=40))
def test_all_in_order_and_none_late(pauses_s: list[float]) -> None:
    """Whatever the rhythm: every event once, batches an interval apart."""
    given_on = run_virtual(told(pauses_s))
    assert [each for _, events in given_on for each in events] == [event(i) for i in range(len(pauses_s))]
    times_s = [at_s for at_s, _ in given_on]
    assert all(later_s - at_s >= INTERVAL_S - 1e-9 for at_s, later_s in itertools.pairwise(times_s))


def test_an_interval_after_the_first_all_together() -> None:
    """What comes within an interval of the first event is one batch at its end."""
    given_on = run_virtual(told([0.1, 0.005, 0.005, 0.1]))
    assert [len(events) for _, events in given_on] == [3, 1]
    assert round(given_on[0][0] - 0.1, 6) == INTERVAL_S


def test_many_do_not_wait() -> None:
    """A batch that is large enough for a message is passed on."""

    async def story() -> list[int]:
        sizes: list[int] = []
        changes = KvEventBatcher(lambda events: sizes.append(len(events)), INTERVAL_S)
        for start in range(3):
            changes.put_nowait([event(start)] * (EVENTS_MAX // 2))
        changes.flush_nowait()
        changes.flush_nowait()
        return sizes

    assert run_virtual(story()) == [EVENTS_MAX, EVENTS_MAX // 2]
