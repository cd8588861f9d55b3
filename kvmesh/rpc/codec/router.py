"""Placement requests, placements, reports, and routers' views of their workers."""

import sys
from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from kvmesh.api.router.v1 import router_pb2 as pb
from kvmesh.checks import PRIORITY_MAX, REQUEST_ID_CHARACTERS_MAX, check_length, check_range
from kvmesh.core import (
    Ask,
    Candidate,
    Coefficient,
    EarlierPlacement,
    Explanation,
    Placement,
    Report,
    ReportKind,
    RequestList,
    RequestState,
    RequestView,
    WorkerView,
)
from kvmesh.errors import InvalidRequestError
from kvmesh.rpc.codec.message_codec import MessageCodec, enum_table
from kvmesh.rpc.codec.scalars import (
    fill_duration,
    from_duration,
    known_enum,
    optional_duration,
    positive_duration,
    required_text,
)
from kvmesh.rpc.codec.types import WORKER_REF_CODEC, fill_worker_ref, from_worker_ref
from kvmesh.rpc.codec.worker import HANDOFF_NUMBERS, HANDOFFS, LOAD_CODEC, ROLES, TIER_NUMBERS, TIERS
from kvmesh.rpc.status import from_detail, to_detail

EXCLUDED_MAX = 64
LABELS_MAX = 64
FEATURES_MAX = 64
BLOCKS_MAX = 1 << 20
TENANT_CHARACTERS_MAX = 128
DIGEST_CHARACTERS_MAX = 128
REPORTS_MAX = 1024
"""In one message."""
ASKS_MAX = 64
"""In one message."""
REPORT_KINDS = enum_table(pb.ReportKind, ReportKind)
REPORT_KIND_NUMBERS = {kind: number for number, kind in REPORT_KINDS.items()}


def fill_ask(message: pb.Ask, ask_id: int, ask: Ask) -> None:
    """Writes into a message's field. Skips what an ordinary ask does not have, since this runs once per request."""
    message.ask_id = ask_id
    message.request_id = ask.request_id
    message.model = ask.model
    message.prompt_tokens = ask.prompt_tokens
    message.expected_output_tokens = ask.expected_output_tokens
    message.block_size_tokens = ask.block_size_tokens
    message.choices = ask.choices
    if ask.block_hashes:
        message.MergeFromString(_packed_hashes(ask.block_hashes))
    if ask.timeout_s is not None:
        fill_duration(message.timeout, ask.timeout_s)
    for name in _RARE_FIELDS:
        if value := getattr(ask, name):
            setattr(message, name, value)
    for name in _LIST_FIELDS:
        if values := getattr(ask, name):
            getattr(message, name).extend(values)
    if ask.required_labels:
        message.required_labels.update(ask.required_labels)
    if ask.preferred_labels:
        message.preferred_labels.update(ask.preferred_labels)


_ELAPSED_S_MAX = 10 * 365 * 86_400
_RARE_FIELDS = (
    *("adapter", "tenant", "priority", "session_id", "attempt", "traceparent", "files_digest"),
    *("pinned_prefill_worker_id", "pinned_decode_worker_id"),
)
_LIST_FIELDS = ("required_features", "excluded_worker_ids")
# Field number and wire type 2, length-delimited. One byte, since the number is below 16.
_HASHES_TAG = bytes([pb.Ask.DESCRIPTOR.fields_by_name["block_hashes"].number << 3 | 2])


def _packed_hashes(hashes: Sequence[int]) -> bytes:
    """Returns the encoded field. Adding the hashes of a long prompt one at a time would take twice as long, and most of the ask's time."""
    # fixed64: eight bytes each, the lowest first.
    words = array("Q", hashes)
    if sys.byteorder == "big":
        words.byteswap()
    data = words.tobytes()
    head, length = bytearray(_HASHES_TAG), len(data)
    # The length as a varint: seven bits per byte, the lowest first. The high bit of a byte shows that another one follows.
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head) + data


def from_ask(message: pb.Ask) -> Ask:
    """Returns the checked value. It shares the message's block hashes without a copy, because a lookup reads few of them."""
    ask = Ask(
        request_id=message.request_id,
        model=message.model,
        prompt_tokens=message.prompt_tokens,
        block_hashes=message.block_hashes or (),
        block_size_tokens=message.block_size_tokens,
        expected_output_tokens=message.expected_output_tokens,
        adapter=message.adapter,
        tenant=message.tenant,
        priority=message.priority,
        timeout_s=positive_duration(message, "timeout", field="ask.timeout"),
        session_id=message.session_id,
        choices=message.choices or 1,
        required_features=message.required_features or (),
        required_labels=message.required_labels or _NO_LABELS,
        preferred_labels=message.preferred_labels or _NO_LABELS,
        excluded_worker_ids=message.excluded_worker_ids or (),
        pinned_prefill_worker_id=message.pinned_prefill_worker_id,
        pinned_decode_worker_id=message.pinned_decode_worker_id,
        attempt=message.attempt,
        traceparent=message.traceparent,
        files_digest=message.files_digest,
    )
    check_ask(ask)
    if ask.required_features or ask.excluded_worker_ids:
        ask.required_features, ask.excluded_worker_ids = tuple(ask.required_features), tuple(ask.excluded_worker_ids)
    if ask.required_labels or ask.preferred_labels:
        ask.required_labels, ask.preferred_labels = dict(ask.required_labels), dict(ask.preferred_labels)
    return ask


def check_ask(ask: Ask) -> None:
    """Raises InvalidRequestError with the field's name. Skips what an ordinary ask does not have: this runs once per decision."""
    prompt_tokens, size = ask.prompt_tokens, ask.block_size_tokens
    if not prompt_tokens:
        check_range(prompt_tokens, "ask.prompt_tokens", low=1, high=2**32 - 1)
    if ask.priority:
        check_range(ask.priority, "ask.priority", low=-PRIORITY_MAX, high=PRIORITY_MAX)
    if ask.tenant:
        check_length(len(ask.tenant), "ask.tenant", high=TENANT_CHARACTERS_MAX, unit="characters")
    if ask.files_digest:
        check_length(len(ask.files_digest), "ask.files_digest", high=DIGEST_CHARACTERS_MAX, unit="characters")
    if count := len(ask.block_hashes):
        check_length(count, "ask.block_hashes", high=BLOCKS_MAX)
        check_range(size, "ask.block_size_tokens", low=1, high=2**20)
        check_length(count, "ask.block_hashes", high=prompt_tokens // size, unit="entries at this prompt length")
    required_text(ask.request_id, field="ask.request_id", characters_max=REQUEST_ID_CHARACTERS_MAX)
    required_text(ask.model, field="ask.model", characters_max=256)
    if ask.required_features:
        check_length(len(ask.required_features), "ask.required_features", high=FEATURES_MAX)
    if ask.required_labels:
        check_length(len(ask.required_labels), "ask.required_labels", high=LABELS_MAX)
    if ask.preferred_labels:
        check_length(len(ask.preferred_labels), "ask.preferred_labels", high=LABELS_MAX)
    if ask.excluded_worker_ids:
        check_length(len(ask.excluded_worker_ids), "ask.excluded_worker_ids", high=EXCLUDED_MAX)


def fill_placement(message: pb.Placement, ask_id: int, placement: Placement) -> None:
    """Writes into a message's field: to build messages that are then copied takes three times as long."""
    message.ask_id = ask_id
    message.reservation_id = placement.reservation_id
    if placement.prefill is not None:
        fill_worker_ref(message.prefill, placement.prefill)
    fill_worker_ref(message.decode, placement.decode)
    if placement.handoff is not None:
        message.handoff = HANDOFF_NUMBERS[placement.handoff]
    message.rendezvous_address = placement.rendezvous_address
    message.cached_tokens = placement.cached_tokens
    message.decode_cached_tokens = placement.decode_cached_tokens
    if placement.expected_ttft_s is not None:
        fill_duration(message.expected_ttft, placement.expected_ttft_s)
    message.reasons.extend(placement.reasons)
    if placement.queued_s is not None:
        fill_duration(message.queued, placement.queued_s)


def from_placement(message: pb.Placement) -> Placement:
    required_text(message.decode.address, field="placement.decode.address", characters_max=512)
    is_pair = message.HasField("prefill")
    return Placement(
        reservation_id=message.reservation_id,
        decode=from_worker_ref(message.decode),
        prefill=from_worker_ref(message.prefill) if is_pair else None,
        handoff=known_enum(message.handoff, HANDOFFS, "placement.handoff") if is_pair else None,
        rendezvous_address=message.rendezvous_address,
        cached_tokens=message.cached_tokens,
        expected_ttft_s=optional_duration(message, "expected_ttft"),
        reasons=tuple(message.reasons),
        queued_s=optional_duration(message, "queued"),
        decode_cached_tokens=message.decode_cached_tokens,
    )


def fill_report(message: pb.Report, ask_id: int, report: Report) -> None:
    message.ask_id = ask_id
    message.kind = REPORT_KIND_NUMBERS[report.kind]
    fill_duration(message.elapsed, max(0.0, report.elapsed_s))
    message.output_tokens = report.output_tokens
    if report.cached_tokens is not None:
        message.cached_tokens = report.cached_tokens
    if report.error is not None:
        message.error.CopyFrom(to_detail(report.error))
    if report.failed_worker_id:
        message.failed_worker_id = report.failed_worker_id
    if report.reservation_id:
        message.reservation_id = report.reservation_id
    if report.is_answered_by_prefill:
        message.is_answered_by_prefill = True
    if report.was_recomputed:
        message.was_recomputed = True


def from_report(message: pb.Report) -> Report:
    elapsed_s, kind = from_duration(message.elapsed), REPORT_KINDS.get(message.kind)
    if kind is None or not 0 <= elapsed_s <= _ELAPSED_S_MAX:
        check_range(elapsed_s, "report.elapsed", low=0, high=_ELAPSED_S_MAX)
        kind = known_enum(message.kind, REPORT_KINDS, "report.kind")
    return Report(
        kind=kind,
        elapsed_s=elapsed_s,
        cached_tokens=message.cached_tokens if message.HasField("cached_tokens") else None,
        output_tokens=message.output_tokens,
        error=from_detail(message.error) if message.HasField("error") else None,
        failed_worker_id=message.failed_worker_id,
        reservation_id=message.reservation_id,
        is_answered_by_prefill=message.is_answered_by_prefill,
        was_recomputed=message.was_recomputed,
    )


_COEFFICIENT = MessageCodec(pb.Coefficient, Coefficient, source=enum_table(pb.CoefficientSource, str))
_WORKER_VIEW = MessageCodec(
    pb.WorkerView,
    WorkerView,
    worker=WORKER_REF_CODEC,
    role=ROLES,
    trust=enum_table(pb.IndexTrust, str),
    load=LOAD_CODEC,
    coefficients=_COEFFICIENT,
    breaker={pb.BREAKER_STATE_UNSPECIFIED: "", **enum_table(pb.BreakerState, str)},
)
_CANDIDATE = MessageCodec(
    pb.Candidate,
    Candidate,
    prefill=WORKER_REF_CODEC,
    decode=WORKER_REF_CODEC,
    terms=(lambda term: pb.CostTerm(name=term[0], value=term[1]), lambda term: (term.name, term.value)),
)
_EARLIER = MessageCodec(pb.EarlierPlacement, EarlierPlacement, error=(to_detail, from_detail))


def to_worker_view(view: WorkerView) -> pb.WorkerView:
    tiers = [pb.TierBlocks(tier=TIER_NUMBERS[tier], blocks=blocks) for tier, blocks in view.blocks_by_tier.items()]
    return _WORKER_VIEW.encode(view, tiers=tiers)


def from_worker_view(message: pb.WorkerView) -> WorkerView:
    tiers = {known_enum(each.tier, TIERS, "tiers.tier"): each.blocks for each in message.tiers}
    return _WORKER_VIEW.decode(message, blocks_by_tier=tiers)


def _to_earlier(earlier: EarlierPlacement) -> pb.EarlierPlacement:
    message = _EARLIER.encode(earlier)
    if earlier.placement is not None:
        fill_placement(message.placement, 0, earlier.placement)
    for report in earlier.reports:
        fill_report(message.reports.add(), 0, report)
    return message


def _from_earlier(message: pb.EarlierPlacement) -> EarlierPlacement:
    return _EARLIER.decode(
        message,
        placement=from_placement(message.placement) if message.HasField("placement") else None,
        reports=tuple(map(from_report, message.reports)),
    )


_EXPLANATION = MessageCodec(
    pb.ExplainResponse,
    Explanation,
    error=(to_detail, from_detail),
    candidates=_CANDIDATE,
    earlier=(_to_earlier, _from_earlier),
)


def to_explanation(explanation: Explanation) -> pb.ExplainResponse:
    message = _EXPLANATION.encode(explanation)
    if explanation.placement is not None:
        fill_placement(message.placement, explanation.ask_id, explanation.placement)
    for report in explanation.reports:
        fill_report(message.reports.add(), explanation.ask_id, report)
    return message


def from_explanation(message: pb.ExplainResponse) -> Explanation:
    return _EXPLANATION.decode(
        message,
        ask_id=message.placement.ask_id,
        placement=from_placement(message.placement) if message.HasField("placement") else None,
        reports=tuple(map(from_report, message.reports)),
    )


_REQUEST_LIST = MessageCodec(
    pb.ListRequestsResponse,
    RequestList,
    requests=MessageCodec(
        pb.RequestView,
        RequestView,
        state=enum_table(pb.RequestState, RequestState),
        prefill=WORKER_REF_CODEC,
        decode=WORKER_REF_CODEC,
    ),
)
to_request_list, from_request_list = _REQUEST_LIST.encode, _REQUEST_LIST.decode


def read_route_request(message: pb.RouteRequest) -> tuple[Sequence[pb.Report], Sequence[pb.Ask]]:
    """Returns the reports and asks of a message after the hello.

    Raises InvalidRequestError if it has none, too many, or one without its ask_id.
    """
    # Lists keep the messages: each access to protobuf's own containers makes new ones.
    reports, asks = list(message.reports), list(message.asks)
    if message.HasField("hello"):
        raise InvalidRequestError("only the first message may have a hello", field="hello")
    if not reports and not asks:
        raise InvalidRequestError("a message after the hello must have a report or an ask", field="asks")
    check_length(len(reports), "reports", high=REPORTS_MAX)
    check_length(len(asks), "asks", high=ASKS_MAX)
    _check_ask_ids(reports, "reports")
    _check_ask_ids(asks, "asks")
    return reports, asks


def _check_ask_ids(messages: Sequence[pb.Report | pb.Ask], field: str) -> None:
    for index, message in enumerate(messages):
        if not message.ask_id:
            where = f"{field}[{index}].ask_id"
            raise InvalidRequestError(f"{where} is required", field=where)


_NO_LABELS: Mapping[str, str] = MappingProxyType({})
