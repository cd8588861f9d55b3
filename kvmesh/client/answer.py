"""A whole answer, assembled from its pieces."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvmesh.core import FinishReason, TokenLogprob, Usage
from kvmesh.errors import LostError, MeshError
from kvmesh.rpc.codec.client_inference import Piece


@dataclass(slots=True, kw_only=True)
class ToolCall:
    """A call of a tool; `arguments` is a JSON document."""

    call_id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True, kw_only=True)
class Choice:
    """One choice of an answer. `warnings` are not fatal, such as a tool call that did not parse and was left as text."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: Sequence[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    warnings: list[MeshError] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.reasoning += piece.reasoning
        self.token_ids += piece.token_ids
        if piece.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *piece.logprobs]
        if piece.prompt_logprobs is not None:
            self.prompt_logprobs = piece.prompt_logprobs
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.warnings += piece.warnings
        for part in piece.tool_calls:
            while len(self.tool_calls) <= part.index:
                self.tool_calls.append(ToolCall())
            call = self.tool_calls[part.index]
            call.call_id, call.name = part.call_id or call.call_id, part.name or call.name
            call.arguments += part.arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All choices of a response, in order."""

    request_id: str
    choices: Sequence[Choice]
    usage: Usage

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


def gathered(pieces: Iterable[Piece]) -> Answer:
    """Collects the pieces of an answer. Raises LostError when its end is missing."""
    choices: dict[int, Choice] = {}
    for piece in pieces:
        # The last piece. It belongs to no choice.
        if piece.usage is not None:
            ordered = [choices[number] for number in sorted(choices)]
            return Answer(request_id=piece.request_id, choices=ordered, usage=piece.usage)
        choices.setdefault(piece.choice, Choice()).add(piece)
    raise LostError("the stream ended before the answer was complete")
