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


def test_a_placement_counts_equally_at_both_routers():
    """The sums of all workers are equal at both routers until the request is prefilled, and until it is settled."""
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


def test_a_single_token_request_counts_at_its_prefill_worker_only():
    """The peer counts a request that a prefill worker answers in the same way."""
    routers = pair()
    number, _ = routers.place("a", expected_output_tokens=1)
    routers.sync()
    assert routers.sums("b") == routers.sums("a") == {**NOTHING, "p1": (1, 100, 0)}
    routers.report("a", number, ReportKind.PREFILLED)
    routers.report("a", number, ReportKind.FINISHED, is_answered_by_prefill=True)
    routers.sync()
    assert routers.sums("b") == routers.sums("a") == NOTHING


@pytest.mark.parametrize(("choices", "kv_blocks", "read"), [(0, 0, 0), (0, 9, 1), (2, 9, 2), (1, 0, 1)])
def test_choices_of_a_decoded_reservation(choices, kv_blocks, read):
    """0 choices mean none only if the reservation keeps no blocks. Otherwise they mean one."""
    update = PeerReservation(
        reservation_id="r", request_id="q", frontend_id="f", ask_id=1, decode_worker_id="d", ends_after_s=1.0,
        choices=choices, kv_blocks=kv_blocks,
    )  # fmt: skip
    message = to_peer_update(PeerUpdate(sequence=1, router_id="a", run_id="x", reservations=(update,)))
    assert from_peer_update(message).reservations[0].choices == read


def test_a_reservation_that_ends_before_it_is_sent_is_not_sent():
    """A settled reservation that the peer never received needs no message."""
    routers = pair()
    number, _ = routers.place("a")
    routers.report("a", number, ReportKind.FAILED)
    assert not any(session.updates for stream in routers.streams for session in stream.ends.values())


def test_a_snapshot_sends_existing_reservations():
    """A snapshot in parts, with changes between the parts, gives the peer the same state."""
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
    """A frontend can report to any router, by the reservation's id or by its own number."""
    routers = pair()
    by_id, placement = routers.place("a")
    by_number, _ = routers.place("a")
    routers.sync()
    routers.report("b", by_id, ReportKind.FINISHED, reservation_id=placement.reservation_id)
    routers.report("b", by_number, ReportKind.CANCELLED)
    assert routers.sums("b") == NOTHING
    routers.sync()
    assert routers.sums("a") == NOTHING


def test_a_repeated_settling_report_is_ignored():
    """A frontend whose stream breaks during a write repeats the reports of that write, at the same router or at another one."""
    routers = pair()
    number, _ = routers.place("a")
    routers.sync()
    # Router b does not know yet that router a has received the report.
    for name in ("a", "a", "b", "b"):
        routers.report(name, number, ReportKind.FINISHED)
    routers.sync()
    routers.report("b", number, ReportKind.FINISHED)
    routers.sync()
    assert routers.sums("a") == routers.sums("b") == NOTHING
    assert not routers.cores["a"].book and not routers.cores["b"].book


def test_a_frontend_cannot_settle_another_frontends_reservation():
    routers = pair()
    _, placement = routers.place("a")
    routers.sync()
    routers.report("b", 1, ReportKind.FINISHED, frontend="stranger", reservation_id=placement.reservation_id)
    routers.sync()
    assert routers.sums("a") == routers.sums("b") != NOTHING


def test_adopted_reservations_of_a_lost_router_remain():
    """Adopted reservations outlast the grace time. The others end with it."""
    routers = pair()
    adopted, placement = routers.place("a")
    routers.place("a")
    routers.sync()
    routers.kill("a")
    routers.report("b", adopted, ReportKind.PROGRESS, reservation_id=placement.reservation_id)
    assert routers.sums("b")["p1"] == (2, 200, 0)  # PROGRESS does not mean that the prompt is computed.
    routers.advance(GRACE_S + 1)
    assert routers.sums("b")["p1"] == (1, 100, 0)
    routers.advance(1000)
    routers.report("b", adopted, ReportKind.FINISHED, reservation_id=placement.reservation_id)
    assert routers.sums("b") == NOTHING


def test_an_adoption_before_the_loss_is_noticed_counts():
    """The frontend may notice the loss of a router before the other router does."""
    routers = pair()
    number, placement = routers.place("a")
    routers.sync()
    routers.report("b", number, ReportKind.PREFILLED, reservation_id=placement.reservation_id)
    routers.kill("a")
    routers.advance(GRACE_S + 1)
    assert len(routers.cores["b"].book) == 1


def test_an_adoption_is_passed_on_to_other_routers():
    """A third router, to which the frontend is not connected, learns that a reservation of the lost router is in use, and when it ends."""
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


def test_an_adoption_is_passed_on_to_the_first_router():
    """If only the frontend's stream broke, the router that placed the request learns of the adoption before the grace time ends."""
    routers = pair()
    number, placement = routers.place("a")
    routers.sync()
    routers.cores["a"].on_stream_ended("f", now=routers.now)
    routers.report("b", number, ReportKind.PREFILLED, reservation_id=placement.reservation_id)
    routers.sync()
    routers.advance(GRACE_S + 1)
    assert routers.sums("a") == routers.sums("b") != NOTHING


def test_adopted_reservations_end_with_the_frontend():
    """After an adoption, the end of the frontend's stream at the adopting router starts the grace time."""
    routers = pair()
    number, placement = routers.place("a")
    routers.sync()
    routers.kill("a")
    routers.report("b", number, ReportKind.PROGRESS, reservation_id=placement.reservation_id)
    routers.cores["b"].on_stream_ended("f", now=routers.now)
    routers.advance(GRACE_S + 1)
    assert routers.sums("b") == NOTHING


def test_a_restarted_router_receives_all_reservations():
    """It also receives its own earlier reservations, and its new ids do not collide with old ones."""
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


def test_a_reopened_stream_transfers_missed_changes():
    """The snapshots of both routers contain the changes made without a stream."""
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
    assert len(routers.cores["b"].book) == 2  # The snapshot ends the grace time that the loss of the stream started.


def test_the_same_ask_at_another_router_replaces_the_first():
    """A frontend that repeats an unanswered ask at another router has one reservation, not two."""
    routers = pair()
    number, _ = routers.place("a")
    routers.sync()
    routers.place("b", number=number)
    routers.sync()
    assert len(routers.cores["a"].book) == len(routers.cores["b"].book) == 1
    assert routers.sums("a") == routers.sums("b")


def test_reservations_of_unknown_workers_are_pending():
    """One router may see a worker before the other does. Pending reservations are bounded, and change and end like others."""
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


def test_a_pending_reservation_counts_once():
    """Another router may send it after the worker has become known, before the pending reservations are retried."""
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


def test_only_the_keeper_ends_a_reservation():
    """After the frontend has moved to another router, the router that it left cannot end its request."""
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


def test_a_new_process_ends_reservations_of_the_old_one():
    """The reservations of the old process end after the grace time, even if the loss of its stream was not noticed."""
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


def test_an_end_is_never_sent_before_its_adoption():
    """Adoptions and ends are each sent in order, over several messages."""
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
    """The lost message may have ended a reservation, so the stream cannot continue."""
    routers = pair()
    routers.place("a")
    stream = routers.streams[0]
    routers.replicas["a"].next_message(stream.ends["a"], now=routers.now)  # Lost on the way.
    with pytest.raises(LostError) as lost:
        routers.send_update(stream, "a")
    assert lost.value.reason == "sequence_gap"


def test_changes_for_a_slow_peer_are_bounded():
    """If a peer does not read, its session is marked as overrun and stores no more changes."""
    routers = pair(settings=SyncSettings(changes_max=5))
    changes = routers.streams[0].ends["a"].updates
    for _ in range(6):
        routers.place("a")
    assert changes.is_overrun
    routers.place("a")
    assert len(changes) == 0


def test_the_first_message_must_identify_the_router():
    """A first message without ids, or with the receiver's own id, is refused by field."""
    replica = pair().replicas["a"]
    for router_id, run_id, field in (("", "x", "router_id"), ("b", "", "run_id"), ("a", "x", "router_id")):
        update = PeerUpdate(sequence=1, router_id=router_id, run_id=run_id)
        with pytest.raises(InvalidRequestError) as refused:
            replica.on_message(replica.open_session(), update, now=0.0)
        assert refused.value.field == field


def test_reservations_of_peers_are_bounded(monkeypatch):
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


def test_sessions_and_approximate_caches_are_shared():
    """A session keeps its worker at the other router. Placements on an engine without events count as cached there, too."""
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


def test_updates_of_unknown_ids_are_ignored():
    """Ends of both routers may cross. A reservation on an unknown rank is pending."""
    routers = pair()
    stream = routers.streams[0]
    session = stream.ends["b"]
    update = PeerUpdate(sequence=session.received + 1, prefilled_ids=["x"], settled_ids=["y"])
    routers.replicas["b"].on_message(session, update, now=routers.now)
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
