"""How many tokens a step may compute so that it takes no longer than a given time. No clock, no vLLM."""

TOKENS_FIRST = 64
"""The first step's budget: small enough for a large model, and doubled by each step that is fast."""
TOKENS_MIN = 16
"""Prompt tokens that every step may compute beside its decoding requests, so that prompts always advance."""
FILL = 0.75
"""Share of the time that a step aims at; the rest absorbs noise of the machine."""
GROWTH_MAX = 2.0
SHRINK_MIN = 0.25
"""Bounds of the change by one step: a pause of the whole machine says little about the engine."""


class StepBudget:
    """Learns the budget from the steps' times. Chunks do not change tokens, so a wrong guess costs time only.

    The time of a step is an affine function of its prompt tokens, with a slope that grows with the context. Scaling the last
    full step's tokens by the time left over, or exceeded, converges on the budget and follows the slope.
    """

    def __init__(self, budget_s: float, tokens_max: int, tokens_min: int = TOKENS_MIN) -> None:
        """`tokens_min` is at least a block for models whose chunks end at block borders."""
        self._target_s = FILL * budget_s
        self._tokens_max = tokens_max
        self._tokens_min = tokens_min
        self._prompt_tokens = float(min(TOKENS_FIRST, tokens_max))

    def tokens(self, decode_tokens: int) -> int:
        """Budget of the next step, in which running requests decode up to `decode_tokens`."""
        return min(self._tokens_max, decode_tokens + max(self._tokens_min, int(self._prompt_tokens)))

    def observe(self, prompt_tokens: int, step_s: float) -> None:
        """Takes a step's time into account. A fast step that left most of the budget unused says nothing about a full one."""
        is_full = 2 * prompt_tokens >= self._prompt_tokens
        if 2 * prompt_tokens < TOKENS_MIN or (not is_full and step_s <= self._target_s):
            return
        factor = self._target_s / max(step_s, 1e-6)
        fitting = max(SHRINK_MIN * self._prompt_tokens, min(prompt_tokens * factor, GROWTH_MAX * self._prompt_tokens))
        self._prompt_tokens = max(1.0, min(fitting, self._tokens_max))
