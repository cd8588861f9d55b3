"""Converts updates of an answer to the requested output tensors."""

from collections.abc import Sequence

import orjson

from kvmesh.core import TokenLogprob
from kvmesh.rpc.codec.kserve import Tensor
from services.frontend.api.answer_blocks import AnswerUpdate
from services.frontend.api.kserve.read import OUTPUTS, Inference
from services.frontend.pipeline.prepare import Prepared
from services.frontend.text.text_model import TextModel


class OutputTensors:
    """Output tensors of one request. A tensor has an element per choice, empty if the choice has nothing new."""

    def __init__(self, inference: Inference, prepared: Prepared) -> None:
        self._inference = inference
        self._prompt_tokens = len(prepared.generation.token_ids)
        self._text = prepared.model.text
        choices = prepared.request.choices
        self._cumulative = [0.0] * choices
        self._counted = [0] * choices

    def convert(self, updates: Sequence[AnswerUpdate]) -> list[Tensor]:
        """Returns the tensors of these updates, at most one update per choice."""
        by_choice = {each.choice: each for each in updates}
        ordered = [by_choice.get(choice) for choice in range(len(self._cumulative))]
        values: dict[str, Sequence[object]] = {
            "text_output": [self._output(each) for each in ordered],
            "finish_reason": [_finish(each) for each in ordered],
            "cumulative_logprob": [self._logprob(i, each) for i, each in enumerate(ordered)],
            "logprobs": [self._logprobs(each) for each in ordered],
            "num_input_tokens": [self._prompt_tokens],
            "num_output_tokens": [self._tokens(i, each) for i, each in enumerate(ordered)],
        }
        return [
            Tensor(name=name, datatype=datatype, values=values[name])
            for name, datatype in OUTPUTS.items()
            if name in self._inference.outputs
        ]

    def _output(self, update: AnswerUpdate | None) -> bytes:
        return b"" if update is None else (self._inference.echo + update.text).encode()

    def _logprob(self, choice: int, update: AnswerUpdate | None) -> float:
        self._cumulative[choice] += sum(each.logprob for each in (update.logprobs if update else None) or ())
        return self._cumulative[choice]

    def _tokens(self, choice: int, update: AnswerUpdate | None) -> int:
        # The last update also counts the tokens that had no text.
        if update is None:
            return 0
        new = len(update.token_ids)
        if update.ending is not None:
            new = max(new, update.ending.output_tokens - self._counted[choice])
        self._counted[choice] += new
        return new

    def _logprobs(self, update: AnswerUpdate | None) -> bytes:
        if update is None or update.logprobs is None:
            return b"null"
        pairs = zip(update.token_ids, update.logprobs, strict=False)
        return orjson.dumps([_entry(self._text, token_id, each) for token_id, each in pairs])


def _finish(update: AnswerUpdate | None) -> bytes:
    # A choice that has not ended has the finish reason None, as in vLLM.
    return b"None" if update is None or update.ending is None else update.ending.reason.value.encode()


def _entry(text: TextModel, token_id: int, logprob: TokenLogprob) -> dict[str, dict[str, object]]:
    found: dict[int, dict[str, object]] = {token_id: {"logprob": logprob.logprob, "rank": None}}
    for rank, (other, value) in enumerate(logprob.alternatives, 1):
        found[other] = {"logprob": value, "rank": rank}
    return {str(each): {**entry, "decoded_token": text.names.texts[each]} for each, entry in found.items()}
