"""Dialogs with tools: function schemas, a request, the call in the Hermes format, its result and an answer."""
# ruff: noqa: E501 - a pattern is one line

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from corpus.frames import ask_for, demand
from corpus.patterns import fill, say, upper_first, wording
from corpus.words import (
    ADJECTIVES,
    EVERYDAY,
    FOODS,
    NAMES,
    PLACES,
    THINGS,
    TOPICS,
    WEATHER,
    code,
    made_up_name,
    made_up_word,
    person,
    place,
    sentence,
    words,
)  # fmt: skip

Message = dict[str, Any]
Value = Callable[[Random], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """One use of a tool: the request, the arguments, the result and the answer in words."""

    name: str
    request: str
    arguments: Message
    result: Message
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A kind of tool. `parameters`: slot -> (names, JSON type, how to make a value). Its requests and answer have those slots."""

    names: tuple[str, ...]
    description: str
    parameters: dict[str, tuple[str, str, Value]]
    requests: tuple[str, ...]
    result: Callable[[Random], Message]
    answer: str
    nouns: tuple[str, ...] = ()
    """Noun phrases for what the tool finds, for the frames of questions."""
    actions: tuple[str, ...] = ()
    """What the tool does, for the frames of demands."""


def _number(low: int, high: int) -> Value:
    return lambda rng: rng.randint(low, high)


def _one_of(*values: str) -> Value:
    return lambda rng: rng.choice(values) if rng.random() < 0.75 else made_up_word(rng)


_SEARCHED = (
    "[cheap|good|great|fresh|top|new|used|nice|big|better|free|fast|local|{adjective}|cheapest|nearest|finest|worst] [{thing}|{everyday}|{thing}s][ in {city}||]",
    "how to [make|find|clean|cook|repair|draw|buy|learn|use] [{thing}|{everyday}]",
    "[{everyday}|{thing}] [shop|price|test|recipe|pictures|ideas|tips|rules|plan|parts|museum|map] [in {city}||]",
    "[why|where|when|who] {everyday} {everyday}",
    "{topic} [for children|in {city}|today|and {everyday}|explained]",
)


def _topic(rng: Random) -> str:
    kind = rng.random()
    return (
        rng.choice(TOPICS)
        if kind < 0.35
        else words(rng, 3)
        if kind < 0.55
        else f"{made_up_word(rng)} {rng.choice(THINGS)}"
        if kind < 0.7
        else say(
            rng,
            *_SEARCHED,
            thing=rng.choice((*THINGS, *FOODS)),
            everyday=rng.choice(EVERYDAY),
            city=place(rng),
            topic=rng.choice(TOPICS),
            adjective=rng.choice(ADJECTIVES),
        )
    )


def _saying(rng: Random) -> str:
    return sentence(rng).rstrip(".") if rng.random() < 0.5 else words(rng, 6)


def _file(rng: Random) -> str:
    stem = made_up_word(rng) if rng.random() < 0.5 else rng.choice(THINGS)
    return f"{stem}.{rng.choice(('txt', 'pdf', 'csv', 'md', 'png', 'json', 'log', 'py'))}"


def _symbol(rng: Random) -> str:
    return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(2, 5)))


def _country(rng: Random) -> str:
    return (
        rng.choice(
            (
                "France",
                "Spain",
                "Italy",
                "Japan",
                "India",
                "Kenya",
                "Peru",
                "Chile",
                "Egypt",
                "Canada",
                "Poland",
                "Germany",
                "Sweden",
                "Mexico",
            )
        )
        if rng.random() < 0.6
        else made_up_name(rng)
    )


def _done(rng: Random) -> Message:
    return {"status": rng.choice(("ok", "done"))}


_ASK = "[please|can you|could you|I want you to|would you|now|kindly||||]"
_TELL = "[tell me|give me|I need|find out|check|get|show me|let me know|find|look up|I want to know]"
TOOLS: dict[str, Tool] = {
    "weather": Tool(
        names=("get_weather", "get_weather", "get_current_weather", "weather", "lookup_weather", "weather_report"),
        description="Get the [current |||]weather [in|for|of] a [city|place|town]|Tells [how the weather is|the temperature] in a [city|place]|Weather [of|in|for] a [city|location]|Read the [weather|forecast] [for|of] a [city|place]|Look up the weather|Get the weather|Tells the weather of a place",
        parameters={"city": ("city|city|location|place", "string", place)},
        nouns=("the [weather|temperature|forecast|weather report|weather forecast|air temperature|current weather|rain forecast|chance of rain|climate today] [in|for|of|over|around] {city}", "{city}'s [weather|temperature|forecast]", "[how warm|how cold|how hot|how windy|how sunny|how cloudy|how wet] it is in {city}", "the number of degrees in {city}",),
        actions=("check [if it rains|the weather|the sky|the temperature|the forecast] in {city}", "tell me [if|whether] [it rains|it snows|the sun shines|it is warm|it is cold|I need a coat|I need boots|it will be dry|there is a storm] in {city}", "look [at|up] the [weather|forecast|sky|temperature] [in|for|of] {city}",),
        requests=("[will|do|should|must|can|would] [I|we|you] [need|want|get|freeze|sweat|get wet|take|swim|sit outside|see the sun|go out without|have to wear|be cold without] [a coat|an umbrella|a jacket|boots|sunglasses|a scarf|gloves|a hat|sun cream|warm clothes|shorts|] in {city} [now|this evening|tomorrow|this week|]", "[is|will] [it|the weather|the sky|the air|the day] [be|] [nice|bad|good|hot|rainy|clear|grey|mild|freezing|stormy|fine|humid|pleasant|frosty|warm enough to swim] [in|over|around] {city} [tonight|at noon|this week|later|now|]", "[are|will] there [be|] [clouds|rain|snow|storms|showers|fog|thunder|sun|wind] [in|over|around] {city} [tonight|this morning|now|]", "[sun|rain|coat|umbrella|shorts|snow] or [no sun|none|no coat|not|boots|clouds] in {city}", "[what|how] does the [sky|weather] [look|look like|do] in {city}",
            "[what is|what's|how is|how's|tell me|how will be] the weather [like|] in {city} [today|tomorrow|now|]", "[is|will] it [be|] [raining|snowing|sunny|windy|warm|cold|cloudy|rain|snow|foggy|wet|dry] in {city} [today|now|tomorrow|at the moment|]", "how [warm|cold|hot|windy|wet] [is|will be|gets] it in {city} [now|today|]",
            f"{_TELL} the [weather|temperature|forecast|weather report] [in|of|for] {{city}}", "[should I|do I have to|must I|shall I] [take|wear|bring|carry] [a coat|a hat|warm clothes|a jacket|boots|an umbrella|sunglasses] in {city}", "{city}: [weather|temperature|forecast]", "the weather [in|of|for] {city}[, please|]",
            "does [it rain|the sun shine|it snow] in {city} [today|now|]", "I [go|travel|fly] to {city}. [how is the weather|what is the weather there|will it rain|is it warm there]", "[forecast|temperature] [for|in] {city}", "[rain|sun|clouds|snow|wind] in {city} [today|now|tomorrow|]",
            "what [temperature|weather] [is it|do they have|is there] in {city}",
            "is it [hot|warm|cold|wet|dry|windy|sunny] in {city} [just now|this week|these days|today]", "[warm|dry|cloudy|hot|clear] or [cold|wet|windy|foggy|snowy] in {city}[ today|]", "do [they|people] [have|see] [snow|sun|rain|a storm] in {city}",
        ),
        result=lambda rng: {"temperature": rng.randint(-9, 39), "condition": rng.choice(WEATHER)},
        answer="It is {condition} in {city}, with {temperature} degrees.",
    ),
    "time": Tool(
        names=("get_time", "get_time", "get_current_time", "time_in_city", "local_time", "clock"),
        description="Get the [current |local |exact |||]time [in|of|for] a [city|place]|Tells [how late it is|the hour] in a [city|place]|Read the [clock|local time] [of|in] a [city|place]|Local time [in|of|for] a [city|location]|Tells what time it is in a place",
        parameters={"city": ("city|city|location|place|timezone", "string", place)},
        nouns=("the [time|current time|local time|exact time|hour|clock time|time of day|right time|time right now] [in|of|for|at|over in] {city}", "{city} time", "{city}'s [time|local time|current time]", "how late it is in {city}", "what time it is in {city}",),
        actions=("check the [time|clock|hour] [in|for|of] {city}", "tell me [how late it is|what time it is|what hour it is|whether it is night|if it is morning|if people sleep|if shops are open by the clock] in {city}", "look [at|up] the [time|clock|local time] [in|for|of] {city}",),
        requests=("what time [would|will|could] it be [now|] in {city}", "[do|are] people [sleep|asleep|awake|up|still up|having lunch by the clock] in {city} [now|already|]", "[when it is noon here, what time is it|what do watches show|what is the hour|which hour has struck] in {city}", "[is it|has it] [past midnight|still dark|still morning|already evening|noon|bedtime|after six|early|too late to call] in {city}", "[current|local|exact] [time|hour] [in|for|at] {city}", "[my|our] [plane lands|friend waits|train arrives] in {city}, [what time is it|how late is it|what time do they have] there",
            "what time [is it|do they have|do people have|is it right now|is it now] in {city} [now|]", f"{_TELL} the [current|local|exact|] time [in|of|for] {{city}}", "what is the [local|current|] time in {city} [now|]", "how late is it in {city}", "{city}: [time|what time is it|clock]",
            "[which|what] [hour|time of day] is it in {city}", "is it [late|early|night|morning|day|noon|evening] in {city} [now|already|]", "[time|clock|hour] in {city}[, please|]", "what [does the watch show|do the clocks show|do clocks say|hour is it now] in {city}", "I [call somebody|phone a friend] in {city}. [what time is it there|how late is it there]",
        ),
        result=lambda rng: {"time": f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"},
        answer="It is {time} in {city}.",
    ),
    "add": Tool(
        names=("add", "add", "add_numbers", "sum", "plus", "calculate_sum"),
        description="Add two numbers|Get the sum of two numbers|Adds numbers",
        parameters={"a": ("a|a|x|left|first", "integer|number", lambda rng: rng.randrange(10 ** rng.randint(1, 4))), "b": ("b|b|y|right|second", "integer|number", lambda rng: rng.randrange(10 ** rng.randint(1, 4)))},
        nouns=("the [sum|total|addition|result] of {a} [and|plus|+] {b}", "{a} [plus|+|added to|and] {b}[ together|]",),
        actions=("[add|sum|total|combine|sum up] {a} [and|plus|with] {b}[ together| with your tool| by tool| with the function|]", "[use|call|take|try] the [tool|function|calculator] [for|on|to add] {a} [and|+|plus] {b}", "[compute|calculate|work out|find|solve] {a} [+|plus] {b}",),
        requests=("[how much|what] [does|do|would|will] {a} [and|plus|+] {b} [make|give|come to|be|equal|add up to]", "{a} [plus|+] {b} [equals|is|makes|gives|=][ what|?|]", "what do [I|you|we] get [from|for|adding] {a} [and|plus|+] {b}", "I have {a} and [get|find|win] {b} more, what is the sum",
            "what is {a} + {b}", "[add|sum up|sum|please add|can you add] {a} and {b}", "what is the sum of {a} and {b}", "[calculate|compute|work out] {a} [+|plus] {b}", "how much is {a} [+|plus|and] {b}", "{a} + {b}", "[use the tool to add|add with the function] {a} and {b}", "{a} and {b} together", "[give me|find] the total of {a} and {b}",
        ),
        result=lambda rng: {"result": rng.randrange(10000)},
        answer="The result is {result}.",
    ),
    "search": Tool(
        names=("search", "search", "web_search", "search_web", "find_pages"),
        description="Search the web|Search for a text|Search [the internet|for pages]",
        parameters={"query": ("query|query|q|text", "string", _topic)},
        nouns=("[pages|web pages|information|sites|articles|results|facts|websites|links|material|something to read] [about|on|for|with] {query}",),
        actions=("search [for|the web for|the internet for|the net for|online for] {query}", "[look|hunt|dig] [online|on the web|on the internet|around] for {query}", "[find|fetch|get|bring|show|collect] me [something|pages|information|sites|all|links|articles] [about|on|for] {query}", "[look up|find out about|research|investigate|browse for|query|web search|do a web search for|run a search on|ask the web about|check the internet for] {query}",),
        requests=("[what|where] [can I read|do they write|does the internet say|is written|can I find|do websites say|do I find] about {query}", "[search|query|web|internet|look up|find]: {query}", "[I need|I want|we need|I am looking for] [web pages|sites|search results|information|links|articles] [about|on|for] {query}",
            "search [for|] {query}", "search the [web|internet|net] for {query}", "[look up|look for|browse for|find out about|do a search for|search the web about] {query}", "find [something|information|websites|sites|articles|web pages|results] [about|on|for] {query}", "[what does the web say|what do you find|what is there on the internet] about {query}", "web search: {query}", "[please|can you] [search|look up] {query} [online|on the web|for me]",
            "I want to [read|find|look] [about|up] {query} [online|]",
            "[look for|show me|get me|open] [pages|sites|web pages|links|results] [about|for|on|with] {query}", "[browse|surf|query] the [web|internet|net] for {query}", "[internet|web|online] search [for|about] {query}", "[bing|search|look up|browse|find|query|web search|check|seek|fetch|hunt|see] {query} [for me|for us|online|please|now|on the net|on the web]", "[please|can you|could you|would you|] [search|browse|scan|query|use] the [web|net|internet] for {query}[ for me| please|]", "what [pages|sites|links] [are there|exist|do you find] [on|about|for] {query}", "[look|check] online [for|about] {query}",
        ),
        result=lambda rng: {"text": sentence(rng)},
        answer="I found this: {text}",
    ),
    "message": Tool(
        names=("send_message", "send_message", "send_email", "send_email", "message", "send_mail", "write_email"),
        description="Send [a message|an email|a mail|a text] to [a person|someone|somebody]",
        parameters={"to": ("to|to|recipient|name|receiver", "string", person), "text": ("text|text|message|body|content", "string", _saying)},
        actions=("[send|write|mail|email|message|text|deliver|forward] {to} [the message|a message|a mail|an email|the text|a note|these words|a line|this|]: {text}", "[send|write|give|drop] {to} a [message|mail|note|line|text|word|short message] [that|to say that|which says|with the words|to tell that|reading|:] {text}", "[let|make] {to} [know|hear|read|understand] that {text}", "[tell|inform|notify|remind|write to|report to|say to] {to} that {text}", "[send|write|forward|deliver] a [mail|message|note|text|letter|line] to {to} [saying|that says|and say|and write|reading|with the text|with the words|:] {text}",),
        requests=("[a|one] [mail|message|email|note|text] [to|for] {to}[:| with| saying| that says] {text}", "{to} [must|has to|needs to|wants to] [know|hear] that {text}", "[message|mail|email|note|text] [to|for] {to}: {text}",
            "[send|write|please send] [this|a|the] [message|email|mail] to {to}: {text}", "tell {to}: {text}", "[write|send|mail|email|text] [to|] {to}: {text}", "tell {to} that {text}", "[send|write] {to} [a|an] [message|email|note|mail] [that says|with the text|:|that] {text}", "[let|inform] {to} [know|] that {text}", "[email|mail|message|text] {to} [that|saying|and say] {text}", "{to} should [know|read|hear] that {text}", "[send|pass] {to} [the words|the text|the news|a line saying|a note saying]: {text}",
        ),
        result=lambda _: {"status": "sent"},
        answer="The message to {to} was sent.",
    ),
    "order": Tool(
        names=("order", "order_item", "buy", "place_order"),
        description="Order something from the shop|Buy a product",
        parameters={"item": ("item|product|name", "string", _one_of(*FOODS, *THINGS)), "count": ("count|quantity|amount", "integer", _number(1, 20))},
        actions=("[order|buy|get|purchase|bring|fetch|ship|send] [me|us|] {count} {item}", "[put|add] {count} {item} [in the basket|to the order|on the order]", "[place|make] an order [for|of] {count} {item}",),
        requests=("[we|I] [are out of|ran out of|want|need|take|will have|are missing] {item}, [order|buy|get|please order] {count}", "{count} [times|x|pieces of] {item}, please", "[an order|order|purchase] [of|for|:] {count} {item}", "[order|buy|get] [me|] {count} {item} [for me|]", "I [want|would like|'d like|need] to [order|buy] {count} {item}", "{count} {item}, please[ order them|]", "[please|can you] [order|buy|get] {count} {item}"),
        result=lambda rng: {"order_id": rng.randint(100, 9999)},
        answer="Done. I ordered {count} {item}.",
    ),
    "stock": Tool(
        names=("get_stock_price", "get_stock_price", "stock_price", "get_share_price", "quote", "get_quote"),
        description="Get the [current |]price of a [stock|share]|Look up a stock price",
        parameters={"symbol": ("symbol|symbol|ticker|stock", "string", _symbol)},
        nouns=("the [price|stock price|share price|quote|market price|current price|stock value|value|rate] [of|for] {symbol}", "{symbol}'s [price|stock price|quote|share price|value]", "the price of [one|a] share of {symbol}", "how [high|much|expensive] {symbol} is",),
        actions=("check [the price of|the stock of|the quote of|how much is|on|] {symbol}", "[look up|quote|find] [the stock|the share|the price of|] {symbol}", "tell me [how|where|at what price] {symbol} [stands|is sold|is traded|does today|is today]",),
        requests=("[where|how|at what] [does|is] {symbol} [stand|doing|quoted|priced|now|today|sold]", "[what|how much] [does|must|would|do] [I pay for|one pay for|a share cost of|it cost to buy] {symbol}", "what [is|does|would] [a share of|one share of|the stock|] {symbol} [going for|selling for|selling at|worth|valued at|priced at|quoted at|listed at|changing hands for|at|bring|fetch] [now|today|right now|at the moment|]", "[how|how much|where] [is|are] {symbol} [shares|stock|going|selling|trading|doing on the market|on the stock market|at the exchange][ now| today|]", "[is|are] {symbol} [trading higher|trading well|worth buying|expensive|cheap|trading low][ now| today|]", "[trading price|last trade|closing price|opening price|market quote] [of|for] {symbol}", "[did|has|is] {symbol} [rise|fallen|up|down|risen|gone up] [today|now|]", "{symbol} [quote|price|now|today|shares|stock]",
            "[what is|what's|how much is] the [stock|stock price|price|value|quote|share value] of {symbol}", "[what does|how much does] [one share of|a share of|] {symbol} cost", f"{_TELL} the [stock price|price|quote|value|course] [of|for] {{symbol}}", "[how high|how low|how expensive|how much] is [the stock of|] {symbol} [now|today|stock|]", "{symbol} [stock|stock price|share price|quote|price]", "[at what price|for how much] [is|does] {symbol} [sold|trade|stand] [now|today|]", "price of [the stock|a share of|] {symbol}",
        ),
        result=lambda rng: {"price": rng.randint(1, 999)},
        answer="The price of {symbol} is {price}.",
    ),
    "translate": Tool(
        names=("translate", "translate", "translate_text", "translation"),
        description="Translate [a |]text [into another language|to a language]",
        parameters={"text": ("text|text|phrase|word", "string", lambda rng: rng.choice(EVERYDAY) if rng.random() < 0.3 else words(rng, 3) if rng.random() < 0.7 else sentence(rng)), "language": ("language|language|to|target", "string", _one_of("French", "German", "Spanish", "Italian", "Polish", "Dutch", "Greek", "Latin", "Russian", "Turkish", "Hindi", "Danish"))},
        nouns=("the {language} [word|translation|expression] [for|of] [{text}|\"{text}\"]", "[{text}|\"{text}\"] in {language}", "the translation of [{text}|\"{text}\"] [into|to] {language}",),
        actions=("[translate|render|put|bring|turn|convert|change] [{text}|\"{text}\"|the words {text}|the word {text}] [into|to] {language}", "[say|write|express|type] [{text}|\"{text}\"] in {language}",),
        requests=("[how|what] [would|do|does|could|can] [I|you|we|a person|somebody|people|they] [say|call|write|express] [{text}|\"{text}\"] in {language}", "[what|how] is [{text}|\"{text}\"] [called|written|said|expressed] in {language}", "I [want|need|have] [to say|to write|to know] [{text}|\"{text}\"] in {language}", "[into|to|in] {language}: {text}", "my friend speaks {language}. [how do I say|translate|what is] {text}",
            "[translate|please translate|can you translate] [the word|the text|the words|] [{text}|\"{text}\"] [to|into] {language}", "[how do you|how do I|how do they|how can I] say [{text}|\"{text}\"] in {language}", "what is [{text}|\"{text}\"] in {language}", "[put|turn|convert] {text} into {language}", "[say|write|give me] {text} in {language}", "{text} in {language}[, please|]", "what [means|would be] {text} in {language}", "the {language} [word|words|translation] [for|of] {text}",
        ),
        result=lambda rng: {"translation": made_up_word(rng)},
        answer="In {language} that is: {translation}",
    ),
    "timer": Tool(
        names=("set_timer", "set_timer", "start_timer", "timer", "set_alarm"),
        description="Set a timer [for some minutes|in minutes|]|Start a [timer|countdown] of some minutes",
        parameters={"minutes": ("minutes|minutes|duration|length", "integer", _number(1, 90))},
        nouns=("a [timer|reminder|alarm|countdown] [of|for|over|with] {minutes} minutes", "a {minutes} [minute|minutes] [timer|alarm|countdown]",),
        actions=("[set|start|make|begin|create|run|put|prepare|launch|give me] a [timer|countdown|reminder|alarm|clock] [for|of|with|over|to|that rings in|on] {minutes} minutes", "[wake|remind|call|alert|ping|warn|tell|ring|signal] me [in|after|when|once] {minutes} minutes [are over|have passed|]", "[wait|measure|count|time|ring after|beep after|count down] {minutes} minutes",),
        requests=("[I need|I want|I have] [a break|a nap|a pause|a rest|to sleep|to wait|to cook] [of|for] {minutes} minutes", "[the|my] [cake|bread|egg|pizza|tea|rice|meeting|break|nap|bath] [is done|takes|needs|ends|must come out|must stop] [in|after|] {minutes} minutes", "{minutes} minutes[, go| from now| on the clock|, starting now|, please]", "in {minutes} minutes [I must leave|wake me up|I want to hear a bell|make a noise|alert me]",
            "[set|make|put on|create|please set] [a|the] [timer|alarm|clock] [for|to|of|at] {minutes} minutes", "timer [for|of|] {minutes} minutes", "[remind|call|alert|warn] me [in|after] {minutes} minutes", "{minutes} minutes timer [please|]", "[ring|beep|make a sound|give a signal] [in|after] {minutes} minutes", "[count|time] {minutes} minutes [for me|]", "my [eggs|cake|tea|soup|bread] [needs|takes|is ready in] {minutes} minutes", "[let me sleep|I sleep|wait] {minutes} minutes [and ring|then ring]", "in {minutes} minutes [ring|remind me|call me]",
        ),
        result=_done,
        answer="The timer is set for {minutes} minutes.",
    ),
    "music": Tool(
        names=("play_music", "play_music", "play", "play_song", "start_music"),
        description="Play [music|a song] [by name|]|Play [some |]music",
        parameters={"name": ("name|name|song|title|query", "string", _one_of("Bach", "rock", "Beethoven", "blues", "pop", "techno", "the Beatles", "Chopin", "folk", "Vivaldi", "reggae", "opera", "disco", "Schubert", "piano", "country", "soul"))},
        nouns=("[some|a bit of|a song by|music by|the music of|a record of|the sound of|the best of|a little|] {name}",),
        actions=("[play|start|put on|turn on|begin|run|spin|stream|switch to|sing] [some|a bit of|a song by|music by|the music of|the song|a little|me some|us|me|] {name}", "[play|put] {name} [loud|now|for us|for me|next|on|on the speaker|]", "let [me|us|everybody|the guests] [hear|listen to|dance to|enjoy] [some|] {name}",),
        requests=("[I|we] [feel like|would love|could do with|love|am in the mood for|am ready for|want to dance to|want to sing|like to sing along to|cannot work without|miss] [hearing|some|listening to|a bit of|] {name}", "[how about|what about|why not|time for|more|next song:|now] [some|a bit of|a little|] {name}", "{name}, [please|play it|loud please|on the radio|now please]",
            "[play|please play|start|can you play|turn on] [some|the song|a bit of|music by|something by|songs by|a little|] {name}", "I [want|would like|'d like|need|have] to [hear|enjoy|listen to] [some|] {name}", "let [me|us] [hear|listen to|enjoy] [some|] {name}", "[music|song|songs]: {name}", "[put|throw] [some|the song|] {name} on", "[a song|some music|something] [by|from|like] {name}, please", "[play me|give me] [some|a song by|] {name}", "I am in the mood for {name}", "[we want to dance|the party starts], so play {name}",
        ),
        result=_done,
        answer="Now playing {name}.",
    ),
    "light": Tool(
        names=("turn_on_light", "turn_on_light", "light_on", "switch_light_on", "lights"),
        description="Turn on the light in a room|Switch on a light",
        parameters={"room": ("room|room|place|location", "string", _one_of(*PLACES, "cellar", "bathroom", "living room"))},
        nouns=("[light|some light|more light|the light on|the lamp on|the lights on] in the {room}",),
        actions=("[turn on|switch on|put on|activate|start|power on|light] the [light|lights|lamp|lamps|bulb] in the {room}", "[turn|switch|put] the [light|lights|lamp|lamps] [of|in] the {room} on", "[turn|switch|put] on the {room} [light|lights|lamp]", "[light up|brighten|illuminate|lighten] the {room}", "make [the {room} bright|it bright in the {room}|light in the {room}]",),
        requests=("[it is|it's|it gets|it has become] [dark|so dark|too dark|very dark|gloomy|black|dim] in the {room}", "[I|we] [cannot see|can't see|see nothing|cannot read|want to read|sit in the dark|am afraid of the dark|need the lamp|would like light] in the {room}", "[no|more|not enough|too little|where is the] light in the {room}", "[lights|light|lamp|lamps] [in|for|of] the {room}[, on|, please|: on|]", "the {room} [needs|should have|must have|has no|could use] [light|lights|more light|a lamp on]",
            "[turn on|switch on|put on] the [light|lights|lamp] [in|of] the {room}", "[turn|put] the [light|lights|lamp] in the {room} on", "[light|lights|lamp] on in the {room}", "[make|] [light|it bright] in the {room}", "[light up|illuminate|brighten] the {room}", "the {room} is [too|so|very|] dark", "I [see nothing|cannot see|need light] in the {room}", "[more light|some light|light] [for|in] the {room}[, please|]", "I [go|come] to the {room}, [turn on the light|I need the lights|make light]",
        ),
        result=_done,
        answer="The light in the {room} is on.",
    ),
    "table": Tool(
        names=("book_table", "book_table", "reserve_table", "make_reservation"),
        description="[Book|Reserve] a table [in|at] a restaurant",
        parameters={"people": ("people|people|guests|seats", "integer", _number(1, 12)), "restaurant": ("restaurant|restaurant|place|name", "string", made_up_name)},
        nouns=("[a table|seats|places|room|dinner|a reservation|a booking] for {people} [people|guests|persons|] [at|in] {restaurant}",),
        actions=("[book|reserve|get|order|arrange|make] [us|me|] [a table|seats|places|a place|a booking|a reservation] [at|in] {restaurant} for {people}", "[book|reserve|get|arrange|find|make] [us|me|] [a table|seats|places|a place|a booking|a reservation|dinner] for {people} [people|guests|of us|persons|] [at|in] {restaurant}",),
        requests=("[we|tonight we|today we] [are|will be|come with] {people} [people|guests|persons|] [at|for|in] {restaurant}, [book a table|reserve please|please book|find us a table]", "{restaurant}[, |: ][table|dinner|lunch|booking] for {people}", "[I|we] [would like|'d like|want|plan|hope] to [eat|dine|sit|celebrate|have lunch] [at|in] {restaurant} with {people} [people|guests|persons]",
            "[book|get|order|please book|I want|we need|I need] a table for {people} [people|persons|guests|] [at|in] {restaurant}", "[we are|there are] {people} [people|guests|] and want to [eat|dine|have dinner] [at|in] {restaurant}", "[dinner|lunch|a table] [at|in] {restaurant} for {people} [people|guests|persons|]", "[reserve|book] {people} [seats|places] [at|in] {restaurant}", "[can you|please] [book|reserve] {restaurant} for {people} [people|guests|]",
        ),
        result=_done,
        answer="A table for {people} at {restaurant} is booked.",
    ),
    "population": Tool(
        names=("get_population", "get_population", "population", "count_people"),
        description="Get the population of a country|How many people [live in|are in] a country",
        parameters={"country": ("country|country|name|place", "string", _country)},
        nouns=("the [population|number of people|number of inhabitants|number of citizens|head count|size of the population|population number|population count] [of|in] {country}", "{country}'s [population|number of people|number of inhabitants]", "how many [people|inhabitants|citizens] {country} has",),
        actions=("[count|number] the [people|inhabitants|citizens] [of|in] {country}", "[look up|check|find|get] the [population|number of people] [of|in] {country}",),
        requests=("how many [people|humans|men and women|persons|folks|souls|residents|inhabitants|citizens] [are living|dwell|are there|are|exist|call home|make their home] in {country}", "[by|with] how many [people|persons|inhabitants] is {country} [inhabited|populated]", "[how many|what number of] [people|citizens|inhabitants] does {country} [have|count|hold]", "is {country} [big|populous|crowded] by [people|population]",
            "[what is|what's|how big is|how large is] the population [of|in] {country}", "how many [inhabitants|people|citizens|residents] [does|has|are in|are there in] {country} [have|]", f"{_TELL} the [population|number of people|number of inhabitants] of {{country}}", "{country}: [population|how many people|inhabitants]", "[how populous|how big] is {country}", "population of {country}", "[people|inhabitants] [in|of] {country}",
        ),
        result=lambda rng: {"population": rng.randrange(10**6)},
        answer="{country} has {population} people.",
    ),
    "user": Tool(
        names=("get_user", "get_user", "find_user", "lookup_user", "read_user"),
        description="Get a user [by id|]|[Find|Look up] a user by [the |]id",
        parameters={"id": ("id|id|user_id|number", "integer", _number(1, 9999))},
        nouns=("[the user|user|the user record|the data of user|the profile of user|the account of user] [number|with id|with number|id|with the id|] {id}",),
        actions=("[get|find|look up|load|fetch|read|open|show|show me|pull up|bring up|display|retrieve|print|view|return] [the|our|] user [number|with the id|with number|whose id is|id|numbered|] {id}", "[find out|tell me|check|see] [who|which user] [has|is|owns] [id|number|the id] {id}",),
        requests=("[which|what] [user|person|account] [belongs to|goes with|hides behind|carries|is behind] [id|number|the id] {id}", "[who|which user] [is|hides|stands] [behind|under] [id|number|the number] {id}", "[user|id|user id|user no|user number][: | ]{id}", "[I want to see|I need|where is|let me see] user {id}",
            "[get|find|look up|load|fetch|read|open|give me|I need] [the|] user [number|with the id|with number|no|id|] {id}", "who [is|has] [the|] user [id|number|] {id}", "[which|what] user [has|is] [the id|id|number] {id}", "user {id}[, please|]", "[tell me|show|display] [about|who is|] user {id}", "[get|show|give me] the [profile|data|account|name] of user {id}",
        ),
        result=lambda rng: {"name": rng.choice(NAMES)},
        answer="That user is {name}.",
    ),
    "delete": Tool(
        names=("delete_file", "delete_file", "remove_file", "delete"),
        description="[Delete|Remove] a file",
        parameters={"path": ("path|path|file|name|filename", "string", _file)},
        actions=("[delete|remove|erase|drop|destroy|wipe|discard|trash|clear|kill|throw out|throw away|clean away|dispose of|unlink|purge] [the file|my file|file|the old file|this file:|] {path}", "[throw|put] [the file|] {path} [in the bin|away|in the trash|out]", "make [the file|] {path} [disappear|go away|vanish]",),
        requests=("[I|we] [no longer need|do not need|do not want|want to lose|have no use for|can live without] [the file|my file|] {path} [any more|]", "[the file|] {path} [is useless|is not needed any more|has to go|should go|must disappear|can be thrown away|is too old|must be removed]", "[no more|away with|out with|goodbye to] [the file|] {path}", "[delete|remove|erase|please delete|drop|destroy|throw away|wipe|can you delete] [the file|my file|file|] {path}", "[the file|] {path} [must go|can go|is not needed|should be deleted|is old, delete it|can be removed]", "I [do not need|don't want] [the file|] {path} [any more|]", "[put|throw] {path} [in the bin|in the trash|away]", "clean up {path}"),
        result=_done,
        answer="{path} is deleted.",
    ),
    "read file": Tool(
        names=("read_file", "open_file", "show_file", "load_file"),
        description="[Read|Open|Show] a file",
        parameters={"path": ("path|path|file|name|filename", "string", _file)},
        nouns=("[the content|the contents|the text|the lines|the inside] of [the file|my file|] {path}",),
        actions=("[read|open|show|show me|display|print|load|view|list|output|look into|look at] [the file|my file|the contents of|what is in|] {path}",),
        requests=( "[read|open|show|show me|load|display|print] [the file|my file|] {path}", "what [is in|does it say in|stands in|are the contents of] [the file|] {path}", "I want to [see|read] {path}"),
        result=lambda rng: {"text": sentence(rng)},
        answer="It says: {text}",
    ),
    "currency": Tool(
        names=("convert_currency", "convert_currency", "exchange", "convert_money", "currency"),
        description="Convert [an amount of |]money [into|to] another currency|Exchange money",
        parameters={"amount": ("amount|amount|value|sum", "integer", _number(1, 5000)), "currency": ("currency|currency|to|target", "string", _one_of("dollars", "pounds", "yen", "francs", "rupees", "pesos", "kroner", "euros", "lira", "USD", "EUR", "GBP", "JPY"))},
        nouns=("{amount} in {currency}", "the [value|worth|amount] of {amount} in {currency}", "{amount} [changed|converted|exchanged] [into|to] {currency}",),
        actions=("[convert|exchange|turn|swap|switch|change|transform] {amount} [to|into|for] {currency}", "[give|pay|show] me {amount} in {currency}", "[calculate|compute|work out] {amount} in {currency}",),
        requests=("how [many|much] {currency} [are|is|do I get for|would I get for|can I get for|make] {amount}", "[what|how much] [do|would|will] I get in {currency} for {amount}", "{amount} [into|to|as] {currency}[, please|]", "I [have|got|want to exchange|want to swap|hold] {amount} and [need|want] {currency}", "[convert|exchange|turn|swap|please convert] {amount} [to|into|for] {currency}", "how [much|many {currency}] [is|are] {amount} in {currency}", "{amount} in {currency}", "what [is|are|do I get for] {amount} in {currency}", "I [have|need|want to change] {amount} [in|to|into] {currency}", "what are {amount} worth in {currency}"),
        result=lambda rng: {"result": rng.randint(1, 9999)},
        answer="That is {result} {currency}.",
    ),
    "news": Tool(
        names=("get_news", "get_news", "news", "latest_news", "headlines"),
        description="Get the [latest |]news [about|on] a topic|Read the news",
        parameters={"topic": ("topic|topic|subject|about|query", "string", _topic)},
        nouns=("[the|the latest|some|new|the newest|today's|any] [news|headlines|reports|stories|articles] [about|on|of|for|from|around] {topic}", "what is new [in|with|on] {topic}", "what [happens|happened|is going on|goes on] [in|with|around] {topic}",),
        actions=("[read|show|get|bring|fetch|check|give] me the [latest|newest|] [news|headlines|stories] [about|on|of] {topic}", "[update|inform|brief] me [on|about] {topic}", "tell me [what happened in|the news of|what is new in|what goes on with|the latest on] {topic}",),
        requests=("[what|anything|something|is there anything|what is there] [new|fresh|to report] [on|in|with|from] {topic}", "[what|how] [is|are|do] [the press say about|the papers report on|they report about|up with|things with] {topic}", "[latest|breaking|news|headlines|fresh news|updates][:| on| about] {topic}", "did [anything|something|much] happen [in|with] {topic}", "[what is|what are|tell me|give me|get|show me|I want|read me|any|are there] [the|the latest|the newest|some|] news [about|on|of|for] {topic}", "[latest|today's|new|] [headlines|news|reports]: {topic}", "what [happens|happened|is happening|goes on|is going on] [in|with] {topic} [today|now|]", "[news|headlines] [about|on] {topic}", "[anything|something] new [about|on|in] {topic}", "what do the [papers|newspapers|headlines|news] say about {topic}"),
        result=lambda rng: {"headline": sentence(rng)},
        answer="The news: {headline}",
    ),
    "call": Tool(
        names=("call", "phone", "make_call", "call_person"),
        description="Call a person on the phone|Make a phone call",
        parameters={"name": ("name|name|person|contact", "string", person)},
        nouns=("[a call|a phone call|a talk] [with|to] {name}",),
        actions=("[call|phone|ring|dial|telephone|ring up|call up] {name}", "[give|make] {name} a [call|ring]", "[connect|put] me [to|through to|with] {name}", "get {name} on the [phone|line]",),
        requests=( "[call|phone|ring|dial|please call] {name}", "I [want|need|have] to [talk to|speak to|call|phone] {name}", "[give|make] {name} a call", "get {name} on the [phone|line]"),
        result=_done,
        answer="I am calling {name}.",
    ),
    "note": Tool(
        names=("add_note", "create_note", "save_note", "write_note"),
        description="[Write|Save|Add] a note",
        parameters={"text": ("text|text|note|content", "string", _saying)},
        actions=("[note|write down|make a note|save a note|take a note|add a note|keep a note|jot down|put down]: {text}", "[note|write down|jot down|keep|record|save] that {text}",),
        requests=( "[note|write down|make a note|save a note|take a note|add a note|put in my notes]: {text}", "[remember|keep|note down] that {text}", "[save|store] [this|the] [note|thought|text]: {text}"),
        result=_done,
        answer="The note is saved.",
    ),
    "temperature": Tool(
        names=("set_temperature", "set_heating", "thermostat"),
        description="Set the [temperature|heating] of a room",
        parameters={"room": ("room|place", "string", _one_of(*PLACES)), "degrees": ("degrees|temperature|value", "integer", _number(10, 30))},
        actions=("[set|heat|warm|bring|cool|put|turn|adjust|change] the {room} to {degrees} [degrees|]", "[set|put|adjust] the [temperature|heating|thermostat] [in|of] the {room} [to|at|on] {degrees} [degrees|]", "make the {room} {degrees} degrees [warm|]",),
        requests=("the {room} [should be|must be|has to be|shall have|wants] {degrees} degrees", "I [want|need|would like|like] {degrees} degrees in the {room}", "[set|heat|warm|bring|cool] the {room} to {degrees} [degrees|]", "[make|I want] [it|] {degrees} degrees in the {room}", "the {room} [should have|needs|must be at] {degrees} degrees"),
        result=_done,
        answer="The {room} is set to {degrees} degrees.",
    ),
    "distance": Tool(
        names=("get_distance", "distance", "route", "how_far"),
        description="Get the distance [between two cities|from one place to another]",
        parameters={"start": ("start|from|origin|a", "string", place), "end": ("end|to|destination|b", "string", place)},
        nouns=("the [distance|way|road|route|number of kilometres] [between|from] {start} [and|to] {end}", "how far [it is|] from {start} to {end}", "how far {end} is from {start}",),
        actions=("[measure|find|get|compute|look up] the [distance|way|route] [between|from] {start} [and|to] {end}",),
        requests=("[how far|how many kilometres|how many miles] [is|are|do I go|must I drive|do I travel|does one fly] from {start} to {end}", "{start} to {end}, [how far|what distance|how many kilometres]", "how far is [it from|] {start} [to|from] {end}", f"{_TELL} the distance [between|from] {{start}} [and|to] {{end}}", "[what is the|] distance from {start} to {end}", "how many [kilometres|miles] [are there|is it] from {start} to {end}"),
        result=lambda rng: {"km": rng.randint(5, 9000)},
        answer="It is {km} km from {start} to {end}.",
    ),
}  # fmt: skip


def _lookup(rng: Random) -> Tool:
    """A tool with a name that may never have been seen: it can only be read from the schema."""
    known = "price|age|owner|size|weight|address|status|score|colour|length|height|author|date|rank|phone number"
    noun = rng.choice(known.split("|")) if rng.random() < 0.4 else made_up_word(rng)
    verb = rng.choice(("get", "get", "find", "read", "fetch", "lookup"))
    return Tool(
        names=(f"{verb}_{noun.replace(' ', '_')}",),
        description=f"{verb.capitalize()} the {noun} of something",
        parameters={"it": ("name|item|of|subject|id|object", "string", lambda r: r.choice((person, made_up_word, code, lambda q: q.choice(THINGS)))(r))},
        nouns=(f"the {noun} [of|for] {{it}}", f"the {noun} that {{it}} has", f"{{it}}'s {noun}"),
        actions=(f"[get|find|read|fetch|look up|check|show|show me|tell me] the {noun} [of|for] {{it}}",),
        requests=(f"[what is|what's|tell me|get|find|give me|I need|show me|read|check|do you know] the {noun} of {{it}}", f"[which|what] {noun} [has|does] {{it}} [have|]", f"{{it}}: {noun}", f"the {noun} of {{it}}[, please|]", f"[look up|find out] the {noun} [of|for] {{it}}"),
        result=lambda r: {"value": r.randint(1, 9999)},
        answer=f"The {noun} of {{it}} is {{value}}.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A tool as one dialog has it: `names` are those of its parameters."""

    tool: Tool
    names: dict[str, str]
    schema: Message


def _schema(rng: Random, tool: Tool, names: dict[str, str]) -> Message:
    """The function in the OpenAI form."""
    fields: Message = {}
    for slot, (_, types, _) in tool.parameters.items():
        fields[names[slot]] = {"type": rng.choice(types.split("|"))}
        if rng.random() < 0.15:
            fields[names[slot]]["description"] = rng.choice((f"The {slot}", f"The {slot} to use", upper_first(slot)))
    parameters = {"type": "object", "properties": fields, "required": list(fields)}
    description = wording(rng, f"[{tool.description}]")
    return {
        "type": "function",
        "function": {"name": rng.choice(tool.names), "description": description, "parameters": parameters},
    }


_PURPOSES = [*TOOLS, "weather", "time", "weather", "time", "lookup", "lookup", "lookup", "lookup"]


def _offer(rng: Random) -> Offer:
    purpose = rng.choice(_PURPOSES)
    tool = _lookup(rng) if purpose == "lookup" else TOOLS[purpose]
    while True:
        names = {slot: rng.choice(choices.split("|")) for slot, (choices, _, _) in tool.parameters.items()}
        if len(set(names.values())) == len(names):
            return Offer(tool=tool, names=names, schema=_schema(rng, tool, names))


def _named_offer(rng: Random, purposes: tuple[str, ...]) -> Offer:
    while (found := _offer(rng)).tool not in [TOOLS[purpose] for purpose in purposes]:
        pass
    return found


_ALIKE = (
    ("weather", "time"),
    ("weather", "time"),
    ("weather", "time"),
    ("search", "news"),
    ("population", "weather"),
    ("population", "time"),
    ("stock", "weather"),
    ("stock", "search"),
    ("stock", "time"),
    ("search", "weather"),
)
_OF_ONE_VALUE = ("weather", "time", "search", "stock", "news", "population", "music", "light", "timer", "user", "delete", "call", "note")  # fmt: skip


def alike_offers(rng: Random) -> list[Offer]:
    """Two tools that take the same kind of value: only the request and their descriptions tell them apart."""
    first, second = rng.choice(_ALIKE) if rng.random() < 0.7 else rng.sample(_OF_ONE_VALUE, 2)
    found = [_named_offer(rng, (first,)), _named_offer(rng, (second,))]
    rng.shuffle(found)
    return found


def offers(rng: Random) -> list[Offer]:
    """One to three tools with different purposes, mostly two."""
    found: dict[str, Offer] = {}
    count = rng.choice((1, 2, 2, 2, 2, 2, 2, 3))
    while len(found) < count:
        offer = _offer(rng)
        found.setdefault(offer.tool.description.split("|")[0], offer)
    return list(found.values())


def _request(rng: Random, text: str, values: Message) -> str:
    """The request as a person may write it. A value at its start keeps its first letter."""
    if rng.random() < 0.8 and not any(text.startswith(str(value)) for value in values.values()):
        text = upper_first(text)
    if text[-1] in ".?!":
        return text
    return text + (
        rng.choice(("?", "?", "?", ""))
        if text.lower().startswith(
            ("what", "how", "is", "who", "which", "will", "does", "should", "can", "could", "do")
        )
        else rng.choice(("", "", ".", ".", "!"))
    )


def _worded(rng: Random, tool: Tool, values: Message) -> str:
    """The request in words: one of the tool's own shapes, or a frame around what it finds or does."""
    kind = rng.random()
    if kind < 0.25 and tool.nouns:
        return ask_for(rng, say(rng, *tool.nouns, **values))
    if kind < 0.5 and tool.actions:
        action = say(rng, *tool.actions, **values)
        return demand(rng, action, may_close=not any(action.endswith(str(value)) for value in values.values()))
    return say(rng, *tool.requests, **values)


def use(rng: Random, offer: Offer) -> ToolUse:
    """A request for the tool."""
    tool = offer.tool
    values = {slot: make(rng) for slot, (_, _, make) in tool.parameters.items()}
    result = tool.result(rng)
    return ToolUse(
        name=offer.schema["function"]["name"],
        request=_request(rng, _worded(rng, tool, values), values),
        arguments={offer.names[slot]: value for slot, value in values.items()},
        result=result,
        answer=fill(tool.answer, **values, **result),
    )


def call_messages(use: ToolUse) -> list[Message]:
    """The request, the call, the tool's result and the answer."""
    function = {"name": use.name, "arguments": use.arguments}
    return [
        {"role": "user", "content": use.request},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": json.dumps(use.result, ensure_ascii=False)},
        {"role": "assistant", "content": use.answer},
    ]
