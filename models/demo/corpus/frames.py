"""Ways to ask, shared by all kinds of questions: an opening, a frame around what is asked for, and a close.

A kind gives a noun phrase ("the capital of Kenya") or a demand ("play some jazz"); the frames make thousands of wordings of it.
Some are careless English, as people type.
"""
# ruff: noqa: E501 - a pattern is one line

from random import Random

from corpus.patterns import say, upper_first
from corpus.words import MOVES, VERBS, made_up_word, sentence

_ASKER = "[my [son|daughter|boss|teacher|friend|wife|husband|neighbour|class|mother]|the [quiz|teacher|form|children|test|paper]|somebody|someone|a [friend|child|guest|colleague]|everybody here]"
_POLITE = "[please|could you|can you|would you|will you|kindly|can you please|could you please|I want you to|I'd like you to|I need you to|go ahead and|just|now|you may|you should||||||]"
_GIVE = "[tell me|tell me|give me|give me|show me|remind me of|teach me|write|type|name|say|state|mention|find|look up|find out|work out|get|get me|send me|report|read me|share|pick|recall|guess|let me have|let me see|let me hear|help me with|tell us|give us|write me|print|spell out]"
_NOUN_FRAMES = (
    "[what is|what's|whats|what was|which is|what might be|what could be|what exactly is] {np}",
    "[what is|what's|whats|what is|tell me|give me] {np}",
    "{np}",
    "{np} [is what|is which|is called what|= ?|equals what|would be|is|must be what|- what is it|: what is it|, what's that|, do you know it|, can you tell me|, any idea|, tell me|, please say]",
    "what [would|might|could|should|will|may] {np} be",
    "[what|how] [do|would|should] [you|we|I|they|people] call {np}",
    f"{_POLITE} {_GIVE} {{np}}",
    f"{_POLITE} {_GIVE} {{np}}",
    "[I|we] [need|want|would like|'d like|want to know|wish to know|would like to know|must know|need to know|have to know|am looking for|am after|forgot|can't recall|do not remember|don't remember|try to remember|cannot find|was asked for|have to write down|should know|am curious about|keep forgetting|have no idea of|require|want to hear|want to learn|have forgotten] {np}",
    "[do you|would you|does anybody|could you|can you|surely you|did you ever|do you by chance] [know|remember|recall|still know|have|name|say|tell me|guess|find] {np}",
    "[I wonder|I'm wondering|I ask myself|I'm curious|tell me|tell us|explain to me|let me know|remind me|do you know|can you say|can you tell|I'm not sure|I never remember|help me remember|say|any idea|any clue|have you any idea|guess|please find out|find out|show me|I'd love to hear|who knows|could you tell me|could you say] [what|what|which one] {np} [is|is|is|might be|could be|is called|was]",
    f"{_ASKER} [asks|asked|wants to know|wanted|would like to know|needs|is asking|is looking for|should know] [for|about|] {{np}}",
    "[quiz|question|riddle|trivia|test|homework|task|exam|exercise|next question|first question|question one|puzzle|general knowledge|easy question|hard question][:|:|,| -|.] {np}",
    "[finish|fill in|end|continue|go on with] [this|this sentence|the following|my sentence|the line|the phrase|what I say][:|,| -] {np} is[ ...| ___|]",
    "is {np} [known to you|something you know|easy to say]",
    "[what I need|all I want|what I am looking for|the thing I want to know|my question|the question|here is what I want] [is|:] {np}",
    "[this is about|we talk about|concerning|regarding|as for|on the subject of] {np}[: what is it|. What is it|, what is it|. Tell me|]",
)  # fmt: skip
_TOPIC_FRAMES = (
    "{topic}[:|,| -|...|?|.|;] [what is|what's|tell me|give me|name|say|which is||||] {part}",
    "[about|for|regarding|as for|speaking of|take|consider|look at|think about|think of|let's talk about|now|next|imagine|given|we have|you see] {topic}[,|:|.|;| -] [what is|what's|tell me|name|give me|say|which is|do you know|I need|can you name|and now] {part}",
    "I [read|learn|heard|know little|am writing|have a text|saw a film|have to talk|was thinking|must write|like to hear] about {topic}[.|,|:] [What is|What's|Tell me|Give me|Name|Do you know|I need] {part}",
    "[tell me|give me|name|say|what is|what's] {part}[:|,|. It is about|. I mean|, I mean|, for|. The word is|. I think of|, thinking of] {topic}",
    "{part}, [it is about|I mean|for|I think of] {topic}",
)  # fmt: skip
_BUSY = "[I am|I'm|we are|my son is|our class is|my friend is|a student is|my daughter is|she is|he is|they are] [writing|reading|preparing|planning|finishing|learning from|working on|busy with|studying for|collecting notes for|looking through|helping with|stuck with|checking|correcting|making] [a|an old|my|our|the|this|a new|some] [talk|essay|report|poster|book|text|lesson|chapter|exam|film|quiz|story|article|page|paper|project|test|card|speech|letter|game|list]"
_ABOUT = "[about|on|for|of|concerning|that deals with|with a part about|with a page on]"
_REMARKS = (
    f"{_BUSY} {_ABOUT} {{topic}}",
    f"{_BUSY} {_ABOUT} {{topic}}",
    "[today|tonight|this week|at school|in class|at work|at home|last night|yesterday|on the train] [I|we|they|the children|our teacher|my mother|the guests] [spoke of|read of|talked about|heard of|thought of|had to explain|came across|looked at|heard something about|had a question about|argued about|learnt about] {topic}",
    "[my|our|the|her|his|their] [subject|topic|theme|text|talk|lesson|quiz|next page|question|exam|project|card|chapter|essay] [is|is about|will be|deals with|today is|for today is|now is] {topic}",
    "[I|we] [like|love|study|want to understand|collect facts about|must know all about|know nothing about|am asked about|often hear of|have to draw|dream of] {topic}",
    "{topic} [is|was] [our|my|the|today's|her] [subject|topic|theme|next question|lesson|example|homework]",
)
_OPENINGS = "[hey|hi|hello|ok|okay|so|well|now|and|please|right|alright|good|hm|um|oh|then|next|first|also|again|finally|quick question|one more thing|a question|here is one|let me ask you this|another one|question for you|just checking|help me out|tell me this|try this one|listen|by the way|one question|for a test|for school|for my notes|I have a question|I am curious|I wonder|be quick|my friend|dear model|hi there|hello there|excuse me|sorry|thanks|thank you|good morning|let us go on|this is easy|an easy one|a hard one|to begin with|say|look|maybe you know this|if you can|last question]"
_CLOSINGS = "[please|please|thanks|thank you|if you can|if you know|for me|right now|now|can you|would you|I forgot|I do not remember|it is for a quiz|just the answer|be brief|my friend|again|quickly|ok|you know|in short|I need it|as fast as you can|let me know|any idea|go|I am waiting|that's all|dear model|right|hm|tell me|say it]"
_DEMANDS = "[please|kindly|can you|could you|would you|will you|can you please|could you please|I want you to|I'd like you to|I need you to|I would like you to|you should|you must|you may|go ahead and|now|next|just|quickly|let's|let us|do me a favour and|be so kind and|it is time to|do not forget to|try to|we need to|I must|help me to|your task is to|I ask you to|would you mind: |why don't you|you can|||||||]"
_SHORT = (
    ("what is", "what's"), ("What is", "What's"), ("what is", "whats"), ("What is", "Whats"), ("I am ", "I'm "), ("I would ", "I'd "), ("do not", "don't"), ("cannot", "can't"),
    ("Who is", "Who's"), ("who is", "who's"), ("that is", "that's"), ("How is", "How's"), ("it is", "it's"), ("you are", "you're"), ("I have ", "I've "), ("let us", "let's"),
    ("What's", "What is"), ("I'd like", "I would like"), ("don't", "do not"), ("please", "pls"), ("you ", "u "), ("Can you", "Could you"), ("Tell me", "tell me"), ("?", " ?"),
)  # fmt: skip
_DROPPED = frozenset("the a an is of me you do does it please that to".split())


def ask_for(rng: Random, noun: str) -> str:
    """A question for what the noun phrase names, without its last mark."""
    return say(rng, *_NOUN_FRAMES, np=noun)


def ask_about(rng: Random, topic: str, part: str) -> str:
    """A question that names its topic first, or says it again: "Kenya: what is its capital"."""
    if rng.random() < 0.4:
        return _remarked(rng, topic, part)
    return say(rng, *_TOPIC_FRAMES, topic=topic, part=part)


def _remarked(rng: Random, topic: str, part: str) -> str:
    """A remark about the topic as a sentence of its own, then the question: the remark is not to be answered or remembered."""
    remark = upper_first(say(rng, *_REMARKS, topic=topic))
    ask = "[what is|what's|tell me|give me|name|say|which is|do you know|I need|can you name|please name|please tell me|so what is|now what is|and what is|I forgot|remind me of|I have to write down|could you give me|they ask for|]"
    question = say(rng, f"{ask} {{part}}", part=part)
    mark = rng.choice((".", ".", ".", "!", ";", ",", " -", " and"))
    return f"{remark}{mark} {upper_first(question) if mark in '.!' and rng.random() < 0.85 else question}"


def demand(rng: Random, action: str, *, may_close: bool = True) -> str:
    """A demand to do something. `may_close` is false where the action ends with a text that must stay as it is."""
    text = say(rng, f"{_DEMANDS} {{action}}", action=action)
    if may_close and rng.random() < 0.15:
        text += rng.choice(
            (
                ", please",
                " please",
                " for me",
                " now",
                ", thanks",
                ", will you",
                ", would you",
                " right away",
                " at once",
                ", ok",
            )
        )
    return text


def finish(rng: Random, text: str) -> str:
    """The text with a capital letter and a mark, mostly."""
    text = upper_first(text) if rng.random() < 0.8 else text
    return text if text[-1] in ".?!:=_" else text + rng.choice(("?", "?", "?", "", ".", "!"))


def opened(rng: Random, text: str, *, is_kept: bool = False) -> str:
    """The text after an opening: a word, a remark, or a sentence that has nothing to do with it. `is_kept`: its letters stay as they are."""
    if rng.random() < 0.15:
        return f"{sentence(rng)} {text}"
    opening = say(rng, _OPENINGS)
    if rng.random() < 0.7:
        opening = upper_first(opening)
    mark = rng.choice((",", ",", ":", ".", "!", "", " -", "..."))
    if not is_kept and mark not in (".", "!") and rng.random() < 0.7 and not text.startswith(("I ", "I'")):
        text = text[:1].lower() + text[1:]
    return f"{opening}{mark} {text}"


def closed(rng: Random, text: str) -> str:
    """The text with a close after it."""
    closing = say(rng, _CLOSINGS)
    if rng.random() < 0.5:
        return f"{text.rstrip('.?!')}{rng.choice((', ', ' ', ', '))}{closing}{rng.choice(('?', '', '.', '!'))}"
    return f"{text}{'' if text[-1] in '.?!' else '.'} {upper_first(closing)}{rng.choice(('.', '!', '', '?'))}"


def _without_a_word(rng: Random, text: str) -> str:
    found = text.split(" ")
    small = [index for index, word in enumerate(found) if word.lower() in _DROPPED]
    if not small or len(found) < 4:
        return text
    del found[rng.choice(small)]
    return " ".join(found)


def _with_a_word(rng: Random, text: str) -> str:
    """One more word that means nothing here: unknown words are to be passed over."""
    found = text.split(" ")
    word = made_up_word(rng) if rng.random() < 0.6 else rng.choice(rng.choice((MOVES, VERBS)))
    found.insert(rng.randint(0, len(found) - 1), word)
    return " ".join(found)


def vary(rng: Random, question: str) -> str:
    """The question as a person may type it. Only for questions whose letters and marks do not belong to the answer."""
    if rng.random() < 0.45:
        return question
    for long, short in rng.sample(_SHORT, 8):
        if rng.random() < 0.25:
            question = question.replace(long, short, 1)
    if rng.random() < 0.08:
        question = _without_a_word(rng, question)
    if rng.random() < 0.08:
        question = _with_a_word(rng, question)
    if rng.random() < 0.3:
        question = opened(rng, question)
    if rng.random() < 0.16:
        question = closed(rng, question)
    if rng.random() < 0.2:
        question = question.rstrip(".?! ") + rng.choice(("", "", "?", ".", "!", "??", "...", " ?", "?!"))
    if rng.random() < 0.16:
        return question.lower()
    return question.upper() if rng.random() < 0.015 else question
