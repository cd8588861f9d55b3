"""Log-probabilities in OpenAI's two shapes."""

from collections.abc import Sequence
from typing import Any

from kvmesh.core import TokenLogprob
from services.frontend.text_model import TextModel

LOWEST = -9999.0
"""JSON has no infinity; OpenAI writes this for impossible tokens."""


def chat_logprobs(text: TextModel, token_ids: Sequence[int], entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of chat."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        item = _token(text, token_id, entry.logprob)
        item["top_logprobs"] = [_token(text, other, logprob) for other, logprob in entry.alternatives]
        content.append(item)
    return {"content": content, "refusal": None}


def _token(text: TextModel, token_id: int, logprob: float) -> dict[str, Any]:
    data = text.token_bytes(token_id)
    return {"token": data.decode("utf-8", "replace"), "logprob": max(LOWEST, logprob), "bytes": list(data)}


def completion_logprobs(
    text: TextModel, token_ids: Sequence[int], entries: Sequence[TokenLogprob], offset: int
) -> tuple[dict[str, Any], int]:
    """`choices[].logprobs` of completions, and the text offset after these tokens."""
    tokens, offsets = [], []
    for token_id in token_ids:
        tokens.append(text.token_bytes(token_id).decode("utf-8", "replace"))
        offsets.append(offset)
        offset += len(tokens[-1])
    logprobs = [max(LOWEST, entry.logprob) for entry in entries]
    tops = [
        {
            text.token_bytes(other).decode("utf-8", "replace"): max(LOWEST, logprob)
            for other, logprob in entry.alternatives
        }
        for entry in entries
    ]
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}, offset
