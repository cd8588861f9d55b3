"""The pure rules of discovery: durations, backoff, blocking queries, and the meaning of Consul's answers."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.discovery import wire
from kvmesh.discovery.base import Health, Instance
from kvmesh.discovery.retry import Backoff
from kvmesh.discovery.watching import WatchState
from kvmesh.discovery.wire import duration_seconds, duration_text
from kvmesh.errors import (
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)


def instance(instance_id: str) -> Instance:
    return Instance(
        service="s",
        instance_id=instance_id,
        host="h",
        port=1,
        meta={},
        tags=(),
        health=Health.PASSING,
        is_draining=False,
    )


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90.0), ("1m30s", 90.0), ("250ms", 0.25), ("1.5h", 5400.0), ("0", 0.0), (".5s", 0.5)]
)
def test_durations_are_parsed(text: str, seconds: float) -> None:
    """Durations in Go's format are parsed as Consul does."""
    assert duration_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "s", "-1s", "1 s", "1s ", "1y", "1ss", "9" * 80 + "s", "1e3s"])
def test_invalid_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        duration_seconds(text)


@given(st.floats(min_value=0.001, max_value=1e6))
def test_durations_survive_formatting_and_parsing(seconds: float) -> None:
    """A formatted duration is parsed to the same value, to the millisecond."""
    assert duration_seconds(duration_text(seconds)) == pytest.approx(seconds, abs=0.0006)


@pytest.mark.parametrize(("random", "factor"), [(0.0, 1.0), (0.9999, 0.5)])
def test_backoff_doubles_to_its_cap(random: float, factor: float) -> None:
    """Random delays lie between half and the whole of the current delay, which doubles up to the limit and resets after a success."""
    backoff = Backoff(first_s=0.1, max_s=1.0, random=lambda: random)
    delays = [backoff.next_s() for _ in range(6)]
    assert delays == pytest.approx([factor * delay for delay in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0)], rel=0.01)
    backoff.reset()
    assert backoff.next_s() == pytest.approx(0.1 * factor, rel=0.01)


def test_the_watch_follows_the_rules_of_blocking_queries() -> None:
    """The watch queries with the last index. It never uses 0 after an answer, except when the index decreased."""
    watching = WatchState("s")
    assert watching.index == 0
    watching.on_response(7, [])
    assert watching.index == 7
    watching.on_response(0, [])
    assert watching.index == 0, "an index below the last one resets the watch"
    watching.on_response(0, [])
    assert watching.index == 1, "a query with index 0 would not block"
    watching.on_response(9, [])
    watching.on_response(4, [])
    assert watching.index == 0
    watching.on_response(4, [])
    assert watching.index == 4


def test_the_watch_yields_only_changes() -> None:
    """The first answer is a change even if it is empty. An equal answer is no change, whatever its index."""
    watching = WatchState("s")
    first = watching.on_response(5, [])
    assert first is not None
    assert first.instances == ()
    assert watching.on_response(6, []) is None
    second = watching.on_response(7, [instance("a")])
    assert second is not None
    assert second.index == 7
    assert watching.on_response(8, [instance("a")]) is None
    assert watching.on_response(9, [instance("b")]) is not None


def test_a_lost_registry_state_counts_as_an_outage() -> None:
    """If the index decreases, the last view stays, marked stale, until the next answer. A paused process sees no failed query during the
    outage.
    """
    watching = WatchState("s")
    watching.on_response(7, [instance("a")])
    lost = watching.on_response(2, [])
    assert lost is not None
    assert (lost.is_stale, lost.instances) == (True, (instance("a"),))
    fresh = watching.on_response(2, [])
    assert fresh is not None
    assert (fresh.is_stale, fresh.instances) == (False, ())


def test_the_watch_reports_an_outage_once() -> None:
    """An outage yields the last view once, marked stale. The same view after the outage is a change."""
    watching = WatchState("s")
    watching.on_response(5, [instance("a")])
    stale = watching.on_failure()
    assert stale is not None
    assert (stale.is_stale, stale.index, stale.instances) == (True, 5, (instance("a"),))
    assert watching.index == 0
    assert watching.on_failure() is None
    fresh = watching.on_response(3, [instance("a")])
    assert fresh is not None
    assert not fresh.is_stale
    assert watching.index == 3


def test_a_watch_that_fails_before_its_first_answer() -> None:
    """The watch yields an empty stale view, and has seen no answer."""
    watching = WatchState("s")
    stale = watching.on_failure()
    assert stale is not None
    assert (stale.is_stale, stale.instances, watching.has_seen) == (True, (), False)
    watching.on_response(1, [])
    watching.on_failure()
    assert watching.has_seen


REFUSALS = [
    (500, 'CheckID "w1:ttl" does not have associated TTL', NotFoundError),
    (500, 'Unknown check "w1:ttl"', NotFoundError),
    (404, 'Unknown check ID "w1:ttl". Ensure that the check ID is passed, not the check name.', NotFoundError),
    (500, 'invalid session "1-2"', NotFoundError),
    (500, "failed session lookup: index error: UUID must be 36 characters", NotFoundError),
    (500, "No cluster leader", UnavailableError),
    (503, "", UnavailableError),
    (403, "Permission denied", PermissionDeniedError),
    (403, "ACL not found", UnauthenticatedError),
    (400, "Request decode failed", InvalidRequestError),
    (413, "Request body too large", InvalidRequestError),
    (301, "moved", InvalidRequestError),
    (429, "Your IP is issuing too many concurrent connections", OverloadedError),
]


@pytest.mark.parametrize(("status", "text", "kind"), REFUSALS)
def test_refusals_map_to_errors(status: int, text: str, kind: type[Exception]) -> None:
    """Each error status of Consul becomes the error class that determines what the caller does next."""
    assert type(wire.failure(status, text)) is kind


HEALTH = {
    "Node": {"Address": "10.0.0.1"},
    "Service": {"ID": "a", "Address": "", "Port": 7, "Tags": None, "Meta": None},
    "Checks": [
        {"CheckID": "serfHealth", "Status": "passing", "Notes": "", "Output": ""},
        {"CheckID": "a:grpc", "Status": "warning", "Notes": "", "Output": "no"},
        {"CheckID": "_node_maintenance", "Status": "critical", "Notes": "reboot", "Output": ""},
    ],
}


def test_a_health_answer_is_parsed() -> None:
    """The node's address replaces a missing service address, the worst check determines the health, and a node's drain mark counts."""
    [seen] = wire.instances("s", json.dumps([HEALTH]).encode())
    assert (seen.address, seen.health, seen.is_draining, seen.notes) == (
        "10.0.0.1:7",
        Health.WARNING,
        True,
        "reboot",
    )


@pytest.mark.parametrize("body", [b"", b"{", b"{}x", b"3", b'[{"Service": {}}]', b"[3]", b"<html>", b'["a"]', b"null"])
def test_answers_that_are_not_consuls_are_refused(body: bytes) -> None:
    """An answer of another program at the address raises UnavailableError."""
    for read in (lambda: wire.instances("s", body), lambda: wire.entries(body)):
        with pytest.raises(UnavailableError):
            read()
    for check in (lambda: wire.truth(body), lambda: wire.session_id(body)):
        with pytest.raises(UnavailableError):
            check()


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_no_json_crashes_the_parser(answer: object) -> None:
    """Any JSON is either parsed or raises UnavailableError."""
    body = json.dumps(answer).encode()
    for read in (lambda: wire.instances("s", body), lambda: wire.entries(body)):
        with contextlib.suppress(UnavailableError):
            read()
