"""What lookups came to, and the few probes that show whether it still holds. Pure.

What a lookup gives is settled by the holders of a few of the prompt's blocks: the last block of each prefix that somebody holds,
and the one behind it. Where these have the holders that they had, the whole lookup comes to what it came to, also for another
prompt: two probes per depth instead of two times the logarithm of the prompt's length. Prompts that begin alike mostly have their
ends at the same places, so the newest lookup is remembered by the prompt's first block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

Prefixes = tuple[tuple[int, ...], tuple[int, ...]]
"""Depths, the deepest last, and for each the set of the holders whose longest held prefix it is."""

NOBODY: Prefixes = ((), ())
"""Of a lookup that finds no holder; it is this very object then."""

ANSWERS_MAX = 2048
PLACES_MAX = 64
"""Blocks that an answer hangs on; with more of them it is not remembered. Both together bound the memory to about 10 MB."""
_ENDLESS = 1 << 62


@dataclass(slots=True, eq=False)
class _Answer:
    """What a lookup came to. `probed` gives the blocks of a prompt on which it hangs, `holders` are theirs."""

    found: Prefixes
    probed: Callable[[Sequence[int]], tuple[int, ...]] | None = None
    """None: it was seen once only. Most of those never come again, and this takes as long as a short lookup."""
    holders: tuple[int | None, ...] = ()
    blocks_min: int = 0
    blocks_max: int = 0
    """Prompts of these lengths have the places, and end where it matters."""


class Recall:
    """Of one index. To be cleared when bits begin or cease to count."""

    __slots__ = ("_answers",)

    def __init__(self) -> None:
        self._answers: dict[int, _Answer] = {}

    def clear(self) -> None:
        """Forgets everything."""
        self._answers.clear()

    def find(self, block_hashes: Sequence[int], get: Callable[[int], int | None]) -> Prefixes | None:
        """What the lookup comes to; None: it has to be made. `get` gives the holders of a block, as for `keep`."""
        answer = self._answers.get(block_hashes[0])
        if answer is None or (probed := answer.probed) is None:
            return None
        if not answer.blocks_min <= len(block_hashes) <= answer.blocks_max:
            return None
        return answer.found if tuple(map(get, probed(block_hashes))) == answer.holders else None

    def keep(self, block_hashes: Sequence[int], found: Prefixes, get: Callable[[int], int | None]) -> None:
        """The lookup was made and came to this; somebody holds the first block."""
        before = self._answers.get(block_hashes[0])
        if before is None or before.found != found:
            if 2 * len(found[0]) < PLACES_MAX:
                if len(self._answers) >= ANSWERS_MAX:
                    self._answers.clear()
                self._answers[block_hashes[0]] = _Answer(found)
            return
        count, deepest = len(block_hashes), found[0][-1]
        places = {0, *(depth - 1 for depth in found[0]), *found[0]} - {count}
        if len(places) > 1:
            before.probed = itemgetter(*sorted(places))
            before.holders = tuple(map(get, before.probed(block_hashes)))
            # A prompt that is held whole may go on in a longer one; one that is not has the same end in any that is long enough.
            before.blocks_min, before.blocks_max = (count, count) if deepest == count else (deepest + 1, _ENDLESS)
