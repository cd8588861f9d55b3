"""Items of `input`: as they come, as they are stored, and as messages of a conversation."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from services.frontend.api.openai.chat_request import parsed_arguments, template_call
from services.frontend.api.request_body import AnyObject, Body, Ignored, refuse_fields, refused, wrong
from services.frontend.pipeline.request import content_of, text_of

ITEMS_MAX = 4096
PARTS_MAX = 1024
Status = Literal["in_progress", "completed", "incomplete"]
ItemId = Annotated[str, Meta(max_length=256)]
CallId = Annotated[str, Meta(min_length=1, max_length=256)]


class ItemPart(Body, kw_only=True):
    """What parts of a message share: fields of earlier answers, which change nothing."""

    annotations: Ignored = None
    logprobs: Ignored = None
    prompt_cache_breakpoint: Ignored = None


class InputText(ItemPart, kw_only=True, tag_field="type", tag="input_text"):
    """Text of a request."""

    text: str


class OutputText(ItemPart, kw_only=True, tag_field="type", tag="output_text"):
    """Text of an answer."""

    text: str


class PlainText(ItemPart, kw_only=True, tag_field="type", tag="text"):
    """Text."""

    text: str


class RefusalText(ItemPart, kw_only=True, tag_field="type", tag="refusal"):
    """A refusal of an earlier answer."""

    refusal: str


class SummaryText(Body, kw_only=True):
    """A thought, in short."""

    type: Literal["summary_text"]
    text: str


class ReasoningText(Body, kw_only=True):
    """A thought."""

    type: Literal["reasoning_text"]
    text: str


Parts = str | Annotated[list[InputText | OutputText | PlainText | RefusalText], Meta(max_length=PARTS_MAX)]


class MessageItem(Body, kw_only=True, tag_field="type", tag="message"):
    """A message."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    phase: Literal["commentary", "final_answer"] | None = None
    id: ItemId | None = None
    status: Status | None = None


class CallItem(Body, kw_only=True, tag_field="type", tag="function_call"):
    """A call of the model."""

    call_id: CallId
    name: CallId
    arguments: str
    id: ItemId | None = None
    status: Status | None = None


class CallOutputItem(Body, kw_only=True, tag_field="type", tag="function_call_output"):
    """What a function answered."""

    call_id: CallId
    output: Parts
    id: ItemId | None = None
    status: Status | None = None


class ReasoningItem(Body, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought."""

    summary: Annotated[list[SummaryText], Meta(max_length=PARTS_MAX)] | None = None
    content: Annotated[list[ReasoningText], Meta(max_length=PARTS_MAX)] | None = None
    encrypted_content: Annotated[Any, refused("reasoning is sent in the clear, as content", "")] = None
    id: ItemId | None = None
    status: Status | None = None

    def __post_init__(self) -> None:
        refuse_fields(self)


Item = MessageItem | CallItem | CallOutputItem | ReasoningItem


def stored_items(given: str | Sequence[Item]) -> list[AnyObject]:
    """`input` as JSON, in the one form that is stored and continued."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": _stored_parts("input_text", given)}]
    return [{**_stored_item(each), **({"id": each.id} if each.id else {})} for each in given]


def _stored_item(item: Item) -> AnyObject:
    match item:
        case MessageItem():
            kind = "output_text" if item.role == "assistant" else "input_text"
            return {"type": "message", "role": item.role, "content": _stored_parts(kind, item.content)}
        case CallItem():
            return {"type": "function_call", "call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        case CallOutputItem():
            output = item.output if isinstance(item.output, str) else _stored_parts("input_text", item.output)
            return {"type": "function_call_output", "call_id": item.call_id, "output": output}
        case ReasoningItem():
            summary = [{"type": "summary_text", "text": each.text} for each in item.summary or ()]
            content = [{"type": "reasoning_text", "text": each.text} for each in item.content or ()]
            return {"type": "reasoning", "summary": summary, "content": content}


def _stored_parts(kind: str, content: Parts) -> list[AnyObject]:
    """Text parts, all written as `kind`."""
    parts = [content] if isinstance(content, str) else content
    more: AnyObject = {"annotations": []} if kind == "output_text" else {}
    return [{"type": kind, "text": _text(part), **more} for part in parts]


def _text(part: str | InputText | OutputText | PlainText | RefusalText) -> str:
    if isinstance(part, str):
        return part
    return part.refusal if isinstance(part, RefusalText) else part.text


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[AnyObject]:
    """Stored items as messages for the chat template. What an assistant thought, said and called in a row is one message.

    InvalidRequestError when there are too many, or when the arguments of a call are not JSON.
    """
    messages: list[AnyObject] = []
    for item in items:
        if item["type"] == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _content(item["content"])})
        elif item["type"] == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text_of(item["output"])})
        else:
            _add_to_assistant(messages, item)
    if len(messages) > ITEMS_MAX:
        raise wrong("input", f"at most {ITEMS_MAX} messages together with what it continues")
    return messages


def _add_to_assistant(messages: list[AnyObject], item: Mapping[str, Any]) -> None:
    kind = item["type"]
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    # Thoughts begin a turn; text after text or after calls begins another.
    if (
        last is None
        or (kind == "message" and ("tool_calls" in last or last["content"]))
        or (kind == "reasoning" and (last["content"] or "tool_calls" in last))
    ):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    if kind == "message":
        last["content"] = _content(item["content"])
    elif kind == "function_call":
        arguments = parsed_arguments(item["arguments"])
        if arguments is None:
            raise wrong("input", "items whose calls have a JSON object in a string as arguments")
        last.setdefault("tool_calls", []).append(template_call(item["call_id"], item["name"], arguments))
    elif thought := text_of(item["content"] or item["summary"]):
        last["reasoning_content"] = last.get("reasoning_content", "") + thought


def _content(parts: Sequence[Mapping[str, Any]]) -> str | list[dict[str, str]]:
    return content_of([part["text"] for part in parts])
