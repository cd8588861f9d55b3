"""Runs one batch from wherever it stands to its end."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvmesh.clock import Clock
from kvmesh.telemetry import event_logger
from services.frontend.api.batches.line_runner import DrainingError, LineRunner, unrun_result
from services.frontend.api.batches.lines import Line, LineReader, check_file
from services.frontend.api.batches.settings import BatchSettings
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.stores.batch_rows import CANCELLED, CANCELLING, EXPIRED, FINALIZING, Claim
from services.frontend.stores.batches import BatchStore, OutputFile, Result
from services.frontend.stores.files import FileStore

_log = event_logger(__name__)
_SLOT_POLL_S = 0.05
_CHUNK_LINES = 64
_WRITTEN_AT_ONCE = 256
_UNRUN = {
    CANCELLED: ("batch_cancelled", "the batch was cancelled before this request was run"),
    EXPIRED: ("batch_expired", "the batch's completion window ended before this request was run"),
}


class LineSlots:
    """Limits the batch requests in flight on one frontend, so that interactive requests have room. First come, first served."""

    def __init__(self, pipeline: Pipeline, settings: BatchSettings) -> None:
        self._pipeline = pipeline
        self._room = asyncio.Semaphore(settings.lines_in_flight_max)
        self._in_flight_max = max(1, int(pipeline.settings.requests_max * settings.frontend_share_max))

    async def take(self) -> None:
        """Waits for a slot, and until the frontend is not busy with others."""
        await self._room.acquire()
        try:
            while self._pipeline.in_flight >= self._in_flight_max and not self._pipeline.is_draining:  # noqa: ASYNC110
                await asyncio.sleep(_SLOT_POLL_S)  # Requests end many times a second: a signal per end would cost more.
        except BaseException:
            self._room.release()
            raise

    def give(self) -> None:
        """Gives a slot back."""
        self._room.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResources:
    """What every batch of a frontend is run with."""

    store: BatchStore
    files: FileStore
    lines: LineRunner
    slots: LineSlots
    settings: BatchSettings
    clock: Clock
    new_id: Callable[[], str]
    is_draining: Callable[[], bool]


class BatchRun:
    """One claimed batch.

    1. A line's result is kept before the line counts as done: a crash at any moment repeats lines and loses none.
    2. The output files are written from kept results, in the order of the lines, and get their rows with the batch's end.
    3. Every write is fenced by the lease: LeaseLostError ends the run without a trace.
    """

    def __init__(self, claim: Claim, resources: BatchResources) -> None:
        self._claim = claim
        self._resources = resources
        self._stop = asyncio.Event()
        self._stopped_as = ""
        self._look = asyncio.Event()
        self._new: list[Result] = []
        self._keeping = asyncio.Lock()
        self._writing: asyncio.Task[None] | None = None
        self._leaves_lines = False

    def look(self) -> None:
        """The batch's row has changed: it is looked at now."""
        self._look.set()

    async def run(self) -> None:
        """Until the batch has ended. LeaseLostError; DrainingError when the frontend stops first."""
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch())
                await self._work()
                watching.cancel()
        except ExceptionGroup as failures:
            raise _first(failures) from None

    async def _watch(self) -> None:
        """Keeps the lease and sees when a client cancels or the time is over."""
        resources, claim = self._resources, self._claim
        while True:
            status = await resources.store.renew(claim)
            left_s = claim.expires_s - resources.clock.wall()
            if status == CANCELLING:
                self._stop_lines(CANCELLED)
            elif left_s <= 0:
                self._stop_lines(EXPIRED)
            pause_s = resources.settings.lease_s / 3
            if 0 < left_s < pause_s:
                pause_s = left_s
            self._look.clear()
            try:
                async with asyncio.timeout(pause_s):
                    await self._look.wait()
            except TimeoutError:
                continue

    def _stop_lines(self, status: str) -> None:
        if not self._stop.is_set():
            self._stopped_as = status
            self._stop.set()

    async def _work(self) -> None:
        resources, claim = self._resources, self._claim
        is_valid = claim.is_valid
        if not is_valid and claim.status != CANCELLING:
            if not await self._validate():
                return
            is_valid = True
        if is_valid and claim.status != FINALIZING and (stopped_as := await self._run_lines()):
            await self._keep_unrun(stopped_as)
        ended = await resources.store.finalise(claim)
        output, errors = (
            await self._write_file("output", is_error=False),
            await self._write_file("error", is_error=True),
        )
        await resources.store.end(claim, ended, output, errors)
        _log.info("batch_ended", batch=claim.batch_id, status=ended)

    async def _validate(self) -> bool:
        settings, claim = self._resources.settings, self._claim
        path = self._resources.files.path(claim.input_file_id)
        checked = await asyncio.to_thread(
            check_file, path, claim.endpoint, lines_max=settings.lines_max, line_bytes_max=settings.line_bytes_max
        )
        if checked.problems:
            await self._resources.store.fail(claim, checked.problems)
            _log.info("batch_refused", batch=claim.batch_id, problems=len(checked.problems))
            return False
        await self._resources.store.begin(claim, total=checked.total, model=checked.model)
        return True

    async def _run_lines(self) -> str:
        """Runs the lines that have no result. Returns as what the batch was stopped, empty when all were run."""
        running = asyncio.create_task(self._dispatch(), name=f"batch-lines-{self._claim.batch_id}")
        stopping = asyncio.create_task(self._stop.wait(), name=f"batch-stop-{self._claim.batch_id}")
        try:
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (running, stopping):
                task.cancel()
            await asyncio.wait({running, stopping})
            await self._settle()
        if not running.cancelled() and (failure := running.exception()) is not None:
            raise _first(failure) if isinstance(failure, ExceptionGroup) else failure
        if self._stop.is_set() and running.cancelled():
            return self._stopped_as
        if self._leaves_lines:
            raise DrainingError
        return ""

    async def _dispatch(self) -> None:
        resources, claim = self._resources, self._claim
        done = await resources.store.done_lines(claim)
        reader = self._open()
        try:
            async with asyncio.TaskGroup() as tasks:
                while chunk := await asyncio.to_thread(reader.read, done, _CHUNK_LINES):
                    for line in chunk:
                        await resources.slots.take()
                        if self._leaves_lines or resources.is_draining():
                            self._leaves_lines = True
                            resources.slots.give()
                            return
                        tasks.create_task(self._run_line(line))
        finally:
            await asyncio.shield(asyncio.to_thread(reader.close))

    def _open(self) -> LineReader:
        claim = self._claim
        path = self._resources.files.path(claim.input_file_id)
        return LineReader(path, claim.endpoint, line_bytes_max=self._resources.settings.line_bytes_max)

    async def _run_line(self, line: Line) -> None:
        try:
            result = await self._resources.lines.run(self._claim.endpoint, self._claim.owner, line)
            await self._keep(result)
        except DrainingError:
            # Those in flight end by themselves; the rest is left to another frontend.
            self._leaves_lines = True
        finally:
            self._resources.slots.give()

    async def _keep(self, result: Result) -> None:
        """Writes the result down. Those that come while another is written go together in the next transaction."""
        self._new.append(result)
        async with self._keeping:
            if self._new:
                await asyncio.shield(self._write_new())

    def _write_new(self) -> asyncio.Task[None]:
        new, self._new = self._new, []
        self._writing = asyncio.create_task(self._resources.store.record(self._claim, new), name="batch-results")
        return self._writing

    async def _settle(self) -> None:
        """Results that were there when the lines were stopped are kept too. Where that fails their lines are run again."""
        if self._writing is not None:
            await asyncio.wait({self._writing})
        if self._new:
            await asyncio.wait({self._write_new()})

    async def _keep_unrun(self, status: str) -> None:
        """An error for every line that has no result; nothing is said of lines that ran."""
        resources, claim = self._resources, self._claim
        if status == EXPIRED:
            await resources.store.expire(claim)
        code, message = _UNRUN[status]
        done = await resources.store.done_lines(claim)
        reader = self._open()
        try:
            while chunk := await asyncio.to_thread(reader.read, done, _WRITTEN_AT_ONCE):
                results = [unrun_result(line, resources.new_id(), code, message) for line in chunk]
                await resources.store.record(claim, results)
        finally:
            await asyncio.shield(asyncio.to_thread(reader.close))

    async def _write_file(self, kind: str, *, is_error: bool) -> OutputFile | None:
        """The results as a file; None without any. Its id is the same however often it is written."""
        resources, claim = self._resources, self._claim
        file_id = "file-" + hashlib.sha256(f"{claim.batch_id}/{kind}".encode()).hexdigest()[:32]
        file = resources.files.new(file_id)
        last = 0
        try:
            while rows := await resources.store.results(
                claim, after_line=last, is_error=is_error, count=_WRITTEN_AT_ONCE
            ):
                last = rows[-1][0]
                await asyncio.to_thread(file.write, _joined([record for _, record in rows]))
            if not last:
                return None
            await asyncio.to_thread(file.commit)
        finally:
            await asyncio.shield(asyncio.to_thread(file.discard))
        return OutputFile(file_id=file_id, name=f"{claim.batch_id}_{kind}.jsonl", size_bytes=file.size_bytes)


def _joined(records: Sequence[bytes]) -> bytes:
    return b"\n".join(records) + b"\n"


def _first(failures: ExceptionGroup[Exception]) -> Exception:
    """What failed first: the rest is what it brought down."""
    failure: Exception = failures
    while isinstance(failure, ExceptionGroup):
        failure = failure.exceptions[0]
    return failure
