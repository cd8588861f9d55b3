"""Questions about the tables of facts."""
# ruff: noqa: E501 - a pattern is one line

from random import Random

from corpus import facts
from corpus.frames import ask_about, ask_for, demand, finish
from corpus.patterns import say, upper_first

Question = tuple[str, str]

_TELL = "[tell me|please tell me|can you tell me|could you tell me|do you know|name|say|give me|I want to know|I need|I'd like to know|let me know|remind me of|I am looking for|]"
_WHAT = "[what is|what's|what was|which is|whats]"
_CAPITAL = (
    f"{_WHAT} the capital [city|] of {{country}}",
    f"{_TELL} the [capital|capital city|name of the capital] of {{country}}",
    f"{_TELL} [what|which city] the capital of {{country}} is",
    "[which|what] [city|town|place] is [the|] capital [city|] [of|in] {country}",
    f"{_TELL} {{country}}'s capital [city|]",
    f"{_WHAT} {{country}}'s capital [city|] [please|called|named|]",
    "{country}: capital", "capital of {country}", "the capital [city|] of {country} [is what|is which city|is named|please]",
    "[how|what] is the capital [city|] of {country} [called|named]",
    "[what|which] [city|] is the seat of the government [of|in] {country}",
    "[from which city|from where|in which city] is {country} [governed|ruled]", "where is the government of {country}",
    "[think of|take|look at|now for|about] {country}[.|:|,] [what|which city] is [its|the] capital [there|]",
    "{country} has [what|which city|which town] as [its|the|a] capital", "[a|one|quick] question[:|,|.] the capital of {country}",
    "I [am in|am from|live in|travel to|visit|will visit|read about] {country}. [What|Which city] is the capital [there|]",
    "what do you call the capital of {country}", "[my teacher|my friend|somebody|she] [asks|wants to know] [what|] the capital of {country}",
    "the [government|parliament|president|ministers|king|cabinet] of {country} [meets|works|resides|has offices|has its home|governs|is found|is seated|rules|lives] in [which|what] [city|town|place]",
    "[in|from] [which|what] [city|town|place] [does|do] the [government|parliament|president|ministers|leaders] of {country} [work|meet|reside|govern|rule|sit|live]",
    "where [do|does] {country}'s [government|parliament|president|ministers|leaders] [work|meet|reside|govern|rule|live][? Name the city|? In what town|, in which city|? I need the city||]",
    "where [is|can I find|do I find|do I have to go for] the [government|parliament|seat of government] of {country}[? Name the city|, the city please|? Which town is it|: what city|]",
    "[I|we] [drive|fly|go|travel|walk|move|send a letter] to the [capital|capital city|government] of {country}[.|,|;| -] [which|what] city [is that|do I see|is it|am I going to|do we reach]",
    "does {country} have a capital", "is the capital of {country} known to you", "{country}, capital [city|] please",
    "finish this: the capital of {country} is", "the main city of the government of {country}", "in {country} the capital is",
)  # fmt: skip
_COUNTRY = (
    "[which|what] [country|land] has the capital {city}", "{city} is the capital of [which|what] [country|land]",
    "[which|what] [country|land] is {city} the capital of", "[what|which] country has {city} as [its|the] capital",
    f"{_TELL} the country [with|that has] the capital {{city}}", "{city} is [a|the] capital. Of [which|what] country",
    "[in|for] [which|what] country is {city} the capital [city|]", "[which|what] country is governed from {city}",
    "{city} [is the capital where|belongs to which country|is the capital city of where]", "to [which|what] country does the capital {city} belong",
    "[its|the|a country's|this country's|their|our] capital [city|] is [called|named|] {city}[:|.|,|;| -|, so] [which|what] [country|land|state|nation] [is it|is this|is that|do I mean|am I in|do I think of|is meant|]",
    "[which|what] [country|land|state|nation] [am I thinking of|am I in|do I look for|is meant|is it|do I mean] [if|when|:] [its|the] capital [city|] is [called|named|] {city}",
    "[find|work out|identify|name|tell me|say|give me|I look for|I am thinking of|think of|riddle:|quiz:|search for] [a|the|that] [country|land|state|nation][:|,|.| -|;] [its|the|and its|the name of its] [capital|capital city|seat of government|government's city] is [called|named|] {city}",
    "[the|a] [town|place|capital|big city|capital city|famous city] [of|called|named|by the name of|] {city} is [capital|the capital|the capital city|the seat of government] [of|for|in] [which|what] [country|land|state|nation]",
    "[the|a] [town|place|capital|capital city] [of|called|named|] {city} [is the capital of|is the capital city of|governs|belongs to]",
    "[I am|I'm|we are|he is|she is|they are|my aunt is|I wake up] in {city}, [the|a] capital [city|][. Which|. What|, so which|, so what|: what|: which] [country|land|state] [am I in|is it|is that|is she in|would that be|]",
    "[which|what] [country|land|state|nation] [uses|took|chose|calls|counts] {city} [as|for|] its [capital|capital city|seat of government]",
    "{city} [governs|rules|is head of|leads|is the first city of] [which|what] [country|land|state|nation]",
    "if the capital is {city}, [which|what] is the country", "{city}: capital of [what|which country|where]",
)  # fmt: skip


_CAPITAL_NOUN = (
    "the [capital|capital|capital|capital city|name of the capital|name of the capital city] [of|of|of|in] {country}", "{country}'s [capital|capital|capital city|capital's name]",
    "the [city|place] [that is the capital|from which they govern] [of|in] {country}", "the [seat of the government|city of the government|government's city] [of|in] {country}", "the capital of the [country|state|land] [of|called|named|] {country}",
)  # fmt: skip
_CAPITAL_PART = (
    "[its|the] capital",
    "[its|the] capital [city|city|]",
    "[the|its] [name of the capital|capital's name|seat of government]",
    "the capital [there|of it|of this country|of that land]",
)
_COUNTRY_NOUN = (
    "the [country|land|state] [whose capital is|with the capital|that has the capital|governed from|with the capital city] {city}",
    "the [country|land] [of which|where] {city} is the capital",
)
_COUNTRY_PART = (
    "the country that it is the capital of",
    "the [country|land] [where it is the capital|that has it as capital]",
    "[which|what] country is [governed from there|that the capital of]",
)


def _asked(
    rng: Random,
    shapes: tuple[str, ...],
    nouns: tuple[str, ...],
    topic: str,
    parts: tuple[str, ...] = (),
    /,
    **slots: object,
) -> str:
    """A question: one of its own shapes, or a frame around one of the noun phrases, or the topic with a part of it."""
    kind = rng.random()
    if kind < 0.5:
        return finish(rng, say(rng, *shapes, **slots))
    if kind < 0.82 or not parts:
        return finish(rng, ask_for(rng, say(rng, *nouns, **slots)))
    return finish(rng, ask_about(rng, topic, say(rng, *parts, **slots)))


def capital(rng: Random) -> Question:
    country = rng.choice(list(facts.CAPITALS))
    city = facts.CAPITALS[country]
    if rng.random() < 0.3:
        text = _asked(rng, _COUNTRY, _COUNTRY_NOUN, city, _COUNTRY_PART, city=city)
        return _in_small_letters(rng, text), f"{city} is the capital of {country}."
    text = _asked(rng, _CAPITAL, _CAPITAL_NOUN, country, _CAPITAL_PART, country=country)
    return _in_small_letters(rng, text), f"The capital of {country} is {city}."


def _in_small_letters(rng: Random, text: str) -> str:
    """Names of countries and cities are other tokens without their capital letter, so they need examples of their own."""
    return text.lower() if rng.random() < 0.1 else text


def continent(rng: Random) -> Question:
    name = rng.choice(list(facts.CONTINENTS))
    country = rng.choice(facts.CONTINENTS[name])
    text = _asked(
        rng,
        (
        "where is {c}", "[on|in] [which|what] continent [is|lies|do I find|can I find|is the country|would one find] {c}",
        "[which|what] continent [is|lies] {c} [in|on|part of]", "where can I find {c}", "{c} [is|lies] [on|in] [which|what] continent",
        f"{_TELL} the continent of {{c}}", "[which|what] is the continent of {c}", "{c} is part of [which|what] continent",
        "to [which|what] continent does {c} belong", "where [on earth|in the world] is {c}", "[which|what] continent has {c}",
        ),
        ("the continent [of|of|that has|around] {c}", "{c}'s continent", "the continent [where|on which] {c} [is|lies]", "the [part of the world|continent] that {c} belongs to",),
        country, ("[its|the] continent", "[which|what] continent [is it on|does it lie on|is that]", "the [continent|part of the world] [where it is|it belongs to]",),
        c=country,
    )  # fmt: skip
    return text, f"{upper_first(country)} is in {name}."


def _article(name: str) -> str:
    return "an" if name[0] in "aeo" else "a"


def animal(rng: Random) -> Question:
    kind = rng.randrange(3)
    if kind == 0:
        name, sound = rng.choice(list(facts.SOUNDS.items()))
        text = _asked(
            rng,
            (
            "[what|which] [sound|noise] does {a} make", "what does {a} say", "how does {a} sound", f"{_TELL} the [sound|noise] of {{a}}",
            f"{_TELL} [what|which] [sound|noise] {{a}} makes", "what do I hear from {a}", "{a}: [what|which] [sound|noise]",
            "what is the [sound|noise] [of|that comes from|made by] {a}", "the [sound|noise] of {a} is", "{a} makes [what|which] [sound|noise]",
            "[what|which] [sound|noise] [do I hear from|do you get from|is made by] {a}", "how [goes|speaks|talks] {a}",
            ),
            ("the [sound|noise|cry|call|voice|animal sound] [of|from] {a}", "the [sound|noise] [that {a} makes|made by {a}|{a} gives]", "{a}'s [sound|noise|voice|cry]",),
            f"a {name}", ("[its|the] [sound|noise|cry|voice]", "[which|what] [sound|noise] does it make", "how does it sound",),
            a=rng.choice(("a", "the")) + f" {name}",
        )  # fmt: skip
        return text, f"A {name} {sound}."
    if kind == 1:
        name, young = rng.choice(list(facts.YOUNG.items()))
        text = _asked(
            rng,
            (
            "what is a [young|baby|little] {n} [called|named]", "what do you call [a|the] [young|baby] [of a|] {n}",
            "what is the [name|word] [of|for] a [young|baby] {n}", f"{_TELL} the [name|word] [of|for] a [young|baby] {{n}}",
            "[how|what] [do we call|is] the [baby|child|young one] of a {n} [called|]", "a [baby|young] {n} is [called what|called|a what]",
            "the [young|baby|child] of a {n} is [called what|called|named]", "[what|which word] means [young|baby] {n}",
            "what [does a {n} have as|is the] [baby|young] of the {n}",
            ),
            ("the [young|baby|child|little one|offspring|baby animal] of [a|the] {n}", "[a|the] {n}'s [young|child|little one|young one]", "the [name|word] for a [young|baby|little] {n}",),
            f"a {name}", ("[its|the] [young|baby|child|little one]", "the [name|word] for its [baby|young|child]", "[what|how] is its [baby|young] called",),
            n=name,
        )  # fmt: skip
        return text, f"A young {name} is called a {young}."
    name, legs = rng.choice(list(facts.LEGS.items()))
    text = _asked(
        rng,
        (
        "how many legs [does|has] {a} [have|]", f"{_TELL} how many legs {{a}} has", "does {a} have legs", "[what|which] is the number of legs of {a}",
        "{a} has how many legs", "on how many legs does {a} [walk|stand|go]", "{a}: how many legs", "how many legs are [there on|on|under] {a}",
        "[count|name|say] the legs of {a}", "how many legs do I [see|find|have to count] on {a}",
        ),
        ("the [number|count] of legs [of|on] {a}", "how many legs {a} has", "the number of legs that {a} has", "{a}'s number of legs",),
        f"{_article(name)} {name}", ("[its|the] number of legs", "how many legs [has it|does it have|are there|can I see]", "count its legs",),
        a=f"{_article(name)} {name}",
    )  # fmt: skip
    return text, f"{upper_first(_article(name))} {name} has {legs} legs."


def colour(rng: Random) -> Question:
    thing, shade = rng.choice(list(facts.COLOURS.items()))
    text = _asked(
        rng,
        (
        "[what|which] {w} is {t}", f"{_TELL} the {{w}} of {{t}}", "what is the {w} of {t}", "[what|which] {w} does {t} have",
        f"{_TELL} [what|which] {{w}} {{t}} [has|is]", "{t} is [what|which] {w}", "{t} [has|is of] [what|which] {w}", "the {w} of {t} is",
        "in [what|which] {w} [do I paint|do I draw|should I paint|is] {t}", "{t}: [what|which|] {w}", "[I draw|I see|look at] {t}. [what|which] {w} [is it|does it have]",
        "how is {t} coloured", "[what|which] {w} would you give {t}",
        ),
        ("the {w} [of|of|that belongs to] {t}", "{t}'s {w}", "the {w} that {t} has", "the [usual|normal|typical|right] {w} of {t}",),
        thing, ("[its|the|the right|the usual] {w}", "[what|which] {w} [is that|has it|would it be|do you see]", "[its|the] {w} [there|of it]",),
        w=rng.choice(("colour", "color")),
        t=thing,
    )  # fmt: skip
    return text, f"{upper_first(thing)} is {shade}."


def opposite(rng: Random) -> Question:
    pair = rng.choice(list(facts.OPPOSITES.items()))
    word, other = pair if rng.random() < 0.5 or pair[0] in facts.OPPOSITES.values() else pair[::-1]
    if word in ("light", "black", "white"):
        word, other = {"light": ("light", "dark"), "black": ("black", "white"), "white": ("white", "black")}[word]
    text = _asked(
        rng,
        (
        "[what is|what's|] the [opposite|contrary|reverse|antonym] of {w}", f"{_TELL} the [opposite|contrary|reverse|antonym] of {{w}}",
        "[what|which] [word|] is the [opposite|contrary|reverse|antonym] of {w}", "{w}: [what is|] the [opposite|antonym|contrary|reverse]",
        "[opposite|contrary] of {w}", "[what|which word] is {w} the [opposite|antonym|contrary] of", "not {w} but", "[what|which word] is the [opposite|contrary] to {w}",
        "if [something|a thing|it] [is not|isn't] {w}, [what is it|it is what|then what is it|how is it]", "{w} and its [opposite|contrary]",
        "{w} [has|is] the opposite [of which word|of what|]", "[what|which word] [means|has] the [opposite|contrary] [meaning|] of {w}",
        "what do you call [something|a thing] that [is not|isn't] {w}",
        ),
        ("the [opposite|opposite|contrary|antonym|reverse|exact opposite|counterpart] [of|of|to] {w}", "{w}'s [opposite|antonym|contrary]", "the [word|term] [that means|with] the [opposite|contrary|reverse] [meaning|] of {w}", "the opposite [word|term] [of|for|to] {w}",),
        word, ("[its|the] [opposite|contrary|antonym|reverse|counterpart]", "the [opposite|contrary|reverse] [of it|of that|word]", "[what|which word] is the [opposite|antonym|contrary]",),
        w=rng.choice((word, word, word, f'"{word}"')),
    )  # fmt: skip
    return text, f"The opposite of {word} is {other}."


_PAST = "[when|once|after|as soon as|the moment|right when|if|the minute|by the time|now that]"
_OVER = "[is over|ends|has passed|is gone|has ended|finishes|is finished|is done|stops|closes|has gone by|is behind us|comes to an end|runs out|is past]"
_AFTER = (
    "[which|what] {unit} [comes|is|follows|comes right|is right|comes directly|comes next] after {x}", "what comes [right|directly|] after {x}",
    f"{_TELL} the {{unit}} [right|directly|] after {{x}}", "what is the {unit} after {x}", f"{_TELL} [which|what] {{unit}} [comes after|follows|follows after] {{x}}",
    "[which|what] {unit} [do we have|is it|comes|begins] [when|if|after] {x} [is over|ends|has ended|is past]", "{x}, and [then|next] [which {unit}|what|which {unit} comes]",
    "the {unit} [after|that comes after|following|that follows] {x}", "after {x} [is|follows|we have|] [what|which {unit}]", "{x} [ends|is over]. [which|what] {unit} is next",
    f"{_PAST} {{x}} {_OVER}[,|,||:] [which|what|and which] {{unit}} [starts|begins|follows|comes|comes next|is next|is it|do we have|do we enter|opens|is it then|will it be|do we get|arrives]",
    f"[which|what] {{unit}} [starts|begins|follows|comes|is next|is it|do we have|do we enter|will it be|do we get|arrives] {_PAST} {{x}} {_OVER}",
    f"{_PAST} {{x}} {_OVER}[,|,||:] [what starts|what comes|what begins|what follows|what do we have|what is next|then what|it is]",
    "[which|what] is the next {unit} after {x}", "[what|which {unit}] [follows|follows directly on|follows on] {x}", "{x} comes before [what|which {unit}]",
)  # fmt: skip
_BEFORE = (
    "[which|what] {unit} [comes|is|comes right|is just|comes directly] before {x}", "what [comes|is] [right|directly|just|] before {x}",
    f"{_TELL} the {{unit}} [right|directly|just|] before {{x}}", "what is the {unit} before {x}", f"{_TELL} [which|what] {{unit}} [comes|is] before {{x}}",
    "the {unit} [before|that is before|preceding|in front of] {x}", "before {x} [is|comes|we have|] [what|which {unit}]", "[what|which {unit}] [precedes|goes before] {x}",
    "{x} comes after [what|which {unit}]", "[which|what] {unit} [did we have|was it|ended] [when|before] {x} [began|started]", "[which|what] is the previous {unit} before {x}",
)  # fmt: skip
_AFTER_NOUN = (
    "the {unit} [right|directly|immediately|just|] after {x}",
    "the {unit} [that follows|following|coming after|which comes after|that begins after] {x}",
    "the next {unit} after {x}",
    "the {unit} [we have|that comes|that starts|that begins|we enter|we get|it is] [when|once|as soon as|after|right after] {x} [is over|ends|has passed|is gone|finishes|is past]",
    "the {unit} [after|behind] {x}",
    "{x}'s next {unit}",
)
_AFTER_PART = (
    "the next {unit}",
    "the {unit} [after it|after that|that follows|that comes next]",
    "what comes [next|after it|after that]",
    "[which|what] {unit} [follows|comes next|is next]",
)
_BEFORE_NOUN = (
    "the {unit} [right|directly|immediately|just|] before {x}",
    "the {unit} [that precedes|preceding|coming before|which comes before|that ends before] {x}",
    "the [previous|last] {unit} before {x}",
    "the {unit} [before|prior to] {x}",
)
_BEFORE_PART = (
    "the {unit} before [it|that]",
    "the previous {unit}",
    "the {unit} that [comes|is|was] before [it|]",
    "what comes [before it|before that|right before]",
    "[which|what] {unit} [is|was|came] before",
)
_TODAY = "[today is|today it is|it is|it's|we have|now we have|if today is|when today is|suppose today is|say today is|given that today is|now it is|my calendar shows|on my calendar it is|as today is|assume it is|if it is]"
_YESTERDAY = "[yesterday was|yesterday it was|yesterday we had|if yesterday was|when yesterday was|the day before today was|suppose yesterday was|one day ago it was|the last day was|as yesterday was|just one day ago we had]"
_TOMORROW = "[tomorrow is|tomorrow will be|tomorrow it will be|tomorrow we have|if tomorrow is|when tomorrow is|the next day is|in one day it is|suppose tomorrow is|as tomorrow is|the day after today is]"
_BREAK = "[.|,|,|;|:| -|, so|, then|. So|. Then| and]"
_DAY_AFTER = (
    f"{_TODAY} {{x}}{_BREAK} [what|which|which day|what day|what weekday|which weekday] [is|will be|will it be|comes|do we have|have we|shall we have] [tomorrow|the next day|the day after|one day later|in one day|next]",
    f"{_YESTERDAY} {{x}}{_BREAK} [what|which|which day|what day|what weekday|which weekday] [is today|is it today|is it now|do we have today|is it|have we now|must today be|would today be|is this]",
    "[what|which|which day|what day|what weekday] [is|will be|comes] tomorrow[,|] [if|when|given that] [today is|it is|it is now|we have] {x}", "[what|which|which day|what day] is [today|it today|it now][,|] [if|when|given that] yesterday was {x}",
    "[today|it] is {x}[.|,|;|:] [what|which] [day|] [is|will it be|comes|do we have] [tomorrow|the next day|the day after]",
    "[yesterday was|the day before was] {x}[.|,|;|:] [what|which] [day is today|is today|day is it now|day do we have]",
    "it is {x} today, so [what|which day] [is|will be] tomorrow", "tomorrow is [what|which day] if [today is|it is] {x}", "when today is {x}, what day is tomorrow",
    "if yesterday was {x}, [what is today|which day is today|what day do we have now]",
)  # fmt: skip
_DAY_BEFORE = (
    f"{_TODAY} {{x}}{_BREAK} [what|which|which day|what day|what weekday|which weekday] [was|was it|did we have|had we|came|must have been] [yesterday|the day before|one day ago|one day earlier]",
    f"{_TOMORROW} {{x}}{_BREAK} [what|which|which day|what day|what weekday|which weekday] [is today|is it today|is it now|do we have today|is it|have we now|must today be|would today be|is this]",
    "[what|which|which day|what day|what weekday] [was|was it] yesterday[,|] [if|when|given that] [today is|it is|it is now|we have] {x}", "[what|which|which day|what day] is [today|it today|it now][,|] [if|when|given that] tomorrow is {x}",
    "[today|it] is {x}[.|,|:] [what|which] [day|] was [yesterday|the day before]", "[tomorrow is|tomorrow will be|the next day is] {x}[.|,|;|:] [what|which] [day is today|is today|day do we have]",
    "it is {x} today, so [what|which day] was yesterday", "if today is {x}, [what|which day] was yesterday", "if tomorrow is {x}, [what|which day] is [today|it today]",
)  # fmt: skip
_THIS_MONTH = "[now it is|it is|it's|we have|we are in|this month is|the month is|the current month is|today we have|suppose we have|if it is|if this month is|my calendar shows]"
_MONTH_AFTER = (
    f"{_THIS_MONTH} {{x}}{_BREAK} [what|which|which month|what month] [is|comes|will be|will it be|do we have|follows|is the] [next|next month|the next month|the month after|one month later|in a month|after it]",
    f"[the month before was|the previous month was|a month ago it was|one month ago we had|if last month was|as the last month was] {{x}}{_BREAK} [what|which|which month|what month] [is it now|do we have|is this|is it|have we now|is the month now]",
    "[now it is|it is|we have] {x}[.|,|;|:] [what|which] month [is|comes|will be] next", "[the last|the previous] month was {x}[.|,|;|:] [what|which] [month is this|month do we have|is this month]",
    "if this month is {x}, [what|which] [is|comes] next [month|]", "{x} was last month. [what|which month] is it [now|today]",
)  # fmt: skip
_MONTH_BEFORE = (
    f"{_THIS_MONTH} {{x}}{_BREAK} [what|which|which month|what month] [was|was it|did we have|came] [last month|the month before|one month ago|before|one month earlier|before it]",
    f"[next month is|next month will be|the next month will be|in a month it is|if next month is|one month later it is|the following month is] {{x}}{_BREAK} [what|which|which month|what month] [is it now|do we have|is this|is it|have we now|is the month now]",
    "[now it is|it is|this is|we have] {x}[.|,|;|:] [what|which] month was [last|before|the last]", "[the next month is|next month is] {x}[.|,|;|:] [what|which] [month is this|month do we have|is this month]",
    "if this month is {x}, [what|which] was [last month|the last one|the month before]",
)  # fmt: skip
_ORDER = (
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
)


def _neighbour(rng: Random) -> Question:
    is_day, after = rng.random() < 0.5, rng.random() < 0.55
    row, unit = (facts.DAYS, "day") if is_day else (facts.MONTHS, "month")
    index, step = rng.randrange(len(row)), 1 if after else -1
    near = {
        (True, True): _DAY_AFTER,
        (True, False): _DAY_BEFORE,
        (False, True): _MONTH_AFTER,
        (False, False): _MONTH_BEFORE,
    }
    word, side = rng.choice((unit, unit, "weekday" if is_day else "month")), "after" if after else "before"
    if rng.random() < 0.35:
        text = finish(rng, say(rng, *near[is_day, after], unit=word, x=row[index]))
    elif after:
        text = _asked(rng, _AFTER, _AFTER_NOUN, row[index], _AFTER_PART, unit=word, x=row[index])
    else:
        text = _asked(rng, _BEFORE, _BEFORE_NOUN, row[index], _BEFORE_PART, unit=word, x=row[index])
    return text, f"{row[(index + step) % len(row)]} comes {side} {row[index]}."


def _numbered(rng: Random) -> Question:
    row, unit, whole = rng.choice(
        ((facts.DAYS, "day", "week"), (facts.MONTHS, "month", "year"), (facts.MONTHS, "month", "year"))
    )
    index = rng.randrange(len(row))
    text = _asked(
        rng,
        (
        f"{_WHAT} the {{o}} {{unit}} [of|in] [the|a] {{whole}}", f"{_TELL} the {{o}} {{unit}} [of|in] the {{whole}}", "the {o} {unit} [of|in] [the|a] {whole}",
        "[which|what] {unit} is [the {o}|the {o} one|number {n}] [of|in] the {whole}", "[which|what] {unit} has the number {n}", "{unit} number {n} [is|] [what|which|]",
        "[which|what] {unit} [comes|is] {o} in the {whole}", "[month|calendar|date]: {n}, [which|what] is its name" if unit == "month" else "{unit} {n}: [its|the] name",
        "[what|how] is {unit} [number|no|] {n} [of the {whole}|of a {whole}|] [called|named]", "{unit} {n}[, its name|: what is it called|, which one is it| is called what|: which one| has which name| is which {unit}| of the {whole}]",
        "[the|a] number {n} [stands for|means|is] [which|what] {unit}[ in a date| of the {whole}|]", "if [January|the month January] is [number|] 1, [what|which|which month] is [number|] {n}" if unit == "month" else "if Monday is [number|] 1, [what|which day] is [number|] {n}",
        "number {n} [among|of|in|in the list of|in the row of] the {unit}s [is|is which|is what|is called|has what name]", "[which|what] [one|name|{unit}] [is|has|comes at|do you find at] [place|position|number|rank] {n} [of|among|in] the {unit}s", "[which|what] is {unit} {n}", "the {n}[th|.] {unit}" if index > 2 else "the {o} {unit}", "with [which|what] {unit} [begins|starts] the {whole}" if index == 0 else "the {o} {unit}",
        ),
        ("the {o} {unit} [of|in] [the|a|every] {whole}", "{unit} number {n} [of|in|] [the {whole}|]", "the {unit} that [comes|is] {o} in [the|a] {whole}", "the name of the {o} {unit}",),
        f"the {unit}s of the {whole}", ("the {o} one", "number {n}", "which is [the|] {o}",),
        o=_ORDER[index] if rng.random() < 0.8 or index else rng.choice(("first", "very first")),
        n=index + 1, unit=unit, whole=whole,
    )  # fmt: skip
    return text, f"The {_ORDER[index]} {unit} of the {whole} is {row[index]}."


def _lengths(rng: Random) -> Question:
    small, big, count = rng.choice((("days", "week", 7), ("months", "year", 12)))
    text = _asked(
        rng,
        (
        "how many {small} [are|are there|do you find|do I count|go] in [a|the|one|every|each] {big}", "how many {small} [does|has] [a|the|one] {big} [have|]",
        "[a|one|the] {big} has how many {small}", f"{_TELL} [how many|the number of] {{small}} [in|of] a {{big}}", "[count|what is the number of] the {small} of [a|one] {big}",
        ),
        ("the [number|count] of {small} [in|of] [a|the|one|every] {big}", "how many {small} [a|one|the] {big} has", "a {big}'s number of {small}",),
        f"a {big}", ("the number of {small}", "how many {small} [has it|does it have|are there|make one]",),
        small=small, big=big,
    )  # fmt: skip
    return text, f"A {big} has {count} {small}."


def _all_of(rng: Random) -> Question:
    unit, row, whole = rng.choice((("days", facts.DAYS, "week"), ("months", facts.MONTHS, "year")))
    text = say(
        rng,
        "[list|name|tell me|give me|say|write|count|write down] [all|all the|the|] {unit} of [the|a] {whole}", "[list|name|tell me|say|give me] [all|every one of] the {unit}[ in order|]",
        "[what|which] are the {unit} of the {whole}", "what are [all the|the] {unit} [called|named]", "[can you|please|could you] [list|name|say|tell me] [all|all the|the] {unit} [of the {w}|]",
        unit=unit, whole=whole, w=whole,
    )  # fmt: skip
    return finish(rng, text), ", ".join(row) + "."


def calendar(rng: Random) -> Question:
    kind = rng.random()
    if kind < 0.56:
        return _neighbour(rng)
    if kind < 0.74:
        return _numbered(rng)
    if kind < 0.79:
        return _lengths(rng)
    if kind < 0.83:
        return _all_of(rng)
    month = rng.choice(facts.MONTHS)
    days = facts.MONTH_DAYS[month]
    text = _asked(
        rng,
        (
        "how many days [does|has] {m} [have|]", "how many days [are|are there|do we have|do I count|go] in {m}", "how long is {m}", "{m} has how many days",
        "the number of days [of|that {m} has in|in] {m}", f"{_TELL} how many days {{m}} has", "{m}: how many days", "how many days long is {m}",
        "[is it|are there|does it have] {x} or {y} days in {m}", "{m}: {x} or {y} days", "how many days [until|before] {m} [ends|is over]", "[what|which] is the [length|number of days] of {m}",
        "[is {m} a month|a month] with {x} or {y} days, {m}",
        ),
        ("the [number|count] of days [in|of|that make] {m}", "{m}'s [number of days|length in days]", "the length of {m} [in days|]", "how many days {m} has", "how many days there are in {m}",),
        month, ("the number of days", "how many days [has it|does it have|are there|does that month have]", "its [length|number of days]",),
        m=month, x=min(days, 30), y=31,
    )  # fmt: skip
    return text, f"{month} has {days} days."


def planet(rng: Random) -> Question:
    if rng.random() < 0.5:
        index = rng.randrange(8)
        word = facts.ORDINALS[index]
        text = _asked(
            rng,
            (
            f"{_WHAT} the {{o}} planet [from the sun|]", f"{_TELL} the {{o}} planet [from the sun|]", "[which|what] planet is [the {o}|number {n}|the {o} one] [from the sun|]",
            "the {o} planet [from the sun|]", "planet number {n}", "[which|what] planet [comes|is] {o} [when I start at the sun|from the sun|counted from the sun]",
            ),
            ("the {o} planet [from|counted from|seen from] the sun", "the {o} planet", "planet number {n} [from the sun|]", "the planet [with|that has] the number {n}",),
            "the planets", ("the {o} one", "number {n}", "the {o} [planet|one] from the sun",),
            o=word, n=index + 1,
        )  # fmt: skip
        return text, f"The {word} planet from the sun is {facts.PLANETS[index]}."
    kind, name = rng.choice(list(facts.PLANET_FACTS.items()))
    other = {"biggest": "largest", "most distant": "farthest", "smallest": "smallest"}.get(kind, kind)
    text = _asked(
        rng,
        (
        f"{_WHAT} the {{k}} planet", "[which|what] planet is [the|] {k}[ planet| one| of all|]", f"{_TELL} the {{k}} planet", "the {k} planet [is|please|]",
        "[what|which] is the {k} [planet of all|one of the planets|of the planets]", f"{_TELL} [which|what] planet is [the|] {{k}}", "the {k} planet is called",
        ),
        ("the {k} planet", "the name of the {k} planet", "the {k} [planet|one] [of all planets|of the planets|of the eight planets|in our solar system]", "the planet that is [the|] {k}",),
        "the planets", ("the {k} one", "the {k} [planet|one of them|of all]",),
        k=rng.choice((kind, kind, other)),
    )  # fmt: skip
    return text, f"The {kind} planet is {name}."


def nearest_planet(rng: Random) -> Question:
    near = rng.random() < 0.6
    text = say(
        rng,
        f"{_WHAT} the {{k}} planet [to|from] the sun" if not near else f"{_WHAT} the [closest|nearest] planet to the sun",
        "[which|what] planet is {k} the sun", "the planet {k} the sun", f"{_TELL} the planet {{k}} the sun",
        k=rng.choice(("closest to", "nearest to", "next to")) if near else rng.choice(("farthest from", "most distant from")),
    )  # fmt: skip
    return finish(
        rng, text
    ), "The first planet from the sun is Mercury." if near else "The most distant planet is Neptune."


def language(rng: Random) -> Question:
    tongue, found = rng.choice(list(facts.LANGUAGES.items()))
    index = rng.randrange(len(found))
    phrase = facts.PHRASES[index]
    text = _asked(
        rng,
        (
        "how do [you|I|they|people] say {p} in {t}", "what is {p} in {t}", "[translate|please translate|can you translate] {p} [to|into] {t}", "[say|write|give me] {p} in {t}",
        "{p} in {t}", "[what is|what's|] the {t} [word|] for {p}", f"{_TELL} the {{t}} [word|] for {{p}}", "what does {p} mean in {t}", "{t} [for|word for] {p}", "how does one say {p} in {t}",
        "{p}, but in {t}", "what would [{p}|the word {p}] be in {t}",
        ),
        ("the {t} [word|word|expression|translation|term] [for|of] {p}", "the translation of {p} [into|to] {t}", "the [word|expression] for {p} in {t}", "{p} in {t}",),
        phrase, ("the {t} [word|translation]", "[its|the] [translation|word] in {t}", "how do they say it in {t}", "in {t}",),
        p=rng.choice((phrase, phrase, f'"{phrase}"')), t=tongue,
    )  # fmt: skip
    return text, f'"{upper_first(phrase)}" in {tongue} is "{found[index]}".'


_LIST_ACTION = (
    "[list|list|name|name|tell me|give me|write|write down|say|find|mention|show me|present|recall|count up|note|type|print|produce|get me|put down|choose|select|come up with|collect|invent|propose|bring me|send me]"
    " [some |a list of |the names of |any |exactly |just |for example |no more than ||||||||]{n} [different |common |known |nice |of the ||||||]{k}"
)


def _as_list(items: tuple[str, ...]) -> str:
    return "\n".join(f"{index}. {item}" for index, item in enumerate(items, 1))


def listing(rng: Random) -> Question:
    kind, items = rng.choice(list(facts.LISTS.items()))
    count = rng.randint(2, min(len(items), 8))
    number = rng.choice((facts.NUMBER_WORDS[count], str(count)))
    if rng.random() < 0.45:
        action = say(rng, _LIST_ACTION, n=number, k=kind)
        return finish(rng, demand(rng, action)), _as_list(items[:count])
    text = say(
        rng,
        "[list|name|tell me|give me|write|write down|say|find] [me|] {n} {k}", "[give me|write|make|I need|can you make] a list of {n} {k}", "[can you|could you|please|would you please] [list|name|tell me|give me|write] {n} {k}",
        "{n} {k}[ please|, please|]", "I [want|would like|'d like|want to see|want to read] {n} {k}", "[what are|which are|tell me the names of|what would be|do you know] {n} {k}", "{k}: [list|name|give me|] {n}",
        "[I am looking for|find|choose|pick|show me|suggest|imagine] {n} {k}", "a list [of|with] {n} {k}",
        n=number, k=kind,
    )  # fmt: skip
    return finish(rng, text), _as_list(items[:count])
