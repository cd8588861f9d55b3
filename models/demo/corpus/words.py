"""Words and phrases that fill the templates: names, places, sentences, and made-up words that force copying."""

from random import Random

NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack", "Kate", "Leo", "Maria",
    "Noah", "Olivia", "Paul", "Ruth", "Sam", "Tina", "Victor", "Wendy", "Zoe", "Omar", "Mei", "Ravi", "Lena",
)  # fmt: skip
CITIES = (
    "Paris", "London", "Berlin", "Rome", "Tokyo", "Madrid", "Cairo", "Oslo", "Lima", "Seoul", "Vienna", "Prague",
    "Boston", "Chicago", "Toronto", "Sydney", "Mumbai", "Nairobi", "Dublin", "Athens", "Lisbon", "Zurich", "Hamburg",
    "New York", "San Francisco", "Buenos Aires", "Cape Town", "Hong Kong",
)  # fmt: skip
ANIMALS = ("dog", "cat", "horse", "fox", "rabbit", "bird", "owl", "bear", "mouse", "duck", "frog", "goat")
PLACES = (
    "garden", "forest", "river", "market", "house", "village", "beach", "kitchen", "library", "station", "park",
    "mountain", "school", "harbour", "bridge", "farm",
)  # fmt: skip
THINGS = (
    "book", "ball", "lamp", "letter", "key", "map", "basket", "coat", "boat", "clock", "cup", "hat", "stone", "box",
    "flower", "bottle", "candle", "violin", "kite", "umbrella",
)  # fmt: skip
ADJECTIVES = (
    "old", "small", "red", "bright", "quiet", "happy", "green", "warm", "tall", "strange", "golden", "blue", "heavy",
    "friendly", "broken", "tiny",
)  # fmt: skip
WEATHER = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear", "stormy")
FOODS = ("bread", "soup", "apples", "cheese", "rice", "cake", "fish", "pasta", "honey", "berries")
VERBS = ("found", "carried", "painted", "cleaned", "lost", "bought", "hid", "opened", "borrowed", "repaired")
TOPICS = (
    "quantum physics", "the stock market", "politics", "medicine", "the law", "football results", "philosophy",
    "computer games", "tax forms", "chemistry", "the history of Rome", "machine learning", "cooking", "cars",
    "the news", "poetry", "economics", "love", "dinosaurs", "religion",
)  # fmt: skip

_ONSETS = (
    "b", "br", "d", "dr", "f", "fl", "g", "gr", "h", "j", "k", "kl", "l", "m", "n", "p", "pr", "r", "s", "st", "sh",
    "t", "tr", "v", "w", "z", "th", "ch", "qu", "y",
)  # fmt: skip
_VOWELS = ("a", "e", "i", "o", "u", "ee", "oo", "ai", "ou")
_CODAS = ("", "", "n", "r", "l", "m", "s", "t", "x", "nd", "sk", "p", "ck", "b", "g")
_UNUSUAL = ("é", "ü", "ñ", "ß", "ø", "日本", "你好", "привет", "Ω", "€", "→", "🙂", "🚀", "✓", "½", "å")


def made_up_word(rng: Random) -> str:
    """A pronounceable word that is in no table, so that it can only be copied."""
    count = rng.choice((1, 2, 2, 3))
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(count))


def any_word(rng: Random) -> str:
    """A word of the tables, or a made-up one, a number or an unusual character, in falling frequency."""
    kind = rng.random()
    if kind < 0.55:
        return rng.choice(rng.choice((NAMES, CITIES, ANIMALS, PLACES, THINGS, ADJECTIVES, WEATHER, FOODS, VERBS)))
    if kind < 0.85:
        word = made_up_word(rng)
        return word.capitalize() if rng.random() < 0.3 else word
    return str(rng.randrange(10 ** rng.randint(1, 5))) if kind < 0.96 else rng.choice(_UNUSUAL)


def sentence(rng: Random) -> str:
    """One plain English sentence."""
    name, thing, place = rng.choice(NAMES), rng.choice(THINGS), rng.choice(PLACES)
    shapes = (
        f"{name} {rng.choice(VERBS)} the {rng.choice(ADJECTIVES)} {thing} near the {place}.",
        f"The {rng.choice(ADJECTIVES)} {rng.choice(ANIMALS)} sleeps in the {place}.",
        f"It is {rng.choice(WEATHER)} in {rng.choice(CITIES)} today.",
        f"We eat {rng.choice(FOODS)} in the {place}.",
        f"{name} and {rng.choice(NAMES)} walk to the {place}.",
        f"There is a {rng.choice(ADJECTIVES)} {thing} in the {place}.",
        f"I like {rng.choice(FOODS)} and {rng.choice(FOODS)}.",
        f"My {rng.choice(ANIMALS)} is called {name}.",
    )
    return rng.choice(shapes)


def phrase(rng: Random) -> str:
    """Something to copy: a sentence, or a row of one to twelve words."""
    if rng.random() < 0.4:
        return sentence(rng)
    words = [any_word(rng) for _ in range(min(rng.randint(1, 12), rng.randint(1, 12)))]
    return " ".join(words) + rng.choice(("", "", ".", "!"))
