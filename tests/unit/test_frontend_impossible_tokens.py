"""Log-probabilities of tokens that cannot come."""

import json
from math import inf
from typing import Any

from kvmesh.core import TokenLogprob
from services.frontend.openai.logprobs import chat_logprobs


class Text:
    """As much of a text model as is read."""

    def token_bytes(self, token_id: int) -> bytes:
        return b"x"


def test_an_impossible_token_is_valid_json() -> None:
    """JSON has no infinity, and parsers of clients refuse the whole answer for one."""
    text: Any = Text()
    entry = TokenLogprob(logprob=-inf, alternatives=((1, -0.5), (2, -inf)))
    shown = chat_logprobs(text, [2], [entry])
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown
    [item] = shown["content"]
    assert item["logprob"] == item["top_logprobs"][1]["logprob"] == -9999.0
