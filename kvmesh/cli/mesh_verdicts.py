"""The findings of `kvmesh doctor` on a running mesh. Pure functions from observations to findings."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvmesh.cli.verdicts import Finding, failed, ok, skipped, warning
from kvmesh.core import KvPath, KvPathCheck, Role, WorkerDescription
from kvmesh.discovery.base import VERSION_KEY, Instance
from kvmesh.network.names import is_loopback

T = TypeVar("T")
SKEW_S_MAX = 1.0
"""Largest tolerated difference of clocks.

No decision depends on other hosts' clocks, but beyond it logs, traces and reports of several hosts cannot be ordered.
"""
NAMES_MAX = 6
"""Names in one line; the rest is counted."""
PATH_ADVICE = {
    "unreachable": "open the ports of both hosts (--port-range fixes them; docs/operate/several-machines.md#ports)",
    "timed_out": "a firewall may drop packets, or UCX uses another interface: see --port-range, --address and UCX_NET_DEVICES",
    "loopback_address": "start the prefill worker with --address HOST, its host's address",
    "incompatible": "start both workers with the same model, engine version and block size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """A registered instance. `unreachable`: its ports that do not answer, with the reason of each."""

    instance: Instance
    unreachable: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """What a worker says of itself. `clock_ahead_s`: its clock, compared with this machine's; None: no load record arrived."""

    instance: Instance
    description: WorkerDescription
    clock_ahead_s: float | None = None
    paths: Sequence[KvPath] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCheck:
    """The result of a pull. `skipped`: the reason why there was no pull."""

    prefill: str
    decode: str
    check: KvPathCheck | None
    skipped: str = ""


def services_finding(services: Sequence[ServiceState]) -> Finding:
    """Returns the services that a mesh needs are registered, and all pass their checks."""
    name = "services"
    ill = [each.instance for each in services if not each.instance.takes_requests]
    present = {each.instance.service.removeprefix("kvmesh-") for each in services}
    missing = [each for each in ("frontend", "router", "decode") if each not in present]
    if missing:
        found = f"the registry lists no {' and no '.join(missing)}"
        advice = "start it, with --discovery-address of this registry; its log says whether it registered"
        return failed(name, found, advice)
    if ill:
        states = _names(f"{each.instance_id} {'draining' if each.is_draining else each.health.value}" for each in ill)
        advice = "see their logs; the registry must reach their gRPC ports to check them"
        return warning(name, states, advice)
    return ok(name, f"{len(services)} are registered and pass their checks")


def addresses_finding(services: Sequence[ServiceState], *, is_remote: bool) -> Finding:
    """No service registers an address that only its own host reaches, unless all are on one host."""
    name = "addresses"
    loopback = [each.instance for each in services if is_loopback(each.instance.host)]
    hosts = {each.instance.host for each in services}
    if loopback and (is_remote or len(loopback) < len(services)):
        found = _names(f"{each.instance_id} registers {each.address}" for each in loopback)
        advice = "start them with --address HOST, their host's address: other machines cannot connect to loopback"
        return failed(name, found, advice)
    return ok(name, f"{len(services)} services on {_names(hosts)}")


def reachability_finding(services: Sequence[ServiceState]) -> Finding:
    """Judges whether all registered ports answer from here."""
    name = "ports"
    closed = [f"{each.instance.instance_id}: {problem}" for each in services for problem in each.unreachable]
    if closed:
        advice = "check that the process runs, that this machine is part of the mesh's network, and the firewall (--port-range)"
        return failed(name, _names(closed), advice)
    return ok(name, "all gRPC, metrics and HTTP ports answer from here")


def clock_ahead_s(*, asked_at_s: float, taken_at_s: float, answered_at_s: float) -> float:
    """Returns by how much the clock that gave `taken_at_s` is ahead of the clock of the other two times, at least.

    A slow call is no difference: equal clocks may give any time between the call and its answer.
    """
    return max(0.0, taken_at_s - answered_at_s) + min(0.0, taken_at_s - asked_at_s)


def clocks_finding(workers: Sequence[WorkerState]) -> Finding:
    """Workers' clocks agree with each other and with this machine's."""
    name = "clocks"
    skews = {each.instance.instance_id: each.clock_ahead_s for each in workers if each.clock_ahead_s is not None}
    if not skews:
        return skipped(name, "no worker sent a load record")
    ahead = max(skews.values(), key=abs)
    spread = max(0.0, *skews.values()) - min(0.0, *skews.values())
    found = f"{spread:.3f} s apart at most"
    if spread > SKEW_S_MAX:
        worst = next(worker for worker, skew in skews.items() if skew == ahead)
        found += f"; {worst} is {abs(ahead):.3f} s {'ahead of' if ahead > 0 else 'behind'} this machine"
        advice = "run an NTP client (chrony, systemd-timesyncd) on every host: logs and traces cannot be put in order"
        return warning(name, found, advice)
    return ok(name, found)


def versions_finding(services: Sequence[ServiceState], workers: Sequence[WorkerState]) -> Finding:
    """Judges whether there is one version of kvmesh, and one of each engine."""
    name = "versions"
    kvmesh = _by(services, lambda each: each.instance.meta.get(VERSION_KEY, "unknown"))
    engines = _by(workers, lambda each: each.description.capabilities.engine)
    versions = {
        engine: _by(its_workers, lambda each: each.description.capabilities.engine_version)
        for engine, its_workers in engines.items()
    }
    found = "; ".join(
        [f"kvmesh {_counts(kvmesh)}", *(f"{engine} {_counts(found)}" for engine, found in sorted(versions.items()))]
    )
    if len(kvmesh) > 1 or any(len(each) > 1 for each in versions.values()):
        advice = "install one version everywhere; during an upgrade this is expected"
        return warning(name, found, advice)
    return ok(name, found)


def fingerprint_findings(workers: Sequence[WorkerState]) -> Sequence[Finding]:
    """Returns one finding per model: weights, files for tokenising, and KV that pairs can exchange."""
    models = _by(workers, lambda each: each.description.model.name)
    return [_fingerprints(name, its_workers) for name, its_workers in sorted(models.items())]


def _fingerprints(model: str, workers: Sequence[WorkerState]) -> Finding:
    name = "fingerprints"
    hashes = {
        role: {each.description.kv_compatibility_hash for each in workers if each.description.role is role}
        for role in Role
    }
    prefill, decode = hashes[Role.PREFILL], hashes[Role.DECODE]
    if prefill and decode - prefill:
        alone = [
            each.instance.instance_id for each in workers if each.description.kv_compatibility_hash in decode - prefill
        ]
        found = f"{model}: no prefill worker's KV fits {_names(alone)}"
        advice = "weights, dtype, block size or engine version differ; they compute every prompt themselves meanwhile"
        return failed(name, found, advice)
    differing = [
        f"{what} {_counts(values)}"
        for what, values in (
            ("revision", _by(workers, lambda each: each.description.model.revision or "none")),
            ("files", _by(workers, lambda each: each.description.model.files_digest[:12] or "none")),
        )
        if len(values) > 1
    ]
    if differing:
        advice = "answers depend on which worker serves; give all workers the same model directory or revision"
        found = f"{model}: {'; '.join(differing)}"
        return warning(name, found, advice)
    compatibility = ", ".join(sorted(each[:12] for each in prefill | decode))
    return ok(name, f"{model}: {len(workers)} workers, KV {compatibility}")


def pair_finding(pair: PairCheck) -> Finding:
    """Judges whether a decode worker pulled KV from a prefill worker."""
    name, way = "KV transfer", f"{pair.prefill} -> {pair.decode}"
    if pair.check is None:
        return skipped(name, f"{way}: {pair.skipped}")
    if pair.check.is_ok:
        return ok(name, f"{way}: pulled in {1000 * pair.check.elapsed_s:.0f} ms")
    advice = PATH_ADVICE.get(pair.check.reason, "see the logs of both workers")
    found = f"{way}: {pair.check.reason}: {pair.check.detail}"
    return failed(name, found, f"{advice}. Prompts are computed twice meanwhile")


def side_channels_finding(workers: Sequence[WorkerState]) -> Finding:
    """No decode worker reports a path whose pulls fail."""
    name = "side channels"
    failing = [
        f"{path.worker_id} -> {each.instance.instance_id}: {path.detail or path.reason}"
        f" ({path.failures_total} of {path.pulls_total + path.failures_total} pulls failed)"
        for each in workers
        for path in each.paths
        if path.reason
    ]
    if failing:
        advice = "the checks of KV transfers below say whether it still fails"
        return warning(name, _names(failing), advice)
    pulls = sum(path.pulls_total for each in workers for path in each.paths)
    return ok(name, f"no worker reports a failing path; {pulls} pulls so far")


def _by(values: Iterable[T], key: Callable[[T], str]) -> dict[str, list[T]]:
    groups: dict[str, list[T]] = defaultdict(list)
    for value in values:
        groups[key(value)].append(value)
    return dict(groups)


def _counts(groups: Mapping[str, Sequence[object]]) -> str:
    if len(groups) == 1:
        return next(iter(groups))
    return ", ".join(f"{value} ({len(members)})" for value, members in sorted(groups.items()))


def _names(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - NAMES_MAX} more" if len(listed) > NAMES_MAX else ""
    return ", ".join(listed[:NAMES_MAX]) + more
