"""Turns the generated text into batches of token ids with a weight for each predicted token."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random

import torch
from corpus.mixture import Sample
from rendering import HERE, load_template, render
from tokenizers import Tokenizer

# What the model is for is its answers; the rest teaches it to read, and to continue plain text.
ANSWER_WEIGHT = 1.0
TEXT_WEIGHT = 0.5
PROMPT_WEIGHT = 0.15
WINDOW_SAMPLES = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """`inputs` and `targets` are (rows, columns) ids; `weights` (rows, columns) floats, 0 where a row is padded."""

    inputs: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


class Encoder:
    """Sample -> ids and weights."""

    def __init__(self) -> None:
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
        self._template = load_template()
        self._answer_head: list[int] = self._tokenizer.encode("<|im_start|>assistant\n").ids
        self._answer_end = self._tokenizer.token_to_id("<|im_end|>")
        (self._document_end,) = self._tokenizer.encode("<|endoftext|>").ids

    def encode(self, sample: Sample) -> tuple[list[int], list[float]]:
        text = sample.text or render(self._template, sample.messages, sample.tools)
        ids: list[int] = self._tokenizer.encode(text).ids
        weights = [TEXT_WEIGHT] * len(ids) if sample.text else self._answer_weights(ids)
        return [*ids, self._document_end], [*weights, TEXT_WEIGHT if sample.text else PROMPT_WEIGHT]

    def _answer_weights(self, ids: list[int]) -> list[float]:
        """Full weight from after the head of an answer to its end mark, both in the weights of what is predicted."""
        weights, inside, head = [], False, self._answer_head
        for index, token in enumerate(ids):
            inside = inside or (index >= len(head) and ids[index - len(head) : index] == head)
            weights.append(ANSWER_WEIGHT if inside else PROMPT_WEIGHT)
            inside = inside and token != self._answer_end
        return weights


def _padded(rows: list[tuple[list[int], list[float]]]) -> Batch:
    width = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    weights = torch.zeros(len(rows), width)
    for index, (row_ids, row_weights) in enumerate(rows):
        ids[index, : len(row_ids)] = torch.tensor(row_ids)
        weights[index, : len(row_weights)] = torch.tensor(row_weights)
    return Batch(inputs=ids[:, :-1], targets=ids[:, 1:], weights=weights[:, 1:])


def batches(stream: Iterator[Sample], seed: int, tokens: int) -> Iterator[Batch]:
    """Batches of about `tokens` ids, rows of like length together (little padding), in random order."""
    encoder, rng = Encoder(), Random(seed + 1)
    while True:
        window = sorted(
            (encoder.encode(sample) for sample in islice(stream, WINDOW_SAMPLES)), key=lambda row: len(row[0])
        )
        groups: list[list[tuple[list[int], list[float]]]] = [[]]
        for row in window:
            if groups[-1] and len(row[0]) * (len(groups[-1]) + 1) > tokens:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        yield from map(_padded, groups)
