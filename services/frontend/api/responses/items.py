"""Items of `input` as messages of a conversation, in the shape that the chat reader takes."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvmesh.errors import InvalidRequestError, UnsupportedError
from services.frontend.api.openai.fields import Fields
from services.frontend.pipeline.request import content_of, text_of

ITEMS_MAX = 4096
PARTS_MAX = 1024
ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_STATUSES = ("in_progress", "completed", "incomplete")


def read_input(value: Any, name: str = "input") -> list[dict[str, Any]]:
    """`input` as a list of checked items. InvalidRequestError and UnsupportedError name the field."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": value}]}]
    if not isinstance(value, list) or not value or len(value) > ITEMS_MAX:
        raise InvalidRequestError(
            f"{name} must be a string or a list of 1 to {ITEMS_MAX} items", field=name, reason="invalid_value"
        )
    return [_read_item(each, f"{name}[{i}]") for i, each in enumerate(value)]


def _read_item(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{name} must be an object", field=name, reason="invalid_value")
    fields = Fields(value, f"{name}.")
    kind = fields.take("type")
    if kind is None:
        kind = "message"
    if not isinstance(kind, str):
        raise fields.wrong("type", "a string")
    read = _READERS.get(kind)
    if read is None:
        raise UnsupportedError(
            f"items of the type {kind[:64]!r} are not supported; known: {', '.join(_READERS)}", field=f"{name}.type"
        )
    item = {"type": kind, **read(fields)}
    item_id = fields.text("id", 256)
    if item_id:
        item["id"] = item_id
    fields.choice("status", _STATUSES)
    fields.finish()
    return item


def _read_message(fields: Fields) -> dict[str, Any]:
    role = fields.choice("role", ROLES)
    if role is None:
        raise fields.wrong("role", "one of " + ", ".join(ROLES))
    fields.choice("phase", ("commentary", "final_answer"))
    kind = "output_text" if role == "assistant" else "input_text"
    return {"role": role, "content": _read_parts(fields, "content", kind)}


def _read_parts(fields: Fields, name: str, kind: str) -> list[dict[str, Any]]:
    """Text parts, all written as `kind`; annotations of earlier answers change nothing."""
    value = fields.take(name)
    if isinstance(value, str):
        return [_part(kind, value)]
    if not isinstance(value, list) or len(value) > PARTS_MAX:
        raise fields.wrong(name, f"a string or a list of at most {PARTS_MAX} parts")
    return [_part(kind, _read_part(each, fields.name(f"{name}[{i}]"))) for i, each in enumerate(value)]


def _part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text, **({"annotations": []} if kind == "output_text" else {})}


def _read_part(value: Any, name: str) -> str:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise InvalidRequestError(f"{name} must be an object with a type", field=name, reason="invalid_value")
    part = Fields(value, f"{name}.")
    kind = part.take("type")
    if kind not in _TEXT_PARTS:
        raise UnsupportedError(f"{name} is of the type {kind[:32]!r}; only text is supported", field=f"{name}.type")
    text = part.text(_TEXT_PARTS[kind])
    if text is None:
        raise part.wrong(_TEXT_PARTS[kind], "a string")
    part.ignore(("annotations", "logprobs", "prompt_cache_breakpoint"))
    part.finish()
    return text


def _read_call(fields: Fields) -> dict[str, Any]:
    return {
        "call_id": _needed(fields, "call_id", 256),
        "name": _needed(fields, "name", 256),
        "arguments": _text_of(fields, "arguments"),
    }


def _read_output(fields: Fields) -> dict[str, Any]:
    value = fields.take("output")
    call_id = _needed(fields, "call_id", 256)
    if isinstance(value, str):
        return {"call_id": call_id, "output": value}
    return {"call_id": call_id, "output": _read_parts(fields, "output", "input_text")}


def _read_reasoning(fields: Fields) -> dict[str, Any]:
    fields.refuse("encrypted_content", "reasoning is sent in the clear, as content", ("",))
    summary = _read_thoughts(fields, "summary", "summary_text")
    return {"summary": summary, "content": _read_thoughts(fields, "content", "reasoning_text")}


def _read_thoughts(fields: Fields, name: str, kind: str) -> list[dict[str, Any]]:
    thoughts = []
    for i, each in enumerate(fields.objects(name, PARTS_MAX)):
        part = Fields(each, fields.name(f"{name}[{i}]."))
        if part.choice("type", (kind,)) is None:
            raise part.wrong("type", kind)
        thoughts.append({"type": kind, "text": _text_of(part, "text")})
        part.finish()
    return thoughts


def _needed(fields: Fields, name: str, characters_max: int) -> str:
    text = fields.text(name, characters_max)
    if not text:
        raise fields.wrong(name, "a string that is not empty")
    return text


def _text_of(fields: Fields, name: str) -> str:
    text = fields.text(name)
    if text is None:
        raise fields.wrong(name, "a string")
    return text


_READERS = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_output,
    "reasoning": _read_reasoning,
}


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checked items as chat messages. What an assistant thought, said and called in a row is one message of it."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if item["type"] == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _content(item["content"])})
        elif item["type"] == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _joined(item["output"])})
        else:
            _add_to_assistant(messages, item)
    return messages


def _add_to_assistant(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
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
        function = {"name": item["name"], "arguments": item["arguments"]}
        last.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
    elif thought := _joined(item["content"] or item["summary"]):
        last["reasoning_content"] = last.get("reasoning_content", "") + thought


def _content(parts: Sequence[Mapping[str, Any]]) -> str | list[dict[str, str]]:
    return content_of([part["text"] for part in parts])


def _joined(content: str | Sequence[Mapping[str, Any]]) -> str:
    return text_of(content)
