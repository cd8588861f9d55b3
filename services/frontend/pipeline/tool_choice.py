"""Converts a choice of tools into a constraint of the engine's grammar. Pure.

A forced call is JSON without the model's own marks, as in vLLM: engines need not know the model's format, and
`parsers/forced.py` parses it. Strict tools under `auto` keep the model's marks: a structural tag constrains the text between
them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvmesh.core import Constraint, ConstraintKind
from kvmesh.errors import InvalidRequestError, UnsupportedError
from kvmesh.rpc.codec.sampling import DOCUMENT_BYTES_MAX
from services.frontend.parsers.call_tags import CALL_TAGS
from services.frontend.parsers.family import ToolFamily, WholeFamily
from services.frontend.parsers.forced import LIST_FAMILY, named_family
from services.frontend.pipeline.request import Conversation, Request, ToolChoice, ToolMode

_SHARED = ("$defs", "definitions")
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def with_tool_constraint(request: Request, tools: ToolFamily | WholeFamily | None) -> Request:
    """Returns the request with the constraint of its choice of tools. `tools`: the model's own format of calls."""
    conversation = request.prompt
    if not isinstance(conversation, Conversation) or not conversation.tools:
        return request
    choice = conversation.tool_choice
    if choice.is_forced:
        constraint, field = _forced(conversation), "tool_choice"
    elif choice.strict:
        constraint, field = _strict(conversation, tools), "tools"
    else:
        return request
    # response_format does not apply to an answer of calls only. Any other constraint contradicts the choice of tools.
    own = request.named("constraint")
    if request.sampling.constraint is not None and not (choice.is_forced and own == "response_format"):
        raise InvalidRequestError(f"{own} and {field} cannot both be requested", field=field, reason="invalid_value")
    if len(constraint.text.encode()) > DOCUMENT_BYTES_MAX:
        raise InvalidRequestError(
            f"the schemas of all tools together have more than {DOCUMENT_BYTES_MAX} bytes",
            field="tools",
            reason="invalid_value",
        )
    fields = {**request.fields, "constraint": field}
    return replace(request, sampling=replace(request.sampling, constraint=constraint), fields=fields)


def forced_family(choice: ToolChoice) -> WholeFamily | None:
    """Returns the format of a forced answer; None if calls are not forced."""
    if choice.mode is ToolMode.NAMED:
        return named_family(choice.name)
    return LIST_FAMILY if choice.mode is ToolMode.REQUIRED else None


def _forced(conversation: Conversation) -> Constraint:
    choice = conversation.tool_choice
    functions = [tool["function"] for tool in conversation.tools]
    if choice.mode is ToolMode.NAMED:
        schema = next(_parameters(function) for function in functions if function["name"] == choice.name)
        return _schema(schema)
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": [_call_schema(function) for function in functions]}}
    if not choice.is_parallel:
        schema["maxItems"] = 1
    return _schema({**schema, **_shared_definitions(functions)})


def _schema(schema: Mapping[str, Any]) -> Constraint:
    return Constraint(kind=ConstraintKind.JSON_SCHEMA, text=json.dumps(schema, ensure_ascii=False))


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    return function.get("parameters") or {"type": "object", "properties": {}}


def _call_schema(function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = {key: value for key, value in _parameters(function).items() if key not in _SHARED}
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [function["name"]]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _shared_definitions(functions: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Collects the definitions of all functions, to be put at the root, where their references point."""
    found: dict[str, dict[str, Any]] = {}
    for function in functions:
        for word in _SHARED:
            definitions = _parameters(function).get(word) or {}
            if not isinstance(definitions, Mapping):
                raise InvalidRequestError(f"{word} of a tool must be an object", field="tools", reason="invalid_value")
            for name, value in definitions.items():
                if found.setdefault(word, {}).setdefault(name, value) != value:
                    raise InvalidRequestError(
                        f"two tools define {word}/{name[:64]} in different ways", field="tools", reason="invalid_value"
                    )
    return found


def _strict(conversation: Conversation, tools: ToolFamily | WholeFamily | None) -> Constraint:
    tags = CALL_TAGS.get(tools.name) if tools is not None else None
    if tags is None:
        first = next(
            i for i, tool in enumerate(conversation.tools) if _tool_name(tool) in conversation.tool_choice.strict
        )
        field = f"tools[{first}].function.strict"
        raise UnsupportedError(
            f"{field} is supported for this model with tool_choice required or a named tool only", field=field
        )
    choice = conversation.tool_choice
    schemas = [(_tool_name(tool), _arguments_schema(tool, choice.strict)) for tool in conversation.tools]
    document = json.dumps(tags.document(schemas, is_parallel=choice.is_parallel), ensure_ascii=False)
    return Constraint(kind=ConstraintKind.STRUCTURAL_TAG, text=document)


def _arguments_schema(tool: Mapping[str, Any], strict: Sequence[str]) -> Mapping[str, Any]:
    """Returns the schema of a tool's arguments: its own if the tool is strict, else any object."""
    return _parameters(tool["function"]) if _tool_name(tool) in strict else _ANY_OBJECT


def _tool_name(tool: Mapping[str, Any]) -> str:
    return str(tool["function"]["name"])
