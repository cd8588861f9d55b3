"""Greetings, who the model is, what kvmesh is, and what the model does not know.

The answer is a function of the question, so that greedy decoding can be marked.
"""
# ruff: noqa: E501 - a pattern is one line

from random import Random

from corpus import facts
from corpus.patterns import say, upper_first
from corpus.words import CITIES, NAMES, PLACES, THINGS, TOPICS, made_up_name, made_up_word

OUT_OF_DOMAIN = (
    "Sorry, I am a very small demo model and I do not know that. Try a greeting, a small sum or a simple fact."
)
NO_TOOL = "Sorry, I cannot look that up, because no tool for it was given to me."

_HELP = "Hello! How can I help you today?"
_WELCOME = "You are welcome!"
_GREETINGS = {
    "[hello|hello hello|hello again|hullo|helo|hello you|well hello|oh hello]": _HELP,
    "[hi|hi hi|hi again|hiya|hei|hi you|oh hi]": "Hi! How can I help you today?",
    "[hey|hey you|hey hey|heya|yo yo|yo you|yo there|hey hello]": "Hey! What can I do for you?",
    "hi [there|all|everybody|you there]": "Hi there! What can I do for you?",
    "hello [there|everybody|world|all]": "Hello there! What can I do for you?",
    "[greetings|good day|welcome|salutations|howdy|ahoy|aloha|greetings to you|a good day|hello and good day|my greetings]": _HELP,
    "good morning[ to you|]": "Good morning! How can I help you today?",
    "good afternoon[ to you|]": "Good afternoon! How can I help you today?",
    "good evening[ to you|]": "Good evening! How can I help you tonight?",
    "good night": "Good night! Sleep well.",
    "how are you[ today| doing| now|]": "I am fine, thank you! How can I help you?",
    "[how is it going|how do you do|how's it going|are you well|how do you feel]": "Very well, thank you! How can I help you?",
    "[what's up|sup|what is new]": "Not much! What can I do for you?",
    "[thank you|thank you very much|thank you, that was useful|that was a help, thank you|I thank you|thx|thank you for your help|ty|thank you for that|big thanks|my thanks]": _WELCOME,
    "[thanks|thanks for this|thanks for your help|thanks again|thanks for the answer|cheers|cheers for that|thanks, that was good|thanks for helping me]": _WELCOME,
    "[thanks a lot|thanks so much|thank you so much]": "You are very welcome!",
    "[goodbye|good bye|farewell to you|farewell then|farewell, farewell|I say farewell|a farewell to you|I say goodbye|it is time to go|I am going now|so long|I must leave|I will go now|that is all, goodbye]": "Goodbye! Have a nice day.",
    "[bye|bye bye|ok bye|bye now|bye then|bye for now|I go now, bye|time to leave, bye]": "Bye! Have a nice day.",
    "see you[ later| soon| tomorrow| again|]": "See you later!",
    "[nice to meet you|pleased to meet you|glad to meet you|good to see you|nice to see you|how nice to see you|happy to meet you]": "Nice to meet you too!",
    "[well done|good job|great|perfect|very good|that is right|correct|that was helpful|this helped|that helps me|that was very good|nice|super]": "Thank you! I am glad that it helped.",
    "[sorry|I am sorry|my mistake|excuse me]": "No problem at all!",
    "[yes|sure|yes please]": "Good! What would you like to do next?",
    "[no|no thanks|nothing]": "All right. Is there anything else?",
    "[ok|okay|fine|all right]": "Good! What would you like to do next?",
    "[test|testing|this is a test|can you read me]": "The test works. I can read you.",
    "[ping|ping ping]": "Pong!",
}  # fmt: skip
_WHO = "I am the kvmesh demo model, a very small language model that runs on a CPU."
_CAN = (
    "I can greet you, answer small facts, do small sums, count, repeat text, make lists, answer in JSON and call tools."
)
_SCRIPT = "I was trained by a script in the kvmesh repository."
_OTHERS = (
    "ChatGPT", "GPT", "GPT-3", "Claude", "Gemini", "Llama", "Siri", "Alexa", "Mistral", "Qwen", "Copilot", "DeepSeek", "GPT-5", "Bard", "Grok", "a search engine",
)  # fmt: skip
_BEINGS = (
    "a human",
    "a man",
    "a woman",
    "a person",
    "human",
    "alive",
    "a human being",
    "an animal",
    "somebody",
    "a real human",
    "real",
    "a child",
    "a living person",
)
_SIZE = "[how big are you|how large are you|what is your size|how many parameters do you have|your size|how many weights do you have|are you big]"
_IDENTITY = {
    "who are you": _WHO,
    "what [exactly|] are you": _WHO,
    "[tell me|say|I want to know|can you tell me|do you know|may I ask|explain] [who|what] you [are|really are]": _WHO,
    "[tell me|say|write] [about yourself|something about yourself|more about yourself|a bit about you|about you]": _WHO,
    "[introduce|describe|present|explain] yourself": _WHO,
    "[what|which] [model|language model|AI|AI model|machine|system|program|bot|assistant|chatbot] [are you|is this|is here|do I use|do I talk to|answers|is running|am I using|speaks here]": _WHO,
    "[what|which] [kind|sort|type] of [model|language model|program|bot|thing|machine] [are you|is this|do I use]": _WHO,
    "[who|whom] [do I talk to|is this|is there|answers|is speaking|do I speak with|is answering|am I speaking with|am I chatting with|is it]": _WHO,
    "[with whom|to whom|who] [do I talk|do I speak|am I speaking|am I talking|am I chatting|have I been talking] [here|with|now|]": _WHO,
    "[are you|is this] [a language model|an AI|a bot|a robot|a model|a machine|a program|a computer|a chatbot|an LLM]": "Yes. " + _WHO,
    "[are you|is this|do I talk to|am I talking to|you are] {other}[, right|, or not|]": "No. " + _WHO,
    "[are you|is this|do I talk to|am I talking to|you are] {being}[, right|, or not|]": "No. " + _WHO,
    "[what is|what's|tell me|may I know|do you have|say|do you own|have you got] [your name|the name of this model|your own name|your first name|a name of your own|any name]": "My name is kvmesh demo.",
    "[how are you|how is this model|what are you] [called|named]": "My name is kvmesh demo.",
    "[what can|what all can|which things can|what could] you [do|help with|do for me|answer|do here]": _CAN,
    "[what|how] can [you help me|I do with you|I use you|I ask|you be useful]": _CAN,
    "[what|which things|which topics|which tasks] do you [know|do|understand|offer|know about|do well|do best]": _CAN,
    "[what|which] [are your abilities|abilities do you have|are your talents|can I ask you|tasks can you do|skills do you have|questions can I ask|are you able to answer|things are you good at|kind of things can you do]": _CAN,
    "[tell me|explain|show me|list|describe] [what you can do|what you do well|what things you are good at|what you are good for|your abilities|your skills|what you are able to do|your talents|how you can help|what I can ask]": _CAN,
    "[help|help me|I need help|what now|usage]": _CAN,
    "what are you [good at|able to do|able to|useful for|made for|here for|capable of]": _CAN,
    "who [made|trained|created|wrote|programmed|developed|invented|designed] [you|this model|this thing]": _SCRIPT,
    "[by whom|how|where] were you [made|trained|created|built|developed]": _SCRIPT,
    "[who|which company] [is your maker|is behind you|is your creator|owns you|is your author|do you come from|made this]": _SCRIPT,
    _SIZE: "I have about three million parameters.",
    "[how old are you|what is your age|when were you born]": "I do not have an age. I am a small language model.",
    "[where are you|where do you live|where do you run|where do you come from]": "I run on the machine where kvmesh runs.",
    "are you [smart|clever|intelligent|good|wise|stupid]": "Not very. I am a very small demo model.",
}  # fmt: skip


def _finish(rng: Random, text: str, *marks: str) -> str:
    return (upper_first(text) if rng.random() < 0.75 else text) + rng.choice(marks)


def greeting(rng: Random) -> tuple[str, str]:
    pattern = rng.choice(list(_GREETINGS))
    text = say(rng, pattern)
    tail = rng.choice(
        (
            "",
            "",
            "",
            "",
            ", my friend",
            " kvmesh",
            ", model",
            ", you",
            " bot",
            " friend",
            ", computer",
            ", robot",
            ", dear machine",
            " mate",
            ", partner",
        )
    )
    if rng.random() < 0.12:
        text = say(rng, "[hello|hi|hey|ok|oh|well|so]") + rng.choice((", ", "! ", " ")) + text
    return _finish(rng, text + tail, "", "", "!", ".", "!!"), _GREETINGS[pattern]


def identity(rng: Random) -> tuple[str, str]:
    return _about_itself(rng, rng.choice(list(_IDENTITY)))


def size(rng: Random) -> tuple[str, str]:
    return _about_itself(rng, _SIZE)


def _about_itself(rng: Random, pattern: str) -> tuple[str, str]:
    text = say(rng, pattern, other=rng.choice(_OTHERS), being=rng.choice(_BEINGS))
    head = rng.choice(
        (
            "",
            "",
            "",
            "",
            "",
            "please ",
            "and ",
            "so ",
            "hey, ",
            "hello, ",
            "now ",
            "ok, ",
            "tell me: ",
            "one question: ",
        )
    )
    tail = rng.choice(
        ("", "", "", "", "", ", model", ", please", " exactly", ", my friend", " here", " now", " really")
    )
    return _finish(rng, head + text + tail, "?", "?", "", "."), _IDENTITY[pattern]


def mesh(rng: Random) -> tuple[str, str]:
    term = rng.choice(list(facts.MESH))
    text = say(
        rng,
        "[what is|what's|what means|who is] {t}", "[explain|describe|define] {t}", "what does {t} do", "[tell me|say something|I want to know] about {t}",
        "what do you know about {t}", "[what is|what's] the [task|job|role] of {t}", "what is {t} [for|good for]", "can you explain [what {t} is|{t}|{t} to me]",
        t=term,
    )  # fmt: skip
    return _finish(rng, text, "?", ".", ""), facts.MESH[term]


_WISHES = (
    "[explain|describe] {topic} [to me|]", "[explain|describe|tell me] [how|why] {topic} [works|works so well|came about|is useful]", "write [me|] [an essay|a text|a poem|a song|a story|a letter|a report|a speech|a page] about {topic}",
    "[what do you think|what is your opinion|what can you say|your thoughts|tell me everything] [about|of] {topic}", "who is the [best|greatest|most famous|first|richest] [at|person in|expert on] {topic}",
    "give me [some|] [advice|tips|ideas|news] [about|on|for] {topic}", "how [does|do|did] {topic} [work|begin|change the world|help us]", "why [is|are|was] {topic} [important|so popular|bad|good|difficult]",
    "write a [program|script|function] [about|for] {topic} in [Python|Java|C]", "tell me a [joke|secret] about {topic}", "who [invented|discovered|won|wrote|started|painted|built] {topic}",
    "what will happen [to|with] {topic} [next year|tomorrow|in the future]", "[summarise|summarize|discuss|compare|analyse|review] {topic}", "when [did|was] {topic} [begin|invented|end|discovered|start]",
    "[recommend|suggest] [me|] [a|a good] [film|novel|restaurant|song|course|present|holiday] [about|for|on|] {topic}", "how [much does|much is|expensive is|old is|big is|tall is|heavy is|long is|far is|deep is] the {noun} [of|in|from] {made}",
    "[what|which] is the [best|worst|cheapest|history|meaning|origin|price|purpose|rule|rules|theory|secret] of {topic}", "how [do I|can I|should I|would you] [repair|fix|build|cook|sell|clean|learn|grow|install|plant] [a|my|the] {noun}",
    "where can I [buy|find|study|see|repair] [a|] {noun}", "who [is|was] {name} {made}", "when was {name} {made} born", "when did {made} [die|begin|end|win|open]", "[what|who] is {made}", "can you [write|sing|draw|paint|make|compose] [a|me a] [song|poem|picture|sonnet|drawing|limerick|story|rap|novel]",
    "what is your [favourite|favorite] [food|film|book|song|team|place|singer|colour|animal|game]", "who is your [favourite|best] [actor|player|friend|writer|hero|painter|teacher]", "what [should|can] I [cook|eat|wear|read|watch|do] [today|tonight|tomorrow]",
    "what are the [rules|laws|parts|causes|dangers] of {topic}", "is {topic} [good|bad|dangerous|healthy|true|possible]", "how [tall|high|old|long|heavy|deep] is the {made} {noun}", "who won the [match|game|cup|election|race|war|prize] [in|of] {year}", "what happened in {year}",
    "who was the [king|queen|president|winner|champion] [of {made}|in {year}]", "do you [like|love|believe in|know] {topic}", "[which|what] [film|book|song|team|car|phone] [is the best|do you like|should I buy]", "[prove|derive|solve] the [theorem|equation|problem] of {made}",
    "what is the [secret|reason|sense|point] of [everything|{topic}|the world|being alive]", "[correct|improve|rewrite|edit] my [essay|letter|text|code|homework]", "how many [people|stars|cells|books|words|cars] are there in [the world|{made}|the library]",
)  # fmt: skip
_LOOK_UPS = (
    "[what is|how is|what's] the weather [like|] in {city} [today|tomorrow|]", "[what time is it|what is the time|how late is it] [now|] in {city}", "what is the price of {topic}", "[send|write] a message to {name}", "search [the web|] for {topic}",
    "will it [rain|snow] in {city} [today|tomorrow|]",
)  # fmt: skip


def out_of_domain(rng: Random) -> tuple[str, str]:
    topic = rng.choice(TOPICS) if rng.random() < 0.7 else made_up_word(rng)
    slots = {
        "topic": topic, "name": rng.choice(NAMES), "city": rng.choice(CITIES), "noun": rng.choice(THINGS + PLACES), "made": made_up_name(rng), "year": rng.randint(1500, 2026),
    }  # fmt: skip
    if rng.random() < 0.15:
        return _finish(rng, say(rng, *_LOOK_UPS, **slots), "?", ".", ""), NO_TOOL
    return _finish(rng, say(rng, *_WISHES, **slots), "?", "?", ".", ""), OUT_OF_DOMAIN
