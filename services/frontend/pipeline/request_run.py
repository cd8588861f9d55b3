"""The state of one request that outlives its placements: the choices, and what the client has of them."""

from collections.abc import Callable, Mapping
from functools import partial

from kvmesh.clock import Clock
from kvmesh.core import Ask, Usage
from kvmesh.errors import MeshError, UnsupportedError
from services.frontend.metrics import ModelMetrics
from services.frontend.pipeline.attempt import Attempt
from services.frontend.pipeline.attempt_reports import AttemptReports
from services.frontend.pipeline.attempt_state import AttemptState
from services.frontend.pipeline.call_end import make_stop_finder
from services.frontend.pipeline.choice_sink import ChoiceSink
from services.frontend.pipeline.continuation import cannot_continue, continued_ask, may_continue
from services.frontend.pipeline.prepare import Prepared
from services.frontend.pipeline.request import AnswerSink, Conversation
from services.frontend.settings import PipelineSettings


class RequestRun:
    """Invariants:

    1. Each choice has one sink at a time. A choice that has ended keeps its sink and gets no further leg.
    2. The answer sink receives each token once: it continues where the failed placement stopped, or starts from the beginning after
       `on_restart` or before it has received anything.
    """

    def __init__(
        self,
        prepared: Prepared,
        sink: AnswerSink,
        *,
        metrics: ModelMetrics,
        clock: Clock,
        settings: PipelineSettings,
        began_s: float,
    ) -> None:
        self.prepared = prepared
        self._sink = sink
        self.metrics = metrics
        self._clock = clock
        self._settings = settings
        self._began_s = began_s
        self._choices: list[ChoiceSink] = []
        self._attempt: AttemptState | None = None
        self._cached_tokens: int | None = None
        """Of the first placement that computed the prompt."""
        self._continuations = 0
        self._first_failure: MeshError | None = None
        self.ttft_s: float | None = None

    def begin_attempt(self, attempt: Attempt) -> Mapping[int, ChoiceSink]:
        """Returns the sinks of the choices that are not over, by number."""
        self._attempt = attempt.state
        on_first, on_over = partial(self._on_first, attempt.reports), attempt.state.on_over
        if not self._choices:
            self._choices = [self._new_choice(i, on_first, on_over) for i in range(self.prepared.request.choices)]
        else:
            self._choices = [
                choice if choice.has_ended else choice.successor(on_first=on_first, on_over=on_over)
                for choice in self._choices
            ]
        return {i: choice for i, choice in enumerate(self._choices) if not choice.has_ended}

    def _on_first(self, reports: AttemptReports) -> None:
        if self.ttft_s is None:
            self.ttft_s = self._clock.now() - self._began_s
            self.metrics.ttft.observe(self.ttft_s)
        reports.on_first()

    def _new_choice(
        self, i: int, on_first: Callable[[], None], on_over: Callable[[ChoiceSink, MeshError | None], None]
    ) -> ChoiceSink:
        prepared, text = self.prepared, self.prepared.model.text
        sampling = prepared.request.sampling
        return ChoiceSink(
            i,
            self._sink,
            text.detokeniser(skip_special_tokens=sampling.skip_special_tokens, kept=_parser_marks(prepared)),
            stops=make_stop_finder(prepared.request),
            stop_ids=prepared.stop_ids,
            min_tokens=sampling.min_tokens or 0,
            includes_stop=prepared.request.includes_stop,
            clock=self._clock,
            gaps=self.metrics.gaps,
            on_first=on_first,
            on_over=on_over,
        )

    @property
    def emitted_tokens(self) -> int:
        """Tokens after which the open choices continue."""
        return sum([choice.tokens for choice in self._choices if not choice.has_ended])

    def recover(self, error: MeshError) -> bool:
        """Decides how the answer continues after a failed attempt. Returns False if it is complete and needs no further placement.

        Raises the error that ends the request if the client has a part of an answer that cannot be continued.
        """
        assert self._attempt is not None
        self._keep_cached_tokens(self._attempt)
        self._first_failure = self._first_failure or error
        for choice in self._choices:
            self._end_if_complete(choice)
        if all(choice.has_ended for choice in self._choices):
            return False
        # The client has nothing, so the whole request runs again.
        if not any(choice.tokens for choice in self._choices):
            return True
        if self._may_continue(error):
            self._continuations += 1
            self.metrics.continued.value += 1
            return True
        if not self._sink.is_whole and any(choice.has_shown for choice in self._choices):
            if isinstance(error, UnsupportedError):
                raise cannot_continue(self._first_failure, error, self.prepared.request.named) from error
            raise error
        self._restart()
        return True

    def _end_if_complete(self, choice: ChoiceSink) -> None:
        """Ends a choice whose last token has arrived, without its leg."""
        if choice.has_ended:
            return
        finish = choice.completes(max_tokens=self.prepared.generation.sampling.max_tokens)
        if finish is not None:
            following = choice.successor(on_first=_ignore, on_over=_ignore)
            self._choices[self._choices.index(choice)] = following
            following.on_finish(finish)

    def _may_continue(self, error: MeshError) -> bool:
        longest = max([choice.tokens for choice in self._choices if not choice.has_ended])
        return may_continue(
            self._settings,
            continuations=self._continuations,
            age_s=self._clock.now() - self._began_s,
            tokens=self.prepared.ask.prompt_tokens + longest,
            error=error,
        )

    def _restart(self) -> None:
        """Discards the answer. The client has received nothing of it, so the time to first token is measured again."""
        if self._sink.is_whole:
            for choice in range(self.prepared.request.choices):
                self._sink.on_restart(choice)
        self._choices = []
        self._cached_tokens = self.ttft_s = None
        # An engine that cannot continue this answer would refuse again.
        self._continuations = self._settings.continuations_max
        self.metrics.restarted.value += 1

    def ask(self, prepared: Prepared) -> Ask:
        """Returns the ask of the next placement. `prepared`: the request with the placement's trace."""
        emitted = [choice.emitted_token_ids for choice in self._choices if not choice.has_ended]
        # No choice has ended or has a token: the first ask still describes the request.
        is_whole = len(emitted) in (0, len(self._choices)) and not any(emitted)
        return prepared.ask if is_whole else continued_ask(prepared, emitted)

    def spent(self) -> Usage:
        """Returns the usage up to now, also of a request that failed; empty before the first placement."""
        return self.usage() if self._attempt is not None else Usage()

    def usage(self) -> Usage:
        """Returns the totals of the request. The prompt counts once, for all choices and placements."""
        assert self._attempt is not None
        self._keep_cached_tokens(self._attempt)
        finish = self._choices[0].finish if self._choices else None
        decode = finish.usage if finish is not None else Usage()
        prompt_tokens = self.prepared.ask.prompt_tokens
        return Usage(
            prompt_tokens=prompt_tokens,
            output_tokens=sum([choice.tokens for choice in self._choices]),
            cached_tokens=min(prompt_tokens, self._cached_tokens or 0),
            transferred_tokens=min(prompt_tokens, decode.transferred_tokens),
            reasoning_tokens=decode.reasoning_tokens,
        )

    def _keep_cached_tokens(self, attempt: AttemptState) -> None:
        """Takes the prompt's cached tokens of the first placement that generated tokens: later ones compute it because of a failure.

        A worker that was lost has not reported them; then those that the router expected count.
        """
        if self._cached_tokens is None:
            self._cached_tokens = attempt.cached_tokens()
        if self._cached_tokens is None and attempt.has_token:
            self._cached_tokens = attempt.placement.cached_tokens


def _parser_marks(prepared: Prepared) -> frozenset[str]:
    """Returns the special tokens that the parsers need in the answer's text."""
    prompt = prepared.request.prompt
    if not isinstance(prompt, Conversation):
        return frozenset()
    return prepared.model.text.marks(parses_tools=bool(prompt.tools))


def _ignore(*_: object) -> None:
    pass
