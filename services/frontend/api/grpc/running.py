"""A request of a gRPC client while it runs: the servicer takes its text at the client's pace, and its end is counted and logged."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvmesh.core import TokenLogprob, Usage
from kvmesh.errors import MeshError
from kvmesh.rpc.http_status import http_status
from services.frontend.metrics import UNKNOWN_MODEL
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.pipeline.prepare import Prepared
from services.frontend.pipeline.request import Ending, Request, RequestResult

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class AnswerUpdate:
    """The text, tokens and ending of one choice since its last update."""

    choice: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: Sequence[TokenLogprob] | None = None
    ending: Ending | None = None

    @property
    def text(self) -> str:
        """The new text, joined."""
        return "".join(self.texts)


class PullOutlet:
    """An outlet whose consumer takes updates at its own pace. What it has not taken yet is merged into one update per choice.

    With `is_whole` the consumer takes nothing before the request has ended well, so that the answer can begin anew.
    """

    def __init__(self, *, is_whole: bool) -> None:
        self.is_whole = is_whole
        self._updates: dict[int, AnswerUpdate] = {}
        self._wakeup = asyncio.Event()

    def on_text(
        self, choice: int, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        """See AnswerSink."""
        update = self._of(choice)
        update.texts.append(text)
        update.token_ids.extend(token_ids)
        if logprobs is not None:
            update.logprobs = [*(update.logprobs or ()), *logprobs]
        if not self.is_whole:
            self._wakeup.set()

    def on_restart(self, choice: int) -> None:
        """See AnswerSink."""
        self._updates.pop(choice, None)

    def on_prompt(self, choice: int, entries: Sequence[TokenLogprob]) -> None:
        """See AnswerSink."""
        self._of(choice).prompt_logprobs = entries

    def on_end(self, choice: int, ending: Ending) -> None:
        """See AnswerSink."""
        self._of(choice).ending = ending
        self._wakeup.set()

    def _of(self, choice: int) -> AnswerUpdate:
        update = self._updates.get(choice)
        if update is None:
            update = self._updates[choice] = AnswerUpdate(choice=choice)
        return update

    def take(self) -> list[AnswerUpdate]:
        """Returns and forgets the pending updates, at most one per choice."""
        self._wakeup.clear()
        ready, self._updates = list(self._updates.values()), {}
        return ready

    async def wait(self, running: "asyncio.Task[object]") -> None:
        """Waits until there may be an update, or `running` has ended."""
        waiting = asyncio.ensure_future(self._wakeup.wait())
        try:
            await asyncio.wait({waiting, running}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()


class RunningRequest:
    """Runs a request in a task of its own, so that its updates can be read meanwhile. Leaving the context cancels the task."""

    def __init__(
        self, pipeline: Pipeline, request: Request, *, is_stream: bool, began_s: float, path: str = "grpc"
    ) -> None:
        self._pipeline = pipeline
        self._request = request
        self._began_s = began_s
        self._path = path
        self._outlet = PullOutlet(is_whole=not is_stream)
        self._task: asyncio.Task[RequestResult] | None = None
        self._prepared: Prepared | None = None

    @property
    def prepared(self) -> Prepared:
        """The request as it was submitted."""
        assert self._prepared is not None
        return self._prepared

    @property
    def answer(self) -> RequestResult:
        """Totals, once `updates` has ended."""
        assert self._task is not None
        return self._task.result()

    async def __aenter__(self) -> "RunningRequest":
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

    async def updates(self) -> AsyncIterator[AnswerUpdate]:
        """Yields updates until the request ends; then raises its failure, if any.

        The updates of a whole answer come after the request has ended well.
        """
        task = self._task
        assert task is not None
        if self._outlet.is_whole:
            await asyncio.wait({task})
            task.result()
        while True:
            for update in self._outlet.take():
                yield update
            if task.done():
                break
            await self._outlet.wait(task)
        for update in self._outlet.take():
            yield update
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
    """Counts and logs a request without text. The caller appends its usage to the list."""
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
