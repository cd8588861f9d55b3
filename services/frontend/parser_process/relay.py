"""Passes the text of an answer to the parser process before the sink receives it.

The sink asks its parser for the parts of each text. `RemoteParser` already has them when the text reaches the sink.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kvmesh.clock import awake_timeout
from kvmesh.core import TokenLogprob
from kvmesh.errors import DeadlineError, MeshError
from services.frontend.parser_process.process import REPLY_TIMEOUT_S, ParserProcess
from services.frontend.parsers.parts import CallArguments, CallBegin, Part, Reasoning
from services.frontend.pipeline.request import AnswerSink, Conversation, Ending


class RemoteParser:
    """Holds the parts of one choice until the sink asks for them."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Drops all parts, because the request is placed again."""
        self._parts: list[Part] = []
        self.calls = 0
        self.reasoning_tokens = 0

    def put(self, parts: Sequence[Sequence[Any]], tokens: int) -> None:
        """Adds the process's reply to a text of `tokens` tokens."""
        found = [_part(each) for each in parts]
        self._parts += found
        self.calls += sum(isinstance(part, CallBegin) for part in found)
        if any(isinstance(part, Reasoning) for part in found):
            self.reasoning_tokens += tokens

    def push(self, text: str, tokens: int = 0) -> Sequence[Part]:
        """Returns the parts since the last call."""
        return self.flush()

    def flush(self) -> Sequence[Part]:
        """Returns the parts since the last call."""
        parts, self._parts = self._parts, []
        return parts


def _part(each: Sequence[Any]) -> Part:
    kind, *values = each
    match kind:
        case "content":
            return str(values[0])
        case "reasoning":
            return Reasoning(str(values[0]))
        case "begin":
            return CallBegin(number=int(values[0]), name=str(values[1]), call_id=str(values[2]))
    return CallArguments(int(values[0]), str(values[1]))


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True, eq=False)
class RemoteAnswer:
    """An answer that the process parses. `parsers`: one per choice."""

    process: ParserProcess
    parsers: Sequence[RemoteParser]
    conversation: Conversation
    prompt_ids: Sequence[int]
    parses_tools: bool


@asynccontextmanager
async def relayed(process: ParserProcess, request_id: str, sink: AnswerSink) -> AsyncIterator[AnswerSink]:
    """Returns a sink in front of the request's sink, which it passes the answer on to; the same sink if nothing is parsed.

    Leaving the context waits until the sink has received everything. Raises the failure of the process.
    """
    answer = process.answers.get(request_id)
    if answer is None:
        yield sink
        return
    relay = Relay(answer, sink)
    try:
        relay.open()
        yield relay
        await relay.wait_over()
    finally:
        relay.close()


@dataclass(slots=True, kw_only=True)
class _Piece:
    """Text of one choice that waits for the process, or was sent to it."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    ending: Ending | None = None


class _ChoiceRelay:
    """One choice. At most one message waits for its reply. Until the reply, text is collected, bounded by max_tokens."""

    def __init__(self, number: int, relay: "Relay", parser: RemoteParser) -> None:
        self._number = number
        self._relay = relay
        self._parser = parser
        self.session = ""
        self.is_over = False
        self._waiting = _Piece()
        self._sent: _Piece | None = None

    def add(self, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None:
        if text:
            self._waiting.texts.append(text)
        self._waiting.token_ids.extend(token_ids)
        if logprobs is not None:
            self._waiting.logprobs = [*(self._waiting.logprobs or ()), *logprobs]
        self._send()

    def end(self, ending: Ending) -> None:
        self._waiting.ending = ending
        self._send()

    def _send(self) -> None:
        piece = self._waiting
        # Tokens without text wait for the next text or the end.
        if self._sent is not None or self._relay.failure is not None or not (piece.texts or piece.ending):
            return
        self._sent, self._waiting = piece, _Piece()
        text, is_last = "".join(piece.texts), piece.ending is not None
        self._relay.process.push_nowait(self.session, text=text, ids=piece.token_ids, is_last=is_last)

    def on_reply(self, parts: Sequence[Sequence[Any]]) -> None:
        """Passes the text that was sent on to the sink, and its parts to the parser."""
        piece, self._sent = self._sent, None
        assert piece is not None, "there is one reply for each text"
        # Before `on_text`, in which the sink takes the parts from the parser.
        self._parser.put(parts, len(piece.token_ids))
        sink = self._relay.sink
        if piece.token_ids or parts:
            sink.on_text(self._number, "".join(piece.texts), piece.token_ids, logprobs=piece.logprobs)
        if piece.ending is None:
            self._send()
            return
        self._relay.process.close_nowait(self.session)
        sink.on_end(self._number, piece.ending)
        self.is_over = True
        self._relay.on_choice_over()


class Relay:
    """An AnswerSink in front of another one. `open` it first."""

    def __init__(self, answer: RemoteAnswer, sink: AnswerSink) -> None:
        self.sink = sink
        self.process = answer.process
        self.is_whole = sink.is_whole
        self.failure: MeshError | None = None
        """Once set, the rest of the answer is not parsed; the request fails when its workers have ended."""
        self._answer = answer
        self._left = len(answer.parsers)
        self._over = asyncio.Event()
        self._choices: list[_ChoiceRelay] = []

    def open(self) -> None:
        """Opens a session for each choice. Raises what `open_nowait` raises."""
        for number in range(len(self._answer.parsers)):
            self._choices.append(self._open_choice(number))

    def _open_choice(self, number: int) -> _ChoiceRelay:
        choice = _ChoiceRelay(number, self, self._answer.parsers[number])
        choice.session = self.process.open_nowait(
            tools=self._answer.conversation.tools,
            parses_tools=self._answer.parses_tools,
            prompt_ids=self._answer.prompt_ids,
            on_reply=choice.on_reply,
            on_failure=self._on_failure,
        )
        return choice

    def on_restart(self, choice: int) -> None:
        """See AnswerSink. The choice gets a new session; replies to the old one are dropped."""
        old = self._choices[choice]
        self.process.close_nowait(old.session)
        if old.is_over:
            # The choice had ended and was counted.
            self._left += 1
            if self.failure is None:
                self._over.clear()
        self._answer.parsers[choice].restart()
        self.sink.on_restart(choice)
        self._choices[choice] = self._open_choice(choice)

    def on_text(
        self, choice: int, text: str, token_ids: Sequence[int], *, logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        """See AnswerSink."""
        self._choices[choice].add(text, token_ids, logprobs)

    def on_prompt(self, choice: int, entries: Sequence[TokenLogprob]) -> None:
        """See AnswerSink."""
        self.sink.on_prompt(choice, entries)

    def on_end(self, choice: int, ending: Ending) -> None:
        """See AnswerSink."""
        self._choices[choice].end(ending)

    def on_choice_over(self) -> None:
        """Counts a choice whose end the sink has received."""
        self._left -= 1
        if not self._left:
            self._over.set()

    def _on_failure(self, error: MeshError) -> None:
        self.failure = self.failure or error
        self._over.set()

    async def wait_over(self) -> None:
        """Waits until the sink has received everything. Raises the failure of the process."""
        try:
            async with awake_timeout(REPLY_TIMEOUT_S):
                await self._over.wait()
        except TimeoutError:
            raise DeadlineError("the parser process does not answer", reason="parser_timeout") from None
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Closes the sessions. Idempotent."""
        for choice in self._choices:
            self.process.close_nowait(choice.session)
