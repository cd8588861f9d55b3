"""Messages and their blocks as messages of a conversation, in the shape that the chat reader takes."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from kvmesh.errors import InvalidRequestError, UnsupportedError
from services.frontend.api.openai.fields import Fields
from services.frontend.pipeline.request import content_of

MESSAGES_MAX = 4096
BLOCKS_MAX = 1024
ROLES = ("user", "assistant", "system")
ERROR_MARK = "Error: "
"""Chat templates have no place for `is_error`; the model reads it in the result's text."""


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """`messages` as chat messages. InvalidRequestError and UnsupportedError name the field."""
    given = fields.objects("messages", MESSAGES_MAX)
    if not given:
        raise fields.wrong("messages", f"a list of 1 to {MESSAGES_MAX} messages")
    return [message for i, each in enumerate(given) for message in _read_message(Fields(each, f"messages[{i}]."))]


def read_system(fields: Fields) -> list[dict[str, Any]]:
    """`system` as a chat message, if there is one."""
    if not fields.has("system"):
        fields.take("system")
        return []
    text = read_text(fields, "system")
    return [{"role": "system", "content": text}] if text else []


def read_text(fields: Fields, name: str) -> str:
    """A string, or text blocks."""
    value = fields.take(name)
    if isinstance(value, str):
        return value
    return "\n".join(_text_of(kind, block) for kind, block in _read_blocks(fields, name, value))


def _read_blocks(fields: Fields, name: str, value: Any) -> list[tuple[str, Fields]]:
    if not isinstance(value, list) or len(value) > BLOCKS_MAX:
        raise fields.wrong(name, f"a string or a list of at most {BLOCKS_MAX} blocks")
    return [_read_kind(each, fields.name(f"{name}[{i}]")) for i, each in enumerate(value)]


def _read_kind(value: Any, name: str) -> tuple[str, Fields]:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise InvalidRequestError(f"{name} must be an object with a type", field=name, reason="invalid_value")
    block = Fields(value, f"{name}.")
    # Prefixes are cached by themselves; the mark asks for what happens anyway.
    read_cache_control(block)
    return str(block.take("type")), block


def read_cache_control(fields: Fields) -> None:
    """Checked and otherwise nothing: prefixes are cached whether they are marked or not."""
    value = fields.object("cache_control")
    if value is not None:
        control = Fields(value, fields.name("cache_control."))
        if control.choice("type", ("ephemeral",)) is None:
            raise control.wrong("type", "ephemeral")
        control.choice("ttl", ("5m", "1h"))
        control.finish()


def _text_of(kind: str, block: Fields) -> str:
    if kind != "text":
        raise _unsupported(kind, block, "text")
    text = _needed(block, "text", empty=True)
    block.refuse("citations", "texts come without sources", ([],))
    block.finish()
    return text


def _unsupported(kind: str, block: Fields, known: str) -> UnsupportedError:
    return UnsupportedError(
        f"blocks of the type {kind[:64]!r} are not supported here; known: {known}", field=block.name("type")
    )


def _needed(fields: Fields, name: str, *, empty: bool = False) -> str:
    text = fields.text(name)
    if text is None or not (text or empty):
        raise fields.wrong(name, "a string" if empty else "a string that is not empty")
    return text


def _read_message(fields: Fields) -> list[dict[str, Any]]:
    role = fields.choice("role", ROLES)
    if role is None:
        raise fields.wrong("role", "user or assistant")
    content = fields.take("content")
    if isinstance(content, str):
        fields.finish()
        return [{"role": role, "content": content}]
    blocks = _read_blocks(fields, "content", content)
    fields.finish()
    if role == "assistant":
        return [_read_assistant(blocks)]
    return _read_user(role, blocks)


def _read_user(role: str, blocks: Sequence[tuple[str, Fields]]) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, in their place between the texts."""
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    for kind, block in blocks:
        if kind == "tool_result" and role == "user":
            messages.append(_read_result(block))
            texts = []
        elif kind == "text":
            if not texts:
                messages.append({"role": role})
            texts.append(_text_of(kind, block))
            messages[-1]["content"] = content_of(texts)
        else:
            raise _unsupported(kind, block, "text, tool_result" if role == "user" else "text")
    return messages or [{"role": role, "content": ""}]


def _read_result(block: Fields) -> dict[str, Any]:
    call_id, is_error = _needed(block, "tool_use_id"), block.flag("is_error")
    text = ""
    if block.has("content"):
        text = read_text(block, "content")
    else:
        block.take("content")
    block.finish()
    return {"role": "tool", "tool_call_id": call_id, "content": ERROR_MARK + text if is_error else text}


def _read_assistant(blocks: Sequence[tuple[str, Fields]]) -> dict[str, Any]:
    texts, thoughts = [], []
    calls: list[dict[str, Any]] = []
    for kind, block in blocks:
        if kind == "text":
            texts.append(_text_of(kind, block))
        elif kind == "thinking":
            thoughts.append(_needed(block, "thinking", empty=True))
            # Thoughts are not sealed here, so there is no seal to check.
            block.text("signature")
            block.finish()
        elif kind == "tool_use":
            calls.append(_read_use(block))
        else:
            raise _unsupported(kind, block, "text, thinking, tool_use")
    message: dict[str, Any] = {"role": "assistant", "content": content_of(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _read_use(block: Fields) -> dict[str, Any]:
    arguments = block.object("input")
    if arguments is None:
        raise block.wrong("input", "an object")
    function = {"name": _needed(block, "name"), "arguments": orjson.dumps(arguments).decode()}
    call_id = _needed(block, "id")
    caller = block.object("caller")
    if caller is not None and caller.get("type") != "direct":
        raise UnsupportedError("tools are called by the model itself only", field=block.name("caller.type"))
    block.finish()
    return {"id": call_id, "type": "function", "function": function}


def continues_last(messages: Sequence[Mapping[str, Any]]) -> bool:
    """True where the answer is to go on from the beginning that the client wrote for it."""
    last = messages[-1]
    return bool(last["role"] == "assistant" and last["content"] and "tool_calls" not in last)
