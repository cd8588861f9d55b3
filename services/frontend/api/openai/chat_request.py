"""The body of POST /v1/chat/completions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Protocol

from msgspec import Meta

from kvmesh.errors import InvalidRequestError
from kvmesh.rpc.codec.json_texts import JsonTexts
from services.frontend.api.openai.sampling import Logprobs, OpenAiRequest, Verbosity, sampling_params
from services.frontend.api.request_body import (
    Body,
    Count,
    FieldError,
    Ignored,
    JsonObject,
    invalid_value,
    read_body,
    refused,
)
from services.frontend.api.run import ApiRequest
from services.frontend.pipeline.request import Conversation, ToolChoice, ToolMode

TOOLS_MAX = 128
CalledName = Annotated[str, Meta(min_length=1, max_length=256)]
# Python's `$` also matches before a line end at the end of the text.
ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}(?!\n)$")]
JsonSchema = Annotated[JsonObject, Meta(description="A JSON Schema.")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TextPart(Body, kw_only=True, tag_field="type", tag="text"):
    """A part of a message."""

    text: str


class RefusalPart(Body, kw_only=True, tag_field="type", tag="refusal"):
    """A part of an earlier answer."""

    refusal: str


class CalledFunction(Body, kw_only=True):
    """The function that an assistant called."""

    name: CalledName
    arguments: Annotated[str, Meta(description="A JSON object in a string.")] | None = None


class ChatToolCall(Body, kw_only=True):
    """A call of an assistant."""

    function: CalledFunction
    id: Annotated[str, Meta(max_length=256)] | None = None
    type: Literal["function"] | None = None
    index: Ignored = None


class ChatMessage(Body, kw_only=True):
    """A message. OpenAI's clients send the ignored fields back as they received them."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart | RefusalPart], Meta(min_length=1, max_length=1024)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ChatToolCall], Meta(max_length=128)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Annotated[str, Meta(description="As reasoning_content.")] | None = None
    refusal: Ignored = None
    annotations: Ignored = None
    audio: Ignored = None
    function_call: Ignored = None

    def __post_init__(self) -> None:
        if self.role != "assistant":
            if self.tool_calls:
                raise FieldError("tool_calls", message="must be absent unless the role is assistant")
            if self.content is None:
                raise FieldError("content", message="must be a string or a list of parts")


class ChatFunction(Body, kw_only=True):
    """A function that may be called."""

    name: ToolName
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: Annotated[bool, Meta(description="Arguments match the schema.")] | None = None


class ChatTool(Body, kw_only=True):
    """A tool that may be called."""

    type: Literal["function"]
    function: ChatFunction


class NamedFunction(Body, kw_only=True):
    """Names a tool."""

    name: Annotated[str, Meta(max_length=64)] | None = None


class NamedTool(Body, kw_only=True):
    """One of the tools that may be called."""

    type: Literal["function"] | None = None
    function: NamedFunction | None = None


class AllowedTools(Body, kw_only=True):
    """`tool_choice.allowed_tools`."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(max_length=TOOLS_MAX)] | None = None


class ToolSelection(Body, kw_only=True):
    """A `tool_choice` that names tools: the one to call, or those that may be called."""

    type: Literal["function", "allowed_tools"] | None = None
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class Prediction(Body, kw_only=True):
    """Text that the answer is expected to contain."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], Meta(min_length=1, max_length=1024)]


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
Tools = Annotated[list[ChatTool], Meta(max_length=TOOLS_MAX)]
Documents = Annotated[list[JsonObject], Meta(max_length=1024)]


class ChatRequest(OpenAiRequest, kw_only=True):
    """The body."""

    messages: Messages
    max_tokens: Annotated[Count, Meta(description="max_completion_tokens wins.")] | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Logprobs | None, Meta(description="Alternatives per token; needs logprobs.")] = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolSelection | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: Annotated[bool | None, Meta(description="False: the answer has no reasoning.")] = None
    documents: Documents | None = None
    reasoning_effort: Annotated[Effort | None, Meta(description="A variable of some chat templates.")] = None
    verbosity: Verbosity | None = None
    chat_template_kwargs: Annotated[JsonObject | None, Meta(description="Variables of the chat template.")] = None
    add_generation_prompt: bool | None = None
    continue_final_message: Annotated[
        bool | None, Meta(description="The answer continues the last message. The template must render its text.")
    ] = None
    prediction: Annotated[
        Prediction | None, Meta(description="Accepted with a warning; a hint for speed that changes nothing.")
    ] = None
    functions: Annotated[Any, refused("use tools", [])] = None
    function_call: Annotated[Any, refused("use tool_choice", "none", "auto")] = None
    audio: Annotated[Any, refused("there is no audio output")] = None
    modalities: Annotated[Any, refused("only text comes out", ["text"])] = None
    web_search_options: Annotated[Any, refused("there is no web search")] = None
    moderation: Annotated[Any, refused("there is none")] = None
    chat_template: Annotated[Any, refused("templates come with the model")] = None
    add_special_tokens: Annotated[Any, refused("the chat template adds them", False)] = None
    echo: Annotated[Any, refused("only for completions", False)] = None
    mm_processor_kwargs: Annotated[Any, refused("only text goes in", {})] = None


def read_chat(values: Mapping[str, Any], request_id: str) -> ApiRequest:
    """Reads a body. InvalidRequestError and UnsupportedError name the field."""
    body = read_body(ChatRequest, values)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", field="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    tools, tool_choice = _chosen_tools(body)
    constraint, constraint_name = body.constraint()
    has_new_limit = body.max_completion_tokens is not None
    return body.api_request(
        request_id,
        [conversation_of(body, tools, tool_choice)],
        sampling=sampling_params(
            body,
            max_tokens=body.max_completion_tokens if has_new_limit else body.max_tokens,
            logprobs=logprobs,
            constraint=constraint,
            prompt_logprobs=body.prompt_logprobs,
        ),
        fields={
            "prompt": "messages",
            "choices": "n",
            "max_tokens": "max_completion_tokens" if has_new_limit else "max_tokens",
            "logprobs": "top_logprobs",
            "constraint": constraint_name,
        },
        has_logprobs=logprobs is not None,
        includes_reasoning=body.include_reasoning is not False,
    )


class ConversationFields(Protocol):
    """The fields of a conversation in bodies of chat and /tokenize."""

    documents: Documents | None
    reasoning_effort: Effort | None
    verbosity: Verbosity | None
    chat_template_kwargs: JsonObject | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None

    @property
    def messages(self) -> Messages | None: ...


def conversation_of(body: ConversationFields, tools: Sequence[JsonObject], tool_choice: ToolChoice) -> Conversation:
    continues = bool(body.continue_final_message)
    adds_prompt = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and adds_prompt:
        raise invalid_value("continue_final_message", wanted="false when add_generation_prompt is true")
    # Variables that some templates know; `chat_template_kwargs` overrides them.
    advice = {name: value for name in ("reasoning_effort", "verbosity") if (value := getattr(body, name)) is not None}
    texts = JsonTexts()
    return Conversation(
        messages=[_template_message(each, i, texts) for i, each in enumerate(body.messages or ())],
        tools=tools,
        tool_choice=tool_choice,
        documents=body.documents or (),
        arguments=advice | (body.chat_template_kwargs or {}),
        adds_generation_prompt=adds_prompt,
        continues_final_message=continues,
    )


def _template_message(message: ChatMessage, i: int, json_texts: JsonTexts) -> JsonObject:
    # A list of parts stays a list: the template may support only one of both.
    result: JsonObject
    content = message.content
    if isinstance(content, list):
        texts = [part.text if isinstance(part, TextPart) else part.refusal for part in content]
        result = {"role": message.role, "content": [{"type": "text", "text": text} for text in texts]}
    else:
        result = {"role": message.role, "content": content}
    if message.tool_calls:
        result["tool_calls"] = [
            template_call(
                call.id or "",
                name=call.function.name,
                arguments=_arguments(
                    call.function.arguments, json_texts, path=f"messages[{i}].tool_calls[{j}].function.arguments"
                ),
            )
            for j, call in enumerate(message.tool_calls)
        ]
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if (text := getattr(message, name)) is not None:
            result[name] = text
    if message.reasoning is not None:
        # Another name of the same, which few templates know.
        result.setdefault("reasoning_content", message.reasoning)
    return result


def template_call(call_id: str, name: str, arguments: JsonObject) -> JsonObject:
    """Returns a call for the chat template, with its arguments as an object."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(text: str | None, texts: JsonTexts, path: str) -> JsonObject:
    """Parses a call's arguments; empty without text. Raises InvalidRequestError if the text is not a JSON object."""
    arguments = texts.object_in(text) if text else {}
    if arguments is None:
        raise invalid_value(path, wanted="a JSON object in a string")
    return arguments


def template_tool(name: str, description: str | None, parameters: JsonObject | None) -> JsonObject:
    function: JsonObject = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def template_tools(tools: Sequence[ChatTool]) -> list[JsonObject]:
    return [
        template_tool(each.function.name, description=each.function.description, parameters=each.function.parameters)
        for each in tools
    ]


def choose_tools(
    tools: list[JsonObject],
    *,
    mode: ToolMode | None,
    strict: Sequence[str],
    name: str | None = None,
    name_field: str = "tool_choice.name",
    is_parallel: bool = True,
) -> tuple[list[JsonObject], ToolChoice]:
    """Returns the tools for the template, none if none may be called, and how they are chosen.

    `mode` None: the client did not choose. `strict`: tools whose arguments must match their schema.
    """
    if mode is ToolMode.NONE:
        return [], ToolChoice(mode=mode)
    if mode is not None and not tools:
        raise InvalidRequestError("tool_choice needs tools", field="tool_choice", reason="invalid_value")
    if mode is ToolMode.NAMED:
        _check_tool_name(name, tools, name_field)
    choice = ToolChoice(mode=mode or ToolMode.AUTO, name=name or "", is_parallel=is_parallel, strict=strict)
    return tools, choice


def _check_tool_name(name: str | None, tools: Sequence[JsonObject], field: str) -> None:
    if name not in [tool["function"]["name"] for tool in tools]:
        raise invalid_value(field, wanted="the name of one of the tools")


def _chosen_tools(body: ChatRequest) -> tuple[list[JsonObject], ToolChoice]:
    if not body.tools and body.tool_choice is None:
        return [], ToolChoice()
    selection, tools = body.tool_choice, template_tools(body.tools or ())
    mode: ToolMode | None = None
    name: str | None = None
    allowed: AllowedTools | None = None
    if isinstance(selection, str):
        mode = ToolMode(selection)
    elif selection is not None and selection.type == "allowed_tools":
        allowed = selection.allowed_tools
        if allowed is None:
            raise invalid_value("tool_choice.allowed_tools", wanted="an object")
        mode = ToolMode(allowed.mode)
    elif selection is not None:
        mode, name = ToolMode.NAMED, selection.function.name if selection.function is not None else None
    tools, choice = choose_tools(
        tools,
        mode=mode,
        strict=[each.function.name for each in body.tools or () if each.function.strict],
        name=name,
        name_field="tool_choice.function.name",
        is_parallel=body.parallel_tool_calls is not False,
    )
    return (tools, choice) if allowed is None else _allowed_tools(allowed, tools, choice)


def _allowed_tools(
    allowed: AllowedTools, tools: list[JsonObject], choice: ToolChoice
) -> tuple[list[JsonObject], ToolChoice]:
    names = [None if each.function is None else each.function.name for each in allowed.tools or ()]
    for i, name in enumerate(names):
        _check_tool_name(name, tools, f"tool_choice.allowed_tools.tools[{i}].function.name")
    if not names:
        raise invalid_value("tool_choice.allowed_tools.tools", wanted="a list of at least one tool")
    tools = [tool for tool in tools if tool["function"]["name"] in names]
    return tools, replace(choice, strict=[name for name in choice.strict if name in names])
