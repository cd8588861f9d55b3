"""Messages and their blocks, and their conversion to a conversation for the chat template."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from kvmesh.errors import UnsupportedError
from services.frontend.api.openai.chat_request import CalledName, template_call
from services.frontend.api.request_body import Body, FieldError, JsonObject, RefusingBody, refused
from services.frontend.pipeline.request import content_of

BLOCKS_MAX = 1024
ERROR_MARK = "Error: "
"""Chat templates have no place for `is_error`, so it goes into the text of the result."""
CallId = Annotated[str, Meta(min_length=1, max_length=256)]


class CacheControl(Body, kw_only=True):
    """Changes nothing: the mesh caches all prefixes."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextFields(RefusingBody, kw_only=True):
    """A block of text, without its type."""

    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[Any, refused("there are no citations", [])] = None


class TextBlock(TextFields, kw_only=True, tag_field="type", tag="text"):
    """Text among blocks of other types."""


class TextOnlyBlock(TextFields, kw_only=True):
    """Text where no other type is allowed. msgspec does not require the tag of a class without alternatives."""

    type: Literal["text"]


TextBlocks = Annotated[list[TextOnlyBlock], Meta(max_length=BLOCKS_MAX)]


class ToolResultBlock(Body, kw_only=True, tag_field="type", tag="tool_result"):
    """The result of a tool call."""

    tool_use_id: CallId
    content: str | TextBlocks | None = None
    is_error: Annotated[bool, Meta(description="True: the text for the model begins with `Error:`.")] | None = None
    cache_control: CacheControl | None = None


class ThinkingBlock(Body, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning of an earlier answer. kvmesh does not sign reasoning, so the signature is not checked."""

    thinking: str
    signature: str | None = None
    cache_control: CacheControl | None = None


class ToolUseBlock(Body, kw_only=True, tag_field="type", tag="tool_use"):
    """A tool call of an earlier answer."""

    id: CallId
    name: CalledName
    input: JsonObject
    caller: JsonObject | None = None
    cache_control: CacheControl | None = None

    def __post_init__(self) -> None:
        if self.caller is not None and self.caller.get("type") != "direct":
            raise FieldError(
                "caller.type", message="must be direct: tools are called by the model only", kind=UnsupportedError
            )


class UserMessage(Body, kw_only=True, tag_field="role", tag="user"):
    """A message of the user, or results of tools."""

    content: str | Annotated[list[TextBlock | ToolResultBlock], Meta(max_length=BLOCKS_MAX)]


class AssistantMessage(Body, kw_only=True, tag_field="role", tag="assistant"):
    """A message of the model. The answer continues the last one."""

    content: str | Annotated[list[TextBlock | ThinkingBlock | ToolUseBlock], Meta(max_length=BLOCKS_MAX)]


class SystemMessage(Body, kw_only=True, tag_field="role", tag="system"):
    """Instructions."""

    content: str | TextBlocks


Message = UserMessage | AssistantMessage | SystemMessage


def template_messages(system: str | list[TextOnlyBlock] | None, messages: Sequence[Message]) -> list[JsonObject]:
    """Returns the conversation for the chat template."""
    text = _joined(system)
    found: list[JsonObject] = [{"role": "system", "content": text}] if text else []
    for message in messages:
        match message:
            case AssistantMessage():
                found.append(_assistant_message(message))
            case SystemMessage():
                found.append({"role": "system", "content": _content(message.content)})
            case UserMessage():
                found += _user_messages(message)
    return found


def _joined(content: str | list[TextOnlyBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content)


def _content(content: str | list[TextOnlyBlock]) -> str | list[dict[str, str]]:
    return content if isinstance(content, str) else content_of([block.text for block in content])


def _user_messages(message: UserMessage) -> list[JsonObject]:
    """Returns one message per tool result, and one for each run of texts between them."""
    if isinstance(message.content, str):
        return [{"role": "user", "content": message.content}]
    messages: list[JsonObject] = []
    texts: list[str] = []
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            text = (ERROR_MARK if block.is_error else "") + _joined(block.content)
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
            texts = []
            continue
        if not texts:
            messages.append({"role": "user"})
        texts.append(block.text)
        messages[-1]["content"] = content_of(texts)
    return messages or [{"role": "user", "content": ""}]


def _assistant_message(message: AssistantMessage) -> JsonObject:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    blocks = message.content
    result: JsonObject = {
        "role": "assistant",
        "content": content_of([block.text for block in blocks if isinstance(block, TextBlock)]),
    }
    if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        result["reasoning_content"] = "\n".join(thoughts)
    if uses := [block for block in blocks if isinstance(block, ToolUseBlock)]:
        result["tool_calls"] = [template_call(block.id, name=block.name, arguments=block.input) for block in uses]
    return result


def continues_last(messages: Sequence[JsonObject]) -> bool:
    """Returns whether the answer continues a last message that the client wrote for the assistant."""
    last = messages[-1]
    return bool(last["role"] == "assistant" and last["content"] and "tool_calls" not in last)
