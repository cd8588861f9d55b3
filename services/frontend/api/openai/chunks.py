"""Server-sent events of OpenAI's streams, made from pieces that are encoded once per stream."""

from collections.abc import Sequence
from typing import Any

import orjson

from kvmesh.core import TokenLogprob, Usage
from kvmesh.errors import MeshError
from services.frontend.api.answer_reader import AnswerReader
from services.frontend.api.http.stream import KEEP_ALIVE
from services.frontend.api.openai.bodies import (
    CHAT_CHUNK_OBJECT,
    COMPLETION_OBJECT,
    answer_offsets,
    echoed_prompts,
    ending_fields,
    error_body,
    usage_body,
)
from services.frontend.api.openai.logprobs import chat_logprobs, completion_logprobs, echoed_logprobs
from services.frontend.api.run import ApiRequest
from services.frontend.parsers.parts import CallArguments, CallBegin, Part, Reasoning
from services.frontend.pipeline.prepare import Prepared
from services.frontend.pipeline.request import Ending

DONE = b"data: [DONE]\n\n"
_MARK = "\x00mark"
_QUOTED_MARK = orjson.dumps(_MARK)


def _encode_event(body: Any) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


class _Chunks:
    """What the event encoders of both APIs share: the fields around the choices."""

    keep_alive = KEEP_ALIVE

    def __init__(self, *, request: ApiRequest, prepared: Sequence[Prepared], kind: str, created_s: int) -> None:
        self._request = request
        self._model = prepared[0].model
        self._text = prepared[0].model.text
        self._prompt_ids = [each.generation.token_ids for each in prepared]
        self._per_prompt = request.requests[0].choices
        self._head: dict[str, Any] = {"id": "", "object": kind, "created": created_s, "model": request.model}
        self._tokens = [0] * request.choices
        # With these options events differ in more than text and log-probabilities.
        self._varies = request.returns_token_ids or request.has_usage_throughout
        self.plain: Sequence[tuple[bytes, ...]] | None = None
        self._detailed: Sequence[tuple[bytes, ...]] | None = None
        """Per choice the pieces around text and log-probabilities."""

    def _event(self, choice: dict[str, Any], **more: Any) -> bytes:
        body = {**self._head, "choices": [choice]}
        if self._request.includes_usage:
            body["usage"] = None
        if self._request.has_usage_throughout:
            i = choice["index"]
            prompt_tokens = len(self._prompt_ids[i // self._per_prompt])
            body["usage"] = usage_body(Usage(prompt_tokens=prompt_tokens, output_tokens=self._tokens[i]))
        body.update(more)
        return _encode_event(body)

    def _split(self, choice: dict[str, Any]) -> tuple[bytes, ...]:
        """Encodes an event and returns the pieces around its marks."""
        return tuple(self._event(choice).split(_QUOTED_MARK))

    def add_prompt_logprobs(self, choice: int, entries: Sequence[TokenLogprob]) -> None: ...

    def end(self, usage: Usage) -> bytes:
        if not self._request.includes_usage:
            return DONE
        return _encode_event({**self._head, "choices": [], "usage": usage_body(usage)}) + DONE

    def failure(self, error: MeshError) -> bytes:
        return _encode_event(error_body(error))


class ChatChunks(_Chunks):
    """Encodes `chat.completion.chunk` events."""

    def __init__(self, request: ApiRequest, prepared: Prepared, reader: AnswerReader, *, created_s: int) -> None:
        super().__init__(request=request, prepared=[prepared], kind=CHAT_CHUNK_OBJECT, created_s=created_s)
        self._head["id"] = f"chatcmpl-{request.requests[0].request_id}"
        self._reader = reader
        self._pending_logprobs: list[list[tuple[int, TokenLogprob]]] = [[] for _ in range(request.choices)]
        self._contents: Sequence[tuple[bytes, ...]] | None = None
        self._reasonings: Sequence[tuple[bytes, ...]] = ()
        if self._varies:
            return
        if not request.has_logprobs:
            self._contents = [self._split(_chat_choice(i, {"content": _MARK})) for i in range(request.choices)]
            if reader.is_plain:
                self.plain = self._contents
            else:
                delta = _reasoning_delta(_MARK)
                self._reasonings = [self._split(_chat_choice(i, delta)) for i in range(request.choices)]
        elif reader.is_plain:
            self._detailed = [
                self._split(_chat_choice(i, {"content": _MARK}) | {"logprobs": _MARK}) for i in range(request.choices)
            ]

    def begin_choice(self, choice: int) -> bytes:
        # The role, as OpenAI sends it.
        more = {"prompt_token_ids": list(self._prompt_ids[0])} if self._request.returns_token_ids else {}
        return self._event(_chat_choice(choice, {"role": "assistant", "content": ""}), **more)

    def encode_text(
        self, choice: int, text: str, token_ids: Sequence[int], *, logprobs: Sequence[TokenLogprob] | None
    ) -> bytes:
        self._tokens[choice] += len(token_ids)
        pending = self._pending_logprobs[choice]
        if self._detailed is not None and text and logprobs is not None and not pending:
            before, between, after = self._detailed[choice]
            return b"%b%b%b%b%b" % (before, orjson.dumps(text), between, self._logprobs(token_ids, logprobs), after)
        parts = self._reader.push(choice, text, len(token_ids))
        if self._contents is not None:
            return b"".join([self._encode_part(choice, part) for part in parts])
        deltas = self._deltas(choice, parts)
        more: dict[str, Any] = {}
        if logprobs is not None:
            pending.extend(zip(token_ids, logprobs, strict=True))
            if deltas:
                more["logprobs"] = self._take_logprobs(choice)
        if self._request.returns_token_ids:
            more["token_ids"] = list(token_ids)
            deltas = deltas or [{}]
        return self._encode_deltas(choice, deltas, more)

    def _encode_deltas(self, choice: int, deltas: Sequence[dict[str, Any]], more: dict[str, Any]) -> bytes:
        """Encodes one event per delta. The fields that belong to tokens go into the first."""
        return b"".join(
            self._event({**_chat_choice(choice, delta), **(more if i == 0 else {})}) for i, delta in enumerate(deltas)
        )

    def _encode_part(self, choice: int, part: Part) -> bytes:
        if type(part) is str and self._contents is not None:
            before, after = self._contents[choice]
            return b"%b%b%b" % (before, orjson.dumps(part), after)
        if type(part) is Reasoning and self._reasonings:
            before, between, after = self._reasonings[choice]
            quoted = orjson.dumps(part.text)
            return b"%b%b%b%b%b" % (before, quoted, between, quoted, after)
        return self._encode_deltas(choice, self._deltas(choice, (part,)), {})

    def _deltas(self, choice: int, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """Returns OpenAI's deltas. Warnings are a field of the last event."""
        deltas: list[dict[str, Any]] = []
        for part in parts:
            match part:
                case str():
                    deltas.append({"content": part})
                case Reasoning():
                    deltas.append(_reasoning_delta(part.text))
                case CallBegin():
                    call_id = self._reader.call_id(choice, part)
                    function = {"name": part.name, "arguments": ""}
                    call = {"index": part.number, "id": call_id, "type": "function", "function": function}
                    deltas.append({"tool_calls": [call]})
                case CallArguments():
                    deltas.append({"tool_calls": [{"index": part.number, "function": {"arguments": part.text}}]})
        return deltas

    def _take_logprobs(self, choice: int) -> orjson.Fragment:
        pending, self._pending_logprobs[choice] = self._pending_logprobs[choice], []
        return orjson.Fragment(self._logprobs([token_id for token_id, _ in pending], [entry for _, entry in pending]))

    def _logprobs(self, token_ids: Sequence[int], entries: Sequence[TokenLogprob]) -> bytes:
        return chat_logprobs(self._text, token_ids, entries, as_ids=self._request.names_tokens_by_id)

    def end_choice(self, choice: int, ending: Ending) -> bytes:
        rest = self._encode_deltas(choice, self._deltas(choice, self._reader.flush(choice)), {})
        last = _chat_choice(choice, {}) | ending_fields(ending, self._reader.calls(choice))
        if self._pending_logprobs[choice]:
            last["logprobs"] = self._take_logprobs(choice)
        # The head is written before a call turns out to be none, so the warning cannot be a header.
        warnings = self._reader.warnings
        return rest + self._event(last, **({"warnings": warnings} if warnings else {}))


def _reasoning_delta(text: str) -> dict[str, Any]:
    # The name that most clients know, and vLLM's newer one.
    return {"reasoning_content": text, "reasoning": text}


def _chat_choice(choice: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}


class CompletionChunks(_Chunks):
    """Encodes `text_completion` events."""

    def __init__(self, request: ApiRequest, prepared: Sequence[Prepared], *, created_s: int) -> None:
        super().__init__(request=request, prepared=prepared, kind=COMPLETION_OBJECT, created_s=created_s)
        self._head["id"] = f"cmpl-{request.requests[0].request_id.partition('.')[0]}"
        self._echoes = echoed_prompts(request, prepared)
        self._prompt_logprobs: dict[int, Sequence[TokenLogprob]] = {}
        choices = range(request.choices)
        self._offsets = (
            [answer_offsets(request, self._model, self._echoes[i // self._per_prompt]) for i in choices]
            if request.has_logprobs
            else []
        )
        if self._varies:
            return
        if request.has_logprobs:
            self._detailed = [self._split(_completion_choice(i, _MARK) | {"logprobs": _MARK}) for i in choices]
        else:
            self.plain = [self._split(_completion_choice(i, _MARK)) for i in choices]

    def begin_choice(self, choice: int) -> bytes:
        # The prompt, if it is echoed.
        prompt_ids, echo = self._prompt_ids[choice // self._per_prompt], self._echoes[choice // self._per_prompt]
        more: dict[str, Any] = {}
        if self._request.returns_token_ids:
            more["prompt_token_ids"] = list(prompt_ids)
        if self._request.echoes and self._request.has_logprobs:
            entries = self._prompt_logprobs.pop(choice, ())
            as_ids = self._request.names_tokens_by_id
            more["logprobs"] = echoed_logprobs(self._text, prompt_ids, entries, echo=echo, as_ids=as_ids)
        return self._event(_completion_choice(choice, echo) | self._no_tokens() | more) if echo or more else b""

    def _no_tokens(self) -> dict[str, Any]:
        """Returns the fields of an event without tokens; vLLM's clients expect lists in each event."""
        nothing: dict[str, Any] = {}
        if self._request.has_logprobs:
            nothing["logprobs"] = completion_logprobs(self._text, (), (), offsets=())
        if self._request.returns_token_ids:
            nothing["token_ids"] = []
        return nothing

    def add_prompt_logprobs(self, choice: int, entries: Sequence[TokenLogprob]) -> None:
        self._prompt_logprobs[choice] = entries

    def encode_text(
        self, choice: int, text: str, token_ids: Sequence[int], *, logprobs: Sequence[TokenLogprob] | None
    ) -> bytes:
        self._tokens[choice] += len(token_ids)
        found: dict[str, Any] | None = None
        if logprobs is not None:
            offsets, as_ids = self._offsets[choice].take(token_ids), self._request.names_tokens_by_id
            found = completion_logprobs(self._text, token_ids, logprobs, offsets=offsets, as_ids=as_ids)
        if self._detailed is not None and found is not None:
            before, between, after = self._detailed[choice]
            return b"%b%b%b%b%b" % (before, orjson.dumps(text), between, orjson.dumps(found), after)
        if not text and found is None and not self._request.returns_token_ids:
            return b""
        body = _completion_choice(choice, text) | {"logprobs": found}
        if self._request.returns_token_ids:
            body["token_ids"] = list(token_ids)
        return self._event(body)

    def end_choice(self, choice: int, ending: Ending) -> bytes:
        return self._event(_completion_choice(choice, "") | self._no_tokens() | ending_fields(ending))


def _completion_choice(choice: int, text: str) -> dict[str, Any]:
    return {"index": choice, "text": text, "logprobs": None, "finish_reason": None}
