"""State that routers share: each reservation counts once and ends once, whichever router is lost."""

import pytest

from kvmesh.core import PeerReservation, PeerUpdate, ReportKind
from kvmesh.errors import InvalidRequestError, LostError
from kvmesh.rpc.codec.peers import from_peer_update, to_peer_update
from services.router.core_settings import SyncSettings
from services.router.workers import reservations
from tests.unit.router_fleets import join
from tests.unit.router_replicas import GRACE_S, WORKERS, Routers

NOTHING = {"p1": (0, 0, 0), "d1": (0, 0, 0), "d2": (0, 0, 0)}


def pair(**options) -> Routers:
    routers = Routers("a", "b", **options)
    routers.connect("a", "b")
    routers.sync()
    return routers


def test_a_placement_counts_at_the_peer_as_at_its_maker():
    """All three sums of both workers are equal, until prefilled and until settled."""
    routers = pair()
    number, _ = routers.place("a")
    assert routers.sums("b") == NOTHING
    routers.sync()
    assert routers.sums("b") == routers.sums("a") != NOTHING
    assert routers.sums("b")["p1"] == (1, 100, 0)
    routers.report("a", number, ReportKind.PREFILLED)
    routers.sync()
    assert routers.sums("b") == routers.sums("a")
    assert routers.sums("b")["p1"] == (0, 0, 0)
    routers.report("a", number, ReportKind.FINISHED)
    routers.sync()
    assert routers.sums("b") == routers.sums("a") == NOTHING


def test_what_prefill_answers_counts_there_only():
    """Also at the peer."""
    routers = pair()
    number, _ = routers.place("a", expected_output_tokens=1)
    routers.sync()
    assert routers.sums("b") == routers.sums("a") == {**NOTHING, "p1": (1, 100, 0)}
    routers.report("a", number, ReportKind.PREFILLED)
    routers.report("a", number, ReportKind.FINISHED, is_answered_by_prefill=True)
    routers.sync()
    assert routers.sums("b") == routers.sums("a") == NOTHING


@pytest.mark.parametrize(("choices", "kv_blocks", "read"), [(0, 0, 0), (0, 9, 1), (2, 9, 2), (1, 0, 1)])
def test_choices_of_a_reservation_on_the_wire(choices, kv_blocks, read):
    """0 is none only where no blocks are kept either."""
    news = PeerReservation(
        reservation_id="r", request_id="q", frontend_id="f", ask_id=1, decode_worker_id="d", ends_after_s=1.0,
        choices=choices, kv_blocks=kv_blocks,
    )  # fmt: skip
    message = to_peer_update(PeerUpdate(sequence=1, router_id="a", run_id="x", reservations=(news,)))
    assert from_peer_update(message).reservations[0].choices == read


def test_what_begins_and_ends_between_two_messages_is_not_told():
    """A settled reservation that the peer never received costs no message."""
    routers = pair()
    number, _ = routers.place("a")
    routers.report("a", number, ReportKind.FAILED)
    assert not any(session.updates for stream in routers.streams for session in stream.ends.values())


def test_a_snapshot_tells_what_was_there_before():
    """In parts, with what changes meanwhile."""
    routers = Routers("a", "b", settings=SyncSettings(changes_per_message_max=3))
    numbers = [routers.place("a")[0] for _ in range(8)]
    routers.report("a", numbers[0], ReportKind.PREFILLED)
    stream = routers.connect("a", "b")
    routers.send_update(stream, "a")
    assert not routers.replicas["b"].has_snapshot_of("a")
    routers.report("a", numbers[1], ReportKind.FINISHED)
    routers.report("a", numbers[7], ReportKind.FINISHED)
    routers.place("a")
    routers.sync()
    assert routers.replicas["b"].has_snapshot_of("a")
    assert routers.sums("b") == routers.sums("a")
    assert len(routers.cores["b"].book) == 7


def test_a_report_at_the_other_router_settles_at_both():
    """Frontends report to any router, by the reservation's id or their own number."""
    routers = pair()
    by_id, placement = routers.place("a")
    by_number, _ = routers.place("a")
    routers.sync()
    routers.report("b", by_id, ReportKind.FINISHED, reservation_id=placement.reservation_id)
    routers.report("b", by_number, ReportKind.CANCELLED)
    assert routers.sums("b") == NOTHING
    routers.sync()
    assert routers.sums("a") == NOTHING


def test_an_id_of_another_frontend_settles_nothing():
    """A frontend cannot end another frontend's reservation."""
    routers = pair()
    _, placement = routers.place("a")
    routers.sync()
    routers.report("b", 1, ReportKind.FINISHED, frontend="stranger", reservation_id=placement.reservation_id)
    routers.sync()
    assert routers.sums("a") == routers.sums("b") != NOTHING


def test_a_lost_router_leaves_what_is_adopted():
    """Adopted reservations outlast the grace; the others end with it."""
    routers = pair()
    adopted, placement = routers.place("a")
    routers.place("a")
    routers.sync()
    routers.kill("a")
    routers.report("b", adopted, ReportKind.PROGRESS, reservation_id=placement.reservation_id)
    assert routers.sums("b")["p1"] == (2, 200, 0)  # That does not mean that the prompt is computed.
    routers.advance(GRACE_S + 1)
    assert routers.sums("b")["p1"] == (1, 100, 0)
    routers.advance(1000)
    routers.report("b", adopted, ReportKind.FINISHED, reservation_id=placement.reservation_id)
    assert routers.sums("b") == NOTHING


def test_an_adoption_before_the_loss_is_noticed_counts():
    """The frontend may notice the loss before the other router does."""
    routers = pair()
    number, placement = routers.place("a")
    routers.sync()
    routers.report("b", number, ReportKind.PREFILLED, reservation_id=placement.reservation_id)
    routers.kill("a")
    routers.advance(GRACE_S + 1)
    assert len(routers.cores["b"].book) == 1


def test_an_adoption_keeps_the_reservation_at_routers_that_the_frontend_does_not_know():
    """A third router learns that reservations of the lost one are in use, and when they end."""
    routers = Routers("a", "b", "c")
    for one, other in (("a", "b"), ("a", "c"), ("b", "c")):
        routers.connect(one, other)
    routers.sync()
    number, placement = routers.place("a")
    routers.sync()
    routers.kill("a")
    routers.report("b", number, ReportKind.PROGRESS, reservation_id=placement.reservation_id)
    routers.sync()
    routers.advance(GRACE_S + 1)
    assert routers.sums("b") == routers.sums("c") != NOTHING
    routers.report("b", number, ReportKind.FINISHED, reservation_id=placement.reservation_id)
    routers.sync()
    assert routers.sums("b") == routers.sums("c") == NOTHING


def test_a_frontend_that_lost_one_stream_keeps_its_work_at_the_maker():
    """The stream broke but the router runs: it learns of the adoption before the grace ends."""
    routers = pair()
    number, placement = routers.place("a")
    routers.sync()
    routers.cores["a"].on_stream_ended("f", now=routers.now)
    routers.report("b", number, ReportKind.PREFILLED, reservation_id=placement.reservation_id)
    routers.sync()
    routers.advance(GRACE_S + 1)
    assert routers.sums("a") == routers.sums("b") != NOTHING


def test_a_frontend_that_dies_after_an_adoption_leaves_nothing():
    """The adopting router is the keeper: the end of its stream starts the grace."""
    routers = pair()
    number, placement = routers.place("a")
    routers.sync()
    routers.kill("a")
    routers.report("b", number, ReportKind.PROGRESS, reservation_id=placement.reservation_id)
    routers.cores["b"].on_stream_ended("f", now=routers.now)
    routers.advance(GRACE_S + 1)
    assert routers.sums("b") == NOTHING


def test_a_router_that_comes_back_as_a_new_process_learns_all():
    """Its own earlier reservations too. New ones do not collide with old ids."""
    routers = pair()
    number, placement = routers.place("a")
    routers.place("b")
    routers.sync()
    routers.kill("a")
    routers.report("b", number, ReportKind.PROGRESS, reservation_id=placement.reservation_id)
    routers.start("a")
    routers.connect("a", "b")
    routers.sync()
    assert routers.sums("a") == routers.sums("b")
    assert len(routers.cores["a"].book) == 2
    _, newer = routers.place("a")
    assert newer.reservation_id != placement.reservation_id
    routers.report("b", number, ReportKind.FINISHED)
    routers.sync()
    assert routers.sums("a") == routers.sums("b")
    assert len(routers.cores["a"].book) == 2


def test_a_stream_that_is_opened_anew_mends_what_was_missed():
    """The snapshots of both sides contain the changes made without a stream."""
    routers = pair()
    gone, _ = routers.place("a")
    kept, _ = routers.place("a")
    routers.sync()
    routers.cut(routers.streams[0])
    routers.report("a", gone, ReportKind.FINISHED)
    routers.report("a", kept, ReportKind.PREFILLED)
    routers.place("b")
    routers.connect("a", "b")
    routers.sync()
    assert routers.sums("a") == routers.sums("b")
    assert len(routers.cores["b"].book) == 2
    routers.advance(GRACE_S + 1)
    assert len(routers.cores["b"].book) == 2  # The grace that the cut began is over with the snapshot.


def test_the_same_ask_at_another_router_replaces_the_first():
    """A frontend that gave up on a router before its answer holds one reservation, not two."""
    routers = pair()
    number, _ = routers.place("a")
    routers.sync()
    routers.place("b", number=number)
    routers.sync()
    assert len(routers.cores["a"].book) == len(routers.cores["b"].book) == 1
    assert routers.sums("a") == routers.sums("b")


def test_reservations_of_unknown_workers_wait_for_them():
    """The registry may be ahead at one router; they are bounded, and they end as others do."""
    routers = Routers("a", "b", settings=SyncSettings(pending_max=2))
    for worker in ("d1", "d2"):
        routers.cores["b"].fleet.unregister(worker)
    routers.connect("a", "b")
    numbers = [routers.place("a")[0] for _ in range(3)]
    routers.sync()
    replica = routers.replicas["b"]
    assert (len(routers.cores["b"].book), replica.pending, replica.counts.ignored) == (0, 2, 1)
    routers.report("a", numbers[0], ReportKind.PREFILLED)
    routers.report("a", numbers[1], ReportKind.FINISHED)
    routers.sync()
    for worker, role in WORKERS[1:]:
        join(routers.cores["b"], worker, role)
    routers.advance(0.1)
    assert (len(routers.cores["b"].book), replica.pending) == (1, 0)
    assert routers.sums("b")["p1"] == (0, 0, 0)


def test_a_reservation_that_waits_for_its_worker_counts_once():
    """Another router may send it after the worker has become known, before the waiting ones are tried again."""
    routers = Routers("a", "b", "c")
    for worker in ("d1", "d2"):
        routers.cores["c"].fleet.unregister(worker)
    for one, other in (("a", "b"), ("a", "c"), ("b", "c")):
        routers.connect(one, other)
    number, placement = routers.place("a")
    routers.sync()
    for worker, role in WORKERS[1:]:
        join(routers.cores["c"], worker, role)
    routers.report("b", number, ReportKind.PROGRESS, reservation_id=placement.reservation_id)
    routers.sync()
    routers.advance(0.1)
    assert routers.sums("c") == routers.sums("b") != NOTHING
    routers.report("b", number, ReportKind.FINISHED, reservation_id=placement.reservation_id)
    routers.sync()
    assert routers.sums("c") == NOTHING


def test_only_the_keepers_word_ends_a_reservation():
    """After the frontend moved on, the router that it left cannot end its request."""
    routers = pair()
    [stream] = routers.streams
    number, _ = routers.place("a")
    routers.sync()
    routers.report("b", number, ReportKind.FIRST_TOKEN)
    routers.cores["a"].on_stream_ended("f", now=routers.now)
    routers.advance(GRACE_S)
    assert routers.sums("a") == NOTHING
    routers.send_update(stream, "a")
    assert routers.sums("b")["d1" if routers.sums("b")["d1"][0] else "d2"][0] == 1
    routers.report("b", number, ReportKind.FINISHED)
    routers.sync()
    assert routers.sums("b") == routers.sums("a") == NOTHING


def test_a_new_process_under_a_known_id_ends_what_the_old_one_kept():
    """Even before the loss of the old stream is noticed."""
    routers = pair()
    routers.place("a")
    routers.sync()
    routers.streams.clear()
    routers.start("a")
    routers.connect("a", "b")
    routers.sync()
    assert routers.sums("b") != NOTHING
    routers.advance(GRACE_S)
    assert routers.sums("b") == NOTHING


def test_ends_follow_their_beginnings_over_many_messages():
    """Adoptions go out in the order in which they were made, ends in theirs: no end is told before its adoption."""
    routers = pair(settings=SyncSettings(changes_per_message_max=1))
    numbers = [routers.place("a")[0] for _ in range(3)]
    routers.sync()
    for number in numbers:
        routers.report("b", number, ReportKind.FIRST_TOKEN)
    for number in reversed(numbers):
        routers.report("b", number, ReportKind.FINISHED)
    assert routers.sums("b") == NOTHING
    routers.sync()
    assert routers.sums("a") == NOTHING


def test_a_gap_ends_the_stream():
    """The lost message may have been an end, so the stream cannot continue."""
    routers = pair()
    routers.place("a")
    stream = routers.streams[0]
    routers.replicas["a"].next_message(stream.ends["a"], now=routers.now)  # Lost on the way.
    with pytest.raises(LostError) as lost:
        routers.send_update(stream, "a")
    assert lost.value.reason == "sequence_gap"


def test_a_peer_that_takes_nothing_is_given_up():
    """What is kept for it is bounded."""
    routers = pair(settings=SyncSettings(changes_max=5))
    changes = routers.streams[0].ends["a"].updates
    for _ in range(6):
        routers.place("a")
    assert changes.is_overrun
    routers.place("a")
    assert len(changes) == 0


def test_the_first_message_says_who_speaks():
    """Invalid first messages are rejected by field."""
    replica = pair().replicas["a"]
    for router_id, run_id, field in (("", "x", "router_id"), ("b", "", "run_id"), ("a", "x", "router_id")):
        news = PeerUpdate(sequence=1, router_id=router_id, run_id=run_id)
        with pytest.raises(InvalidRequestError) as refused:
            replica.on_message(replica.open_session(), news, now=0.0)
        assert refused.value.field == field


def test_peers_cannot_fill_the_book(monkeypatch):
    """Reservations of peers beyond the limit do not count, and end without error."""
    routers = pair()
    core = routers.cores["b"]
    numbers = [routers.place("a")[0] for _ in range(2)]
    monkeypatch.setattr(reservations, "RESERVATIONS_MAX", 1)
    routers.sync()
    assert len(core.book) == 1
    for number in numbers:
        routers.report("a", number, ReportKind.FINISHED)
    routers.sync()
    assert routers.sums("b") == NOTHING


def test_sessions_and_untold_blocks_are_learned():
    """A session keeps its workers at the other router. Placements on an engine without events count as cached there too."""
    routers = Routers("a", "b", workers=())
    for router in routers.cores.values():
        join(router, "d1", "decode", features=())
        join(router, "d2", "decode", features=())
    routers.connect("a", "b")
    _, first = routers.place("a", session_id="s", hashes=[1, 2, 3], tokens=60)
    routers.sync()
    _, second = routers.place("b", session_id="s", hashes=[1, 2, 3], tokens=60)
    assert second.decode.worker_id == first.decode.worker_id
    assert second.cached_tokens == 48
    assert "session" in second.reasons


def test_news_of_unknown_ids_is_ignored():
    """Ends may cross on the wire."""
    routers = pair()
    stream = routers.streams[0]
    session = stream.ends["b"]
    news = PeerUpdate(sequence=session.received + 1, prefilled_ids=["x"], settled_ids=["y"])
    routers.replicas["b"].on_message(session, news, now=routers.now)
    assert routers.sums("b") == NOTHING
    unknown_rank = PeerReservation(
        reservation_id="z",
        request_id="r",
        frontend_id="f",
        ask_id=1,
        decode_worker_id="d1",
        decode_rank=7,
        ends_after_s=5,
    )
    routers.replicas["b"].on_message(
        session, PeerUpdate(sequence=session.received + 1, reservations=[unknown_rank]), now=routers.now
    )
    assert routers.sums("b") == NOTHING
    assert routers.replicas["b"].pending == 1
