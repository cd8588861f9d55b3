"""KV events are passed on in order and in batches, and no event waits longer than one interval."""

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


async def batches_of(pauses_s: list[float]) -> list[tuple[float, list[KvEvent]]]:
    """Puts an event after each pause. Returns the batches and their times."""
    loop = asyncio.get_running_loop()
    batches: list[tuple[float, list[KvEvent]]] = []
    changes = KvEventBatcher(lambda events: batches.append((loop.time(), list(events))), INTERVAL_S)
    for number, pause_s in enumerate(pauses_s):
        await asyncio.sleep(pause_s)
        changes.put_nowait([event(number)])
    await asyncio.sleep(2 * INTERVAL_S)
    return batches


@given(st.lists(st.floats(0, 0.05), max_size=40))
def test_events_stay_in_order_and_none_is_late(pauses_s: list[float]) -> None:
    """For any pauses, each event is passed on once, and batches are at least an interval apart."""
    batches = run_virtual(batches_of(pauses_s))
    assert [each for _, events in batches for each in events] == [event(i) for i in range(len(pauses_s))]
    times_s = [at_s for at_s, _ in batches]
    # asyncio fires a timer up to 1 ns early.
    assert all(later_s - at_s >= INTERVAL_S - 1e-8 for at_s, later_s in itertools.pairwise(times_s))


def test_events_of_one_interval_form_a_batch() -> None:
    """Events within an interval of the first one are a batch at the end of the interval."""
    batches = run_virtual(batches_of([0.1, 0.005, 0.005, 0.1]))
    assert [len(events) for _, events in batches] == [3, 1]
    assert round(batches[0][0] - 0.1, 6) == INTERVAL_S


def test_full_batches_do_not_wait() -> None:
    """A batch that fills a message is passed on immediately."""

    async def scenario() -> list[int]:
        sizes: list[int] = []
        changes = KvEventBatcher(lambda events: sizes.append(len(events)), INTERVAL_S)
        for start in range(3):
            changes.put_nowait([event(start)] * (EVENTS_MAX // 2))
        changes.flush_nowait()
        changes.flush_nowait()
        return sizes

    assert run_virtual(scenario()) == [EVENTS_MAX, EVENTS_MAX // 2]
