"""What one request got: the account that the invariants are checked against."""

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from kvmesh.core import FinishReason, Generation, SamplingParams, TokenLogprob, Usage
from kvmesh.engines.simulated.model_card import TokenRange
from kvmesh.engines.simulated.tokens import biased_token, constant_of, made_up_logprob
from kvmesh.errors import MeshError
from services.frontend.parsers.parser import AnswerParser
from services.frontend.parsers.parts import Part
from services.frontend.pipeline.prepare import Prepared
from services.frontend.pipeline.request import Ending, Request, RequestResult
from services.simulation.tools import call_parser, call_problems, expected_document


def checksum(token_ids: Sequence[int]) -> int:
    """Returns the sum of a sequence from which a simulated engine derives the next token; see `kvmesh/engines/simulated/tokens.py`."""
    return sum((i + 1) * token for i, token in enumerate(token_ids))


def expected_tokens(
    generation: Generation, token_range: TokenRange, count: int, *, eos_after_tokens: int = 0, eos_token_id: int = 2
) -> list[int]:
    """Returns the next `count` tokens of a correct engine. Stop tokens and limits are ignored."""
    sequence = [*generation.token_ids, *generation.emitted_token_ids]
    constant = constant_of(generation.sampling, generation.adapter, token_range.span)
    start = len(sequence)
    total = checksum(sequence)
    bias = dict(generation.sampling.logit_bias)
    for _ in range(count):
        token_id = token_range.first_id + (total + constant) % token_range.span
        sequence.append(biased_token(token_id, bias, token_range) if bias else token_id)
        if eos_after_tokens and len(sequence) - len(generation.token_ids) == eos_after_tokens:
            sequence[-1] = eos_token_id
            break
        total += len(sequence) * sequence[-1]
    return sequence[start:]


class RequestPhase(IntEnum):
    """The phases of a request, in order."""

    WAITING = 0
    ASKING = 1
    PREFILLING = 2
    SUBMITTED = 3
    DECODING = 4
    ENDED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCancel:
    """The client leaves `after_s` after the request has entered a phase, if it ever does."""

    phase: RequestPhase
    after_s: float


@dataclass(slots=True, kw_only=True)
class ChoiceRecord:
    """One choice as the client saw it."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    ending: Ending | None = None
    parser: AnswerParser | None = None
    """The finish of an answer that consists of tool calls."""
    parts: list[Part] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Ledger:
    """The AnswerSink of one request. `outcome` is one word: answered, cancelled, or the failure's reason.

    `is_whole`: the client does not stream, so what came of an answer that fails is never seen.
    """

    request: Request
    on_phase: Callable[[RequestPhase], None]
    is_whole: bool = False
    phase: RequestPhase = RequestPhase.WAITING
    arrived_s: float = 0.0
    ended_s: float = 0.0
    outcome: str = ""
    error: MeshError | None = None
    answer: RequestResult | None = None
    prepared: Prepared | None = None
    choices: list[ChoiceRecord] = field(default_factory=list)
    placements: list[tuple[str, str]] = field(default_factory=list)
    continued_after: list[int] = field(default_factory=list)
    """Emitted tokens of each leg that continued the answer."""
    restarts: int = 0
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.choices = [self._new_choice() for _ in range(self.request.choices)]

    def _new_choice(self) -> ChoiceRecord:
        return ChoiceRecord(parser=call_parser() if self.request.sampling.constraint is not None else None)

    def on_restart(self, choice: int) -> None:
        """See AnswerSink."""
        if not self.is_whole or self.outcome:
            self.problems.append("begins anew after something was shown")
        self.choices[choice] = self._new_choice()
        self.restarts += 1

    def on_text(
        self, choice: int, text: str, token_ids: Sequence[int], *, logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        """See AnswerSink."""
        record = self.choices[choice]
        if record.ending is not None or self.outcome:
            self.problems.append("text after the end")
        if self.phase is RequestPhase.SUBMITTED:
            self.on_phase(RequestPhase.DECODING)
        record.token_ids.extend(token_ids)
        record.text += text
        if record.parser is not None:
            record.parts += record.parser.push(text)
        record.logprobs += logprobs or ()

    def on_prompt(self, choice: int, entries: Sequence[TokenLogprob]) -> None:
        """See AnswerSink."""
        if self.choices[choice].token_ids or self.outcome:
            self.problems.append("log-probabilities of the prompt after the first token")
        self.choices[choice].prompt_logprobs = list(entries)

    def on_end(self, choice: int, ending: Ending) -> None:
        """See AnswerSink."""
        if self.choices[choice].ending is not None or self.outcome:
            self.problems.append("a second end")
        record = self.choices[choice]
        record.ending = ending
        if record.parser is not None:
            record.parts += record.parser.flush()

    def ended(self, now_s: float, outcome: str) -> None:
        """The request is over."""
        if self.outcome:
            self.problems.append(f"ended as {self.outcome} and as {outcome}")
        self.outcome, self.ended_s, self.phase = outcome, now_s, RequestPhase.ENDED

    @property
    def tokens(self) -> int:
        """Tokens shown, over all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)


def check_ledger(ledger: Ledger, token_range: TokenRange, *, eos_after_tokens: int, eos_token_id: int) -> list[str]:
    """Returns what is wrong with a request that should be over: tokens lost, doubled or wrong, an end missing or doubled."""
    problems = list(ledger.problems)
    if not ledger.outcome:
        return [*problems, "never ended"]
    if ledger.prepared is None:
        return problems if ledger.outcome in ("cancelled", "frontend_lost") else [*problems, "never prepared"]
    output_tokens = 0
    for number, record in enumerate(ledger.choices):
        generation = ledger.prepared.generation_of(number)
        sampling = generation.sampling
        # The token that ends answers comes after `min_tokens` others.
        eos_after = 0 if sampling.ignore_eos else max(eos_after_tokens, (sampling.min_tokens or 0) + 1)
        count = sampling.max_tokens or 0
        expected = expected_tokens(
            generation, token_range, count, eos_after_tokens=eos_after, eos_token_id=eos_token_id
        )
        if sampling.constraint is not None:
            expected = [*expected_document(generation), eos_token_id][:count]
        # The token that ended the answer has no text.
        has_eos = expected[-1] == eos_token_id
        text = bytes(expected[:-1] if has_eos else expected).decode("utf-8", "replace")
        reason = FinishReason.STOP if has_eos else FinishReason.LENGTH
        if (stopped := _cut_at_stop(expected, ledger.request.sampling)) is not None:
            (count, text), reason = stopped, FinishReason.STOP
            del expected[count:]
        output_tokens += len(expected)
        problems += _check_choice(ledger, record, expected, text=text, reason=reason, eos_token_id=eos_token_id)
        if record.parser is not None and ledger.outcome == "answered":
            problems += call_problems(record.parts, text, is_complete=has_eos)
    if ledger.answer is not None:
        problems += _check_usage(ledger.answer.usage, ledger.prepared, output_tokens)
    return problems


def _check_usage(usage: Usage, prepared: Prepared, output_tokens: int) -> list[str]:
    """Checks that the prompt and every token are counted once, however often the request was placed."""
    prompt_tokens = len(prepared.generation.token_ids)
    problems: list[str] = []
    if (usage.prompt_tokens, usage.output_tokens) != (prompt_tokens, output_tokens):
        problems.append(f"{usage} of a prompt of {prompt_tokens} tokens and an answer of {output_tokens}")
    if not 0 <= max(usage.cached_tokens, usage.transferred_tokens) <= prompt_tokens:
        problems.append(f"{usage}: more tokens were cached or moved than the prompt has")
    return problems


def _cut_at_stop(expected: list[int], sampling: SamplingParams) -> tuple[int, str] | None:
    """Returns the number of tokens up to the first stop string, and the text before it; None if there is none."""
    decoder = getincrementaldecoder("utf-8")("replace")
    text, searched_from = "", 0
    for count, token_id in enumerate(expected, 1):
        text += decoder.decode(bytes([token_id]) if token_id < 256 else b"")
        if count <= (sampling.min_tokens or 0):
            # Stop strings do not count among the first tokens.
            searched_from = len(text)
            continue
        found = [at for stop in sampling.stop if (at := text.find(stop, searched_from)) >= 0]
        if found:
            return count, text[: min(found)]
    return None


def _values(entry: TokenLogprob) -> tuple[float, list[tuple[int, float]]]:
    return entry.logprob, [(token_id, logprob) for token_id, logprob in entry.alternatives]


def _check_choice(
    ledger: Ledger, record: ChoiceRecord, expected: list[int], *, text: str, reason: FinishReason, eos_token_id: int
) -> list[str]:
    problems: list[str] = []
    got = len(record.token_ids)
    if record.token_ids != expected[:got]:
        problems.append(f"wrong tokens: {record.token_ids} is no beginning of {expected}")
    asked = ledger.request.sampling.logprobs
    # The last id is the token that ends answers.
    wanted = (
        [made_up_logprob(i, alternatives=asked, vocabulary_size=eos_token_id + 1) for i in record.token_ids]
        if asked is not None
        else []
    )
    if list(map(_values, record.logprobs)) != list(map(_values, wanted)):
        problems.append(f"{len(record.logprobs)} log-probabilities, or wrong ones, for {got} tokens")
    if ledger.outcome != "answered":
        return problems
    if got != len(expected):
        problems.append(f"{got} tokens of {len(expected)}")
    if record.text != text:
        problems.append("the text is not that of the tokens")
    if record.ending is None or record.ending.reason is not reason:
        problems.append(f"ended with {record.ending}, not with {reason}")
    return problems
