"""The typed events of a streamed message."""

from typing import Any

import orjson

from kvmesh.core import Usage
from kvmesh.errors import MeshError
from services.frontend.api.answer_blocks import Block, BlockEvents
from services.frontend.api.answer_reader import AnswerReader
from services.frontend.api.anthropic.body import (
    delta_body,
    error_body,
    message_body,
    started_block,
    stop_of,
    usage_body,
)
from services.frontend.pipeline.request import Ending


def _encode_event(body: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (body["type"].encode(), orjson.dumps(body))


class MessageEvents(BlockEvents):
    """message_start, ping; per block content_block_start, deltas, content_block_stop; message_delta, message_stop.

    If the answer can only be text, its only block begins immediately, and the deltas are made from two constant pieces.
    """

    keep_alive = _encode_event({"type": "ping"})

    def __init__(self, *, request_id: str, model: str, reader: AnswerReader, prompt_tokens: int) -> None:
        super().__init__(reader)
        self._is_plain = reader.is_plain
        self._message = message_body(
            request_id=request_id, model=model, content=[], ending=None, usage=Usage(prompt_tokens=prompt_tokens)
        )
        if reader.is_plain:
            mark = "\x00text"
            body = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": mark}}
            before, _, after = _encode_event(body).partition(orjson.dumps(mark))
            self.plain = [(before, after)]

    def begin_choice(self, choice: int) -> bytes:
        self._put("message_start", message=self._message)
        self._put("ping")
        if self._is_plain:
            self._put("content_block_start", index=0, content_block={"type": "text", "text": ""})
        return self._take()

    def end_choice(self, choice: int, ending: Ending) -> bytes:
        if not self._is_plain:
            return super().end_choice(choice, ending)
        self._ending = ending
        self._put("content_block_stop", index=0)
        return self._take()

    def on_begin(self, block: Block) -> None:
        self._put("content_block_start", index=block.number, content_block=started_block(block))

    def on_delta(self, block: Block, text: str) -> None:
        self._put("content_block_delta", index=block.number, delta=delta_body(block, text))

    def on_end(self, block: Block) -> None:
        self._put("content_block_stop", index=block.number)

    def end(self, usage: Usage) -> bytes:
        assert self._ending is not None, "an answer that succeeded has an ending"
        reason, stop = stop_of(self._ending, has_calls=bool(self._blocks.calls))
        totals = {name: count for name, count in usage_body(usage).items() if name != "service_tier"}
        self._put("message_delta", delta={"stop_reason": reason, "stop_sequence": stop}, usage=totals)
        self._put("message_stop")
        return self._take()

    def failure(self, error: MeshError) -> bytes:
        return _encode_event(error_body(error))
