"""The training text of the demo model is reproducible, well-formed, and excludes the questions of the evaluation."""

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
    """Imports the modules of the corpus, which are not part of the product's packages."""
    monkeypatch.syspath_prepend(str(DEMO))
    names = ("mixture", "held_out", "patterns", "forms", "numbers", "tools", "memory", "frames")
    return SimpleNamespace(**{name: importlib.import_module(f"corpus.{name}") for name in names})


def test_a_seed_gives_the_same_text(corpus: Any) -> None:
    """A training can be repeated, and can continue from a checkpoint with the same text."""
    first, again, other = (
        [repr(each) for each in islice(corpus.mixture.samples(seed), 40)] for seed in ("a", "a", "b")
    )
    assert first == again
    assert first != other


def test_no_wording_of_the_evaluation_is_trained_on(corpus: Any) -> None:
    """A question of the evaluation is excluded even with other words in its slots."""
    assert corpus.held_out.is_held_out("France's capital?"), "a slot of the evaluation matches any word"
    found = [
        message["content"]
        for make in (corpus.mixture.sample, corpus.mixture.drill_sample, corpus.mixture.adding_sample)
        for sample in islice(corpus.mixture.samples("c", make), 600)
        for message in sample.messages
        if message["role"] == "user"
    ]
    assert len(found) > 1000
    assert not [text for text in found if corpus.held_out.is_held_out(text)]


def test_the_corpus_never_repeats_a_text_of_the_evaluation(corpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that the evaluation asks to repeat is replaced with another one, whatever the wording."""
    assert len(corpus.held_out.texts_to_repeat()) == 36
    drawn = iter([("Sing this: Hello, world!", "Hello, world!"), ("Sing this: hello moon", "hello moon")])
    weight, _ = corpus.mixture.QUESTIONS["plain repeat"]
    monkeypatch.setitem(corpus.mixture.QUESTIONS, "plain repeat", (weight, lambda _: next(drawn)))
    assert corpus.mixture.ask(Random(1), "plain repeat")[1] == "hello moon"


def test_slot_values_are_not_parsed_as_patterns(corpus: Any) -> None:
    """Brackets and braces in the value of a slot are copied, not parsed as a pattern."""
    assert corpus.patterns.say(Random(1), "[say|say]: {text}", text="[a|b] {text}") == "say: [a|b] {text}"


def test_sums_and_numbers_are_right(corpus: Any) -> None:
    """The corpus contains only correct sums and counts."""
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
    """A forced answer is one JSON object. A call has the parameters that its function requires, with values from the request."""
    rng = Random(5)
    for _ in range(200):
        assert isinstance(json.loads(corpus.forms.forced_object(rng)[1]), dict)
        for offer in corpus.tools.offers(rng):
            use = corpus.tools.use(rng, offer)
            assert list(use.arguments) == offer.schema["function"]["parameters"]["required"]
            assert all(str(value) in use.request for value in use.arguments.values())


def test_a_fact_is_requested_in_many_wordings(corpus: Any) -> None:
    """With many wordings for one fact, the model cannot memorise single wordings."""
    rng = Random(7)
    found = {corpus.frames.vary(rng, corpus.frames.ask_for(rng, "the capital of Peru")) for _ in range(2000)}
    assert len(found) > 1000
    assert sum("peru" in text.lower() for text in found) == len(found), (
        "a request keeps the words that its answer needs"
    )
    found = {corpus.frames.ask_about(rng, "Peru", "its capital") for _ in range(2000)}
    assert len(found) > 1000
    assert all("Peru" in text and "its capital" in text.lower() for text in found), (
        "a request keeps its topic and the requested part of it"
    )


def test_a_text_to_copy_is_in_the_request(corpus: Any) -> None:
    """Openings, quotes and closings around the text do not change its letters."""
    rng = Random(8)
    for _ in range(500):
        asked, answer = corpus.mixture.ask(rng, rng.choice(("repeat", "plain repeat", "repeat a message")))
        several = re.fullmatch(r"(.+?)(?: \1)+", answer)
        assert answer in asked or (several is not None and several[1] in asked)
        capital = corpus.patterns.upper_first(answer)
        assert answer == capital or not asked.startswith(capital), (
            "a text at the start of the request keeps its lower-case letter"
        )


def test_earlier_statements_are_asked_about_later(corpus: Any) -> None:
    """The answer to a question about an earlier statement contains a word of that statement."""
    rng = Random(6)
    for _ in range(200):
        (said, acknowledged), (_, answer) = corpus.memory.introduction(rng)
        kept = _plain_words(acknowledged) & _plain_words(answer)
        assert any(word in said.lower() for word in kept)


def _plain_words(text: str) -> set[str]:
    return {word.strip(".!,") for word in text.lower().split()}
