"""The bodies of POST /v1/messages and /v1/messages/count_tokens.

They are read into the body of a chat completion, which the chat reader then reads. Errors of that reader are given the
names that the client used.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvmesh.errors import InvalidRequestError, MeshError, UnsupportedError
from services.frontend.api.anthropic.content import continues_last, read_cache_control, read_messages, read_system
from services.frontend.api.openai.asked import Asked
from services.frontend.api.openai.chat_request import read_chat
from services.frontend.api.openai.fields import Fields
from services.frontend.api.openai.sampling import TOKENS_MAX

TOOLS_MAX = 128
BUDGET_WARNING = "thinking.budget_tokens is not enforced; max_tokens bounds thinking and answer together"
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
# Chat's names of what was given under another name.
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "continue_final_message": "messages",
    "add_generation_prompt": "messages",
    "chat_template_kwargs": "thinking",
}
_TOOL_PATH = re.compile(r"(tools\[\d+\])\.function\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedMessage:
    """`request` has one prompt and one choice; `warnings` are told in a header."""

    request: Asked
    warnings: tuple[str, ...] = ()


def read_message(values: Mapping[str, Any], request_id: str, *, counts_only: bool = False) -> AskedMessage:
    """The request. InvalidRequestError and UnsupportedError name the field. `counts_only`: nothing is generated."""
    fields = Fields(values)
    model = fields.text("model", 256)
    if not model:
        raise fields.wrong("model", "a model's name")
    chat: dict[str, Any] = {"model": model}
    warnings: list[str] = []
    if not counts_only:
        _read_generation(fields, chat)
    messages = [*read_system(fields), *read_messages(fields)]
    _read_tools(fields, chat)
    _read_thinking(fields, chat, warnings)
    _read_output(fields, chat)
    if continues_last(messages):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    read_cache_control(fields)
    _refuse_others(fields)
    fields.finish()
    given = {name: value for name, value in chat.items() if value is not None}
    try:
        return AskedMessage(request=read_chat({**given, "messages": messages}, request_id), warnings=tuple(warnings))
    except MeshError as error:
        raise renamed(error) from error


def _read_generation(fields: Fields, chat: dict[str, Any]) -> None:
    limit = fields.integer("max_tokens", 1, TOKENS_MAX)
    if limit is None:
        raise fields.wrong("max_tokens", "an integer of at least 1")
    temperature = fields.number("temperature")
    if temperature is not None and not 0 <= temperature <= 1:
        raise fields.wrong("temperature", "a number from 0 to 1")
    stops = fields.take("stop_sequences")
    if stops is not None and not isinstance(stops, list):
        raise fields.wrong("stop_sequences", "a list of strings")
    chat |= {
        "max_completion_tokens": limit,
        "stream": fields.flag("stream"),
        "temperature": temperature,
        "top_p": fields.number("top_p"),
        "top_k": fields.integer("top_k", 0, TOKENS_MAX),
        "stop": stops,
    }
    metadata = fields.object("metadata")
    if metadata is not None:
        inner = Fields(metadata, "metadata.")
        chat["user"] = inner.text("user_id", 512)
        inner.finish()
    fields.choice("service_tier", ("auto", "standard_only"))


def _read_tools(fields: Fields, chat: dict[str, Any]) -> None:
    tools = [_read_tool(Fields(each, f"tools[{i}].")) for i, each in enumerate(fields.objects("tools", TOOLS_MAX))]
    value = fields.object("tool_choice")
    if not tools:
        if value is not None and value.get("type") != "none":
            raise InvalidRequestError("tool_choice needs tools", field="tool_choice", reason="invalid_value")
        return
    chat["tools"] = tools
    if value is None:
        return
    choice = Fields(value, "tool_choice.")
    kind = choice.choice("type", ("auto", "any", "tool", "none"))
    if kind is None:
        raise choice.wrong("type", "one of auto, any, tool, none")
    if kind == "tool":
        name = choice.text("name", 256)
        if not name:
            raise choice.wrong("name", "a tool's name")
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    else:
        chat["tool_choice"] = "required" if kind == "any" else kind
    if choice.flag("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    choice.finish()


def _read_tool(fields: Fields) -> dict[str, Any]:
    kind = fields.text("type", 64)
    if kind not in (None, "custom"):
        raise UnsupportedError(f"tools of the type {kind!r} are not supported, only custom", field=fields.name("type"))
    name, schema = fields.text("name", 256), fields.object("input_schema")
    if not name:
        raise fields.wrong("name", "a tool's name")
    if schema is None:
        raise fields.wrong("input_schema", "a JSON Schema")
    function: dict[str, Any] = {"name": name, "parameters": schema}
    description = fields.text("description")
    if description is not None:
        function["description"] = description
    if fields.flag("strict"):
        function["strict"] = True
    read_cache_control(fields)
    fields.flag("eager_input_streaming")
    fields.refuse("defer_loading", "all tools are shown to the model", (False,))
    fields.refuse("input_examples", "write them into the description", ([],))
    fields.refuse("allowed_callers", "tools are called by the model itself only", (["direct"],))
    fields.finish()
    return {"type": "function", "function": function}


def _read_thinking(fields: Fields, chat: dict[str, Any], warnings: list[str]) -> None:
    """Whether the model thinks first, in the word that chat templates know it by."""
    value = fields.object("thinking")
    if value is None:
        return
    thinking = Fields(value, "thinking.")
    kind = thinking.choice("type", ("enabled", "disabled", "adaptive"))
    if kind is None:
        raise thinking.wrong("type", "one of enabled, disabled, adaptive")
    if kind == "enabled":
        budget = thinking.integer("budget_tokens", 1, TOKENS_MAX)
        if budget is None:
            raise thinking.wrong("budget_tokens", "an integer of at least 1")
        limit = chat.get("max_completion_tokens")
        if limit is not None and budget >= limit:
            raise thinking.wrong("budget_tokens", "less than max_tokens")
        warnings.append(BUDGET_WARNING)
    if kind != "disabled":
        thinking.refuse("display", "thoughts are shown as they are", ("summarized",))
    thinking.finish()
    if kind != "adaptive":
        chat["chat_template_kwargs"] = {"enable_thinking": kind == "enabled"}


def _read_output(fields: Fields, chat: dict[str, Any]) -> None:
    value = fields.object("output_config")
    if value is None:
        return
    config = Fields(value, "output_config.")
    chat["reasoning_effort"] = config.choice("effort", _EFFORTS)
    form = config.object("format")
    config.finish()
    if form is None:
        return
    inner = Fields(form, "output_config.format.")
    if inner.choice("type", ("json_schema",)) is None:
        raise inner.wrong("type", "json_schema")
    schema = inner.object("schema")
    if schema is None:
        raise inner.wrong("schema", "a JSON Schema")
    inner.finish()
    chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _refuse_others(fields: Fields) -> None:
    fields.refuse("container", "there are no containers")
    fields.refuse("mcp_servers", "tools are run by the client", ([],))
    fields.refuse("context_management", "conversations are not cut")
    fields.refuse("diagnostics", "there are none")
    fields.refuse("inference_geo", "the mesh is where it is")
    fields.refuse("speed", "there is one", ("standard",))


def renamed(error: MeshError) -> MeshError:
    """The error with the field's name in this API."""
    name = error.field
    new = _TOOL_PATH.sub(r"\1", name).replace("].parameters", "].input_schema")
    head, dot, rest = new.partition(".")
    new = _NAMES.get(head, head) + dot + rest
    new = new.replace("output_config.format.json_schema.", "output_config.format.")
    if new != name:
        error.message = error.message.replace(name, new, 1)
        error.field = new
    return error
