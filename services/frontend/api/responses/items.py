"""Items of `input`: as the client sends them, as they are stored, and as messages of a conversation."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from kvmesh.rpc.codec.json_texts import JsonTexts
from services.frontend.api.openai.chat_request import template_call
from services.frontend.api.request_body import (
    Body,
    Ignored,
    JsonObject,
    RefusingBody,
    invalid_value,
    refused,
)
from services.frontend.pipeline.request import content_of, text_of

ITEMS_MAX = 4096
PARTS_MAX = 1024
Status = Literal["in_progress", "completed", "incomplete"]
ItemId = Annotated[str, Meta(max_length=256)]
CallId = Annotated[str, Meta(min_length=1, max_length=256)]


class ItemPart(Body, kw_only=True):
    """Fields of all parts of a message. Clients send them back with earlier answers; they change nothing."""

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
    """A summary of reasoning."""

    type: Literal["summary_text"]
    text: str


class ReasoningText(Body, kw_only=True):
    """A part of reasoning."""

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
    """A function call of an earlier answer."""

    call_id: CallId
    name: CallId
    arguments: str
    id: ItemId | None = None
    status: Status | None = None


class CallOutputItem(Body, kw_only=True, tag_field="type", tag="function_call_output"):
    """The result of a function."""

    call_id: CallId
    output: Parts
    id: ItemId | None = None
    status: Status | None = None


class ReasoningItem(RefusingBody, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning of an earlier answer."""

    summary: Annotated[list[SummaryText], Meta(max_length=PARTS_MAX)] | None = None
    content: Annotated[list[ReasoningText], Meta(max_length=PARTS_MAX)] | None = None
    encrypted_content: Annotated[Any, refused("reasoning is not encrypted; use content", "")] = None
    id: ItemId | None = None
    status: Status | None = None


Item = MessageItem | CallItem | CallOutputItem | ReasoningItem


def stored_items(given: str | Sequence[Item]) -> list[JsonObject]:
    """Returns `input` as JSON, in the form in which it is stored and continued."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": _stored_parts("input_text", given)}]
    return [{**_stored_item(each), **({"id": each.id} if each.id else {})} for each in given]


def _stored_item(item: Item) -> JsonObject:
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


def _stored_parts(kind: str, content: Parts) -> list[JsonObject]:
    parts = [content] if isinstance(content, str) else content
    more: JsonObject = {"annotations": []} if kind == "output_text" else {}
    return [{"type": kind, "text": _text(part), **more} for part in parts]


def _text(part: str | InputText | OutputText | PlainText | RefusalText) -> str:
    if isinstance(part, str):
        return part
    return part.refusal if isinstance(part, RefusalText) else part.text


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[JsonObject]:
    """Converts stored items to messages for the chat template. Reasoning, text and calls in a row become one message.

    Raises InvalidRequestError if there are too many, or if the arguments of a call are not JSON.
    """
    messages: list[JsonObject] = []
    texts = JsonTexts()
    for item in items:
        if item["type"] == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _content(item["content"])})
        elif item["type"] == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text_of(item["output"])})
        else:
            _add_to_assistant(messages, item, texts)
    if len(messages) > ITEMS_MAX:
        raise invalid_value("input", wanted=f"at most {ITEMS_MAX} messages together with what it continues")
    return messages


def _add_to_assistant(messages: list[JsonObject], item: Mapping[str, Any], texts: JsonTexts) -> None:
    kind = item["type"]
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    # Reasoning after anything else, and text after text or calls, begin a new message.
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
        arguments = texts.object_in(item["arguments"]) if item["arguments"] else {}
        if arguments is None:
            raise invalid_value("input", wanted="items whose calls have a JSON object in a string as arguments")
        last.setdefault("tool_calls", []).append(template_call(item["call_id"], name=item["name"], arguments=arguments))
    elif thought := text_of(item["content"] or item["summary"]):
        last["reasoning_content"] = last.get("reasoning_content", "") + thought


def _content(parts: Sequence[Mapping[str, Any]]) -> str | list[dict[str, str]]:
    return content_of([part["text"] for part in parts])
