"""The two stages of the training: their text, length and rates."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from corpus import drill, mixture
from corpus.mixture import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The rate goes up over `warm_up_steps`, is level, and falls straight to zero over the last `fall_steps` of
    `schedule_steps`. `rate` is the level, as a share of the full rates. A run of fewer `steps` stops on the slope.
    """

    seed: int
    samples: Callable[[int], Iterator[Sample]]
    steps: int
    schedule_steps: int
    fall_steps: int
    warm_up_steps: int
    rate: float

    def rate_factor(self, step: int) -> float:
        fall = max((self.schedule_steps - step) / self.fall_steps, 0.01)
        return self.rate * min((step + 1) / self.warm_up_steps, 1.0, fall)


FIRST = Stage(
    seed=20,
    samples=mixture.samples,
    steps=1800,
    schedule_steps=2100,
    fall_steps=1050,
    warm_up_steps=40,
    rate=1.0,
)
# Its rate begins where that of the first stage ended.
SECOND = Stage(
    seed=40,
    samples=drill.samples,
    steps=320,
    schedule_steps=320,
    fall_steps=320,
    warm_up_steps=10,
    rate=0.3,
)
