"""Something that the user says about himself, and the question about it some turns later."""
# ruff: noqa: E501 - a pattern is one line

from dataclasses import dataclass
from random import Random

from corpus.frames import ask_for
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
    nouns: tuple[str, ...]
    """Noun phrases for what to remember, for the frames of questions."""
    clauses: tuple[str, ...] = ()
    """Indirect questions for it: "what I am called"."""


_GREETING = "[hello|hi|hey|good morning|good evening|good afternoon|greetings|hi there|hello there|hey there|howdy|good day|ok|well|so|yes|right|first of all|to begin|for the record|for your information|fyi|by the way|oh|listen|welcome|thanks|nice to meet you|pleased to meet you|nice to see you|for a start|for your notes]"
_INTRODUCE = "[my name is|my name's|I am|I'm|I am|I'm|the name is|it is|it's|this is|here is|here's|call me|you can call me|please call me|just call me|you may call me|they call me|people call me|my friend calls me|my mother calls me|my colleagues call me|at home they call me|at work I am called|I am called|I'm called|I am named|I go by the name of|I am known as|I'm known as|people know me as|you may know me as|my first name is|my full name is|my real name is|my given name is|my nickname is|I was named|I was born as|my father named me|my family calls me|they gave me the name|I got the name|I have the name|I carry the name|I bear the name|I use the name|I listen to the name|I sign my letters with|my passport says|my card says|my shirt says|on my door stands|my name tag says|on my card you can read|the sign on my desk says|the name on my bag is|the user is|the user is called|the user's name is|the one who writes is|the person at the keyboard is|the one in front of you is|the one who asks is|you speak to|you write to|you chat with|you're chatting with|you are dealing with|you have met|on the line is|speaking is|writing is|I'd like to introduce myself as|let me introduce myself, I am|allow me to introduce myself:|remember the name|please remember that I am|keep in mind that I am|don't forget that my name is|please note: I am|save my name:|name:|user:|username:|my user name is|from now on I am|today I am|from now on call me|I would like to be called|I want to be called|I prefer to be called|I prefer the name|I like to be called|everybody calls me|my name happens to be|my name used to be and still is|they named me|I changed my name to|I present myself: |as a name I have|by name I am|my name, if you want to know, is|my name, by the way, is|I should say that I am|I have to say that my name is|you should know that I am|you should know that they call me|I'm the famous|I am a person called|I am somebody named|a person called|if you ask for my name, it is|when people call me they shout]"
_AFTERWARDS = "[.|.|.|!|!||||||, nice to meet you|, how are you?|, pleased to meet you|. How are you?|, and you?|, and who are you?|, by the way|, ok?|, remember that|. Please remember it|, in case you wonder|. I am new here|. I need some help|. Can you help me?|, hello|. Hello|. Let us talk|. I have some questions|, a new user|, your friend|. That is my name|, that's my name| and I am happy to be here| and I have a question| and I like to talk|, so now you know|, for the record|. Nice day, isn't it?]"
_NAME_SAID = (
    f"{_INTRODUCE} {{v}}{_AFTERWARDS}",
    f"{_INTRODUCE} {{v}}{_AFTERWARDS}",
    f"{_INTRODUCE} {{v}}{_AFTERWARDS}",
    f"{_GREETING}[,|!|.|:|, and| -] {_INTRODUCE} {{v}}{_AFTERWARDS}",
    f"{_GREETING}[,|!|.|, and| -] {_INTRODUCE} {{v}}{_AFTERWARDS}",
    f"[{_GREETING}{{c}}|] {{v}} [speaking|is the name|is who I am|at your service|writing|is how people call me|it is|, that is me|, that's my name|is what you can call me|is talking to you|is back|says hello|wants to talk to you|has a question|is what my friends say|is on the line]{_AFTERWARDS}",
    f"{_INTRODUCE} {{v}}{_AFTERWARDS}",
)
_NAME = Thing(
    said=(
        *_NAME_SAID * 4,
        "my name is {v}[.|!|]", "my name's {v}", "[hello|hi|hey|good morning|good evening|ok]{c} [my name is|I am|I'm|my name's|this is|it's] {v}[.|!|]", "I am [called|named] {v}[.|]",
        "I'm {v}[.|!|, hello|, and who are you?|]", "I am {v}", "[please|you may|you can|just|everybody may] call me {v}[.|, please|]", "the name is {v}", "{v} is [what they call me|what people call me|how I am called]",
        "[they|people|friends|my parents|all] [call|named|name] me {v}[.|]", "[here is|this is|it is] {v}[, hello|, hi|.|]", "[you speak|you are speaking|you chat] with {v}[.|]", "my first name is {v}",
        "[remember|note|know|please remember|do not forget|don't forget][:| that|] [my name is|I am called|I am] {v}", "I go by the name [of|] {v}", "[I want to introduce myself|may I introduce myself|to introduce myself]: [I am|my name is|] {v}",
        "name: {v}", "[a|some] {a} person named {v} [is here|writes to you]", "I sign as {v}", "[Mr|Mrs|Ms|Dr] {v} [here|is my name|is writing]", "it says {v} on my [badge|passport|door]",
    ),
    nouns=("my name", "my name", "my [own|first|full|real|given|user|] name", "the name [that|] I [told|gave|mentioned to|said to|wrote to|sent] you", "the name of the [user|person who writes|one who is writing|person in front of you]", "the name [I have|of mine|that is mine|you know me by|you should call me by]", "my name [again|once more]", "the [user's|person's|writer's] name"),
    clauses=("who I am", "what I am called", "how I am called", "what my name [is|was]", "[what|how] to call me", "[who|whom] you [talk|speak|are talking|are speaking|are writing|chat] [to|with]", "who [writes to you|is writing to you|is talking to you|is here|sits here|sent this|is asking]", "[what|which] name I [have|told you|gave you|go by|use|mentioned]", "[what|how] [people|they|my friends|others] call me", "as whom I introduced myself"),
    acknowledged="Nice to meet you, {v}!",
    asked=(
        f"{_WHAT} my [name|first name|own name]", "[what|how] am I called", "who am I", "[do you|can you|could you|will you] [remember|recall|know|tell me|say|repeat] [my name|what my name is|what my name was|who I am|how I am called|what I am called]",
        "[by|under|with] [what|which] name [am I known|do you know me|do I write|should I be called|did I come here|did I introduce myself]", "[what|which] name [belongs to me|is mine|is my own|did I use|do I use|do I go by|was given to me|did you note for me|stands for me]", "[who|what] [did I say I am|am I to you|am I again|was I again|do you think I am]",
        "what [was|is] the name [again|that I said|of the user|of me|at the start|at the beginning]", "[my|the] name[, please|?|: do you have it|, again|, do you still have it|, quickly|...]", "[what|how] [should|do|must|will|would|shall|could|can] [you|I|we|one|people|they] [call|name|address|greet] me", "[you know|you remember|you noted|I told you|I gave you] my name, [right|don't you|didn't I|or not]? [What is it|Say it|Tell me|Which one]",
        "[greet|address|call|name] me [with|by] my name", "[who|which person|which user] [is this|is here|is typing|asks you this|is in front of you|is it that writes]", "[someone|my boss|a friend] asks [who I am|what I am called|for my name]. [What do you say|What is it|Tell them]",
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
_NOTE = "[|||||||||[remember|note|please note|keep in mind|do not forget|know|please remember|you should know|I want you to know|let me tell you|I tell you|by the way|just so you know it|for later|hello|hi|listen|for your notes|write down|one fact|a fact|fyi|so][:|,|:| that]]"
_RELATIVE = Thing(
    said=(
        f"{_NOTE} my {{r}} [is|is called|is named|has the name|goes by the name|listens to the name|got the name|was named|was called|carries the name|answers to] {{v}}", f"{_NOTE} the [name|first name] of my {{r}} is {{v}}", f"{_NOTE} [at home|here|in our house] lives my {{r}} {{v}}",
        f"{_NOTE} [I have|there is|I live with|I love|I am here with|meet|this is] my {{r}} {{v}}", f"{_NOTE} I [have|own|got] [a|one] {{r}} [and|, and] [the name is|we call it|it is called|the name's] {{v}}", f"{_NOTE} {{v}} is [the name of my {{r}}|my {{r}}|what we call my {{r}}]",
        "my {r} is [called|named] {v}[.|]", "my {r}'s name is {v}", "the name of my {r} is {v}", "I have a {r} [called|named|with the name|whose name is] {v}",
        "[we|I|people|all] call my {r} {v}", "my {r} goes by {v}", "[remember|note]: my {r} is [called|named|] {v}",
    ),
    nouns=("my {r}'s name", "my {r}'s name", "the name of my {r}", "the [name|first name] that my {r} has", "my {r}'s [first|own|given] name", "the name I told you of my {r}"),
    clauses=("[what|how] my {r} is [called|named]", "[what|which] name my {r} has", "[what|how] [I|we|people] call my {r}", "who my {r} is"),
    acknowledged="Your {r} is called {v}. I will remember it.",
    asked=(
        f"{_WHAT} my {{r}}'s name", f"{_WHAT} the name of my {{r}}", "[what|how] is my {r} [called|named]", "[what|which] name [has|does] my {r} [have|]", "[what|how] do [I|we] call my {r}",
        "[do you|can you] [remember|recall|tell me|say] [the name of my {r}|what my {r} is called|how my {r} is called|my {r}'s name]", "my {r}, what was the name", "who is my {r}",
    ),
    answer="Your {r} is called {v}.",
)  # fmt: skip
_HOME = Thing(
    said=(
        f"{_NOTE} [I|we] [live|stay|work|grew up|have a house|have a flat|rent a room|spend my life|am at home|was born|was raised|sit|reside] [in|near|at] {{v}}", f"{_NOTE} [my|our] [home|town|city|home town|house|flat|place] is [in|called|near|named|] {{v}}", f"{_NOTE} I [come from|am from|moved to|call {{v}} my home, yes|am a citizen of|am writing from] {{v}}",
        "I [come from|am from|stay in|work in|was born in|am living in] {v}[.|]", "my [home|town|city|home town] is {v}", "[we|my family and I] live in {v}", "I have a [house|flat|home] in {v}", "{v} is [my home|where I live|my city]",
    ),
    nouns=("my [home|town|city|home town|place of living]", "the [city|town|place] [where I live|I come from|I am from|I told you about]", "the name of my [city|town|home town]", "my home's [city|town|place]"),
    clauses=("where I [live|come from|am from|stay|have my home]", "[in|from] [which|what] [city|town|place] I [live|come|am]"),
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
        f"{_NOTE} my [favourite|favorite|best loved|preferred|most loved|beloved] {{k}} is {{v}}", f"{_NOTE} [among|of] all {{k}}s I [like|love|prefer] {{v}} [best|most|]", f"{_NOTE} the {{k}} [I prefer|I like most|of my choice|I love|that I like more than others] is {{v}}", f"{_NOTE} I [prefer|love|adore|choose|always take] {{v}} as [a|my] {{k}}", f"{_NOTE} no {{k}} is [better than|as good as] {{v}}",
        "my [favourite|favorite|best] {k} is {v}[.|]", "[the|] {k} [that|] I [like|love] [best|most] is {v}", "{v} is my [favourite|favorite] {k}", "I like the {k} {v} [best|most]", "as for {k}, I [like|love] {v} [best|most]",
        "of all [things|{k}s] I like {v} best",
    ),
    nouns=("my [favourite|favorite|best|best loved|preferred] {k}", "the {k} [that|] I [like|love|prefer] [best|most]", "my favourite among the {k}s", "the {k} of my [choice|heart]"),
    clauses=("[what|which] {k} I [like|love|prefer|like best|love most]", "what my [favourite|favorite] {k} is"),
    acknowledged="Your favourite {k} is {v}. I will remember it.",
    asked=(
        f"{_WHAT} my [favourite|favorite|best] {{k}}", "[which|what] {k} [is my favourite|do I love|do I like|do I like most|do I prefer|do I love most|did I like best]", "[do you remember|do you know|tell me] [which|what] {k} I [like|love] [best|most|]",
        "[what|which] was my favourite {k}", "my favourite {k} is",
    ),
    answer="Your favourite {k} is {v}.",
)  # fmt: skip
_SECRETS = (
    "secret word", "password", "code", "magic word", "key", "pin", "number", "room", "room number", "table number", "id", "user id", "account", "order number", "project", "email", "address", "street", "seat",
    "team", "ticket", "secret", "code", "user name", "word", "safe code", "door code", "channel", "house number", "train", "row", "floor", "token", "phrase", "hotel", "bus", "box", "phone number", "locker", "gate", "code name", "nickname", "login", "user", "flight", "file", "group",
)  # fmt: skip
_SECRET = Thing(
    said=(
        f"{_NOTE} [the|my|our|your|today's|the new] {{k}} [is|is|is|will be|was|is now|shall be|reads|=|must be|is always|has become] {{v}}", f"{_NOTE} {{k}}[:| is| =| -] {{v}}", f"{_NOTE} [we|I] [chose|changed|set|made|picked|took] [the|our|my] {{k}} [to|as|to be|:] {{v}}", f"{_NOTE} [as|for] the {{k}} [use|take|we have|we use|I took|write] {{v}}",
        f"{_NOTE} {{v}} is [the|my|our|the new|today's] {{k}}", f"{_NOTE} [we|I] [are|am|meet|sit|wait|will be|work|stay|go to|come to|have lunch] [in|at] {{k}} {{v}}", f"{_NOTE} [the|our] [meeting|lunch|visit|party|class|dinner|talk] [is|will be|takes place] [in|at] {{k}} {{v}}",
        "[the|my|our] {k} is {v}[.|]", "[remember|note|please remember|keep in mind|do not forget|store|save] [this|the|my|that the|] {k}[:| is] {v}", "{k}: {v}", "[use|take|write down|here is] [the|my] {k} {v}", "{v} is [the|my|our] {k}",
        "we [have|use|are in|need|go to|take] {k} {v}", "I [have|use|am in|need|got] {k} {v}", "[our|the|my] [meeting|lunch|visit|party] is in {k} {v}",
    ),
    nouns=("[the|my|our] {k}", "[the|my|our] {k}", "the {k} [that|] I [told you|gave you|mentioned|wrote|use|sent]", "the [right|correct|same|very] {k}", "the {k} [again|from before|of before|from earlier]"),
    clauses=("what [the|my|our] {k} [is|was]", "[what|which] {k} I [told you|gave you|mentioned|have|use|need]", "[what|which] {k} it [is|was]"),
    acknowledged="The {k} is {v}. I will remember it.",
    asked=(
        f"{_WHAT} [the|my|our] {{k}}", "[what|which] {k} [did I tell you|did I say|is it|was it|do I have|do I use|did I give you|do we have|do we use|do we need|are we in|am I in|did I mention]", "[do you|can you|could you] [remember|recall|tell me|say|repeat] [the|my|our] {k}",
        "the {k} [was|is|please]", "[and|now] [the|my] {k}", "in [what|which] {k} [is the meeting|is it|do we sit|am I|do we meet|is the party]",
    ),
    answer="The {k} is {v}.",
)  # fmt: skip
_AGE = Thing(
    said=(f"{_NOTE} [I am|I'm|I am now|I'm already|I just turned|I turned|I became|I will soon be|my age is|at the moment I am|today I am|this year I am] {{v}} [years old|years of age|years|]", f"{_NOTE} [I have|I've] [lived|been here|been alive] [for|] {{v}} years", f"{_NOTE} I [celebrated|had|have] [my|] birthday number {{v}}", "I am {v} [years old|]", "[my age is|I have the age of|my age:] {v}", "I [turned|became|will be] {v} [today|this year|]", "[I've been alive for|I have lived for] {v} years", "I'm {v} years of age"),
    nouns=("my [age|age|age in years|own age]", "the age [I have|I told you|that I gave you|of me]", "the number of [my years|years I have lived]"),
    clauses=("how old I am", "[what|which] age I [have|am|told you]", "how many years I have"),
    acknowledged="You are {v} years old. I will remember it.",
    asked=(f"{_WHAT} my age", "[what|which] age [am I|do I have]", "how [many years|] old [am I|was I|did I say I am]", "[do you remember|do you know|tell me|say] [my age|how old I am]", "how many years [am I old|do I have]"),
    answer="You are {v} years old.",
)  # fmt: skip
_JOBS = tuple(
    "teacher doctor baker farmer painter driver cook gardener writer singer nurse pilot carpenter lawyer sailor engineer tailor butcher dentist waiter judge barber clown dancer fisherman".split()
)
_JOB = Thing(
    said=(f"{_NOTE} [I am|I'm|I have been|I became|I am employed as|I earn money as|I earn my living as|I was trained as|my wife says I am] [a|a good|a] {{v}}", f"{_NOTE} my [job|work|profession|occupation|trade] is [being|that of|] a {{v}}", f"{_NOTE} [for a living|for money|as a job|every day] I am a {{v}}", "I am a {v}", "[my job is|my work is|my profession is] [a|] {v}", "I [earn my money|am employed|have a job] as a {v}", "I'm a {v} [by profession|]", "by profession I am a {v}"),
    nouns=("my [job|work|profession|occupation|trade|business]", "the [job|work|profession|trade] [I have|I do|that I told you|that I mentioned|of mine]", "the name of my [job|profession]"),
    clauses=("what I [do|am by profession|do for a living|do all day]", "[what|which] [job|work|profession] I [have|do]", "[what|how] I earn my [money|living]"),
    acknowledged="You are a {v}. I will remember it.",
    asked=(f"{_WHAT} my [job|work|profession]", "[what|which] [job|work|profession] do I have", "what do I do [for a living|for work|]", "[what|as what] [am I by profession|do I earn my money|am I employed]", "[do you remember|tell me] [my job|what my job is]"),
    answer="You are a {v}.",
)  # fmt: skip
_LIKES = Thing(
    said=("I [like|love|eat] {v} [a lot|very much|every day|]", "I [want|need|will buy|have to buy|would like] {v}", "I [bought|lost|found|own|forgot|sold] [a|my|the] {v}"),
    nouns=("the thing [that|] I [told you about|mentioned|spoke about]",),
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


_RECALL = "[tell me|tell me|say|repeat|remind me|write|do you know|do you remember|do you still know|do you still remember|do you recall|can you tell me|can you say|can you still say|can you remember|could you repeat|could you remind me|would you tell me|did you keep in mind|did you note|did you write down|have you kept in mind|have you noted|I wonder if you know|I want to know|I forgot|I want to hear|I wonder|you know|you should know|you must know by now|are you able to say|let me hear|let me know|show me that you know|please say once more|say again|what did I say about|think back:|quick test:|a test:|back to the start:|earlier I said|I said at the start|I told you|do you have any idea|please recall|try to remember|any memory of|are you sure|tell us|can you name|please write|name]"
_AGAIN = "[||||||| again| please| now|, right| still| once more| at all|, if you remember|, please| by now| after all this|, can you]"


def _asked(rng: Random, thing: Thing, slots: dict[str, str]) -> str:
    """A question for it, composed of independent parts, or one of its own shapes."""
    kind = rng.random()
    if kind < 0.35 and thing.clauses:
        return say(rng, f"{_RECALL} [{'|'.join(thing.clauses)}]{_AGAIN}", **slots)
    if kind < 0.65:
        noun = say(rng, *thing.nouns, **slots)
        return ask_for(rng, noun) if rng.random() < 0.6 else say(rng, f"{_RECALL} {{np}}{_AGAIN}", np=noun)
    return say(rng, *thing.asked, **slots)


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
    asked = _question(rng, _asked(rng, thing, slots))
    return (said, fill(thing.acknowledged, **slots)), (asked, fill(thing.answer, **slots))


_UNKNOWN = (
    ("[what is|what's|do you know|tell me|do you remember|can you say|what was] my name|who am I|what am I called|do you know [who I am|what I am called|my name]|[say|guess] my name", "You have not told me your name."),
    ("how old am I|[what is|do you know] my age", "You have not told me your age."),
    ("where do I live|where am I from", "You have not told me where you live."),
)  # fmt: skip


def not_said(rng: Random) -> tuple[str, str]:
    """A question about something that was never said."""
    shapes, answer = rng.choice(_UNKNOWN)
    return _question(rng, say(rng, f"[{shapes}]")), answer
