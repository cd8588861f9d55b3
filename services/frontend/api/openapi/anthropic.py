"""The Messages API."""

from typing import Any

from services.frontend.api.anthropic.content import BLOCKS_MAX, MESSAGES_MAX
from services.frontend.api.anthropic.read import TOOLS_MAX, read_message
from services.frontend.api.openai.sampling import TOKENS_MAX
from services.frontend.api.openapi.fields import with_untyped
from services.frontend.api.openapi.shapes import (
    Schema,
    anything,
    array,
    asked,
    constant,
    either,
    flag,
    integer,
    mapping,
    nullable,
    number,
    text,
    told,
    words,
)

_CACHE = asked({"type": constant("ephemeral"), "ttl": words("5m", "1h")}, "type")
_CITED = anything("Refused: texts come without sources.")


def _text_block() -> Schema:
    block = {"type": constant("text"), "text": text(), "cache_control": _CACHE, "citations": _CITED}
    return asked(block, "type", "text")


def message() -> Schema:
    """A message and its blocks."""
    texts = either(text(), array(_text_block(), most=BLOCKS_MAX))
    result = asked({"type": constant("tool_result"), "tool_use_id": text(least=1), "content": texts,
                    "is_error": flag("Marked for the model by the word Error."), "cache_control": _CACHE},
                   "type", "tool_use_id")  # fmt: skip
    use = asked({"type": constant("tool_use"), "id": text(least=1), "name": text(least=1), "input": mapping(anything()),
                 "caller": asked({"type": constant("direct")}), "cache_control": _CACHE},
                "type", "id", "name", "input")  # fmt: skip
    thought = asked({"type": constant("thinking"), "thinking": text(), "signature": text(), "cache_control": _CACHE},
                    "type", "thinking")  # fmt: skip
    said = either(text(), array(either(_text_block(), result), most=BLOCKS_MAX))
    answered = either(text(), array(either(_text_block(), use, thought), most=BLOCKS_MAX))
    return either(
        asked({"role": constant("user"), "content": said}, "role", "content"),
        asked({"role": constant("assistant"), "content": answered}, "role", "content"),
        asked({"role": constant("system"), "content": texts}, "role", "content"),
    )


def _common() -> dict[str, Schema]:
    """What messages and counts share."""
    tool = asked(
        {"type": constant("custom"), "name": text(least=1, most=64), "description": text(),
         "input_schema": mapping(anything(), "A JSON Schema."), "strict": flag(), "cache_control": _CACHE,
         "eager_input_streaming": flag(),
         **{name: anything() for name in ("defer_loading", "input_examples", "allowed_callers")}},
        "name", "input_schema",
    )  # fmt: skip
    parallel = {"disable_parallel_tool_use": flag()}
    choice = either(
        asked({"type": words("auto", "any", "none"), **parallel}, "type"),
        asked({"type": constant("tool"), "name": text(least=1), **parallel}, "type", "name"),
    )
    thinking = either(
        asked({"type": constant("enabled"), "budget_tokens": integer(1, TOKENS_MAX, "Not enforced."),
               "display": constant("summarized")}, "type", "budget_tokens"),
        asked({"type": constant("disabled")}, "type"),
        asked({"type": constant("adaptive"), "display": constant("summarized")}, "type"),
    )  # fmt: skip
    form = asked({"type": constant("json_schema"), "schema": mapping(anything())}, "type", "schema")
    return {
        "model": text(least=1, most=256),
        "messages": array(message(), least=1, most=MESSAGES_MAX),
        "system": either(text(), array(_text_block(), most=BLOCKS_MAX)),
        "tools": array(tool, most=TOOLS_MAX),
        "tool_choice": choice,
        "thinking": thinking,
        "output_config": asked({"effort": words("low", "medium", "high", "xhigh", "max"), "format": form}),
        "cache_control": _CACHE,
    }


_SMALLEST: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": ""}]}


def message_request() -> Schema:
    """The body."""
    properties = {
        **_common(),
        "max_tokens": integer(1, TOKENS_MAX),
        "stream": flag(),
        "temperature": number(0, 1),
        "top_p": number(0, 1, above=True),
        "top_k": integer(0, TOKENS_MAX),
        "stop_sequences": array(text(least=1, most=256), most=16),
        "metadata": asked({"user_id": text(most=512)}),
        "service_tier": words("auto", "standard_only"),
    }
    smallest = _SMALLEST | {"max_tokens": 1}
    return asked(with_untyped(properties, lambda body: read_message(body, ""), smallest), "messages", "max_tokens")


def count_request() -> Schema:
    """The body of a count."""
    fields = with_untyped(_common(), lambda body: read_message(body, "", counts_only=True), _SMALLEST)
    return asked(fields, "messages")


def message_answer() -> Schema:
    """A message."""
    count = integer(0)
    block = either(
        told({"type": constant("text"), "text": text()}),
        told({"type": constant("thinking"), "thinking": text(), "signature": text()}),
        told({"type": constant("tool_use"), "id": text(), "name": text(), "input": mapping(anything())}),
    )
    usage = told({"input_tokens": count, "output_tokens": count, "cache_read_input_tokens": count,
                  "cache_creation_input_tokens": count, "service_tier": constant("standard")})  # fmt: skip
    return told({
        "id": text(), "type": constant("message"), "role": constant("assistant"), "model": text(),
        "content": array(block, least=1),
        "stop_reason": words("end_turn", "max_tokens", "stop_sequence", "tool_use"),
        "stop_sequence": nullable(text()), "usage": usage,
    })  # fmt: skip


def count_answer() -> Schema:
    """A count."""
    return told({"input_tokens": integer(0)})


def error() -> Schema:
    """Anthropic's error."""
    return told({"type": constant("error"), "error": told({"type": text(), "message": text()})})
