"""The text of the second stage: weighted towards what needs practice, with everything else in it so that it stays.

Held-out questions are kept out here too.
"""

from collections.abc import Iterator
from random import Random

from corpus import chat, forms, mixture
from corpus.mixture import Question, Sample
from corpus.words import ADJECTIVES, ANIMALS, CITIES, FOODS, NAMES, PLACES, THINGS, VERBS, WEATHER, any_word, phrase

_SMALL_WORDS = ("the", "a", "is", "in", "and", "to", "of", "on", "it", "was", "my", "your", "with", "for", "we", "he")
_TABLES = (NAMES, CITIES, ANIMALS, PLACES, THINGS, ADJECTIVES, WEATHER, FOODS, VERBS)
_SHAPES = ("Repeat after me: {}", "Repeat after me: {}", "Repeat: {}", "Say: {}", "Please say: {}", "Copy this: {}")


def _words(rng: Random) -> str:
    """Words of the tables without grammar: the next one can only be read, not guessed."""
    words = [
        rng.choice(_SMALL_WORDS) if rng.random() < 0.4 else rng.choice(rng.choice(_TABLES))
        for _ in range(rng.randint(2, 10))
    ]
    text = " ".join(words)
    return text[0].upper() + text[1:] + rng.choice((".", ".", "", "!"))


def _repeat(rng: Random) -> tuple[str, str]:
    kind = rng.random()
    if kind < 0.3:
        return forms.repeat(rng)
    text = _words(rng) if kind < 0.7 else phrase(rng) if kind < 0.85 else any_word(rng)
    return rng.choice(_SHAPES).format(text), text


def _sum(rng: Random) -> tuple[str, str]:
    """Half of the sums are from the table up to ten."""
    return chat.small_sum(rng, largest=10 if rng.random() < 0.5 else 20)


def _dialog(rng: Random, question: Question, turns: int, *, is_varied: bool = True) -> Sample:
    messages = mixture.system(rng) if rng.random() < 0.3 else []
    while len(messages) < 2 * turns:
        text, answer = question(rng)
        if not mixture.is_held_out(text):
            messages += mixture.exchange(mixture.vary(rng, text) if is_varied else text, answer)
    return Sample(messages=messages)


def sample(rng: Random) -> Sample:
    """One document of the second stage."""
    kind = rng.random()
    if kind < 0.36:
        return _dialog(rng, _sum, rng.randint(1, 4))
    if kind < 0.54:
        return _dialog(rng, _repeat, rng.choice((1, 1, 2)), is_varied=False)
    if kind < 0.62:
        return _dialog(rng, forms.json_object, rng.choice((1, 1, 2)), is_varied=False)
    if kind < 0.66:
        return mixture.reading(rng, stories_max=2)
    if kind < 0.70:
        return mixture.remembering(rng, rng.choice((0, 1, 2, 4)))
    if kind < 0.78:
        return mixture.with_tools(rng)
    return mixture.sample(rng)


def samples(seed: int) -> Iterator[Sample]:
    """The endless text of a seed."""
    rng = Random(seed)
    while True:
        yield sample(rng)
