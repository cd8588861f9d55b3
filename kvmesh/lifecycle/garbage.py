"""How often the process looks for garbage in cycles."""

import gc

YOUNG_OBJECTS = 50_000
OLDER_ROUNDS = 20


def collect_seldom() -> None:
    """To be called once, when the process has imported what it needs.

    What a request or a decision makes is freed by its reference counts; looking through what lives, requests in flight and the
    router's history, for cycles that are not there took a tenth of the time of decisions. What is imported is never looked at
    again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, OLDER_ROUNDS, OLDER_ROUNDS)
