"""Batches of the client that blocks."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from kvmesh.client.sync_stream import Stream
from kvmesh.errors import DeadlineError
from kvmesh.rpc.codec.client_batches import (
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


class Batches:
    """Batches: many requests that run when the mesh has room. `client.batches`."""

    def __init__(self, stub: Any, one: Callable[..., Any], stream: Callable[..., Stream[BatchAnswer]]) -> None:
        self._stub = stub
        self._one = one
        self._stream = stream

    def create(
        self,
        endpoint: str,
        requests: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        input_file_id: str = "",
        window_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Batch:
        """Creates a batch of request bodies of `endpoint`, such as /v1/chat/completions, by custom id; or of a file that was
        uploaded over HTTP. Retried only if the server refused it: after LostError the batch may exist."""
        message = create_batch_message(
            endpoint, requests, input_file_id=input_file_id, window_s=window_s, metadata=metadata
        )
        return from_batch(self._one(self._stub.CreateBatch, message, timeout_s, is_repeatable=False).batch)

    def get(self, batch_id: str, *, timeout_s: float | None = None) -> Batch:
        return from_batch(self._one(self._stub.GetBatch, get_batch_message(batch_id), timeout_s).batch)

    def list(self, *, limit: int = 20, after: str = "", timeout_s: float | None = None) -> list[Batch]:
        """The caller's batches, the newest first. `after`: id of the last one of the previous page."""
        page = self._one(self._stub.ListBatches, list_batches_message(limit, after), timeout_s)
        return [from_batch(each) for each in page.batches]

    def cancel(self, batch_id: str, *, timeout_s: float | None = None) -> Batch:
        """Starts to cancel. Results that exist are kept."""
        return from_batch(self._one(self._stub.CancelBatch, cancel_batch_message(batch_id), timeout_s).batch)

    def wait(self, batch_id: str, *, poll_s: float = 1.0, timeout_s: float | None = None) -> Batch:
        """Waits for the end. Raises DeadlineError after `timeout_s`; None: waits until the batch's window is over."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not (batch := self.get(batch_id)).has_ended:
            if until_s is not None and time.monotonic() + poll_s > until_s:
                raise DeadlineError(f"{batch_id} has not ended yet")
            time.sleep(poll_s)
        return batch

    def results(self, batch_id: str, *, timeout_s: float | None = None) -> Stream[BatchAnswer]:
        """The answers of a batch that has ended, one per request."""
        message = batch_results_message(batch_id)
        return self._stream(self._stub.ListBatchResults, message, from_batch_result, timeout_s=timeout_s)
