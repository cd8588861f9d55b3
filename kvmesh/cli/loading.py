"""What a worker does while its engine loads, read from its log, and a limit for the time in which nothing happens."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
POLL_S = 0.5
READ_BYTES_MAX = 1 << 20
"""A log that grows faster is read on later; a start writes some hundred KiB."""
PERCENT_STEP = 25
"""Progress bars are shown at every quarter."""
PHASES = (
    (re.compile(r"(?:Downloading|Fetching)\b.*?:\s+(\d+)%"), "downloading the model"),
    (re.compile(r"(?:checkpoint shards|np_cache).*?:\s+(\d+)%"), "loading weights"),
    (re.compile(r"Starting to load model"), "loading weights"),
    (re.compile(r"Loading weights took"), "weights are loaded"),
    (re.compile(r"Compiling a graph|Dynamo bytecode transform"), "compiling the model (torch.compile)"),
    (re.compile(r"torch\.compile took"), "the model is compiled"),
    (re.compile(r"Capturing CUDA graphs.*?:\s+(\d+)%"), "capturing CUDA graphs"),
    (re.compile(r"Available KV cache memory"), "memory is measured"),
    (re.compile(r"Graph capturing finished"), "CUDA graphs are captured"),
)
"""Lines of vLLM, its loaders and the hub's client, with what they mean. The first group is a percentage."""


def phase_of(line: str) -> str:
    """What a line of a log says about a start, in words; empty for most lines."""
    for pattern, words in PHASES:
        if match := pattern.search(line):
            if not match.groups():
                return words
            return f"{words}: {int(match[1]) // PERCENT_STEP * PERCENT_STEP} %"
    return ""


class LogWatch:
    """Reads one log as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = ""
        self._phases: set[str] = set()

    def new_phases(self) -> list[str]:
        """Phases that the log names for the first time. A file that is not there yet has none."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(READ_BYTES_MAX)
        except OSError:
            return []
        self._offset += len(data)
        # Progress bars write over their line; a part of a line waits for the rest.
        *lines, self._rest = re.split(r"[\r\n]", self._rest + data.decode(errors="replace"))
        found = []
        for line in lines:
            phase = phase_of(line)
            if phase and phase not in self._phases:
                self._phases.add(phase)
                found.append(phase)
        return found


async def wait_while_it_goes_on(work: Awaitable[T], count: Callable[[], int], limit_s: float) -> T:
    """What `work` gives. TimeoutError, and it is cancelled, when `count()` has not changed for `limit_s`."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(limit_s) as deadline:

        async def watch() -> None:
            last = count()
            while True:
                await asyncio.sleep(min(POLL_S, limit_s / 4))
                if (now := count()) != last:
                    last = now
                    deadline.reschedule(loop.time() + limit_s)

        watching = asyncio.create_task(watch())
        try:
            return await work
        finally:
            watching.cancel()
