"""The course of the training: which text, and which rate, at which step."""

from collections.abc import Iterator
from itertools import pairwise

from corpus import mixture
from corpus.mixture import Sample

SEED = 51
# Text and seed change at these borders only, so that a training can go on from any of them.
CHUNK_STEPS = 100
# To find again what was said is what most answers need, and it is learnt late without chunks of its own.
CHUNKS = {
    0: mixture.copying_sample,
    1: mixture.sample,
    2: mixture.sample,
    3: mixture.echoing_sample,
    4: mixture.blended_sample,
    5: mixture.blended_sample,
    6: mixture.practice_sample,
    7: mixture.practice_sample,
    8: mixture.practice_sample,
    9: mixture.drill_sample,
    10: mixture.drill_sample,
    11: mixture.finishing_sample,
}
CONTINUED = 6100
"""The step at which a training goes on from weights instead of a checkpoint."""
BALANCED = 3400
"""From this step on the text has more memory and tools, of which the single questions before cost some."""
VARIED = 4300
"""From this step on every kind has wordings that are composed of many parts."""
CHOOSING = 5900
"""From this step on the text has more choices between tools that are alike, which the weights before confused."""
WIDE = 6100
"""From this step on the text has more of what was weak until then, in yet more wordings."""
ADDING = 7100
"""From this step on the text has more sums."""
# The rate by steps, straight between them. It falls over the last part: much of what is learnt is learnt there.
RATES = {
    -1: 0.0,
    39: 1.0,
    600: 1.0,
    700: 250 / 350,
    900: 0.477,
    1000: 0.3376,
    1100: 0.2707,
    1260: 0.003,
    1300: 0.5,
    2600: 0.5,
    3400: 0.003,
    3440: 0.45,
    3800: 0.45,
    4300: 0.003,
    4340: 0.5,
    4900: 0.5,
    5100: 0.423,
    5200: 0.37,
    5750: 0.003,
    5760: 0.2,
    5900: 0.003,
    5905: 0.25,
    6000: 0.003,
    6005: 0.3,
    6100: 0.0,
    6140: 0.45,
    6600: 0.45,
    6700: 0.375,
    7100: 0.0,
    7120: 0.3,
    7300: 0.3,
    7800: 0.0,
}
STEPS = max(RATES)


def samples(step: int, seed: str) -> Iterator[Sample]:
    """The text of the chunk that `step` is in."""
    last = mixture.consolidating_sample if step < BALANCED else mixture.balanced_sample
    if step >= VARIED:
        last = mixture.varied_sample if step < CHOOSING else mixture.choosing_sample
    if step >= WIDE:
        last = mixture.wide_sample if step < ADDING else mixture.adding_sample
    return mixture.samples(seed, CHUNKS.get(step // CHUNK_STEPS, last))


def rate_factor(step: int) -> float:
    """The share of the full rate."""
    for (first, low), (last, high) in pairwise(RATES.items()):
        if step < last:
            return low + (high - low) * (step - first) / (last - first)
    return RATES[STEPS]
