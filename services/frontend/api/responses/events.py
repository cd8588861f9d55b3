"""The typed events of a streamed response, in the order that OpenAI documents."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from kvmesh.core import TokenLogprob, Usage
from kvmesh.errors import MeshError
from services.frontend.api.answer_blocks import Block, BlockKind, Blocks, Pieces
from services.frontend.api.http.stream import EventStream
from services.frontend.api.openai.logprobs import chat_entries
from services.frontend.api.responses.body import (
    COMPLETED,
    IN_PROGRESS,
    ended_body,
    failed_body,
    item_body,
    item_id,
    status_of,
    text_part,
    thought_part,
)
from services.frontend.pipeline.request import Ending
from services.frontend.text.text_model import TextModel


class ResponseEvents:
    """Makes the events. It hears of blocks and collects what they say; `output` is right after the ending.

    created, in_progress; then per item: output_item.added, content_part.added, deltas, done, content_part.done,
    output_item.done; then completed, incomplete or failed. `sequence_number` counts all of them from 0.
    """

    plain: Sequence[tuple[bytes, ...]] | None = None

    def __init__(
        self, begun: Mapping[str, Any], request_id: str, pieces: Pieces, text: TextModel, *, includes_logprobs: bool
    ) -> None:
        self._begun = begun
        self._request_id = request_id
        self._text = text
        self._includes_logprobs = includes_logprobs
        self._blocks = Blocks(pieces, self)
        self._data: list[bytes] = []
        self._number = 0
        self._new_logprobs: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []
        self._item_status = COMPLETED
        self._ending: Ending | None = None
        self._final: Mapping[str, Any] | None = None
        self.output: list[dict[str, Any]] = []

    def _put(self, kind: str, **values: Any) -> None:
        body = {"type": kind, "sequence_number": self._number, **values}
        self._number += 1
        self._data.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(body)))

    def _take(self) -> bytes:
        data = b"".join(self._data)
        self._data.clear()
        return data

    def opening(self, choice: int) -> bytes:
        """See Chunks."""
        self._put("response.created", response=self._begun)
        self._put("response.in_progress", response=self._begun)
        return self._take()

    def prompt(self, choice: int, entries: Sequence[TokenLogprob]) -> None:
        """See Chunks; this API has no place for it."""

    def text(self, choice: int, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> bytes:
        """See Chunks."""
        if logprobs is not None and self._includes_logprobs:
            self._new_logprobs += map(orjson.loads, chat_entries(self._text, token_ids, logprobs))
        self._blocks.push(text, len(token_ids))
        return self._take()

    def ending(self, choice: int, ending: Ending) -> bytes:
        """See Chunks."""
        self._ending = ending
        self._item_status = status_of(ending)
        self._blocks.flush()
        return self._take()

    def on_begin(self, block: Block) -> None:
        """See BlockSink."""
        item = item_body(self._request_id, block, IN_PROGRESS)
        self._put("response.output_item.added", output_index=block.number, item=item)
        if block.kind is not BlockKind.CALL:
            part = text_part("", []) if block.kind is BlockKind.TEXT else thought_part("")
            self._put("response.content_part.added", **self._place(block), part=part)

    def _place(self, block: Block) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": item_id(self._request_id, block), "output_index": block.number}
        return place if block.kind is BlockKind.CALL else place | {"content_index": 0}

    def on_delta(self, block: Block, text: str) -> None:
        """See BlockSink."""
        if block.kind is BlockKind.TEXT:
            new, self._new_logprobs = self._new_logprobs, []
            self._logprobs += new
            self._put("response.output_text.delta", **self._place(block), delta=text, logprobs=new)
        else:
            self._put(f"response.{_WORDS[block.kind]}.delta", **self._place(block), delta=text)

    def on_end(self, block: Block) -> None:
        """See BlockSink."""
        place, text = self._place(block), block.text
        logprobs: list[dict[str, Any]] | None = None
        if block.kind is BlockKind.CALL:
            more = {"name": block.name, "arguments": text}
            self._put("response.function_call_arguments.done", **place, **more)
        elif block.kind is BlockKind.TEXT:
            # Tokens without text of their own, such as one that ended the answer, belong to the text before them.
            logprobs, self._logprobs, self._new_logprobs = [*self._logprobs, *self._new_logprobs], [], []
            self._put("response.output_text.done", **place, text=text, logprobs=logprobs)
            self._put("response.content_part.done", **place, part=text_part(text, logprobs))
        else:
            self._put("response.reasoning_text.done", **place, text=text)
            self._put("response.content_part.done", **place, part=thought_part(text))
        item = item_body(self._request_id, block, self._item_status, logprobs if self._includes_logprobs else None)
        self.output.append(item)
        self._put("response.output_item.done", output_index=block.number, item=item)

    def finish(self, usage: Usage, completed_s: int) -> Mapping[str, Any]:
        """The whole response, once every token came; it is what the last event says."""
        assert self._ending is not None, "an answer that ended well has an ending"
        self._final = ended_body(self._begun, self.output, self._ending, usage, completed_s)
        return self._final

    def usage(self, usage: Usage) -> bytes:
        """The last event."""
        assert self._final is not None, "the response is finished before its stream is closed"
        self._put(f"response.{self._final['status']}", response=self._final)
        return self._take()

    def failure(self, error: MeshError) -> bytes:
        """The last event of a response that failed."""
        self._put("response.failed", response=failed_body(self._begun, self.output, error))
        return self._take()


_WORDS = {BlockKind.REASONING: "reasoning_text", BlockKind.CALL: "function_call_arguments"}


class ResponseStream(EventStream):
    """A stream of typed events ends with the last of them."""

    done = b""

    def failure(self, error: MeshError) -> bytes:
        """See EventStream."""
        assert isinstance(self._chunks, ResponseEvents)
        return self._chunks.failure(error)
