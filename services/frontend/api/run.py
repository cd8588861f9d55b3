"""Runs the prepared requests of one API call, and how their answers are read."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from kvmesh.core import TokenLogprob, Usage
from kvmesh.errors import MeshError
from services.frontend.api.answer_reader import Reading, reading_of
from services.frontend.api.openai.asked import Asked
from services.frontend.api.openai.bodies import sum_usage
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.pipeline.prepare import Prepared
from services.frontend.pipeline.request import AnswerSink, Conversation, Ending, RequestResult

WARNING_HEADER = "X-Kvmesh-Warning"


class RunContext(Protocol):
    """What `run_all` needs and records: an HTTP exchange, or an attempt at a line of a batch."""

    pipeline: Pipeline
    began_s: float
    usage: Usage
    ttft_s: float | None


def reading_for(asked: Asked, prepared: Sequence[Prepared]) -> Reading | None:
    """The parsers of a chat's answer. None for completions, and where the text needs no parser."""
    request, first = asked.requests[0], prepared[0]
    if not isinstance(request.prompt, Conversation):
        return None
    return reading_of(
        first.model,
        request.prompt,
        first.generation.token_ids,
        request_id=request.request_id,
        choices=asked.choices,
        parses_tools=asked.parses_tools,
        includes_reasoning=asked.includes_reasoning,
        constraint=first.generation.sampling.constraint,
    )


def warning_headers(reading: Reading | None) -> dict[str, str]:
    """Warnings about the answer's tool calls, for a response whose head is not sent yet."""
    return {WARNING_HEADER: ", ".join(reading.warnings)} if reading is not None and reading.warnings else {}


async def run_all(
    context: RunContext, prepared: Sequence[Prepared], outlet: AnswerSink, reading: Reading | None = None
) -> None:
    """Runs one request per prompt and records the totals in `context`. The first failure ends all of them."""
    if len(prepared) == 1:
        answers = [await context.pipeline.run(prepared[0], outlet, began_s=context.began_s)]
    else:
        answers = await _run_several(context, prepared, outlet)
    context.ttft_s = min((answer.ttft_s for answer in answers if answer.ttft_s is not None), default=None)
    usage = sum_usage([answer.usage for answer in answers])
    context.usage = usage if reading is None else reading.counted(usage)


async def _run_several(context: RunContext, prepared: Sequence[Prepared], outlet: AnswerSink) -> list[RequestResult]:
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(
                    context.pipeline.run(
                        each, _ShiftedOutlet(outlet, i * each.request.choices), began_s=context.began_s
                    )
                )
                for i, each in enumerate(prepared)
            ]
    except* MeshError as errors:
        first = errors.exceptions[0]
        while isinstance(first, ExceptionGroup):
            first = first.exceptions[0]
        failure = first
    else:
        return [task.result() for task in running]
    raise failure


class _ShiftedOutlet:
    """The outlet of one prompt of several. Its choices are numbered from `first` on."""

    def __init__(self, outlet: AnswerSink, first: int) -> None:
        self._outlet = outlet
        self._first = first
        self.is_whole = outlet.is_whole

    def on_restart(self, choice: int) -> None:
        """See AnswerSink."""
        self._outlet.on_restart(self._first + choice)

    def on_text(
        self, choice: int, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        """See AnswerSink."""
        self._outlet.on_text(self._first + choice, text, token_ids, logprobs)

    def on_prompt(self, choice: int, entries: Sequence[TokenLogprob]) -> None:
        """See AnswerSink."""
        self._outlet.on_prompt(self._first + choice, entries)

    def on_end(self, choice: int, ending: Ending) -> None:
        """See AnswerSink."""
        self._outlet.on_end(self._first + choice, ending)
