"""The blocks of an answer (text, reasoning, tool calls), and the sink that collects a whole answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import orjson

from kvmesh.core import FinishReason, TokenLogprob
from services.frontend.api.answer_reader import AnswerReader
from services.frontend.parsers.parts import CallArguments, CallBegin, Part, Reasoning
from services.frontend.pipeline.request import Ending


@dataclass(slots=True, kw_only=True)
class AnswerUpdate:
    """The text, tokens and ending of one choice since the last update that its client has taken."""

    choice: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: Sequence[TokenLogprob] | None = None
    ending: Ending | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None:
        self.texts.append(text)
        self.token_ids.extend(token_ids)
        if logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *logprobs]


class BlockKind(StrEnum):
    """What a block contains. The text of a call is its arguments."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(slots=True, kw_only=True)
class Block:
    """One block. `number` counts the blocks of a choice from 0; `name` and `call_id` belong to a call."""

    kind: BlockKind
    number: int
    name: str = ""
    call_id: str = ""
    texts: list[str]
    is_over: bool = False

    @property
    def text(self) -> str:
        return "".join(self.texts)


class BlockListener(Protocol):
    """Receives the progress of blocks. A block begins, gets its text and ends before the next one begins."""

    def on_begin(self, block: Block) -> None: ...

    def on_delta(self, block: Block, text: str) -> None:
        """`text` is never empty and already part of the block."""
        ...

    def on_end(self, block: Block) -> None: ...


class AnswerBlocks:
    """The blocks of one choice so far."""

    def __init__(self, reader: AnswerReader, choice: int, listener: BlockListener | None = None) -> None:
        self._reader = reader
        self._choice = choice
        self._listener = listener
        self.all: list[Block] = []
        self.calls: list[Block] = []

    def push(self, text: str, tokens: int) -> None:
        """Adds text of the answer, which comes from `tokens` tokens."""
        if self._reader.is_plain:
            # Saves five calls per token.
            self._add_text(BlockKind.TEXT, text)
            return
        for part in self._reader.push(self._choice, text, tokens):
            self._add(part)

    def flush(self) -> None:
        """Ends the last block. An answer without any part is an empty text, because clients expect one."""
        for part in self._reader.flush(self._choice):
            self._add(part)
        if not self.all:
            self._begin(BlockKind.TEXT)
        self._end()

    def _add(self, part: Part) -> None:
        match part:
            case str():
                self._add_text(BlockKind.TEXT, part)
            case Reasoning():
                self._add_text(BlockKind.REASONING, part.text)
            case CallBegin():
                call_id = self._reader.call_id(self._choice, part)
                self.calls.append(self._begin(BlockKind.CALL, name=part.name, call_id=call_id))
            case CallArguments():
                self._append(self.calls[part.number], part.text)

    def _add_text(self, kind: BlockKind, text: str) -> None:
        if text:
            block = self.all[-1] if self.all else None
            self._append(block if block is not None and block.kind is kind else self._begin(kind), text)

    def _append(self, block: Block, text: str) -> None:
        if text:
            block.texts.append(text)
            if self._listener is not None:
                self._listener.on_delta(block, text)

    def _begin(self, kind: BlockKind, *, name: str = "", call_id: str = "") -> Block:
        self._end()
        block = Block(kind=kind, number=len(self.all), name=name, call_id=call_id, texts=[])
        self.all.append(block)
        if self._listener is not None:
            self._listener.on_begin(block)
        return block

    def _end(self) -> None:
        if self.all and not self.all[-1].is_over:
            self.all[-1].is_over = True
            if self._listener is not None:
                self._listener.on_end(self.all[-1])

    def text_of(self, kind: BlockKind) -> str:
        """Returns the text of all blocks of a kind."""
        return "".join([block.text for block in self.all if block.kind is kind])


class CollectedChoice:
    """One choice of a whole answer."""

    def __init__(self, reader: AnswerReader, choice: int) -> None:
        self.blocks = AnswerBlocks(reader, choice)
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: Sequence[TokenLogprob] = ()
        # A request that succeeds ends every choice.
        self.ending = Ending(reason=FinishReason.LENGTH)


class AnswerCollector:
    """Answer sink that keeps the whole answer. The choices of all prompts are numbered in one sequence."""

    is_whole = True

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self.choices = [CollectedChoice(reader, choice) for choice in range(reader.choices)]

    def on_restart(self, choice: int) -> None:
        self._reader.restart(choice)
        self.choices[choice] = CollectedChoice(self._reader, choice)

    def on_text(
        self, choice: int, text: str, token_ids: Sequence[int], *, logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        collected = self.choices[choice]
        collected.blocks.push(text, len(token_ids))
        collected.token_ids.extend(token_ids)
        if logprobs:
            collected.logprobs.extend(logprobs)

    def on_prompt(self, choice: int, entries: Sequence[TokenLogprob]) -> None:
        self.choices[choice].prompt_logprobs = entries

    def on_end(self, choice: int, ending: Ending) -> None:
        collected = self.choices[choice]
        collected.ending = ending
        collected.blocks.flush()


class BlockEvents:
    """Base of the event encoders of APIs that stream typed blocks. Their answers have one choice."""

    plain: Sequence[tuple[bytes, ...]] | None = None

    def __init__(self, reader: AnswerReader) -> None:
        self._blocks = AnswerBlocks(reader, 0, self)
        self._ending: Ending | None = None
        self._pending: list[bytes] = []

    def _put(self, kind: str, **values: object) -> None:
        self._pending.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **values})))

    def _take(self) -> bytes:
        data = b"".join(self._pending)
        self._pending.clear()
        return data

    def add_prompt_logprobs(self, choice: int, entries: Sequence[TokenLogprob]) -> None: ...

    def encode_text(
        self, choice: int, text: str, token_ids: Sequence[int], *, logprobs: Sequence[TokenLogprob] | None
    ) -> bytes:
        self._blocks.push(text, len(token_ids))
        return self._take()

    def end_choice(self, choice: int, ending: Ending) -> bytes:
        self._ending = ending
        self._blocks.flush()
        return self._take()

    def on_begin(self, block: Block) -> None:
        raise NotImplementedError

    def on_delta(self, block: Block, text: str) -> None:
        raise NotImplementedError

    def on_end(self, block: Block) -> None:
        raise NotImplementedError
