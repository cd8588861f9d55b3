"""What callers other than HTTP do with batches: the same store, files and runner."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from sqlite3 import Row
from typing import BinaryIO

import orjson

from kvmesh.errors import InvalidRequestError, MeshError, UnsupportedError
from kvmesh.rpc.codec.batch import BatchCall, BatchResult
from services.frontend.api.batches.file_routes import is_file_id
from services.frontend.api.batches.lines import CUSTOM_ID_CHARACTERS_MAX
from services.frontend.api.batches.runner import BatchRunner
from services.frontend.api.batches.settings import BatchSettings
from services.frontend.api.request_body import Body, read_body
from services.frontend.api.responses.read import StoredMetadata
from services.frontend.stores.batch_rows import INPUT_PURPOSE
from services.frontend.stores.batches import BatchStore
from services.frontend.stores.files import FileStore

_READ_AT_ONCE = 64
PAGE_DEFAULT, PAGE_MAX = 20, 100


class CallMetadata(Body, kw_only=True):
    """What a call names a batch by."""

    metadata: StoredMetadata


class BatchCalls:
    """Every call is of one owner, who finds only what is the owner's."""

    def __init__(
        self,
        store: BatchStore,
        files: FileStore,
        runner: BatchRunner,
        settings: BatchSettings,
        new_id: Callable[[], str],
    ) -> None:
        self._store = store
        self._files = files
        self._runner = runner
        self._settings = settings
        self._new_id = new_id

    async def create(self, owner: str, call: BatchCall) -> Row:
        """A new batch, to be validated."""
        window_s = call.window_s
        if not (window_s == int(window_s) and 1 <= window_s <= self._settings.window_s_max):
            raise InvalidRequestError(
                f"completion_window must be whole seconds from 1 to {self._settings.window_s_max:g}",
                field="completion_window",
            )
        metadata = read_body(CallMetadata, {"metadata": dict(call.metadata)}).metadata or None
        if call.lines is None:
            await self._check_file(owner, call.input_file_id)
            return await self._create(owner, call, call.input_file_id, metadata)
        file_id = await self._keep_lines(owner, call)
        try:
            return await self._create(owner, call, file_id, metadata)
        except MeshError:
            await self._files.delete(owner, file_id)
            raise

    async def _create(self, owner: str, call: BatchCall, file_id: str, metadata: Mapping[str, str] | None) -> Row:
        hours, rest_s = divmod(int(call.window_s), 3600)
        row = await self._store.create(
            owner,
            f"batch_{self._new_id()}",
            endpoint=call.endpoint,
            input_file_id=file_id,
            completion_window=f"{int(call.window_s)}s" if rest_s else f"{hours}h",
            window_s=call.window_s,
            metadata=metadata,
            output_ttl_s=None,
        )
        self._runner.wake()
        return row

    async def _check_file(self, owner: str, file_id: str) -> None:
        if not is_file_id(file_id):
            raise InvalidRequestError("input_file_id must be the id of a file", field="input_file_id")
        file = await self._files.get(owner, file_id, field="input_file_id")
        if file["purpose"] != INPUT_PURPOSE:
            raise InvalidRequestError(
                f"the file's purpose is {file['purpose']}, not {INPUT_PURPOSE}", field="input_file_id"
            )

    async def _keep_lines(self, owner: str, call: BatchCall) -> str:
        """The lines as a file, which lives as long as one that was uploaded."""
        lines = call.lines or ()
        if not 1 <= len(lines) <= self._settings.lines_max:
            raise InvalidRequestError(f"lines must have 1 to {self._settings.lines_max} entries", field="lines.lines")
        file_id = f"file-{self._new_id()}"
        file = self._files.new(file_id)
        try:
            # Thousands of lines take longer than the event loop may wait.
            data = await asyncio.to_thread(_document, lines, call.endpoint)
            await asyncio.to_thread(file.write, data)
            await asyncio.to_thread(file.commit)
            await self._files.add(
                owner, file_id, name="lines.jsonl", purpose=INPUT_PURPOSE, size_bytes=len(data), ttl_s=None
            )
        finally:
            await asyncio.shield(asyncio.to_thread(file.discard))
        return file_id

    async def get(self, owner: str, batch_id: str) -> Row:
        """NotFoundError when it is not there or another's."""
        return await self._store.get(owner, batch_id)

    async def page(self, owner: str, *, size: int, after: str) -> tuple[Sequence[Row], bool]:
        """A page, the newest first, and whether there is more."""
        if size > PAGE_MAX:
            raise InvalidRequestError(f"page_size must be at most {PAGE_MAX}", field="page_size")
        return await self._store.page(owner, limit=size or PAGE_DEFAULT, after=after or None)

    async def cancel(self, owner: str, batch_id: str) -> Row:
        """Begins to cancel."""
        row = await self._store.cancel(owner, batch_id)
        self._runner.wake(batch_id)
        return row

    async def results(self, owner: str, batch_id: str) -> AsyncGenerator[BatchResult, None]:
        """Answers first, then failures. UnsupportedError while the batch has not ended."""
        row = await self._store.get(owner, batch_id)
        if row["ended_s"] is None:
            raise UnsupportedError("the batch has not ended", field="batch_id", reason="batch_not_ended")
        for file_id in (row["output_file_id"], row["error_file_id"]):
            if file_id is None:
                continue
            await self._files.get(owner, file_id)
            file = await asyncio.to_thread(self._files.path(file_id).open, "rb")
            try:
                while chunk := await asyncio.to_thread(_read, file):
                    for result in chunk:
                        yield result
            finally:
                await asyncio.shield(asyncio.to_thread(file.close))


def _document(lines: Sequence[tuple[str, str]], endpoint: str) -> bytes:
    return b"".join(_lines(lines, endpoint))


def _lines(lines: Sequence[tuple[str, str]], endpoint: str) -> Iterator[bytes]:
    for i, (custom_id, body) in enumerate(lines):
        if not 1 <= len(custom_id) <= CUSTOM_ID_CHARACTERS_MAX:
            raise InvalidRequestError(
                f"lines.lines[{i}].custom_id must have 1 to {CUSTOM_ID_CHARACTERS_MAX} characters",
                field=f"lines.lines[{i}].custom_id",
            )
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError:
            value = None
        if not isinstance(value, dict):
            raise InvalidRequestError(f"lines.lines[{i}].body must be a JSON object", field=f"lines.lines[{i}].body")
        line = {"custom_id": custom_id, "method": "POST", "url": endpoint, "body": value}
        yield orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def _read(file: BinaryIO) -> list[BatchResult]:
    """The next results; empty at the end. A closed file, of a call that was cancelled, has none."""
    found: list[BatchResult] = []
    while len(found) < _READ_AT_ONCE and not file.closed and (line := file.readline()):
        record = orjson.loads(line)
        response = record["response"] or {"status_code": 0, "body": {"error": record["error"]}}
        body = orjson.dumps(response["body"]).decode()
        found.append(BatchResult(custom_id=record["custom_id"], status_code=response["status_code"], body=body))
    return found
