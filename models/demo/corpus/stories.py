"""Plain text for /v1/completions: little stories, whose names and things stay the same, and notes."""

from random import Random

from corpus import facts
from corpus.words import ADJECTIVES, ANIMALS, CITIES, FOODS, NAMES, PLACES, THINGS, WEATHER


def _opening(rng: Random, name: str, place: str) -> str:
    animal = rng.choice(ANIMALS)
    return rng.choice(
        (
            f"Once upon a time there was a {rng.choice(ADJECTIVES)} {animal} called {name}. "
            f"{name} lived near the {place}.",
            f"{name} lived in a small house in {rng.choice(CITIES)}, not far from the {place}.",
            f"One {rng.choice(WEATHER)} morning, {name} walked to the {place}.",
            f"It was a {rng.choice(WEATHER)} day in {rng.choice(CITIES)}. {name} wanted to go to the {place}.",
            f"Every {rng.choice(facts.DAYS)}, {name} went to the {place} to buy {rng.choice(FOODS)}.",
        )
    )


def _middle(rng: Random, name: str, friend: str, thing: str, place: str) -> list[str]:
    second = rng.choice(PLACES)
    steps = [
        f"On the way {name} met {friend}, who was looking for a {thing}.",
        f'"Good morning," said {friend}. "Have you seen my {thing}?"',
        f'"No," said {name}, "but I will help you to find it."',
        f"So they looked for the {thing} together, first in the {place} and then near the {second}.",
        f"They asked a {rng.choice(ADJECTIVES)} {rng.choice(ANIMALS)}, but it did not know where the {thing} was.",
        f"After a while they were hungry and ate some {rng.choice(FOODS)} under a tree.",
        f"Then it became {rng.choice(WEATHER)}, and they had to wait in the {second}.",
        f"At last {name} saw something {rng.choice(ADJECTIVES)} behind the {second}. It was the {thing}!",
    ]
    keep = sorted(rng.sample(range(len(steps)), rng.randint(3, len(steps))))
    return [steps[index] for index in keep]


def _ending(rng: Random, name: str, friend: str, thing: str) -> str:
    return rng.choice(
        (
            f"{friend} was very happy and thanked {name}. From that day on they were good friends.",
            f'"Thank you, {name}," said {friend}. Then they went home, and the {thing} was never lost again.',
            f"In the evening {name} went home, tired but happy.",
            f"{name} gave the {thing} to {friend}, and they both laughed.",
        )
    )


def story(rng: Random) -> str:
    """A story of five to a dozen sentences."""
    name, friend = rng.sample(NAMES, 2)
    thing, place = rng.choice(THINGS), rng.choice(PLACES)
    middle = _middle(rng, name, friend, thing, place)
    return " ".join([_opening(rng, name, place), *middle, _ending(rng, name, friend, thing)])


def note(rng: Random) -> str:
    """Statements about the world of the tables, in the order of a school book."""
    lines = [f"The capital of {country} is {capital}." for country, capital in facts.CAPITALS.items()]
    lines += [f"A {animal} {sound}." for animal, sound in facts.SOUNDS.items()]
    lines += [f"A young {animal} is called a {young}." for animal, young in facts.YOUNG.items()]
    lines += [f"The opposite of {word} is {other}." for word, other in facts.OPPOSITES.items()]
    lines += [f"{thing[0].upper() + thing[1:]} is {colour}." for thing, colour in facts.COLOURS.items()]
    lines += list(facts.MESH.values())
    return " ".join(rng.sample(lines, rng.randint(4, 9)))


def plain_text(rng: Random) -> str:
    """One document; now and then several stories after each other, so that long contexts occur."""
    if rng.random() < 0.25:
        return note(rng)
    count = 1 if rng.random() < 0.9 else rng.randint(2, 6)
    return "\n\n".join(story(rng) for _ in range(count))
