"""Charges tenants for the requests that leave the queue. Pure.

A request is charged its uncached prompt tokens and the output that is typical for its model, for each choice, at most what it allows. Its
reports correct the charge: immediately when it generates more, at its end when it generated less.
"""

from dataclasses import dataclass

from kvmesh.core import Ask
from services.router.queue.accounts import Account

OUTPUT_TOKEN_WEIGHT = 4.0
"""Prompt tokens that an output token counts as: a worker takes about so much longer for it. Prices of public APIs have about this ratio."""
TYPICAL_TOKENS = 256.0
"""Output tokens of a choice as long as no request of the model has ended."""
NEWEST_SHARE = 0.05
"""Share of the newest request in what is typical."""
MODELS_MAX = 1024


@dataclass(slots=True, eq=False, kw_only=True)
class OutputCharge:
    """The part of a charge that is for output. `choices`: of the request, at least 1."""

    account: Account
    model: str
    choices: int
    output_tokens: float


class Charges:
    """Charges of all models."""

    def __init__(self) -> None:
        self._typical: dict[str, float] = {}

    def typical_tokens(self, model: str) -> float:
        """Output tokens of a typical choice."""
        return self._typical.get(model, TYPICAL_TOKENS)

    def tokens(self, ask: Ask, uncached_tokens: int) -> float:
        """Returns what a request is charged when it is placed."""
        return max(1, uncached_tokens) + OUTPUT_TOKEN_WEIGHT * self._output_tokens(ask)

    def begin(self, ask: Ask, account: Account) -> OutputCharge:
        """Returns the record for `correct`, of a request that is charged `tokens` now."""
        choices = max(1, ask.choices)
        return OutputCharge(account=account, model=ask.model, choices=choices, output_tokens=self._output_tokens(ask))

    def _output_tokens(self, ask: Ask) -> float:
        typical = self.typical_tokens(ask.model)
        expected = ask.expected_output_tokens
        return max(1, ask.choices) * (min(typical, expected) if expected else typical)

    def correct(self, charge: OutputCharge, output_tokens: int, *, has_ended: bool, is_complete: bool) -> None:
        """Applies a report. `output_tokens` is the number so far. `is_complete`: the request ended without a failure or a cancel."""
        if has_ended or output_tokens > charge.output_tokens:
            charge.account.charge(OUTPUT_TOKEN_WEIGHT * (output_tokens - charge.output_tokens))
            charge.output_tokens = output_tokens
        if is_complete and output_tokens and (charge.model in self._typical or len(self._typical) < MODELS_MAX):
            typical = self.typical_tokens(charge.model)
            self._typical[charge.model] = typical + NEWEST_SHARE * (output_tokens / charge.choices - typical)
