"""Prints the progress of `kvmesh up` while engines load."""

import asyncio
import time
from collections.abc import Sequence
from typing import TextIO

import aiohttp

from kvmesh.cli.output import discard
from kvmesh.discovery.base import DECODE, FRONTEND, PLANNER, PREFILL, ROUTER, Instance, Registry, View
from kvmesh.network.names import host_port

SERVICE_NAMES = {FRONTEND: "frontend", ROUTER: "router", PREFILL: "prefill", DECODE: "decode", PLANNER: "planner"}
HOSTS = {"frontend": ("gateway",), "router": ("gateway",)}
"""Processes that provide more than one service."""
POLL_S = 0.02


class Progress:
    """Prints lines for people to one stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lines = 0
        """Lines printed so far. A growing number shows that the start makes progress."""

    def say(self, text: str) -> None:
        """Prints a line. Never fails: a mesh whose terminal was closed still serves and stops in order."""
        self.lines += 1
        try:
            print(f"kvmesh: {text}", file=self._stream, flush=True)
        except OSError:
            discard(self._stream)

    async def wait_ready(
        self, registry: Registry, *, names: Sequence[str], awaited: Sequence[str], started_at_s: float
    ) -> Instance:
        """Waits until the frontend serves a model and every awaited process is registered. Returns the frontend.

        Prints a line for each service when it becomes ready.
        """
        self.say("starting " + ", ".join(names))
        wanted = {
            service: sum(name.rpartition("-")[0] in (short, *HOSTS.get(short, ())) for name in awaited)
            for service, short in SERVICE_NAMES.items()
        }
        async with asyncio.TaskGroup() as group:
            waits = {
                service: group.create_task(self._wait_service(registry, service, count, started_at_s=started_at_s))
                for service, count in wanted.items()
                if count
            }
        view = waits[FRONTEND].result()
        frontend = view.instances[0]
        await _wait_healthy(http_url(frontend))
        return frontend

    async def _wait_service(self, registry: Registry, service: str, count: int, *, started_at_s: float) -> View:
        shown = 0
        async for view in registry.watch(service):
            ready = sum(instance.takes_requests for instance in view.instances)
            if ready > shown:
                shown = ready
                took_s = time.monotonic() - started_at_s
                self.say(f"{SERVICE_NAMES[service]:<8} {ready} of {count} ready after {took_s:.1f} s")
            if ready >= count:
                return view
        raise AssertionError("a watch never ends by itself")


def http_url(frontend: Instance) -> str:
    """Returns the base URL of a frontend's HTTP API."""
    return f"http://{host_port(frontend.host, int(frontend.meta['http_port']))}"


async def _wait_healthy(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass  # The frontend registers shortly before it listens.
            await asyncio.sleep(POLL_S)
