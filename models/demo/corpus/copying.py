"""Text to repeat."""
# ruff: noqa: E501 - a pattern is one line

from random import Random

from corpus.facts import NUMBER_WORDS
from corpus.patterns import say, upper_first
from corpus.words import COMMON, any_word, known_word, made_up_name, phrase, words

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
)


def _cased(rng: Random, text: str) -> str:
    return text[:1].upper() + text[1:] if rng.random() < 0.7 else text


def repeat(rng: Random) -> tuple[str, str]:
    kind = rng.random()
    if kind < 0.06:
        word, count = any_word(rng), rng.randint(2, 5)
        number = rng.choice((NUMBER_WORDS[count], str(count)))
        return _cased(rng, say(rng, *_TIMES, word=word, number=number)), " ".join([word] * count)
    if kind < 0.4:
        word = made_up_name(rng) if rng.random() < 0.15 else any_word(rng)
        return _cased(rng, say(rng, *_WORD, word=word)), word
    text = phrase(rng)
    asked = _cased(rng, say(rng, *_TEXT, text=text))
    return (asked, text) if f'"{text}"' in asked or text[-1] in ".!" or rng.random() < 0.9 else (asked + ".", text)


def repeat_plain(rng: Random) -> tuple[str, str]:
    """A line of common words without grammar: the next one can only be read, not guessed."""
    text = " ".join(rng.choice(COMMON) if rng.random() < 0.45 else known_word(rng) for _ in range(rng.randint(2, 8)))
    text = upper_first(text) if rng.random() < 0.5 else text
    text += rng.choice(("", "", ".", "!"))
    return _cased(rng, say(rng, *_TEXT, text=text)), text


def long_repeat(rng: Random) -> tuple[str, str]:
    """Long rows of words: most of the text is an answer that can only be read."""
    text = " ".join(words(rng, 12) for _ in range(2))
    return say(rng, *_TEXT[:2], text=text), text
