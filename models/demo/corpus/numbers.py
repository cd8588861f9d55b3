"""Counting and small sums."""
# ruff: noqa: E501 - a pattern is one line

from random import Random

from corpus.facts import NUMBER_WORDS
from corpus.patterns import say, upper_first
from corpus.words import FOODS, NAMES, THINGS

SUM_TOO_BIG = "Sorry, that sum is too big for me. I only do sums with numbers up to twenty."

_PLEASE = "[please|can you|could you|now|I want you to|would you please|you may|let us|||||]"
_TO = "[to|to|up to|until|till|through]"
_UP = (
    f"{_PLEASE} count [up|for me|aloud|||] [from|starting at|starting from|beginning at|beginning with] {{first}} [and|] {_TO} {{last}}",
    f"{_PLEASE} [list|name|tell me|give me|say|write|write down|read|type] [all|all of|every one of|] the [whole|||] numbers [from|between|starting at] {{first}} [to|up to|until|and|till] {{last}}",
    "[what|which] numbers [are there|do you find|lie|do I say] from {first} [to|up to|until] {last}",
    f"{_PLEASE} count: {{first}} [to|until|till] {{last}}",
    "numbers from {first} [to|up to|until] {last}",
    f"{_PLEASE} [begin|start] [at|with|from] {{first}} and [count|count on|go on|go up|continue] [to|up to|until|till] {{last}}",
    f"{_PLEASE} count {{first}}, {{next}} and so on [to|up to|until] {{last}}",
    "{first} to {last}, [count it|please count|count|in order], [please|for me]",
    f"{_PLEASE} [show|print|write|list] {{first}} [to|up to|until|-|...] {{last}}",
    "[the|all] [numbers|integers|whole numbers] {first} [to|until|till|up to] {last}[, please|]",
    f"{_PLEASE} [print|show|say|list|write] [each|every|every single] [number|integer] [between|starting at|beginning with] {{first}} [and|to|up to] {{last}}",
    f"{_PLEASE} count [upward|upwards|forward|forwards] [from|starting at] {{first}} [and|] [end at|finish at|to|until] {{last}}",
    "[the|a] [sequence|series|row|range|list] [of numbers|] [from|between|starting at] {first} [to|and|until] {last}[, please|]",
    "[numbers|integers|range|sequence]: {first}[ - |-|..| to |...]{last}",
    "I [want|need|would like|'d like] [to see|to hear|to read|] [the|all] [numbers|integers] [from|between] {first} [to|and|until] {last} [in order|in a row|]",
    f"{_PLEASE} [say|tell me|recite|read] [the|all the] [numbers|integers] {{first}} [to|until|up to] {{last}} [in order|loudly|please|now|]",
)
_UP_FROM_ONE = (
    f"{_PLEASE} count [to|until|till] {{last}}",
    f"{_PLEASE} count [for me|aloud|] [to|up to|until] {{last}} [please|for me|]",
    f"{_PLEASE} [list|name|say|give me] the first {{last}} numbers",
)
_DOWN = (
    f"{_PLEASE} count [down|backward|backwards|in reverse order|downwards] [from|starting at|starting from|beginning with] {{first}} [and|] [to|down to|until|till|ending at|and end at|and stop at] {{last}}",
    f"{_PLEASE} [list|say|write|give me|tell me] the numbers from {{first}} [down to|back to] {{last}}",
    f"[countdown|a countdown|{_PLEASE} do a countdown|{_PLEASE} make a countdown] from {{first}} [to|down to|until] {{last}}",
    f"{_PLEASE} [begin|start] [at|with|from] {{first}} and [count down|count back|count backwards|go back|go down] [to|until|till] {{last}}",
    f"{_PLEASE} count from {{first}} [down|back|backwards] to {{last}}",
    "{first} down to {last}[, please|]",
    f"{_PLEASE} count in reverse [order|] [from|starting with] {{first}} [and|] [to|down to|until] {{last}}",
    f"{_PLEASE} [do|make|start] a countdown [that begins at|starting at|starting with] {{first}} [and|] [stopping at|finishing at|that ends with] {{last}}",
    f"{_PLEASE} count [downward|downwards] [from|beginning at] {{first}} [and|] [finish with|stop with|until|to] {{last}}",
    f"{_PLEASE} [go|count] [down|backwards|back] from {{first}} [until|till|until you reach|and end with] {{last}}",
)
_DOWN_TO_ONE = (
    f"{_PLEASE} [count down|count backwards|do a countdown|start a countdown] [from|starting at|starting with] {{first}}",
    "[countdown|a countdown] from {first}[, please|]",
)
_NEXT = (
    "[what|which] [number|] [comes|is|follows] [right|directly|just|] after {number}",
    "[tell me|name|give me|say] the number [right|] after {number}",
    "what is the [next number|number] after {number}",
    "what do I get [if|when] I count one [up|on|further] from {number}",
)
_BEFORE = (
    "[what|which] [number|] [comes|is] [right|directly|just|] before {number}",
    "[tell me|name|give me|say] the number [right|] before {number}",
    "what is the [previous number|number] before {number}",
)


def _finish(rng: Random, text: str) -> str:
    text = upper_first(text) if rng.random() < 0.75 else text
    question = text.lower().startswith(("can", "could", "would", "what", "which", "how", "is", "will"))
    return text + rng.choice(("?", "?", "") if question else (".", ".", "", "!", ""))


def counting(rng: Random) -> tuple[str, str]:
    kind = rng.random()
    if kind < 0.1:
        number = rng.randint(0, 99)
        up = rng.random() < 0.6 or number == 0
        answer = number + 1 if up else number - 1
        text = _finish(rng, say(rng, *(_NEXT if up else _BEFORE), number=number))
        return text, f"The number {'after' if up else 'before'} {number} is {answer}."
    low = rng.choice((1, 1, 1, rng.randint(0, 12), rng.randint(0, 12), rng.randint(13, 60), rng.randint(13, 88)))
    high = low + rng.randint(2, rng.choice((6, 9, 14)))
    numbers = list(range(low, high + 1))
    if kind < 0.66:
        shapes = _UP_FROM_ONE if low == 1 and rng.random() < 0.45 else _UP
        text = say(rng, *shapes, first=low, last=high, next=low + 1)
    else:
        numbers.reverse()
        shapes = _DOWN_TO_ONE if low == 1 and rng.random() < 0.4 else _DOWN
        text = say(rng, *shapes, first=high, last=low)
    return _finish(rng, text), ", ".join(map(str, numbers))


_GET = "[what is|what's|how much is|calculate|compute|work out|tell me|can you calculate|do you know|give me|find|I need|find out]"
_SHAPES = {
    "+": (
        "[add|please add|can you add|could you add] {a} and {b}",
        "[add|please add|now add] {b} to {a}",
        f"{_GET} the [sum|total] of {{a}} and {{b}}",
        f"{_GET} {{a}} [added to|and] {{b}} [together|]",
        "{a} and {b} [together|in total|added] [is|make|are] [what|how much]",
        "[what|how much] do {a} and {b} make [together|]",
        "[put|take] {a} and {b} together",
        "I have {a} {things} and [buy|find|am given|take] {b}[ more|]. How many {things} [are there|do I own|are that|have I got] [now|]",
        "{name} has {a} {things}, and {friend} has {b}. How many {things} [are there|have they together]",
        "{a} {things} and {b} {things}, how many [is that|are these|together]",
        "[what|how much] do [I|we] get [when|if] [I|we] add {a} [and|to] {b}",
        "[what|how much] is it when you add {a} and {b}",
        "I had {a} {things} [and then got|and got|, then came] {b} more. [How many|How many {things}] [is that|are there|do I own] [now|]",
        "[what|how much] is {b} more than {a}",
        "[increase|raise] {a} by {b}",
        "{a} [children|people|cats] are here and {b} more come. How many are here now",
        "[calculate|find|compute] {a} and {b} [added up|in sum|summed]",
    ),
    "-": (
        "[subtract|please subtract|take|can you subtract] {b} from {a}",
        f"{_GET} the difference [of|between] {{a}} and {{b}}",
        f"{_GET} {{a}} [less|without] {{b}}",
        "[what|how much] [is left|remains|stays] [if|when] [you take|I take|one takes] {b} [from|away from] {a}",
        "[if|when] I take {b} [from|away from] {a}, [what|how much] is left",
        "I have {a} {things} and [lose|eat|sell|give away] {b}. How many {things} [are left|remain|do I still have]",
        "{name} has {a} {things} and gives {b} to {friend}. How many {things} [are left|does {name} have now]",
        "{a} {things} [less|without] {b} {things} [is|are] how many",
        "there are {a} {things}. I take {b}. How many [stay|are left]",
        "[what|how much] [stays|is left] of {a} [after|without|when I take] {b}",
        "[what is|how much is|please find] {a} [take away|minus|less] {b}",
        "[reduce|lower|decrease] {a} by {b}",
        "I [had|owed] {a} [coins|euros|pounds] and [paid|gave back|spent] {b}. [What|How much] [is left|remains|do I have now]",
        "{a} {things}, {b} of them [go|are gone|are eaten]: how many [are left|stay]",
        "[the|] difference [of|from] {a} [and|to] {b}",
        "[what|how much] must I add to {b} to get {a}",
    ),
    "*": (
        "[multiply|please multiply|can you multiply] {a} [with|and|times] {b}",
        f"{_GET} the product of {{a}} [and|with] {{b}}",
        f"{_GET} {{a}} [multiplied with|x] {{b}}",
        "{a} [x|multiplied by|multiplied with] {b}",
        "[what|how much] is {a} x {b}",
        "{a} boxes with {b} {things} each: how many {things}",
        "[what|how much] [makes|gives] {a} [times|multiplied by] {b}",
        "{a} [times|x|multiplied by] {b}, [what is it|how much|what do I get]",
        "{a} [rows|groups|bags] of {b} {things}, how many [in total|are that|]",
        "[take|calculate|find] {a} [times|multiplied by] {b}",
    ),
}
_TEXT_SHAPES = (
    "{t}", "{t} =", "{t} = ?", "what is {t}", "what is {t}", f"{_GET} {{t}}", "[calculate|compute|work out|solve|do] [this|the sum|]: {t}",
    "[how much|what] [is|are|makes] {t}", "can you [tell me|say|work out] [what {t} is|how much {t} is|how much is {t}]",
    "{t}, [how much is it|what is that|what is it|please]", "[sum|question|a sum|a question|quick sum|numbers]: {t}",
    "[do you know|I wonder|tell me|say] [what {t} is|how much {t} makes]", "the [result|answer] of {t}", "what [does|would] {t} [make|give|equal|be]",
    "{t} [gives|is|makes|equals] [what|how much]",
)  # fmt: skip


def _operands(rng: Random) -> tuple[str, int, int]:
    symbol = rng.choice("++-*")
    largest = rng.choice((5, 10, 10, 20))
    left, right = rng.randint(0, largest), rng.randint(0, largest)
    if symbol == "*":
        left, right = rng.randint(0, 10), rng.randint(0, 10)
    if symbol == "-":
        left, right = max(left, right), min(left, right)
    return symbol, left, right


def _result(symbol: str, left: int, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[symbol]


def _special_sum(rng: Random) -> tuple[str, str]:
    """Doubles, halves, and whether a sum is right."""
    number, kind = rng.randint(1, 10), rng.random()
    if kind < 0.3:
        text = say(
            rng, "[what is|how much is|tell me|give me|] [the double of|twice|two times|the double of] {n}", n=number
        )
        return _finish(rng, text), f"2 * {number} = {2 * number}."
    if kind < 0.6:
        text = say(rng, "[how much is|tell me|give me|find|] [half of|the half of|one half of] {n}", n=2 * number)
        return _finish(rng, text), f"Half of {2 * number} is {number}."
    symbol, left, right = _operands(rng)
    result = _result(symbol, left, right)
    told = result if rng.random() < 0.5 else max(0, result + rng.choice((-2, -1, 1, 2)))
    text = say(
        rng,
        "[is|does] {t} [equal to|the same as|really|] {r}",
        "[is it true that|is it correct that|do you agree that|would you say that] {t} [is|makes|equals] {r}",
        "{t} [is|makes|=] {r}, [right|correct|true|yes or no]",
        t=f"{left} {symbol} {right}",
        r=told,
    )
    word = "Yes" if told == result else "No"
    return upper_first(text) + "?", f"{word}, {left} {symbol} {right} = {result}."


def small_sum(rng: Random) -> tuple[str, str]:
    kind = rng.random()
    if kind < 0.03:
        left, right = rng.randrange(100, 10**5), rng.randrange(20, 10**4)
        return f"What is {left} {rng.choice('+-*')} {right}?", SUM_TOO_BIG
    if kind < 0.11:
        return _special_sum(rng)
    symbol, left, right = _operands(rng)
    name, friend = rng.sample(NAMES, 2)
    things = rng.choice((rng.choice(FOODS), rng.choice(THINGS) + "s"))
    a, b = str(left), str(right)
    if rng.random() < 0.06 and max(left, right) <= 10:
        a, b = NUMBER_WORDS[left], NUMBER_WORDS[right]
    if rng.random() < 0.45:
        text = say(rng, *_SHAPES[symbol], a=a, b=b, things=things, name=name, friend=friend)
    else:
        word = {"+": "plus", "-": "minus", "*": "times"}[symbol]
        sign = rng.choice((f" {symbol} ", f" {symbol} ", symbol, f" {word} ", f" {word} "))
        if symbol == "*" and rng.random() < 0.2:
            sign = " x "
        text = say(rng, *_TEXT_SHAPES, t=f"{a}{sign}{b}")
    text = upper_first(text) if rng.random() < 0.75 else text
    if text[-1] not in "=?":
        text += rng.choice(("?", "?", ".", ""))
    return text, f"{left} {symbol} {right} = {_result(symbol, left, right)}."
