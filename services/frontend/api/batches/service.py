"""Creates, cancels and reads batches, for HTTP and gRPC clients. Every call has one owner, who sees only their own batches."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import BinaryIO

import orjson

from kvmesh.errors import InvalidRequestError, MeshError, NotFoundError, UnsupportedError
from kvmesh.rpc.codec.batch import BatchCall, BatchResult
from services.frontend.api.anthropic.body import MESSAGES_PATH
from services.frontend.api.batches.file_routes import is_file_id
from services.frontend.api.batches.lines import CUSTOM_ID_CHARACTERS_MAX
from services.frontend.api.batches.runner import BatchRunner
from services.frontend.api.request_body import Body, invalid_value, object_in, read_body
from services.frontend.api.responses.read import StoredMetadata
from services.frontend.settings import BatchSettings
from services.frontend.stores.batch_rows import INPUT_PURPOSE
from services.frontend.stores.batches import BatchStore
from services.frontend.stores.database import Row
from services.frontend.stores.files import FileStore

WINDOW_S_MAX = 7 * 86_400
"""Longest completion window: a week. Its results are stored for longer."""
_RESULTS_PER_READ = 64


class CallMetadata(Body, kw_only=True):
    """The metadata of a gRPC call."""

    metadata: StoredMetadata


class BatchService:
    """Works on the store, the files and the runner of this frontend."""

    def __init__(
        self,
        *,
        store: BatchStore,
        files: FileStore,
        runner: BatchRunner,
        settings: BatchSettings,
        new_id: Callable[[], str],
    ) -> None:
        self.store = store
        self._files = files
        self._runner = runner
        self._settings = settings
        self._new_id = new_id

    @property
    def lines_max(self) -> int:
        """Most lines of a batch."""
        return self._settings.lines_max

    async def create(
        self,
        owner: str,
        *,
        endpoint: str,
        input_file_id: str,
        completion_window: str,
        window_s: float,
        metadata: Mapping[str, str] | None,
        output_ttl_s: float | None = None,
    ) -> Row:
        """Creates a batch of an uploaded file. The runner validates it."""
        if not is_file_id(input_file_id):
            raise invalid_value("input_file_id", wanted="the id of a file")
        file = await self._files.get(owner=owner, file_id=input_file_id, field="input_file_id")
        if file["purpose"] != INPUT_PURPOSE:
            message = f"the file's purpose is {file['purpose']}, not {INPUT_PURPOSE}"
            raise InvalidRequestError(message, field="input_file_id", reason="invalid_value")
        row = await self.store.create(
            owner=owner,
            batch_id=f"{'msgbatch' if endpoint == MESSAGES_PATH else 'batch'}_{self._new_id()}",
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=completion_window,
            window_s=window_s,
            metadata=metadata,
            output_ttl_s=output_ttl_s,
        )
        self._runner.wake()
        return row

    async def create_from_call(self, owner: str, call: BatchCall) -> Row:
        """Creates a batch of an uploaded file, or of the lines of the call."""
        window_s = call.window_s
        if not (window_s == int(window_s) and 1 <= window_s <= WINDOW_S_MAX):
            message = f"completion_window must be whole seconds from 1 to {WINDOW_S_MAX}"
            raise InvalidRequestError(message, field="completion_window")
        metadata = read_body(CallMetadata, {"metadata": dict(call.metadata)}).metadata or None
        hours, rest_s = divmod(int(window_s), 3600)
        file_id = call.input_file_id if call.lines is None else await self._store_lines(owner, call)
        try:
            return await self.create(
                owner,
                endpoint=call.endpoint,
                input_file_id=file_id,
                completion_window=f"{int(window_s)}s" if rest_s else f"{hours}h",
                window_s=window_s,
                metadata=metadata,
            )
        except MeshError:
            if call.lines is not None:
                await self._files.delete(owner=owner, file_id=file_id)
            raise

    async def _store_lines(self, owner: str, call: BatchCall) -> str:
        """Stores the lines as a file, which is kept as long as one that was uploaded."""
        lines = call.lines or ()
        if not 1 <= len(lines) <= self._settings.lines_max:
            raise InvalidRequestError(f"lines must have 1 to {self._settings.lines_max} entries", field="lines.lines")
        file_id = f"file-{self._new_id()}"
        file = self._files.new(file_id)
        try:
            # In a thread: thousands of lines would block the event loop for too long.
            data = await asyncio.to_thread(lambda: b"".join(_encode_lines(lines, call.endpoint)))
            await asyncio.to_thread(file.write, data)
            await self._files.keep_and_add(file, owner=owner, name="lines.jsonl", purpose=INPUT_PURPOSE)
        finally:
            await asyncio.shield(asyncio.to_thread(file.discard))
        return file_id

    async def get(self, owner: str, batch_id: str, endpoints: Sequence[str]) -> Row:
        """Returns a batch of one of the endpoints. Raises NotFoundError for others, which belong to another API."""
        row = await self.store.get(owner=owner, batch_id=batch_id)
        if row["endpoint"] not in endpoints:
            raise NotFoundError(f"there is no batch {batch_id[:64]!r}", field="batch_id", reason="batch_not_found")
        return row

    async def cancel(self, owner: str, batch_id: str) -> Row:
        """Starts to cancel a batch. Its requests in flight are cancelled shortly after."""
        row = await self.store.cancel(owner=owner, batch_id=batch_id)
        self._runner.wake(batch_id)
        return row

    async def delete(self, owner: str, batch_id: str) -> None:
        """Deletes a batch that has ended, and its files. Raises InvalidRequestError if it has not ended."""
        row = await self.store.delete(owner=owner, batch_id=batch_id)
        for file_id in (row["input_file_id"], row["output_file_id"], row["error_file_id"]):
            if file_id is not None:
                with suppress(NotFoundError):
                    await self._files.delete(owner=owner, file_id=file_id)

    async def results(self, owner: str, batch_id: str) -> AsyncGenerator[BatchResult, None]:
        """Yields answers, then failures. Raises UnsupportedError while the batch has not ended."""
        row = await self.store.get(owner=owner, batch_id=batch_id)
        if row["ended_s"] is None:
            raise UnsupportedError("the batch has not ended", field="batch_id", reason="batch_not_ended")
        for file_id in (row["output_file_id"], row["error_file_id"]):
            if file_id is None:
                continue
            await self._files.get(owner=owner, file_id=file_id)
            async with self._files.local(file_id) as path:
                file = await asyncio.to_thread(path.open, "rb")
                try:
                    while chunk := await asyncio.to_thread(_read_results, file):
                        for result in chunk:
                            yield result
                finally:
                    await asyncio.shield(asyncio.to_thread(file.close))


def _encode_lines(lines: Sequence[tuple[str, str]], endpoint: str) -> Iterator[bytes]:
    for i, (custom_id, body) in enumerate(lines):
        path = f"lines.lines[{i}]"
        if not 1 <= len(custom_id) <= CUSTOM_ID_CHARACTERS_MAX:
            message = f"{path}.custom_id must have 1 to {CUSTOM_ID_CHARACTERS_MAX} characters"
            raise InvalidRequestError(message, field=f"{path}.custom_id")
        value = object_in(body)
        if value is None:
            raise InvalidRequestError(f"{path}.body must be a JSON object", field=f"{path}.body")
        line = {"custom_id": custom_id, "method": "POST", "url": endpoint, "body": value}
        yield orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def _read_results(file: BinaryIO) -> list[BatchResult]:
    """Returns the next results; none at the end, or if a cancelled call has closed the file."""
    found: list[BatchResult] = []
    while len(found) < _RESULTS_PER_READ and not file.closed and (line := file.readline()):
        record = orjson.loads(line)
        response = record["response"] or {"status_code": 0, "body": {"error": record["error"]}}
        body = orjson.dumps(response["body"]).decode()
        found.append(BatchResult(custom_id=record["custom_id"], status_code=response["status_code"], body=body))
    return found
