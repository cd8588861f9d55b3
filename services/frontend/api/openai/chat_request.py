"""The body of POST /v1/chat/completions."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import orjson

from kvmesh.errors import InvalidRequestError, UnsupportedError
from services.frontend.api.openai.asked import Asked
from services.frontend.api.openai.constraints import read_constraint
from services.frontend.api.openai.fields import Fields, Refusals
from services.frontend.api.openai.sampling import (
    TOKENS_MAX,
    read_extras,
    read_prompt_logprobs,
    read_sampling,
    read_stream_options,
    read_top_logprobs,
)
from services.frontend.pipeline.request import Conversation, Request, ToolChoice, ToolMode

MESSAGES_MAX = 4096
TOOLS_MAX = 128
CALLS_MAX = 128
PARTS_MAX = 1024
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
ROLES = ("system", "developer", "user", "assistant", "tool")
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
# Fields of a message that OpenAI's clients send back as they got them, and that no template needs.
_MESSAGE_IGNORED = ("refusal", "annotations", "audio", "function_call")
_REFUSED = Refusals(
    ("functions", "use tools", ([],)),
    ("function_call", "use tool_choice", ("none", "auto")),
    ("audio", "there is no audio output", ()),
    ("modalities", "only text comes out", (["text"],)),
    ("prediction", "not yet", ()),
    ("web_search_options", "there is no web search", ()),
    ("verbosity", "not yet", ()),
    ("chat_template", "templates come with the model", ()),
    ("add_special_tokens", "the chat template adds them", (False,)),
    ("echo", "only for completions", (False,)),
    ("mm_processor_kwargs", "only text goes in", ({},)),
)


def read_chat(values: Mapping[str, Any], request_id: str) -> Asked:
    """The request. InvalidRequestError and UnsupportedError name the field."""
    fields = Fields(values)
    model = fields.text("model", 256)
    if not model:
        raise fields.wrong("model", "a model's name")
    is_stream = fields.flag("stream")
    max_name = "max_completion_tokens" if fields.has("max_completion_tokens") else "max_tokens"
    old, new = fields.integer("max_tokens", 1, TOKENS_MAX), fields.integer("max_completion_tokens", 1, TOKENS_MAX)
    logprobs = read_top_logprobs(fields)
    tools, tool_choice = _read_tools(fields)
    constraint, constraint_name = read_constraint(fields)
    prompt_logprobs = read_prompt_logprobs(fields, is_stream=is_stream)
    includes_usage, has_usage_throughout = read_stream_options(fields, is_stream=is_stream)
    asked = Asked(
        requests=(
            Request(
                request_id=request_id,
                model=model,
                prompt=_read_conversation(fields, tools, tool_choice),
                sampling=read_sampling(
                    fields,
                    max_tokens=old if new is None else new,
                    logprobs=logprobs,
                    constraint=constraint,
                    prompt_logprobs=prompt_logprobs,
                ),
                choices=_or(fields.integer("n", 1, 128), 1),
                **read_extras(fields),
                fields={
                    "prompt": "messages",
                    "choices": "n",
                    "max_tokens": max_name,
                    "logprobs": "top_logprobs",
                    "constraint": constraint_name,
                },
            ),
        ),
        is_stream=is_stream,
        includes_usage=includes_usage,
        has_usage_throughout=has_usage_throughout,
        has_logprobs=logprobs is not None,
        returns_token_ids=fields.flag("return_token_ids"),
        names_tokens_by_id=fields.flag("return_tokens_as_token_ids"),
        includes_reasoning=fields.flag("include_reasoning", True),
        parses_tools=bool(tools),
        has_prompt_logprobs=prompt_logprobs is not None,
    )
    fields.refuse_all(_REFUSED)
    fields.finish()
    return asked


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def read_chat_prompt(fields: Fields) -> Conversation:
    """The conversation of a body that asks for its tokens only."""
    tools = [_read_tool(Fields(each, f"tools[{i}].")) for i, each in enumerate(fields.objects("tools", TOOLS_MAX))]
    return _read_conversation(fields, tools, ToolChoice())


def _read_conversation(fields: Fields, tools: list[dict[str, Any]], tool_choice: ToolChoice) -> Conversation:
    messages = fields.objects("messages", MESSAGES_MAX)
    if not messages:
        raise fields.wrong("messages", f"a list of 1 to {MESSAGES_MAX} messages")
    return Conversation(
        messages=[
            each if _is_plain(each) else _read_message(Fields(each, f"messages[{i}]."))
            for i, each in enumerate(messages)
        ],
        tools=tools,
        tool_choice=tool_choice,
        **({} if fields.lacks(_OF_TEMPLATE) else _read_for_template(fields)),
    )


_PLAIN = frozenset(("role", "content"))
_OF_TEMPLATE = frozenset(
    "continue_final_message add_generation_prompt documents reasoning_effort chat_template_kwargs".split()
)


def _is_plain(message: Mapping[str, Any]) -> bool:
    """Who spoke and a text: what `_read_message` would give as it is."""
    return message.keys() == _PLAIN and type(message["content"]) is str and message["role"] in ROLES


def _read_for_template(fields: Fields) -> dict[str, Any]:
    continues = fields.flag("continue_final_message")
    adds_prompt = fields.flag("add_generation_prompt", not continues)
    if continues and adds_prompt:
        raise fields.wrong("continue_final_message", "false when add_generation_prompt is true")
    return {
        "documents": fields.objects("documents", 1024),
        "arguments": _read_arguments_of_template(fields),
        "adds_generation_prompt": adds_prompt,
        "continues_final_message": continues,
    }


def _read_arguments_of_template(fields: Fields) -> dict[str, Any]:
    """`reasoning_effort` is a variable of templates that know it; what `chat_template_kwargs` says of it wins."""
    effort = fields.choice("reasoning_effort", EFFORTS)
    return ({} if effort is None else {"reasoning_effort": effort}) | (fields.object("chat_template_kwargs") or {})


def _read_message(fields: Fields) -> dict[str, Any]:
    role = fields.choice("role", ROLES)
    if role is None:
        raise fields.wrong("role", "one of " + ", ".join(ROLES))
    message: dict[str, Any] = {"role": role}
    calls = [_read_call(Fields(each, fields.name(f"tool_calls[{i}].")))
             for i, each in enumerate(fields.objects("tool_calls", CALLS_MAX))]  # fmt: skip
    if calls and role != "assistant":
        raise fields.wrong("tool_calls", "absent unless the role is assistant")
    if calls:
        message["tool_calls"] = calls
    content = _read_content(fields)
    if content is None and not calls and role != "assistant":
        raise fields.wrong("content", "a string or a list of parts")
    message["content"] = content
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        text = fields.text(name)
        if text is not None:
            message[name] = text
    if "reasoning" in message:
        # The same by another name, which few templates know.
        message.setdefault("reasoning_content", message["reasoning"])
    fields.ignore(_MESSAGE_IGNORED)
    fields.finish()
    return message


def _read_content(fields: Fields) -> str | list[dict[str, str]] | None:
    """A text, or parts of text as the client sent them: the template may know only one of both."""
    value = fields.take("content")
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or len(value) > PARTS_MAX:
        raise fields.wrong("content", f"a string or a list of 1 to {PARTS_MAX} parts")
    texts = [_read_part(each, fields.name(f"content[{i}]")) for i, each in enumerate(value)]
    return [{"type": "text", "text": text} for text in texts]


def _read_part(value: Any, name: str) -> str:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise InvalidRequestError(f"{name} must be an object with a type", field=name, reason="invalid_value")
    part = Fields(value, f"{name}.")
    kind = part.take("type")
    if kind not in ("text", "refusal"):
        raise UnsupportedError(f"{name} is of the type {kind[:32]!r}; only text is supported", field=f"{name}.type")
    text = part.text(kind)
    if text is None:
        raise part.wrong(kind, "a string")
    part.finish()
    return text


def _read_call(fields: Fields) -> dict[str, Any]:
    call_id = fields.text("id", 256)
    fields.choice("type", ("function",))
    fields.ignore(("index",))
    value = fields.object("function")
    if value is None:
        raise fields.wrong("function", "an object")
    function = Fields(value, fields.name("function."))
    name = function.text("name", 256)
    if not name:
        raise function.wrong("name", "a function's name")
    arguments = _read_arguments(function)
    function.finish()
    fields.finish()
    return {"id": call_id or "", "type": "function", "function": {"name": name, "arguments": arguments}}


def _read_arguments(function: Fields) -> dict[str, Any]:
    """As an object, the way templates want them."""
    text = function.text("arguments")
    try:
        arguments = orjson.loads(text) if text else {}
    except orjson.JSONDecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        raise function.wrong("arguments", "a JSON object in a string")
    return arguments


_OF_TOOLS = frozenset(("tools", "tool_choice", "parallel_tool_calls"))
_ANY_CHOICE = ToolChoice()


def _read_tools(fields: Fields) -> tuple[list[dict[str, Any]], ToolChoice]:
    """The tools for the template, none where none may be called, and how they are chosen."""
    if fields.lacks(_OF_TOOLS):
        return [], _ANY_CHOICE
    values = fields.objects("tools", TOOLS_MAX)
    tools = [_read_tool(Fields(each, f"tools[{i}].")) for i, each in enumerate(values)]
    strict = [tool["function"]["name"] for tool, value in zip(tools, values, strict=True) if _is_strict(value)]
    is_parallel = fields.flag("parallel_tool_calls", True)
    value = fields.take("tool_choice")
    if value is None:
        return tools, ToolChoice(is_parallel=is_parallel, strict=strict)
    if value == "none":
        return [], ToolChoice(mode=ToolMode.NONE)
    if not tools:
        raise InvalidRequestError("tool_choice needs tools", field="tool_choice", reason="invalid_value")
    choice = ToolChoice(is_parallel=is_parallel, strict=strict)
    if isinstance(value, str):
        if value not in ("auto", "required"):
            raise fields.wrong("tool_choice", "none, auto, required or an object")
        return tools, replace(choice, mode=ToolMode(value))
    if not isinstance(value, dict):
        raise fields.wrong("tool_choice", "none, auto, required or an object")
    return _read_chosen(Fields(value, "tool_choice."), tools, choice)


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return tool["function"].get("strict") is True


def _read_chosen(
    fields: Fields, tools: list[dict[str, Any]], choice: ToolChoice
) -> tuple[list[dict[str, Any]], ToolChoice]:
    """A choice that names tools: the one to call, or those that may be called."""
    if fields.choice("type", ("function", "allowed_tools")) == "allowed_tools":
        return _read_allowed(fields, tools, choice)
    name = _read_named(fields, tools)
    fields.finish()
    return tools, replace(choice, mode=ToolMode.NAMED, name=name)


def _read_named(fields: Fields, tools: list[dict[str, Any]]) -> str:
    function = Fields(fields.object("function") or {}, fields.name("function."))
    name = function.text("name", 64)
    function.finish()
    if name not in [tool["function"]["name"] for tool in tools]:
        raise function.wrong("name", "the name of one of the tools")
    assert name is not None
    return name


def _read_allowed(
    fields: Fields, tools: list[dict[str, Any]], choice: ToolChoice
) -> tuple[list[dict[str, Any]], ToolChoice]:
    allowed = Fields(fields.object("allowed_tools") or {}, fields.name("allowed_tools."))
    mode = allowed.choice("mode", ("auto", "required"))
    if mode is None:
        raise allowed.wrong("mode", "auto or required")
    names = set()
    for i, each in enumerate(allowed.objects("tools", TOOLS_MAX)):
        one = Fields(each, allowed.name(f"tools[{i}]."))
        one.choice("type", ("function",))
        names.add(_read_named(one, tools))
        one.finish()
    if not names:
        raise allowed.wrong("tools", "a list of at least one tool")
    allowed.finish()
    fields.finish()
    kept = [tool for tool in tools if tool["function"]["name"] in names]
    strict = [name for name in choice.strict if name in names]
    return kept, replace(choice, mode=ToolMode(mode), strict=strict)


def _read_tool(fields: Fields) -> dict[str, Any]:
    if fields.choice("type", ("function",)) is None:
        raise fields.wrong("type", "function")
    value = fields.object("function")
    if value is None:
        raise fields.wrong("function", "an object")
    function = Fields(value, fields.name("function."))
    name = function.text("name", 64)
    if not name or not _TOOL_NAME.match(name):
        raise function.wrong("name", "1 to 64 characters of A-Z a-z 0-9 _ . -")
    tool: dict[str, Any] = {"name": name}
    description = function.text("description")
    if description is not None:
        tool["description"] = description
    parameters = function.object("parameters")
    if parameters is not None:
        tool["parameters"] = parameters
    function.flag("strict")
    function.finish()
    fields.finish()
    return {"type": "function", "function": tool}
