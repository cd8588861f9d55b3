"""The text that the demo model is trained on: the same for a seed, without the evaluation's wordings, and well-formed."""

import importlib
import json
import re
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

DEMO = Path(__file__).parents[2] / "models" / "demo"


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The corpus' modules. They are scripts' neighbours, not a part of the product's packages."""
    monkeypatch.syspath_prepend(str(DEMO))
    names = ("mixture", "held_out", "patterns", "forms", "numbers", "tools", "memory", "frames")
    return SimpleNamespace(**{name: importlib.import_module(f"corpus.{name}") for name in names})


def test_a_seed_gives_the_same_text(corpus: Any) -> None:
    """A training can be repeated, and goes on from a checkpoint with the text that it would have had."""
    first, again, other = (
        [repr(each) for each in islice(corpus.mixture.samples(seed), 40)] for seed in ("a", "a", "b")
    )
    assert first == again
    assert first != other


def test_no_wording_of_the_evaluation_is_trained_on(corpus: Any) -> None:
    """Neither as it is nor with something else in its slots."""
    assert corpus.held_out.is_held_out("France's capital?"), "a slot of the evaluation takes any word"
    found = [
        message["content"]
        for make in (corpus.mixture.sample, corpus.mixture.drill_sample, corpus.mixture.adding_sample)
        for sample in islice(corpus.mixture.samples("c", make), 600)
        for message in sample.messages
        if message["role"] == "user"
    ]
    assert len(found) > 1000
    assert not [text for text in found if corpus.held_out.is_held_out(text)]


def test_no_text_of_the_evaluation_is_asked_to_be_repeated(corpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In no wording: a text that the evaluation has repeated is drawn again."""
    assert len(corpus.held_out.texts_to_repeat()) == 36
    drawn = iter([("Sing this: Hello, world!", "Hello, world!"), ("Sing this: hello moon", "hello moon")])
    weight, _ = corpus.mixture.QUESTIONS["plain repeat"]
    monkeypatch.setitem(corpus.mixture.QUESTIONS, "plain repeat", (weight, lambda _: next(drawn)))
    assert corpus.mixture.ask(Random(1), "plain repeat")[1] == "hello moon"


def test_what_fills_a_slot_is_not_read_as_a_pattern(corpus: Any) -> None:
    """A text to copy may hold brackets and braces."""
    assert corpus.patterns.say(Random(1), "[say|say]: {text}", text="[a|b] {text}") == "say: [a|b] {text}"


def test_sums_and_numbers_are_right(corpus: Any) -> None:
    """What is taught is true."""
    rng = Random(4)
    for _ in range(300):
        _, answer = corpus.numbers.small_sum(rng)
        if " = " in answer:
            left, _, right = answer.removeprefix("Yes, ").removeprefix("No, ").rstrip(".").partition(" = ")
            a, sign, b = left.split(" ")
            assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] == int(right)
        _, answer = corpus.numbers.counting(rng)
        if ", " in answer:
            numbers = [int(each) for each in answer.split(", ")]
            assert {b - a for a, b in pairwise(numbers)} in ({1}, {-1})


def test_objects_parse_and_calls_fit_their_schema(corpus: Any) -> None:
    """A forced answer is one object; a call has the parameters that its function declares, with values from the request."""
    rng = Random(5)
    for _ in range(200):
        assert isinstance(json.loads(corpus.forms.forced_object(rng)[1]), dict)
        for offer in corpus.tools.offers(rng):
            use = corpus.tools.use(rng, offer)
            assert list(use.arguments) == offer.schema["function"]["parameters"]["required"]
            assert all(str(value) in use.request for value in use.arguments.values())


def test_a_fact_is_asked_for_in_many_wordings(corpus: Any) -> None:
    """One fact is asked for in ever new words, so that no wording can be learnt by heart."""
    rng = Random(7)
    found = {corpus.frames.vary(rng, corpus.frames.ask_for(rng, "the capital of Peru")) for _ in range(2000)}
    assert len(found) > 1000
    assert sum("peru" in text.lower() for text in found) == len(found), "what the answer needs is never lost"
    found = {corpus.frames.ask_about(rng, "Peru", "its capital") for _ in range(2000)}
    assert len(found) > 1000
    assert all("Peru" in text and "its capital" in text.lower() for text in found), "nor the topic or the part of it"


def test_a_text_to_copy_is_in_the_demand(corpus: Any) -> None:
    """An opening, a quote or a close around it changes no letter of it."""
    rng = Random(8)
    for _ in range(500):
        asked, answer = corpus.mixture.ask(rng, rng.choice(("repeat", "plain repeat", "repeat a message")))
        several = re.fullmatch(r"(.+?)(?: \1)+", answer)
        assert answer in asked or (several is not None and several[1] in asked)
        capital = corpus.patterns.upper_first(answer)
        assert answer == capital or not asked.startswith(capital), "a text at the start keeps its small letter"


def test_what_was_said_is_asked_again(corpus: Any) -> None:
    """The answer to the question holds what the user said."""
    rng = Random(6)
    for _ in range(200):
        (said, acknowledged), (_, answer) = corpus.memory.introduction(rng)
        kept = _plain_words(acknowledged) & _plain_words(answer)
        assert any(word in said.lower() for word in kept)


def _plain_words(text: str) -> set[str]:
    return {word.strip(".!,") for word in text.lower().split()}
