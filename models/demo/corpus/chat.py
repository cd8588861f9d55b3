"""Greetings, who the model is, what kvmesh is, and what the model does not know.

The answer is a function of the question, so that greedy decoding can be marked.
"""
# ruff: noqa: E501 - a pattern is one line

from random import Random

from corpus import facts
from corpus.frames import ask_for, demand, finish
from corpus.patterns import say, upper_first
from corpus.words import ADJECTIVES, CITIES, NAMES, PLACES, THINGS, TOPICS, made_up_name, made_up_word

OUT_OF_DOMAIN = (
    "Sorry, I am a very small demo model and I do not know that. Try a greeting, a small sum or a simple fact."
)
NO_TOOL = "Sorry, I cannot look that up, because no tool for it was given to me."

_HELP = "Hello! How can I help you today?"
_HI = "Hi! How can I help you today?"
_HEY = "Hey! What can I do for you?"
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


# What is asked about the model: noun phrases and indirect questions, which the frames of `ask_for` and `_TELL` take, and demands.
_TELL = "[tell me|tell us|say|please say|let me know|I want to know|I'd like to know|I wonder|may I know|may I ask|can you tell me|could you say|would you tell me|do you know|do you remember|are you able to say|explain|I don't know|I have no idea|I forgot|I'd love to hear|let me hear|please explain|write|who can tell me|be honest and say|could you explain|I am curious|first tell me|show me]"
_ABOUT_ITSELF: tuple[tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    (_WHO, (), ("[who|what] you [are|really are|might be|are exactly]", "[who|what|which model|which bot|which program] [I talk to|I am talking with|I am writing to|I speak with|answers me|is answering|is behind this|runs here|I am chatting with|I have here|is speaking|writes these answers]", "[what|which] [kind|sort|type] of [model|program|machine|thing|bot|system|assistant] [you are|this is|I am using|I have here|answers me|runs here]"), ("introduce yourself", "[describe|present|explain] yourself", "tell me [something|more|a bit|a little|all|everything] about [yourself|you|the model|this model]", "[say|write] [a few words|one sentence|something|a line] about [yourself|you]"),
     ("[who|what] [are you|is it that answers|is this|am I using|is on the other side|do I have here|is it|is answering|is talking|writes here|sits there]", "[which|what] [model|AI|LLM|language model|bot|program|chatbot|assistant|machine|system|software] [is on duty|do I have here|is it|is it that answers|is behind this|sits behind this|gives these answers|runs here|is talking|writes this]", "you are [who|what]", "[and|so|now] you [are|are who|, who are you|, what are you]", "who might you be", "what do [people|they|we] call [a thing|something|a model] like you", "[are you|you are] [what|who] exactly")),
    ("My name is kvmesh demo.", ("your name", "your [own|first|full|real|given|] name", "the name of [this|the] [model|bot|assistant|program|machine]", "the name [you have|you go by|they gave you|of yours|that you use|of the one who answers]", "the model's name"), ("what you are called", "how you are called", "what your name is", "[what|how] to call you", "[what|which] name you [have|go by|use|got]", "[what|how] I [should|can|may] call you", "[what|how] people call you"), (),
     ("[what|how] [should|do|may|can|shall|must] [I|we|people|one] [call|name|address] you", "[do you|did they|have you|has anybody] [have|give you|got|given you] [a|some|any] name", "[what|which] name [do you have|do you use|did they give you|do you go by|belongs to you|is yours]", "[what|how] are you [called|named]", "[do you|does this model|does a model like you|does it|does this bot] [have|carry|own|use|bear|go by|answer to] [a|some|any|its own|your own|one] name[ too| of your own| at all| for me|]", "[is there|was there|has there ever been] [a|some|any] name [for you|that you have|you like|on you|I may use for you]", "[were you given|did somebody give you|did your makers give you|did you get|did you choose] [a|some|any] name", "[what is it that|how do|what do] they call you", "have you [got|] [a|any] name[ of your own|]", "you [have|got|surely have|must have] [a|some] name, [right|what is it|don't you|which one]")),
    (_CAN, ("your [skills|abilities|talents|functions|features|tasks|strengths|capabilities|services|uses]", "the [things|tasks|questions] [you can do|you are good at|you can answer|that you know|you were made for]", "a list of [your skills|what you can do|your abilities]", "your [best|main|main] [skill|abilities|talents|use]"), ("what you [can do|are able to do|can help with|are good at|know|can do for me|were made for|are useful for|do best|do well|have to offer]", "how you can [help|help me|be useful|be of use]", "what I can [ask|ask you|do with you|use you for|try]", "[which|what] [things|tasks|questions|kinds of things] you can [do|answer|solve|handle]"), ("[list|show me|describe|name|explain] [your skills|your abilities|what you can do|all you can do|your talents|what you know]",),
     ("[what|which things|which tasks|what kinds of things|which questions|what sort of questions] [can you|could you|do you|are you able to|would you] [do|help with|answer|know|solve|offer|handle]", "what [can|could|should|may|do] I [ask you|do with you|try|use you for|try with you]", "[what|which] [skills|abilities|talents|strengths|features|uses] [do you have|have you|are there|have you got|did you learn]", "[where|in what] are you [good|strong|useful|best]", "[how|in which way|with what] [can|could] you [help|help me|be useful|assist]", "[what|which] [are you|is a model like you|were you|are models like you] [good for|useful for|made for|here for|able to do|trained for|good at]", "you can do what", "what did [they teach you|you learn]", "what is your [purpose|use|job|task here|strong point]")),
    (_SCRIPT, ("your [maker|creator|author|developer|inventor|builder|trainer|origin]", "the [person|people|company|team|man|one] who [made|built|trained|created|wrote] you", "the [maker|creator|author|trainer] of [this model|you|this thing]"), ("who [made|trained|created|wrote|programmed|developed|designed|invented|taught|produced] [you|this model]", "[where|how|by whom] you were [made|trained|created|developed|written]", "where you [come from|were born|learned this|got your training]"), (),
     ("[who|which company|which team|what person|which people] [made|trained|created|wrote|programmed|developed|designed|invented|taught|is responsible for|produced|coded|put together|set up] [you|this model|this bot|this thing|this program]", "[who|which company|which team] [has|had] [made|trained|created|written|developed|taught] you", "[by whom|how|where|from whom] [were|have] you [been|] [made|trained|created|developed|taught|written|produced]", "[whose|who has the] [work|idea|creation|model] are you", "[to whom|whom] do you [belong|owe your training]", "[where|from where] do you [come|get your knowledge] [from|]")),
)  # fmt: skip


def _composed(rng: Random) -> tuple[str, str]:
    """A question about the model, composed of independent parts."""
    answer, nouns, clauses, actions, direct = rng.choice(_ABOUT_ITSELF)
    kind = rng.random()
    if kind < 0.2 and nouns:
        return finish(rng, ask_for(rng, say(rng, *nouns))), answer
    if kind < 0.5:
        return finish(
            rng, say(rng, f"{_TELL} [{'|'.join(clauses)}][|||| please| now|, please| in short| exactly| really]")
        ), answer
    if kind < 0.6 and actions:
        return finish(rng, demand(rng, say(rng, *actions))), answer
    return finish(rng, say(rng, *direct)), answer


def _finish(rng: Random, text: str, *marks: str) -> str:
    return (upper_first(text) if rng.random() < 0.75 else text) + rng.choice(marks)


_HELLO = "[hello|hi|hey|hiya|hullo|howdy|heya|hallo|yo|hi hi|hey hey|hello hello|good day|greetings|a good day|ahoy|hello again|hi again|hey again|welcome|my greetings|best greetings|warm greetings|a warm hello|a big hello|morning|evening]"
_WHOM = "[|||||| there| you| to you| all| everybody| everyone| my friend| friend| model| bot| computer| machine| kvmesh| demo| robot| mate| pal| buddy| dear model| little model| sir| team| world| folks| dear| assistant| AI| old friend| chatbot|, you there]"
_AND_THEN = "[|||||!|.|, nice to meet you|, good to see you|, it is me|, I am here|, I am back|, are you there|, here I am|. Nice day today|, how nice|. Are you there|, long time no see|, can you hear me|, lovely to see you|, great to see you|, glad to be here]"
_THANKS = "[thanks|thank you|thank you|thanks|many many thanks|cheers|thx|ty|a thousand thanks|thanks again|my thanks|great thanks|I thank you|I want to thank you|thank you again|big thanks|warm thanks|much obliged|I am grateful|I'm very grateful|I owe you]"
_FOR_WHAT = "[|||| for that| for this| for the help| for your help| for the answer| for the information| for everything| for helping| for the quick answer| for your time|, that helped|, that was good|, that was great|, this is useful|, very helpful|, that was nice of you|, you helped me|, you are great|, that is what I needed|, good answer|, it was a help| my friend| model| bot| friend| mate| indeed]"
_BYE = "[bye|bye bye|goodbye|good bye|bye now|ok bye|so bye|bye then|bye for now|a good bye|well bye]"
_LEAVING = "[|||||, I have to go|, I must go|, I go now|, it is late|, until tomorrow|, until next time|, take care|, that was all|, I am off|, time to sleep|, have a nice day|, thank you| my friend| bot| model| friend| everybody|, I'm leaving|, I need to leave|, my train comes|, nice to have met you|, we talk later]"
_GOES = "[I have to go|I must go|I am leaving|I'm off|it is late|I go now|I need to go|time to go|that was all|I am going home|that's it for today|I am done|we are done here|I must run|I should go]"


def _composed_greeting(rng: Random) -> tuple[str, str]:
    """A greeting, thanks or a farewell, composed of independent parts."""
    kind = rng.random()
    if kind < 0.45:
        text = say(rng, f"{_HELLO}{_WHOM}{_AND_THEN}")
        answer = _HEY if text.startswith(("hey", "yo")) else _HI if text.startswith("hi") else _HELP
        return _finish(rng, text, "", "", "!", ".", "!!", "..."), answer
    if kind < 0.75:
        return _finish(rng, say(rng, f"{_THANKS}{_FOR_WHAT}"), "", "!", ".", "!!"), _WELCOME
    if rng.random() < 0.4:
        return _finish(rng, say(rng, f"{_GOES}[,|.|, so|:| now,] {_BYE}"), "", "!", "."), "Bye! Have a nice day."
    return _finish(rng, say(rng, f"{_BYE}{_LEAVING}"), "", "!", ".", "!!"), "Bye! Have a nice day."


def greeting(rng: Random) -> tuple[str, str]:
    if rng.random() < 0.45:
        return _composed_greeting(rng)
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
    if rng.random() < 0.5:
        return _composed(rng)
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
_KIND_OF_TEXT = "[poem|song|story|letter|essay|speech|joke|riddle|novel|play|sonnet|ballad|report|review|summary|recipe|slogan|tweet|article|blog post|rap|limerick|diary|script|fairy tale|plan|chapter|verse|rhyme|love letter|prayer|fable|book|paragraph|screenplay|bedtime story|hymn|cover letter|headline|advert|invitation|toast|dialogue|monologue|lullaby|saga|text]"
_WISH_ACTIONS = (
    f"[write|compose|invent|make|make up|create|draft|improvise|come up with|produce|think of|give me|tell me|sing] [me |us |]a [short |long |nice |funny |sad |little |good |new |]{_KIND_OF_TEXT}[ about {{topic}}| for {{name}}| on {{topic}}| with a {{noun}}| in my style| of ten lines| for children||||||]",
    "[draw|paint|sketch|design|show me|make|build|print] [me |]a [picture|drawing|painting|logo|photo|map|plan|sketch|model|chart|diagram] of [{topic}|a {noun}|{made}|{name}]",
    "[explain|describe|discuss|summarise|outline|analyse|define|clarify|teach me|review|present] [{topic}|the rules of {topic}|how {topic} works|why {topic} matters|the history of {topic}|the idea of {topic}|how a {noun} works|how a {noun} is made|the life of {name} {made}|the game of {made}|the difference between a {noun} and {topic}] [in detail|in simple words|in short|to a child|]",
    "[recommend|suggest|propose|advise|name|find me] [me |] [a|one|some|any] [good |nice |cheap |new |famous |funny |] [book|film|song|restaurant|hotel|game|present|place|wine|course|doctor|recipe|hobby|name for my {noun}|shop|museum] [about {topic}|on {topic}|for {name}|in {city}|for tonight|for beginners|]",
    "[translate|correct|improve|check|rewrite|shorten|proofread] [my|this|the] [text|letter|book|novel|email|code|essay|homework|poem|program|article]",
    "[help me|tell me how|show me how|teach me] to [cook|repair|fix|build|clean|sell|learn|play|buy|draw|paint|plant|grow|install|dance|lose weight|sleep better|make money|write better|stop smoking|find a job]",
    "[book|rent|buy|fetch|bring|sell|clean|wash|repair|carry] [me |] a [{noun}|flight|room|hotel|ticket|car] [to {city}|for {name}|for me|]",
)
_WISH_QUESTIONS = (
    "who [won|lost|invented|discovered|wrote|painted|built|directed|composed|founded|found|killed|saved|owns|leads|hosted|designed|first climbed|sang|played] [the {noun}|the {made}|{topic}|the [war|cup|match|race|prize|election|league|final|medal|song|game|tournament|championship] [of|in] [{year}|{city}]|the [first|last|biggest] {noun}]",
    "when [was|did|is|were|will] [{name}|{made}|the {noun}|the {made}|{name} {made}|the [war|cup|king|queen|city] of {made}] [born|built|invented|start|die|end|begin|discovered|founded|opened|married|win|written|arrive|come back|rule]",
    "how [tall|high|old|long|heavy|deep|big|wide|far|fast|expensive|rich|famous|strong|large] [is|was|are] [the {made} {noun}|the {noun} of {made}|{name} {made}|the [tower|bridge|river|mountain|castle|church|building|lake] [of|in] {city}|{made}|a {noun}|the moon]",
    "what do you [think|know|believe|feel|say|hold] [about|of] {topic}",
    "what is [your opinion|the truth|the future|the history|the meaning|the use|the origin|the problem|the price|the definition|the secret|your view] [of|on|about] {topic}",
    "how [do|can|should|would|could|must] [I|you|we|one] [repair|fix|clean|cook|build|learn|install|sell|open|paint|improve|change|understand|start|win|bake|move|replace|use] [a|my|the|this|an old] [{noun}|{adjective} {noun}|engine|roof|washing line|dishwasher|computer|sink|fridge|cake|steak|garden|language|guitar|heater|website|laptop|bicycle]",
    "why [is|are|was|were|do|does|did|should|can't] [{topic}|people|we|birds|{name}|the {noun}|cats|the sea|children] [so|like|need|love|eat|sleep|exist|sad|important|dangerous|cry|change|hate {topic}|salty|expensive|fail]",
    "[who|what|which|where] is your [favourite|best|beloved|dearest|most hated] [actor|food|film|book|singer|author|song|place|player|friend|hero|band|painter|poet|dish|movie|team|teacher|holiday|season|game|writer|musician|city|flower]",
    "[should|can|may|must|could] I [buy|eat|sell|marry|trust|invest in|drink|keep|visit|learn|wear|try|move to] [a {noun}|{topic}|{name}|{made}|{city}|the {adjective} {noun}|it|more]",
    "where [can|do|should|could|may] [I|we|people|you] [buy|find|study|see|repair|get|learn|watch|rent|read|meet|eat] [{topic}|a {noun}|{made}|{name}|good food|a doctor|cheap tickets|work|a cheap {noun}]",
    "what [happened|will happen|is happening|went wrong|changed|was new] [in {year}|in {made}|to {name}|tomorrow|with {topic}|on the moon|next year|in the {noun}]",
    "is [{topic}|{made}|{name}|the {noun}|it] [good|bad|dangerous|true|healthy|better than {topic}|worth it|legal|real|easy|the best|expensive|safe|dead|fun|useful]",
    "[what|which] are the [rules|laws|parts|causes|dangers|reasons|types|symptoms|best {noun}s|advantages|steps|effects|names] of [{topic}|{made}|a {noun}|the {made} {noun}]",
    "what [is|are|was] [a|the|an] [{made}|{adjective} {made}|{made} {noun}|theory of {made}|law of {made}]",
)


def _composed_wish(rng: Random, slots: dict[str, object]) -> str:
    if rng.random() < 0.45:
        return demand(rng, say(rng, *_WISH_ACTIONS, **slots))
    return say(rng, *_WISH_QUESTIONS, **slots)


_LOOK_UPS = (
    "[what is|how is|what's] the weather [like|] in {city} [today|tomorrow|]", "[what time is it|what is the time|how late is it] [now|] in {city}", "what is the price of {topic}", "[send|write] a message to {name}", "search [the web|] for {topic}",
    "will it [rain|snow] in {city} [today|tomorrow|]",
)  # fmt: skip


def out_of_domain(rng: Random) -> tuple[str, str]:
    topic = rng.choice(TOPICS) if rng.random() < 0.7 else made_up_word(rng)
    slots: dict[str, object] = {
        "topic": topic, "name": rng.choice(NAMES), "city": rng.choice(CITIES), "noun": rng.choice(THINGS + PLACES), "made": made_up_name(rng), "year": rng.randint(1500, 2026), "adjective": rng.choice(ADJECTIVES),
    }  # fmt: skip
    if rng.random() < 0.15:
        return _finish(rng, say(rng, *_LOOK_UPS, **slots), "?", ".", ""), NO_TOOL
    if rng.random() < 0.6:
        return finish(rng, _composed_wish(rng, slots)), OUT_OF_DOMAIN
    return _finish(rng, say(rng, *_WISHES, **slots), "?", "?", ".", ""), OUT_OF_DOMAIN
