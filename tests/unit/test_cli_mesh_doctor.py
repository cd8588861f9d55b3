"""Tests of the findings of `kvmesh doctor` about a running mesh."""

from dataclasses import replace

import pytest

from kvmesh.cli.mesh_doctor import _service_state
from kvmesh.cli.mesh_verdicts import (
    PairCheck,
    ServiceState,
    WorkerState,
    addresses_finding,
    clock_ahead_s,
    clocks_finding,
    fingerprint_findings,
    pair_finding,
    reachability_finding,
    services_finding,
    side_channels_finding,
    versions_finding,
)
from kvmesh.cli.verdicts import Status
from kvmesh.core import (
    Capabilities,
    KvPath,
    KvPathCheck,
    ModelCard,
    Role,
    WorkerDescription,
    WorkerRef,
)
from kvmesh.core.worker import KV_PATH_REASONS
from kvmesh.discovery.base import DECODE, FRONTEND, PREFILL, ROUTER, VERSION_KEY, Health, Instance


def service(
    kind: str = FRONTEND,
    name: str = "",
    *,
    host: str = "192.0.2.1",
    version: str = "1",
    health: Health = Health.PASSING,
    problems: tuple[str, ...] = (),
) -> ServiceState:
    instance = Instance(
        service=kind,
        instance_id=name or kind.removeprefix("kvmesh-"),
        host=host,
        port=1,
        meta={VERSION_KEY: version},
        tags=(),
        health=health,
        is_draining=False,
    )
    return ServiceState(instance=instance, unreachable=problems)


def worker(
    name: str,
    role: Role = Role.DECODE,
    *,
    compatibility: str = "h1",
    revision: str = "",
    digest: str = "",
    engine_version: str = "1",
    ahead_s: float | None = 0.0,
    paths: tuple[KvPath, ...] = (),
) -> WorkerState:
    description = WorkerDescription(
        worker=WorkerRef(worker_id=name, address="192.0.2.1:1", epoch=1),
        role=role,
        model=ModelCard(
            name="m",
            source="/m",
            context_tokens_max=1,
            vocabulary_size=1,
            revision=revision,
            files_digest=digest,
        ),
        capabilities=Capabilities(engine="e", engine_version=engine_version),
        kv_compatibility_hash=compatibility,
        block_size_tokens=16,
        kv_blocks_total=1,
    )
    instance = service(PREFILL if role is Role.PREFILL else DECODE, name).instance
    return WorkerState(instance=instance, description=description, clock_ahead_s=ahead_s, paths=paths)


ALL = [service(FRONTEND), service(ROUTER), service(DECODE)]
PREFILL_0 = worker("p0", Role.PREFILL)


def test_a_mesh_requires_its_services() -> None:
    """A missing service fails the check. A service whose health check does not pass gives a warning."""
    assert services_finding(ALL).status is Status.OK
    missing = services_finding(ALL[:2])
    assert (missing.status, missing.found) == (Status.FAILED, "the registry lists no decode")
    ill = services_finding([*ALL, service(PREFILL, "p9", health=Health.CRITICAL)])
    assert ill.status is Status.WARNING
    assert "p9 critical" in ill.found


@pytest.mark.parametrize(
    ("hosts", "is_remote", "status"),
    [
        (("192.0.2.1", "192.0.2.2"), True, Status.OK),
        (("127.0.0.1", "127.0.0.1"), False, Status.OK),
        (("127.0.0.1", "127.0.0.1"), True, Status.FAILED),
        (("192.0.2.1", "::1"), False, Status.FAILED),
    ],
)
def test_loopback_addresses_require_a_mesh_on_one_host(hosts: tuple[str, ...], is_remote: bool, status: Status) -> None:
    """A loopback address in a mesh of several hosts fails the check. The advice names the flag."""
    finding = addresses_finding(
        [service(name=f"s{number}", host=host) for number, host in enumerate(hosts)], is_remote=is_remote
    )
    assert finding.status is status
    assert ("--address" in finding.advice) is (status is Status.FAILED)


def test_an_unreachable_port_is_reported_with_its_service() -> None:
    finding = reachability_finding([*ALL, service(name="f9", problems=("gRPC 192.0.2.9:5: Connection refused",))])
    assert finding.status is Status.FAILED
    assert finding.found == "f9: gRPC 192.0.2.9:5: Connection refused"
    assert reachability_finding(ALL).status is Status.OK


@pytest.mark.parametrize(
    ("skews", "status", "words"),
    [
        ((0.0, 0.01), Status.OK, "0.010 s apart"),
        ((0.0, -2.5), Status.WARNING, "w1 is 2.500 s behind"),
        ((-0.8, 0.7), Status.WARNING, "1.500 s apart"),
        ((3.0, 3.0), Status.WARNING, "3.000 s ahead"),
        ((None, None), Status.SKIPPED, ""),
    ],
)
def test_clock_skew_is_reported(skews: tuple[float | None, ...], status: Status, words: str) -> None:
    """The finding states the skew in seconds, between workers and relative to this machine."""
    finding = clocks_finding([worker(f"w{number}", ahead_s=skew) for number, skew in enumerate(skews)])
    assert finding.status is status
    assert words in finding.found


@pytest.mark.parametrize(("taken_at_s", "ahead_s"), [(100.0, 0.0), (104.0, 0.0), (107.5, 2.5), (98.0, -2.0)])
def test_a_slow_answer_is_no_skew(taken_at_s: float, ahead_s: float) -> None:
    """A call takes 5 s. Only a time outside of the call shows that the clocks differ."""
    assert clock_ahead_s(asked_at_s=100.0, taken_at_s=taken_at_s, answered_at_s=105.0) == ahead_s


def test_mixed_versions_are_reported() -> None:
    """Several versions of kvmesh or of an engine give a warning, which counts the services of each version."""
    one = versions_finding(ALL, [worker("d0"), PREFILL_0])
    assert (one.status, one.found) == (Status.OK, "kvmesh 1; e 1")
    mixed = versions_finding([*ALL, service(version="2")], [worker("d0"), worker("d1", engine_version="2")])
    assert (mixed.status, mixed.found) == (Status.WARNING, "kvmesh 1 (3), 2 (1); e 1 (1), 2 (1)")


@pytest.mark.parametrize(
    ("decode", "status", "words"),
    [
        (worker("d0"), Status.OK, "KV h1"),
        (worker("d0", compatibility="h2"), Status.FAILED, "fits d0"),
        (worker("d0", revision="r2"), Status.WARNING, "revision"),
        (worker("d0", digest="abc"), Status.WARNING, "files"),
    ],
)
def test_fingerprints_of_models_are_compared(decode: WorkerState, status: Status, words: str) -> None:
    """The check fails for a decode worker that is compatible with no prefill worker. Different revisions or files give a warning."""
    (finding,) = fingerprint_findings([PREFILL_0, decode])
    assert finding.status is status
    assert words in finding.found


def test_decode_workers_alone_need_no_pair() -> None:
    """A pool without prefill workers transfers no KV, so its workers may be incompatible."""
    (finding,) = fingerprint_findings([worker("d0"), worker("d1", compatibility="h2")])
    assert finding.status is Status.OK


@pytest.mark.parametrize("reason", sorted(KV_PATH_REASONS))
def test_a_pair_that_cannot_transfer_is_reported(reason: str) -> None:
    """A pair that cannot transfer KV fails the check with the cause, and the finding has advice."""
    check = KvPathCheck(is_ok=False, reason=reason, detail="192.0.2.2:5557 refused")
    finding = pair_finding(PairCheck(prefill="p", decode="d", check=check))
    assert finding.status is Status.FAILED
    assert finding.found == f"p -> d: {reason}: 192.0.2.2:5557 refused"
    assert finding.advice


def test_pairs_that_transfer_or_cannot_be_checked() -> None:
    """A finding about a pair has the duration of the transfer, or the reason why the check was skipped."""
    good = pair_finding(PairCheck(prefill="p", decode="d", check=KvPathCheck(is_ok=True, elapsed_s=0.012)))
    assert (good.status, good.found) == (Status.OK, "p -> d: pulled in 12 ms")
    none = pair_finding(PairCheck(prefill="p", decode="d", check=None, skipped="it pulls no KV"))
    assert (none.status, none.found) == (Status.SKIPPED, "p -> d: it pulls no KV")


def test_failing_paths_that_workers_report() -> None:
    """A failing path gives a warning with its numbers of pulls and failures."""
    path = KvPath(worker_id="p0", pulls_total=1, failures_total=3, reason="unreachable", detail="no route")
    finding = side_channels_finding([worker("d0", paths=(path,))])
    assert finding.status is Status.WARNING
    assert finding.found == "p0 -> d0: no route (3 of 4 pulls failed)"
    assert side_channels_finding([worker("d0", paths=(KvPath(worker_id="p0", pulls_total=2),))]).status is Status.OK


@pytest.mark.parametrize("port", ["²", "", "-1"])
async def test_a_port_that_is_no_number_is_not_checked(port: str) -> None:
    """The registry's meta is not trusted: such a value does not end the check of the other services."""
    instance = replace(service(host="127.0.0.1").instance, meta={"metrics_port": port})
    state = await _service_state(instance)
    assert [each.split()[0] for each in state.unreachable] == ["gRPC"]
