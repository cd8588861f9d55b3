"""The body of POST /v1/responses."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from kvmesh.core import Constraint, ConstraintKind
from kvmesh.errors import UnsupportedError
from services.frontend.api.openai.chat_request import (
    TOOLS_MAX,
    Effort,
    JsonSchema,
    ToolName,
    choose_tools,
    template_tool,
)
from services.frontend.api.openai.constraints import json_schema
from services.frontend.api.openai.sampling import (
    CommonSampling,
    Logprobs,
    Priority,
    ServiceTier,
    SessionKey,
    Verbosity,
    sampling_params,
)
from services.frontend.api.request_body import (
    Body,
    Count,
    FieldError,
    Ignored,
    JsonObject,
    RefusingBody,
    invalid_value,
    read_body,
    refused,
)
from services.frontend.api.responses.items import ITEMS_MAX, Item, messages_of, stored_items
from services.frontend.pipeline.request import Conversation, Request, ToolChoice, ToolMode

INCLUDES = ("message.output_text.logprobs", "reasoning.encrypted_content")
RESPONSE_ID_PATTERN = "^resp_[0-9a-f]{32}$"
_STORED_ID = re.compile(r"resp_[0-9a-f]{32}\Z")
StoredMetadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class ResponseTool(Body, kw_only=True):
    """A function that may be called. Only `strict` true asks for strictness; OpenAI's default is strict where possible."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class ResponseToolChoice(Body, kw_only=True):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    name: Annotated[str, Meta(min_length=1, max_length=256)]


class ResponseTextFormat(Body, kw_only=True):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    schema: JsonSchema | None = None
    description: str | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        for name in ("name", "schema"):
            if (getattr(self, name) is not None) != (self.type == "json_schema"):
                raise FieldError(name, message="must be given with the type json_schema, and only then")


class ResponseText(RefusingBody, kw_only=True):
    """`text`."""

    format: ResponseTextFormat | None = None
    verbosity: Verbosity | None = None


class ResponseReasoning(RefusingBody, kw_only=True):
    """`reasoning`. The answer contains the whole reasoning, so summaries are not needed."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Annotated[Any, refused("use summary")] = None


class ResponseStreamOptions(RefusingBody, kw_only=True):
    """`stream_options`."""

    include_obfuscation: Annotated[Any, refused("streams are not padded", False)] = None


class ResponseRequest(CommonSampling, kw_only=True):
    """The body."""

    input: str | Annotated[list[Item], Meta(min_length=1, max_length=ITEMS_MAX)]
    instructions: Annotated[
        str | None, Meta(description="The first message; previous_response_id does not repeat it.")
    ] = None
    previous_response_id: (
        Annotated[str, Meta(max_length=256, extra_json_schema={"pattern": RESPONSE_ID_PATTERN})] | None
    ) = None
    store: Annotated[
        bool | None, Meta(description="Store the response, so that it can be continued and read again.")
    ] = None
    stream: Annotated[bool | None, Meta(description="Answer with server-sent events.")] = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Count | None = None
    top_logprobs: Logprobs | None = None
    include: (
        Annotated[list[Annotated[str, Meta(extra_json_schema={"enum": list(INCLUDES)})]], Meta(max_length=16)] | None
    ) = None
    tools: Annotated[list[ResponseTool], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: ResponseText | None = None
    reasoning: ResponseReasoning | None = None
    metadata: StoredMetadata | None = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None, Meta(description="auto: a prompt that does not fit loses its first tokens.")
    ] = None
    service_tier: ServiceTier | None = None
    safety_identifier: Annotated[str, Meta(max_length=1024)] | None = None
    prompt_cache_key: SessionKey | None = None
    priority: Priority | None = None
    chat_template_kwargs: JsonObject | None = None
    background: Annotated[Any, refused("the client must wait for the answer", False)] = None
    conversation: Annotated[Any, refused("use previous_response_id")] = None
    prompt: Annotated[Any, refused("there are no stored prompt templates")] = None
    max_tool_calls: Annotated[
        Count | None,
        Meta(description="Checked; changes nothing: it limits calls of built-in tools, and there are none."),
    ] = None
    context_management: Annotated[Any, refused("conversations are not compacted", [])] = None
    moderation: Annotated[Any, refused("there is none")] = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedResponse:
    """A checked body. `items`: its input in the form in which it is stored. `stores`: whether the answer is stored."""

    body: ResponseRequest
    items: Sequence[Mapping[str, Any]]
    stores: bool

    @property
    def is_stream(self) -> bool:
        return bool(self.body.stream)

    @property
    def includes_logprobs(self) -> bool:
        # The other value of `include` changes nothing, since reasoning is not encrypted.
        return self.body.top_logprobs is not None or INCLUDES[0] in (self.body.include or ())

    def echoed(self) -> JsonObject:
        """Returns the fields that the answer repeats."""
        body = self.body
        choice, text, reasoning = body.tool_choice, body.text, body.reasoning
        return {
            "model": body.model,
            "previous_response_id": body.previous_response_id,
            "store": self.stores,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tools": [_tool_body(each) for each in body.tools or ()],
            "tool_choice": {"type": "function", "name": choice.name}
            if isinstance(choice, ResponseToolChoice)
            else choice or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "text": {"format": {"type": "text"} if text is None or text.format is None else _format_body(text.format)},
            "reasoning": {
                "effort": None if reasoning is None else reasoning.effort,
                "summary": None if reasoning is None else reasoning.summary,
            },
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "user": body.user,
            "safety_identifier": body.safety_identifier,
            "prompt_cache_key": body.prompt_cache_key,
            "truncation": body.truncation or "disabled",
            "service_tier": "default",
            "instructions": body.instructions,
            "top_logprobs": body.top_logprobs or 0,
        }


def _tool_body(tool: ResponseTool) -> JsonObject:
    function = template_tool(tool.name, description=tool.description, parameters=tool.parameters)["function"]
    return {"type": "function", **function, **({"strict": True} if tool.strict else {})}


def _format_body(form: ResponseTextFormat) -> JsonObject:
    return {name: value for name in form.__struct_fields__ if (value := getattr(form, name)) is not None}


def read_response(values: Mapping[str, Any], *, stores_by_default: bool, has_store: bool) -> ParsedResponse:
    """Checks a body. InvalidRequestError and UnsupportedError name the field."""
    body = read_body(ResponseRequest, _with_item_types(values))
    body.model_name()
    for i, each in enumerate(body.include or ()):
        if each not in INCLUDES:
            raise UnsupportedError(f"include can hold {', '.join(INCLUDES)}", field=f"include[{i}]")
    if body.previous_response_id is not None and not is_response_id(body.previous_response_id):
        raise invalid_value("previous_response_id", wanted="the id of a response")
    if body.store and not has_store:
        raise UnsupportedError("store is not supported: this frontend stores no responses", field="store")
    stores = has_store and (stores_by_default if body.store is None else body.store)
    return ParsedResponse(body=body, items=stored_items(body.input), stores=stores)


def _with_item_types(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Adds the type `message` to items without a type, because msgspec chooses an item's class by its type."""
    items = values.get("input")
    if not isinstance(items, list):
        return values
    typed = [
        {**each, "type": "message"} if isinstance(each, dict) and each.get("type") is None else each for each in items
    ]
    return {**values, "input": typed}


def is_response_id(text: str) -> bool:
    return _STORED_ID.match(text) is not None


def to_request(parsed: ParsedResponse, earlier: Sequence[Mapping[str, Any]], request_id: str) -> Request:
    """Returns the request for the pipeline. `earlier`: the items of the conversation that it continues."""
    body = parsed.body
    messages = messages_of([*earlier, *parsed.items])
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    tools, tool_choice = _chosen_tools(body)
    # Variables that some templates know.
    arguments: JsonObject = {}
    if body.reasoning is not None and body.reasoning.effort is not None:
        arguments["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.verbosity is not None:
        arguments["verbosity"] = body.text.verbosity
    return Request(
        request_id=request_id,
        model=body.model_name(),
        prompt=Conversation(
            messages=messages,
            tools=tools,
            tool_choice=tool_choice,
            arguments=arguments | (body.chat_template_kwargs or {}),
        ),
        sampling=sampling_params(
            body,
            max_tokens=body.max_output_tokens,
            logprobs=body.top_logprobs or 0 if parsed.includes_logprobs else None,
            constraint=_constraint(body),
        ),
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        session_id=body.prompt_cache_key or "",
        prompt_tokens_kept=-1 if body.truncation == "auto" else None,
        fields={
            "prompt": "input",
            "max_tokens": "max_output_tokens",
            "constraint": "text.format",
            "logprobs": "top_logprobs",
        },
    )


def _constraint(body: ResponseRequest) -> Constraint | None:
    form = None if body.text is None else body.text.format
    if form is None or form.type == "text":
        return None
    if form.schema is None:
        return Constraint(kind=ConstraintKind.JSON_OBJECT)
    return json_schema(form.schema, "text.format.schema")


def _chosen_tools(body: ResponseRequest) -> tuple[list[JsonObject], ToolChoice]:
    given, selection = body.tools or (), body.tool_choice
    mode, name = None, None
    if isinstance(selection, ResponseToolChoice):
        mode, name = ToolMode.NAMED, selection.name
    elif selection is not None and selection != "auto":
        # OpenAI's clients send `auto` also without tools.
        mode = ToolMode(selection)
    return choose_tools(
        [template_tool(each.name, description=each.description, parameters=each.parameters) for each in given],
        mode=mode,
        strict=[each.name for each in given if each.strict],
        name=name,
        is_parallel=body.parallel_tool_calls is not False,
    )
