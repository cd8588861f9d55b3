"""Log-probabilities in OpenAI's two formats. This is on the hot path of streams that have them."""

from collections.abc import Sequence
from typing import Any

import orjson

from kvmesh.core import TokenLogprob
from services.frontend.text.detokenise import Detokeniser
from services.frontend.text.text_model import TextModel

LOWEST = -9999.0
"""JSON has no infinity; OpenAI writes this for impossible tokens."""
_LOWEST = b"-9999.0"


def chat_logprobs(
    text: TextModel, token_ids: Sequence[int], entries: Sequence[TokenLogprob], *, as_ids: bool = False
) -> bytes:
    """Encodes `choices[].logprobs` of chat.

    `as_ids`: tokens are named by their ids, as vLLM's `return_tokens_as_token_ids` asks for.
    """
    return b'{"content":[%b],"refusal":null}' % b",".join(chat_entries(text, token_ids, entries, as_ids=as_ids))


def chat_entries(
    text: TextModel, token_ids: Sequence[int], entries: Sequence[TokenLogprob], *, as_ids: bool = False
) -> list[bytes]:
    """Encodes one entry per token, with its alternatives. Building dicts and encoding them takes three times as long."""
    fields = text.names.fields_as_id if as_ids else text.names.fields
    found = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        pairs = entry.alternatives
        # One call for all numbers: Python's own formatting of a float takes ten times as long.
        own, *numbers = _numbers([entry.logprob, *[value for _, value in pairs]])
        tops = b"},{".join([fields[pair[0]] + number for pair, number in zip(pairs, numbers, strict=True)])
        found.append(b'{%b%b,"top_logprobs":[%b]}' % (fields[token_id], own, b"{%b}" % tops if tops else b""))
    return found


def _numbers(values: list[float]) -> list[bytes]:
    return orjson.dumps(values)[1:-1].replace(b"null", _LOWEST).split(b",")


def completion_logprobs(
    text: TextModel,
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprob],
    *,
    offsets: Sequence[int],
    as_ids: bool = False,
) -> dict[str, Any]:
    """Returns `choices[].logprobs` of completions. `offsets`: where each token's text begins.

    `top_logprobs` includes the sampled token, even if it is not one of the most likely.
    """
    names = text.names.as_ids if as_ids else text.names.texts
    tops = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        # Different tokens may have the same text. The sampled one wins, then the more likely one.
        top = {names[other]: max(LOWEST, value) for other, value in reversed(entry.alternatives)}
        top[names[token_id]] = max(LOWEST, entry.logprob)
        tops.append(top)
    return {
        "tokens": [names[token_id] for token_id in token_ids],
        "token_logprobs": [max(LOWEST, entry.logprob) for entry in entries],
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }


class AnswerOffsets:
    """Where each token of an answer begins in the text, which begins with `start` characters of echo.

    `detokeniser`: configured like the answer's own. A token that only continues a character begins where the character does.
    """

    def __init__(self, detokeniser: Detokeniser, start: int) -> None:
        self._detokeniser = detokeniser
        self._at = start

    def take(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the offsets of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._at)
            self._at += len(self._detokeniser.push((token_id,)))
        return offsets


def echo_offsets(text: TextModel, prompt_ids: Sequence[int], echo: str) -> list[int]:
    """Returns where each token of a prompt begins in its echo. Special tokens that the echo omits take no characters."""
    detokeniser, at, offsets = text.detokeniser(skip_special_tokens=False), 0, []
    for token_id in prompt_ids:
        offsets.append(min(at, len(echo)))
        piece = detokeniser.push((token_id,))
        if not text.is_special(token_id) or echo.startswith(piece, at):
            at += len(piece)
    return offsets


def echoed_logprobs(
    text: TextModel, prompt_ids: Sequence[int], prompt: Sequence[TokenLogprob], *, echo: str, as_ids: bool = False
) -> dict[str, Any]:
    """Returns the log-probabilities of an echoed prompt. The first token has none, since nothing precedes it."""
    entries = [TokenLogprob(logprob=0.0), *prompt]
    found = completion_logprobs(text, prompt_ids, entries, offsets=echo_offsets(text, prompt_ids, echo), as_ids=as_ids)
    found["token_logprobs"][0] = found["top_logprobs"][0] = None
    return found


def prompt_logprobs(
    text: TextModel, prompt_ids: Sequence[int], entries: Sequence[TokenLogprob]
) -> list[dict[str, Any] | None]:
    """Returns vLLM's `prompt_logprobs`: per token the candidates by id, None for the first. Only the best have known ranks."""
    return [None, *(_candidates(text, each, entry) for each, entry in zip(prompt_ids[1:], entries, strict=True))]


def _candidates(text: TextModel, token_id: int, entry: TokenLogprob) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rank, (other, logprob) in enumerate(entry.alternatives, start=1):
        found[str(other)] = _candidate(text, other, logprob, rank=rank)
    if str(token_id) not in found:
        found = {str(token_id): _candidate(text, token_id, entry.logprob, rank=None)} | found
    return found


def _candidate(text: TextModel, token_id: int, logprob: float, *, rank: int | None) -> dict[str, Any]:
    return {"logprob": max(LOWEST, logprob), "rank": rank, "decoded_token": text.names.texts[token_id]}
