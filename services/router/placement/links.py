"""How long KV takes from a prefill to a decode worker, by how far they are from each other; learned from what was observed.

A nearer pair is never believed slower than a farther one: a few slow reads must not send traffic over a slower network, and
the search for the best pair (`pairing.py`) relies on it.
"""

from collections.abc import Sequence
from enum import IntEnum

from services.router.workers.coefficients import Coefficient, Linear, Source
from services.router.workers.cost_settings import CostSettings


class Distance(IntEnum):
    """Between two workers."""

    HOST = 0
    ZONE = 1
    FAR = 2


class Links:
    """One estimate per distance: a base and seconds per byte."""

    def __init__(self, settings: CostSettings) -> None:
        self._learning = settings.learning
        rates = (settings.host_bytes_per_s, settings.zone_bytes_per_s, settings.far_bytes_per_s)
        self._lines = [
            Linear(
                [
                    (f"{distance.name.lower()}_handoff_s", settings.handoff_s, Source.DEFAULT),
                    (f"{distance.name.lower()}_s_per_byte", 1 / rate, Source.DEFAULT),
                ]
            )
            for distance, rate in zip(Distance, rates, strict=True)
        ]
        self.lines: Sequence[tuple[float, float]] = self._ordered()
        """Base in seconds and seconds per byte, by distance."""

    def learn(self, distance: Distance, transferred_bytes: float, observed_s: float) -> None:
        """A handoff took so long."""
        if self._learning:
            self._lines[distance].learn(observed_s, 1, transferred_bytes)
            self.lines = self._ordered()

    def told(self) -> Sequence[Coefficient]:
        """As others see it."""
        return [coefficient for line in self._lines for coefficient in line.told()]

    def _ordered(self) -> Sequence[tuple[float, float]]:
        """A farther distance takes at least what a nearer one does."""
        base_s, s_per_byte = 0.0, 0.0
        ordered = []
        for line in self._lines:
            own_base_s, own_s_per_byte = line.values
            base_s = own_base_s if own_base_s > base_s else base_s
            s_per_byte = own_s_per_byte if own_s_per_byte > s_per_byte else s_per_byte
            ordered.append((base_s, s_per_byte))
        return ordered
