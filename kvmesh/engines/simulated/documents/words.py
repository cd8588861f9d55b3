"""Makes up texts of a given length or format."""

import uuid
from collections.abc import Callable, Mapping
from random import Random

WORDS = (
    "apple river stone cloud amber north light garden paper silver maple ocean winter candle orange forest bridge "
    "copper meadow harbor lantern pebble saddle velvet walnut"
).split()
CHARACTERS_DEFAULT = 24


def make_words(random: Random, low: int, high: int | None) -> str:
    """Words with `low` to `high` characters in total."""
    limit = max(low, CHARACTERS_DEFAULT) if high is None else high
    text = random.choice(WORDS)
    while len(text) < low or (len(text) < limit // 2 and random.random() < 0.5):
        text += " " + random.choice(WORDS)
    return text[:limit].rstrip().ljust(low, "a")


def _date(random: Random) -> str:
    return f"20{random.randrange(10, 40):02}-{random.randrange(1, 13):02}-{random.randrange(1, 29):02}"


def _time(random: Random) -> str:
    return f"{random.randrange(24):02}:{random.randrange(60):02}:{random.randrange(60):02}Z"


def _word(random: Random) -> str:
    return random.choice(WORDS)


FORMATS: Mapping[str, Callable[[Random], str]] = {
    "date": _date,
    "time": _time,
    "date-time": lambda random: f"{_date(random)}T{_time(random)}",
    "duration": lambda random: f"P{random.randrange(1, 30)}D",
    "email": lambda random: f"{_word(random)}@{_word(random)}.example",
    "hostname": lambda random: f"{_word(random)}.example",
    "ipv4": lambda random: f"192.0.2.{random.randrange(1, 255)}",
    "ipv6": lambda random: f"2001:db8::{random.randrange(1, 65535):x}",
    "uuid": lambda random: str(uuid.UUID(int=random.getrandbits(128), version=4)),
    "uri": lambda random: f"https://{_word(random)}.example/{_word(random)}",
}
"""JSON Schema formats."""
