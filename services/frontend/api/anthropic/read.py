"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from services.frontend.api.anthropic.content import CacheControl, Message, TextBlocks, continues_last, template_messages
from services.frontend.api.openai.chat_request import TOOLS_MAX, JsonSchema, ToolName, choose_tools, template_tool
from services.frontend.api.openai.constraints import json_schema
from services.frontend.api.openai.sampling import ServiceTier, StopString, UserName, sampling_params
from services.frontend.api.request_body import (
    TOKENS_MAX,
    Body,
    Count,
    FieldError,
    JsonObject,
    ModelBody,
    RefusingBody,
    invalid_value,
    read_body,
    refused,
)
from services.frontend.api.run import ApiRequest
from services.frontend.pipeline.request import Conversation, Request, ToolChoice, ToolMode

BUDGET_WARNING = "thinking.budget_tokens is not enforced; max_tokens bounds thinking and answer together"


class MessageTool(RefusingBody, kw_only=True):
    """A tool that may be called."""

    type: Literal["custom"] | None = None
    name: ToolName
    input_schema: JsonSchema
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Annotated[Any, refused("the model always sees all tools", False)] = None
    input_examples: Annotated[Any, refused("write them into the description", [])] = None
    allowed_callers: Annotated[Any, refused("tools are called by the model itself only", ["direct"])] = None


class MessageToolChoice(Body, kw_only=True):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str, Meta(min_length=1, max_length=256, description="Of the tool, with the type tool.")] | None = (
        None
    )
    disable_parallel_tool_use: bool | None = None

    def __post_init__(self) -> None:
        if (self.name is not None) != (self.type == "tool"):
            raise FieldError("name", message="must be given with the type tool, and only then")


class Thinking(RefusingBody, kw_only=True):
    """`thinking`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Count, Meta(description="With the type enabled. Not enforced.")] | None = None
    display: Annotated[Any, refused("reasoning is not summarised", "summarized")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.budget_tokens is not None) != (self.type == "enabled"):
            raise FieldError("budget_tokens", message="must be given with the type enabled, and only then")


class OutputFormat(Body, kw_only=True):
    """`output_config.format`."""

    type: Literal["json_schema"]
    schema: JsonSchema


class OutputConfig(Body, kw_only=True):
    """`output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessageMetadata(Body, kw_only=True):
    """`metadata`."""

    user_id: UserName | None = None


class CountRequest(ModelBody, kw_only=True):
    """The body of a count."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    system: str | TextBlocks | None = None
    tools: Annotated[list[MessageTool], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Annotated[
        Thinking | None,
        Meta(description="The types enabled and disabled set `enable_thinking` for the chat template."),
    ] = None
    output_config: OutputConfig | None = None
    cache_control: Annotated[CacheControl | None, Meta(description="Checked; changes nothing.")] = None
    container: Annotated[Any, refused("there are no containers")] = None
    mcp_servers: Annotated[Any, refused("tools are run by the client", [])] = None
    context_management: Annotated[Any, refused("conversations are not edited")] = None
    diagnostics: Annotated[Any, refused("there are no diagnostics")] = None
    inference_geo: Annotated[Any, refused("the mesh has one region")] = None
    speed: Annotated[Any, refused("there is only one", "standard")] = None


class MessageRequest(CountRequest, kw_only=True):
    """The body."""

    max_tokens: Count
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})] | None = None
    top_k: Annotated[int, Meta(ge=0, le=TOKENS_MAX)] | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] | None = None
    metadata: MessageMetadata | None = None
    service_tier: ServiceTier | None = None


def read_message(values: Mapping[str, Any], request_id: str, *, counts_only: bool = False) -> tuple[ApiRequest, bool]:
    """Reads a body. InvalidRequestError and UnsupportedError name the field. `counts_only`: nothing is generated.

    Returns also whether the client set a thinking budget; BUDGET_WARNING is then due.
    """
    body = read_body(CountRequest if counts_only else MessageRequest, values)
    given: dict[str, Any] = {}
    if isinstance(body, MessageRequest):
        given = {"max_tokens": body.max_tokens, "stop": tuple(body.stop_sequences or ())}
    budget = None if body.thinking is None else body.thinking.budget_tokens
    if budget is not None and budget >= given.get("max_tokens", budget + 1):
        raise invalid_value("thinking.budget_tokens", wanted="less than max_tokens")
    if body.output_config is not None and body.output_config.format is not None:
        given["constraint"] = json_schema(body.output_config.format.schema, "output_config.format.schema")
    tools, tool_choice = _chosen_tools(body)
    messages = template_messages(body.system, body.messages)
    continues = continues_last(messages)
    request = Request(
        request_id=request_id,
        model=body.model_name(),
        prompt=Conversation(
            messages=messages,
            tools=tools,
            tool_choice=tool_choice,
            arguments=_template_arguments(body),
            adds_generation_prompt=not continues,
            continues_final_message=continues,
        ),
        sampling=sampling_params(body, **given),
        shortens_answer=True,
        fields={"prompt": "messages", "constraint": "output_config.format", "stop": "stop_sequences"},
    )
    is_stream = isinstance(body, MessageRequest) and bool(body.stream)
    return ApiRequest(requests=(request,), is_stream=is_stream), budget is not None


def _template_arguments(body: CountRequest) -> JsonObject:
    """Returns the variables of chat templates that say whether and how much the model reasons."""
    arguments: JsonObject = {}
    if body.output_config is not None and body.output_config.effort is not None:
        arguments["reasoning_effort"] = body.output_config.effort
    if body.thinking is not None and body.thinking.type != "adaptive":
        arguments["enable_thinking"] = body.thinking.type == "enabled"
    return arguments


_MODES = {"auto": ToolMode.AUTO, "any": ToolMode.REQUIRED, "tool": ToolMode.NAMED, "none": ToolMode.NONE}


def _chosen_tools(body: CountRequest) -> tuple[list[JsonObject], ToolChoice]:
    given, selection = body.tools or (), body.tool_choice
    return choose_tools(
        [template_tool(each.name, description=each.description, parameters=each.input_schema) for each in given],
        mode=None if selection is None else _MODES[selection.type],
        strict=[each.name for each in given if each.strict],
        name=None if selection is None else selection.name,
        is_parallel=selection is None or not selection.disable_parallel_tool_use,
    )
