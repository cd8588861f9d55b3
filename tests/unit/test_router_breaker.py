"""A single breaker: when it opens and closes, its pauses, and its probes."""

from hypothesis import given
from hypothesis import strategies as st

from services.router.health.breaker import NEVER_S, PROBE_S_MAX, PROBES_MAX, Breaker, BreakerSettings, BreakerState

SETTINGS = BreakerSettings(failures_max=3, pause_min_s=1, pause_max_s=8)


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(SETTINGS)
    for number in range(3):
        breaker.on_failure(f"r{number}", now)
    assert breaker.state is BreakerState.OPEN
    return breaker


def half_open(now: float = 1.0) -> Breaker:
    breaker = opened()
    breaker.advance(now)
    assert breaker.state is BreakerState.HALF_OPEN
    return breaker


def test_consecutive_failures_open_the_breaker():
    """Three consecutive failures open the breaker. A success resets the count."""
    breaker = Breaker(SETTINGS)
    for _ in range(3):
        breaker.on_failure("a", 0)
        breaker.on_failure("b", 0)
        breaker.on_success("c", 0)
    assert breaker.admits
    assert not opened().admits


def test_failures_of_half_of_the_recent_requests_open_the_breaker():
    """This catches a worker that fails every second request and never three in a row."""
    breaker = Breaker(SETTINGS)
    for number in range(10):
        breaker.on_success("a", number)
        assert breaker.admits
        breaker.on_failure("b", number)
    assert breaker.state is BreakerState.OPEN


def test_a_first_token_is_not_a_success():
    """A worker that fails each time after the first token still opens its breaker."""
    breaker = Breaker(SETTINGS)
    for _ in range(3):
        breaker.on_first_result("a", 0)
        breaker.on_failure("a", 0)
    assert breaker.state is BreakerState.OPEN


def test_an_open_breaker_admits_probes_after_its_pause():
    """After the pause at most two probes run at a time. A probe that ends without a verdict makes room for another."""
    breaker = opened()
    assert breaker.next_change_at == 1.0
    assert breaker.retry_after_s(0.25) == 0.75
    breaker.advance(0.99)
    assert not breaker.admits
    breaker.advance(1.0)
    breaker.on_placed("p1", 1.0)
    assert breaker.admits
    breaker.on_placed("p2", 1.0)
    assert not breaker.admits
    assert breaker.retry_after_s(1.0) == 1.0
    breaker.on_no_verdict("p1", 1.0)
    assert breaker.admits


def test_successful_probes_close_the_breaker():
    """Two probes with a first token close the breaker. Outcomes of earlier requests are ignored."""
    breaker = half_open()
    breaker.on_placed("p1", 1.0)
    breaker.on_first_result("p1", 1.1)
    breaker.on_success("p1", 1.2)
    breaker.on_success("placed-long-ago", 1.2)
    breaker.on_failure("placed-long-ago", 1.2)
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.on_placed("p2", 1.2)
    breaker.on_first_result("p2", 1.3)
    assert breaker.state is BreakerState.CLOSED
    assert breaker.next_change_at == NEVER_S


def test_a_probe_counts_in_its_own_round_only():
    """After a failed probe and the next pause, two new probes must succeed again."""
    breaker = half_open()
    breaker.on_placed("p1", 1.0)
    breaker.on_first_result("p1", 1.1)
    breaker.on_placed("p2", 1.2)
    breaker.on_failure("p2", 1.3)
    assert breaker.state is BreakerState.OPEN
    breaker.advance(breaker.next_change_at)
    breaker.on_placed("p3", 9.0)
    breaker.on_first_result("p3", 9.1)
    assert breaker.state is BreakerState.HALF_OPEN


def test_the_pause_doubles_and_resets_after_a_healthy_time():
    """Pauses are 1, 2, 4, 8, 8 seconds. They continue from there if the breaker closed recently, and start with 1 if it has been closed for
    long."""
    breaker, now, pauses = opened(), 0.0, [1.0]
    for _ in range(4):
        now = breaker.next_change_at
        breaker.advance(now)
        breaker.on_placed("p", now)
        breaker.on_failure("p", now)
        pauses.append(breaker.next_change_at - now)
    assert pauses == [1, 2, 4, 8, 8]
    breaker.close(now)
    breaker.trip(now + 1, "silent")
    assert breaker.next_change_at == now + 1 + 8
    breaker.close(now)
    breaker.trip(now + 8, "silent")
    assert breaker.next_change_at == now + 8 + 1
    assert breaker.cause == "silent"


def test_a_probe_without_reports_expires():
    """Otherwise a probe whose reports are lost would exclude the worker forever."""
    breaker = half_open()
    breaker.on_placed("p1", 1.0)
    breaker.on_placed("p2", 1.0)
    assert breaker.next_change_at == 1.0 + PROBE_S_MAX
    breaker.advance(1.0 + PROBE_S_MAX)
    assert breaker.admits


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["placed", "first_result", "success", "failure", "no_verdict", "trip", "wait"]),
        st.integers(0, 5),
        st.floats(0, 20),
    ),
    max_size=80,
)


@given(STEPS)
def test_a_breaker_always_admits_again(steps):
    """After any sequence of events at most two probes run at a time, and once events stop, the breaker admits a request after a bounded time."""
    breaker, now = Breaker(SETTINGS), 0.0
    for what, number, wait_s in steps:
        name = f"r{number}"
        if what == "wait":
            now += wait_s
            breaker.advance(now)
        elif what == "placed":
            if breaker.admits:
                breaker.on_placed(name, now)
        elif what == "trip":
            breaker.trip(now, "silent")
        else:
            getattr(breaker, f"on_{what}")(name, now)
        assert len(breaker._probes) <= PROBES_MAX
        assert breaker.admits or breaker.next_change_at <= now + max(SETTINGS.pause_max_s, PROBE_S_MAX)
    for _ in range(3):
        if not breaker.admits:
            now = max(now, breaker.next_change_at)
            breaker.advance(now)
    assert breaker.admits
