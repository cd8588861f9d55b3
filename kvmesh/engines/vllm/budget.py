"""Limits the tokens of a step so that steps stay within a target time. No clock, no vLLM."""

from collections import deque
from statistics import median

TOKENS_FIRST = 64
"""The first step's budget: small enough for a large model. Each fast step doubles it."""
TOKENS_MIN = 32
"""Prompt tokens that every step may compute, so that prompts always advance."""
FILL = 0.75
"""Share of the target time to fill; the rest absorbs noise of the machine."""
GROWTH_MAX = 2.0
"""Largest ratio of a budget to the tokens of the full step before it."""
SAMPLES = 5
"""Steps per estimate. Their median ignores pauses of the machine."""


class StepBudget:
    """Learns the token budget from the times of steps. A wrong estimate costs time only, since chunked prompts give the same results.

    A step takes a fixed time plus a time in proportion to its prompt tokens. The budget is the target time divided by the full
    steps' time per token. This converges, because the fixed part is a smaller share of a larger step. If the fixed part is large (a
    large model, many decoding requests), a step may take twice the fixed part: smaller steps would delay prompts a lot and make
    cancels hardly faster.
    """

    def __init__(self, *, budget_s: float, tokens_max: int, tokens_min: int = TOKENS_MIN) -> None:
        """`tokens_min` must be at least a block for models whose chunks end at block boundaries."""
        self._target_s = FILL * budget_s
        self._tokens_max = tokens_max
        self._tokens_min = tokens_min
        self._prompt_tokens = min(TOKENS_FIRST, tokens_max)
        self._token_times_s: deque[float] = deque(maxlen=SAMPLES)
        self._fixed_times_s: deque[float] = deque(maxlen=SAMPLES)

    def tokens(self, decode_tokens: int) -> int:
        """Returns the budget of the next step, in which running requests decode up to `decode_tokens`."""
        return min(self._tokens_max, decode_tokens + max(self._tokens_min, self._prompt_tokens))

    def observe(self, prompt_tokens: int, step_s: float) -> None:
        """Updates the estimate with the time of a step."""
        # Almost no prompt tokens: this is the fixed part of a step's time.
        if 8 * prompt_tokens <= self._prompt_tokens:
            self._fixed_times_s.append(step_s)
            return
        is_full = 2 * prompt_tokens >= self._prompt_tokens
        if not is_full and step_s <= self._target_s:
            # A fast step that used little of the budget says little about a full one.
            return
        self._token_times_s.append(step_s / prompt_tokens)
        fixed_s = median(self._fixed_times_s) if self._fixed_times_s else 0.0
        fitting = max(self._target_s, 2 * fixed_s) / max(median(self._token_times_s), 1e-9)
        self._prompt_tokens = max(1, min(int(fitting), int(GROWTH_MAX * prompt_tokens), self._tokens_max))
