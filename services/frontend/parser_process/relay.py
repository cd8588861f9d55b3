"""Between the pipeline and an outlet: an answer's text goes to the parser process, and on with what it made of it.

Outlets stay as they are: they ask their parser for the parts of a text, and this one has them already.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kvmesh.clock import awake_timeout
from kvmesh.core import TokenLogprob
from kvmesh.errors import DeadlineError, MeshError
from services.frontend.parser_process.process import ParserProcess
from services.frontend.parsers.parts import CallArguments, CallBegin, Part, Reasoning
from services.frontend.pipeline.request import AnswerSink, Conversation, Ending


class RemoteParser:
    """What a Reading asks for the parts of one choice. They are put in before the outlet hears of their text."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forgets all parts: the answer begins anew."""
        self._parts: list[Part] = []
        self.calls = 0
        self.reasoning_tokens = 0

    def put(self, parts: Sequence[Sequence[Any]], tokens: int) -> None:
        """A reply of the process to a text of so many tokens."""
        found = [_part(each) for each in parts]
        self._parts += found
        self.calls += sum(isinstance(part, CallBegin) for part in found)
        if any(isinstance(part, Reasoning) for part in found):
            self.reasoning_tokens += tokens

    def push(self, text: str, tokens: int = 0) -> Sequence[Part]:
        """The parts that came."""
        return self.flush()

    def flush(self) -> Sequence[Part]:
        """The parts that came."""
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
            return CallBegin(int(values[0]), str(values[1]), str(values[2]))
    return CallArguments(int(values[0]), str(values[1]))


@dataclass(slots=True, kw_only=True)
class _Piece:
    """Text of one choice that waits for the process, or is with it."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    ending: Ending | None = None


class _ChoiceRelay:
    """One choice. At most one message is with the process; meanwhile text is collected, bounded by max_tokens."""

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
        if self._sent is not None or self._relay.has_failed or not (piece.texts or piece.ending):
            return
        self._sent, self._waiting = piece, _Piece()
        text, is_last = "".join(piece.texts), piece.ending is not None
        self._relay.process.push_nowait(self.session, text, piece.token_ids, is_last=is_last)

    def on_reply(self, parts: Sequence[Sequence[Any]]) -> None:
        """What came of the text that was sent goes on with it."""
        piece, self._sent = self._sent, None
        assert piece is not None, "there is one reply for each text"
        self._parser.put(parts, len(piece.token_ids))
        outlet = self._relay.outlet
        if piece.token_ids or parts:
            outlet.on_text(self._number, "".join(piece.texts), piece.token_ids, piece.logprobs)
        if piece.ending is not None:
            self._relay.process.close_nowait(self.session)
            outlet.on_end(self._number, piece.ending)
            self.is_over = True
            self._relay.on_over()
        else:
            self._send()


class Relay:
    """An outlet in front of another one."""

    def __init__(
        self,
        outlet: AnswerSink,
        process: ParserProcess,
        parsers: Sequence[RemoteParser],
        conversation: Conversation,
        prompt_ids: Sequence[int],
        *,
        parses_tools: bool,
    ) -> None:
        self.outlet = outlet
        self.process = process
        self.is_whole = outlet.is_whole
        self._parsers = parsers
        self._conversation = conversation
        self._prompt_ids = prompt_ids
        self._parses_tools = parses_tools
        self._left = len(parsers)
        self._over = asyncio.Event()
        self._failure: MeshError | None = None
        self._choices: list[_ChoiceRelay] = []
        try:
            for number in range(len(parsers)):
                self._choices.append(self._open(number))
        except MeshError:
            self.close()
            raise

    def _open(self, number: int) -> _ChoiceRelay:
        """A session for a choice. Raises what `open_nowait` raises."""
        choice = _ChoiceRelay(number, self, self._parsers[number])
        choice.session = self.process.open_nowait(
            tools=self._conversation.tools, parses_tools=self._parses_tools, prompt_ids=self._prompt_ids,
            on_reply=choice.on_reply, on_failure=self._on_failure,
        )  # fmt: skip
        return choice

    def on_restart(self, choice: int) -> None:
        """See AnswerSink. The choice gets a new session; replies of the old one reach nobody."""
        old = self._choices[choice]
        self.process.close_nowait(old.session)
        if old.is_over:
            self._left += 1
            if self._failure is None:
                self._over.clear()
        self._parsers[choice].restart()
        self.outlet.on_restart(choice)
        self._choices[choice] = self._open(choice)

    def on_text(
        self, choice: int, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        """See AnswerSink."""
        self._choices[choice].add(text, token_ids, logprobs)

    def on_prompt(self, choice: int, entries: Sequence[TokenLogprob]) -> None:
        """See AnswerSink."""
        self.outlet.on_prompt(choice, entries)

    def on_end(self, choice: int, ending: Ending) -> None:
        """See AnswerSink."""
        self._choices[choice].end(ending)

    def on_over(self) -> None:
        """A choice has gone to the outlet wholly."""
        self._left -= 1
        if not self._left:
            self._over.set()

    @property
    def has_failed(self) -> bool:
        """True when what comes now is not read any more: the request fails when its workers have ended."""
        return self._failure is not None

    def _on_failure(self, error: MeshError) -> None:
        self._failure = self._failure or error
        self._over.set()

    async def wait_over(self) -> None:
        """Until all that came has gone to the outlet. Raises what the process failed with."""
        try:
            async with awake_timeout(self.process.reply_timeout_s):
                await self._over.wait()
        except TimeoutError:
            raise DeadlineError("the parser process does not answer", reason="parser_timeout") from None
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Forgets the sessions. Idempotent."""
        for choice in self._choices:
            self.process.close_nowait(choice.session)


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True, eq=False)
class RemoteAnswer:
    """What is needed to read one request's answer in the process."""

    process: ParserProcess
    parsers: Sequence[RemoteParser]
    conversation: Conversation
    prompt_ids: Sequence[int]
    parses_tools: bool

    @asynccontextmanager
    async def relayed(self, outlet: AnswerSink) -> AsyncIterator[AnswerSink]:
        """An outlet that goes by way of the process. Leaving waits for the process to be done, or gives up on a failure."""
        relay = Relay(
            outlet, self.process, self.parsers, self.conversation, self.prompt_ids, parses_tools=self.parses_tools
        )
        try:
            yield relay
            await relay.wait_over()
        finally:
            relay.close()


@asynccontextmanager
async def relayed(process: ParserProcess, request_id: str, outlet: AnswerSink) -> AsyncIterator[AnswerSink]:
    """The outlet of a request, behind the process if its answer is read there."""
    answer = process.answers.get(request_id)
    if answer is None:
        yield outlet
        return
    async with answer.relayed(outlet) as relay:
        yield relay
