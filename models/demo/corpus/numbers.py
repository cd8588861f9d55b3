"""Counting and small sums."""
# ruff: noqa: E501 - a pattern is one line

from random import Random

from corpus.facts import NUMBER_WORDS
from corpus.frames import ask_about, ask_for, demand
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
    f"{_PLEASE} [count|count up|list the numbers|say the numbers|keep counting|go on counting|count aloud|do some counting] [to|up to|until|till|as far as|until you reach|all the way to] {{last}}[, please| for me| now| slowly||||]",
    "[show me|prove|let me see|I want to see|I bet] [that|] you can count to {last}",
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


_NUMBERS = "[the numbers|the numbers|numbers|all numbers|all the numbers|each number|every one of the numbers|the integers|all integers|whole numbers|the whole numbers|all of the numbers|the row of numbers|a list of the numbers|a list of numbers|a row of numbers|the sequence|the series|the number sequence|the range]"
_SHOW = "[count|count|count|count|list|name|tell me|give me|say|write|write down|read|type|show|show me|recite|display|output|produce|put down|speak|read out|call out|get me|send me|list up|spell out|run through|go through|generate|make|let me hear|let me see|return|number off]"
_RANGE_UP = (
    "[from|from|from|starting at|starting from|starting with|beginning at|beginning with|that start at|that begin with|going from|running from] {first} [to|to|to|up to|until|till|through|and ending at|and ending with|and stopping at|and finishing at|and going to|upwards to|all the way to|on to|and up to|to the number|as far as|, ending with|, stopping at] {last}",
    "between {first} and {last}",
    "{first} [to|up to|until|till|through|and on to|upwards to] {last}",
    "{first}[-| - |..|...| .. | ... | to | -> ]{last}",
    "[from|starting at] number {first} [to|until|up to] number {last}",
    "[from|beginning at] {first}, [ending|stopping|finishing] [at|with|when you reach|on] {last}",
    "[up|upwards|forwards|ascending] from {first} [to|until|till|and stop at|and end with] {last}",
    "[with first number|start:|first:] {first}[,| and] [last number|end:|last:] {last}",
)
_RANGE_DOWN = (
    "[down|backwards|backward|downwards|in reverse|in reverse order|back|descending|in descending order|the other way round] [from|from|starting at|starting from|starting with|beginning at|beginning with] {first} [to|to|down to|until|till|and ending at|and ending with|and stopping at|all the way to|back to|, ending at|, stopping with|and stop at|and finish at] {last}",
    "from {first} [down to|back to|backwards to|downwards to|down until|in reverse to|back until|descending to] {last}",
    "[starting|beginning] [at|with|from] {first} and [going|counting] [down|back|backwards] [to|until|till] {last}",
    "{first} [down to|back to|backwards to|downwards to|descending to] {last}",
)
_RANGE_CLOSE = "[inclusive|in order|aloud|one by one|please|in a row|for me|with commas|slowly|and then stop|, no more|, that is all|out loud|, both included|step by step|, thank you|all of them|go|||||||||||||||||||]"
_START = (
    "[start|begin|begin counting|start counting|take|say|name|write|go|open|set off] [at|with|from|with the number]"
)
_ONWARDS = "[count|count on|go on|go up|continue|carry on|count up|keep going|keep on|go forward|move up|proceed] [to|to|until|till|up to|until you reach|until you are at]"
_BACKWARDS = "[count down|count back|count backwards|go back|go down|descend|step down|count in reverse|keep going down|move down] [to|to|until|till|until you reach|until you are at]"


def _range(rng: Random, first: int, last: int) -> str:
    """A demand for the numbers from `first` to `last`, composed of independent parts."""
    is_up, kind = first < last, rng.random()
    if kind < 0.16:
        onwards = _ONWARDS if is_up else _BACKWARDS
        action = say(
            rng, f"{_START} {{first}}[ and| and|, then|, and then|. Then|;] {onwards} {{last}}", first=first, last=last
        )
    else:
        span = say(rng, *(_RANGE_UP if is_up else _RANGE_DOWN), first=first, last=last)
        head = (
            _SHOW
            if kind < 0.3
            else f"{_SHOW} {_NUMBERS}"
            if kind < 0.75
            else _NUMBERS
            if kind < 0.85
            else "[counting|count|numbers|range|the count|a count|sequence]"
        )
        if kind > 0.92:
            head = "[I|we] [want|need|would like|'d like|wish] [to see|to hear|to have|to read|] " + _NUMBERS
        action = say(rng, f"{head}[ | | | |: ]{{span}} {_RANGE_CLOSE}", span=span)
    return demand(rng, action, may_close=False) if rng.random() < 0.5 else action


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
    if kind < 0.55:
        if kind < 0.32:
            return _finish(rng, _range(rng, low, high)), ", ".join(map(str, numbers))
        return _finish(rng, _range(rng, high, low)), ", ".join(map(str, reversed(numbers)))
    if kind < 0.83:
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
        "[adding|if I add|when you add|after adding|if somebody adds|once I add|you add|suppose I add|we add] {b} to {a}[, what| gives what| makes what|, how much| is how much|: the result| leads to what|, and I get|. Result| results in|, what comes out]",
        "{b} [is added|gets added|was added|comes|goes] to {a}[, what| gives what|, how much is it|: the sum|. What is it now| makes]",
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
        "{a}[,|:| and|. Now|, then] [take away|take off|remove|subtract|deduct|drop|strike off] {b}[, what stays|. What remains|, how much is left|: result| is what| leaves|, and the rest is| gives| equals| makes|]",
        "[taking away|taking|if I take away|when you take away|subtracting|removing|after taking away|once I take] {b} from {a}[, what| leaves what| leaves|, how much stays| gives| makes|, what is left| is]",
        "{b} [is taken away|is taken off|is removed|goes away|gets subtracted|is deducted] from {a}[, what is left|: the rest|. What remains| leaves| makes what|, how much is it]",
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


_SUM_NOUNS = {
    "+": (
        "the [sum|total|result] of {a} [and|plus] {b}",
        "{a} [plus|+|added to|and] {b}",
        "{a} [plus|+] {b}",
        "{b} added to {a}",
        "the [sum|total|addition] {a} + {b}",
        "{b} more than {a}",
        "{a} increased by {b}",
        "{a} with {b} more",
        "{a} and {b} [together|added|in total|added together]",
    ),
    "-": (
        "the difference [of|between] {a} and {b}",
        "{a} [minus|-|less|take away] {b}",
        "{a} [minus|-] {b}",
        "{b} [taken from|subtracted from|taken away from|less than] {a}",
        "the [rest|remainder|result] of {a} [minus|-|less] {b}",
        "{a} [reduced|decreased|lowered] by {b}",
        "what [remains|is left] of {a} without {b}",
    ),
    "*": (
        "the product of {a} [and|with] {b}",
        "{a} [times|*|x|multiplied by|multiplied with] {b}",
        "{a} [times|*|x] {b}",
        "the [result|product] [of|] {a} [times|*|x] {b}",
        "{a} [groups|lots|sets] of {b}",
    ),
}
_SUM_ACTIONS = {
    "+": (
        "add {b} to {a}",
        "[add|give|put|join] {b} [to|on top of|onto] [the number|what I have, which is|my|these|the first number,|] {a}",
        "[start with|begin with|take|I have|here is|given] {a}[,|.| and|:|;] [add|now add|then add|and add] {b}[ to it| to that| more|]",
        "add {a} [and|plus|with|together with] {b}[ together|]",
        "[sum|sum up|total|join|combine] {a} and {b}",
        "[increase|raise|extend] {a} by {b}",
        "[put|lay] {b} on top of {a}",
        "[calculate|compute|work out|solve|do|find] {a} [plus|+] {b}",
        "count {a} and {b} together",
        "[give|lend] {b} to {a}",
    ),
    "-": (
        "[subtract|take|deduct|remove|take away|cut|withdraw] {b} from {a}",
        "take {b} [away from|off|out of] {a}",
        "[reduce|lower|decrease|lessen|shorten] {a} by {b}",
        "[calculate|compute|work out|solve|do|find] {a} [minus|-|less|take away] {b}",
        "find [the rest|what is left] of {a} without {b}",
    ),
    "*": (
        "multiply {a} [by|with|and|times] {b}",
        "[calculate|compute|work out|solve|do|find] {a} [times|*|x|multiplied by] {b}",
        "take {a} [times|x|*] {b}",
        "[take|add up] {b} {a} times",
    ),
}
_SUM_TAILS = "[=|= ?|=?| equals| is| makes| gives| is what| makes what| is how much| equals what| gives what| comes to what| adds up to| results in| makes how much| is equal to|, how much is it|, how much is that|, what is it|, what is the result|, what do you get|, what comes out|: result|, please| please|...| - what is it|, solve it|, result]"
_WHOLE = (
    "[how much|what] [is|makes|are|will be|would be|gives|comes out of|do you get for|do I get from|does one get from|should be|results from]",
    "[how much|what] [does|would|will|do] {t} [make|give|equal|be|come out as|add up to|amount to|yield|result in]",
)
_GAIN = "[get|find|buy|receive|am given|pick up|collect|win|borrow|am handed|earn|take|catch|bake|gain|bring home|add]"
_LOSE = "[lose|eat|sell|give away|drop|break|throw away|give back|spend|use|hand over|lend|pay|leave behind|forget|burn|give up|return|send away|miss]"
_HOW_MANY = "[how many|how many {things}] [do I have|are there|have I got|do I own|is that|are that|have I|do I hold|will there be|would that be|do I have then] [now|in all|in total|altogether|then|||]"
_HOW_LEFT = "[how many|how many {things}|how much|what] [are left|is left|remain|remains|do I still have|do I have now|have I got left|are there still|do I keep|stay with me|is still there|are still mine]"
_STORIES = {
    "+": (
        f"I [have|had|own|hold|carry|see] {{a}} {{things}} [and|and then|, then|. Then I|, I also|and also] {_GAIN} {{b}} [more|other ones|{{things}}|new ones|others|more of them|]. {_HOW_MANY}",
        f"[there are|here are|on the table are|in the box are] {{a}} {{things}}[.| and] [{{name}} [brings|adds|buys|puts|finds]|I [bring|add|put]|we get] {{b}} [more|others|new ones]. {_HOW_MANY}",
        "{name} has {a} {things}[,| and] {friend} [has|owns|brings|holds] {b}. [how many|what] [do they have|is that|are there|have they] [together|in all|in total]",
        "{a} {things} [plus|and|and then|with] {b} [more|others|more {things}] [is|are|makes|make] how many",
    ),
    "-": (
        f"I [have|had|own|hold|see|bought|baked] {{a}} {{things}} [and|but|and then|, then|. Then I|. Now I] {_LOSE} {{b}} [of them|{{things}}|]. {_HOW_LEFT}",
        f"[there are|here are|on the table are|in the box are] {{a}} {{things}}[.| and| but] [{{name}} [takes|eats|steals|breaks|buys|sells]|I [take|eat|remove|use]] {{b}} [of them|]. {_HOW_LEFT}",
        "I [borrow|borrowed|must pay|have to pay|needed|have debts of] {a} [coins|euros|pounds|dollars|] [and|, then I|but] [give back|return|pay back|have paid|paid back|have] {b}. [how much|what] [is missing|remains|must I still pay|is left to pay|do I still need|do I have to give]",
        "of {a} {things} {b} [are|were] [gone|eaten|broken|sold|lost|red]. how many are [left|not]",
        "{name} is {a}, {friend} is {b} years younger. How old is {friend}",
    ),
    "*": (
        "[each|every] [child|box|bag|day|table|house|friend] [has|gets|holds|needs] {b} {things}[. There are|, and there are|, with] {a} [of them|]. how many {things} [are there|is that|in all|in total]",
        "{a} [bags|boxes|children|plates|shelves|days|baskets] with {b} {things} [each|on each|in each] [are|make|is] how many",
        "{a} {things} cost {b} [each|apiece]. How much [do I pay|is it|for all]",
        "I [buy|have|see|fill] {a} [boxes|bags|rows] of {b} {things}. how many {things} [is that|are there|do I have]",
    ),
}


def _operands(rng: Random) -> tuple[str, int, int]:
    symbol = rng.choice("+++---**")
    largest = rng.choice((5, 10, 10, 20, 20, 20))
    left, right = rng.randint(0, largest), rng.randint(0, largest)
    if symbol == "*":
        left, right = rng.randint(0, 10), rng.randint(0, 10)
    if symbol == "-":
        left, right = max(left, right), min(left, right)
    return symbol, left, right


def _result(symbol: str, left: int, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[symbol]


def _asked_or_ordered(rng: Random, noun: str, orders: str, *, n: int) -> str:
    """A question for the noun phrase, or a demand."""
    return ask_for(rng, noun) if rng.random() < 0.7 else demand(rng, say(rng, orders, n=n))


def _special_sum(rng: Random) -> tuple[str, str]:
    """Doubles, halves, and whether a sum is right."""
    number, kind = rng.randint(1, 10), rng.random()
    if kind < 0.3:
        noun = say(
            rng,
            "[the double of|twice|two times|twice the number|the double amount of|{n} doubled,|{n} and again] {n}",
            n=number,
        )
        orders = (
            "[double the number|make the double of|take twice|multiply by two:|take two times|form the double of] {n}"
        )
        return _finish(rng, _asked_or_ordered(rng, noun, orders, n=number)), f"2 * {number} = {2 * number}."
    if kind < 0.6:
        noun = say(rng, "[half of|the half of|one half of|half|a half of|the number that is half of] {n}", n=2 * number)
        orders = "[halve|cut in half:|divide by two:|split in two halves:|take half of|find half of] {n}"
        return _finish(rng, _asked_or_ordered(rng, noun, orders, n=2 * number)), f"Half of {2 * number} is {number}."
    symbol, left, right = _operands(rng)
    result = _result(symbol, left, right)
    told = result if rng.random() < 0.5 else max(0, result + rng.choice((-2, -1, 1, 2)))
    text = say(
        rng,
        "[is|does] {t} [equal to|the same as|really|] {r}",
        "[is it true that|is it correct that|do you agree that|would you say that] {t} [is|makes|equals] {r}",
        "{t} [is|makes|=|gives|equals] {r}, [right|correct|true|yes or no|isn't it|is that so|or not|do you agree|ok]",
        "[am I right that|can you confirm that|check this:|true or false:|right or wrong:|can it be that|I think that|somebody says that|is the result right:|please check if|tell me if|verify:] {t} [is|makes|equals|=|gives] {r}",
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
    kind = rng.random()
    if kind < 0.22:
        text = say(rng, *_SHAPES[symbol], a=a, b=b, things=things, name=name, friend=friend)
    elif kind < 0.34:
        text = say(rng, *_STORIES[symbol], a=a, b=b, things=things, name=name, friend=friend)
    elif kind < 0.46:
        text = demand(rng, say(rng, *_SUM_ACTIONS[symbol], a=a, b=b))
    elif kind < 0.58:
        noun = say(rng, *_SUM_NOUNS[symbol], a=a, b=b)
        text = ask_for(rng, noun) if rng.random() < 0.8 else ask_about(rng, noun, "the result")
    else:
        word = {"+": "plus", "-": "minus", "*": "times"}[symbol]
        sign = rng.choice((f" {symbol} ", f" {symbol} ", symbol, f" {word} ", f" {word} "))
        if symbol == "*" and rng.random() < 0.2:
            sign = " x "
        shapes = (
            _TEXT_SHAPES
            if kind < 0.76
            else (f"{{t}}{_SUM_TAILS}",)
            if kind < 0.9
            else (f"{_WHOLE[0]} {{t}}", _WHOLE[1])
        )
        text = say(rng, *shapes, t=f"{a}{sign}{b}")
    text = upper_first(text) if rng.random() < 0.75 else text
    if text[-1] not in "=?":
        text += rng.choice(("?", "?", ".", ""))
    return text, f"{left} {symbol} {right} = {_result(symbol, left, right)}."
