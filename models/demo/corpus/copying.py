"""Text to repeat."""
# ruff: noqa: E501 - a pattern is one line

from random import Random

from corpus.facts import NUMBER_WORDS
from corpus.patterns import say, upper_first
from corpus.words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COMMON,
    EVERYDAY,
    FOODS,
    MOVES,
    NAMES,
    PLACES,
    THINGS,
    VERBS,
    any_word,
    known_word,
    made_up_name,
    made_up_word,
    phrase,
    sentence,
    words,
)

_VERB = "[say|repeat|write|echo|copy|type|print|reply with|answer with|respond with|output|tell me|give back|send back|write down|read|recite|state|voice|utter|quote|return]"
_HEAD = f"[please|can you|could you|now|would you|I want you to|you should|kindly|just|||] {_VERB}"
_TEXT = (
    f"{_HEAD} [this|the following|this text|this line|these words|the following words|the words|the text|the phrase|what I say|after me|exactly this|what comes next|my words|the next words|this message] [exactly|please|once|to me|word by word||||]: {{text}}",
    f"{_HEAD}: {{text}}",
    f'{_HEAD} [back|||] [this|exactly|the words|the text|||] "{{text}}"',
    "[Repeat after me|Repeat|Echo|Say|Copy|After me|Copy this|Your answer must be|The text is|The words to copy are|The line to say is|Here is what to say|Answer only]: {text}",
    f"{_HEAD} [these words|this text|this sentence|the next line|this] - {{text}}",
    f"{_HEAD} [what I say|the next line|the next sentence|this text]. {{text}}",
    f"[{_HEAD}|I want to hear] {{text}}",
)
_WORD = (
    f"{_HEAD} [the|this|my|the single|only the|only this|just the] [word|word|name|text|string|term]: {{word}}",
    f"{_HEAD} [the word|the name|the term|the text|just|only|] {{word}}[.|]",
    f'{_HEAD} [the word|the name|the term|] "{{word}}"[.|]',
    f"{_HEAD} [one word|a word|a name] for me: {{word}}",
    "[The word is|My word is|Only say|Only this word|A word to repeat] [:|] {word}",
    "I [say|write|type] {word}, [you say it too|now you|and you answer with the same]: {word}",
)
_TIMES = (
    "[Repeat|Write|Type|Print] [the word|] {word} {number} times[.|]",
    '[please|can you|] [say|write|repeat] [the word|] [{word}|"{word}"] {number} times[.|]',
    "{number} times [the word|] {word}[, please|.|]",
    '[please|can you|could you|I want you to|now|you should|just||] [say|write|repeat|type|print|echo|shout|copy|put down|spell out|tell me|give me|sing|output] [the word|this word|the name||] [{word}|"{word}"|"{word}"|: {word},] [exactly|||] {number} times[ in a row| please|, please| for me|.||]',
    '[please|can you|now||] [say|write|repeat|type|print|output|give me] {number} [times|copies of|x] [the word||] [{word}|"{word}"|: {word}][ please|.|]',
)


_OPENING = "[please|can you|could you|now|would you|I want you to|I'd like you to|I need you to|you should|you must|kindly|just|only|simply|next|hey,|ok,|hi,|hello!|so,|then|let's see if you can|it is your job to|your task is to|try to|be so kind and|will you|do|go ahead and|one task:|once more,|again,|for a test|as a test,||||||||]"
_COPY = "[say|say|repeat|repeat|write|write|echo|copy|type|print|reply with|answer with|respond with|output|tell me|give back|send back|write down|read|recite|state|voice|utter|quote|return|display|show|speak|pronounce|spell|duplicate|retype|rewrite|restate|write again|say again|hand back|post|put down|note down|produce|dictate|announce|shout|whisper|call out|read aloud|read out loud|transcribe|recall|render|send me|give me|let me hear|let me see|let me read|use as answer|mimic|imitate|ditto|relay|forward|replay|reiterate|chant|mouth|bounce back|feed back|play back|toss back|yell|mumble|scribble|jot down|key in|submit|present|deliver|regurgitate|shoot back|spit out|put back|return word for word|hand me|pass me|ping back|talk back|text me|write me|sing out|mail back|re-type|return to me|throw back|sing]"
_WHAT = "[this|the following|this text|this line|these words|the following words|the words|the text|the phrase|what I say|after me|exactly this|what comes next|my words|the next words|this message|this sentence|the sentence|the line below|the next line|the text below|what stands here|what I write|what I type|what comes after the colon|the input|my input|my sentence|my line|my message|the message|the quote|this quote|this phrase|what follows|the string|the content|this content|everything after the colon|the same|the same words|the same text|the lines|this one|it|that]"
_EXACTLY = "[exactly|exactly as it is|unchanged|without changes|as it is|letter by letter|once|again|to me|for me|back|back to me|and nothing else|and nothing more|only|please|now|in full|literally|precisely|without a comment|without any change|as I wrote it|one time|one to one|with no other words|and stop|if you please|to us|here|in your answer|in your own message|below|aloud|without thinking|like a recorder|like an echo|word for word|as an answer|straight back||||||||||||||]"
_MARK = "[:|:|:|:| -|...|,|.| =| >|;]"
_QUOTED = (
    '"{text}"',
    '"{text}"',
    "'{text}'",
    "“{text}”",
    "`{text}`",
    "<{text}>",
    "({text})",
    "_{text}_",
    "*{text}*",
    "«{text}»",
)
_MUST_BE = "[your answer|your reply|your response|the answer|the reply|your text|your output|the output|your whole answer|the only answer|what you say|what you write|your next message|all you say] [is|must be|shall be|has to be|should read|must read|will be|ought to be|is to be]"
_I_SAY = "[I say|I write|I type|I send|my text is|my line is|my message is|the text is|the line is|the message is|here is my text|here is a line|here is a text|here comes a line|this is the text|the words are|the sentence is|the phrase is|to repeat|to copy|to be copied|to say|for you to say|for you to repeat|text to copy|text to write|copy text|your line|your words|your text|say after me|after me|now you|now say|so write|so repeat|you say|you write]"
_THEN = "[Repeat it|Say it|Write it|Copy it|Say that|Repeat that|Now you|Your turn|Echo it|Type it|Say it again|Say the same|Write the same|Please repeat it|Please copy that|Give it back|That is what you should say|This is your answer]"
_NAMED = "[the word|the name|the term|the text|the single word|the one word|the string|this word|this name|this term|the code|my word|only the word|just the word|the following word|the letters|this string|just|only||]"


def _asked_to_copy(rng: Random, text: str) -> str:
    """A demand to repeat `text`, composed of independent parts."""
    kind = rng.random()
    if kind < 0.05:
        return _asked_in_strange_words(rng, text)
    if kind < 0.45:
        return say(rng, f"{_OPENING} {_COPY} {_WHAT} {_EXACTLY}{_MARK} {{text}}", text=text)
    if kind < 0.52:
        return say(rng, f"{_OPENING} {_COPY} {_EXACTLY}: {{text}}", text=text)
    quoted = rng.choice(_QUOTED)
    if kind < 0.7:
        close = "[|||||||.| please| please.| exactly| now| and nothing else| to me| again|, please| for me|, thanks|, that's all]"
        return say(rng, f"{_OPENING} {_COPY} [{_WHAT}||||] {_EXACTLY}[|:| -|] {quoted}{close}", text=text)
    if kind < 0.78:
        return say(rng, f"{_MUST_BE}[:|:| this:| exactly:| only:|] {{text}}", f"{_MUST_BE}[:|] {quoted}", text=text)
    if kind < 0.88:
        return say(rng, f"{_I_SAY}[:|:|:| -|,] {{text}}", f"{_I_SAY}[:|] {quoted}", text=text)
    if kind < 0.93:
        return say(
            rng, f"[{_OPENING} {_COPY} {_WHAT} {_EXACTLY}.|{_OPENING} {_COPY} {_WHAT} {_EXACTLY}:] {quoted}", text=text
        )
    return say(rng, f"{quoted}. {_THEN}[.|!|]", f"{quoted} {_THEN}.", text=text)


def _asked_in_strange_words(rng: Random, text: str) -> str:
    """A demand whose verb says nothing, so that its form must do: what comes after "this:" or "to me:" is to be copied."""
    verb = rng.choice((made_up_word(rng), rng.choice(EVERYDAY), rng.choice(MOVES), rng.choice(ANIMALS)))
    return say(
        rng,
        f"{_OPENING} {{verb}} [this|this back|back to me|it back|that|these words|the following|what I say|this text|me this|me these words|my words|after me|along with me|as I do|me back|the same] {_EXACTLY}: {{text}}",
        f"{_OPENING} {{verb}} [this|this back|back to me|it back|that|these words|the following|what I say|this text|me this|me these words|my words|after me|as I do] {_EXACTLY}[: | ]{rng.choice(_QUOTED)}",
        verb=verb,
        text=text,
    )


def _asked_for_word(rng: Random, word: str) -> str:
    kind = rng.random()
    if kind < 0.4:
        return say(rng, f"{_OPENING} {_COPY} {_NAMED}[:|:| |] {{word}}[.||]", word=word)
    if kind < 0.6:
        quoted = rng.choice(_QUOTED).replace("text", "word")
        return say(rng, f"{_OPENING} {_COPY} {_NAMED} {quoted}[.|| please| for me|, please]", word=word)
    return _asked_to_copy(rng, word)


def _cased(rng: Random, asked: str, text: str) -> str:
    """The demand with a capital letter, mostly, but not where it begins with the text to copy."""
    return upper_first(asked) if rng.random() < 0.7 and not asked.startswith(text) else asked


def repeat(rng: Random) -> tuple[str, str]:
    kind = rng.random()
    if kind < 0.08:
        word, count = any_word(rng), rng.randint(2, 5)
        number = rng.choice((NUMBER_WORDS[count], str(count)))
        return _cased(rng, say(rng, *_TIMES, word=word, number=number), word), " ".join([word] * count)
    if rng.random() < 0.6:
        if kind < 0.35:
            word = made_up_name(rng) if rng.random() < 0.2 else any_word(rng)
            return _cased(rng, _asked_for_word(rng, word), word), word
        text = _line(rng)
        return _cased(rng, _asked_to_copy(rng, text), text), text
    if kind < 0.4:
        word = made_up_name(rng) if rng.random() < 0.15 else any_word(rng)
        return _cased(rng, say(rng, *_WORD, word=word), word), word
    text = spoken(rng) if rng.random() < 0.2 else phrase(rng)
    asked = _cased(rng, say(rng, *_TEXT, text=text), text)
    return (asked, text) if f'"{text}"' in asked or text[-1] in ".!" or rng.random() < 0.9 else (asked + ".", text)


def _line(rng: Random) -> str:
    """A text to copy, of every length."""
    kind = rng.random()
    if kind < 0.38:
        return phrase(rng)
    if kind < 0.48:
        text = " ".join(any_word(rng) for _ in range(rng.randint(2, 4)))
    elif kind < 0.7:
        return spoken(rng)
    elif kind < 0.85:
        text = plain_line(rng)
    elif kind < 0.95:
        text = sentence(rng)
    else:
        text = " ".join(sentence(rng) for _ in range(2))
    text = upper_first(text) if rng.random() < 0.4 else text
    return text.upper() if rng.random() < 0.02 else text


_PEOPLE = "[I|we|you|they|he|she|my {animal}|the {animal}|our {animal}|{name}|{name}|my {kin}|your {kin}|a {adjective} {animal}|nobody|everybody]"
_KIN = tuple("mother father sister brother son daughter friend aunt uncle boss teacher neighbour".split())
_SPOKEN = (
    f"{_PEOPLE} [will|will not|can|cannot|must|may|should|would never|want to|do not|did not|might] {{move}} [here|there|again|today|tomorrow|with {{name}}|to the {{place}}|at {{time}}|in {{city}}|]",
    f"{_PEOPLE} {{verb}} [my|the|a|your|some|all the|two|no] {{thing}}[ again| today| yesterday| in the {{place}}|||]",
    f"{_PEOPLE} [will not|will|do not|cannot|never|always|want to|would like to|must|may not] [eat|drink|buy|cook|sell|taste|order|share] [the |my |any |some |more ||]{{food}}",
    "[meet|call|find|follow|tell|help|join|wait for|write to|think of|sing with] [me|us|him|her|them|{name}] [at {time}|in {city}|at the {place}|in the {place}|tomorrow|tonight|before {time}|soon|]",
    "[{everyday}|{food}|{thing}|{animal}|{everyday}] [and|or|with|without|for|is|are|in|on|by|needs|makes|loves] [{everyday}|{food}|{thing}|{animal}|{everyday}]",
    "[all|everything|nothing|the {thing}|the {food}|lunch|my {thing}|the {place}] [is|was|will be|looks|seems|stays] {adjective}[ here| now| today| again||]",
    "[{adjective}|{everyday}|{adjective} {adjective}] [{thing}|{animal}|{food}|{everyday}]",
    "[no|yes|ok|well|oh|sorry|thanks|hello|bye|good night|good morning|happy birthday|well done|please wait|come in|take care|dear] [{name}|my {kin}|{everyday}|my friend|madam|all of you|captain|doctor]",
    "[the|a] {adjective} {animal} [in|on|near|behind|under] the {place}",
    "[do not|please|never|always|first|now] [open|close|touch|forget|bring|paint|wash|sell|hide|find] the {thing}[ please| in the {place}|]",
    "[{made}|{name}|{made}] [{everyday}|{made}|is {adjective}|{move}s|and {name}|{verb} it][ {everyday}| {made}|]",
    "[{count} {animal}s|{count} {thing}s] [{verb}|and|for|in] the {place}",
    "[what|where|when|why|how|who] [is|are|was|will be|do you call|did you put|to do with] [the|my|your|a] [{thing}|{animal}|{food}|{kin}][?|]",
    "[it is|this is|that was|here is|there goes|I am] [a {adjective} {thing}|my {animal}|your {kin}|{adjective}|the {place}|{name}|time to {move}|too {adjective}]",
)
_TIMES_OF_DAY = ("six", "nine", "ten", "midnight", "sunrise", "dinner", "lunch", "five", "dawn today", "half past two", "noon sharp")  # fmt: skip


def spoken(rng: Random) -> str:
    """A short line as people say it, mostly in small letters and without a mark."""
    text = say(
        rng, *_SPOKEN, animal=rng.choice(ANIMALS), name=rng.choice(NAMES), adjective=rng.choice(ADJECTIVES), move=rng.choice(MOVES), verb=rng.choice(VERBS), thing=rng.choice(THINGS),
        food=rng.choice(FOODS), place=rng.choice(PLACES), city=rng.choice(CITIES), everyday=rng.choice(EVERYDAY), made=made_up_word(rng), kin=rng.choice(_KIN), time=rng.choice(_TIMES_OF_DAY),
        count=rng.choice(NUMBER_WORDS[2:]),
    )  # fmt: skip
    text = upper_first(text) if rng.random() < 0.25 else text
    return text + rng.choice(("", "", "", "", ".", "!")) if text[-1] != "?" else text


def plain_line(rng: Random) -> str:
    """A line of common words without grammar: the next one can only be read, not guessed."""
    tables = (COMMON, COMMON, COMMON, EVERYDAY, EVERYDAY, EVERYDAY)
    return " ".join(
        rng.choice(rng.choice(tables)) if rng.random() < 0.75 else known_word(rng) for _ in range(rng.randint(2, 8))
    )


def repeat_text(rng: Random, text: str) -> tuple[str, str]:
    """A demand to repeat a text that means something, as a question or a demand: it is to be copied, not answered."""
    kind = rng.random()
    text = text if kind < 0.5 else text.rstrip(".!?") if kind < 0.75 else text.lower().rstrip(".!?")
    shape = _asked_to_copy(rng, text) if rng.random() < 0.75 else say(rng, *_TEXT[:5], text=text)
    return _cased(rng, shape, text), text


def repeat_plain(rng: Random) -> tuple[str, str]:
    """A line of common words to copy."""
    if rng.random() < 0.35:
        text = spoken(rng)
        return _cased(rng, _asked_to_copy(rng, text), text), text
    text = plain_line(rng)
    text = upper_first(text) if rng.random() < 0.35 else text
    text += rng.choice(("", "", ".", "!"))
    asked = say(rng, *_TEXT, text=text) if rng.random() < 0.5 else _asked_to_copy(rng, text)
    return _cased(rng, asked, text), text


def long_repeat(rng: Random) -> tuple[str, str]:
    """Long rows of words: most of the text is an answer that can only be read."""
    text = " ".join(words(rng, 12) for _ in range(2))
    return say(rng, *_TEXT[:2], text=text) if rng.random() < 0.5 else _asked_to_copy(rng, text), text
