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


def echoed_logprobs(
    text: TextModel, prompt_ids: Sequence[int], prompt: Sequence[TokenLogprob], answer: dict[str, Any]
) -> dict[str, Any]:
    """A completion's log-probabilities with its echoed prompt's before them. The first token has none: nothing precedes it."""
    (first, offset) = completion_logprobs(text, prompt_ids[:1], [TokenLogprob(logprob=0.0)], 0)
    first["token_logprobs"], first["top_logprobs"] = [None], [None]
    echoed, offset = completion_logprobs(text, prompt_ids[1:], prompt, offset)
    shifted = answer | {"text_offset": [offset + each for each in answer["text_offset"]]}
    return {name: first[name] + echoed[name] + shifted[name] for name in first}


def prompt_logprobs(
    text: TextModel, prompt_ids: Sequence[int], entries: Sequence[TokenLogprob]
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per token the candidates by id; None for the first. Ranks are known of the best ones only."""
    return [None, *(_candidates(text, each, entry) for each, entry in zip(prompt_ids[1:], entries, strict=True))]


def _candidates(text: TextModel, token_id: int, entry: TokenLogprob) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rank, (other, logprob) in enumerate(entry.alternatives, start=1):
        found[str(other)] = _candidate(text, other, logprob, rank)
    if str(token_id) not in found:
        found = {str(token_id): _candidate(text, token_id, entry.logprob, None)} | found
    return found


def _candidate(text: TextModel, token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
    token = text.token_bytes(token_id).decode("utf-8", "replace")
    return {"logprob": max(LOWEST, logprob), "rank": rank, "decoded_token": token}
