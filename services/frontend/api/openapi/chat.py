"""Chat and completions."""

from kvmesh.checks import (
    CACHE_SALT_BYTES_MAX,
    LOGIT_BIAS_MAX,
    LOGPROBS_MAX,
    PRIORITY_MAX,
    STOP_CHARACTERS_MAX,
    STOP_STRINGS_MAX,
    STOP_TOKENS_MAX,
)
from kvmesh.rpc.codec.sampling import OPTION_CHARACTERS_MAX, OPTIONS_MAX
from services.frontend.api.openai.chat_request import (
    CALLS_MAX,
    EFFORTS,
    MESSAGES_MAX,
    PARTS_MAX,
    ROLES,
    TOOLS_MAX,
    read_chat,
)
from services.frontend.api.openai.completion_request import read_completion
from services.frontend.api.openai.sampling import METADATA_MAX, SESSION_CHARACTERS_MAX, TOKENS_MAX
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
    reference,
    text,
    told,
    words,
)
from services.frontend.settings import PipelineSettings

_NAME = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"}
_DOCUMENT = either(mapping(anything()), text(), help="A JSON object, as it is or in a string.")
TOKEN_IDS = array(integer(0, TOKENS_MAX))


def sampling() -> dict[str, Schema]:
    """What chat and completions share."""
    return {
        "model": text("A model's or an adapter's name; may be absent where one model is served.", least=1, most=256),
        "stream": flag("Answer with server-sent events, the last of which is [DONE]."),
        "stream_options": asked(
            {"include_usage": flag(), "continuous_usage_stats": flag(), "include_obfuscation": anything()}
        ),
        "n": integer(1, 128, "Choices; the server's limit may be lower."),
        "max_tokens": integer(0, TOKENS_MAX),
        "min_tokens": integer(0, TOKENS_MAX),
        "temperature": number(0, 2),
        "top_p": number(0, 1, above=True),
        "top_k": integer(-1, TOKENS_MAX, "0 and -1: off."),
        "min_p": number(0, 1),
        "presence_penalty": number(-2, 2),
        "frequency_penalty": number(-2, 2),
        "repetition_penalty": number(0, 10, above=True),
        "seed": integer(),
        "stop": either(
            text(most=STOP_CHARACTERS_MAX, least=1),
            array(text(most=STOP_CHARACTERS_MAX, least=1), most=STOP_STRINGS_MAX),
        ),
        "stop_token_ids": {**TOKEN_IDS, "maxItems": STOP_TOKENS_MAX},
        "include_stop_str_in_output": flag(),
        "ignore_eos": flag(),
        "skip_special_tokens": flag(),
        "logit_bias": mapping(number(-100, 100), "By token id.", most=LOGIT_BIAS_MAX),
        "prompt_logprobs": either(integer(0, LOGPROBS_MAX), constant(False)),
        "truncate_prompt_tokens": either(integer(1, TOKENS_MAX), constant(-1)),
        "return_token_ids": flag(),
        "return_tokens_as_token_ids": flag("Log-probabilities name tokens `token_id:N`."),
        "priority": integer(-PRIORITY_MAX, PRIORITY_MAX, "Larger goes first."),
        "cache_salt": text("Keeps cached prefixes apart.", most=CACHE_SALT_BYTES_MAX),
        "session_id": text("Requests of one session go to where its prefix is.", most=SESSION_CHARACTERS_MAX),
        "prompt_cache_key": text("As session_id, in OpenAI's word.", most=256),
        "user": text(most=512),
        "metadata": mapping(text(), most=METADATA_MAX),
        **constraints(),
    }


def constraints() -> dict[str, Schema]:
    """What the answer must match."""
    options = array(text(least=1, most=OPTION_CHARACTERS_MAX), least=1, most=OPTIONS_MAX)
    schema = asked({"name": anything(), "description": anything(), "strict": anything(), "schema": _DOCUMENT}, "schema")
    form = {"type": words("text", "json_object", "json_schema", "structural_tag"), "json_schema": schema}
    kinds = {"json": _DOCUMENT, "json_object": flag(), "regex": text(least=1), "choice": options,
             "grammar": text(least=1), "structural_tag": _DOCUMENT}  # fmt: skip
    return {
        # A structural tag has fields of its own beside the type.
        "response_format": {"type": "object", "properties": form, "required": ["type"]},
        "structured_outputs": {"type": "object", "properties": {name: nullable(each) for name, each in kinds.items()},
                               "description": "Exactly one of the kinds."},
        "guided_json": _DOCUMENT,
        "guided_regex": text(least=1),
        "guided_choice": options,
        "guided_grammar": text(least=1),
    }  # fmt: skip


def message() -> Schema:
    """A message of a chat."""
    part = either(
        asked({"type": constant("text"), "text": text()}, "type", "text"),
        asked({"type": constant("refusal"), "refusal": text()}, "type", "refusal"),
    )
    function = asked({"name": text(least=1, most=256), "arguments": text("A JSON object in a string.")}, "name")
    call = asked(
        {"id": text(most=256), "type": constant("function"), "index": anything(), "function": function}, "function"
    )
    return asked(
        {
            "role": words(*ROLES),
            "content": either(text(), array(part, least=1, most=PARTS_MAX)),
            "name": text(),
            "tool_calls": array(call, most=CALLS_MAX),
            "tool_call_id": text(),
            "reasoning_content": text(),
            "reasoning": text(),
            **{name: anything() for name in ("refusal", "annotations", "audio", "function_call")},
        },
        "role",
    )


def tool() -> Schema:
    """A function that may be called."""
    function = {"name": _NAME, "description": text(), "parameters": mapping(anything(), "A JSON Schema."),
                "strict": flag("Arguments match the schema.")}  # fmt: skip
    return asked({"type": constant("function"), "function": asked(function, "name")}, "type", "function")


def chat_request() -> Schema:
    """The body of a chat completion."""
    properties = {
        **sampling(),
        "messages": array(message(), least=1, most=MESSAGES_MAX),
        "max_tokens": integer(1, TOKENS_MAX, "max_completion_tokens wins."),
        "max_completion_tokens": integer(1, TOKENS_MAX),
        "logprobs": flag(),
        "top_logprobs": integer(0, LOGPROBS_MAX),
        "tools": array(tool(), most=TOOLS_MAX),
        "tool_choice": either(words("none", "auto", "required"), mapping(anything())),
        "parallel_tool_calls": flag(),
        "reasoning_effort": words(*EFFORTS),
        "documents": array(mapping(anything()), most=1024),
        "chat_template_kwargs": mapping(anything()),
        "add_generation_prompt": flag(),
        "continue_final_message": flag(),
    }
    smallest = {"model": "m", "messages": [{"role": "user", "content": ""}]}
    return asked(with_untyped(properties, lambda body: read_chat(body, ""), smallest), "messages")


def completion_request() -> Schema:
    """The body of a completion."""
    properties = {
        **sampling(),
        "prompt": either(text(), array(text(), least=1), {**TOKEN_IDS, "minItems": 1},
                         array({**TOKEN_IDS}, least=1)),
        "logprobs": integer(0, LOGPROBS_MAX),
        "echo": flag(),
        "add_special_tokens": flag(),
    }  # fmt: skip
    settings = PipelineSettings()
    smallest = {"model": "m", "prompt": "p"}
    fields = with_untyped(properties, lambda body: read_completion(body, "", settings), smallest)
    return asked(fields, "prompt")


def usage() -> Schema:
    """OpenAI's usage."""
    count = integer(0)
    return told({
        "prompt_tokens": count, "completion_tokens": count, "total_tokens": count,
        "prompt_tokens_details": told({"cached_tokens": count}),
        "completion_tokens_details": told({"reasoning_tokens": count}),
    })  # fmt: skip


_FINISH = words("stop", "length", "tool_calls")
_STOP_REASON = {"type": ["string", "integer", "null"]}


def chat_answer() -> Schema:
    """A chat completion."""
    call = told({"id": text(), "type": constant("function"), "function": told({"name": text(), "arguments": text()})})
    answer = told(
        {"role": constant("assistant"), "content": nullable(text()), "refusal": {"type": "null"},
         "reasoning_content": text(), "reasoning": text("The same."), "tool_calls": array(call)},
        "reasoning_content", "reasoning", "tool_calls",
    )  # fmt: skip
    choice = told(
        {"index": integer(0), "message": answer, "logprobs": {"type": ["object", "null"]}, "finish_reason": _FINISH,
         "stop_reason": _STOP_REASON, "token_ids": TOKEN_IDS},
        "token_ids",
    )  # fmt: skip
    return told(
        {"id": text(), "object": constant("chat.completion"), "created": integer(0), "model": text(),
         "choices": array(choice, least=1), "usage": reference("Usage"), "prompt_token_ids": TOKEN_IDS,
         "prompt_logprobs": anything()},
        "prompt_token_ids",
    )  # fmt: skip


def completion_answer() -> Schema:
    """A completion."""
    choice = told(
        {"index": integer(0), "text": text(), "logprobs": {"type": ["object", "null"]}, "finish_reason": _FINISH,
         "stop_reason": _STOP_REASON, "token_ids": TOKEN_IDS, "prompt_token_ids": TOKEN_IDS,
         "prompt_logprobs": anything()},
        "token_ids", "prompt_token_ids",
    )  # fmt: skip
    return told({
        "id": text(), "object": constant("text_completion"), "created": integer(0), "model": text(),
        "choices": array(choice, least=1), "usage": reference("Usage"),
    })  # fmt: skip
