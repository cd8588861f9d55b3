"""Runs one batch from its current state to its end."""

import asyncio
import hashlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvmesh.event_log import event_logger
from services.frontend.api.batches.line_runner import DrainingError, LineRunner, unrun_result
from services.frontend.api.batches.lines import BatchLine, LineReader, validate_file
from services.frontend.api.run import first_failure
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.settings import BatchSettings
from services.frontend.stores.batch_rows import CANCELLED, CANCELLING, EXPIRED, FINALIZING, Claim
from services.frontend.stores.batches import BatchStore, LineResult, OutputFile
from services.frontend.stores.files import FileStore

_log = event_logger(__name__)
FRONTEND_SHARE = 0.5
"""Share of the frontend's `requests_max` above which no request of a batch starts: the rest is for clients that wait."""
_SLOT_POLL_S = 0.05
_LINES_PER_READ = 64
_RESULTS_PER_WRITE = 256
_UNRUN = {
    CANCELLED: ("batch_cancelled", "the batch was cancelled before this request was run"),
    EXPIRED: ("batch_expired", "the batch's completion window ended before this request was run"),
}


class LineSlots:
    """Limits the batch requests in flight on one frontend, so that interactive requests have room. First in, first out."""

    def __init__(self, pipeline: Pipeline, settings: BatchSettings) -> None:
        self._pipeline = pipeline
        self._room = asyncio.Semaphore(settings.lines_in_flight_max)
        self._in_flight_max = max(1, int(pipeline.settings.requests_max * FRONTEND_SHARE))

    async def take(self) -> None:
        """Waits for a slot, and until the frontend has room besides its other requests."""
        await self._room.acquire()
        try:
            while self._pipeline.in_flight >= self._in_flight_max and not self._pipeline.is_draining:  # noqa: ASYNC110
                await asyncio.sleep(_SLOT_POLL_S)  # Requests end many times a second: a signal per end would cost more.
        except BaseException:
            self._room.release()
            raise

    def release(self) -> None:
        self._room.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResources:
    """Objects that all batches of a frontend share."""

    store: BatchStore
    files: FileStore
    lines: LineRunner
    slots: LineSlots
    settings: BatchSettings
    pipeline: Pipeline


class BatchRun:
    """One claimed batch.

    1. A line counts as done after its result is stored: a crash repeats lines and loses none.
    2. The output files are written from stored results, in the order of the lines. Their rows are added when the batch ends.
    3. Every write is fenced by the lease. LeaseLostError ends the run, which then changes nothing more.
    """

    def __init__(self, claim: Claim, resources: BatchResources) -> None:
        self._claim = claim
        self._resources = resources
        self._stop = asyncio.Event()
        self._stopped_as = ""
        self._changed = asyncio.Event()
        self._unsaved: list[LineResult] = []
        self._storing = asyncio.Lock()
        self._writing: asyncio.Task[None] | None = None
        self._leaves_lines = False
        self._began_s = resources.pipeline.clock.now()

    @property
    def owner(self) -> str:
        return self._claim.owner

    @property
    def age_s(self) -> float:
        """Time since the claim."""
        return self._resources.pipeline.clock.now() - self._began_s

    @property
    def is_leaving(self) -> bool:
        """True if the lines in flight are the last ones for now."""
        return self._leaves_lines

    def leave(self) -> None:
        """Starts no more lines. When those in flight have ended, another process or a later claim continues the batch."""
        self._leaves_lines = True

    def wake(self) -> None:
        """Reads the batch's row now, because it has changed."""
        self._changed.set()

    async def run(self) -> None:
        """Returns when the batch has ended. Raises LeaseLostError, and DrainingError if the frontend stops first."""
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch())
                await self._work()
                watching.cancel()
        except ExceptionGroup as failures:
            raise first_failure(failures) from None

    async def _watch(self) -> None:
        """Renews the lease, and stops the lines when a client cancels the batch or it expires."""
        resources, claim = self._resources, self._claim
        while True:
            status = await resources.store.renew(claim)
            left_s = claim.expires_s - resources.store.wall()
            if status == CANCELLING:
                self._stop_lines(CANCELLED)
            elif left_s <= 0:
                self._stop_lines(EXPIRED)
            pause_s = resources.settings.lease_s / 3
            if 0 < left_s < pause_s:
                pause_s = left_s
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()

    def _stop_lines(self, status: str) -> None:
        if not self._stop.is_set():
            self._stopped_as = status
            self._stop.set()

    async def _work(self) -> None:
        resources, claim = self._resources, self._claim
        needs_input = claim.status != FINALIZING and (claim.is_valid or claim.status != CANCELLING)
        if needs_input:
            async with resources.files.local(claim.input_file_id) as path:
                if not await self._run_input(path):
                    return
        await self._end()

    async def _run_input(self, path: Path) -> bool:
        """Validates the input and runs its lines. Returns False if the batch has failed."""
        if not self._claim.is_valid and not await self._validate(path):
            return False
        if stopped_as := await self._run_lines(path):
            await self._store_unrun(path, stopped_as)
        return True

    async def _end(self) -> None:
        """Writes the output files and ends the batch."""
        resources, claim = self._resources, self._claim
        ended = await resources.store.finalise(claim)
        output = await self._write_file("output", is_error=False)
        errors = await self._write_file("error", is_error=True)
        await resources.store.end(claim, ended, output=output, errors=errors)
        _log.info("batch_ended", batch_id=claim.batch_id, status=ended)

    async def _validate(self, path: Path) -> bool:
        settings, claim = self._resources.settings, self._claim
        checked = await asyncio.to_thread(
            validate_file, path, claim.endpoint, lines_max=settings.lines_max, line_bytes_max=settings.line_bytes_max
        )
        if checked.problems:
            await self._resources.store.fail(claim, checked.problems)
            _log.info("batch_refused", batch_id=claim.batch_id, problems=len(checked.problems))
            return False
        await self._resources.store.begin(claim, total=checked.total, model=checked.model)
        return True

    async def _run_lines(self, path: Path) -> str:
        """Runs the lines that have no result. Returns the status as which the batch was stopped; empty if all lines ran."""
        running = asyncio.create_task(self._dispatch(path), name=f"batch-lines-{self._claim.batch_id}")
        running.add_done_callback(_retrieve)
        stopping = asyncio.create_task(self._stop.wait(), name=f"batch-stop-{self._claim.batch_id}")
        try:
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (running, stopping):
                task.cancel()
            await asyncio.wait({running, stopping})
            await self._store_rest()
        if not running.cancelled() and (failure := running.exception()) is not None:
            raise first_failure(failure)
        if self._stop.is_set() and running.cancelled():
            return self._stopped_as
        if self._leaves_lines:
            raise DrainingError
        return ""

    async def _dispatch(self, path: Path) -> None:
        resources, claim = self._resources, self._claim
        done = await resources.store.done_lines(claim)
        reader = self._open(path)
        try:
            async with asyncio.TaskGroup() as tasks:
                while chunk := await asyncio.to_thread(reader.read, done, _LINES_PER_READ):
                    for line in chunk:
                        await resources.slots.take()
                        if self._leaves_lines or resources.pipeline.is_draining:
                            self._leaves_lines = True
                            resources.slots.release()
                            return
                        tasks.create_task(self._run_line(line))
        finally:
            await asyncio.shield(asyncio.to_thread(reader.close))

    def _open(self, path: Path) -> LineReader:
        return LineReader(path, self._claim.endpoint, line_bytes_max=self._resources.settings.line_bytes_max)

    async def _run_line(self, line: BatchLine) -> None:
        try:
            result = await self._resources.lines.run(self._claim.endpoint, self._claim.owner, line)
            await self._store_result(result)
        except DrainingError:
            # The lines in flight end; another frontend runs the rest.
            self._leaves_lines = True
        finally:
            self._resources.slots.release()

    async def _store_result(self, result: LineResult) -> None:
        """Stores the result. Results that arrive during a write share the next transaction."""
        self._unsaved.append(result)
        async with self._storing:
            if self._unsaved:
                await asyncio.shield(self._write_unsaved())

    def _write_unsaved(self) -> asyncio.Task[None]:
        results, self._unsaved = self._unsaved, []
        self._writing = asyncio.create_task(self._resources.store.record(self._claim, results), name="batch-results")
        self._writing.add_done_callback(_retrieve)
        return self._writing

    async def _store_rest(self) -> None:
        """Stores the results that exist when the lines are stopped. If that fails, their lines run again."""
        if self._writing is not None:
            await asyncio.wait({self._writing})
        if self._unsaved:
            await asyncio.wait({self._write_unsaved()})

    async def _store_unrun(self, path: Path, status: str) -> None:
        """Stores an error for every line that has no result."""
        resources, claim = self._resources, self._claim
        if status == EXPIRED:
            await resources.store.expire(claim)
        code, message = _UNRUN[status]
        done = await resources.store.done_lines(claim)
        reader = self._open(path)
        try:
            while chunk := await asyncio.to_thread(reader.read, done, _RESULTS_PER_WRITE):
                results = [
                    unrun_result(line, request_id=resources.pipeline.new_id(), code=code, message=message)
                    for line in chunk
                ]
                await resources.store.record(claim, results)
        finally:
            await asyncio.shield(asyncio.to_thread(reader.close))

    async def _write_file(self, kind: str, *, is_error: bool) -> OutputFile | None:
        """Writes the results to a file, whose id is always the same. Returns None if there are none."""
        resources, claim = self._resources, self._claim
        file_id = "file-" + hashlib.sha256(f"{claim.batch_id}/{kind}".encode()).hexdigest()[:32]
        file = resources.files.new(file_id)
        last = 0
        try:
            while rows := await resources.store.results(
                claim, after_line=last, is_error=is_error, count=_RESULTS_PER_WRITE
            ):
                last = rows[-1][0]
                await asyncio.to_thread(file.write, b"".join([record + b"\n" for _, record in rows]))
            if not last:
                return None
            await resources.files.keep(file)
        finally:
            await asyncio.shield(asyncio.to_thread(file.discard))
        return OutputFile(file_id=file_id, name=f"{claim.batch_id}_{kind}.jsonl", size_bytes=file.size_bytes)


def _retrieve(ended: "asyncio.Task[None]") -> None:
    """Reads the exception of a task that a stopped run does not await: asyncio warns of exceptions that were never retrieved."""
    if not ended.cancelled():
        ended.exception()
