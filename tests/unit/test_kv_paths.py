"""Decisions about KV paths: limits of pulls, failing paths, and causes of failures."""

import logging

import pytest

from kvmesh.core import FailingKvPath, KvHandle, LoadRecord
from kvmesh.core.worker import KV_PATH_REASONS
from kvmesh.kv import path_causes, paths
from kvmesh.kv.path_causes import Failure, find_cause, find_own_fault
from kvmesh.kv.paths import KvPaths, Pull

MIB = 1 << 20
TIMED_OUT = Failure(reason="kv_pull_timeout", message="a pull did not end within 2.0 s")


def handle(worker_id: str = "p1", *, epoch: int = 1, handle_id: str = "h", kv_bytes: int = MIB) -> KvHandle:
    return KvHandle(
        handle_id=handle_id,
        format="f",
        compatibility_hash="c",
        payload=b"",
        worker_id=worker_id,
        worker_epoch=epoch,
        tokens=32,
        lease_s=30.0,
        kv_bytes=kv_bytes,
    )


def begin(known: KvPaths, now_s: float = 0.0, **of_handle: object) -> Pull:
    pull = known.begin(handle(**of_handle), now_s)  # type: ignore[arg-type]
    assert pull is not None
    return pull


def fail(known: KvPaths, now_s: float = 0.0, **of_handle: object) -> None:
    known.failed(begin(known, now_s, **of_handle), TIMED_OUT, now_s=now_s, wall_s=1000.0 + now_s)


@pytest.fixture
def known() -> KvPaths:
    return KvPaths(pull_timeout_s=10.0)


def learn(known: KvPaths, *, small_s: float = 0.01, mib_s: float = 0.1, now_s: float = 0.0) -> None:
    """Records pulls over a path that takes `small_s` for a few bytes and `mib_s` for a MiB."""
    known.succeeded(begin(known, now_s, kv_bytes=100), now_s + small_s)
    known.succeeded(begin(known, now_s), now_s + mib_s)


class TestLimits:
    def test_an_unknown_path_has_a_limit_of_its_own(self, known: KvPaths) -> None:
        """The first pull also connects the workers, which takes longer. The general limit of ten seconds would make a client wait too long."""
        assert begin(known).limit_s == paths.FIRST_LIMIT_S

    def test_the_limit_follows_from_size_and_rate(self, known: KvPaths) -> None:
        learn(known, mib_s=0.1)
        assert begin(known, kv_bytes=100).limit_s == paths.LIMIT_MIN_S
        limit_s = begin(known, kv_bytes=10 * MIB).limit_s
        assert limit_s == pytest.approx(paths.MARGIN * (0.01 + 1.0), rel=0.01)

    def test_pulls_in_progress_share_the_network(self, known: KvPaths) -> None:
        """With 20 concurrent pulls each takes 20 times as long, which is not a failure."""
        learn(known, mib_s=0.1)
        pulls = [begin(known) for _ in range(20)]
        assert pulls[0].limit_s == paths.LIMIT_MIN_S
        assert pulls[-1].limit_s >= paths.MARGIN * 20 * 0.1
        for pull in pulls:
            known.dropped(pull)
        assert begin(known).limit_s == paths.LIMIT_MIN_S

    def test_the_limit_never_exceeds_the_setting(self, known: KvPaths) -> None:
        learn(known, mib_s=1.0)
        assert begin(known, kv_bytes=1000 * MIB).limit_s == 10.0
        assert KvPaths(pull_timeout_s=0.7).begin(handle(), 0.0).limit_s == 0.7  # type: ignore[union-attr]

    def test_small_pulls_do_not_determine_the_rate(self, known: KvPaths) -> None:
        """If small pulls determined the rate, a link of 1 Gbit/s would always miss the limit of a long prompt, and never get a measured rate."""
        known.succeeded(begin(known, kv_bytes=100), 0.01)
        pull = begin(known, kv_bytes=500 * MIB)
        assert 500 * MIB / 1.25e8 < pull.limit_s < 6.0
        known.dropped(pull)
        assert begin(known, kv_bytes=10 * MIB).limit_s == paths.LIMIT_MIN_S

    def test_untypical_pulls_do_not_determine_the_limit(self, known: KvPaths) -> None:
        known.succeeded(begin(known), 9.0, is_typical=False)
        assert begin(known).limit_s == paths.FIRST_LIMIT_S

    def test_a_handle_without_a_worker_has_the_longest_limit_and_no_path(self, known: KvPaths) -> None:
        fail(known, worker_id="")
        assert begin(known, worker_id="").limit_s == 10.0 and not known.paths() and not known.failing()


class TestFailures:
    def test_nothing_is_pulled_over_a_failing_path(self, known: KvPaths, caplog: pytest.LogCaptureFixture) -> None:
        """A failing path is not used, while other paths are. The load record and the log report the failure, the log only once."""
        with caplog.at_level(logging.INFO):
            first, second = begin(known), begin(known)
            for pull in (first, second):
                known.failed(pull, TIMED_OUT, now_s=2.0, wall_s=1000.0)
        assert known.begin(handle(), 2.0) is None
        assert known.begin(handle("p2"), 2.0) is not None
        assert known.load_fields()["failing_kv_paths"] == [FailingKvPath(worker_id="p1", reason="timed_out")]
        # The garbage collector may log about objects of other tests.
        assert [record.message for record in caplog.records if record.name.startswith("kvmesh.")] == ["kv_path_failing"]
        path = next(each for each in known.paths() if each.worker_id == "p1")
        assert (path.failures_total, path.reason, path.last_failure_at_s) == (2, "timed_out", 1000.0)
        assert "did not end" in path.detail

    def test_a_successful_check_ends_the_failure(self, known: KvPaths, caplog: pytest.LogCaptureFixture) -> None:
        fail(known)
        known.expect_check("check")
        pull = begin(known, 3.0, handle_id="check")
        assert pull.is_check and pull.limit_s == paths.CHECK_LIMIT_S
        with caplog.at_level(logging.INFO):
            known.succeeded(pull, 3.1)
        known.end_check("check")
        assert known.begin(handle(), 4.0) is not None and not known.failing()
        assert caplog.records[-1].message == "kv_path_recovered"

    def test_only_the_expected_check_uses_a_failing_path(self, known: KvPaths) -> None:
        fail(known)
        known.expect_check("check")
        known.end_check("check")
        assert known.begin(handle(handle_id="check"), 1.0) is None

    def test_checks_are_made_after_a_pause_that_grows_to_its_limit(self, known: KvPaths) -> None:
        """The pause between checks has a limit, which bounds how late a recovered path is noticed."""
        fail(known, 10.0)
        assert known.due_checks(10.9) == [] and known.due_checks(11.0) == ["p1"]
        for now_s in (11.0, 13.0, 15.0):
            known.put_off("p1", now_s)
            assert known.due_checks(now_s + 1.9) == [] and known.due_checks(now_s + 2.0) == ["p1"]

    def test_late_failures_of_earlier_pulls_do_not_delay_checks(self, known: KvPaths) -> None:
        late = begin(known)
        fail(known, 1.0)
        known.failed(late, TIMED_OUT, now_s=1.9, wall_s=0.0)
        assert known.due_checks(2.0) == ["p1"]

    def test_a_failed_pull_from_before_the_recovery_is_ignored(self, known: KvPaths) -> None:
        old = begin(known, 1.0)
        known.succeeded(begin(known, 2.0), 2.1)
        known.failed(old, TIMED_OUT, now_s=3.0, wall_s=0.0)
        assert not known.failing()

    def test_a_restarted_source_is_used_again(self, known: KvPaths) -> None:
        """A new epoch of the source ends the failure. A late failure of a pull from the earlier process does not count."""
        old = begin(known)
        fail(known)
        assert known.begin(handle(epoch=2), 1.0) is not None
        known.failed(old, TIMED_OUT, now_s=2.0, wall_s=0.0)
        assert not known.failing()

    @pytest.mark.parametrize("reason", sorted(path_causes.NOT_OF_THE_PATH))
    def test_failures_of_handles_and_requests_do_not_affect_the_path(self, known: KvPaths, reason: str) -> None:
        known.failed(begin(known), Failure(reason=reason, message="m"), now_s=0.0, wall_s=0.0)
        assert not known.failing()

    def test_workers_that_left_are_removed(self, known: KvPaths) -> None:
        fail(known)
        fail(known, worker_id="p2")
        known.forget_others(["p2"])
        assert [each.worker_id for each in known.failing()] == ["p2"]

    def test_the_table_is_bounded(self, known: KvPaths) -> None:
        for number in range(paths.PATHS_MAX + 5):
            known.dropped(begin(known, worker_id=f"p{number}"))
        assert len(known.paths()) == paths.PATHS_MAX
        assert known.paths()[0].worker_id == f"p{paths.PATHS_MAX + 4}"


def test_recomputed_prompts_are_counted_but_checks_are_not(known: KvPaths) -> None:
    known.expect_check("check")
    known.count_recomputed(handle(handle_id="check"), 24)
    known.count_recomputed(handle(), 100)
    load = LoadRecord(**known.load_fields())
    assert (load.failed_handoffs_total, load.recomputed_tokens_total) == (1, 100)


class TestCauses:
    @pytest.mark.parametrize("peer", ["127.0.0.1", "0.0.0.0", "localhost", "::1"])
    def test_a_loopback_address_is_reported(self, peer: str) -> None:
        """The cause of a failure with a loopback address has both addresses and the setting to change."""
        failure = Failure(reason="kv_handshake", message="refused", peer=peer)
        cause = find_cause(failure, source_host="10.0.0.1", own_host="10.0.0.2")
        assert cause is not None and cause.reason == "loopback_address"
        assert peer in cause.detail and "10.0.0.1" in cause.detail and "side-channel-host" in cause.detail

    @pytest.mark.parametrize(("source", "own"), [("10.0.0.1", "10.0.0.1"), ("127.0.0.1", "10.0.0.1"), ("", "10.0.0.1")])
    def test_loopback_on_the_same_host_is_not_the_cause(self, source: str, own: str) -> None:
        failure = Failure(reason="kv_handshake", message="refused", peer="127.0.0.1")
        cause = find_cause(failure, source_host=source, own_host=own)
        assert cause is not None and cause.reason == "unreachable"

    @pytest.mark.parametrize(("peer", "is_named"), [(b"..\x0a\x00\x00\x01..", False), (b"..\xac\x11\x00\x01..", True)])
    def test_metadata_without_the_source_address(self, peer: bytes, is_named: bool) -> None:
        """Metadata without the source's address, such as that of docker0, which is the same on every host, names UCX_NET_DEVICES."""
        failure = Failure(reason="kv_peer_lost", message="lost", peer=peer)
        cause = find_cause(failure, source_host="10.0.0.1", own_host="10.0.0.2")
        assert cause is not None and cause.reason == "unreachable"
        assert ("UCX_NET_DEVICES" in cause.detail) is is_named

    @pytest.mark.parametrize(
        ("source", "host", "reason"),
        [
            ("10.0.0.1:5600", "10.0.0.1", None),
            ("127.0.0.1:5600", "10.0.0.1", "loopback_address"),
            ("0.0.0.0:5600", "10.0.0.1", "loopback_address"),
            ("[::1]:5600", "fd00::1", "loopback_address"),
            ("127.0.0.1:5600", "127.0.0.1", None),
            (b"..\x0a\x00\x00\x01..", "10.0.0.1", None),
            (b"..\xac\x11\x00\x01..", "10.0.0.1", "unreachable"),
            (b"..\xac\x11\x00\x01..", "127.0.0.1", None),
            ("", "10.0.0.1", None),
        ],
    )
    def test_a_worker_detects_that_its_kv_is_unreachable(
        self, source: str | bytes, host: str, reason: str | None
    ) -> None:
        """A worker's own handle shows that other hosts cannot reach its KV. A worker on loopback has no such fault."""
        fault = find_own_fault(source, host)
        assert (fault.reason if fault else None) == reason

    @pytest.mark.parametrize("reason", [*path_causes.REASONS, "anything_else"])
    def test_reasons_are_from_the_fixed_set(self, reason: str) -> None:
        cause = find_cause(Failure(reason=reason, message="m"), source_host="", own_host="")
        assert cause is not None and cause.reason in KV_PATH_REASONS
