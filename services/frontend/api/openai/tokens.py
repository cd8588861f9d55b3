"""POST /tokenize and /detokenize, as vLLM has them."""

from typing import Annotated

from aiohttp import web
from msgspec import Meta

from kvmesh.errors import InvalidRequestError, UnsupportedError
from services.frontend.api.http.exchange import Exchange
from services.frontend.api.openai.chat_request import (
    Documents,
    Effort,
    Messages,
    Tools,
    conversation_of,
    template_tools,
)
from services.frontend.api.openai.sampling import Verbosity
from services.frontend.api.request_body import JsonObject, ModelBody, TokenId, invalid_value, read_body
from services.frontend.pipeline.prepare import checked_ids
from services.frontend.pipeline.request import Prompt, Request, ToolChoice


class TokenizeRequest(ModelBody, kw_only=True):
    """A text or a conversation."""

    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    documents: Documents | None = None
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="Of a text; true by default. The chat template adds those of a conversation.")
    ] = None
    return_token_strs: bool | None = None


class DetokenizeRequest(ModelBody, kw_only=True):
    """Tokens."""

    tokens: list[TokenId]


async def serve_tokenize(exchange: Exchange) -> web.StreamResponse:
    """Tokenises a text, or a conversation as the model receives it."""
    body = await exchange.read_request(lambda values: read_body(TokenizeRequest, values))
    model = exchange.find_model(body.model_name())
    prompt, name = _prompt(body)
    request = Request(
        request_id=exchange.request_id,
        model=model.name,
        prompt=prompt,
        adds_special_tokens=isinstance(prompt, str) and body.add_special_tokens is not False,
        fields={"prompt": name},
    )
    token_ids = await exchange.tokenise(request) if prompt else []
    texts = [model.text.vocabulary_token(each) for each in token_ids] if body.return_token_strs else None
    answer = {
        "count": len(token_ids),
        "max_model_len": model.context_tokens_max,
        "tokens": list(token_ids),
        "token_strs": texts,
    }
    return exchange.json_response(answer)


def _prompt(body: TokenizeRequest) -> tuple[Prompt, str]:
    if body.messages is not None:
        if body.prompt is not None:
            raise invalid_value("prompt", wanted="absent when there are messages")
        if body.add_special_tokens:
            message = "add_special_tokens is not supported: the chat template adds them"
            raise UnsupportedError(message, field="add_special_tokens")
        return conversation_of(body, template_tools(body.tools or ()), ToolChoice()), "messages"
    if body.prompt is None:
        raise invalid_value("prompt", wanted="a string")
    for name in _OF_CONVERSATION:
        if getattr(body, name) is not None:
            raise InvalidRequestError(f"{name} needs messages", field=name, reason="invalid_value")
    return body.prompt, "prompt"


_OF_CONVERSATION = (
    "tools", "documents", "reasoning_effort", "verbosity", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message",
)  # fmt: skip


async def serve_detokenize(exchange: Exchange) -> web.StreamResponse:
    """Returns the text of token ids, special tokens included."""
    body = await exchange.read_request(lambda values: read_body(DetokenizeRequest, values))
    model = exchange.find_model(body.model_name())
    if len(body.tokens) > model.context_tokens_max:
        raise invalid_value("tokens", wanted=f"a list of at most {model.context_tokens_max} ids, the model's context")
    token_ids = checked_ids(body.tokens, "tokens", model)
    text = await exchange.pipeline.detokenise(token_ids, model, caller=exchange.caller, skip_special_tokens=False)
    return exchange.json_response({"prompt": text})
