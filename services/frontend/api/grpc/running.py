"""Runs requests of gRPC clients, whose servicers read the answer at the pace of the client."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager

from kvmesh.core import TokenLogprob
from kvmesh.errors import MeshError
from kvmesh.rpc.http_status import http_status
from services.frontend.api.answer_blocks import AnswerUpdate
from services.frontend.api.run import CLIENT_GONE, RequestContext
from services.frontend.pipeline.request import Ending, Request


class PullSink:
    """Answer sink whose consumer takes updates at its own pace. Updates that wait are merged into one per choice.

    With `is_whole` the consumer takes nothing before the request has succeeded, so that the answer can restart.
    """

    def __init__(self, *, is_whole: bool) -> None:
        self.is_whole = is_whole
        self._updates: dict[int, AnswerUpdate] = {}
        self._wakeup = asyncio.Event()

    def on_text(
        self, choice: int, text: str, token_ids: Sequence[int], *, logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        self._of(choice).add(text, token_ids, logprobs)
        if not self.is_whole:
            self._wakeup.set()

    def on_restart(self, choice: int) -> None:
        self._updates.pop(choice, None)

    def on_prompt(self, choice: int, entries: Sequence[TokenLogprob]) -> None:
        self._of(choice).prompt_logprobs = entries

    def on_end(self, choice: int, ending: Ending) -> None:
        self._of(choice).ending = ending
        self._wakeup.set()

    def _of(self, choice: int) -> AnswerUpdate:
        update = self._updates.get(choice)
        if update is None:
            update = self._updates[choice] = AnswerUpdate(choice=choice)
        return update

    def take(self) -> list[AnswerUpdate]:
        """Returns and removes the pending updates, at most one per choice."""
        self._wakeup.clear()
        ready, self._updates = list(self._updates.values()), {}
        return ready

    def wake(self) -> None:
        """Ends the current or the next `wait`."""
        self._wakeup.set()

    async def wait(self) -> None:
        """Waits until there may be an update, or for `wake`."""
        await self._wakeup.wait()


class RunningRequest:
    """Runs a request in a separate task, so that its updates can be read while it runs. Leaving the context cancels the task."""

    def __init__(self, context: RequestContext, request: Request, *, is_stream: bool, path: str = "grpc") -> None:
        self._context = context
        self._request = request
        self._path = path
        self._sink = PullSink(is_whole=not is_stream)

    async def __aenter__(self) -> "RunningRequest":
        context = self._context
        await context.pipeline.starts.wait(context.caller.tenant)
        try:
            self.prepared = await context.prepare(self._request)
        except MeshError as error:
            account_rpc(context, error, path=self._path)
            raise
        run = context.pipeline.run(self.prepared, self._sink, began_s=context.began_s)
        self._task = asyncio.create_task(run, name=f"request {context.request_id}")
        # Cheaper than `asyncio.wait` on the task and the sink, which would create a task per update.
        self._task.add_done_callback(lambda _: self._sink.wake())
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if not self._task.done():
                self._task.cancel()
                await asyncio.wait({self._task})
        finally:
            account_rpc(self._context, error, path=self._path)

    async def updates(self) -> AsyncIterator[AnswerUpdate]:
        """Yields updates until the request ends, and then records its totals. Raises its failure, if any.

        The updates of a whole answer come after the request has succeeded.
        """
        task = self._task
        if self._sink.is_whole:
            await asyncio.wait({task})
            task.result()
        while not task.done():
            for update in self._sink.take():
                yield update
            await self._sink.wait()
        for update in self._sink.take():
            yield update
        result = task.result()
        self._context.usage, self._context.ttft_s = result.usage, result.ttft_s


@contextmanager
def accounted(context: RequestContext) -> Iterator[None]:
    """Counts and logs a request that runs without a RunningRequest."""
    try:
        yield
    except BaseException as error:
        account_rpc(context, error)
        raise
    account_rpc(context, None)


def account_rpc(context: RequestContext, error: BaseException | None, *, path: str = "grpc") -> None:
    """Counts and logs a request that has ended."""
    code, reason = 200, "ok"
    if isinstance(error, MeshError):
        code, reason = http_status(error)[0], error.reason
    elif isinstance(error, asyncio.CancelledError | GeneratorExit):
        code, reason = CLIENT_GONE, "client_gone"
    elif error is not None:
        code, reason = 500, "internal"
    context.account(path=path, code=code, reason=reason)
