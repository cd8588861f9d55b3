"""How candidates are weighed. A policy is a small class; the table at the end finds it by name.

A policy weighs one leg of a request on all candidates at once and gives its terms as columns, one value per candidate. The
cost of a candidate is the sum of its terms, the cost of a pair the sum of both legs; the lowest wins (`place.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import ClassVar, Protocol

from services.router.fleet import Target

Columns = Mapping[str, Sequence[float]]


class LegKind(StrEnum):
    """What a candidate is weighed for. ALONE: the decode worker computes the prompt too."""

    PREFILL = "prefill"
    DECODE = "decode"
    ALONE = "alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Linear weights of the `kv` policy; its unit is one prompt token to compute.

    Moving a token's KV costs far less than computing it, but is not free; a token held on a decode worker slows every step
    there a little.
    """

    transfer: float = 0.05
    decode_load: float = 0.1


class Policy(Protocol):
    """One way to weigh."""

    name: ClassVar[str]
    """Found by this word; also the reason of a placement, except for `kv`, which says what decided."""

    def weigh(self, kind: LegKind, prompt_tokens: int, targets: Sequence[Target], cached: Sequence[int]) -> Columns:
        """At least one column. `cached[i]`: prompt tokens that `targets[i]` holds already."""
        ...


class KvPolicy:
    """Work that the request waits for: the queue, its own uncached tokens, the transfer, and pressure on decode."""

    name: ClassVar[str] = "kv"

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def weigh(self, kind: LegKind, prompt_tokens: int, targets: Sequence[Target], cached: Sequence[int]) -> Columns:
        """Prefill: queue + prefill. Decode: transfer + decode. Alone: queue + prefill + decode."""
        columns: dict[str, Sequence[float]] = {}
        if kind is LegKind.DECODE:
            rate = self._weights.transfer
            columns["transfer"] = [rate * (prompt_tokens - held) for held in cached]
        else:
            columns["queue"] = [target.prompt_tokens_queued for target in targets]
            columns["prefill"] = [prompt_tokens - held for held in cached]
        if kind is not LegKind.PREFILL:
            rate = self._weights.decode_load
            columns["decode"] = [rate * target.kv_tokens_active for target in targets]
        return columns


class RoundRobinPolicy:
    """Whoever got a request longest ago."""

    name: ClassVar[str] = "round_robin"

    def weigh(self, kind: LegKind, prompt_tokens: int, targets: Sequence[Target], cached: Sequence[int]) -> Columns:
        """One term: the number of the placement that it got last."""
        return {"turn": [target.placed_last for target in targets]}


class LeastLoadedPolicy:
    """Whoever has the fewest requests."""

    name: ClassVar[str] = "least_loaded"

    def weigh(self, kind: LegKind, prompt_tokens: int, targets: Sequence[Target], cached: Sequence[int]) -> Columns:
        """One term: requests running, waiting or on their way."""
        return {"requests": [target.requests_active for target in targets]}


class RandomPolicy:
    """Anybody, from a seeded generator."""

    name: ClassVar[str] = "random"

    def __init__(self, generator: Random) -> None:
        self._random = generator.random

    def weigh(self, kind: LegKind, prompt_tokens: int, targets: Sequence[Target], cached: Sequence[int]) -> Columns:
        """One term: a random number."""
        return {"chance": [self._random() for _ in targets]}


POLICIES: Mapping[str, Callable[[Weights, Random], Policy]] = {
    "kv": lambda weights, generator: KvPolicy(weights),
    "round_robin": lambda weights, generator: RoundRobinPolicy(),
    "least_loaded": lambda weights, generator: LeastLoadedPolicy(),
    "random": lambda weights, generator: RandomPolicy(generator),
}
