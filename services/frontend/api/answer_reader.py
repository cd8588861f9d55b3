"""Parses the text of an answer into content, reasoning, tool calls and warnings."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from kvmesh.core import ConstraintKind, Usage
from services.frontend.parser_process.relay import RemoteAnswer, RemoteParser
from services.frontend.parsers.family import ReasoningFamily, ToolFamily, WholeFamily
from services.frontend.parsers.parser import answer_parser
from services.frontend.parsers.parts import CallArguments, CallBegin, Part, Reasoning, Warned
from services.frontend.pipeline.prepare import Prepared
from services.frontend.pipeline.request import Conversation, text_of
from services.frontend.pipeline.tool_choice import forced_family
from services.frontend.text.text_model import TextModel

PROMPT_TAIL_TOKENS = 16
"""Enough to see whether the prompt ends inside reasoning."""


class ChoiceParser(Protocol):
    """Parses the text of one choice. `calls`: calls begun so far."""

    reasoning_tokens: int

    @property
    def calls(self) -> int: ...

    def push(self, text: str, tokens: int = 0) -> Sequence[Part]:
        """Returns the parts that are certain after this text, which comes from `tokens` tokens."""
        ...

    def flush(self) -> Sequence[Part]:
        """Returns the rest at the end of the choice."""
        ...


class PlainParser:
    """Parser of an answer that is content only."""

    calls = 0
    reasoning_tokens = 0

    def push(self, text: str, tokens: int = 0) -> Sequence[Part]:
        return (text,) if text else ()

    def flush(self) -> Sequence[Part]:
        return ()


_PLAIN: ChoiceParser = PlainParser()


class AnswerReader:
    """The parsers of all choices of a request.

    `make_parser` makes the parser of a choice, again when the answer restarts; None if the answer is content only. `remote` is
    set if a parser process does the work; the process knows the request as long as this object refers to it.
    """

    def __init__(
        self,
        make_parser: Callable[[int], ChoiceParser] | None,
        *,
        request_id: str,
        choices: int,
        family: ToolFamily | WholeFamily | None = None,
        is_parallel: bool = True,
        includes_reasoning: bool = True,
        remote: RemoteAnswer | None = None,
    ) -> None:
        self._family = family
        self._is_parallel = is_parallel
        self._includes_reasoning = includes_reasoning
        self._request_id = request_id
        self._make_parser = make_parser
        self._parsers = [make_parser(choice) for choice in range(choices)] if make_parser else [_PLAIN] * choices
        self._warnings: list[dict[str, None]] = [{} for _ in range(choices)]
        self.remote = remote
        self.choices = choices
        self.is_plain = make_parser is None

    def add_reasoning_tokens(self, usage: Usage) -> Usage:
        """Returns the usage with the reasoning tokens of all choices, unless the worker counted them."""
        if self.is_plain or usage.reasoning_tokens:
            return usage
        return replace(usage, reasoning_tokens=sum(parser.reasoning_tokens for parser in self._parsers))

    @property
    def warnings(self) -> list[str]:
        """The reasons of all warnings so far, each once."""
        return list(dict.fromkeys(reason for warnings in self._warnings for reason in warnings))

    def restart(self, choice: int) -> None:
        """Discards the text of a choice, because its answer restarts."""
        if self._make_parser is not None:
            self._parsers[choice] = self._make_parser(choice)
        self._warnings[choice] = {}

    def push(self, choice: int, text: str, tokens: int) -> Sequence[Part]:
        """Returns the parts that are certain after this text, which comes from `tokens` tokens."""
        return self._filter(choice, self._parsers[choice].push(text, tokens))

    def flush(self, choice: int) -> Sequence[Part]:
        """Returns the rest at the end of a choice."""
        return self._filter(choice, self._parsers[choice].flush())

    def _filter(self, choice: int, parts: Sequence[Part]) -> Sequence[Part]:
        if self.is_plain:
            return parts
        if not self._is_parallel:
            parts = [part for part in parts if not isinstance(part, CallBegin | CallArguments) or part.number == 0]
        if not self._includes_reasoning:
            parts = [part for part in parts if not isinstance(part, Reasoning)]
        for part in parts:
            if type(part) is Warned:
                self._warnings[choice][part.reason] = None
        return parts

    def calls(self, choice: int) -> int:
        """Returns the number of calls that the client sees of a choice."""
        calls = self._parsers[choice].calls
        return calls if self._is_parallel else min(1, calls)

    def call_id(self, choice: int, call: CallBegin) -> str:
        """Returns the id of a call. It contains the random request id, so it is unique in any conversation."""
        if call.call_id and getattr(self._family, "gives_call_ids", False):
            return call.call_id
        if length := getattr(self._family, "call_id_characters", 0):
            return f"{self._request_id[: length - 4]}{choice % 100:02}{call.number % 100:02}"
        return f"call_{self._request_id[:24]}{choice}{call.number}"


def make_reader(prepared: Prepared, *, choices: int, includes_reasoning: bool = True) -> AnswerReader:
    """Returns the reader of the answer. `choices`: over all prompts of the API request, of which `prepared` is the first."""
    text, conversation = prepared.model.text, prepared.request.prompt
    request_id, prompt_ids = prepared.request.request_id, prepared.generation.token_ids
    if not isinstance(conversation, Conversation):
        return AnswerReader(None, request_id=request_id, choices=choices)
    constraint = prepared.generation.sampling.constraint
    reasoning = text.selection.reasoning
    if constraint is not None and constraint.kind is not ConstraintKind.STRUCTURAL_TAG:
        # The grammar begins with the first token: there is no room for reasoning, whatever the prompt ended with.
        reasoning = None
    parses_tools = bool(conversation.tools)
    tools = text.selection.tools if parses_tools else None
    forced = forced_family(conversation.tool_choice) if parses_tools else None
    if reasoning is None and tools is None and forced is None:
        return AnswerReader(None, request_id=request_id, choices=choices)
    remote: RemoteAnswer | None = None
    if text.parser_process is not None and forced is None:
        parsers = [RemoteParser() for _ in range(choices)]
        remote = text.parser_process.answers[request_id] = RemoteAnswer(
            process=text.parser_process,
            parsers=parsers,
            conversation=conversation,
            prompt_ids=prompt_ids,
            parses_tools=parses_tools,
        )
        make_parser: Callable[[int], ChoiceParser] = parsers.__getitem__
    else:
        functions = _parameter_schemas(conversation.tools)
        tail = _prompt_tail(text, reasoning, conversation, prompt_ids=prompt_ids)
        local_reasoning = None if text.selection.is_remote else reasoning

        def make_parser(_: int) -> ChoiceParser:
            return answer_parser(forced or tools, local_reasoning, functions=functions, prompt_tail=tail)

    return AnswerReader(
        make_parser,
        request_id=request_id,
        choices=choices,
        family=tools,
        is_parallel=conversation.tool_choice.is_parallel,
        includes_reasoning=includes_reasoning,
        remote=remote,
    )


def _prompt_tail(
    text: TextModel,
    family: ReasoningFamily | WholeFamily | None,
    conversation: Conversation,
    *,
    prompt_ids: Sequence[int],
) -> str:
    """Returns the end of the prompt; of a message that is continued, the last mark of reasoning in it, wherever that is."""
    if conversation.continues_final_message and isinstance(family, ReasoningFamily):
        content = text_of(conversation.messages[-1].get("content"))
        marks = sorted((content.rfind(mark), mark) for mark in (*family.openings, *family.closings))
        return marks[-1][1] if marks[-1][0] >= 0 else family.closings[0]
    return text.decode(list(prompt_ids[-PROMPT_TAIL_TOKENS:]), skip_special_tokens=False)


def _parameter_schemas(tools: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    functions = [tool.get("function") or {} for tool in tools]
    return {str(each.get("name")): each.get("parameters") or {} for each in functions}
