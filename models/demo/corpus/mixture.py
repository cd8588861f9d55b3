"""Puts the pieces together: single questions, long dialogs, memory, tools and plain text, in fixed shares.

A twentieth of all questions (by their checksum) is never trained on; `evaluate.py` asks exactly those.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from corpus import chat, forms, tools
from corpus.stories import plain_text, story
from corpus.tools import Message, ToolUse
from corpus.words import NAMES, made_up_word, phrase

Question = Callable[[Random], tuple[str, str]]

QUESTIONS: dict[str, tuple[int, Question]] = {
    "greeting": (4, chat.greeting),
    "identity": (4, chat.identity),
    "mesh": (2, chat.mesh),
    "capital": (10, chat.capital),
    "continent": (3, chat.continent),
    "animal": (5, chat.animal),
    "colour": (4, chat.colour),
    "opposite": (5, chat.opposite),
    "calendar": (7, chat.calendar),
    "planet": (3, chat.planet),
    "language": (3, chat.language),
    "sum": (26, chat.small_sum),
    "out of domain": (5, chat.out_of_domain),
    "repeat": (18, forms.repeat),
    "list": (8, forms.listing),
    "json": (12, forms.json_object),
}
_BESIDE_TOOLS = ("greeting", "greeting", "identity", "capital", "colour", "opposite", "repeat", "list")
_WEIGHTS = [weight for weight, _ in QUESTIONS.values()]
_SYSTEM = (
    "You are a helpful assistant.",
    "You are the kvmesh demo model.",
    "You are a small and friendly model.",
    "Be brief.",
    "Answer in one sentence.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Either `messages` (with `tools`) for the chat template, or plain `text`."""

    messages: list[Message] = field(default_factory=list)
    tools: list[Message] = field(default_factory=list)
    text: str = ""


def is_held_out(question: str) -> bool:
    """Whether the question is kept for the evaluation. Upper case and closing marks do not make a new question."""
    return zlib.crc32(question.lower().rstrip(" .?!").encode()) % 20 == 0


def vary(rng: Random, question: str) -> str:
    """The question as a person may type it."""
    kind = rng.random()
    if kind < 0.1:
        return question[0].lower() + question[1:]
    if kind < 0.2:
        return question.rstrip(".?")
    if kind < 0.29:
        return question.lower()
    if kind < 0.34:
        return (
            rng.choice(("Please: ", "Hi! ", "Hello! ", "Question: ", "Another question. ", "And now: ", "OK. "))
            + question
        )
    return question


def ask(rng: Random, category: str | None = None, *, held_out: bool = False) -> tuple[str, str]:
    """A question and its answer, of one category or of any, from the trained or the held-out part."""
    while True:
        name = category or rng.choices(list(QUESTIONS), _WEIGHTS)[0]
        question, answer = QUESTIONS[name][1](rng)
        if is_held_out(question) == held_out:
            exact = name in ("repeat", "json")
            return (question if exact or held_out else vary(rng, question)), answer


def ask_tool(rng: Random, *, held_out: bool = False) -> ToolUse:
    """A request that one tool serves, from the trained or the held-out part."""
    while True:
        use = rng.choice(tools.USES)(rng)
        if is_held_out(use.request) == held_out:
            return use


def exchange(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def system(rng: Random) -> list[Message]:
    """Often nothing, sometimes a system message."""
    return [{"role": "system", "content": rng.choice(_SYSTEM)}] if rng.random() < 0.3 else []


def dialog(rng: Random, turns: int) -> Sample:
    messages = system(rng)
    for _ in range(turns):
        messages += exchange(*ask(rng))
    return Sample(messages=messages)


def introduction(rng: Random) -> tuple[list[Message], list[Message]]:
    """Something that the user tells, and the later question about it."""
    name = rng.choice(NAMES) if rng.random() < 0.5 else made_up_word(rng).capitalize()
    kind = rng.randrange(4)
    if kind == 0:
        told = exchange(
            rng.choice((f"My name is {name}.", f"Hello, I am {name}.", f"I am called {name}.")),
            f"Nice to meet you, {name}!",
        )
        return told, exchange(
            rng.choice(("What is my name?", "Who am I?", "Do you remember my name?")), f"Your name is {name}."
        )
    if kind == 1:
        told = exchange(f"The secret word is {name}.", "I will remember it.")
        return told, exchange(
            rng.choice(("What is the secret word?", "Tell me the secret word.")), f"The secret word is {name}."
        )
    if kind == 2:
        number = rng.randrange(10000)
        return exchange(f"My number is {number}.", "I will remember it."), exchange(
            "What is my number?", f"Your number is {number}."
        )
    told = [{"role": "system", "content": f"Your name is {name}."}]
    return told, exchange(rng.choice(("What is your name?", "Who are you?")), f"My name is {name}.")


def remembering(rng: Random, turns: int) -> Sample:
    """A dialog that comes back to what was said at its start, `turns` exchanges earlier."""
    told, asked = introduction(rng)
    between = [message for _ in range(turns) for message in exchange(*ask(rng))]
    return Sample(messages=told + between + asked)


def reading(rng: Random, stories_max: int = 8) -> Sample:
    """A word hidden in a long text, to be found again. Trains attention over a thousand tokens."""
    sentences = " ".join(story(rng) for _ in range(rng.randint(1, stories_max))).split(". ")
    name, word = rng.choice(NAMES), phrase(rng) if rng.random() < 0.3 else made_up_word(rng)
    sentences.insert(rng.randrange(len(sentences)), f"The password of {name} is {word}")
    question = f"Read this text: {'. '.join(sentences)} What is the password of {name}?"
    return Sample(messages=exchange(question, f"The password of {name} is {word.rstrip('.')}."))


def with_tools(rng: Random) -> Sample:
    """A tool called and its answer told; or tools present that are not needed, or that do not fit."""
    kind, use = rng.random(), ask_tool(rng)
    if kind < 0.12:
        question = ask(rng, rng.choice(_BESIDE_TOOLS))
        return Sample(messages=system(rng) + exchange(*question), tools=tools.tool_set(rng, use))
    if kind < 0.17 and use.purpose != "add":
        refusal = exchange(use.request, chat.NO_TOOL)
        return Sample(messages=system(rng) + refusal, tools=tools.tool_set(rng, use, is_present=False))
    before = exchange(*ask(rng, rng.choice(_BESIDE_TOOLS))) if kind > 0.9 else []
    after = exchange(*ask(rng, rng.choice(_BESIDE_TOOLS))) if kind < 0.25 else []
    messages = system(rng) + before + tools.call_messages(use) + after
    return Sample(messages=messages, tools=tools.tool_set(rng, use))


def sample(rng: Random) -> Sample:
    """One document of the training text."""
    kind = rng.random()
    if kind < 0.58:
        return dialog(rng, rng.choice((1, 1, 2, 3)))
    if kind < 0.60:
        return dialog(rng, rng.randint(6, 24))
    if kind < 0.66:
        return remembering(rng, rng.choice((0, 0, 1, 2)))
    if kind < 0.67:
        return remembering(rng, rng.randint(5, 24))
    if kind < 0.685:
        return reading(rng)
    if kind < 0.90:
        return with_tools(rng)
    return Sample(text=plain_text(rng))


def samples(seed: int) -> Iterator[Sample]:
    """The endless training text of a seed."""
    rng = Random(seed)
    while True:
        yield sample(rng)
