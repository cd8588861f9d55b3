"""Dialogs with tools: function schemas, a request, the call in the Hermes format, its result and an answer."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from corpus.words import CITIES, FOODS, NAMES, THINGS, TOPICS, WEATHER, made_up_word, sentence

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """One tool with one use of it: the request, its arguments, the result and the answer in words."""

    purpose: str
    schema: Message
    request: str
    arguments: Message
    result: Message
    answer: str


def _schema(rng: Random, names: tuple[str, ...], description: str, **properties: str) -> Message:
    """A function in the OpenAI form. A property is "type" or "type: description"."""
    fields: Message = {}
    for name, text in properties.items():
        kind, _, words = text.partition(": ")
        fields[name] = {"type": kind, "description": words} if words and rng.random() < 0.5 else {"type": kind}
    parameters = {"type": "object", "properties": fields, "required": list(fields)}
    return {
        "type": "function",
        "function": {"name": rng.choice(names), "description": description, "parameters": parameters},
    }


def _place(rng: Random) -> tuple[str, str]:
    """A parameter name for a place, and a place."""
    city = rng.choice(CITIES) if rng.random() < 0.75 else made_up_word(rng).capitalize()
    return rng.choice(("city", "city", "location", "place")), city


def weather(rng: Random) -> ToolUse:
    key, city = _place(rng)
    degrees, sky = rng.randint(-9, 39), rng.choice(WEATHER)
    request = (
        f"What is the weather in {city}?",
        f"How is the weather in {city} today?",
        f"What's the weather like in {city}?",
        f"Is it raining in {city}?",
        f"Tell me the weather in {city}.",
        f"How warm is it in {city}?",
    )
    return ToolUse(
        purpose="weather",
        schema=_schema(
            rng,
            ("get_weather", "get_weather", "get_current_weather", "weather", "lookup_weather"),
            rng.choice(("Get the weather in a city", "Get the current weather", "Look up the weather")),
            **{key: "string: The name of the city"},
        ),
        request=rng.choice(request),
        arguments={key: city},
        result={"temperature": degrees, "condition": sky},
        answer=f"It is {sky} in {city}, with {degrees} degrees.",
    )


def local_time(rng: Random) -> ToolUse:
    key, city = _place(rng)
    clock = f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
    request = (
        f"What time is it in {city}?",
        f"Tell me the time in {city}.",
        f"What is the time in {city}?",
        f"How late is it in {city}?",
    )
    return ToolUse(
        purpose="local_time",
        schema=_schema(
            rng,
            ("get_time", "get_time", "get_current_time", "time_in_city"),
            rng.choice(("Get the time in a city", "Get the current time")),
            **{key: "string: The name of the city"},
        ),
        request=rng.choice(request),
        arguments={key: city},
        result={"time": clock},
        answer=f"It is {clock} in {city}.",
    )


def add(rng: Random) -> ToolUse:
    left, right = rng.randrange(10 ** rng.randint(1, 4)), rng.randrange(10 ** rng.randint(1, 4))
    first, second = rng.choice((("a", "b"), ("a", "b"), ("x", "y"), ("left", "right")))
    kind = rng.choice(("integer", "number"))
    request = (
        f"What is {left} + {right}?",
        f"Add {left} and {right}.",
        f"What is the sum of {left} and {right}?",
        f"Calculate {left} + {right}.",
    )
    return ToolUse(
        purpose="add",
        schema=_schema(
            rng,
            ("add", "add", "add_numbers", "sum"),
            rng.choice(("Add two numbers", "Get the sum of two numbers")),
            **{first: f"{kind}: The first number", second: f"{kind}: The second number"},
        ),
        request=rng.choice(request),
        arguments={first: left, second: right},
        result={"result": left + right},
        answer=f"The result is {left + right}.",
    )


def search(rng: Random) -> ToolUse:
    topic = rng.choice(TOPICS) if rng.random() < 0.5 else f"{made_up_word(rng)} {rng.choice(THINGS)}"
    key, found = rng.choice(("query", "query", "q", "text")), sentence(rng)
    request = (
        f"Search for {topic}.",
        f"Search the web for {topic}.",
        f"Look up {topic}.",
        f"Find something about {topic}.",
    )
    return ToolUse(
        purpose="search",
        schema=_schema(
            rng,
            ("search", "search", "web_search", "search_web"),
            rng.choice(("Search the web", "Search for a text")),
            **{key: "string: What to search for"},
        ),
        request=rng.choice(request),
        arguments={key: topic},
        result={"text": found},
        answer=f"I found this: {found}",
    )


def message(rng: Random) -> ToolUse:
    name, text = rng.choice(NAMES), sentence(rng)
    to, body = rng.choice((("to", "text"), ("recipient", "message"), ("name", "text")))
    request = (f"Send this message to {name}: {text}", f"Tell {name}: {text}", f"Write to {name}: {text}")
    return ToolUse(
        purpose="message",
        schema=_schema(
            rng,
            ("send_message", "send_message", "send_email", "message"),
            "Send a message to a person",
            **{to: "string: Who gets it", body: "string: The text"},
        ),
        request=rng.choice(request),
        arguments={to: name, body: text},
        result={"status": "sent"},
        answer=f"The message to {name} was sent.",
    )


def order(rng: Random) -> ToolUse:
    item, count = rng.choice(FOODS + THINGS), rng.randint(1, 20)
    thing, number = rng.choice((("item", "count"), ("product", "quantity"), ("name", "amount")))
    request = (f"Order {count} {item}.", f"Buy {count} {item} for me.", f"I want to order {count} {item}.")
    return ToolUse(
        purpose="order",
        schema=_schema(
            rng,
            ("order", "order_item", "buy", "place_order"),
            "Order something from the shop",
            **{thing: "string: What to order", number: "integer: How many"},
        ),
        request=rng.choice(request),
        arguments={thing: item, number: count},
        result={"order_id": rng.randint(100, 9999)},
        answer=f"Done. I ordered {count} {item}.",
    )


def lookup(rng: Random) -> ToolUse:
    """A tool with a name that may never have been seen: it can only be read from the schema."""
    noun = (
        rng.choice(("price", "age", "owner", "size", "weight", "address", "population", "status", "score"))
        if rng.random() < 0.5
        else made_up_word(rng)
    )
    subject = rng.choice((rng.choice(NAMES), rng.choice(THINGS), made_up_word(rng)))
    key, verb = rng.choice(("name", "item", "of", "subject", "id")), rng.choice(("get", "get", "find", "read", "fetch"))
    value = rng.randint(1, 9999)
    request = (
        f"What is the {noun} of {subject}?",
        f"Tell me the {noun} of {subject}.",
        f"Get the {noun} of {subject}.",
        f"Find the {noun} of {subject}.",
    )
    return ToolUse(
        purpose=noun,
        schema=_schema(
            rng, (f"{verb}_{noun}",), f"{verb.capitalize()} the {noun} of something", **{key: "string: The name"}
        ),
        request=rng.choice(request),
        arguments={key: subject},
        result={noun: value},
        answer=f"The {noun} of {subject} is {value}.",
    )


USES: tuple[Callable[[Random], ToolUse], ...] = (
    weather,
    weather,
    local_time,
    add,
    search,
    message,
    order,
    lookup,
    lookup,
    lookup,
)


def call_text(name: str, arguments: Message) -> str:
    """The call as the model must write it: Hermes format."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) + "\n</tool_call>"


def tool_set(rng: Random, use: ToolUse, *, is_present: bool = True) -> list[Message]:
    """One to four schemas with different purposes, in any order; that of `use` is among them only if `is_present`."""
    found = {use.purpose: use.schema} if is_present else {}
    count = len(found) + min(rng.randint(0, 3), rng.randint(0, 3))
    while len(found) < max(count, 1):
        other = rng.choice(USES)(rng)
        if other.purpose != use.purpose:
            found.setdefault(other.purpose, other.schema)
    schemas = list(found.values())
    rng.shuffle(schemas)
    return schemas


def call_messages(use: ToolUse) -> list[Message]:
    """The request, the call, the tool's result and the answer."""
    function = {"name": use.schema["function"]["name"], "arguments": use.arguments}
    return [
        {"role": "user", "content": use.request},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": json.dumps(use.result, ensure_ascii=False)},
        {"role": "assistant", "content": use.answer},
    ]
