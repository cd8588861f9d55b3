"""Server-sent events of one stream, made from pieces that are encoded once per stream."""

from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from kvmesh.core import TokenLogprob, Usage
from services.frontend.api.answer_reader import Reading
from services.frontend.api.openai.asked import Asked
from services.frontend.api.openai.bodies import (
    CHAT_CHUNK_OBJECT,
    COMPLETION_OBJECT,
    finish_word,
    offsets_of,
    stop_reason,
    usage_body,
)
from services.frontend.api.openai.logprobs import chat_logprobs, completion_logprobs, echoed_logprobs
from services.frontend.models import ServedModel
from services.frontend.parsers.parts import CallArguments, CallBegin, Part, Reasoning
from services.frontend.pipeline.request import Ending

DONE = b"data: [DONE]\n\n"
_MARK = "\x00mark"
_QUOTED_MARK = orjson.dumps(_MARK)


def event(body: Any) -> bytes:
    """One event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


class Chunks(Protocol):
    """Makes the events of one stream."""

    plain: Sequence[tuple[bytes, ...]] | None
    """Per choice what stands before and after a plain text chunk's JSON string; None when no chunk is plain."""

    def opening(self, choice: int) -> bytes:
        """What comes before a choice's first text; may be empty."""
        ...

    def prompt(self, choice: int, entries: Sequence[TokenLogprob]) -> None:
        """The prompt's log-probabilities, before `opening`."""
        ...

    def text(self, choice: int, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> bytes:
        """New text with all that was asked for; may be empty when it must wait for more text."""
        ...

    def ending(self, choice: int, ending: Ending) -> bytes:
        """The last event of a choice."""
        ...

    def usage(self, usage: Usage) -> bytes:
        """Totals; empty unless asked for."""
        ...


class _Base:
    """The parts of a chunk around its choices."""

    def __init__(self, asked: Asked, model: ServedModel, chunk_id: str, kind: str, created_s: int) -> None:
        self._asked = asked
        self._text = model.text
        self._head: dict[str, Any] = {"id": chunk_id, "object": kind, "created": created_s, "model": asked.model}
        self._running = RunningUsage(asked)

    def _event(self, choice: dict[str, Any], **more: Any) -> bytes:
        tail = {"usage": self._running.body(choice["index"])} if self._asked.includes_usage else {}
        return event({**self._head, "choices": [choice], **tail, **more})

    def prompt(self, choice: int, entries: Sequence[TokenLogprob]) -> None:
        """See Chunks; most have no place for it."""

    def _split(self, choice: dict[str, Any]) -> tuple[bytes, ...]:
        """The pieces of an event around its marks."""
        return tuple(self._event(choice).split(_QUOTED_MARK))

    def usage(self, usage: Usage) -> bytes:
        """See Chunks."""
        if not self._asked.includes_usage:
            return b""
        return event({**self._head, "choices": [], "usage": usage_body(usage)})


class RunningUsage:
    """What every event says of usage: null, or the counts of its choice so far."""

    def __init__(self, asked: Asked) -> None:
        self._is_on = asked.has_usage_throughout
        self._per_prompt = asked.requests[0].choices
        self._tokens = [0] * asked.choices
        self.prompts: Sequence[Sequence[int]] = ()

    def add(self, choice: int, token_ids: Sequence[int]) -> None:
        """New tokens of a choice."""
        self._tokens[choice] += len(token_ids)

    def body(self, choice: int) -> dict[str, Any] | None:
        """The value of `usage`."""
        if not self._is_on:
            return None
        prompt = len(self.prompts[choice // self._per_prompt])
        return usage_body(Usage(prompt_tokens=prompt, output_tokens=self._tokens[choice]))


class ChatChunks(_Base):
    """`chat.completion.chunk`."""

    def __init__(
        self,
        asked: Asked,
        model: ServedModel,
        created_s: int,
        prompt_ids: Sequence[int],
        reading: Reading | None = None,
    ) -> None:
        super().__init__(asked, model, f"chatcmpl-{asked.requests[0].request_id}", CHAT_CHUNK_OBJECT, created_s)
        self._prompt_ids = prompt_ids
        self._reading = reading
        self._held: list[list[tuple[int, TokenLogprob]]] = [[] for _ in range(asked.choices)]
        self._running.prompts = [prompt_ids]
        has_more = asked.returns_token_ids or asked.has_usage_throughout
        numbers = range(asked.choices)
        # Per choice the pieces around what differs between events of a kind. Of reasoning, the text comes twice.
        self._contents: Sequence[tuple[bytes, ...]] | None = None
        self._reasonings: Sequence[tuple[bytes, ...]] | None = None
        self._detailed: Sequence[tuple[bytes, ...]] | None = None
        if not has_more and not asked.has_logprobs:
            self._contents = [self._split(_chat_choice(i, {"content": _MARK})) for i in numbers]
            self._reasonings = [self._split(_chat_choice(i, _reasoning_delta(_MARK))) for i in numbers]
        elif not has_more and reading is None:
            self._detailed = [self._split(_chat_choice(i, {"content": _MARK}) | {"logprobs": _MARK}) for i in numbers]
        self.plain: Sequence[tuple[bytes, ...]] | None = self._contents if reading is None else None

    def opening(self, choice: int) -> bytes:
        """The role, as OpenAI sends it."""
        more = {"prompt_token_ids": list(self._prompt_ids)} if self._asked.returns_token_ids else {}
        return self._event(_chat_choice(choice, {"role": "assistant", "content": ""}), **more)

    def text(self, choice: int, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> bytes:
        """See Chunks."""
        self._running.add(choice, token_ids)
        if self._detailed is not None and text and logprobs is not None and not self._held[choice]:
            before, between, after = self._detailed[choice]
            found = self._logprobs(token_ids, logprobs)
            return b"%b%b%b%b%b" % (before, orjson.dumps(text), between, found, after)
        deltas: list[dict[str, Any]]
        if self._reading is None:
            deltas = [{"content": text}] if text else []
        else:
            parts = self._reading.push(choice, text, len(token_ids))
            if self._reasonings is not None and self._contents is not None:
                return b"".join([self._simple(choice, part) for part in parts])
            deltas = self._deltas(choice, parts)
        more: dict[str, Any] = {}
        if logprobs is not None:
            self._held[choice].extend(zip(token_ids, logprobs, strict=True))
            if deltas:
                more["logprobs"] = self._take_logprobs(choice)
        if self._asked.returns_token_ids:
            more["token_ids"] = list(token_ids)
            deltas = deltas or [{}]
        return self._events(choice, deltas, more)

    def _events(self, choice: int, deltas: Sequence[dict[str, Any]], more: dict[str, Any]) -> bytes:
        """One event per delta; what belongs to tokens goes with the first."""
        return b"".join(
            self._event({**_chat_choice(choice, delta), **(more if i == 0 else {})}) for i, delta in enumerate(deltas)
        )

    def _simple(self, choice: int, part: Part) -> bytes:
        """One part's event, text from pieces that are encoded already."""
        if type(part) is str:
            before, after = self._contents[choice]  # type: ignore[index]
            return b"%b%b%b" % (before, orjson.dumps(part), after)
        if type(part) is Reasoning:
            before, between, after = self._reasonings[choice]  # type: ignore[index]
            quoted = orjson.dumps(part.text)
            return b"%b%b%b%b%b" % (before, quoted, between, quoted, after)
        return self._events(choice, self._deltas(choice, (part,)), {})

    def _deltas(self, choice: int, parts: Sequence[Part]) -> list[dict[str, Any]]:
        return [delta for part in parts if (delta := self._delta(choice, part)) is not None]

    def _delta(self, choice: int, part: Part) -> dict[str, Any] | None:
        """OpenAI's delta of a part; warnings wait for the last event."""
        match part:
            case str():
                return {"content": part}
            case Reasoning():
                return _reasoning_delta(part.text)
            case CallBegin():
                assert self._reading is not None, "parts come from it"
                function = {"name": part.name, "arguments": ""}
                call_id = self._reading.call_id(choice, part)
                return {"tool_calls": [{"index": part.number, "id": call_id, "type": "function", "function": function}]}
            case CallArguments():
                return {"tool_calls": [{"index": part.number, "function": {"arguments": part.text}}]}
        return None

    def _take_logprobs(self, choice: int) -> orjson.Fragment:
        held, self._held[choice] = self._held[choice], []
        return orjson.Fragment(self._logprobs([token_id for token_id, _ in held], [entry for _, entry in held]))

    def _logprobs(self, token_ids: Sequence[int], entries: Sequence[TokenLogprob]) -> bytes:
        return chat_logprobs(self._text, token_ids, entries, as_ids=self._asked.names_tokens_by_id)

    def ending(self, choice: int, ending: Ending) -> bytes:
        """See Chunks."""
        calls, rest = 0, b""
        if self._reading is not None:
            rest = self._events(choice, self._deltas(choice, self._reading.flush(choice)), {})
            calls = self._reading.calls(choice)
        last = _chat_choice(choice, {}) | {
            "finish_reason": finish_word(ending, calls),
            "stop_reason": stop_reason(ending),
        }
        if self._held[choice]:
            last["logprobs"] = self._take_logprobs(choice)
        # The head is long on its way when a call turns out to be none: the warning is a field of the last event.
        warnings = self._reading.warnings if self._reading is not None else []
        return rest + self._event(last, **({"warnings": warnings} if warnings else {}))

    def usage(self, usage: Usage) -> bytes:
        """See Chunks."""
        return super().usage(usage if self._reading is None else self._reading.counted(usage))


def _reasoning_delta(text: str) -> dict[str, Any]:
    """Under the name that most clients know, and under vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


def _chat_choice(choice: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}


class CompletionChunks(_Base):
    """`text_completion` in pieces. `echoes`: per prompt what comes before its answers."""

    def __init__(
        self,
        asked: Asked,
        model: ServedModel,
        created_s: int,
        echoes: Sequence[str],
        prompt_ids: Sequence[Sequence[int]],
    ) -> None:
        base_id = asked.requests[0].request_id.partition(".")[0]
        super().__init__(asked, model, f"cmpl-{base_id}", COMPLETION_OBJECT, created_s)
        self._echoes = echoes
        self._prompt_ids = prompt_ids
        self._per_prompt = asked.requests[0].choices
        self._offsets = (
            [
                offsets_of(asked, model, echoes[i // self._per_prompt] if asked.echoes else "")
                for i in range(asked.choices)
            ]
            if asked.has_logprobs
            else []
        )
        self._running.prompts = prompt_ids
        self._prompt_logprobs: dict[int, Sequence[TokenLogprob]] = {}
        # Per choice the pieces around the text, and around text and log-probabilities.
        self.plain: Sequence[tuple[bytes, ...]] | None = None
        self._detailed: Sequence[tuple[bytes, ...]] | None = None
        if not asked.returns_token_ids and not asked.has_usage_throughout:
            bodies = [_completion_choice(i, _MARK) for i in range(asked.choices)]
            if asked.has_logprobs:
                self._detailed = [self._split(body | {"logprobs": _MARK}) for body in bodies]
            else:
                self.plain = [self._split(body) for body in bodies]

    def opening(self, choice: int) -> bytes:
        """The prompt, when it is to be echoed."""
        prompt = choice // self._per_prompt
        more: dict[str, Any] = {}
        if self._asked.returns_token_ids:
            more["prompt_token_ids"] = list(self._prompt_ids[prompt])
        echo = self._echoes[prompt]
        if self._asked.echoes_logprobs:
            entries = self._prompt_logprobs.pop(choice, ())
            as_ids = self._asked.names_tokens_by_id
            more["logprobs"] = echoed_logprobs(self._text, self._prompt_ids[prompt], entries, echo, as_ids=as_ids)
        return self._event(_completion_choice(choice, echo) | self._no_tokens() | more) if echo or more else b""

    def _no_tokens(self) -> dict[str, Any]:
        """What was asked for of an event without tokens; vLLM's clients expect lists in each event."""
        nothing: dict[str, Any] = {}
        if self._asked.has_logprobs:
            nothing["logprobs"] = completion_logprobs(self._text, (), (), ())
        if self._asked.returns_token_ids:
            nothing["token_ids"] = []
        return nothing

    def prompt(self, choice: int, entries: Sequence[TokenLogprob]) -> None:
        """See Chunks."""
        self._prompt_logprobs[choice] = entries

    def text(self, choice: int, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> bytes:
        """See Chunks."""
        self._running.add(choice, token_ids)
        found = None if logprobs is None else self._logprobs(choice, token_ids, logprobs)
        if self._detailed is not None and found is not None:
            before, between, after = self._detailed[choice]
            return b"%b%b%b%b%b" % (before, orjson.dumps(text), between, orjson.dumps(found), after)
        if not text and found is None and not self._asked.returns_token_ids:
            return b""
        body = _completion_choice(choice, text) | {"logprobs": found}
        if self._asked.returns_token_ids:
            body["token_ids"] = list(token_ids)
        return self._event(body)

    def _logprobs(self, choice: int, token_ids: Sequence[int], entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        offsets, as_ids = self._offsets[choice].take(token_ids), self._asked.names_tokens_by_id
        return completion_logprobs(self._text, token_ids, entries, offsets, as_ids=as_ids)

    def ending(self, choice: int, ending: Ending) -> bytes:
        """See Chunks."""
        body = _completion_choice(choice, "") | self._no_tokens()
        return self._event(body | {"finish_reason": finish_word(ending, 0), "stop_reason": stop_reason(ending)})


def _completion_choice(choice: int, text: str) -> dict[str, Any]:
    return {"index": choice, "text": text, "logprobs": None, "finish_reason": None}
