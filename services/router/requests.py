"""The newest requests of a router, and how far each is. Pure."""

from collections.abc import Iterator
from itertools import islice

from kvmesh.core import ReportKind, RequestList, RequestState, RequestView
from services.router.core import RouterCore
from services.router.explain import DecisionRecord
from services.router.workers.reservations import ReservationBook

_ENDED = {
    ReportKind.FINISHED: RequestState.FINISHED,
    ReportKind.FAILED: RequestState.FAILED,
    ReportKind.CANCELLED: RequestState.CANCELLED,
}


def list_requests(core: RouterCore, *, model: str, in_flight_only: bool, requests_max: int) -> RequestList:
    """Returns the newest requests of the history, newest first. Its cost grows with the history, which is bounded."""
    views = _views(core, model)
    chosen = (view for view in views if view.state.is_in_flight or not in_flight_only)
    return RequestList(
        requests=tuple(islice(chosen, requests_max)),
        requests_in_flight=sum(not reservation.keeper for reservation in core.book),
        requests_queued=core.queue.requests,
    )


def _views(core: RouterCore, model: str) -> Iterator[RequestView]:
    queued = {id(each.record) for each in core.queue}
    for record in core.history.newest_first():
        if model in ("", record.ask.model):
            state = RequestState.QUEUED if id(record) in queued else _state(record, core.book)
            yield _view(record, state)


def _state(record: DecisionRecord, book: ReservationBook) -> RequestState:
    """Returns how far a request is that is not queued. Without a reservation and without an end its frontend is gone."""
    placement = record.placement
    if placement is None:
        return RequestState.REFUSED if record.error is not None else RequestState.UNKNOWN
    if record.reports and record.reports[-1].kind.settles:
        return _ENDED[record.reports[-1].kind]
    reservation = book.get(placement.reservation_id)
    if reservation is None:
        return RequestState.UNKNOWN
    if any(report.kind is ReportKind.FIRST_TOKEN or report.output_tokens for report in record.reports):
        return RequestState.DECODING
    return RequestState.TRANSFERRING if reservation.is_prefilled else RequestState.PREFILLING


def _view(record: DecisionRecord, state: RequestState) -> RequestView:
    ask, placement = record.ask, record.placement
    return RequestView(
        request_id=ask.request_id,
        model=ask.model,
        tenant=ask.tenant,
        state=state,
        reason=_reason(record),
        decided_at_s=record.decided_at_s,
        attempt=ask.attempt,
        prompt_tokens=ask.prompt_tokens,
        cached_tokens=placement.cached_tokens if placement is not None else 0,
        output_tokens=max((report.output_tokens for report in record.reports), default=0),
        prefill=placement.prefill if placement is not None else None,
        decode=placement.decode if placement is not None else None,
        expected_ttft_s=placement.expected_ttft_s if placement is not None else None,
        observed_ttft_s=record.observed_ttft_s,
    )


def _reason(record: DecisionRecord) -> str:
    """Returns why the request was refused or failed. Empty: it was not."""
    error = record.error
    if error is None and record.reports:
        error = record.reports[-1].error
    return error.reason if error is not None else ""
