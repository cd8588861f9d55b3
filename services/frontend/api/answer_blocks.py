"""An answer's text as blocks, as APIs with typed parts show it: text, reasoning and tool calls, one after the other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvmesh.core import TokenLogprob
from services.frontend.api.answer_reader import Reading
from services.frontend.parsers.parts import CallArguments, CallBegin, Part, Reasoning
from services.frontend.pipeline.request import Ending


class BlockKind(StrEnum):
    """What a block holds; a call's text is its arguments."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(slots=True, kw_only=True)
class Block:
    """One block. `number` counts blocks from 0; `name` and `call_id` are a call's."""

    kind: BlockKind
    number: int
    name: str = ""
    call_id: str = ""
    texts: list[str]
    is_over: bool = False

    @property
    def text(self) -> str:
        """All that came so far."""
        return "".join(self.texts)


class BlockSink(Protocol):
    """Hears how blocks come to be. Every block begins, gets its text and ends before the next begins."""

    def on_begin(self, block: Block) -> None:
        """A new block, without text yet."""
        ...

    def on_delta(self, block: Block, text: str) -> None:
        """More text, never empty; it is in `block.texts` already."""
        ...

    def on_end(self, block: Block) -> None:
        """The block is complete."""
        ...


class Pieces(Protocol):
    """Turns text into pieces of blocks."""

    def push(self, text: str, tokens: int) -> Sequence["Piece"]:
        """The pieces that are certain after this text, which came from so many tokens."""
        ...

    def flush(self) -> Sequence["Piece"]:
        """The rest."""
        ...

    def restart(self) -> None:
        """Forgets the text so far: the answer begins anew."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A piece of a block. `call`: the number of its call; a call's first piece has its name."""

    kind: BlockKind
    text: str = ""
    call: int = -1
    name: str = ""
    call_id: str = ""


class PlainPieces:
    """All text is text."""

    def restart(self) -> None:
        """See Pieces: nothing is kept."""

    def push(self, text: str, tokens: int) -> Sequence[Piece]:
        """See Pieces."""
        return (Piece(kind=BlockKind.TEXT, text=text),)

    def flush(self) -> Sequence[Piece]:
        """See Pieces."""
        return ()


class ReadPieces:
    """Reasoning and tool calls as the model's family writes them."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def push(self, text: str, tokens: int) -> Sequence[Piece]:
        """See Pieces."""
        return list(self._pieces(self._reading.push(0, text, tokens)))

    def flush(self) -> Sequence[Piece]:
        """See Pieces."""
        return list(self._pieces(self._reading.flush(0)))

    def restart(self) -> None:
        """See Pieces."""
        self._reading.restart(0)

    def _pieces(self, parts: Sequence[Part]) -> Iterator[Piece]:
        for part in parts:
            match part:
                case str():
                    yield Piece(kind=BlockKind.TEXT, text=part)
                case Reasoning():
                    yield Piece(kind=BlockKind.REASONING, text=part.text)
                case CallBegin():
                    call_id = self._reading.call_id(0, part)
                    yield Piece(kind=BlockKind.CALL, call=part.number, name=part.name, call_id=call_id)
                case CallArguments():
                    yield Piece(kind=BlockKind.CALL, call=part.number, text=part.text)


class Blocks:
    """Collects the blocks of one choice and tells a sink of them."""

    def __init__(self, pieces: Pieces, sink: BlockSink | None = None) -> None:
        self._pieces = pieces
        self._sink = sink
        self._call = -1
        self.blocks: list[Block] = []

    def push(self, text: str, tokens: int) -> None:
        """More text of the answer, from so many tokens."""
        for piece in self._pieces.push(text, tokens):
            self._take(piece)

    def flush(self) -> None:
        """The answer is over."""
        for piece in self._pieces.flush():
            self._take(piece)
        if not self.blocks:
            # Clients expect something to read: an answer without a token is an empty text.
            self._begin(Piece(kind=BlockKind.TEXT))
        self._end()

    def _take(self, piece: Piece) -> None:
        block = self.blocks[-1] if self.blocks and not self.blocks[-1].is_over else None
        if block is None or block.kind is not piece.kind or (piece.kind is BlockKind.CALL and piece.call != self._call):
            if not piece.text and piece.kind is not BlockKind.CALL:
                return
            block = self._begin(piece)
        if piece.text:
            block.texts.append(piece.text)
            if self._sink is not None:
                self._sink.on_delta(block, piece.text)

    def _begin(self, piece: Piece) -> Block:
        self._end()
        if piece.kind is BlockKind.CALL:
            self._call = piece.call
        block = Block(kind=piece.kind, number=len(self.blocks), name=piece.name, call_id=piece.call_id, texts=[])
        self.blocks.append(block)
        if self._sink is not None:
            self._sink.on_begin(block)
        return block

    def _end(self) -> None:
        if self.blocks and not self.blocks[-1].is_over:
            self.blocks[-1].is_over = True
            if self._sink is not None:
                self._sink.on_end(self.blocks[-1])

    def calls(self) -> Iterator[Block]:
        """The tool calls."""
        return (block for block in self.blocks if block.kind is BlockKind.CALL)


def pieces_for(reading: Reading | None) -> Pieces:
    """What reads the answer of a request."""
    return ReadPieces(reading) if reading is not None else PlainPieces()


class BlockOutlet:
    """An outlet that keeps the whole answer of one choice as blocks."""

    is_whole = True

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._begin()

    def _begin(self) -> None:
        self._collected = Blocks(self._pieces)
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self._ending: Ending | None = None

    def on_restart(self, choice: int) -> None:
        """See AnswerSink."""
        self._pieces.restart()
        self._begin()

    def on_text(
        self, choice: int, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        """See AnswerSink."""
        self.token_ids.extend(token_ids)
        if logprobs:
            self.logprobs.extend(logprobs)
        self._collected.push(text, len(token_ids))

    def on_prompt(self, choice: int, entries: Sequence[TokenLogprob]) -> None:
        """See AnswerSink; nobody asks for it here."""

    def on_end(self, choice: int, ending: Ending) -> None:
        """See AnswerSink."""
        self._ending = ending
        self._collected.flush()

    @property
    def blocks(self) -> Sequence[Block]:
        """The blocks, at least one once the answer is over."""
        return self._collected.blocks

    @property
    def ending(self) -> Ending:
        """How it ended; to be asked of a request that ended well."""
        assert self._ending is not None, "a request that ended well has ended every choice"
        return self._ending
