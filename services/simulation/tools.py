"""Requests that force tool calls: their constraint, the engine's answer, and what a client reads of it."""

import json
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from random import Random
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64_intdigest

from kvmesh.core import Constraint, Generation
from kvmesh.engines.simulated.constrained_answers import ScriptWriter, make_document
from kvmesh.kv.blocks import pack_tokens
from services.frontend.parsers.forced import LIST_FAMILY
from services.frontend.parsers.parser import AnswerParser, answer_parser
from services.frontend.parsers.parts import CallArguments, CallBegin, Part
from services.frontend.pipeline.request import Conversation, Request, ToolChoice, ToolMode
from services.frontend.pipeline.tool_choice import with_tool_constraint

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def _tool(name: str, **properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = (
    _tool("weather", city={"type": "string"}, days={"type": "integer", "minimum": 1, "maximum": 9}),
    _tool("search", words={"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3}),
)
NAMES = frozenset(tool["function"]["name"] for tool in TOOLS)


@cache
def tool_constraint() -> Constraint:
    """Returns what the pipeline makes of a request that must call one of the tools."""
    conversation = Conversation(messages=(), tools=TOOLS, tool_choice=ToolChoice(mode=ToolMode.REQUIRED))
    constraint = with_tool_constraint(
        Request(request_id="tools", model="", prompt=conversation), None
    ).sampling.constraint
    assert constraint is not None
    return constraint


class ByteWriter(ScriptWriter):
    """Writes constrained answers with a tokenizer that is given, not loaded from a model's directory."""

    can_write = True

    def __init__(self, tokenizer: "Tokenizer") -> None:
        super().__init__("")
        self._given = tokenizer

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        return self._given


def expected_document(generation: Generation) -> bytes:
    """Returns the whole answer to a constrained request. A token is a byte."""
    sampling = generation.sampling
    assert sampling.constraint is not None
    seed = 0 if sampling.seed is None or sampling.temperature == 0 else sampling.seed
    prompt = xxh3_64_intdigest(pack_tokens(generation.token_ids))
    return make_document(sampling.constraint, Random(f"{seed} {prompt}")).encode()


def call_parser() -> AnswerParser:
    """Returns the parser that a frontend uses for an answer of forced calls."""
    return answer_parser(LIST_FAMILY, None)


def joined(parts: Iterable[Part]) -> Sequence[Part]:
    """Merges adjacent pieces of content, and adjacent pieces of one call's arguments."""
    found: list[Part] = []
    for part in parts:
        before = found[-1] if found else None
        if isinstance(part, CallArguments) and isinstance(before, CallArguments) and before.number == part.number:
            found[-1] = CallArguments(part.number, before.text + part.text)
        elif isinstance(part, str) and isinstance(before, str):
            found[-1] = before + part
        else:
            found.append(part)
    return found


def call_problems(parts: Iterable[Part], text: str, *, is_complete: bool) -> list[str]:
    """Returns what is wrong with the calls that a client has read piece by piece of an answer with this text."""
    parser = call_parser()
    expected = joined((*parser.push(text), *parser.flush()))
    got = joined(parts)
    problems = [] if got == expected else [f"read the calls {got}, not {expected}"]
    begun = [part for part in got if isinstance(part, CallBegin)]
    if is_complete and not (begun and {part.name for part in begun} <= NAMES and all(map(_is_json, got))):
        problems.append(f"a complete answer with the calls {got}")
    return problems


def _is_json(part: Part) -> bool:
    if not isinstance(part, CallArguments):
        return True
    try:
        return isinstance(json.loads(part.text), dict)
    except ValueError:
        return False
