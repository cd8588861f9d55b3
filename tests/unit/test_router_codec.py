"""Encoding and decoding of asks, placements, reports, views and worker records."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.api.router.v1 import router_pb2 as pb
from kvmesh.api.types.v1 import kv_pb2
from kvmesh.core import (
    Ask,
    FailingKvPath,
    Handoff,
    KvBatch,
    KvCleared,
    KvRemoved,
    KvStored,
    KvTier,
    LoadRecord,
    Placement,
    Report,
    ReportKind,
    Role,
    WorkerRef,
    WorkerView,
)
from kvmesh.errors import InvalidRequestError, LostError
from kvmesh.rpc.codec.router import (
    from_ask,
    from_placement,
    from_report,
    from_worker_view,
    read_route_request,
    to_worker_view,
)
from kvmesh.rpc.codec.worker import (
    from_description,
    from_kv_batch,
    from_kv_event,
    from_load,
    to_description,
    to_kv_batch,
    to_load,
)
from tests.messages import to_ask, to_placement, to_report
from tests.unit.router_fleets import description

FULL_ASK = Ask(
    request_id="r",
    model="m",
    prompt_tokens=40,
    block_hashes=(1, 2**64 - 1),
    block_size_tokens=16,
    expected_output_tokens=5,
    adapter="a",
    tenant="t",
    priority=-3,
    timeout_s=2.5,
    session_id="s",
    choices=2,
    required_features=("lora",),
    required_labels={"zone": "a"},
    preferred_labels={"zone": "b"},
    excluded_worker_ids=("x",),
    pinned_prefill_worker_id="p",
    pinned_decode_worker_id="d",
    attempt=1,
    traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    files_digest="ab",
)


def test_an_ask_survives_encoding():
    """An ask with all fields, and one with only the required fields, are equal after encoding and decoding."""
    arrived = from_ask(to_ask(7, FULL_ASK))
    # Block hashes are not copied: they stay in the message's own sequence type.
    assert replace(arrived, block_hashes=tuple(arrived.block_hashes)) == FULL_ASK
    assert all(getattr(FULL_ASK, field.name) for field in fields(Ask)), "the test must set every field"
    least = Ask(request_id="r", model="m", prompt_tokens=1)
    assert from_ask(to_ask(1, least)) == least


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt_tokens": 0}, "ask.prompt_tokens"),
        ({"model": ""}, "ask.model"),
        ({"request_id": "x" * 129}, "ask.request_id"),
        ({"priority": 101}, "ask.priority"),
        ({"block_size_tokens": 0}, "ask.block_size_tokens"),
        ({"block_hashes": (1, 2, 3)}, "ask.block_hashes"),
        ({"timeout_s": -1.0}, "ask.timeout"),
        ({"excluded_worker_ids": ("w",) * 65}, "ask.excluded_worker_ids"),
        ({"files_digest": "a" * 129}, "ask.files_digest"),
    ],
)
def test_invalid_asks_are_refused_by_field(change, field):
    """The error of an ask with a value out of range names the field."""
    with pytest.raises(InvalidRequestError) as refusal:
        from_ask(to_ask(1, replace(FULL_ASK, **change)))
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("reports", "asks", "field"),
    [
        ([], [], "asks"),
        ([1, 0], [1], "reports[1].ask_id"),
        ([1], [2, 0], "asks[1].ask_id"),
        ([1], [1] * 65, "asks"),
        ([1] * 1025, [], "reports"),
    ],
)
def test_invalid_route_requests_are_refused_by_field(reports, asks, field):
    """The error of a message that is empty, too long, or has an entry without its number names the field."""
    message = pb.RouteRequest(reports=[pb.Report(ask_id=n) for n in reports], asks=[pb.Ask(ask_id=n) for n in asks])
    with pytest.raises(InvalidRequestError) as refusal:
        read_route_request(message)
    assert refusal.value.field == field


@pytest.mark.parametrize("asks", [[], [pb.Ask(ask_id=1)]])
def test_a_second_hello_is_refused(asks):
    """A Hello in a later message is refused, with and without an ask beside it."""
    with pytest.raises(InvalidRequestError) as refusal:
        read_route_request(pb.RouteRequest(hello=pb.Hello(frontend_id="f"), asks=asks))
    assert refusal.value.field == "hello"


def test_reports_and_asks_of_a_message_are_read_in_order():
    """A message may hold asks, reports or both, and their order is kept."""
    ask, report, other = pb.Ask(ask_id=1), pb.Report(ask_id=2), pb.Report(ask_id=3)
    for reports, asks in (([], [ask]), ([report, other], []), ([report], [ask, ask])):
        read = read_route_request(pb.RouteRequest(reports=reports, asks=asks))
        assert (list(read[0]), list(read[1])) == (reports, asks)


def test_placements_and_reports_survive_encoding():
    """Placements with and without a prefill worker, and reports, survive encoding. An error keeps its class and reason."""
    decode = WorkerRef(worker_id="d", address="h:1", epoch=2**63, data_parallel_rank=0)
    alone = Placement(reservation_id="n", decode=decode, reasons=("no_prefill_pool",))
    pair = replace(
        alone,
        prefill=WorkerRef(worker_id="p", address="h:2"),
        handoff=Handoff.RENDEZVOUS,
        rendezvous_address="h:3",
        cached_tokens=5,
        expected_ttft_s=0.25,
    )
    for placement in (alone, pair):
        assert from_placement(to_placement(1, placement)) == placement
    report = Report(kind=ReportKind.PREFILLED, elapsed_s=0.5, cached_tokens=0)
    assert from_report(to_report(1, report)) == report
    failed = Report(kind=ReportKind.FAILED, elapsed_s=1, error=LostError("gone", where="d"), failed_worker_id="d")
    decoded = from_report(to_report(1, failed))
    assert isinstance(decoded.error, LostError)
    assert (decoded.error.reason, decoded.failed_worker_id, decoded.cached_tokens) == ("worker_lost", "d", None)
    with pytest.raises(InvalidRequestError):
        from_report(pb.Report(ask_id=1))


def test_descriptions_loads_and_views_survive_encoding():
    """A worker's description and load record, and a router's view of a worker, survive encoding."""
    described = description("w", "prefill", adapters=("a",), rendezvous="h:1")
    assert from_description(to_description(described)) == described
    assert from_description(to_description(replace(described, lease_s=30.5))).lease_s == 30.5
    others = ("worker_id", "is_draining", "failing_kv_paths")
    numbers = {f.name: i for i, f in enumerate(fields(LoadRecord)) if f.name not in others}
    failing = (FailingKvPath(worker_id="p", reason="unreachable"),)
    load = LoadRecord(worker_id="w", is_draining=True, failing_kv_paths=failing, **numbers)
    assert from_load(to_load(load)) == load
    view = WorkerView(worker=described.worker, role=Role.DECODE, model="m", trust="exact", load=load, index_blocks=4)
    assert from_worker_view(to_worker_view(view)) == view


hashes = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5).map(tuple)
tiers = st.sampled_from(list(KvTier))
ranks = st.integers(0, 7)
events = st.one_of(
    st.builds(
        KvStored,
        block_hashes=hashes,
        parent_hash=st.none() | st.integers(0, 2**64 - 1),
        tier=tiers,
        data_parallel_rank=ranks,
    ),
    st.builds(KvRemoved, block_hashes=hashes, tier=tiers, data_parallel_rank=ranks),
    st.builds(KvCleared, data_parallel_rank=ranks),
)


@given(
    st.builds(
        KvBatch, epoch=st.integers(0, 2**63), sequence=st.integers(0, 9), events=st.lists(events, max_size=5).map(tuple)
    )
)
def test_kv_batches_survive_encoding(batch):
    """All kinds of events keep their order and values. A parent hash of 0 differs from an absent one."""
    assert from_kv_batch(to_kv_batch(batch)) == batch


@pytest.mark.parametrize(
    "message",
    [
        kv_pb2.KvEvent(),
        kv_pb2.KvEvent(stored=kv_pb2.KvStored(tier=kv_pb2.KV_TIER_DEVICE)),
        kv_pb2.KvEvent(removed=kv_pb2.KvRemoved(block_hashes=[1])),
    ],
)
def test_invalid_kv_events_are_refused(message):
    """An event must have a kind, a block and a tier."""
    with pytest.raises(InvalidRequestError):
        from_kv_event(message)
