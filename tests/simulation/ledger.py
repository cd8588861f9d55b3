"""What one request got: the account that the invariants are checked against."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from kvmesh.core import FinishReason, TokenLogprob
from kvmesh.engines.simulated.model_card import TokenRange
from kvmesh.errors import MeshError
from services.frontend.pipeline.prepare import Prepared
from services.frontend.pipeline.request import Ending, Request, RequestResult
from tests.simulated_reference import expected_tokens


class Phase(IntEnum):
    """How far a request is, in order."""

    WAITING = 0
    ASKING = 1
    PREFILLING = 2
    SUBMITTED = 3
    DECODING = 4
    ENDED = 5


@dataclass(slots=True, kw_only=True)
class ChoiceRecord:
    """One choice as the client saw it."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: int = 0
    ending: Ending | None = None


@dataclass(slots=True, kw_only=True)
class Ledger:
    """The AnswerSink of one request. `outcome` is one word: answered, cancelled, or the failure's reason.

    `is_whole`: the client does not stream, so what came of an answer that fails is never seen.
    """

    request: Request
    on_phase: Callable[[Phase], None]
    is_whole: bool = False
    phase: Phase = Phase.WAITING
    arrived_s: float = 0.0
    ended_s: float = 0.0
    outcome: str = ""
    cancelled_in: Phase | None = None
    error: MeshError | None = None
    answer: RequestResult | None = None
    prepared: Prepared | None = None
    choices: list[ChoiceRecord] = field(default_factory=list)
    placements: list[tuple[str, str]] = field(default_factory=list)
    restarts: int = 0
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.choices = [ChoiceRecord() for _ in range(self.request.choices)]

    def on_restart(self, choice: int) -> None:
        """See AnswerSink."""
        if not self.is_whole or self.outcome:
            self.problems.append("begins anew after something was shown")
        self.choices[choice] = ChoiceRecord()
        self.restarts += 1

    def on_text(
        self, choice: int, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        """See AnswerSink."""
        record = self.choices[choice]
        if record.ending is not None or self.outcome:
            self.problems.append("text after the end")
        if self.phase is Phase.SUBMITTED:
            self.on_phase(Phase.DECODING)
        record.token_ids.extend(token_ids)
        record.text += text
        record.logprobs += len(logprobs or ())

    def on_end(self, choice: int, ending: Ending) -> None:
        """See AnswerSink."""
        if self.choices[choice].ending is not None or self.outcome:
            self.problems.append("a second end")
        self.choices[choice].ending = ending

    def ended(self, now_s: float, outcome: str) -> None:
        """The request is over."""
        if self.outcome:
            self.problems.append(f"ended as {self.outcome} and as {outcome}")
        self.outcome, self.ended_s, self.phase = outcome, now_s, Phase.ENDED

    @property
    def tokens(self) -> int:
        """Tokens shown, over all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)


def check_ledger(ledger: Ledger, token_range: TokenRange, *, eos_after_tokens: int, eos_token_id: int) -> list[str]:
    """What is wrong with a request that should be over: tokens lost, doubled or wrong, an end missing or doubled."""
    problems = list(ledger.problems)
    if not ledger.outcome:
        return [*problems, "never ended"]
    if ledger.prepared is None:
        return problems if ledger.outcome == "cancelled" else [*problems, "never prepared"]
    output_tokens = 0
    for number, record in enumerate(ledger.choices):
        generation = ledger.prepared.generation_of(number)
        sampling = generation.sampling
        eos_after = 0 if sampling.ignore_eos else eos_after_tokens
        count = sampling.max_tokens or 0
        expected = expected_tokens(
            generation, token_range, count, eos_after_tokens=eos_after, eos_token_id=eos_token_id
        )
        output_tokens += len(expected)
        reason = FinishReason.STOP if expected[-1] == eos_token_id else FinishReason.LENGTH
        problems += _check_choice(ledger, record, expected, reason)
    if ledger.answer is not None and ledger.answer.usage.output_tokens != output_tokens:
        problems.append(f"counted {ledger.answer.usage.output_tokens} tokens of {output_tokens}")
    return problems


def _check_choice(ledger: Ledger, record: ChoiceRecord, expected: list[int], reason: FinishReason) -> list[str]:
    problems: list[str] = []
    got = len(record.token_ids)
    if record.token_ids != expected[:got]:
        problems.append(f"wrong tokens: {record.token_ids} is no beginning of {expected}")
    if ledger.request.sampling.logprobs is not None and record.logprobs != got:
        problems.append(f"{record.logprobs} log-probabilities for {got} tokens")
    if ledger.outcome != "answered":
        return problems
    if got != len(expected):
        problems.append(f"{got} tokens of {len(expected)}")
    # The token that ended the answer has no text.
    shown = expected[:-1] if reason is FinishReason.STOP else expected
    if record.text != bytes(shown).decode("utf-8", "replace"):
        problems.append("the text is not that of the tokens")
    if record.ending is None or record.ending.reason is not reason:
        problems.append(f"ended with {record.ending}, not with {reason}")
    return problems
