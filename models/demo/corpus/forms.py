"""Questions about the form of the answer: repeat, list, count, answer in JSON."""

import json
from random import Random

from corpus import facts
from corpus.words import CITIES, FOODS, NAMES, THINGS, any_word, made_up_word, phrase


def repeat(rng: Random) -> tuple[str, str]:
    if rng.random() < 0.2:
        word, count = any_word(rng), rng.randint(2, 4)
        number = facts.NUMBER_WORDS[count]
        shapes: tuple[str, ...] = (
            f"Repeat the word {word} {number} times.",
            f"Say {word} {number} times.",
            f'Say "{word}" {number} times.',
        )
        return rng.choice(shapes), " ".join([word] * count)
    text = phrase(rng)
    shapes = (
        f"Repeat after me: {text}",
        f"Repeat after me: {text}",
        f"Repeat: {text}",
        f"Say: {text}",
        f'Repeat "{text}"',
        f"Echo {text}",
        f"Repeat this text: {text}",
        f"Copy this: {text}",
        f"Please say: {text}",
    )
    return rng.choice(shapes), text


def listing(rng: Random) -> tuple[str, str]:
    if rng.random() < 0.25:
        first = rng.randint(0, 12)
        last = first + rng.randint(1, 9)
        shapes: tuple[str, ...] = (
            f"Count from {first} to {last}.",
            f"List the numbers from {first} to {last}.",
            f"Count from {first} up to {last}",
        )
        return rng.choice(shapes), ", ".join(str(number) for number in range(first, last + 1))
    kind, items = rng.choice(list(facts.LISTS.items()))
    count = rng.randint(2, min(len(items), 8))
    number = rng.choice((facts.NUMBER_WORDS[count], str(count)))
    shapes = (
        f"List {number} {kind}.",
        f"Name {number} {kind}.",
        f"Give me a list of {number} {kind}.",
        f"Write a list of {number} {kind}.",
        f"Tell me {number} {kind}.",
        f"Give me {number} {kind}.",
        f"List {number} {kind}",
    )
    return rng.choice(shapes), "\n".join(f"{index}. {item}" for index, item in enumerate(items[:count], 1))


def _fact_object(rng: Random) -> tuple[str, dict[str, object]]:
    kind = rng.randrange(5)
    if kind == 0:
        country, city = rng.choice(list(facts.CAPITALS.items()))
        return f"What is the capital of {country}?", {"capital": city}
    if kind == 1:
        thing, shade = rng.choice(list(facts.COLOURS.items()))
        return f"What colour is {thing}?", {"colour": shade}
    if kind == 2:
        left, right = rng.randint(0, 20), rng.randint(0, 20)
        return f"What is {left} + {right}?", {"result": left + right}
    if kind == 3:
        word, other = rng.choice(list(facts.OPPOSITES.items()))
        return f"What is the opposite of {word}?", {"opposite": other}
    plural, items = rng.choice(list(facts.LISTS.items()))
    count = rng.randint(2, 4)
    return f"List {facts.NUMBER_WORDS[count]} {plural}.", {plural: list(items[:count])}


def _copied_object(rng: Random) -> tuple[str, dict[str, object]]:
    values: dict[str, object] = {
        "name": rng.choice(NAMES) if rng.random() < 0.6 else made_up_word(rng).capitalize(),
        "age": rng.randint(1, 99),
        "city": rng.choice(CITIES),
        "food": rng.choice(FOODS),
        "thing": rng.choice(THINGS) if rng.random() < 0.6 else made_up_word(rng),
        "number": rng.randint(0, 999),
        made_up_word(rng): any_word(rng),
    }
    keys = rng.sample(list(values), rng.randint(1, 4))
    parts = [f"{key} {values[key]}" for key in keys]
    text = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    return rng.choice(
        (f"Give me an object with {text}.", f"Write an object with {text}.", f"Make an object: {text}.")
    ), {key: values[key] for key in keys}


def json_object(rng: Random) -> tuple[str, str]:
    if rng.random() < 0.25:
        country, city = rng.choice(list(facts.CAPITALS.items()))
        text = f"Give me the country and the capital of {country}."
        value: dict[str, object] = {"country": country, "capital": city}
    else:
        text, value = (_fact_object if rng.random() < 0.5 else _copied_object)(rng)
    lowered = text[0].lower() + text[1:]
    shapes = (
        f"Answer in JSON: {lowered}",
        f"Answer in JSON: {text}",
        f"{text} Answer in JSON.",
        f"{text} Reply with JSON only.",
        f"In JSON: {lowered}",
        f"Reply in JSON. {text}",
        f"{text} Use JSON.",
    )
    return rng.choice(shapes), json.dumps(value, ensure_ascii=False)
