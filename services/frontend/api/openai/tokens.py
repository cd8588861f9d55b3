"""POST /tokenize and /detokenize, as vLLM has them."""

from aiohttp import web

from services.frontend.access.caller import current_caller
from services.frontend.api.http.exchange import Exchange
from services.frontend.api.openai.bodies import to_json
from services.frontend.api.openai.chat_request import read_chat_prompt
from services.frontend.api.openai.fields import Fields
from services.frontend.api.openai.sampling import is_token_list
from services.frontend.models import ServedModel
from services.frontend.pipeline.prepare import checked_ids, tokens_of
from services.frontend.pipeline.request import Prompt, Request


async def serve_tokenize(exchange: Exchange) -> web.StreamResponse:
    """A text's tokens, or those that the model would see of a conversation."""
    fields = Fields(await exchange.read_object())
    model = _model(exchange, fields)
    with_texts = fields.flag("return_token_strs")
    prompt, name = _read_prompt(fields)
    adds_special_tokens = fields.flag("add_special_tokens", isinstance(prompt, str))
    if adds_special_tokens and not isinstance(prompt, str):
        fields.refuse("add_special_tokens", "the chat template adds them", (False,))
    fields.finish()
    request = Request(
        request_id=exchange.request_id,
        model=model.name,
        prompt=prompt,
        adds_special_tokens=adds_special_tokens,
        fields={"prompt": name},
    )
    token_ids = await tokens_of(request, model, exchange.pipeline.settings) if prompt else []
    texts = [model.text.vocabulary_token(each) for each in token_ids] if with_texts else None
    body = {
        "count": len(token_ids),
        "max_model_len": model.context_tokens_max,
        "tokens": list(token_ids),
        "token_strs": texts,
    }
    return web.Response(body=to_json(body), headers=exchange.headers, content_type="application/json")


def _read_prompt(fields: Fields) -> tuple[Prompt, str]:
    if fields.has("messages"):
        if fields.has("prompt"):
            raise fields.wrong("prompt", "absent when there are messages")
        return read_chat_prompt(fields), "messages"
    prompt = fields.text("prompt")
    if prompt is None:
        raise fields.wrong("prompt", "a string")
    return prompt, "prompt"


async def serve_detokenize(exchange: Exchange) -> web.StreamResponse:
    """The text of token ids, special tokens included."""
    fields = Fields(await exchange.read_object())
    model = _model(exchange, fields)
    token_ids = fields.take("tokens")
    if not is_token_list(token_ids):
        raise fields.wrong("tokens", "a list of token ids")
    fields.finish()
    text = model.text.decode(checked_ids(token_ids, "tokens", model), skip_special_tokens=False)
    return web.Response(body=to_json({"prompt": text}), headers=exchange.headers, content_type="application/json")


def _model(exchange: Exchange, fields: Fields) -> ServedModel:
    name = fields.text("model", 256)
    if not name:
        raise fields.wrong("model", "a model's name")
    model = exchange.pipeline.models.find(name)
    current_caller.get().check_model(model.adapter or model.name)
    exchange.model_name = model.name
    return model
