"""How many tokens a step may compute so that it takes no longer than a given time. No clock, no vLLM."""

from collections import deque
from statistics import median

TOKENS_FIRST = 64
"""The first step's budget: small enough for a large model, and doubled by each step that is fast."""
TOKENS_MIN = 32
"""Prompt tokens that every step may compute beside its decoding requests, so that prompts always advance."""
FILL = 0.75
"""Share of the time that a step aims at; the rest absorbs noise of the machine."""
GROWTH_MAX = 2.0
"""Largest factor from the tokens of one full step to the budget of the next."""
SAMPLES = 5
"""Steps that an estimate is the median of: pauses of the machine fall out of it."""


class StepBudget:
    """Learns the budget from the steps' times. Chunks change results by rounding only, so a wrong guess costs time.

    The time of a step is a fixed part plus one in proportion to its prompt tokens. The budget is the time allowed, divided by the
    full steps' time per token, which converges since a larger step has a smaller share of the fixed part. Where the fixed part
    is large (a large model, many decoding requests), a step may take twice as long as that part: smaller ones would make
    prompts take far longer and cancels hardly sooner.
    """

    def __init__(self, budget_s: float, tokens_max: int, tokens_min: int = TOKENS_MIN) -> None:
        """`tokens_min` is at least a block for models whose chunks end at block borders."""
        self._target_s = FILL * budget_s
        self._tokens_max = tokens_max
        self._tokens_min = tokens_min
        self._prompt_tokens = min(TOKENS_FIRST, tokens_max)
        self._token_times_s: deque[float] = deque(maxlen=SAMPLES)
        self._fixed_times_s: deque[float] = deque(maxlen=SAMPLES)

    def tokens(self, decode_tokens: int) -> int:
        """Budget of the next step, in which running requests decode up to `decode_tokens`."""
        return min(self._tokens_max, decode_tokens + max(self._tokens_min, self._prompt_tokens))

    def observe(self, prompt_tokens: int, step_s: float) -> None:
        """Takes a step's time into account."""
        if 8 * prompt_tokens <= self._prompt_tokens:
            self._fixed_times_s.append(step_s)
            return
        is_full = 2 * prompt_tokens >= self._prompt_tokens
        if not is_full and step_s <= self._target_s:
            # A fast step that left most of the budget unused says little about a full one.
            return
        self._token_times_s.append(step_s / prompt_tokens)
        fixed_s = median(self._fixed_times_s) if self._fixed_times_s else 0.0
        fitting = max(self._target_s, 2 * fixed_s) / max(median(self._token_times_s), 1e-9)
        self._prompt_tokens = max(1, min(int(fitting), int(GROWTH_MAX * prompt_tokens), self._tokens_max))
