"""Something that the user says about himself, and the question about it some turns later."""
# ruff: noqa: E501 - a pattern is one line

from dataclasses import dataclass
from random import Random

from corpus.patterns import fill, say, upper_first
from corpus.words import ADJECTIVES, ANIMALS, CITIES, FOODS, THINGS, code, made_up_name, made_up_word, person, place

_WHAT = "[what is|what's|whats|what was|tell me|please tell me|can you tell me|do you know|do you still know|do you remember|please say|give me|can you say|and what is|now what is|say|repeat|so what is]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    """`v` is what to remember. The acknowledgement says it again, so that it is near."""

    said: tuple[str, ...]
    acknowledged: str
    asked: tuple[str, ...]
    answer: str


_NAME = Thing(
    said=(
        "my name is {v}[.|!|]", "my name's {v}", "[hello|hi|hey|good morning|good evening|ok]{c} [my name is|I am|I'm|my name's|this is|it's] {v}[.|!|]", "I am [called|named] {v}[.|]",
        "I'm {v}[.|!|, hello|, and who are you?|]", "I am {v}", "[please|you may|you can|just|everybody may] call me {v}[.|, please|]", "the name is {v}", "{v} is [what they call me|what people call me|how I am called]",
        "[they|people|friends|my parents|all] [call|named|name] me {v}[.|]", "[here is|this is|it is] {v}[, hello|, hi|.|]", "[you speak|you are speaking|you chat] with {v}[.|]", "my first name is {v}",
        "[remember|note|know|please remember|do not forget|don't forget][:| that|] [my name is|I am called|I am] {v}", "I go by the name [of|] {v}", "[I want to introduce myself|may I introduce myself|to introduce myself]: [I am|my name is|] {v}",
        "name: {v}", "[a|some] {a} person named {v} [is here|writes to you]", "I sign as {v}", "[Mr|Mrs|Ms|Dr] {v} [here|is my name|is writing]", "it says {v} on my [badge|passport|door]",
    ),
    acknowledged="Nice to meet you, {v}!",
    asked=(
        f"{_WHAT} my [name|first name|own name]", "[what|how] am I called", "who am I", "[do you|can you|could you|will you] [remember|recall|know|tell me|say|repeat] [my name|what my name is|what my name was|who I am|how I am called|what I am called]",
        "[what|which] name [did I tell you|have I told you|did I say|do I have|did I mention|is mine]", "how [am I|was I] [called|named]", "[what|how] [should|do|will|can|may] you call me", "[whom|with whom|who] [do you speak with|are you speaking to|are you talking with|do you talk to|is this]",
        "my name is", "my name", "[tell me|say|write|repeat|remember] [my name|the name that I said|the name I gave|who I am|how I am called] [again|please|now|]", "[have you|did you] [forgotten|forget|lost] my name",
        "what name is on my [badge|passport|door]", "what do [people|they|my friends|others] call me", "[how|with which name] [do you|can you|would you] [address|greet|call] me", "who [writes|is writing|is speaking|speaks|talks] [to you|with you|here|]",
        "am I {v} [or not|]? what is my name", "[I forgot|I have forgotten|I cannot remember] my name[, what is it|. Can you help|: what was it]", "what name was I given", "[and|so|now] [my name|what about my name|my name was]", "[do you|can you] [still|] [say|tell me] who [I am|is writing|you speak with]", "[what|which name] did [my parents|they] give me",
    ),
    answer="Your name is {v}.",
)  # fmt: skip
_RELATIONS = tuple(
    "brother sister mother father friend teacher boss neighbour uncle aunt doctor son daughter wife husband cousin dog horse cat bird boat robot car fish".split()
)
_RELATIVE = Thing(
    said=(
        "my {r} is [called|named] {v}[.|]", "my {r}'s name is {v}", "the name of my {r} is {v}", "I have a {r} [called|named|with the name|whose name is] {v}",
        "[we|I|people|all] call my {r} {v}", "my {r} goes by {v}", "[remember|note]: my {r} is [called|named|] {v}",
    ),
    acknowledged="Your {r} is called {v}. I will remember it.",
    asked=(
        f"{_WHAT} my {{r}}'s name", f"{_WHAT} the name of my {{r}}", "[what|how] is my {r} [called|named]", "[what|which] name [has|does] my {r} [have|]", "[what|how] do [I|we] call my {r}",
        "[do you|can you] [remember|recall|tell me|say] [the name of my {r}|what my {r} is called|how my {r} is called|my {r}'s name]", "my {r}, what was the name", "who is my {r}",
    ),
    answer="Your {r} is called {v}.",
)  # fmt: skip
_HOME = Thing(
    said=(
        "I [come from|am from|stay in|work in|was born in|am living in] {v}[.|]", "my [home|town|city|home town] is {v}", "[we|my family and I] live in {v}", "I have a [house|flat|home] in {v}", "{v} is [my home|where I live|my city]",
    ),
    acknowledged="You are from {v}. I will remember it.",
    asked=(
        "where [do I live|am I from|do I come from|is my home|is my house]", "[in|from] [which|what] [city|town|place] [do I live|am I|do I come|is my home]", f"{_WHAT} my [home|town|city|home town]", "[which|what] [city|town|place] [do I live in|am I from|do I come from|is my home]",
        "[do you remember|do you know|tell me] where I [live|come from|am from]",
    ),
    answer="You are from {v}.",
)  # fmt: skip
_FAVOURITES = (
    "colour",
    "food",
    "animal",
    "word",
    "fruit",
    "city",
    "song",
    "book",
    "game",
    "number",
    "drink",
    "flower",
    "sport",
)
_FAVOURITE = Thing(
    said=(
        "my [favourite|favorite|best] {k} is {v}[.|]", "[the|] {k} [that|] I [like|love] [best|most] is {v}", "{v} is my [favourite|favorite] {k}", "I like the {k} {v} [best|most]", "as for {k}, I [like|love] {v} [best|most]",
        "of all [things|{k}s] I like {v} best",
    ),
    acknowledged="Your favourite {k} is {v}. I will remember it.",
    asked=(
        f"{_WHAT} my [favourite|favorite|best] {{k}}", "[which|what] {k} [is my favourite|do I love|do I like|do I like most|do I prefer|do I love most|did I like best]", "[do you remember|do you know|tell me] [which|what] {k} I [like|love] [best|most|]",
        "[what|which] was my favourite {k}", "my favourite {k} is",
    ),
    answer="Your favourite {k} is {v}.",
)  # fmt: skip
_SECRETS = (
    "secret word", "password", "code", "magic word", "key", "pin", "number", "room", "room number", "table number", "id", "user id", "account", "order number", "project", "email", "address", "street", "seat",
    "team", "ticket", "phone number", "locker", "gate", "code name", "nickname", "login", "user", "flight", "file", "group",
)  # fmt: skip
_SECRET = Thing(
    said=(
        "[the|my|our] {k} is {v}[.|]", "[remember|note|please remember|keep in mind|do not forget|store|save] [this|the|my|that the|] {k}[:| is] {v}", "{k}: {v}", "[use|take|write down|here is] [the|my] {k} {v}", "{v} is [the|my|our] {k}",
        "we [have|use|are in|need|go to|take] {k} {v}", "I [have|use|am in|need|got] {k} {v}", "[our|the|my] [meeting|lunch|visit|party] is in {k} {v}",
    ),
    acknowledged="The {k} is {v}. I will remember it.",
    asked=(
        f"{_WHAT} [the|my|our] {{k}}", "[what|which] {k} [did I tell you|did I say|is it|was it|do I have|do I use|did I give you|do we have|do we use|do we need|are we in|am I in|did I mention]", "[do you|can you|could you] [remember|recall|tell me|say|repeat] [the|my|our] {k}",
        "the {k} [was|is|please]", "[and|now] [the|my] {k}", "in [what|which] {k} [is the meeting|is it|do we sit|am I|do we meet|is the party]",
    ),
    answer="The {k} is {v}.",
)  # fmt: skip
_AGE = Thing(
    said=("I am {v} [years old|]", "[my age is|I have the age of|my age:] {v}", "I [turned|became|will be] {v} [today|this year|]", "[I've been alive for|I have lived for] {v} years", "I'm {v} years of age"),
    acknowledged="You are {v} years old. I will remember it.",
    asked=(f"{_WHAT} my age", "[what|which] age [am I|do I have]", "how [many years|] old [am I|was I|did I say I am]", "[do you remember|do you know|tell me|say] [my age|how old I am]", "how many years [am I old|do I have]"),
    answer="You are {v} years old.",
)  # fmt: skip
_JOBS = tuple(
    "teacher doctor baker farmer painter driver cook gardener writer singer nurse pilot carpenter lawyer sailor engineer tailor butcher dentist waiter judge barber clown dancer fisherman".split()
)
_JOB = Thing(
    said=("I am a {v}", "[my job is|my work is|my profession is] [a|] {v}", "I [earn my money|am employed|have a job] as a {v}", "I'm a {v} [by profession|]", "by profession I am a {v}"),
    acknowledged="You are a {v}. I will remember it.",
    asked=(f"{_WHAT} my [job|work|profession]", "[what|which] [job|work|profession] do I have", "what do I do [for a living|for work|]", "[what|as what] [am I by profession|do I earn my money|am I employed]", "[do you remember|tell me] [my job|what my job is]"),
    answer="You are a {v}.",
)  # fmt: skip
_LIKES = Thing(
    said=("I [like|love|eat] {v} [a lot|very much|every day|]", "I [want|need|will buy|have to buy|would like] {v}", "I [bought|lost|found|own|forgot|sold] [a|my|the] {v}"),
    acknowledged="{V}. I will remember it.",
    asked=("what [do I|did I say I] [like|love|eat|want|need]", "what [did I buy|did I lose|did I find|do I own|did I forget|did I sell|have I to buy|will I buy|would I like]", "[do you remember|tell me] what I [like|want|need|bought|lost|found]"),
    answer="{V}.",
)  # fmt: skip


def _value(rng: Random, thing: Thing) -> dict[str, str]:
    """The slots of one thing to remember."""
    if thing is _NAME:
        return {"v": person(rng), "a": rng.choice(ADJECTIVES), "c": rng.choice((",", "!", ",", "."))}
    if thing is _RELATIVE:
        return {"v": person(rng), "r": rng.choice(_RELATIONS)}
    if thing is _HOME:
        return {"v": place(rng)}
    if thing is _FAVOURITE:
        tables = ("red", "blue", "green", "pink", "grey", "violet"), FOODS, ANIMALS, CITIES, THINGS
        return {
            "v": rng.choice(rng.choice(tables)) if rng.random() < 0.5 else made_up_word(rng),
            "k": rng.choice(_FAVOURITES),
        }
    if thing is _SECRET:
        value = rng.choice(
            (
                code,
                made_up_word,
                made_up_name,
                lambda r: str(r.randrange(10 ** r.randint(1, 5))),
                lambda r: rng.choice(THINGS),
            )
        )(rng)
        return {"v": value, "k": rng.choice(_SECRETS)}
    if thing is _AGE:
        return {"v": str(rng.randint(2, 99))}
    if thing is _JOB:
        return {"v": rng.choice(_JOBS) if rng.random() < 0.6 else made_up_word(rng)}
    value = rng.choice(rng.choice((FOODS, THINGS, ANIMALS))) if rng.random() < 0.6 else made_up_word(rng)
    return {"v": value, "V": upper_first(value)}


def _question(rng: Random, text: str) -> str:
    text = upper_first(text) if rng.random() < 0.8 else text
    return text if text[-1] in ".?!" else text + rng.choice(("?", "?", "?", "", "."))


def introduction(rng: Random) -> tuple[tuple[str, str], tuple[str, str]]:
    """What is said with its acknowledgement, and the question about it with its answer."""
    thing = rng.choices(
        (_NAME, _RELATIVE, _HOME, _FAVOURITE, _SECRET, _AGE, _JOB, _LIKES), (50, 10, 7, 9, 12, 5, 5, 3)
    )[0]
    slots = _value(rng, thing)
    said = say(rng, *thing.said, **slots)
    if rng.random() < 0.85 and not said.startswith(slots["v"]):
        said = upper_first(said)
    if rng.random() < 0.1:
        said += rng.choice(
            (
                " Nice to meet you.",
                " Remember it.",
                " by the way",
                ", just so you know",
                " How are you?",
                " ok?",
                " Hello!",
            )
        )
    asked = _question(rng, say(rng, *thing.asked, **slots))
    return (said, fill(thing.acknowledged, **slots)), (asked, fill(thing.answer, **slots))


_UNKNOWN = (
    ("[what is|what's|do you know|tell me] my name|who am I", "You have not told me your name."),
    ("how old am I|[what is|do you know] my age", "You have not told me your age."),
    ("where do I live|where am I from", "You have not told me where you live."),
)  # fmt: skip


def not_said(rng: Random) -> tuple[str, str]:
    """A question about something that was never said."""
    shapes, answer = rng.choice(_UNKNOWN)
    return _question(rng, say(rng, f"[{shapes}]")), answer
