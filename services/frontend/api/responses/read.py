"""The body of POST /v1/responses.

It is read into the body of a chat completion, which the chat reader then reads: what chat can do, responses can. Errors of
that reader are given the names that the client used.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvmesh.errors import InvalidRequestError, MeshError, UnsupportedError
from services.frontend.api.openai.asked import Asked
from services.frontend.api.openai.fields import Fields
from services.frontend.api.openai.sampling import TOKENS_MAX
from services.frontend.api.responses.items import messages_of, read_input

METADATA_MAX = 16
TOOLS_MAX = 128
INCLUDES = ("message.output_text.logprobs", "reasoning.encrypted_content")
_STORED_ID = re.compile(r"resp_[0-9a-f]{32}\Z")
# Chat's names of what was given under another name.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "response_format": "text.format",
    "logprobs": "include",
}
_TOOL_PATH = re.compile(r"(tools\[\d+\])\.function\b")

ChatReader = Callable[[Mapping[str, Any], str], Asked]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedResponse:
    """`values`: the same request for the chat reader, without the messages; `echoed`: what the answer repeats."""

    values: Mapping[str, Any]
    items: Sequence[Mapping[str, Any]]
    instructions: str | None
    previous_response_id: str | None
    stores: bool
    is_stream: bool
    includes_logprobs: bool
    echoed: Mapping[str, Any]


def read_response(values: Mapping[str, Any], *, stores_by_default: bool, has_store: bool) -> AskedResponse:
    """The request. InvalidRequestError and UnsupportedError name the field."""
    fields = Fields(values)
    model = fields.text("model", 256)
    if not model:
        raise fields.wrong("model", "a model's name")
    if not fields.has("input"):
        raise fields.wrong("input", "a string or a list of items")
    items = read_input(fields.take("input"))
    includes = _read_includes(fields)
    top_logprobs = fields.integer("top_logprobs", 0, 20)
    chat: dict[str, Any] = {"model": model, "stream": fields.flag("stream")}
    if includes or top_logprobs is not None:
        chat |= {"logprobs": True, "top_logprobs": top_logprobs or 0}
    instructions = fields.text("instructions")
    echoed = _read_common(fields, chat)
    asked = AskedResponse(
        values=chat,
        items=items,
        instructions=instructions,
        previous_response_id=_read_previous(fields),
        stores=_read_store(fields, stores_by_default=stores_by_default, has_store=has_store),
        is_stream=chat["stream"],
        includes_logprobs=includes or top_logprobs is not None,
        echoed={**echoed, "instructions": instructions, "top_logprobs": top_logprobs or 0},
    )
    _refuse_others(fields)
    fields.finish()
    return asked


def _read_includes(fields: Fields) -> bool:
    """Whether log-probabilities are to be included. Reasoning comes in the clear, so asking for a sealed copy asks for
    nothing that the item lacks."""
    value = fields.take("include")
    if value is None:
        return False
    if not isinstance(value, list) or len(value) > 16:
        raise fields.wrong("include", "a list of at most 16 words")
    for i, each in enumerate(value):
        if each not in INCLUDES:
            raise UnsupportedError(f"include can hold {', '.join(INCLUDES)}", field=f"include[{i}]")
    return INCLUDES[0] in value


def _read_previous(fields: Fields) -> str | None:
    previous = fields.text("previous_response_id", 256)
    if previous is not None and not is_response_id(previous):
        raise fields.wrong("previous_response_id", "the id of a response")
    return previous


def is_response_id(text: str) -> bool:
    """What an id of a response looks like."""
    return _STORED_ID.match(text) is not None


def _read_store(fields: Fields, *, stores_by_default: bool, has_store: bool) -> bool:
    if not has_store:
        fields.refuse("store", "this frontend keeps nothing", (False,))
        return False
    return fields.flag("store", stores_by_default)


def _read_common(fields: Fields, chat: dict[str, Any]) -> dict[str, Any]:
    """Fields that mean what they mean in chat, put into `chat`; returns what the answer repeats."""
    temperature, top_p = fields.number("temperature"), fields.number("top_p")
    tools = [_read_tool(Fields(each, f"tools[{i}].")) for i, each in enumerate(fields.objects("tools", TOOLS_MAX))]
    tool_choice, is_parallel = _read_tool_choice(fields), fields.flag("parallel_tool_calls", True)
    text, response_format, verbosity = _read_text(fields)
    reasoning = _read_reasoning(fields)
    limit = fields.integer("max_output_tokens", 1, TOKENS_MAX)
    chat |= {"temperature": temperature, "top_p": top_p, "max_completion_tokens": limit}
    chat |= {"tools": tools or None, "tool_choice": _chat_choice(tool_choice) if tools else None}
    if tools:
        chat["parallel_tool_calls"] = is_parallel
    elif tool_choice not in ("auto", "none"):
        raise InvalidRequestError("tool_choice needs tools", field="tool_choice", reason="invalid_value")
    chat |= {"response_format": response_format, "verbosity": verbosity, "reasoning_effort": reasoning["effort"]}
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        chat[name] = fields.text(name, 1024)
    for name in ("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop",
                 "priority", "cache_salt", "chat_template_kwargs"):  # fmt: skip
        chat[name] = fields.take(name)
    return {
        "temperature": temperature,
        "top_p": top_p,
        "tools": [{"type": "function", **tool["function"]} for tool in tools],
        "tool_choice": tool_choice,
        "parallel_tool_calls": is_parallel,
        "text": text,
        "reasoning": reasoning,
        "max_output_tokens": limit,
        "metadata": _read_metadata(fields),
        "user": chat["user"],
        "safety_identifier": chat["safety_identifier"],
        "prompt_cache_key": chat["prompt_cache_key"],
        "truncation": fields.choice("truncation", ("disabled",)) or "disabled",
        "service_tier": "default",
    }


def _read_tool(fields: Fields) -> dict[str, Any]:
    kind = fields.take("type")
    if not isinstance(kind, str):
        raise fields.wrong("type", "function")
    if kind != "function":
        raise UnsupportedError(
            f"tools of the type {kind[:64]!r} are not supported, only function", field=fields.name("type")
        )
    name = fields.text("name", 256)
    if not name:
        raise fields.wrong("name", "a function's name")
    function: dict[str, Any] = {"name": name}
    description, parameters = fields.text("description"), fields.object("parameters")
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    # Absent and null are OpenAI's word for strict where it is possible; here only a true asks for it.
    is_strict = fields.flag("strict")
    if is_strict:
        function["strict"] = True
    fields.finish()
    return {"type": "function", "function": function}


def _read_tool_choice(fields: Fields) -> Any:
    value = fields.take("tool_choice")
    if value is None or (isinstance(value, str) and value in ("auto", "none", "required")):
        return value or "auto"
    if not isinstance(value, dict):
        raise fields.wrong("tool_choice", "auto, none, required or an object")
    choice = Fields(value, "tool_choice.")
    if choice.take("type") != "function":
        raise UnsupportedError("tool_choice can only name a function", field="tool_choice.type")
    name = choice.text("name", 256)
    if not name:
        raise choice.wrong("name", "a function's name")
    choice.finish()
    return {"type": "function", "name": name}


def _chat_choice(choice: Any) -> Any:
    return choice if isinstance(choice, str) else {"type": "function", "function": {"name": choice["name"]}}


def _read_text(fields: Fields) -> tuple[dict[str, Any], dict[str, Any] | None, str | None]:
    """What the answer repeats, chat's `response_format`, and the verbosity."""
    value = fields.object("text")
    if value is None:
        return {"format": {"type": "text"}}, None, None
    text = Fields(value, "text.")
    form, verbosity = text.object("format"), text.choice("verbosity", ("low", "medium", "high"))
    text.finish()
    # Medium is what a model does that was told nothing.
    verbosity = None if verbosity == "medium" else verbosity
    if form is None:
        return {"format": {"type": "text"}}, None, verbosity
    return {"format": form}, _read_format(Fields(form, "text.format.")), verbosity


def _read_format(fields: Fields) -> dict[str, Any] | None:
    kind = fields.choice("type", ("text", "json_object", "json_schema"))
    if kind is None:
        raise fields.wrong("type", "one of text, json_object, json_schema")
    if kind != "json_schema":
        fields.finish()
        return None if kind == "text" else {"type": kind}
    name, schema = fields.text("name", 64), fields.object("schema")
    if not name:
        raise fields.wrong("name", "a string that is not empty")
    if schema is None:
        raise fields.wrong("schema", "a JSON Schema")
    fields.text("description")
    fields.flag("strict")
    fields.finish()
    return {"type": kind, "json_schema": {"name": name, "schema": schema}}


def _read_reasoning(fields: Fields) -> dict[str, Any]:
    value = fields.object("reasoning")
    if value is None:
        return {"effort": None, "summary": None}
    reasoning = Fields(value, "reasoning.")
    effort = reasoning.text("effort", 32)
    # Summaries are wanted where thoughts are hidden; here they come whole.
    summary = reasoning.choice("summary", ("auto", "concise", "detailed"))
    reasoning.refuse("generate_summary", "use summary")
    reasoning.finish()
    return {"effort": effort, "summary": summary}


def _read_metadata(fields: Fields) -> dict[str, str]:
    return read_metadata(fields) or {}


def read_metadata(fields: Fields) -> dict[str, str] | None:
    """`metadata`: at most 16 short strings by name."""
    value = fields.object("metadata")
    if value is None:
        return None
    if len(value) > METADATA_MAX:
        raise fields.wrong("metadata", f"an object of at most {METADATA_MAX} entries")
    for key, text in value.items():
        if not isinstance(text, str) or len(key) > 64 or len(text) > 512:
            raise fields.wrong("metadata", "an object of strings: names up to 64 characters, values up to 512")
    return value


def _refuse_others(fields: Fields) -> None:
    fields.choice("service_tier", ("auto", "default"))
    fields.refuse("background", "answers are made while the client waits", (False,))
    fields.refuse("conversation", "use previous_response_id")
    fields.refuse("prompt", "there are no stored prompt templates")
    fields.refuse("max_tool_calls", "there are no built-in tools")
    fields.refuse("context_management", "conversations are not compacted", ([],))
    fields.refuse("moderation", "there is none")
    fields.refuse("prompt_cache_retention", "the mesh decides how long prefixes stay cached", ("in_memory",))
    fields.refuse("prompt_cache_options", "the mesh decides how long prefixes stay cached")
    options = fields.object("stream_options")
    if options is not None:
        inner = Fields(options, "stream_options.")
        inner.refuse("include_obfuscation", "streams are not padded", (False,))
        inner.finish()


def read_asked(
    asked: AskedResponse, earlier: Sequence[Mapping[str, Any]], request_id: str, read_chat: ChatReader
) -> Asked:
    """The request for the pipeline. `earlier`: items of the conversation before this request's."""
    messages = messages_of([*earlier, *asked.items])
    if asked.instructions:
        messages.insert(0, {"role": "system", "content": asked.instructions})
    values = {name: value for name, value in asked.values.items() if value is not None}
    try:
        return read_chat({**values, "messages": messages}, request_id)
    except MeshError as error:
        raise renamed(error) from error


def renamed(error: MeshError) -> MeshError:
    """The error with the field's name in this API."""
    name = error.field
    new = "input" if name.startswith("messages[") else _TOOL_PATH.sub(r"\1", name)
    head, dot, rest = new.partition(".")
    new = _NAMES.get(head, head) + dot + rest if new != "input" else new
    new = new.replace("text.format.json_schema.", "text.format.").replace("tool_choice.function.", "tool_choice.")
    if new != name:
        error.message = error.message.replace(name, new, 1)
        error.field = new
    return error
