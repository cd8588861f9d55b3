"""Step frames: pending steps share a frame, no token is lost, and tokens of a slot stay in order."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.api.worker.v1 import legs_pb2 as pb
from kvmesh.core import FinishReason, TokenLogprob
from kvmesh.engines.base import EngineFinish
from kvmesh.engines.simulated.engine import SimulatedEngine
from kvmesh.errors import OverloadedError
from kvmesh.worker.frames import STEPS_PER_FRAME_MAX, FrameOutlet
from kvmesh.worker.settings import WorkerSettings
from kvmesh.worker.slots import LinkStep
from tests.patience import PATIENCE_S
from tests.virtual_loop import run_virtual
from tests.worker_rig import SLOW, make_worker


def make_outlet(steps_max: int) -> FrameOutlet:
    """Returns an outlet of a worker that is not started."""
    return FrameOutlet(make_worker(SLOW, WorkerSettings()).worker, "f1", steps_max=steps_max, legs_max=10)


def finish(slot: int) -> EngineFinish:
    return EngineFinish(key=slot, reason=FinishReason.LENGTH)


class RecordingStream:
    """Records the frames that a frontend would read, with their times."""

    def __init__(self) -> None:
        self.frames: list[pb.StepFrame] = []
        self.received_s: list[float] = []

    async def write(self, response: pb.AttachResponse) -> None:
        self.frames.append(response.frame)
        self.received_s.append(asyncio.get_running_loop().time())


async def drain(outlet: FrameOutlet) -> list[pb.StepFrame]:
    outlet.end_nowait()
    stream = RecordingStream()
    await outlet.write_frames(stream.write, heartbeat_s=PATIENCE_S, interval_s=0.0)
    return stream.frames


def tokens_by_slot(frames: list[pb.StepFrame]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for frame in frames:
        assert len(set(frame.slots)) == len(frame.slots)
        start = 0
        for slot, count in zip(frame.slots, frame.counts or [1] * len(frame.slots), strict=True):
            found.setdefault(slot, []).extend(frame.token_ids[start : start + count])
            start += count
        assert start == len(frame.token_ids)
    return found


STEP = st.lists(
    st.tuples(st.integers(0, 5), st.lists(st.integers(0, 99), min_size=1, max_size=3)),
    max_size=5,
    unique_by=lambda entry: entry[0],
)


@given(steps=st.lists(STEP, max_size=200))
def test_no_token_is_lost_or_moved_within_its_slot(steps: list[list[tuple[int, list[int]]]]) -> None:
    """Any number of pending steps becomes few frames, and each slot's tokens stay in the engine's order."""
    outlet = make_outlet(1000)
    expected: dict[int, list[int]] = {}
    for number, step in enumerate(steps, 1):
        for slot, ids in step:
            expected.setdefault(slot, []).extend(ids)
        share = LinkStep(
            slots=[slot for slot, _ in step],
            token_ids=[i for _, ids in step for i in ids],
            counts=[len(ids) for _, ids in step],
        )
        outlet.on_step(number, share, {})
    frames = asyncio.run(drain(outlet))
    assert tokens_by_slot(frames) == expected
    assert len(frames) == -(-len(steps) // STEPS_PER_FRAME_MAX)


async def test_each_step_is_a_frame_if_the_stream_keeps_up() -> None:
    """A frame has no counts if each entry has one token."""
    outlet, stream = make_outlet(10), RecordingStream()
    writing = asyncio.create_task(outlet.write_frames(stream.write, heartbeat_s=PATIENCE_S, interval_s=0.0))
    await asyncio.sleep(0)
    for number in (1, 2):
        outlet.on_step(number, LinkStep(slots=[3, 4], token_ids=[number, 50 + number]), {})
        # The frame is written in the next iteration of the loop.
        assert len(stream.frames) == number - 1
        await asyncio.sleep(0)
        frame = stream.frames[-1]
        assert (frame.step, list(frame.slots), list(frame.counts)) == (number, [3, 4], [])
        assert list(frame.token_ids) == [number, 50 + number]
    outlet.end_nowait()
    await writing
    assert len(stream.frames) == 2


async def test_steps_during_a_write_share_the_next_frame() -> None:
    """A failed write ends the stream with its error."""
    outlet, gate = make_outlet(10), asyncio.Event()
    written: list[list[int]] = []

    async def write(response: pb.AttachResponse) -> None:
        written.append(list(response.frame.token_ids))
        await asyncio.sleep(0)
        await gate.wait()
        if len(written) == 2:
            raise ConnectionError

    writing = asyncio.create_task(outlet.write_frames(write, heartbeat_s=PATIENCE_S, interval_s=0.0))
    await asyncio.sleep(0)
    for number in range(3):
        outlet.on_step(number, LinkStep(slots=[0], token_ids=[number]), {})
        await asyncio.sleep(0)
    assert written == [[0]]
    gate.set()
    with pytest.raises(ConnectionError):
        await writing
    assert written == [[0], [1, 2]]


async def test_a_finish_follows_its_tokens() -> None:
    """A finish may share a frame with earlier steps. The frame has the number of the last step."""
    outlet = make_outlet(10)
    outlet.on_step(1, LinkStep(slots=[0, 1], token_ids=[10, 20]), {})
    outlet.on_step(2, LinkStep(slots=[0, 1], token_ids=[11, 21], counts=None, finishes=[finish(1)]), {})
    outlet.on_step(3, LinkStep(slots=[0], token_ids=[12], counts=None, finishes=[finish(0)]), {})
    (frame,) = await drain(outlet)
    assert frame.step == 3
    assert tokens_by_slot([frame]) == {0: [10, 11, 12], 1: [20, 21]}
    assert [ended.slot for ended in frame.finishes] == [1, 0]


async def test_logprobs_and_refusals_keep_their_order() -> None:
    """A step with log-probabilities has a separate frame. A refusal shares the next frame."""
    outlet = make_outlet(10)
    entry = TokenLogprob(logprob=-0.5)
    outlet.on_step(1, LinkStep(slots=[0], token_ids=[10]), {})
    outlet.on_step(2, LinkStep(slots=[0], token_ids=[11]), {0: [entry]})
    outlet.refuse_nowait(7, OverloadedError("full"))
    outlet.on_step(3, LinkStep(slots=[0], token_ids=[12]), {})
    frames = await drain(outlet)
    assert [list(frame.token_ids) for frame in frames] == [[10], [11], [12]]
    assert [len(frame.logprobs) for frame in frames] == [0, 1, 0]
    assert [[ended.slot for ended in frame.finishes] for frame in frames] == [[], [], [7]]


async def test_a_frontend_that_does_not_read_is_cut_off() -> None:
    """Beyond the bound the stream ends with an error after the frame that fits."""
    outlet = make_outlet(3)
    for number in range(5):
        outlet.on_step(number, LinkStep(slots=[0], token_ids=[number]), {})
    stream = RecordingStream()
    with pytest.raises(OverloadedError):
        await outlet.write_frames(stream.write, heartbeat_s=PATIENCE_S, interval_s=0.0)
    assert [list(frame.token_ids) for frame in stream.frames] == [[0, 1, 2]]


def test_heartbeats_are_empty_frames() -> None:
    """A heartbeat is an empty frame with step 0, sent after each interval without frames."""

    async def story() -> list[pb.StepFrame]:
        outlet, stream = make_outlet(3), RecordingStream()
        asyncio.get_running_loop().call_later(1.5, outlet.end_nowait)
        await outlet.write_frames(stream.write, heartbeat_s=1.0, interval_s=0.0)
        return stream.frames

    assert run_virtual(story()) == [pb.StepFrame()]


def test_no_heartbeat_while_the_engine_process_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frontend then places requests on another worker. Pending steps are still written."""
    monkeypatch.setattr(SimulatedEngine, "is_responsive", False)

    async def story() -> list[int]:
        outlet, stream = make_outlet(3), RecordingStream()
        asyncio.get_running_loop().call_later(10.0, outlet.on_step, 7, LinkStep(slots=[0], token_ids=[5]), {})
        asyncio.get_running_loop().call_later(15.0, outlet.end_nowait)
        await outlet.write_frames(stream.write, heartbeat_s=1.0, interval_s=0.0)
        return [frame.step for frame in stream.frames]

    assert run_virtual(story()) == [7]


@pytest.mark.parametrize(("step_s", "waits_s", "count"), [(0.006, 0.0, 20), (0.0005, 0.002, 6)])
def test_frames_keep_the_interval(step_s: float, waits_s: float, count: int) -> None:
    """Steps slower than the interval are written at once. Faster ones share frames and wait for at most one interval."""
    interval_s, steps = 0.002, 20

    async def story() -> list[tuple[float, pb.StepFrame]]:
        outlet, loop, stream = make_outlet(1000), asyncio.get_running_loop(), RecordingStream()
        writing = asyncio.create_task(outlet.write_frames(stream.write, heartbeat_s=10.0, interval_s=interval_s))
        began_s = loop.time() + step_s
        for number in range(steps):
            await asyncio.sleep(began_s + number * step_s - loop.time())
            outlet.on_step(number, LinkStep(slots=[0], token_ids=[number]), {})
        outlet.end_nowait()
        await writing
        received = list(zip(stream.received_s, stream.frames, strict=True))
        late_s = [at_s - (began_s + min(frame.token_ids) * step_s) for at_s, frame in received]
        assert max(late_s) <= waits_s + 1e-6
        return received

    received = run_virtual(story())
    assert tokens_by_slot([frame for _, frame in received]) == {0: list(range(steps))}
    assert len(received) <= count


def test_heartbeats_follow_the_last_frame() -> None:
    """The interval of heartbeats counts from the last frame."""

    async def story() -> list[float]:
        outlet, loop, stream = make_outlet(10), asyncio.get_running_loop(), RecordingStream()
        began_s = loop.time()
        loop.call_later(2.5, outlet.on_step, 1, LinkStep(slots=[0], token_ids=[7]), {})
        loop.call_later(5.0, outlet.end_nowait)
        await outlet.write_frames(stream.write, heartbeat_s=1.0, interval_s=0.0)
        received = zip(stream.received_s, stream.frames, strict=True)
        return [round(at_s - began_s, 3) * (1 if frame.slots else -1) for at_s, frame in received]

    assert run_virtual(story()) == [-1.0, -2.0, 2.5, -3.5, -4.5]
