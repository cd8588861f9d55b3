"""A request as the pipeline takes it, and the sink of its answer. No HTTP, no gRPC."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from kvmesh.core import FinishReason, SamplingParams, TokenLogprob, Usage

Message = Mapping[str, Any]
"""A message of a conversation. Its content is a string, a list of text parts, or None."""


def text_of(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """Joins the content of a message into one string."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join([part["text"] for part in content])


def content_of(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """Builds the content of a message: text parts, or a string if there is at most one text."""
    if len(texts) <= 1:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]


class ToolMode(StrEnum):
    """Whether the model decides to call tools, or must, or must not."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """How tools are chosen. `name`: the tool of mode NAMED. `strict`: tools whose arguments must match their schema."""

    mode: ToolMode = ToolMode.AUTO
    name: str = ""
    is_parallel: bool = True
    strict: Sequence[str] = ()

    @property
    def is_forced(self) -> bool:
        """True if the answer consists of tool calls only."""
        return self.mode in (ToolMode.REQUIRED, ToolMode.NAMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Input of the chat template. `messages` and `tools` are plain JSON values in OpenAI's shape.

    `continues_final_message`: the answer continues the text of the last message.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    documents: Sequence[Mapping[str, Any]] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    adds_generation_prompt: bool = True
    continues_final_message: bool = False


Prompt = str | Sequence[int] | Conversation
"""Text, token ids, or a conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and its choices.

    `fields` maps names of SamplingParams and of this class to the names that the client used, for error messages.
    `timeout_s` None: the frontend's limit. `max_tokens` None: what the context leaves. `prompt_tokens_kept`: the prompt's
    last tokens that are used, -1 as many as fit; None refuses a prompt that does not. `shortens_answer`: a `max_tokens` that
    the context does not leave is reduced instead of refused. `includes_stop`: the stop string or
    stop token is part of the text. `adds_special_tokens`: those that the tokenizer puts around a text prompt.
    """

    request_id: str
    model: str
    prompt: Prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    choices: int = 1
    adapter: str = ""
    cache_salt: str = ""
    priority: int = 0
    session_id: str = ""
    required_labels: Mapping[str, str] = field(default_factory=dict)
    preferred_labels: Mapping[str, str] = field(default_factory=dict)
    pinned_prefill_worker_id: str = ""
    pinned_decode_worker_id: str = ""
    prompt_tokens_kept: int | None = None
    shortens_answer: bool = False
    includes_stop: bool = False
    adds_special_tokens: bool = True
    timeout_s: float | None = None
    traceparent: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)

    def named(self, name: str) -> str:
        """Returns the client's name of a field."""
        return self.fields.get(name, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one choice ended. `stop` is the stop string or token id that ended it, if any."""

    reason: FinishReason
    stop: str | int | None = None
    output_tokens: int = 0


class AnswerSink(Protocol):
    """Receives the answer of a request as it is generated. Called once per choice and engine step; must not block or raise."""

    @property
    def is_whole(self) -> bool:
        """True if the client sees nothing of the answer before the request has ended. Then the answer can restart."""
        ...

    def on_restart(self, choice: int) -> None:
        """Discards everything received for the choice, because the request is placed again. Called only if `is_whole`.

        May raise MeshError, which ends the request.
        """
        ...

    def on_text(
        self, choice: int, text: str, token_ids: Sequence[int], *, logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        """Receives new text (whole characters, possibly none) and the tokens that it comes from.

        `logprobs` has one entry per token if the request asks for them.
        """
        ...

    def on_end(self, choice: int, ending: Ending) -> None:
        """The choice has ended; no call follows. Not called if the whole request fails."""
        ...

    def on_prompt(self, choice: int, entries: Sequence[TokenLogprob]) -> None:
        """Receives log-probabilities of the prompt's tokens from the second on, before the choice's text, if requested.

        Called again when the request is placed again; the last call counts.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """Totals of a request that succeeded. `ttft_s` None: it had no token."""

    usage: Usage
    ttft_s: float | None = None
