"""Words and phrases that fill the patterns: tables of common words, and made-up words that can only be copied."""

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from random import Random

NAMES = tuple(
    """Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Maria Noah Olivia Paul Ruth Sam Tina Victor Wendy
    Omar Mei Ravi Lena Aaron Abdul Adam Agnes Ahmed Aisha Alan Albert Alex Ali Amara Amy Ana Andre Angela Anton Arjun Arthur
    Astrid Ayesha Barbara Bao Bella Bianca Bruno Camila Carl Carlos Carmen Cecilia Charles Chloe Chris Daniel Daria
    Deepa Diego Dora Edith Edward Elena Eli Elif Elsa Eric Esther Eva Farah Fiona Francis Frank Gabriel George Georgia
    Gita Goran Hana Harold Hassan Heidi Helen Hugo Ian Ida Igor Ines Isaac Ivy Jamal James Jana Jane Jin Joan Joe John
    Jonas Jorge Joseph Julia Karim Karl Katya Kenji Khalid Klaus Kofi Lars Laura Layla Lily Linda Ling Lucas Lucy Luis
    Luna Magda Malik Marco Margaret Mark Martha Martin Matteo Max Michael Mila Minh Mohammed Mona Monica Nancy Naomi
    Natasha Nia Nick Nina Nora Olga Oleg Otto Pablo Pavel Pedro Peter Petra Philip Pierre Quinn Rachel Rahul Raj Rania
    Rebecca Rita Robert Rosa Roy Sally Samira Sandra Sara Sean Selma Sergei Simon Sofia Stefan Steve Sunita Susan Svetlana
    Takeshi Tara Thomas Tim Tom Uma Ursula Vera Viktor Walter Wei William Xavier Yara Yuki Yusra Zara Zainab Zuri""".split()
)
CITIES = (
    "Paris", "London", "Berlin", "Rome", "Tokyo", "Madrid", "Cairo", "Oslo", "Lima", "Seoul", "Vienna", "Prague",
    "Boston", "Chicago", "Toronto", "Sydney", "Mumbai", "Nairobi", "Dublin", "Athens", "Lisbon", "Zurich", "Hamburg",
    "New York", "San Francisco", "Buenos Aires", "Cape Town", "Hong Kong", "Munich", "Milan", "Naples", "Geneva",
    "Lyon", "Seville", "Delhi", "Jakarta", "Dallas", "Seattle", "Montreal", "Miami", "Houston", "Osaka", "Bangkok",
    "Helsinki", "Warsaw", "Krakow", "Istanbul", "Dubai", "Tehran", "Baghdad", "Accra", "Dakar", "Tunis", "Havana",
    "Bogota", "Quito", "Santiago", "Manila", "Hanoi", "Perth", "Auckland", "Leeds", "Glasgow", "Brussels", "Antwerp",
    "Los Angeles", "Mexico City", "Addis Ababa", "Rio de Janeiro", "Saint Petersburg", "Kuala Lumpur", "Tel Aviv",
)  # fmt: skip
ANIMALS = tuple(
    """dog cat horse fox rabbit bird owl bear mouse duck frog goat cow sheep lion tiger wolf snake fish bee ant spider
    whale shark monkey parrot turtle camel donkey goose swan deer hamster penguin elephant zebra crow pigeon""".split()
)
PLACES = tuple(
    """garden forest river market house village beach kitchen library station park mountain school harbour bridge farm
    office bedroom bathroom cellar hall attic church castle island lake valley desert field street shop bakery museum
    theatre hotel airport hospital tower mill cave port""".split()
)
THINGS = tuple(
    """book ball lamp letter key map basket coat boat clock cup hat stone box flower bottle candle violin kite umbrella
    table chair door window ship train car bicycle phone pencil paper knife spoon plate glass mirror pillow blanket shoe
    sock shirt ring coin bag wallet camera radio piano guitar drum hammer nail rope ladder wheel engine rocket planet
    star cloud tree leaf grass rain wind snow fire water ice sand""".split()
)
ADJECTIVES = tuple(
    """old small red bright quiet happy green warm tall strange golden blue heavy friendly broken tiny big new young
    cold dark soft hard round clean dirty empty full slow fast loud sweet bitter brave clever lazy yellow purple white
    black brown silver wooden open closed ready late early""".split()
)
WEATHER = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear", "stormy")
FOODS = tuple(
    """bread soup apples cheese rice cake fish pasta honey berries butter eggs ham tea coffee milk juice sugar salt
    pepper potatoes tomatoes onions beans carrots lemons oranges pears plums nuts chocolate biscuits pancakes salad pizza
    noodles yoghurt jam""".split()
)
VERBS = tuple(
    """found carried painted cleaned lost bought hid opened borrowed repaired saw took made sold broke washed moved
    wanted needed liked forgot""".split()
)
MOVES = tuple(
    "walk run swim go drive fly sail travel hurry return march ride come sleep work sing dance wait play meet".split()
)
COMMON = tuple(
    """the a an is are was were in on at to of and or but with for from my your our his her we you they it this that all
    one two three four five not no yes will can must every some many here there now today tomorrow again always never
    very good bad best more less who what when where why how""".split()
)
# Common words of no kind: they only come in texts to copy, to search for or to translate.
EVERYDAY = tuple(
    """able about above accept across act add address adult advice afraid after age air alarm album alive almost alone along already
    amount anger angle answer anyone apart area arm army arrive art asleep aunt author autumn away baby back balance band bank bar
    bark base bath battle bean beat beauty become before begin behind believe bell below belt bench beside beyond birth bite blame
    blind block blood board body bone border boss both bowl brain branch break breath brick bridge bring broad brother brush build
    burn bus business busy button buy call calm camp card care careful carpet carry case cause center century chain chance change
    charge chase cheap check cheese chest chicken child choice circle citizen city class clear climb close cloth coach coal coast
    coffee collect colour comb come comfort common company compare complete computer cook cool copper copy corner correct cost
    cotton count country couple course cousin cover crack crash cream credit crime cross crowd cry cup current curtain curve cut
    damage danger data daughter day deal dear death debt decide decision deep degree demand dentist depend describe desire detail
    dinner direction discover discuss distance divide doctor double doubt draw dream dress drink drop dry dust duty each ear earth
    east easy eat edge education effect eight eighty either electric eleven enemy energy enjoy enough enter equal error evening
    event exact example except exercise expect expert explain eye face fact fail faith fall false family famous fashion father
    fear feather feel fence few fifteen fifty fight figure fill film final finger finish first five flag flame flat floor flour
    follow food foot force foreign forgive form forty forward four freedom fresh friend front fruit full funny future game gate
    general gentle gift girl give glue goal gold goodbye grain grand great grey ground group grow guest guide habit hair half hand
    happen harbour hat hate head health heart heat height hello help history hit hobby hold hole holiday home honest hope hour
    hundred hungry hurt husband idea important inch income increase industry insect inside instead interest iron job join joke
    journey joy judge jump keep kick kid kind king kiss kitchen knee knock know labour lady land language large laugh law leader
    lean learn leave leg lesson letter level library life lift like limit line lion lip list listen little live lock logical long
    look lord lose lot love lunch machine main manner march mark market marry master match material matter meal measure meat
    medicine member memory message metal method middle might milk mind mine minute miss mistake mix model modern moment monday
    money month moon morning mother motor mouth move much music name nation nature near neck need needle nephew nerve net never
    news next nine ninety nobody noise none normal north nose note nothing notice number ocean offer office often oil only open
    orange order other outside oven own page pain pair pale park part party pass past path pay peace people person phone photo
    picture piece pink place plan plane plant play please pocket point police polite poor position possible post pot pound power
    present press pretty price prince print prison private prize problem produce promise proof protect proud public pull punish
    pure push quality queen question quick quiet race rail raise range rate reach read ready real reason receive record regular
    remember rent report rest result return rhyme ride right river road roof room root rough round row rule rush safe sailor salt
    same saturday save school science score screen search season seat second secret sell send sense seven shadow shake shame shape
    share sharp sheet shelf shine shop shore shoulder shout show shut sick side sign silence silver simple sing sister six sixty
    size skin skirt sky sleep slip smart smell smile smoke smooth soap soldier solid some son song sort sound south space special
    speech speed spend spirit spoil sport spot spread spring square stable stage stair stamp stand start state station stay steam
    steel step stick stiff still stomach stop store storm story straight strange stream strength stretch strike string study
    stupid subject success sudden suit summer sunday support sure surprise sweet swim sword system tail take talk taste tax taxi
    teach team tear telephone ten test thank theory thick thin thing think third thirty thousand thread three throat through thumb
    thunder ticket tie tight time tired title toe together tomorrow tongue tool tooth top total touch tour towel town toy trade
    traffic travel trick trip trouble true trust truth try turn twelve twenty twice twin two type uncle under union unit until
    upper use useful usual valley value very view violet visit voice vote wait walk wall war warm warning wash waste watch wave
    way weak weapon weather week weight welcome west whisper whole why wide wife wild will win window wine wing winter wise wish
    woman wonder wood wool word work world worry wrong year yes yesterday young zero kvmesh router worker planner token cache mesh
    server""".split()
)
TOPICS = tuple(
    """quantum physics;the stock market;politics;medicine;the law;football results;philosophy;computer games;tax
    forms;chemistry;the history of Rome;machine learning;cooking;cars;the news;poetry;economics;love;dinosaurs;religion;volcanoes;the
    moon landing;black holes;gardening;knitting;black and white films;the Olympic games;vitamins;sailing;the French
    revolution;electric cars;solar power;insurance;bread baking;yoga;the Roman empire;opera;jazz;climate change;elections;road
    safety;batteries;rockets;the internet;passports;mountain climbing;chess openings;dreams;friendship;money;sleep;the
    ocean;bacteria;evolution;gravity;robots;castles;the Middle Ages;trains;banks;holidays;running shoes;camping;photography;coffee
    machines;fishing;pirates;happiness;old coins;novels;painting;architecture;bicycles;allergies""".replace(
        "\n    ", " "
    ).split(";")
)
TABLES: tuple[Sequence[str], ...] = (
    NAMES, CITIES, ANIMALS, PLACES, THINGS, ADJECTIVES, WEATHER, FOODS, VERBS, MOVES, COMMON,
)  # fmt: skip

_ONSETS = tuple(
    "b br bl c ch cl cr d dr f fl fr g gl gr h j k kl l m n p pr ph r s st sh sch sw t tr th v w x y z qu".split()
)
_VOWELS = ("a", "e", "i", "o", "u", "ee", "oo", "ai", "ou", "ie", "y", "ia", "ea")
_CODAS = ("", "", "", "n", "r", "l", "m", "s", "t", "x", "nd", "sk", "p", "ck", "b", "g", "ss", "ng", "rt", "pp", "ll")
_UNUSUAL = ("é", "ü", "ñ", "ß", "ø", "日本", "你好", "привет", "Ω", "€", "→", "🙂", "🚀", "✓", "½", "å", "ł", "ç")


def _syllables(rng: Random) -> str:
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(rng.choice((1, 2, 2, 2, 3)))
    )


@cache
def _followers() -> dict[str, str]:
    """Two letters -> the letters that follow them in the tables."""
    found: dict[str, list[str]] = defaultdict(list)
    for word in (part for table in (*TABLES, TOPICS) for entry in table for part in entry.lower().split()):
        for index in range(len(word) + 1):
            found[("^^" + word)[index : index + 2]].append((word + "$")[index])
    return {pair: "".join(letters) for pair, letters in found.items()}


def _like_english(rng: Random) -> str:
    """Letters that follow each other as in the tables."""
    word, pair = "", "^^"
    while len(word) < 11:
        letter = rng.choice(_followers()[pair])
        if letter == "$":
            if len(word) > 2:
                break
            word, pair = "", "^^"
            continue
        word, pair = word + letter, pair[1] + letter
    return word


def made_up_word(rng: Random) -> str:
    """A word that is in no table, so that it can only be copied."""
    kind = rng.random()
    if kind < 0.4:
        return _syllables(rng)
    if kind < 0.9:
        return _like_english(rng)
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 9)))


def made_up_name(rng: Random) -> str:
    return made_up_word(rng).capitalize()


def code(rng: Random) -> str:
    """Letters and digits."""
    kind = rng.random()
    if kind < 0.5:
        return "".join(rng.choice("abcdefghijkmnpqrstuvwxyz0123456789") for _ in range(rng.randint(3, 8)))
    if kind < 0.75:
        return made_up_word(rng) + str(rng.randrange(1000))
    return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(2, 5))) + str(rng.randrange(100))


def person(rng: Random) -> str:
    """A known or a made-up name, now and then with a small first letter."""
    name = rng.choice(NAMES) if rng.random() < 0.45 else made_up_name(rng)
    return name.lower() if rng.random() < 0.08 else name


def place(rng: Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.5 else made_up_name(rng)


def known_word(rng: Random) -> str:
    return rng.choice(rng.choice(TABLES))


def any_word(rng: Random) -> str:
    """A word of the tables, or a made-up one, a number or an unusual character, in falling frequency."""
    kind = rng.random()
    if kind < 0.3:
        return known_word(rng)
    if kind < 0.55:
        word = rng.choice(EVERYDAY)
        return word.capitalize() if rng.random() < 0.1 else word
    if kind < 0.88:
        word = made_up_word(rng)
        return word.capitalize() if rng.random() < 0.25 else word
    if kind < 0.92:
        return code(rng)
    return str(rng.randrange(10 ** rng.randint(1, 5))) if kind < 0.98 else rng.choice(_UNUSUAL)


def sentence(rng: Random) -> str:
    """One plain English sentence."""
    name, thing, spot = rng.choice(NAMES), rng.choice(THINGS), rng.choice(PLACES)
    shapes = (
        f"{name} {rng.choice(VERBS)} the {rng.choice(ADJECTIVES)} {thing} near the {spot}.",
        f"The {rng.choice(ADJECTIVES)} {rng.choice(ANIMALS)} sleeps in the {spot}.",
        f"It is {rng.choice(WEATHER)} in {rng.choice(CITIES)} today.",
        f"We eat {rng.choice(FOODS)} in the {spot}.",
        f"{name} and {rng.choice(NAMES)} {rng.choice(MOVES)} to the {spot}.",
        f"There is a {rng.choice(ADJECTIVES)} {thing} in the {spot}.",
        f"I like {rng.choice(FOODS)} and {rng.choice(FOODS)}.",
        f"The name of my {rng.choice(ANIMALS)} is {name}.",
        f"We will {rng.choice(MOVES)} at {rng.choice(COMMON)} {spot}.",
        f"My {thing} is {rng.choice(ADJECTIVES)} and my {rng.choice(THINGS)} is {rng.choice(ADJECTIVES)}.",
        f"{made_up_name(rng)} will {rng.choice(MOVES)} with the {rng.choice(ADJECTIVES)} {made_up_word(rng)}.",
    )
    return rng.choice(shapes)


def words(rng: Random, longest: int = 10) -> str:
    """A row of words without grammar: the next one can only be read, not guessed."""
    count = min(rng.randint(1, longest), rng.randint(1, longest))
    return " ".join(any_word(rng) for _ in range(count))


def phrase(rng: Random) -> str:
    """Something to copy: a sentence, or a row of words, with or without a closing mark."""
    kind = rng.random()
    if kind < 0.25:
        text = sentence(rng)
        return text if rng.random() < 0.5 else text.rstrip(".")
    text = words(rng)
    if kind < 0.32:
        text = ", ".join(text.split(" "))
    if rng.random() < 0.4:
        text = text[0].upper() + text[1:]
    return text + rng.choice(("", "", "", ".", "!"))
