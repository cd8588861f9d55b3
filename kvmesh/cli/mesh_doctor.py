"""`kvmesh doctor --consul ADDRESS` or `--mesh NAME`: checks a running mesh. Starts and changes nothing; each pair pulls one short prompt."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import TypeVar

from kvmesh.checks import is_whole_number
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
from kvmesh.cli.verdicts import Finding, exit_status, failed
from kvmesh.core import Role
from kvmesh.discovery.base import SERVICES, Instance, Registry
from kvmesh.errors import MeshError, UnsupportedError
from kvmesh.network.hosts import resolve
from kvmesh.network.names import host_port, is_loopback, registry_host
from kvmesh.rpc.worker_client import GrpcWorkerClient

CONNECT_TIMEOUT_S = 3.0
CALL_TIMEOUT_S = 5.0
PULL_TIMEOUT_S = 30.0
"""Longer than the pull timeout of workers, so that the worker says why it failed."""
CALLS_MAX = 16
PAIRS_MAX = 256
"""Pairs that are checked; a larger mesh checks the first ones by name."""
PORT_KEYS = {"metrics": "metrics_port", "HTTP": "http_port"}
T = TypeVar("T")
R = TypeVar("R")


class MeshDoctor:
    """Observes one mesh and yields findings in order."""

    def __init__(self, registry: Registry, client: GrpcWorkerClient, *, registry_address: str) -> None:
        self._registry = registry
        self._client = client
        self._registry_host = registry_host(registry_address)
        self.findings: list[Finding] = []

    async def run(self, report: Callable[[Finding], None]) -> int:
        """Runs all checks and returns the exit status. Raises MeshError when the registry cannot be read."""
        views = await asyncio.gather(*(self._registry.instances(service) for service in SERVICES))
        services = await _each([each for view in views for each in view.instances], _service_state)
        found = await _each([each.instance for each in services if "role" in each.instance.meta], self._worker_state)
        workers = [each for each in found if isinstance(each, WorkerState)]
        is_remote = not is_loopback(resolve(self._registry_host, flag="the registry"))

        def add(finding: Finding) -> None:
            self.findings.append(finding)
            report(finding)

        add(services_finding(services))
        add(addresses_finding(services, is_remote=is_remote))
        add(reachability_finding(services))
        for problem in found:
            if isinstance(problem, Finding):
                add(problem)
        add(clocks_finding(workers))
        add(versions_finding(services, workers))
        for finding in fingerprint_findings(workers):
            add(finding)
        add(side_channels_finding(workers))
        for pair in await _each(_pairs(workers), self._check_pair):
            add(pair_finding(pair))
        return exit_status(self.findings)

    async def _worker_state(self, instance: Instance) -> WorkerState | Finding:
        try:
            description = await self._client.describe(instance.address, timeout_s=CALL_TIMEOUT_S)
            paths = await self._client.list_kv_paths(instance.address, timeout_s=CALL_TIMEOUT_S)
            ahead_s = await self._clock_ahead_s(instance.address)
        except MeshError as error:
            found = f"{instance.instance_id} at {instance.address} does not answer: {error.message}"
            advice = "see its log; with mesh TLS, give the doctor --credentials DIR"
            return failed("workers", found, advice)
        return WorkerState(instance=instance, description=description, paths=paths, clock_ahead_s=ahead_s)

    async def _clock_ahead_s(self, address: str) -> float | None:
        """Returns by how much the worker's clock is ahead: the first record of a watch is taken when it is sent."""
        asked_at_s = time.time()
        try:
            async with (
                asyncio.timeout(CALL_TIMEOUT_S),
                aclosing(self._client.watch_load(address, interval_s=1.0)) as loads,
            ):
                record = await anext(loads)
        except TimeoutError:
            return None
        return clock_ahead_s(asked_at_s=asked_at_s, taken_at_s=record.taken_at_s, answered_at_s=time.time())

    async def _check_pair(self, pair: tuple[WorkerState, WorkerState]) -> PairCheck:
        prefill, decode = pair
        names = {"prefill": prefill.instance.instance_id, "decode": decode.instance.instance_id}
        try:
            check = await self._client.check_kv_path(
                decode.instance.address, prefill.description.worker, timeout_s=PULL_TIMEOUT_S
            )
        except UnsupportedError as error:
            return PairCheck(check=None, skipped=error.message, **names)
        except MeshError as error:
            return PairCheck(check=None, skipped=f"the check could not run: {error.message}", **names)
        return PairCheck(check=check, **names)


async def _service_state(instance: Instance) -> ServiceState:
    ports = [("gRPC", instance.port)]
    ports += [
        (what, int(instance.meta[key]))
        for what, key in PORT_KEYS.items()
        if is_whole_number(instance.meta.get(key, ""))
    ]
    problems = [await _port_problem(instance.host, port, what) for what, port in ports]
    return ServiceState(instance=instance, unreachable=[each for each in problems if each])


async def _port_problem(host: str, port: int, what: str) -> str:
    """Returns why a port does not answer from here; empty if it does."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"{what} {host_port(host, port)} does not answer within {CONNECT_TIMEOUT_S:g} s"
    except OSError as error:
        return f"{what} {host_port(host, port)}: {error.strerror or error}"
    writer.close()
    return ""


def _pairs(workers: Sequence[WorkerState]) -> Sequence[tuple[WorkerState, WorkerState]]:
    """Pairs that exchange KV."""
    return [
        (prefill, decode)
        for prefill in workers
        for decode in workers
        if (prefill.description.role, decode.description.role) == (Role.PREFILL, Role.DECODE)
        and prefill.description.kv_compatibility_hash == decode.description.kv_compatibility_hash
    ][:PAIRS_MAX]


async def _each(values: Iterable[T], act: Callable[[T], Awaitable[R]]) -> list[R]:
    """Returns the results in the order of the values; at most CALLS_MAX at a time."""
    slots = asyncio.Semaphore(CALLS_MAX)

    async def one(value: T) -> R:
        async with slots:
            return await act(value)

    return await asyncio.gather(*(one(value) for value in values))
