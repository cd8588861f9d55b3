"""The typed events of a streamed response, in the order that OpenAI documents."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from kvmesh.core import TokenLogprob, Usage
from kvmesh.errors import MeshError
from services.frontend.api.answer_blocks import Block, BlockEvents, BlockKind
from services.frontend.api.answer_reader import AnswerReader
from services.frontend.api.http.stream import KEEP_ALIVE
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

_DELTAS = {
    BlockKind.TEXT: "response.output_text.delta",
    BlockKind.REASONING: "response.reasoning_text.delta",
    BlockKind.CALL: "response.function_call_arguments.delta",
}


class ResponseEvents(BlockEvents):
    """Encodes the events and collects the output items.

    created, in_progress; then per item: output_item.added, content_part.added, deltas, done, content_part.done,
    output_item.done; then completed, incomplete or failed. `sequence_number` counts all of them from 0.
    """

    keep_alive = KEEP_ALIVE

    def __init__(
        self,
        *,
        begun: Mapping[str, Any],
        request_id: str,
        reader: AnswerReader,
        text: TextModel,
        includes_logprobs: bool,
    ) -> None:
        super().__init__(reader)
        self._begun = begun
        self._request_id = request_id
        self._text = text
        self._includes_logprobs = includes_logprobs
        self._number = 0
        self._new_logprobs: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []
        self._item_status = COMPLETED
        self._final: Mapping[str, Any] | None = None
        self._output: list[dict[str, Any]] = []

    def _put(self, kind: str, **values: object) -> None:
        super()._put(kind, sequence_number=self._number, **values)
        self._number += 1

    def begin_choice(self, choice: int) -> bytes:
        self._put("response.created", response=self._begun)
        self._put("response.in_progress", response=self._begun)
        return self._take()

    def encode_text(
        self, choice: int, text: str, token_ids: Sequence[int], *, logprobs: Sequence[TokenLogprob] | None
    ) -> bytes:
        if logprobs is not None and self._includes_logprobs:
            self._new_logprobs += map(orjson.loads, chat_entries(self._text, token_ids, logprobs))
        return super().encode_text(choice, text, token_ids, logprobs=logprobs)

    def end_choice(self, choice: int, ending: Ending) -> bytes:
        self._item_status = status_of(ending)
        return super().end_choice(choice, ending)

    def on_begin(self, block: Block) -> None:
        item = item_body(self._request_id, block, IN_PROGRESS)
        self._put("response.output_item.added", output_index=block.number, item=item)
        if block.kind is not BlockKind.CALL:
            part = text_part("", []) if block.kind is BlockKind.TEXT else thought_part("")
            self._put("response.content_part.added", **self._place(block), part=part)

    def _place(self, block: Block) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": item_id(self._request_id, block), "output_index": block.number}
        return place if block.kind is BlockKind.CALL else place | {"content_index": 0}

    def on_delta(self, block: Block, text: str) -> None:
        more: dict[str, Any] = {}
        if block.kind is BlockKind.TEXT:
            more["logprobs"], self._new_logprobs = self._new_logprobs, []
            self._logprobs += more["logprobs"]
        self._put(_DELTAS[block.kind], **self._place(block), delta=text, **more)

    def on_end(self, block: Block) -> None:
        place, text = self._place(block), block.text
        logprobs: list[dict[str, Any]] | None = None
        if block.kind is BlockKind.CALL:
            self._put("response.function_call_arguments.done", **place, name=block.name, arguments=text)
        elif block.kind is BlockKind.TEXT:
            # Tokens without text of their own, such as one that ended the answer, belong to the text before them.
            logprobs, self._logprobs, self._new_logprobs = [*self._logprobs, *self._new_logprobs], [], []
            self._put("response.output_text.done", **place, text=text, logprobs=logprobs)
            self._put("response.content_part.done", **place, part=text_part(text, logprobs))
        else:
            self._put("response.reasoning_text.done", **place, text=text)
            self._put("response.content_part.done", **place, part=thought_part(text))
        item = item_body(
            self._request_id, block, self._item_status, logprobs=logprobs if self._includes_logprobs else None
        )
        self._output.append(item)
        self._put("response.output_item.done", output_index=block.number, item=item)

    def complete(self, usage: Usage, completed_s: int) -> Mapping[str, Any]:
        """Returns the whole response after its last token. The last event contains it."""
        assert self._ending is not None, "an answer that succeeded has an ending"
        self._final = ended_body(self._begun, self._output, self._ending, usage=usage, completed_s=completed_s)
        return self._final

    def end(self, usage: Usage) -> bytes:
        assert self._final is not None, "`complete` comes before the end of the stream"
        self._put(f"response.{self._final['status']}", response=self._final)
        return self._take()

    def failure(self, error: MeshError) -> bytes:
        self._put("response.failed", response=failed_body(self._begun, self._output, error))
        return self._take()
