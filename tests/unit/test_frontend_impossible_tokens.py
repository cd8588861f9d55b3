"""Log-probabilities of tokens with probability 0."""

import json
from math import inf
from typing import Any

from kvmesh.core import TokenLogprob
from services.frontend.api.openai.logprobs import chat_logprobs, completion_logprobs
from services.frontend.text.token_names import TokenNames


class Text:
    """The part of a text model that the functions use."""

    names = TokenNames(lambda token_id: b"xyz"[token_id : token_id + 1])


def test_an_impossible_token_is_valid_json() -> None:
    """JSON has no infinity, and clients' parsers refuse the whole answer for one."""
    text: Any = Text()
    entry = TokenLogprob(logprob=-inf, alternatives=((1, -0.5), (2, -inf)))
    [item] = json.loads(chat_logprobs(text, [2], [entry]))["content"]
    assert item["logprob"] == item["top_logprobs"][1]["logprob"] == -9999.0
    shown = completion_logprobs(text, [2], [entry], offsets=[0])
    assert json.loads(json.dumps(shown, allow_nan=False))["token_logprobs"] == [-9999.0]
