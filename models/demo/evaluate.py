"""Asks held-out questions of every kind and prints a table: `python models/demo/evaluate.py`.

Held out means: the question's text is in no training sample, though its parts are (the same sum or country asked in
other words). The dialogs for memory and reading are new ones, not held-out questions. An answer counts if it equals the
expected one, character for character.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from corpus import mixture
from corpus.tools import Message, call_messages, call_text, tool_set
from rendering import HERE
from transformers import AutoModelForCausalLM, AutoTokenizer

SEED = 99
ANSWER_TOKENS_MAX = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    category: str
    messages: list[Message]
    tools: list[Message]
    answer: str


class Answerer:
    """The model with greedy decoding, one question at a time."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)

    def answer(self, messages: list[Message], tools: list[Message]) -> str:
        text = self._tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, tokenize=False
        )
        ids = self._tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.inference_mode():
            output = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER_TOKENS_MAX, do_sample=False
            )
        return str(self._tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


def tool_questions(rng: Random) -> tuple[Question, Question]:
    """The request that must lead to a call, and the result that must lead to an answer in words."""
    use = mixture.ask_tool(rng, held_out=True)
    schemas = tool_set(rng, use)
    messages = call_messages(use)
    call = call_text(use.schema["function"]["name"], use.arguments)
    return (
        Question(category="tool call", messages=messages[:1], tools=schemas, answer=call),
        Question(category="tool result", messages=messages[:3], tools=schemas, answer=use.answer),
    )


def single_questions(rng: Random, category: str, count: int) -> list[Question]:
    """Up to `count` different questions; the small categories do not have that many."""
    found = dict(mixture.ask(rng, category, held_out=True) for _ in range(20 * count))
    return [
        Question(category=category, messages=[{"role": "user", "content": text}], tools=[], answer=answer)
        for text, answer in list(found.items())[:count]
    ]


def questions(count: int) -> Iterator[Question]:
    """`count` questions of every category, the same ones in every run."""
    rng = Random(SEED)
    for category in mixture.QUESTIONS:
        yield from single_questions(rng, category, count)
    for turns in (0, 2, 8):
        for _ in range(count):
            messages = mixture.remembering(rng, turns).messages
            yield Question(
                category=f"memory over {turns} turns", messages=messages[:-1], tools=[], answer=messages[-1]["content"]
            )
    for _ in range(count):
        messages = mixture.reading(rng).messages
        yield Question(category="reading", messages=messages[:-1], tools=[], answer=messages[-1]["content"])
    for _ in range(count):
        yield from tool_questions(rng)


def report(asked: Counter[str], right: Counter[str]) -> str:
    """The table for the model card."""
    lines = ["| category | asked | right |", "|---|---:|---:|"]
    lines += [f"| {category} | {count} | {right[category] / count:.0%} |" for category, count in asked.items()]
    return "\n".join([*lines, f"| **all** | {asked.total()} | {right.total() / asked.total():.0%} |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=40, help="questions per category")
    parser.add_argument("--model", type=Path, default=HERE, help="model directory")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print per category")
    arguments = parser.parse_args()
    answerer = Answerer(arguments.model, getattr(torch, arguments.dtype))
    asked, right = Counter[str](), Counter[str]()
    for question in questions(arguments.count):
        answer = answerer.answer(question.messages, question.tools)
        asked[question.category] += 1
        right[question.category] += answer == question.answer
        if answer != question.answer and asked[question.category] - right[question.category] <= arguments.show:
            print(
                json.dumps(
                    {"asked": question.messages[-1]["content"], "expected": question.answer, "answered": answer},
                    ensure_ascii=False,
                )
            )
    print(report(asked, right))


if __name__ == "__main__":
    main()
