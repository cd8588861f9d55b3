"""The answer of one request as its outlets show it: content, reasoning, calls and warnings of every choice."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from kvmesh.core import Constraint, ConstraintKind, Usage
from services.frontend.models import ServedModel
from services.frontend.parser_process.relay import RemoteAnswer, RemoteParser
from services.frontend.parsers.family import ReasoningFamily, ToolFamily, WholeFamily
from services.frontend.parsers.parser import answer_parser
from services.frontend.parsers.parts import CallArguments, CallBegin, Part, Reasoning, Warned
from services.frontend.parsers.select import Selection
from services.frontend.pipeline.request import Conversation, text_of
from services.frontend.pipeline.tool_choice import forced_family
from services.frontend.text.text_model import TextModel

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


class ChoiceParser(Protocol):
    """Text of one choice to parts: an AnswerParser, or what a parser process said."""

    reasoning_tokens: int

    @property
    def calls(self) -> int:
        """Calls begun so far."""
        ...

    def push(self, text: str, tokens: int = 0) -> Sequence[Part]:
        """The parts that are certain now."""
        ...

    def flush(self) -> Sequence[Part]:
        """The rest."""
        ...


class Reading:
    """Parsers of all choices of a request. `make_parser` makes that of a choice, once more when its answer begins anew.

    `remote`: set where a process does the work; it is read there as long as the Reading is held.
    """

    def __init__(
        self,
        make_parser: Callable[[int], ChoiceParser],
        *,
        request_id: str,
        choices: int,
        family: ToolFamily | WholeFamily | None,
        is_parallel: bool = True,
        includes_reasoning: bool = True,
        remote: RemoteAnswer | None = None,
    ) -> None:
        self._family = family
        self._is_parallel = is_parallel
        self._includes_reasoning = includes_reasoning
        self._request_id = request_id
        self._make_parser = make_parser
        self._parsers = [make_parser(choice) for choice in range(choices)]
        self.remote = remote
        self._warnings: list[dict[str, None]] = [{} for _ in range(choices)]

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
        return list(dict.fromkeys(reason for warnings in self._warnings for reason in warnings))

    def restart(self, choice: int) -> None:
        """Forgets the text of a choice: its answer begins anew."""
        self._parsers[choice] = self._make_parser(choice)
        self._warnings[choice] = {}

    def push(self, choice: int, text: str, tokens: int) -> Sequence[Part]:
        """The parts that are certain after this text, which came from so many tokens."""
        return self._noted(choice, self._parsers[choice].push(text, tokens))

    def flush(self, choice: int) -> Sequence[Part]:
        """The rest of a choice that is over."""
        return self._noted(choice, self._parsers[choice].flush())

    def _noted(self, choice: int, parts: Sequence[Part]) -> Sequence[Part]:
        if not self._is_parallel:
            parts = [part for part in parts if not isinstance(part, CallBegin | CallArguments) or part.number == 0]
        if not self._includes_reasoning:
            parts = [part for part in parts if not isinstance(part, Reasoning)]
        for part in parts:
            if type(part) is Warned:
                self._warnings[choice][part.reason] = None
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
    includes_reasoning: bool = True,
) -> Reading | None:
    """How the answer to a conversation is read; None when it is content as it is."""
    text, selection = model.text, model.text.selection
    if constraint is not None and constraint.kind is not ConstraintKind.STRUCTURAL_TAG:
        # The grammar begins with the first token: there is no room for reasoning, whatever the prompt ended with.
        selection = replace(selection, reasoning=None)
    parses_tools = parses_tools and bool(conversation.tools)
    tools = selection.tools if parses_tools else None
    forced = forced_family(conversation.tool_choice) if parses_tools else None
    is_parallel = conversation.tool_choice.is_parallel
    if selection.reasoning is None and tools is None and forced is None:
        return None
    if text.parser_process is not None and forced is None:
        remote = RemoteAnswer(
            process=text.parser_process,
            parsers=[RemoteParser() for _ in range(choices)],
            conversation=conversation,
            prompt_ids=prompt_ids,
            parses_tools=parses_tools,
        )
        text.parser_process.answers[request_id] = remote
        return Reading(
            remote.parsers.__getitem__,
            request_id=request_id,
            choices=choices,
            family=tools,
            is_parallel=is_parallel,
            includes_reasoning=includes_reasoning,
            remote=remote,
        )
    functions = _functions(conversation.tools)
    tail = _tail(text, selection, conversation, prompt_ids)
    reasoning = None if selection.is_remote else selection.reasoning

    def make_parser(_: int) -> ChoiceParser:
        return answer_parser(forced or tools, reasoning, functions=functions, prompt_tail=tail)

    return Reading(
        make_parser,
        request_id=request_id,
        choices=choices,
        family=tools,
        is_parallel=is_parallel,
        includes_reasoning=includes_reasoning,
    )


def _tail(text: TextModel, selection: Selection, conversation: Conversation, prompt_ids: Sequence[int]) -> str:
    """The prompt's end. Of a message that is continued, the last mark of reasoning in it, wherever that is."""
    family = selection.reasoning
    if conversation.continues_final_message and isinstance(family, ReasoningFamily):
        content = text_of(conversation.messages[-1].get("content"))
        marks = sorted((content.rfind(mark), mark) for mark in (*family.openings, *family.closings))
        return marks[-1][1] if marks[-1][0] >= 0 else family.closings[0]
    return text.decode(list(prompt_ids[-PROMPT_TAIL_TOKENS:]), skip_special_tokens=False)


def _functions(tools: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Parameter schemas by function name."""
    functions = [tool.get("function") or {} for tool in tools]
    return {str(each.get("name")): each.get("parameters") or {} for each in functions}
