"""See the package. Results are read from queues that the engine fills."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from tensorrt_llm.disaggregated_params import DisaggregatedParams


@dataclass(slots=True)
class Logprob:
    """See the stub."""

    logprob: float
    rank: int | None = None


@dataclass(slots=True)
class CompletionOutput:
    """See the stub."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    disaggregated_params: DisaggregatedParams | None = None
    _before: int = 0

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._before :]


@dataclass(slots=True, kw_only=True)
class Response:
    """The output of one step for a request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    params: DisaggregatedParams | None = None
    cached_tokens: int = 0
    error: str | None = None


class GenerationResult:
    """See the stub."""

    cached_tokens: int

    def __init__(self, number: int, on_abort: Callable[[int], None]) -> None:
        self._number = number
        self._on_abort = on_abort
        self._responses: asyncio.Queue[Response | BaseException] = asyncio.Queue()
        self._output = CompletionOutput(0)
        self._is_done = False
        self._is_aborted = False
        self._error: str | None = None
        self.cached_tokens = 0

    @property
    def request_id(self) -> int:
        return self._number

    @property
    def outputs(self) -> list[CompletionOutput]:
        return [self._output]

    @property
    def finished(self) -> bool:
        return self._is_done

    @property
    def error(self) -> str | None:
        return self._error

    def abort(self) -> None:
        self._on_abort(self._number)
        self._is_aborted = True

    def aborted(self) -> bool:
        return self._is_aborted

    def __aiter__(self) -> AsyncIterator["GenerationResult"]:
        return self

    async def __anext__(self) -> "GenerationResult":
        if self._is_done:
            raise StopAsyncIteration
        response = await self._responses.get()
        if isinstance(response, BaseException):
            raise response
        output = self._output
        output._before = len(output.token_ids)
        output.token_ids += response.token_ids
        output.logprobs += response.logprobs
        output.prompt_logprobs = response.prompt_logprobs or output.prompt_logprobs
        output.finish_reason, output.stop_reason = response.finish_reason, response.stop_reason
        output.disaggregated_params = response.params
        self.cached_tokens = response.cached_tokens
        self._error = response.error
        self._is_done = response.finish_reason is not None or response.error is not None
        return self

    def _put(self, response: Response | BaseException) -> None:
        self._responses.put_nowait(response)


class IterationResult:
    """See the stub."""

    def __init__(self, entries: deque[dict[str, Any]], timeout_s: float) -> None:
        self._entries = entries
        self._timeout_s = timeout_s

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        return self

    async def __anext__(self) -> dict[str, Any]:
        if not self._entries:
            await asyncio.sleep(self._timeout_s)
        if not self._entries:
            raise StopAsyncIteration
        return self._entries.popleft()
