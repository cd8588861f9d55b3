"""The Responses API."""

from kvmesh.checks import CACHE_SALT_BYTES_MAX, PRIORITY_MAX
from services.frontend.api.openai.chat_request import EFFORTS
from services.frontend.api.openai.sampling import TOKENS_MAX
from services.frontend.api.openapi.chat import sampling
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
    page,
    reference,
    text,
    told,
    words,
)
from services.frontend.api.responses.items import ITEMS_MAX, PARTS_MAX, ROLES
from services.frontend.api.responses.read import INCLUDES, METADATA_MAX, TOOLS_MAX, read_response

RESPONSE_ID = {"type": "string", "pattern": "^resp_[0-9a-f]{32}$"}
_SHARED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
           "seed", "stop", "stream")  # fmt: skip
_STATUS = words("in_progress", "completed", "incomplete")


def metadata() -> Schema:
    """At most 16 short strings by name."""
    return mapping(text(most=512), most=METADATA_MAX)


def parts() -> Schema:
    """Text of a message."""
    ignored = {name: anything() for name in ("annotations", "logprobs", "prompt_cache_breakpoint")}
    said = asked({"type": words("input_text", "output_text", "text"), "text": text(), **ignored}, "type", "text")
    refused = asked({"type": constant("refusal"), "refusal": text(), **ignored}, "type", "refusal")
    return either(text(), array(either(said, refused), most=PARTS_MAX))


def item() -> Schema:
    """One of the kinds of items that go in."""
    common = {"id": text(most=256), "status": _STATUS}
    phase = words("commentary", "final_answer")
    thought = {"summary_text": "summary", "reasoning_text": "content"}
    thoughts = {
        name: array(asked({"type": constant(kind), "text": text()}, "type", "text"), most=PARTS_MAX)
        for kind, name in thought.items()
    }
    return either(
        asked({"type": constant("message"), "role": words(*ROLES), "content": parts(), "phase": phase, **common},
              "role", "content"),
        asked({"type": constant("function_call"), "call_id": text(least=1, most=256), "name": text(least=1, most=256),
               "arguments": text(), **common}, "type", "call_id", "name", "arguments"),
        asked({"type": constant("function_call_output"), "call_id": text(least=1, most=256), "output": parts(),
               **common}, "type", "call_id", "output"),
        asked({"type": constant("reasoning"), "encrypted_content": anything("Refused: reasoning is sent in the clear."),
               **thoughts, **common}, "type"),
    )  # fmt: skip


def response_request() -> Schema:
    """The body."""
    shared = sampling()
    function = {"type": constant("function"), "name": text(least=1, most=64), "description": text(),
                "parameters": mapping(anything(), "A JSON Schema."), "strict": flag()}  # fmt: skip
    form = {"type": words("text", "json_object", "json_schema"), "name": text(least=1, most=64),
            "schema": mapping(anything()), "description": text(), "strict": flag()}  # fmt: skip
    named = asked({"type": constant("function"), "name": text(least=1)}, "type", "name")
    properties = {
        "model": shared["model"],
        "input": either(text(), array(item(), least=1, most=ITEMS_MAX)),
        "instructions": text("The first message; not carried over by previous_response_id."),
        "previous_response_id": RESPONSE_ID,
        "store": flag("Keep the response, so that it can be continued and asked for again."),
        **{name: shared[name] for name in _SHARED},
        "stream_options": asked({"include_obfuscation": constant(False)}),
        "max_output_tokens": integer(1, TOKENS_MAX),
        "top_logprobs": integer(0, 20),
        "include": array(words(*INCLUDES), most=16),
        "tools": array(asked(function, "type", "name"), most=TOOLS_MAX),
        "tool_choice": either(words("none", "auto", "required"), named),
        "parallel_tool_calls": flag(),
        "text": asked({"format": asked(form, "type"), "verbosity": words("low", "medium", "high")}),
        "reasoning": asked({"effort": words(*EFFORTS), "summary": words("auto", "concise", "detailed"),
                            "generate_summary": anything("Refused: use summary.")}),
        "metadata": metadata(),
        "truncation": constant("disabled"),
        "service_tier": words("auto", "default"),
        "user": text(most=512),
        "safety_identifier": text(most=1024),
        "prompt_cache_key": text(most=256),
        "priority": integer(-PRIORITY_MAX, PRIORITY_MAX),
        "cache_salt": text(most=CACHE_SALT_BYTES_MAX),
        "chat_template_kwargs": mapping(anything()),
    }  # fmt: skip
    smallest = {"model": "m", "input": "i"}
    fields = with_untyped(
        properties, lambda body: read_response(body, stores_by_default=True, has_store=True), smallest
    )
    return asked(fields, "input")


def response_usage() -> Schema:
    """Usage in the words of this API."""
    count = integer(0)
    return told({
        "input_tokens": count, "output_tokens": count, "total_tokens": count,
        "input_tokens_details": told({"cached_tokens": count, "cache_write_tokens": count}),
        "output_tokens_details": told({"reasoning_tokens": count}),
    })  # fmt: skip


def output_item() -> Schema:
    """An item that comes out."""
    head = {"id": text(), "status": _STATUS}
    said = told({"type": constant("output_text"), "text": text(), "annotations": array(anything()),
                 "logprobs": array(anything())}, "logprobs")  # fmt: skip
    thought = told({"type": constant("reasoning_text"), "text": text()})
    return either(
        told({"type": constant("message"), "role": constant("assistant"), "content": array(said), **head}),
        told({"type": constant("reasoning"), "summary": array(anything()), "content": array(thought), **head}),
        told({"type": constant("function_call"), "call_id": text(), "name": text(), "arguments": text(), **head}),
    )


def response_answer() -> Schema:
    """A response."""
    maybe_text = nullable(text())
    return told(
        {
            "id": RESPONSE_ID, "object": constant("response"), "created_at": integer(0),
            "completed_at": nullable(integer(0)), "status": words("completed", "incomplete"),
            "background": constant(False), "error": {"type": "null"},
            "incomplete_details": nullable(told({"reason": constant("max_output_tokens")})),
            "instructions": maybe_text, "model": text(), "output": array(output_item(), least=1),
            "previous_response_id": maybe_text, "store": flag(), "usage": reference("ResponseUsage"),
            "temperature": nullable(number(0, 2)), "top_p": nullable(number(0, 1)), "tools": array(anything()),
            "tool_choice": anything(), "parallel_tool_calls": flag(), "text": mapping(anything()),
            "reasoning": mapping(anything()), "max_output_tokens": nullable(integer(1)), "metadata": metadata(),
            "truncation": constant("disabled"), "service_tier": constant("default"), "top_logprobs": integer(0),
            "max_tool_calls": {"type": "null"}, "user": maybe_text, "safety_identifier": maybe_text,
            "prompt_cache_key": maybe_text,
        },
    )  # fmt: skip


def deleted(kind: str) -> Schema:
    """What deleting answers."""
    return told({"id": text(), "object": constant(kind), "deleted": constant(True)})


def input_items() -> Schema:
    """A page of input items."""
    return page(told({"id": text(), "type": text(), "status": _STATUS}))
