"""Reports of one placement of a request to the router that made it."""

from kvmesh.clock import Clock
from kvmesh.core import Report, ReportKind
from kvmesh.errors import MeshError
from kvmesh.rpc.clients import RouterLink
from services.frontend.pipeline.attempt_state import AttemptState


class AttemptReports:
    """Reports what the state says when it is called."""

    def __init__(self, state: AttemptState, router: RouterLink, clock: Clock) -> None:
        self._state = state
        self._router = router
        self._clock = clock

    def on_prefilled(self) -> None:
        """A prefill worker has computed the prompts of all choices."""
        self._report(ReportKind.PREFILLED, cached_tokens=self._state.cached_tokens())

    def on_first(self) -> None:
        """A choice received its first token. If prefill answers, FINISHED follows immediately and reports it too."""
        if not self._state.has_token:
            self._state.has_token = True
            if self._state.uses_decode:
                self._report(ReportKind.FIRST_TOKEN)

    def on_finished(self) -> None:
        """All choices have ended."""
        state = self._state
        finishes = [choice.finish for choice in state.choices.values()]
        self._report(
            ReportKind.FINISHED,
            # PREFILLED has reported those of a prefill worker.
            cached_tokens=state.cached_tokens() if state.prefill_usage is None else None,
            is_answered_by_prefill=not state.uses_decode,
            was_recomputed=any(finish is not None and finish.was_recomputed for finish in finishes),
        )

    def on_cancelled(self) -> None:
        """The request is over for its client."""
        self._report(ReportKind.CANCELLED)

    def on_failed(self, error: MeshError) -> None:
        """The placement has failed."""
        self._report(ReportKind.FAILED, error=error)

    def _report(
        self,
        kind: ReportKind,
        *,
        error: MeshError | None = None,
        cached_tokens: int | None = None,
        is_answered_by_prefill: bool = False,
        was_recomputed: bool = False,
    ) -> None:
        state = self._state
        names_worker = kind is ReportKind.FAILED and not state.is_exchange_failure
        report = Report(
            kind=kind,
            elapsed_s=self._clock.now() - state.began_s,
            cached_tokens=cached_tokens,
            output_tokens=state.output_tokens(),
            error=error,
            failed_worker_id=state.failed_worker_id if names_worker else "",
            is_answered_by_prefill=is_answered_by_prefill,
            was_recomputed=was_recomputed,
        )
        self._router.report_nowait(state.placed.ask_id, report)
