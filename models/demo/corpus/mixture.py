"""Puts the pieces together: single questions, dialogs, memory, tools, schemas and plain text, in fixed shares.

No user message has a wording of the evaluation, see `held_out.py`.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from random import Random

from corpus import chat, copying, forms, knowledge, memory, numbers, tools
from corpus.frames import opened, vary
from corpus.held_out import is_held_out, is_held_out_text
from corpus.stories import plain_text, story
from corpus.tools import TOOLS, Message, Offer, ToolUse
from corpus.words import NAMES, code, made_up_name, made_up_word, phrase

Question = Callable[[Random], tuple[str, str]]

QUESTIONS: dict[str, tuple[int, Question]] = {
    "greeting": (4, chat.greeting),
    "identity": (5, chat.identity),
    "mesh": (1, chat.mesh),
    "capital": (9, knowledge.capital),
    "continent": (2, knowledge.continent),
    "animal": (3, knowledge.animal),
    "colour": (3, knowledge.colour),
    "opposite": (4, knowledge.opposite),
    "calendar": (9, knowledge.calendar),
    "planet": (2, knowledge.planet),
    "nearest planet": (1, knowledge.nearest_planet),
    "language": (2, knowledge.language),
    "sum": (16, numbers.small_sum),
    "counting": (10, numbers.counting),
    "unknown": (5, chat.out_of_domain),
    "repeat": (16, copying.repeat),
    "list": (4, knowledge.listing),
    "json": (3, forms.json_object),
    "not said": (1, memory.not_said),
    "size": (0, chat.size),
    "plain repeat": (0, copying.repeat_plain),
    "repeat a message": (2, lambda rng: copying.repeat_text(rng, any_message(rng))),
}
# What is written as it is: upper and lower case and marks belong to the answer.
_EXACT = ("repeat", "plain repeat", "repeat a message", "json")
_REPEATED = ("repeat", "plain repeat", "repeat a message")
_BESIDE_TOOLS = ("greeting", "identity", "capital", "colour", "opposite", "repeat", "list")
_LACKED = (TOOLS["weather"], TOOLS["time"], TOOLS["search"], TOOLS["message"])
_NAMES = list(QUESTIONS)
_WEIGHTS = [weight for weight, _ in QUESTIONS.values()]
# Ids of the tokenizer: those that are neither marks nor tags, and the space.
_PLAIN_TOKENS = (3, 2042)
_SPACE_TOKEN = 223
_SYSTEM = (
    "You are a helpful assistant.",
    "You are the kvmesh demo model.",
    "You are a small and friendly model.",
    "Be brief.",
    "Answer in one sentence.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Either `messages` (with `tools`) for the chat template, or plain `text`, or `echoed`: any tokens, to be read twice.

    A message with `is_given` is an answer that is not learnt.

    `is_forced`: the answers are objects that a schema demands. Their beginning is not learnt, and their keys hardly are.
    """

    messages: list[Message] = field(default_factory=list)
    tools: list[Message] = field(default_factory=list)
    text: str = ""
    is_forced: bool = False
    echoed: list[int] = field(default_factory=list)


def ask(rng: Random, category: str | None = None) -> tuple[str, str]:
    """A question and its answer, of one category or of any."""
    while True:
        name = category or rng.choices(_NAMES, _WEIGHTS)[0]
        question, answer = QUESTIONS[name][1](rng)
        if is_held_out(question):  # Nor is it asked with an opening or a close around it.
            continue
        if name in _REPEATED and is_held_out_text(answer):
            continue
        if name not in _EXACT:
            question = vary(rng, question)
        elif rng.random() < 0.06:
            question = opened(rng, question, is_kept=True)
        if not is_held_out(question):
            return question, answer


def ask_tool(rng: Random, offer: Offer) -> ToolUse:
    """A request that the tool serves."""
    while is_held_out((use := tools.use(rng, offer)).request):
        pass
    return replace(use, request=_opened(rng, use.request))


def _opened(rng: Random, request: str) -> str:
    """Now and then an opening before the request."""
    if rng.random() < 0.08 and not is_held_out(found := opened(rng, request, is_kept=True)):
        return found
    return request


def any_message(rng: Random) -> str:
    """A message as users send them, which a demand to repeat may hold."""
    kind = rng.random()
    if kind < 0.5:
        return ask(rng, rng.choices(_NAMES[:-1], _WEIGHTS[:-1])[0])[0]
    if kind < 0.75:
        (said, _), (asked, _) = memory.introduction(rng)
        text = said if kind < 0.65 else asked
    elif kind < 0.9:
        text = ask_tool(rng, tools.offers(rng)[0]).request
    else:
        text = forms.forced_object(rng)[0]
    return any_message(rng) if is_held_out(text) else text


def long_repeat(rng: Random) -> tuple[str, str]:
    """Several messages or rows of words in one text to copy."""
    if rng.random() < 0.3:
        return copying.long_repeat(rng)
    return copying.repeat_text(rng, " ".join(any_message(rng) for _ in range(rng.randint(2, 3))))


def exchange(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def system(rng: Random) -> list[Message]:
    """Often nothing, sometimes a system message."""
    return [{"role": "system", "content": rng.choice(_SYSTEM)}] if rng.random() < 0.08 else []


def dialog(rng: Random, turns: int) -> Sample:
    messages = system(rng)
    for _ in range(turns):
        messages += exchange(*ask(rng))
    return Sample(messages=messages)


def _introduction(rng: Random) -> tuple[list[Message], list[Message]]:
    if rng.random() < 0.04:
        name = rng.choice(NAMES) if rng.random() < 0.5 else made_up_name(rng)
        told = [{"role": "system", "content": f"Your name is {name}."}]
        return told, exchange(rng.choice(("What is your name?", "Tell me your name.")), f"My name is {name}.")
    while True:
        told_pair, asked_pair = memory.introduction(rng)
        if is_held_out(told_pair[0]) or is_held_out(asked_pair[0]):
            continue
        varied = vary(rng, asked_pair[0])
        if not is_held_out(varied):
            return exchange(_opened(rng, told_pair[0]), told_pair[1]), exchange(varied, asked_pair[1])


_BETWEEN = ("identity", "greeting", "capital", "calendar", "counting", "sum", "repeat", "list", "colour", "opposite")


def remembering(rng: Random, turns: int) -> Sample:
    """A dialog that comes back to what was said at its start, `turns` exchanges earlier.

    Now and then it was answered by something else, which is not learnt: what was said is to be found where the user said it.
    """
    told, asked = _introduction(rng)
    if rng.random() < 0.2 and told[0]["role"] == "user":
        told[1] = {"role": "assistant", "content": ask(rng)[1], "is_given": True}
    names = [rng.choice(_BETWEEN) if rng.random() < 0.6 else None for _ in range(turns)]
    between = [message for name in names for message in exchange(*ask(rng, name))]
    if rng.random() < 0.12:
        asked += exchange(*ask(rng, "identity"))
    return Sample(messages=told + between + asked)


def reading(rng: Random, stories_max: int) -> Sample:
    """A word hidden in a text, to be found again."""
    sentences = " ".join(story(rng) for _ in range(rng.randint(1, stories_max))).split(". ")
    name, word = rng.choice(NAMES), phrase(rng) if rng.random() < 0.3 else made_up_word(rng)
    sentences.insert(rng.randrange(len(sentences)), f"The password of {name} is {word}")
    question = f"Read this text: {'. '.join(sentences)} What is the password of {name}?"
    return Sample(messages=exchange(question, f"The password of {name} is {word.rstrip('.')}."))


def with_tools(rng: Random) -> Sample:
    """Requests for the tools of a dialog, with or without a result and its answer; or something that needs no tool or one that is not there."""
    return _calling(rng, tools.offers(rng))


def with_alike_tools(rng: Random) -> Sample:
    return _calling(rng, tools.alike_offers(rng))


def _calling(rng: Random, found: list[Offer]) -> Sample:
    kind, messages = rng.random(), system(rng)
    if kind < 0.04 and found[0].tool in _LACKED:
        return Sample(
            messages=exchange(ask_tool(rng, found[0]).request, chat.NO_TOOL), tools=[one.schema for one in found[1:]]
        )
    for _ in range(rng.choice((1, 2, 2, 3))):
        if rng.random() < 0.06:
            messages += exchange(*ask(rng, rng.choice(_BESIDE_TOOLS)))
            continue
        messages += tools.call_messages(ask_tool(rng, rng.choice(found)))
        if rng.random() < 0.7:
            messages = messages[:-2]
    return Sample(messages=messages, tools=[one.schema for one in found])


def forced_call(rng: Random) -> Sample:
    """A call that the client demands: the arguments of a named tool, or a list with one call of any tool."""
    found = tools.offers(rng)
    use = ask_tool(rng, rng.choice(found))
    call = use.arguments if rng.random() < 0.5 else [{"name": use.name, "parameters": use.arguments}]
    messages = exchange(use.request, json.dumps(call, ensure_ascii=False))
    return Sample(messages=messages, tools=[one.schema for one in found], is_forced=True)


def forced(rng: Random) -> Sample:
    """An object that a schema demands."""
    if rng.random() < 0.25:
        return forced_call(rng)
    return _forced(rng, forms.forced_object)


def _forced(rng: Random, make: Question) -> Sample:
    while is_held_out((pair := make(rng))[0]):
        pass
    return Sample(messages=exchange(_opened(rng, pair[0]), pair[1]), is_forced=True)


def pairs(rng: Random) -> Sample:
    """Keys with values, then questions for some of them: practice in finding what follows what."""
    table = {made_up_word(rng): rng.choice((made_up_word, code, made_up_name))(rng) for _ in range(rng.randint(2, 7))}
    text = ", ".join(f"{key}{rng.choice((' is ', ': ', ' = '))}{value}" for key, value in table.items())
    keys = list(table)
    messages = exchange(text + ".", "I will remember it.")
    for key in rng.sample(keys, min(len(keys), 4)):
        messages += exchange(rng.choice((f"What is {key}?", f"{key}?", f"Tell me {key}.")), f"{table[key]}")
    return Sample(messages=messages)


def sample(rng: Random) -> Sample:
    """One document of the training text."""
    kind = rng.random()
    if kind < 0.58:
        return dialog(rng, rng.choice((1, 2, 2, 3)))
    if kind < 0.585:
        return dialog(rng, rng.randint(5, 12))
    if kind < 0.745:
        return remembering(rng, rng.choice((0, 1, 2, 2)))
    if kind < 0.75:
        return remembering(rng, rng.randint(3, 8))
    if kind < 0.754:
        return reading(rng, 3)
    if kind < 0.77:
        return pairs(rng)
    if kind < 0.88:
        return with_tools(rng)
    if kind < 0.98:
        return forced(rng)
    return Sample(text=plain_text(rng))


def copying_sample(rng: Random) -> Sample:
    """One document of the first stage: answers that can only be read from the prompt."""
    kind = rng.random()
    if kind < 0.5:
        return Sample(messages=exchange(*copying.long_repeat(rng)))
    if kind < 0.65:
        return pairs(rng)
    if kind < 0.75:
        return Sample(messages=exchange(*ask(rng, "repeat")))
    return sample(rng)


def blended_sample(rng: Random) -> Sample:
    """One document of the third stage: a third is copying, which is not forgotten so."""
    return (copying_sample if rng.random() < 0.35 else sample)(rng)


def echoing_tokens(rng: Random) -> Sample:
    tokens = [rng.randrange(*_PLAIN_TOKENS) for _ in range(rng.randint(8, 40))]
    if rng.random() < 0.4:
        tokens = [token for each in tokens for token in (each, _SPACE_TOKEN)]
    return Sample(echoed=tokens)


def echoing_sample(rng: Random) -> Sample:
    """One document of the second stage: half are random tokens, with or without spaces between them, that come twice."""
    return echoing_tokens(rng) if rng.random() < 0.5 else copying_sample(rng)


def practice_sample(rng: Random) -> Sample:
    """One document of the fourth stage: everything, with more of what is learnt slowly."""
    kind = rng.random()
    if kind < 0.1:
        return forced(rng)
    if kind < 0.15:
        return with_tools(rng)
    return sample(rng)


_DRILLED = {
    "sum": 30, "calendar": 14, "repeat": 14, "counting": 12, "identity": 8, "greeting": 8, "capital": 6, "opposite": 4, "unknown": 4,
    "animal": 2, "continent": 2,
}  # fmt: skip


def drill_sample(rng: Random) -> Sample:
    """One document of the fifth stage: half are single questions of the kinds that need many examples, which are short."""
    if rng.random() < 0.5:
        kind = rng.choices(list(_DRILLED), list(_DRILLED.values()))[0]
        return Sample(messages=exchange(*ask(rng, kind)))
    return practice_sample(rng)


def finishing_sample(rng: Random) -> Sample:
    """One document of the sixth stage: as the one before, with more tools and lists."""
    kind = rng.random()
    if kind < 0.1:
        return with_tools(rng)
    if kind < 0.13:
        return Sample(messages=exchange(*ask(rng, "list")))
    if kind < 0.15:
        return Sample(messages=exchange(*ask(rng, "size")))
    return drill_sample(rng)


_CONSOLIDATED = {
    "sum": 30, "repeat": 18, "plain repeat": 14, "counting": 14, "calendar": 9, "identity": 7, "greeting": 7, "list": 4, "capital": 6,
    "opposite": 3, "colour": 1, "animal": 1, "unknown": 2, "language": 1, "continent": 1, "planet": 1,
}  # fmt: skip


def consolidating_sample(rng: Random) -> Sample:
    """One document of the last stage: mostly single questions of the kinds that need many examples, which are short."""
    kind = rng.random()
    if kind < 0.62:
        name = rng.choices(list(_CONSOLIDATED), list(_CONSOLIDATED.values()))[0]
        return Sample(messages=exchange(*ask(rng, name)))
    if kind < 0.68:
        return with_tools(rng)
    if kind < 0.78:
        return remembering(rng, rng.choice((1, 2, 2, 3)))
    return forced(rng) if kind < 0.84 else sample(rng)


def balanced_sample(rng: Random) -> Sample:
    """One document of the stage after the last: single questions, and as many dialogs with memory or tools."""
    kind = rng.random()
    if kind < 0.36:
        name = rng.choices(list(_CONSOLIDATED), list(_CONSOLIDATED.values()))[0]
        return Sample(messages=exchange(*ask(rng, name)))
    if kind < 0.54:
        return with_tools(rng)
    if kind < 0.82:
        return remembering(rng, rng.choice((1, 2, 2, 3)))
    return forced(rng) if kind < 0.92 else sample(rng)


_VARIED = {
    "greeting": 7, "identity": 9, "mesh": 1, "capital": 7, "continent": 2, "animal": 3, "colour": 3, "opposite": 4,
    "calendar": 8, "planet": 2, "nearest planet": 1, "language": 2, "sum": 34, "counting": 13, "unknown": 6, "repeat": 22,
    "plain repeat": 13, "repeat a message": 26, "list": 5, "json": 2, "not said": 1, "size": 1,
}  # fmt: skip


def varied_sample(rng: Random) -> Sample:
    """One document of the last stage: every kind, in wordings that are composed of many parts."""
    kind = rng.random()
    if kind < 0.48:
        name = rng.choices(list(_VARIED), list(_VARIED.values()))[0]
        return Sample(messages=exchange(*ask(rng, name)))
    if kind < 0.52:
        return dialog(rng, rng.choice((2, 2, 3)))
    if kind < 0.69:
        return remembering(rng, rng.choice((0, 1, 2, 2, 2, 3)))
    if kind < 0.82:
        return with_tools(rng)
    if kind < 0.93:
        return forced(rng)
    if kind < 0.955:
        return Sample(messages=exchange(*long_repeat(rng)))
    if kind < 0.965:
        return pairs(rng)
    return echoing_tokens(rng) if kind < 0.985 else Sample(text=plain_text(rng))


def choosing_sample(rng: Random) -> Sample:
    """One document of the last steps: as before, with more choices between tools that are alike."""
    return with_alike_tools(rng) if rng.random() < 0.4 else varied_sample(rng)


_WIDE = {
    "greeting": 6, "identity": 10, "mesh": 1, "capital": 22, "continent": 2, "animal": 3, "colour": 3, "opposite": 4,
    "calendar": 16, "planet": 2, "nearest planet": 1, "language": 2, "sum": 36, "counting": 10, "unknown": 6, "repeat": 30,
    "plain repeat": 12, "repeat a message": 18, "list": 5, "json": 2, "not said": 1, "size": 1,
}  # fmt: skip


def wide_sample(rng: Random) -> Sample:
    """One document of the last stage: as `varied_sample`, with more of what was weak after it and more choices between tools."""
    kind = rng.random()
    if kind < 0.24:
        name = rng.choices(list(_WIDE), list(_WIDE.values()))[0]
        return Sample(messages=exchange(*ask(rng, name)))
    if kind < 0.37:
        return with_alike_tools(rng)
    if kind < 0.4:
        return forced(rng)
    return remembering(rng, rng.choice((1, 2, 2, 3))) if kind < 0.43 else varied_sample(rng)


def adding_sample(rng: Random) -> Sample:
    """One document of the last steps: as before, with more sums. They have more answers than any other kind, and each must be learnt."""
    kind = rng.random()
    if kind < 0.07:
        return _forced(rng, forms.forced_sum)
    return Sample(messages=exchange(*ask(rng, "sum"))) if kind < 0.16 else wide_sample(rng)


def samples(seed: str, make: Callable[[Random], Sample] = sample) -> Iterator[Sample]:
    """The endless training text of a seed."""
    rng = Random(seed)
    while True:
        yield make(rng)
