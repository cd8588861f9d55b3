"""Answers in JSON: asked for in words, or forced by a schema that the prompt does not show."""
# ruff: noqa: E501 - a pattern is one line

import json
from collections.abc import Callable
from random import Random

from corpus import facts, knowledge, numbers
from corpus.frames import ask_for, demand
from corpus.patterns import say, upper_first
from corpus.words import ADJECTIVES, CITIES, FOODS, NAMES, THINGS, VERBS, any_word, made_up_word, person, place

Object = dict[str, object]


def _fact_object(rng: Random) -> tuple[str, Object]:
    kind = rng.randrange(6)
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
    if kind == 4:
        country, city = rng.choice(list(facts.CAPITALS.items()))
        return f"Give me the country and the capital of {country}.", {"country": country, "capital": city}
    plural, items = rng.choice(list(facts.LISTS.items()))
    count = rng.randint(2, 4)
    return f"List {facts.NUMBER_WORDS[count]} {plural}.", {plural: list(items[:count])}


def _copied_object(rng: Random) -> tuple[str, Object]:
    values: Object = {
        "name": person(rng), "age": rng.randint(1, 99), "city": place(rng), "food": rng.choice(FOODS), "thing": rng.choice(THINGS), "number": rng.randint(0, 999), made_up_word(rng): any_word(rng),
    }  # fmt: skip
    keys = rng.sample(list(values), rng.randint(1, 4))
    parts = [f"{key} {values[key]}" for key in keys]
    text = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    return say(rng, "[Give me|Write|Make] an object with {t}.", "[Make|Write] an object: {t}.", t=text), {
        key: values[key] for key in keys
    }


def json_object(rng: Random) -> tuple[str, str]:
    """The prompt asks for JSON."""
    text, value = (_fact_object if rng.random() < 0.5 else _copied_object)(rng)
    lowered = text[0].lower() + text[1:]
    shapes = (
        f"Answer in JSON: {lowered}", f"Answer in JSON: {text}", f"{text} Answer in JSON.", f"{text} Reply with JSON only.", f"In JSON: {lowered}", f"Reply in JSON. {text}", f"{text} Use JSON.", f"As JSON: {text}",
        f"{text} JSON only.", f"{text} As a JSON object.",
    )  # fmt: skip
    return rng.choice(shapes), json.dumps(value, ensure_ascii=False)


_EXTRACT = "[Extract|Extract|Read|Take out|Find|Parse|Get|Note|Store|Fill in|Save|Return|Give me|Pull out|Collect|Write down|Convert|Turn into an object|Make an object of|Structure|Record|Enter|Register|Pick out] [the data|the fields|it|it all|everything|the details|the values|the facts|this|that|the person|the meeting|the entry|the trip|the visit|the appointment|the information|what matters|all of it|these facts|the record|the object|the content|the names|all you need|what is said|each part|the parts]"


def _extracted(rng: Random, keys: tuple[str, ...], shapes: tuple[str, ...], **slots: object) -> tuple[str, Object]:
    text = say(rng, *shapes, **slots)
    kind = rng.random()
    if kind < 0.33:
        text = f"{text.rstrip('.')}{rng.choice(('. ', '. ', '. ', '! ', '; ', ' - '))}{say(rng, _EXTRACT)}{rng.choice(('.', '.', '', '!'))}"
    elif kind < 0.5:
        text = f"{say(rng, _EXTRACT)}: {text}"
    return text, dict(zip(keys, slots.values(), strict=False))


def _person(rng: Random) -> tuple[str, Object]:
    name, age = person(rng), rng.randint(1, 99)
    if rng.random() < 0.1:
        return say(
            rng,
            "[Invent|Think of|Create|Imagine|Give me|Write|Name|Describe|Choose|I need|Show me|Pick|Tell me] [a|some|one|any|a new|another] [person|man|woman|human|somebody|character|guest|student][ for me| please|].",
        ), {"name": "Anna", "age": 30}
    shapes = (
        "{name} is {age}.", "{name}, [aged|age|who is] {age}.", "{name} has the age of {age}.", "[I am|This is|Here is|My name is|They call me] {name}[,| and I am| and my age is] {age}.", "[A|The] person [named|called] {name}, {age} years.", "[name|person|who][:|=] {name}[,|;| and] [age|years|old][:|=] {age}", "[meet|here comes|say hello to|this is|I met|we know|do you know|there is] {name}[, who is|, aged|. Age:|, age|, who turned] {age}", "[I am|I'm] {age} [years old|years|] and [my name is|I am called|they call me|people call me] {name}", "[the|a|our] [man|woman|child|girl|boy|student|guest|person|patient|teacher|worker] {name} [is|has turned|is now|will be|became] {age} [years old|years|]",
        "[my|our|his|her|their] [name is|name's] {name} and [my|the|his|her] age [is|:] {age}", "{age} years old: {name}", "{name}, {age}[.| years.| years old.]", "{name} [celebrates|had|has] [birthday number|the birthday] {age}", "[call me|I'm|my name's] {name}[,| -|.] {age} [years old|years|]", "{name} ({age})",
        "{name} [turned|was|became] {age} [today|this year|].", "[The name is|name:] {name}, [the age is|age:] {age}.", "{name} is {age} years [old|of age] and [likes|eats|buys] things.", "I know {name}, who is {age}.", "My [friend|sister|son] {name} is {age} years old.",
    )  # fmt: skip
    return _extracted(rng, ("name", "age"), shapes, name=name, age=age)


def _event(rng: Random) -> tuple[str, Object]:
    if rng.random() < 0.1:
        return say(
            rng,
            "[Invent|Plan|Make up|Create|Think of|Write|Give me|Imagine|Suggest|Name|I need|Organise|Arrange|Propose] [an event|a trip|a meeting|any event|a journey|some event|a party|one event|a tour|a concert][ for me| for us| please|].",
        ), {"who": "Anna", "city": "Paris", "day": "Monday"}
    who, city, day = person(rng), place(rng), rng.choice(facts.DAYS)
    shapes = (
        "{who} [visits|sees|leaves|reaches|likes|explores|tours] {city} [on|this|next] {day}", "{who} [arrives|stays|sleeps|lives|performs|begins work|changes trains|is expected|is a guest|will be seen|teaches] in {city} [on|this|next|every] {day}", "{who} [runs|hikes|cycles|is driven|is sent|hopes to get|plans to go|is invited|heads|sets out|gets] to {city} [on|this|next] {day}", "{who} [flies|travels|goes|drives|walks|comes back|sails|moves|returns|rides|hurries|will go|is going|wants to go|has to go|takes the train|takes a bus] to {city} [on|this|next] {day}", "{who} [meets us|meets friends|has a talk|gives a speech|has a show|plays|works|will sing|holds a class|opens a shop|gets married|waits|lands|eats] in {city} [on|this|next] {day}", "[on|this|next] {day}[,|] {who} [will be|is|speaks|plays|waits|arrives|lands|sings|works] in {city}", "[who|name|person]: {who}[,|;] [city|where|place]: {city}[,|;] [day|when|date]: {day}",
        "[a|the] [meeting|concert|trip|visit|party|lunch|talk|show|wedding] [with|of|by|for] {who} in {city} on {day}", "{city}, {day}, {who}", "{who}, {city}, {day}", "in {city} on {day}: {who}", "{who} flies to {city} on {day}.", "{who} [is|will be|arrives|sings|speaks|stays] in {city} on {day}.", "On {day} {who} [visits|sees|leaves|reaches|goes to] {city}.", "[Event|Visit|Trip]: {who}, {city}, {day}.",
        "[We meet|I meet|We see] {who} in {city} on {day}.", "{who} has a [meeting|concert|party] in {city} [on|next|this] {day}.",
    )  # fmt: skip
    keys = rng.choice(
        (("who", "city", "day"), ("who", "city", "day"), ("name", "place", "day"), ("person", "city", "date"))
    )
    return _extracted(rng, keys, shapes, who=who, city=city, day=day)


def _user(rng: Random) -> tuple[str, Object]:
    if rng.random() < 0.12:
        return say(
            rng,
            "[Invent|Make|Make up|Give me|Think of|Imagine|I need|Write|Add|Choose|Show me] [a user|some user|one user|a new user|another user|a test user][ for me| please|].",
        ), {"user": {"name": "Anna", "id": 1}}
    name, number = person(rng), rng.randint(1, 9999)
    text = say(
        rng,
        "[The user|User|Our user|There is a user] {n} [has|with|has got] [the|] [id|ID|number] {i}.", "[Create|Add|Make|Store|Write] [a|the] user {n}[,| with] id {i}.", "User: {n}, id: {i}", "{n} [is user|has id|has the user id] {i}.", "id {i} is {n}.", "[the|our|a|one|this] [user|account|member|person] [is|named|is called|with the name|by the name of|] {n}[,| and| has|; the] [id|number|user id|ID] [is|:|] {i}", "[store|save|register|enter|record|note|insert|write] [the|a|this|] user {n}[,| with| and| under] [id|number|the id] {i}", "[name|user|who][:|=] {n}[,|;] [id|number][:|=] {i}", "{n}[,|;| has| -] [id|number|ID] {i}", "[number|id|user] {i}[,| is|: | belongs to] {n}",
        n=name, i=number,
    )  # fmt: skip
    return text, {"user": {"name": name, "id": number}}


def _task(rng: Random) -> tuple[str, Object]:
    thing = rng.choice(THINGS + FOODS) if rng.random() < 0.7 else made_up_word(rng)
    task = f"{rng.choice(('buy', 'clean', 'find', 'sell', 'paint', 'call', 'wash', 'write', 'bring', 'cook', 'read', 'repair'))} {rng.choice(('', 'the ', 'a ', 'some '))}{thing}"
    kind = rng.random()
    if kind < 0.15:
        return say(
            rng,
            "[Invent|Give me|Think of|Make up|Write|Create|Find|Suggest|Name|Plan|Imagine|Choose|I need|Propose|Show me] [a|some|any|one|a new|a little|an easy] [task|job|thing to do|todo|chore][ for me| for tomorrow| for this week| for us| for Monday| to do|].",
        ), {
            "task": "buy bread",
            "done": False,
        }
    if kind < 0.35:
        return say(rng, "The task {t} is [done|finished|ready].", "I [have finished|did] the task {t}.", t=task), {
            "task": task,
            "done": True,
        }
    return say(
        rng,
        "[I need|I want|I have|we have|you have|he has|she has|it is time|do not forget|remember|remind me|somebody has] to {t}[ today| tomorrow| soon||||]", "[to do|todo|open task|next task|job|my task|note|still open|not done yet|new job][:|: |,] {t}", "[put|add|enter|write|note|save|set] {t} [on|to|in|into] [my|the|our] [list|tasks|to-do list|todo list|plan|agenda]", "[add|create|save|make|enter|register|store|plan] [a|one|the|this|my] [new |next |open |] [task|job|todo|item|entry][:| to| -|: please] {t}", "[tomorrow|today|later|on Monday|next week|soon] I [must|have to|will|should|want to] {t}",
        "[Add|Note|Create|Write down|New|Make] [a|the|this] task[:|] {t}.", "[I have to|I must|Remind me to|Do not forget to] {t}.", "Task: {t}", "The task is to {t}.", "[Put|Write] {t} on [my|the] list.",
        t=task,
    ), {"task": task, "done": False}  # fmt: skip


def _capital(rng: Random) -> tuple[str, Object]:
    country, city = rng.choice(list(facts.CAPITALS.items()))
    if rng.random() < 0.2:
        noun = say(
            rng,
            "{c} [and|with|plus] its capital",
            "the [form|entry|record|object|card|data|fields] [for|of|about] {c}",
            "{c}, the country and the capital",
            c=country,
        )
        action = say(
            rng, "[describe|fill in|complete|write|make|create|give me|show|present|enter|store|return] {np}", np=noun
        )
        text = demand(rng, action) if rng.random() < 0.7 else ask_for(rng, noun)
        return upper_first(text) + rng.choice((".", "", "!")), {"country": country, "capital": city}
    if rng.random() < 0.4:
        while not (found := knowledge.capital(rng))[1].startswith("The capital"):
            pass
        country = found[1].removeprefix("The capital of ").split(" is ")[0]
        return found[0], {"capital": facts.CAPITALS[country]}
    text = say(
        rng,
        "[Describe|Show|Tell me about|Give me|Fill in|Complete] [the country|] {c}.", "{c} and its capital.", "[Give me|Tell me|Write|Fill in|Complete|Make] [an object|a record|an entry|the form|a form|the fields|the data] [for|about|of|with] {c}.",
        "[The country|Country|The land] [is|:] {c}.", "What do you know about {c}?",
        c=country,
    )  # fmt: skip
    return text, {"country": country, "capital": city}


def _listed(rng: Random) -> tuple[str, Object]:
    plural, items = rng.choice(list(facts.LISTS.items()))
    count = rng.randint(2, 4)
    if rng.random() < 0.5:
        action = say(
            rng,
            "[name|list|give me|tell me|write|find|choose|pick|show me|write down] {n} {k}",
            n=facts.NUMBER_WORDS[count],
            k=plural,
        )
        return upper_first(demand(rng, action)) + rng.choice((".", "", "?")), {plural: list(items[:count])}
    text = say(
        rng,
        "[Name|List|Tell me|Write|I need|Find] {n} {k}.", "{n} {k}, please.", "[Which|What] {n} {k} do you know?",
        n=rng.choice((facts.NUMBER_WORDS[count], count)), k=plural,
    )  # fmt: skip
    return text, {rng.choice((plural, plural, "items", "list")): list(items[:count])}


def _counted(rng: Random) -> tuple[str, Object]:
    while True:
        text, answer = numbers.counting(rng)
        if answer[0].isdigit():
            return text, {rng.choice(("numbers", "numbers", "values")): [int(part) for part in answer.split(", ")]}


def _answered(rng: Random) -> tuple[str, Object]:
    while True:
        text, answer = numbers.small_sum(rng)
        if " = " in answer and not answer.startswith(("Yes", "No")):
            return text, {rng.choice(("answer", "answer", "result")): int(answer.rstrip(".").split(" = ")[1])}


def _judged(rng: Random) -> tuple[str, Object]:
    thing, shade = rng.choice(list(facts.COLOURS.items()))
    if rng.random() < 0.3:
        while not (found := numbers.small_sum(rng))[1].startswith(("Yes", "No")):
            pass
        return found[0], {"answer": found[1].startswith("Yes")}
    told = shade if rng.random() < 0.5 else rng.choice([one for one in facts.LISTS["colours"] if one != shade])
    text = say(
        rng,
        "[Is|Is it true that|Would you say that|Right or wrong:] {t} [is|looks|always] {s}?",
        "{t} is {s}, [right|true|yes or no]?",
        t=thing,
        s=told,
    )
    return upper_first(text), {"answer": told == shade}


def _chosen(rng: Random) -> tuple[str, Object]:
    country = rng.choice([name for name in facts.CAPITALS if facts.CAPITALS[name] in CITIES])
    text = say(
        rng,
        "[Which|What] city is in {c}?", "Choose the city [in|of] {c}.", "[Pick|Take|Name|Find] [a|the|one] city in {c}.", "Which one [is in|belongs to] {c}?", "I [go|travel|fly] to {c}. [Which|What] city [is it|do I see]?",
        c=country,
    )  # fmt: skip
    return text, {"city": facts.CAPITALS[country]}


def _described(rng: Random) -> tuple[str, Object]:
    """Keys that can only be read."""
    values = {
        made_up_word(rng): any_word(rng),
        "thing": rng.choice(THINGS),
        "colour": rng.choice(ADJECTIVES),
        "count": rng.randint(0, 500),
        "owner": rng.choice(NAMES),
        "action": rng.choice(VERBS),
    }
    keys = rng.sample(list(values), rng.randint(1, 3))
    text = rng.choice((", ", "; ", " and ")).join(
        f"{key}{rng.choice((': ', ' is ', ' = '))}{values[key]}" for key in keys
    )
    return upper_first(text) + rng.choice(("", ".")), {key: values[key] for key in keys}


_FORCED: tuple[Callable[[Random], tuple[str, Object]], ...] = (
    _person, _person, _event, _event, _user, _task, _capital, _capital, _listed, _counted, _answered, _answered, _answered, _answered, _answered, _judged, _chosen, _described,
)  # fmt: skip


def forced_object(rng: Random) -> tuple[str, str]:
    """The prompt does not ask for JSON: the engine's grammar writes the first brace, and the model only learns what follows."""
    text, value = rng.choice(_FORCED)(rng)
    return text, json.dumps(value, ensure_ascii=False)


def forced_sum(rng: Random) -> tuple[str, str]:
    """A sum whose bare result a schema demands, so that the model cannot write the sum down before it."""
    text, value = _answered(rng)
    return text, json.dumps(value)
