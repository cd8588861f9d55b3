"""`kvmesh rollout`: restarts the workers of a mesh one after the other, and stops at the first that does not return healthy."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvmesh.cli.connection import MeshChoice, MeshConnection, connect
from kvmesh.discovery.base import DECODE, PREFILL, Instance
from kvmesh.errors import MeshError, UnavailableError
from kvmesh.rpc.worker_client import GrpcWorkerClient
from kvmesh.settings import SettingsError, load, setting

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


class Rollout:
    """One run. Whoever supervises the worker processes starts them again, with the version and settings that it has now."""

    def __init__(self, connection: MeshConnection, settings: RolloutSettings) -> None:
        self._connection = connection
        self._settings = settings
        self._workers = GrpcWorkerClient(connection.channels)

    async def run(self) -> int:
        """Restarts all workers. Returns how many. Raises MeshError at the first problem; the remaining workers are left as they are."""
        restarted = 0
        for service in POOLS[self._settings.pool]:
            listed = await self._listed(service)
            for worker in listed.values():
                await self._restart(worker, service)
                restarted += 1
        return restarted

    async def _restart(self, worker: Instance, service: str) -> None:
        before = await self._listed(service)
        others = [each for each in before.values() if each.takes_requests and each.instance_id != worker.instance_id]
        if not others and not self._settings.allow_gaps:
            raise UnavailableError(
                f"{worker.instance_id} is the only worker of its pool that accepts requests; --allow-gaps restarts it all the same",
                reason="only_worker",
            )
        left = await self._workers.drain(
            worker.address,
            exits=True,
            drain_timeout_s=self._settings.drain_timeout_s,
            timeout_s=self._settings.drain_timeout_s + REPLY_S,
        )
        _say(f"{worker.instance_id} stops" + (f"; {left} requests continue elsewhere" if left else ""))
        replacement = await self._replacement(worker, service, before)
        await self._observe(replacement)
        _say(f"{replacement} serves in its place")

    async def _replacement(self, worker: Instance, service: str, before: Mapping[str, Instance]) -> str:
        """Waits for a worker that was not there before and that routers use."""
        known = {(each.instance_id, each.meta.get("epoch")) for each in before.values()}
        try:
            async with asyncio.timeout(self._settings.ready_timeout_s):
                while True:
                    for each in (await self._listed(service)).values():
                        is_new = (each.instance_id, each.meta.get("epoch")) not in known
                        if is_new and each.takes_requests and await self._problem(each.instance_id) == "":
                            return each.instance_id
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise UnavailableError(
                f"no worker replaced {worker.instance_id} within {self._settings.ready_timeout_s:g} s",
                reason="no_replacement",
            ) from None

    async def _observe(self, worker_id: str) -> None:
        ends_s = asyncio.get_running_loop().time() + self._settings.observe_s
        while asyncio.get_running_loop().time() < ends_s:
            if problem := await self._problem(worker_id):
                raise UnavailableError(f"{worker_id} does not serve: {problem}", reason="regression")
            await asyncio.sleep(POLL_S)

    async def _problem(self, worker_id: str) -> str:
        """Why routers do not use a worker; empty: they do."""
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


def _say(line: str) -> None:
    print(f"kvmesh: {line}", flush=True)


async def _run(settings: RolloutSettings) -> int:
    async with connect(settings.target()) as connection:
        return await Rollout(connection, settings).run()


def main(argv: Sequence[str]) -> int:
    try:
        settings = load(
            RolloutSettings, argv=argv, environ=os.environ, program="kvmesh rollout", description=__doc__ or ""
        )
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        restarted = asyncio.run(_run(settings))
    except MeshError as error:
        print(f"kvmesh: the rollout stops: {error.message}", file=sys.stderr)
        return 1
    _say(f"{restarted} workers were restarted")
    return 0
