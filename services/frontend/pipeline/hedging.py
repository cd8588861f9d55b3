"""Decides when a prompt is sent to a second prefill worker, and how often. Pure: times are arguments."""

from collections import deque

from services.frontend.settings import HedgeSettings

AFTER_S_MIN = 0.05
"""Shortest time after which a prompt is hedged: a shorter delay is not worth the work of a second prefill worker."""
SAMPLES_MIN, SAMPLES_MAX = 20, 256
"""Prompts whose times must be known before one is hedged, and prompts whose times are kept. Of 20 times the 0.95 quantile is the largest."""


class PrefillTimes:
    """Measures how much longer than expected prefill workers take, and limits the share of hedged requests.

    One per model. The router's expectation differs from prompt to prompt, so the quantile is taken over ratios: a prompt is hedged when
    it takes longer than its own expectation times the ratio that only a few prompts exceed.
    """

    def __init__(self, settings: HedgeSettings) -> None:
        self._settings = settings
        self._ratios: deque[float] = deque(maxlen=SAMPLES_MAX)
        self._quantile: float | None = None
        self._credit = 0.0

    def add_request(self) -> None:
        """A prompt was sent to a prefill worker. Each adds its share of a hedge; unused shares add up to one."""
        self._credit = min(1.0, self._credit + self._settings.share_max)

    def add_time(self, *, expected_s: float, elapsed_s: float) -> None:
        """A prefill worker has computed a prompt."""
        self._ratios.append(elapsed_s / expected_s)
        self._quantile = None

    def hedge_after_s(self, expected_s: float | None) -> float | None:
        """Returns how long the prefill worker may take before another one gets the prompt. None: too little is known."""
        if not expected_s or len(self._ratios) < SAMPLES_MIN:
            return None
        if self._quantile is None:
            ordered = sorted(self._ratios)
            self._quantile = ordered[min(len(ordered) - 1, int(self._settings.quantile * len(ordered)))]
        return max(AFTER_S_MIN, expected_s * self._quantile)

    def take_nowait(self) -> bool:
        """Takes a hedge. False: the share is used up."""
        # Shares such as 0.1 add up to a little less than one.
        if self._credit < 1.0 - 1e-9:
            return False
        self._credit = 0.0
        return True
