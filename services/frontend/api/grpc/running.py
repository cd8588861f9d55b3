"""A request of a gRPC client while it runs: its text is taken as it comes, and its end is accounted for."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from kvmesh.core import Usage
from kvmesh.errors import MeshError
from kvmesh.rpc.http_status import http_status
from services.frontend.api.grpc.answering import News, PulledOutlet
from services.frontend.metrics import UNKNOWN_MODEL
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.pipeline.prepare import Prepared
from services.frontend.pipeline.request import Request, RequestResult

_log = logging.getLogger(__name__)


class Running:
    """A request in a task of its own, so that its text can be taken while it runs. Leaving cancels what is left of it."""

    def __init__(
        self, pipeline: Pipeline, request: Request, *, is_stream: bool, began_s: float, path: str = "grpc"
    ) -> None:
        self._pipeline = pipeline
        self._request = request
        self._began_s = began_s
        self._path = path
        self._outlet = PulledOutlet(is_whole=not is_stream)
        self._task: asyncio.Task[RequestResult] | None = None
        self._prepared: Prepared | None = None

    @property
    def prepared(self) -> Prepared:
        """The request as it was submitted."""
        assert self._prepared is not None
        return self._prepared

    @property
    def answer(self) -> RequestResult:
        """Totals, once `news` has ended."""
        assert self._task is not None
        return self._task.result()

    async def __aenter__(self) -> "Running":
        try:
            self._prepared = await self._pipeline.prepare(self._request, began_s=self._began_s)
        except MeshError as error:
            self._account(error)
            raise
        run = self._pipeline.run(self._prepared, self._outlet, began_s=self._began_s)
        self._task = asyncio.create_task(run, name=f"request {self._request.request_id}")
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        assert self._task is not None
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})
        self._account(error)

    async def news(self) -> AsyncIterator[News]:
        """What is new, as long as there is something. Raises the request's failure after what came before it.

        Of a whole answer nothing is new before the request has ended well.
        """
        task = self._task
        assert task is not None
        if self._outlet.is_whole:
            await asyncio.wait({task})
            task.result()
        while True:
            for news in self._outlet.take():
                yield news
            if task.done():
                break
            await self._outlet.wait(task)
        for news in self._outlet.take():
            yield news
        task.result()

    def _account(self, error: BaseException | None) -> None:
        is_answered = error is None and self._task is not None
        account(
            self._pipeline,
            self._request.request_id,
            model=UNKNOWN_MODEL if self._prepared is None else self._prepared.model.name,
            usage=self.answer.usage if is_answered else Usage(),
            error=error,
            began_s=self._began_s,
            path=self._path,
        )


@contextmanager
def accounted(pipeline: Pipeline, request: Request, began_s: float) -> Iterator[list[Usage]]:
    """Counts and logs a request that gives no text; what it used is put into the list."""
    used: list[Usage] = []
    failure: BaseException | None = None
    try:
        yield used
    except BaseException as error:
        failure = error
        raise
    finally:
        model = request.model if used else UNKNOWN_MODEL
        usage = used[0] if used else Usage()
        account(pipeline, request.request_id, model=model, usage=usage, error=failure, began_s=began_s)


def account(
    pipeline: Pipeline,
    request_id: str,
    *,
    model: str,
    usage: Usage,
    error: BaseException | None,
    began_s: float,
    path: str = "grpc",
) -> None:
    """Counts and logs a request that has ended, once."""
    code, reason = 200, "ok"
    if isinstance(error, MeshError):
        code, reason = http_status(error)[0], error.reason
    elif isinstance(error, asyncio.CancelledError | GeneratorExit):
        code, reason = 499, "client_gone"
    elif error is not None:
        code, reason = 500, "internal"
    pipeline.metrics.requests.of(model, str(code)).value += 1
    if not _log.isEnabledFor(logging.INFO):
        return
    data = {
        "request_id": request_id,
        "path": path,
        "model": model,
        "code": code,
        "reason": reason,
        "prompt_tokens": usage.prompt_tokens,
        "output_tokens": usage.output_tokens,
        "duration_s": round(pipeline.clock.now() - began_s, 6),
    }
    _log.info("request_finished", extra={"data": data})
