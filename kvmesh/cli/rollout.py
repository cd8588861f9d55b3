"""`kvmesh rollout`: restarts the workers of a mesh one after the other, and stops at the first that does not return healthy."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from kvmesh.cli.connection import MeshChoice, MeshConnection, connect, run_command
from kvmesh.discovery.base import DECODE, PREFILL, Instance
from kvmesh.errors import LostError, MeshError, UnavailableError
from kvmesh.rpc.worker_client import GrpcWorkerClient
from kvmesh.settings import setting

POLL_S = 0.2
REPLY_S = 10.0
"""Beyond the time that the drain may take."""
POOLS = {"all": (PREFILL, DECODE), "prefill": (PREFILL,), "decode": (DECODE,)}
HEALTHY_BREAKER = ("", "closed")


@dataclass(frozen=True, kw_only=True)
class RolloutSettings(MeshChoice):
    """Settings of `kvmesh rollout`."""

    pool: str = setting("all", "whose workers are restarted", choices=tuple(POOLS))
    drain_timeout_s: float = setting(
        30.0, "longest wait for a worker's requests; those left then continue on other workers", min=0.0, max=3600.0
    )
    ready_timeout_s: float = setting(600.0, "longest wait for the worker that replaces one", min=1.0)
    observe_s: float = setting(
        2.0,
        "how long a new worker must serve without a failure that excludes it, before the next one is restarted",
        min=0.0,
    )
    allow_gaps: bool = setting(False, "restart also the only worker of a pool: requests wait meanwhile, or fail")
    rollback_command: str = setting(
        "",
        "shell command that gives the supervisor the former version. It runs if the rollout stops after it has stopped a worker;"
        " then the workers that were restarted are restarted once more",
    )


class RollbackError(UnavailableError):
    """The rollout stopped, and so did the rollback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """A worker that has stopped. `known`: ids and epochs of the workers of its service before."""

    worker_id: str
    service: str
    known: frozenset[tuple[str, str | None]]


class Workers(Protocol):
    """What a rollout calls on workers."""

    async def drain(self, address: str, *, exits: bool, drain_timeout_s: float, timeout_s: float) -> int:
        """Drains the worker and ends its process. Returns the number of requests still in flight."""
        ...


class Rollout:
    """One run. The supervisor of the worker processes starts them again, with its current version and settings."""

    def __init__(self, connection: MeshConnection, settings: RolloutSettings, workers: Workers | None = None) -> None:
        self._connection = connection
        self._settings = settings
        self._workers = workers or GrpcWorkerClient(connection.channels)
        self._replacements: list[tuple[str, str]] = []
        """Services and ids of the workers that serve in the place of restarted ones."""
        self._stopped: Stopped | None = None
        """The worker that has stopped and that no other one serves in place of yet."""

    async def run(self) -> int:
        """Restarts all workers. Returns how many. Raises MeshError at the first problem; it does not touch the remaining workers."""
        try:
            for service in POOLS[self._settings.pool]:
                for worker in (await self._listed(service)).values():
                    await self._restart(worker, service)
        except MeshError as error:
            has_changed = bool(self._replacements) or self._stopped is not None
            if self._settings.rollback_command and has_changed:
                _say(f"the rollout stops: {error.message}. It is rolled back")
                await self._roll_back()
                _say("the rollout was rolled back")
            raise
        return len(self._replacements)

    async def _roll_back(self) -> None:
        """Restarts what was restarted, after the command. Raises RollbackError at the first problem."""
        try:
            process = await asyncio.create_subprocess_shell(self._settings.rollback_command)
            if status := await process.wait():
                raise UnavailableError(f"the rollback command ended with status {status}")
            replacements, self._replacements = self._replacements, []
            if self._stopped is not None:
                await self._replace_stopped(self._stopped)
            for service, worker_id in replacements:
                # If a worker has ended in the meantime, its supervisor restarted it with the former version.
                if (worker := (await self._listed(service)).get(worker_id)) is not None:
                    await self._restart(worker, service)
        except MeshError as error:
            raise RollbackError(error.message, reason="rollback_failed") from error

    async def _replace_stopped(self, stopped: Stopped) -> None:
        """Ends the worker that failed in the place of a stopped one, if there is one, and waits for the next."""
        ended = set()
        for worker in (await self._listed(stopped.service)).values():
            if (key := _key(worker)) not in stopped.known:
                ended.add(key)
                with suppress(UnavailableError, LostError):  # It may have ended on its own.
                    await self._stop(worker)
        await self._wait_replaced(replace(stopped, known=stopped.known | ended))

    async def _restart(self, worker: Instance, service: str) -> None:
        before = await self._listed(service)
        others = [each for each in before.values() if each.takes_requests and each.instance_id != worker.instance_id]
        if not others and not self._settings.allow_gaps:
            raise UnavailableError(
                f"{worker.instance_id} is the only worker of its pool that accepts requests; --allow-gaps restarts it nevertheless",
                reason="only_worker",
            )
        self._stopped = Stopped(
            worker_id=worker.instance_id,
            service=service,
            known=frozenset(map(_key, before.values())),
        )
        await self._stop(worker)
        await self._wait_replaced(self._stopped)

    async def _wait_replaced(self, stopped: Stopped) -> None:
        replacement = await self._replacement(stopped)
        await self._observe(replacement)
        self._stopped = None
        self._replacements.append((stopped.service, replacement))
        _say(f"{replacement} serves in its place")

    async def _stop(self, worker: Instance) -> None:
        left = await self._workers.drain(
            worker.address,
            exits=True,
            drain_timeout_s=self._settings.drain_timeout_s,
            timeout_s=self._settings.drain_timeout_s + REPLY_S,
        )
        _say(f"{worker.instance_id} stops" + (f"; {left} requests continue elsewhere" if left else ""))

    async def _replacement(self, stopped: Stopped) -> str:
        """Waits for a worker that was not there before and that routers use."""
        try:
            async with asyncio.timeout(self._settings.ready_timeout_s):
                while True:
                    for each in (await self._listed(stopped.service)).values():
                        is_new = _key(each) not in stopped.known
                        if is_new and each.takes_requests and await self._problem(each.instance_id) == "":
                            return each.instance_id
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise UnavailableError(
                f"no worker replaced {stopped.worker_id} within {self._settings.ready_timeout_s:g} s",
                reason="no_replacement",
            ) from None

    async def _observe(self, worker_id: str) -> None:
        ends_s = asyncio.get_running_loop().time() + self._settings.observe_s
        while asyncio.get_running_loop().time() < ends_s:
            if problem := await self._problem(worker_id):
                raise UnavailableError(f"{worker_id} does not serve: {problem}", reason="regression")
            await asyncio.sleep(POLL_S)

    async def _problem(self, worker_id: str) -> str:
        """Returns why routers do not use a worker; empty: they do."""
        views = [view for view in await self._connection.list_workers() if view.worker.worker_id == worker_id]
        if not views:
            return "no router knows it"
        for view in views:
            if view.excluded_by or view.breaker not in HEALTHY_BREAKER:
                return view.excluded_by or f"its breaker is {view.breaker}"
        return ""

    async def _listed(self, service: str) -> Mapping[str, Instance]:
        view = await self._connection.registry.instances(service)
        return {each.instance_id: each for each in view.instances}


def _key(worker: Instance) -> tuple[str, str | None]:
    """Differs for each process."""
    return worker.instance_id, worker.meta.get("epoch")


def _say(line: str) -> None:
    print(f"kvmesh: {line}", flush=True)


async def _run(settings: RolloutSettings) -> int:
    async with connect(settings.target()) as connection:
        return await Rollout(connection, settings).run()


def main(argv: Sequence[str]) -> int:
    def act(settings: RolloutSettings) -> int:
        try:
            restarted = asyncio.run(_run(settings))
        except MeshError as error:
            what = "the rollback" if isinstance(error, RollbackError) else "the rollout"
            print(f"kvmesh: {what} stops: {error.message}", file=sys.stderr)
            return 1
        _say(f"{restarted} workers were restarted")
        return 0

    return run_command(RolloutSettings, argv, act, program="kvmesh rollout", description=__doc__)
