"""An API request while it is served: the parsed body, its context, and its run through the pipeline."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from kvmesh.core import TokenLogprob, Usage
from kvmesh.errors import InternalError
from kvmesh.event_log import event_logger
from kvmesh.lifecycle import run_together
from services.frontend.access.caller import Caller
from services.frontend.api.answer_reader import AnswerReader
from services.frontend.metrics import UNKNOWN_MODEL
from services.frontend.models import ServedModel
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.pipeline.prepare import Prepared
from services.frontend.pipeline.request import AnswerSink, Ending, Request, RequestResult

_log = event_logger(__name__)
WARNING_HEADER = "X-Kvmesh-Warning"
CLIENT_GONE = 499
"""nginx's status for a client that closed its connection before the answer was complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    """A parsed body. `requests`: one per prompt, all with the same number of choices. The rest is what the answer contains.

    `has_usage_throughout`: every event has the usage so far. `is_prompt_only`: the client wants nothing but the echo.
    `names_tokens_by_id`: log-probabilities have `token_id:N` for a token's text.
    """

    requests: Sequence[Request]
    is_stream: bool
    includes_usage: bool = False
    has_usage_throughout: bool = False
    has_logprobs: bool = False
    returns_token_ids: bool = False
    includes_reasoning: bool = True
    echoes: bool = False
    has_prompt_logprobs: bool = False
    is_prompt_only: bool = False
    names_tokens_by_id: bool = False

    @property
    def model(self) -> str:
        return self.requests[0].model

    @property
    def choices(self) -> int:
        """The number of choices over all prompts."""
        return len(self.requests) * self.requests[0].choices


@dataclass(slots=True, kw_only=True)
class RequestContext:
    """One API request. `model_name`, `usage` and `ttft_s` are recorded for the log and the metrics."""

    pipeline: Pipeline
    request_id: str
    began_s: float
    caller: Caller
    client_id: str = ""
    """The client's own id of the request, for the log."""
    model_name: str = ""
    usage: Usage = field(default_factory=Usage)
    ttft_s: float | None = None

    def find_model(self, name: str, *, adapter: str = "") -> ServedModel:
        """Returns and records a model. Raises NotFoundError, and UnavailableError if it has no workers."""
        # First, so that no error discloses a model that the caller may not use.
        self.caller.check_model(adapter or name)
        model = self.pipeline.models.find(name)
        self.model_name = model.name
        return model

    async def prepare(self, request: Request) -> Prepared:
        """Records the model and prepares the request. Raises errors of the client."""
        model = self.find_model(request.model, adapter=request.adapter)
        return await self.pipeline.prepare(request, model, caller=self.caller, began_s=self.began_s)

    async def tokenise(self, request: Request) -> "array[int]":
        """Returns the token ids of a request that is not run. Raises errors of the client."""
        model = self.find_model(request.model, adapter=request.adapter)
        return await self.pipeline.tokenise(request, model, caller=self.caller)

    def account(self, *, path: str, code: int, reason: str) -> None:
        """Counts and logs the request at its end."""
        model = self.model_name or UNKNOWN_MODEL
        self.pipeline.metrics.requests.of(model, str(code)).value += 1
        _log.info(
            "request_finished",
            request_id=self.request_id,
            client_id=self.client_id,
            path=path,
            model=model,
            code=code,
            reason=reason,
            prompt_tokens=self.usage.prompt_tokens,
            output_tokens=self.usage.output_tokens,
            cached_tokens=self.usage.cached_tokens,
            ttft_s=None if self.ttft_s is None else round(self.ttft_s, 6),
            duration_s=round(self.pipeline.clock.now() - self.began_s, 6),
        )

    def internal_error(self, error: Exception) -> InternalError:
        """Logs an unexpected exception. The client gets the request's id and no detail."""
        _log.error("request_defect", exc_info=error, request_id=self.request_id)
        return InternalError(f"internal error {self.request_id}", request_id=self.request_id)


async def run_all(
    context: RequestContext, prepared: Sequence[Prepared], sink: AnswerSink, *, reader: AnswerReader
) -> None:
    """Runs one request per prompt and records the totals in `context`. The first failure ends all of them."""
    if len(prepared) == 1:
        results = [await context.pipeline.run(prepared[0], sink, began_s=context.began_s)]
    else:
        results = await _run_several(context, prepared, sink)
    context.ttft_s = min((result.ttft_s for result in results if result.ttft_s is not None), default=None)
    context.usage = reader.add_reasoning_tokens(sum_usage([result.usage for result in results]))


async def _run_several(context: RequestContext, prepared: Sequence[Prepared], sink: AnswerSink) -> list[RequestResult]:
    sinks = [_OffsetSink(sink, i * each.request.choices) for i, each in enumerate(prepared)]
    runs = [
        context.pipeline.run(each, its_sink, began_s=context.began_s)
        for each, its_sink in zip(prepared, sinks, strict=True)
    ]
    return await run_together(*runs)


def first_failure(failures: BaseException) -> BaseException:
    """Returns the failure that ended a task group; the others are its consequences."""
    while isinstance(failures, BaseExceptionGroup):
        failures = failures.exceptions[0]
    return failures


def sum_usage(usages: Sequence[Usage]) -> Usage:
    """Totals over prompts."""
    if len(usages) == 1:
        return usages[0]
    return Usage(**{each.name: sum(getattr(usage, each.name) for usage in usages) for each in fields(Usage)})


class _OffsetSink:
    """Sink of one prompt of several. Its choices are numbered from `first`."""

    def __init__(self, sink: AnswerSink, first: int) -> None:
        self._sink = sink
        self._first = first
        self.is_whole = sink.is_whole

    def on_restart(self, choice: int) -> None:
        self._sink.on_restart(self._first + choice)

    def on_text(
        self, choice: int, text: str, token_ids: Sequence[int], *, logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        self._sink.on_text(self._first + choice, text, token_ids, logprobs=logprobs)

    def on_prompt(self, choice: int, entries: Sequence[TokenLogprob]) -> None:
        self._sink.on_prompt(self._first + choice, entries)

    def on_end(self, choice: int, ending: Ending) -> None:
        self._sink.on_end(self._first + choice, ending)
