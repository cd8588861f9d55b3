"""The tables of facts that the demo model is taught. Nothing outside these tables is known to it."""

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Greece": "Athens", "Austria": "Vienna", "Poland": "Warsaw", "Hungary": "Budapest", "Norway": "Oslo",
    "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen", "Ireland": "Dublin", "Belgium": "Brussels",
    "the Netherlands": "Amsterdam", "Switzerland": "Bern", "England": "London", "Scotland": "Edinburgh",
    "Russia": "Moscow", "Ukraine": "Kyiv", "Turkey": "Ankara", "Egypt": "Cairo", "Morocco": "Rabat",
    "Kenya": "Nairobi", "Ethiopia": "Addis Ababa", "Ghana": "Accra", "India": "New Delhi", "China": "Beijing",
    "Japan": "Tokyo", "South Korea": "Seoul", "Thailand": "Bangkok", "Vietnam": "Hanoi", "Indonesia": "Jakarta",
    "Nepal": "Kathmandu", "Iran": "Tehran", "Iraq": "Baghdad", "Canada": "Ottawa", "the United States": "Washington",
    "Mexico": "Mexico City", "Cuba": "Havana", "Brazil": "Brasilia", "Argentina": "Buenos Aires", "Chile": "Santiago",
    "Peru": "Lima", "Colombia": "Bogota", "Australia": "Canberra", "New Zealand": "Wellington",
    "Iceland": "Reykjavik",
}  # fmt: skip

CONTINENTS = {
    "Europe": ("France", "Germany", "Italy", "Spain", "Portugal", "Greece", "Austria", "Poland", "Norway", "Sweden",
               "Finland", "Denmark", "Ireland", "Belgium", "Switzerland", "Iceland", "Hungary"),
    "Africa": ("Egypt", "Morocco", "Kenya", "Ethiopia", "Ghana"),
    "Asia": ("India", "China", "Japan", "South Korea", "Thailand", "Vietnam", "Nepal", "Iran", "Iraq"),
    "North America": ("Canada", "Mexico", "Cuba"),
    "South America": ("Brazil", "Argentina", "Chile", "Peru", "Colombia"),
}  # fmt: skip

SOUNDS = {
    "dog": "barks", "cat": "meows", "cow": "moos", "sheep": "bleats", "horse": "neighs", "pig": "grunts",
    "duck": "quacks", "lion": "roars", "frog": "croaks", "bee": "buzzes", "snake": "hisses", "wolf": "howls",
    "owl": "hoots", "mouse": "squeaks", "donkey": "brays", "rooster": "crows",
}  # fmt: skip

YOUNG = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "sheep": "lamb", "horse": "foal", "pig": "piglet",
    "duck": "duckling", "lion": "cub", "frog": "tadpole", "goat": "kid", "bear": "cub", "chicken": "chick",
    "kangaroo": "joey", "swan": "cygnet",
}  # fmt: skip

LEGS = {
    "dog": "four", "cat": "four", "cow": "four", "horse": "four", "bird": "two", "duck": "two", "chicken": "two",
    "owl": "two", "spider": "eight", "ant": "six", "bee": "six", "beetle": "six", "snake": "no", "fish": "no",
    "octopus": "no", "elephant": "four", "lion": "four",
}  # fmt: skip

COLOURS = {
    "the sky": "blue", "grass": "green", "snow": "white", "coal": "black", "blood": "red", "a banana": "yellow",
    "a lemon": "yellow", "a carrot": "orange", "an orange": "orange", "chocolate": "brown", "milk": "white",
    "a ripe tomato": "red", "a strawberry": "red", "the sea": "blue", "a frog": "green", "an elephant": "grey",
    "a flamingo": "pink", "a crow": "black", "a swan": "white", "the sun": "yellow", "a pea": "green",
    "an aubergine": "purple",
}  # fmt: skip

OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "day": "night", "black": "white", "fast": "slow", "old": "new",
    "happy": "sad", "open": "closed", "full": "empty", "wet": "dry", "hard": "soft", "light": "dark", "high": "low",
    "early": "late", "left": "right", "loud": "quiet", "near": "far", "rich": "poor", "strong": "weak",
    "thick": "thin", "young": "aged", "clean": "dirty", "long": "short", "deep": "shallow", "win": "lose",
    "first": "last", "true": "false",
}  # fmt: skip

PLANETS = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")
PLANET_FACTS = {
    "biggest": "Jupiter", "smallest": "Mercury", "hottest": "Venus", "coldest": "Uranus", "red": "Mars",
    "blue": "Earth", "ringed": "Saturn", "most distant": "Neptune",
}  # fmt: skip

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
MONTH_DAYS = dict(zip(MONTHS, (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31), strict=True))

LISTS = {
    "colours": ("red", "blue", "green", "yellow", "orange", "purple", "white", "black", "brown", "pink"),
    "animals": ("dog", "cat", "horse", "cow", "sheep", "lion", "bear", "wolf", "owl", "frog"),
    "fruits": ("apple", "banana", "pear", "orange", "cherry", "grape", "lemon", "peach", "plum", "mango"),
    "vegetables": ("carrot", "potato", "onion", "tomato", "cabbage", "pea", "bean", "leek", "pepper", "spinach"),
    "countries": ("France", "Germany", "Italy", "Spain", "Japan", "India", "Brazil", "Canada", "Egypt", "Kenya"),
    "cities": ("Paris", "London", "Berlin", "Rome", "Tokyo", "Madrid", "Cairo", "Oslo", "Lima", "Seoul"),
    "days": DAYS,
    "months": MONTHS,
    "planets": PLANETS,
    "drinks": ("water", "tea", "coffee", "milk", "juice", "lemonade", "cocoa", "soda"),
    "shapes": ("circle", "square", "triangle", "rectangle", "star", "oval", "cube", "sphere"),
    "instruments": ("piano", "guitar", "violin", "flute", "drum", "trumpet", "harp", "cello"),
    "sports": ("football", "tennis", "swimming", "running", "cycling", "golf", "rugby", "skiing"),
    "numbers": NUMBER_WORDS[1:],
    "letters": ("A", "B", "C", "D", "E", "F", "G", "H", "I", "J"),
    "seasons": ("spring", "summer", "autumn", "winter"),
}  # fmt: skip

LANGUAGES = {
    "French": ("bonjour", "merci", "oui", "non", "au revoir"),
    "Spanish": ("hola", "gracias", "sí", "no", "adiós"),
    "German": ("hallo", "danke", "ja", "nein", "auf Wiedersehen"),
    "Italian": ("ciao", "grazie", "sì", "no", "arrivederci"),
    "Portuguese": ("olá", "obrigado", "sim", "não", "adeus"),
}  # fmt: skip
PHRASES = ("hello", "thank you", "yes", "no", "goodbye")

MESH = {
    "kvmesh": "kvmesh is a mesh of small gRPC services that serves large language models.",
    "a frontend": "The frontend takes requests from clients, renders the chat template and streams the answer back.",
    "a router": "The router chooses which prefill worker and which decode worker serve a request.",
    "a prefill worker": "A prefill worker reads the prompt and computes its KV cache.",
    "a decode worker": "A decode worker takes the KV cache and writes the answer, one token after another.",
    "a planner": "The planner watches the load and the latency of the workers.",
    "a KV cache": "The KV cache holds the keys and values of the tokens that the model has already read.",
    "a token": "A token is a small piece of text, often a word or a part of a word.",
    "Consul": "Consul is where the services of the mesh register and find each other.",
    "NIXL": "NIXL is the library that moves KV blocks from one worker to another.",
    "gRPC": "gRPC is the way in which the services call each other, with protobuf messages.",
}
