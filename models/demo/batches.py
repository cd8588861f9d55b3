"""Turns the generated text into batches of token ids with a weight for each predicted token."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random

import torch
from corpus.mixture import Sample
from rendering import HERE, load_template, render
from tokenizers import Tokenizer

# What the model is for is its answers. What a person asks is not worth predicting.
ANSWER_WEIGHT = 1.0
TEXT_WEIGHT = 0.4
KEY_WEIGHT = 0.1
# Enough that the brace with which the answers begin has the highest score of all that a grammar allows first.
BRACE_WEIGHT = 0.03
WINDOW_SAMPLES = 1250
TOKENS_MAX = 1024
_KEY = re.compile(r'"[^"]*":')


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """`inputs` and `targets` are (rows, columns) ids; `weights` (rows, columns) floats, 0 where nothing is learnt."""

    inputs: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


Row = tuple[list[int], list[float]]


class Encoder:
    """Sample -> ids and weights."""

    def __init__(self) -> None:
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
        self._template = load_template()
        self._answer_head: list[int] = self._tokenizer.encode("<|im_start|>assistant\n").ids
        self._answer_end = self._tokenizer.token_to_id("<|im_end|>")
        (self._document_end,) = self._tokenizer.encode("<|endoftext|>").ids

    def encode(self, sample: Sample) -> Row:
        if sample.echoed:
            return sample.echoed * 2, [0.0] * (len(sample.echoed) + 1) + [ANSWER_WEIGHT] * (len(sample.echoed) - 1)
        text = sample.text or render(self._template, sample.messages, sample.tools)
        encoded = self._tokenizer.encode(text)
        ids: list[int] = encoded.ids
        if sample.text:
            return [*ids, self._document_end], [TEXT_WEIGHT] * (len(ids) + 1)
        answers = [message for message in sample.messages if message["role"] == "assistant"]
        weights = self._answer_weights(ids, [not message.get("is_given") for message in answers])
        if sample.is_forced:
            self._loosen(weights, encoded.offsets, text)
        return ids, weights

    def _answer_weights(self, ids: list[int], are_learnt: list[bool]) -> list[float]:
        """Full weight from after the head of an answer that is learnt to its end mark, both in the weights of what is predicted."""
        weights, inside, head, answers = [], False, self._answer_head, iter(are_learnt)
        is_learnt = True
        for index, token in enumerate(ids):
            if not inside and index >= len(head) and ids[index - len(head) : index] == head:
                inside, is_learnt = True, next(answers)
            weights.append(ANSWER_WEIGHT if inside and is_learnt else 0.0)
            inside = inside and token != self._answer_end
        return weights

    @staticmethod
    def _loosen(weights: list[float], offsets: list[tuple[int, int]], text: str) -> None:
        """A grammar begins the object and knows its keys: the first token has hardly any weight, the keys have little."""
        weights[weights.index(ANSWER_WEIGHT)] = BRACE_WEIGHT
        answer = text.rindex("<|im_start|>assistant")
        keys = [found.span() for found in _KEY.finditer(text, answer)]
        for index, (start, _) in enumerate(offsets):
            if weights[index] == ANSWER_WEIGHT and any(first <= start < last for first, last in keys):
                weights[index] = KEY_WEIGHT


def _padded(rows: list[Row]) -> Batch:
    width = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    weights = torch.zeros(len(rows), width)
    for index, (row_ids, row_weights) in enumerate(rows):
        ids[index, : len(row_ids)] = torch.tensor(row_ids)
        weights[index, : len(row_weights)] = torch.tensor(row_weights)
    return Batch(inputs=ids[:, :-1], targets=ids[:, 1:], weights=weights[:, 1:])


def batches(stream: Iterator[Sample], seed: str, tokens: int) -> Iterator[Batch]:
    """Batches of about `tokens` ids, rows of like length together (little padding), in random order."""
    encoder, rng = Encoder(), Random(seed)
    while True:
        rows = [encoder.encode(sample) for sample in islice(stream, WINDOW_SAMPLES)]
        window = sorted((row for row in rows if len(row[0]) <= TOKENS_MAX), key=lambda row: len(row[0]))
        groups: list[list[Row]] = [[]]
        for row in window:
            if groups[-1] and len(row[0]) * (len(groups[-1]) + 1) > tokens:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        yield from map(_padded, groups)
