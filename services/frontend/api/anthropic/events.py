"""The typed events of a streamed message."""

from collections.abc import Sequence
from typing import Any

import orjson

from kvmesh.core import TokenLogprob, Usage
from kvmesh.errors import MeshError
from services.frontend.api.answer_blocks import Block, Blocks, Pieces, PlainPieces
from services.frontend.api.anthropic.body import (
    begun_block,
    delta_body,
    error_body,
    message_body,
    stop_of,
    usage_body,
)
from services.frontend.api.http.stream import EventStream
from services.frontend.pipeline.request import Ending


def event(body: dict[str, Any]) -> bytes:
    """One event, named by its type."""
    return b"event: %b\ndata: %b\n\n" % (body["type"].encode(), orjson.dumps(body))


class MessageEvents:
    """message_start, ping; per block content_block_start, deltas, content_block_stop; message_delta, message_stop.

    Where the answer can only be text its one block is opened at once, and its deltas are made from two constant pieces.
    """

    def __init__(self, request_id: str, model: str, pieces: Pieces, prompt_tokens: int) -> None:
        self._request_id = request_id
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._blocks = Blocks(pieces, self)
        self._data: list[bytes] = []
        self._ending: Ending | None = None
        self._is_plain = isinstance(pieces, PlainPieces)
        self.plain: Sequence[tuple[bytes, ...]] | None = [_split()] if self._is_plain else None

    def _take(self) -> bytes:
        data = b"".join(self._data)
        self._data.clear()
        return data

    def opening(self, choice: int) -> bytes:
        """See Chunks."""
        usage = Usage(prompt_tokens=self._prompt_tokens)
        message = message_body(self._request_id, self._model, [], None, usage)
        data = event({"type": "message_start", "message": message}) + event({"type": "ping"})
        if self._is_plain:
            data += event({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
        return data

    def prompt(self, choice: int, entries: Sequence[TokenLogprob]) -> None:
        """See Chunks; this API has no place for it."""

    def text(self, choice: int, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> bytes:
        """See Chunks. Not called for what is plain."""
        self._blocks.push(text, len(token_ids))
        return self._take()

    def ending(self, choice: int, ending: Ending) -> bytes:
        """See Chunks."""
        self._ending = ending
        if self._is_plain:
            return event({"type": "content_block_stop", "index": 0})
        self._blocks.flush()
        return self._take()

    def on_begin(self, block: Block) -> None:
        """See BlockSink."""
        body = {"type": "content_block_start", "index": block.number, "content_block": begun_block(block)}
        self._data.append(event(body))

    def on_delta(self, block: Block, text: str) -> None:
        """See BlockSink."""
        self._data.append(
            event({"type": "content_block_delta", "index": block.number, "delta": delta_body(block, text)})
        )

    def on_end(self, block: Block) -> None:
        """See BlockSink."""
        self._data.append(event({"type": "content_block_stop", "index": block.number}))

    def usage(self, usage: Usage) -> bytes:
        """The last two events."""
        assert self._ending is not None, "an answer that ended well has an ending"
        has_calls = any(True for _ in self._blocks.calls())
        reason, stop = stop_of(self._ending, has_calls=has_calls)
        totals = {name: count for name, count in usage_body(usage).items() if name != "service_tier"}
        delta = {"stop_reason": reason, "stop_sequence": stop}
        return event({"type": "message_delta", "delta": delta, "usage": totals}) + event({"type": "message_stop"})


def _split() -> tuple[bytes, bytes]:
    """The delta event around its JSON string."""
    mark = "\x00text"
    body = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": mark}}
    before, _, after = event(body).partition(orjson.dumps(mark))
    return before, after


class MessageStream(EventStream):
    """A stream of typed events ends with the last of them; a failure is an event named error."""

    done = b""
    beat = event({"type": "ping"})

    def failure(self, error: MeshError) -> bytes:
        """See EventStream."""
        return event(error_body(error))
