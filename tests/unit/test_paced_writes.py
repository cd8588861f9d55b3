"""When paced messages of a stream are written, on virtual time."""

import asyncio

from kvmesh.rpc.paced import PacedWrites
from tests.virtual_loop import run_virtual

PACE_S = 0.5


class Stream:
    """The write side of a call without backpressure. It breaks after `breaks_after` messages."""

    def __init__(self, breaks_after: int = 1000) -> None:
        self.written: list[tuple[float, object]] = []
        self._breaks_after = breaks_after

    async def write(self, message: object) -> None:
        if len(self.written) == self._breaks_after:
            raise asyncio.InvalidStateError("the stream has ended")
        self.written.append((round(asyncio.get_running_loop().time() - self.began_s, 3), message))

    began_s = 0.0


async def write(stream: Stream, at_s: dict[str, float]) -> None:
    """Adds each word at its time. A message contains all pending words."""
    loop, waiting = asyncio.get_running_loop(), list[str]()
    stream.began_s = loop.time()

    def take() -> list[str]:
        taken, waiting[:] = list(waiting), []
        return taken

    writes = PacedWrites(stream, pace_s=PACE_S)
    running = asyncio.create_task(writes.run(take, "hello"))
    for word, when_s in at_s.items():
        await asyncio.sleep(stream.began_s + when_s - loop.time())
        waiting.append(word)
        writes.wake()
    await asyncio.sleep(2 * PACE_S)
    running.cancel()
    await asyncio.wait([running])


def test_messages_are_written_at_once_or_merged_within_the_pace() -> None:
    """No word waits longer than the pace, and no two messages are closer together than the pace."""
    stream = Stream()
    run_virtual(write(stream, {"a": 1.0, "b": 1.1, "c": 1.4, "d": 3.0}))
    assert stream.written == [(0.0, "hello"), (1.0, ["a"]), (1.5, ["b", "c"]), (3.0, ["d"])]


def test_writing_stops_when_the_stream_ends() -> None:
    """The writer raises no error, because the reader of the stream gets the error and reports it."""
    stream = Stream(breaks_after=2)
    run_virtual(write(stream, {"a": 1.0, "b": 2.0}))
    assert stream.written == [(0.0, "hello"), (1.0, ["a"])]
