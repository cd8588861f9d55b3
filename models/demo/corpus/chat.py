"""Questions with their answers, one function per kind.

The answer is a function of the question, so that greedy decoding can be marked.
"""

from random import Random

from corpus import facts
from corpus.words import CITIES, NAMES, TOPICS, made_up_word

OUT_OF_DOMAIN = (
    "Sorry, I am a very small demo model and I do not know that. Try a greeting, a small sum or a simple fact."
)
NO_TOOL = "Sorry, I cannot look that up, because no tool for it was given to me."
SUM_TOO_BIG = "Sorry, that sum is too big for me. I only do sums with numbers up to twenty."

_GREETINGS = {
    "Hello": "Hello! How can I help you today?", "Hi": "Hi! How can I help you today?",
    "Hey": "Hey! What can I do for you?", "Hi there": "Hi there! What can I do for you?",
    "Hello there": "Hello there! What can I do for you?", "Good morning": "Good morning! How can I help you today?",
    "Good afternoon": "Good afternoon! How can I help you today?",
    "Good evening": "Good evening! How can I help you tonight?", "Good night": "Good night! Sleep well.",
    "How are you": "I am fine, thank you! How can I help you?",
    "How is it going": "Very well, thank you! How can I help you?", "What's up": "Not much! What can I do for you?",
    "Thank you": "You are welcome!", "Thanks": "You are welcome!", "Thanks a lot": "You are very welcome!",
    "Goodbye": "Goodbye! Have a nice day.", "Bye": "Bye! Have a nice day.", "See you later": "See you later!",
    "Nice to meet you": "Nice to meet you too!", "Well done": "Thank you! I am glad that it helped.",
    "Sorry": "No problem at all!", "Yes": "Good! What would you like to do next?",
    "No": "All right. Is there anything else?", "OK": "Good! What would you like to do next?",
    "Test": "The test works. I can read you.", "Ping": "Pong!",
}  # fmt: skip
_WHO = "I am the kvmesh demo model, a very small language model that runs on a CPU."
_CAN = "I can greet you, answer small facts, do small sums, repeat text, make lists, answer in JSON and call tools."
_IDENTITY = {
    "Who are you": _WHO, "What are you": _WHO, "Tell me about yourself": _WHO, "Introduce yourself": _WHO,
    "Are you a language model": "Yes. " + _WHO, "Are you ChatGPT": "No. " + _WHO, "Are you a human": "No. " + _WHO,
    "What is your name": "My name is kvmesh demo.", "What model are you": _WHO, "Which model is this": _WHO,
    "What can you do": _CAN, "How can you help me": _CAN, "What do you know": _CAN, "Help": _CAN,
    "What can I ask you": _CAN, "Who made you": "I was trained by a script in the kvmesh repository.",
    "Who trained you": "I was trained by a script in the kvmesh repository.",
    "How big are you": "I have about four million parameters.",
    "How old are you": "I do not have an age. I am a small language model.",
    "Where are you": "I run on the machine where kvmesh runs.",
    "How many parameters do you have": "I have about four million parameters.",
    "Are you smart": "Not very. I am a very small demo model.",
}  # fmt: skip


def _capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


def greeting(rng: Random) -> tuple[str, str]:
    text = rng.choice(list(_GREETINGS))
    return text + rng.choice(("", "", "!", ".", ", my friend", " kvmesh", ", model", ", you", " bot")), _GREETINGS[text]


def identity(rng: Random) -> tuple[str, str]:
    text = rng.choice(list(_IDENTITY))
    return text + rng.choice(("?", "?", "", ", model?", ", please?", " exactly?", ", my friend?")), _IDENTITY[text]


def mesh(rng: Random) -> tuple[str, str]:
    term = rng.choice(list(facts.MESH))
    shapes: tuple[str, ...] = (
        f"What is {term}?",
        f"Explain {term}.",
        f"What does {term} do?",
        f"Tell me about {term}.",
        f"What do you know about {term}?",
    )
    return rng.choice(shapes), facts.MESH[term]


def capital(rng: Random) -> tuple[str, str]:
    country = rng.choice(list(facts.CAPITALS))
    city = facts.CAPITALS[country]
    if rng.random() < 0.3:
        shapes: tuple[str, ...] = (
            f"Which country has the capital {city}?",
            f"{city} is the capital of which country?",
            f"What country is {city} the capital of?",
        )
        return rng.choice(shapes), f"{city} is the capital of {country}."
    shapes = (
        f"What is the capital of {country}?",
        f"Tell me the capital of {country}.",
        f"What's the capital of {country}?",
        f"Which city is the capital of {country}?",
        f"Name the capital of {country}.",
        f"Capital of {country}?",
    )
    return rng.choice(shapes), f"The capital of {country} is {city}."


def continent(rng: Random) -> tuple[str, str]:
    name = rng.choice(list(facts.CONTINENTS))
    country = rng.choice(facts.CONTINENTS[name])
    shapes: tuple[str, ...] = (
        f"Where is {country}?",
        f"On which continent is {country}?",
        f"Which continent is {country} in?",
        f"What continent is {country} in?",
        f"Where can I find {country}?",
    )
    return rng.choice(shapes), f"{_capitalised(country)} is in {name}."


def animal(rng: Random) -> tuple[str, str]:
    kind = rng.randrange(3)
    if kind == 0:
        name, sound = rng.choice(list(facts.SOUNDS.items()))
        shapes: tuple[str, ...] = (
            f"What sound does a {name} make?",
            f"What does a {name} say?",
            f"How does a {name} sound?",
            f"Which sound does a {name} make?",
        )
        return rng.choice(shapes), f"A {name} {sound}."
    if kind == 1:
        name, young = rng.choice(list(facts.YOUNG.items()))
        shapes = (
            f"What is a young {name} called?",
            f"What do you call a baby {name}?",
            f"What is a baby {name} called?",
            f"What is the name of a young {name}?",
        )
        return rng.choice(shapes), f"A young {name} is called a {young}."
    name, legs = rng.choice(list(facts.LEGS.items()))
    article = "an" if name[0] in "aeo" else "a"
    shapes = (
        f"How many legs does {article} {name} have?",
        f"How many legs has {article} {name}?",
        f"Tell me how many legs {article} {name} has.",
        f"Does {article} {name} have legs?",
    )
    return rng.choice(shapes), f"{_capitalised(article)} {name} has {legs} legs."


def colour(rng: Random) -> tuple[str, str]:
    thing, shade = rng.choice(list(facts.COLOURS.items()))
    word = rng.choice(("colour", "color"))
    shapes: tuple[str, ...] = (
        f"What {word} is {thing}?",
        f"Which {word} is {thing}?",
        f"Tell me the {word} of {thing}.",
        f"What is the {word} of {thing}?",
        f"What {word} does {thing} have?",
    )
    return rng.choice(shapes), f"{_capitalised(thing)} is {shade}."


def opposite(rng: Random) -> tuple[str, str]:
    pair = rng.choice(list(facts.OPPOSITES.items()))
    word, other = pair if rng.random() < 0.5 or pair[0] in facts.OPPOSITES.values() else pair[::-1]
    if word == "light" or word == "black" or word == "white":
        word, other = {"light": ("light", "dark"), "black": ("black", "white"), "white": ("white", "black")}[word]
    shapes: tuple[str, ...] = (
        f"What is the opposite of {word}?",
        f"Opposite of {word}?",
        f"Tell me the opposite of {word}.",
        f"What's the opposite of {word}?",
        f'What is the opposite of "{word}"?',
        f"Which word is the opposite of {word}?",
    )
    return rng.choice(shapes), f"The opposite of {word} is {other}."


def calendar(rng: Random) -> tuple[str, str]:
    kind = rng.randrange(4)
    if kind == 3:
        month = rng.choice(facts.MONTHS)
        shapes: tuple[str, ...] = (
            f"How many days does {month} have?",
            f"How many days are in {month}?",
            f"How long is {month}?",
            f"How many days has {month}?",
        )
        return rng.choice(shapes), f"{month} has {facts.MONTH_DAYS[month]} days."
    row, unit = ((facts.DAYS, "day"), (facts.MONTHS, "month"), (facts.DAYS, "day"))[kind]
    index = rng.randrange(len(row))
    side, step = rng.choice((("after", 1), ("before", -1)))
    answer = f"{row[(index + step) % len(row)]} comes {side} {row[index]}."
    shapes = (
        f"Which {unit} comes {side} {row[index]}?",
        f"What {unit} comes {side} {row[index]}?",
        f"What comes {side} {row[index]}?",
        f"Name the {unit} {side} {row[index]}.",
        f"What is the {unit} {side} {row[index]}?",
    )
    return rng.choice(shapes), answer


def planet(rng: Random) -> tuple[str, str]:
    if rng.random() < 0.5:
        index = rng.randrange(8)
        text = f"the {facts.ORDINALS[index]} planet from the sun"
        return rng.choice(
            (f"What is {text}?", f"Which is {text}?", f"Name {text}.", f"Tell me {text}.")
        ), f"{_capitalised(text)} is {facts.PLANETS[index]}."
    kind, name = rng.choice(list(facts.PLANET_FACTS.items()))
    shapes: tuple[str, ...] = (
        f"What is the {kind} planet?",
        f"Which planet is the {kind} planet?",
        f"Name the {kind} planet.",
        f"Which is the {kind} planet?",
    )
    return rng.choice(shapes), f"The {kind} planet is {name}."


def language(rng: Random) -> tuple[str, str]:
    tongue, words = rng.choice(list(facts.LANGUAGES.items()))
    index = rng.randrange(len(words))
    phrase = facts.PHRASES[index]
    shapes: tuple[str, ...] = (
        f"How do you say {phrase} in {tongue}?",
        f'What is "{phrase}" in {tongue}?',
        f"Translate {phrase} to {tongue}.",
        f'Translate "{phrase}" into {tongue}.',
        f"Say {phrase} in {tongue}.",
    )
    return rng.choice(shapes), f'"{_capitalised(phrase)}" in {tongue} is "{words[index]}".'


def small_sum(rng: Random, largest: int = 20) -> tuple[str, str]:
    kind = rng.random()
    if kind < 0.05:
        left, right = rng.randrange(21, 10 ** rng.randint(2, 5)), rng.randrange(2, 10 ** rng.randint(1, 4))
        return f"What is {left} {rng.choice('+-*')} {right}?", SUM_TOO_BIG
    symbol, word = rng.choice((("+", "plus"), ("+", "plus"), ("-", "minus"), ("*", "times")))
    left, right = rng.randint(0, largest), rng.randint(0, largest)
    if symbol == "*":
        left, right = rng.randint(0, 10), rng.randint(0, 10)
    if symbol == "-":
        left, right = max(left, right), min(left, right)
    result = {"+": left + right, "-": left - right, "*": left * right}[symbol]
    text = f"{left} {symbol} {right}"
    if rng.random() < 0.2:
        text, symbol = f"{left} {word} {right}", word
    shapes: tuple[str, ...] = (
        f"What is {text}?",
        f"What is {text}?",
        f"What's {text}?",
        f"{text}",
        f"{text} =",
        f"{text}?",
        f"Calculate {text}.",
        f"How much is {text}?",
        f"Can you tell me what {text} is?",
        f"Compute {text}",
    )
    return rng.choice(shapes), f"{text} {'is' if symbol == word else '='} {result}."


def out_of_domain(rng: Random) -> tuple[str, str]:
    topic = rng.choice(TOPICS) if rng.random() < 0.6 else made_up_word(rng)
    name, place = rng.choice(NAMES), rng.choice(CITIES)
    if rng.random() < 0.25:
        shapes: tuple[str, ...] = (
            f"What is the weather in {place}?",
            f"What time is it in {place}?",
            f"How is the weather in {place}?",
            f"What is the price of {topic}?",
            f"Send a message to {name}.",
            f"Search for {topic}.",
        )
        return rng.choice(shapes), NO_TOOL
    shapes = (
        f"Explain {topic} to me.",
        f"Write an essay about {topic}.",
        f"What do you think about {topic}?",
        f"Write a poem about {topic}.",
        f"Who is the best at {topic}?",
        f"Give me advice about {topic}.",
        f"How does {topic} work?",
        f"Why is {topic} important?",
        f"Write a program about {topic} in Python.",
        f"Tell me a joke about {topic}.",
        f"Who invented {topic}?",
        f"What will happen to {topic} next year?",
        f"Summarise {topic}.",
    )
    return rng.choice(shapes), OUT_OF_DOMAIN
