"""The answer of one request as its outlets show it: content, reasoning, calls and warnings of every choice."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvmesh.core import Constraint, ConstraintKind, Usage
from services.frontend.models import ServedModel
from services.frontend.parsers.family import WholeFamily
from services.frontend.parsers.parser import answer_parser
from services.frontend.parsers.parts import CallArguments, CallBegin, Part, Reasoning, Warned
from services.frontend.parsers.select import Selection
from services.frontend.request import Conversation
from services.frontend.tool_choice import forced_family

PROMPT_TAIL_TOKENS = 16
"""Enough to see whether the prompt ends inside reasoning."""


@dataclass(slots=True, kw_only=True)
class ReadCall:
    """One call of an answer; `pieces` joined are its arguments."""

    name: str
    call_id: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        """The JSON document; of an answer that was cut off, its beginning."""
        return "".join(self.pieces)


@dataclass(slots=True, kw_only=True)
class ReadMessage:
    """What came of one choice so far."""

    contents: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    calls: list[ReadCall] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def content(self) -> str | None:
        """The text; None when there are calls or reasoning and no text."""
        return "".join(self.contents) or (None if self.calls or self.reasonings else "")

    @property
    def reasoning(self) -> str | None:
        """The reasoning; None without."""
        return "".join(self.reasonings) or None


class Reading:
    """Parsers of all choices of a request."""

    def __init__(
        self,
        selection: Selection,
        *,
        request_id: str,
        choices: int,
        functions: Mapping[str, Mapping[str, Any]],
        parses_tools: bool,
        prompt_tail: str = "",
        forced: WholeFamily | None = None,
        is_parallel: bool = True,
    ) -> None:
        tools = selection.tools if parses_tools else None
        self._family = tools
        self._is_parallel = is_parallel
        self._request_id = request_id
        self._parsers = [
            answer_parser(forced or tools, selection.reasoning, functions=functions, prompt_tail=prompt_tail)
            for _ in range(choices)
        ]
        self._warnings: dict[str, None] = {}

    @property
    def reasoning_tokens(self) -> int:
        """Reasoning tokens over all choices."""
        return sum(parser.reasoning_tokens for parser in self._parsers)

    def counted(self, usage: Usage) -> Usage:
        """Totals with the reasoning tokens in them."""
        return replace(usage, reasoning_tokens=usage.reasoning_tokens or self.reasoning_tokens)

    @property
    def warnings(self) -> list[str]:
        """Words of all warnings so far, each once."""
        return list(self._warnings)

    def push(self, choice: int, text: str, tokens: int) -> Sequence[Part]:
        """The parts that are certain after this text, which came from so many tokens."""
        return self._noted(self._parsers[choice].push(text, tokens))

    def flush(self, choice: int) -> Sequence[Part]:
        """The rest of a choice that is over."""
        return self._noted(self._parsers[choice].flush())

    def _noted(self, parts: Sequence[Part]) -> Sequence[Part]:
        if not self._is_parallel:
            parts = [part for part in parts if not isinstance(part, CallBegin | CallArguments) or part.number == 0]
        for part in parts:
            if type(part) is Warned:
                self._warnings[part.reason] = None
        return parts

    def calls(self, choice: int) -> int:
        """Calls that a choice has begun, those left out excepted."""
        calls = self._parsers[choice].calls
        return calls if self._is_parallel else min(1, calls)

    def call_id(self, choice: int, call: CallBegin) -> str:
        """A call's id: the request's own is random, so this is unique in any conversation."""
        length = getattr(self._family, "call_id_characters", 0)
        if call.call_id and getattr(self._family, "gives_call_ids", False):
            return call.call_id
        if length:
            return f"{self._request_id[: length - 4]}{choice % 100:02}{call.number % 100:02}"
        return f"call_{self._request_id[:24]}{choice}{call.number}"

    def gather(self, choice: int, message: ReadMessage, parts: Iterable[Part]) -> None:
        """Adds parts to what came of a choice."""
        for part in parts:
            match part:
                case str():
                    message.contents.append(part)
                case Reasoning():
                    message.reasonings.append(part.text)
                case CallBegin():
                    message.calls.append(ReadCall(name=part.name, call_id=self.call_id(choice, part)))
                case CallArguments():
                    message.calls[part.number].pieces.append(part.text)
                case Warned():
                    message.warnings.append(part.reason)


def reading_of(
    model: ServedModel,
    conversation: Conversation,
    prompt_ids: Sequence[int],
    *,
    request_id: str,
    choices: int,
    parses_tools: bool,
    constraint: Constraint | None = None,
) -> Reading | None:
    """How the answer to a conversation is read; None when it is content as it is."""
    selection = model.text.selection
    if constraint is not None and constraint.kind is not ConstraintKind.STRUCTURAL_TAG:
        # The grammar begins with the first token: there is no room for reasoning, whatever the prompt ended with.
        selection = replace(selection, reasoning=None)
    parses_tools = parses_tools and bool(conversation.tools)
    forced = forced_family(conversation.tool_choice) if parses_tools else None
    if selection.reasoning is None and forced is None and not (parses_tools and selection.tools is not None):
        return None
    tail = model.text.decode(list(prompt_ids[-PROMPT_TAIL_TOKENS:]), skip_special_tokens=False)
    return Reading(
        selection,
        request_id=request_id,
        choices=choices,
        functions=_functions(conversation.tools),
        parses_tools=parses_tools,
        prompt_tail=tail,
        forced=forced,
        is_parallel=conversation.tool_choice.is_parallel,
    )


def _functions(tools: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Parameter schemas by function name."""
    functions = [tool.get("function") or {} for tool in tools]
    return {str(each.get("name")): each.get("parameters") or {} for each in functions}
