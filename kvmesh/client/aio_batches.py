"""Batches of the client for asyncio."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kvmesh.client.aio_stream import AsyncStream
from kvmesh.client.calling import waited_too_long
from kvmesh.rpc.codec.batch_asking import (
    Batch,
    BatchAnswer,
    batch_results_message,
    cancel_batch_message,
    create_batch_message,
    from_batch,
    from_batch_result,
    get_batch_message,
    list_batches_message,
)


class AsyncBatches:
    """Many requests at once, run when the mesh has room. `client.batches`."""

    def __init__(
        self, stub: Any, one: Callable[..., Awaitable[Any]], stream: Callable[..., AsyncStream[BatchAnswer]]
    ) -> None:
        self._stub = stub
        self._one = one
        self._stream = stream

    async def create(
        self,
        endpoint: str,
        requests: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        input_file_id: str = "",
        window_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Batch:
        """Begins a batch of these bodies of `endpoint`, such as /v1/chat/completions, by custom id; or of a file that was
        uploaded over HTTP. Tried again only where the server refused it: LostError leaves open whether there is one now."""
        message = create_batch_message(
            endpoint, requests, input_file_id=input_file_id, window_s=window_s, metadata=metadata
        )
        return from_batch((await self._one(self._stub.CreateBatch, message, timeout_s, is_repeatable=False)).batch)

    async def get(self, batch_id: str, *, timeout_s: float | None = None) -> Batch:
        """As it is now."""
        return from_batch((await self._one(self._stub.GetBatch, get_batch_message(batch_id), timeout_s)).batch)

    async def list(self, *, limit: int = 20, after: str = "", timeout_s: float | None = None) -> list[Batch]:
        """The caller's own, the newest first. `after`: id of the last one of the page before."""
        page = await self._one(self._stub.ListBatches, list_batches_message(limit, after), timeout_s)
        return [from_batch(each) for each in page.batches]

    async def cancel(self, batch_id: str, *, timeout_s: float | None = None) -> Batch:
        """Begins to cancel; what was answered by then is kept."""
        return from_batch((await self._one(self._stub.CancelBatch, cancel_batch_message(batch_id), timeout_s)).batch)

    async def wait(self, batch_id: str, *, poll_s: float = 1.0, timeout_s: float | None = None) -> Batch:
        """As it ended. DeadlineError after `timeout_s`; None: it ends by itself when its window does."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    batch = await self.get(batch_id)
                    if batch.has_ended:
                        return batch
                    await asyncio.sleep(poll_s)
        except TimeoutError as error:
            raise waited_too_long(batch_id) from error

    def results(self, batch_id: str, *, timeout_s: float | None = None) -> AsyncStream[BatchAnswer]:
        """Every request's answer once, of a batch that has ended."""
        message = batch_results_message(batch_id)
        return self._stream(self._stub.ListBatchResults, message, from_batch_result, timeout_s)
