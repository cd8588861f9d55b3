"""Faults of a mesh on separate hosts, and their effects on requests.

Each fault affects frontend-1, prefill-1, decode-1, the router's path to one of them, or Consul. Requests of four kinds run meanwhile: through
either frontend with any workers; through frontend-2 on prefill-2 and decode-2 only, which no fault affects; and through frontend-2 on prefill-1
and decode-1 only, for which some faults leave no worker.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import aiohttp

from tests.machines.mesh import CONSUL, ROUTER, Machines
from tests.machines.relay import slow_paths
from tests.machines.traffic import RIGHT, Client, Questions, Samples, Traffic

BEFORE_S, FAULT_S, AFTER_S = 1.5, 8.0, 1.0
NORMAL_S_MAX = 60.0
EMPTY_S = 6.0
"""Longer than the pause between two attempts to read Consul's list."""
LATE_S = 1.0
"""A request is late if it takes this much longer than usual."""
FIRST_S = 2.0
"""Requests that are in flight at the fault, or begin within this time after it, are the first that it affects."""
IN_FLIGHT_S = 0.5
NORMAL_IN_A_ROW = 3
DELAY_S, LOSS = 0.05, 0.01
FIRST, SECOND, UNTOUCHED, TOUCHED, HEALED = "frontend-1", "frontend-2", "untouched", "touched", "healed"
TOUCHED_PINS = {"prefill": "prefill-1", "decode": "decode-1"}

Fault = Callable[[Machines], AbstractAsyncContextManager[None]]


def cut(*pairs: tuple[str, str]) -> Fault:
    """Drops all packets between the hosts of each pair."""

    @asynccontextmanager
    async def fault(mesh: Machines) -> AsyncIterator[None]:
        for pair in pairs:
            mesh.hosts.cut(*pair)
        try:
            yield
        finally:
            for pair in pairs:
                mesh.hosts.join(*pair)

    return fault


@asynccontextmanager
async def slow(mesh: Machines) -> AsyncIterator[None]:
    """Delays packets to decode-1 and drops some."""
    pairs = [("frontend-1", "decode-1"), ("prefill-1", "decode-1"), (ROUTER, "decode-1")]
    with slow_paths(mesh.hosts, pairs, delay_s=DELAY_S, loss=LOSS):
        yield


def power_loss(*names: str) -> Fault:
    """Powers hosts off for the fault's duration, then on again with their services."""

    @asynccontextmanager
    async def fault(mesh: Machines) -> AsyncIterator[None]:
        for name in names:
            await mesh.power_off(name)
        try:
            yield
        finally:
            for name in names:
                await mesh.power_on(name)
            if set(names) & set(mesh.workers):
                await mesh.wait_registered()  # The fault ends once the worker's service has started.

    return fault


@asynccontextmanager
async def consul_empty(mesh: Machines) -> AsyncIterator[None]:
    """Restarts Consul without its state. The workers reach it later than the services that look for them."""
    for name in mesh.workers:
        mesh.hosts.cut(CONSUL, name)
    try:
        async with power_loss(CONSUL)(mesh):
            yield
        await asyncio.sleep(EMPTY_S)
    finally:
        for name in mesh.workers:
            mesh.hosts.join(CONSUL, name)


def both(first: Fault, second: Fault) -> Fault:
    """Applies two faults at once."""

    @asynccontextmanager
    async def fault(mesh: Machines) -> AsyncIterator[None]:
        async with first(mesh), second(mesh):
            yield

    return fault


NO_WORKERS = {("cut frontend-1, decode", FIRST)}
"""Faults that leave no worker for a kind of requests."""
FAULTS: dict[str, Fault] = {
    "cut prefill-1, decode-1": cut(("prefill-1", "decode-1")),
    "cut frontend-1, decode-1": cut((FIRST, "decode-1")),
    "cut frontend-1, prefill-1": cut((FIRST, "prefill-1")),
    "cut router, prefill-1": cut((ROUTER, "prefill-1")),
    "cut frontend-1, decode": cut((FIRST, "decode-1"), (FIRST, "decode-2")),
    "cut router, decode-1": cut((ROUTER, "decode-1")),
    "cut Consul": cut((CONSUL, "all")),
    "Consul empty": consul_empty,
    "slow decode-1": slow,
    "power loss prefill-1": power_loss("prefill-1"),
    "power loss decode-1": power_loss("decode-1"),
}
COMBINED: dict[str, Fault] = {
    "cut frontend-1, workers-1": cut((FIRST, "prefill-1"), (FIRST, "decode-1")),
    "cut router, workers-1": cut((ROUTER, "prefill-1"), (ROUTER, "decode-1")),
    "cut Consul, slow decode-1": both(cut((CONSUL, "all")), slow),
    "power loss workers-1": power_loss("prefill-1", "decode-1"),
}
"""Two faults at once. A request that uses one faulty worker and a healthy one of the other role meets one of the faults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The effect of a fault on requests."""

    fault: str
    first: Samples
    """Requests in flight when the fault began, or sent soon after."""
    later: Samples
    """Requests sent later, until the fault ended."""
    all: Samples
    usual_s: float
    """Duration of requests before the fault."""
    normal_s: float
    """Time from the end of the fault until the last late or failed request ended, and requests over the affected paths took the usual time."""

    @property
    def errors(self) -> Mapping[str, Mapping[str, int]]:
        """Errors by kind of request, for kinds with errors."""
        kinds = (FIRST, SECOND, UNTOUCHED, TOUCHED)
        return {kind: dict(errors) for kind in kinds if (errors := self.all.of(kind).errors)}

    @property
    def kinds_with_workers(self) -> Sequence[str]:
        """Kinds of requests for which the fault leaves a worker. Requests that are pinned to the affected workers are not among them."""
        return [kind for kind in (FIRST, SECOND, UNTOUCHED) if (self.fault, kind) not in NO_WORKERS]

    @property
    def limit_s(self) -> float:
        """A request that takes longer is late."""
        return self.usual_s + LATE_S


async def measure(mesh: Machines, name: str, questions: Questions, *, fault_s: float = FAULT_S) -> Effect:
    """Runs traffic before, during and after the fault, until requests take the usual time."""
    traffic = Traffic(clients(mesh), questions)
    loop = asyncio.get_running_loop()
    for client in clients(mesh):
        await _wait_normal(traffic, client, limit_s=NORMAL_S_MAX)
    started_s = loop.time()
    async with traffic.running():
        await asyncio.sleep(BEFORE_S)
        while not traffic.samples.between(started_s, loop.time()).samples:
            await asyncio.sleep(0.1)
        usual_s = traffic.samples.between(started_s, loop.time()).usual_s
        limit_s = usual_s + LATE_S
        async with {**FAULTS, **COMBINED}[name](mesh):
            began_s = loop.time()
            await asyncio.sleep(fault_s)
        ended_s = loop.time()
        await _wait_normal(traffic, Client(name=HEALED, url=mesh.url(FIRST), pins=TOUCHED_PINS), limit_s)
        healed_s = loop.time()
        await mesh.wait_registered()
        await asyncio.sleep(AFTER_S)
    found = traffic.samples.between(started_s, loop.time())
    both = found.of(FIRST, SECOND)
    bad_ends = [
        each.began_s + each.wait_s
        for each in both.between(began_s - IN_FLIGHT_S, loop.time()).samples
        if each.outcome != RIGHT or each.wait_s > limit_s
    ]
    return Effect(
        fault=name,
        first=found.between(began_s - IN_FLIGHT_S, began_s + FIRST_S),
        later=found.between(began_s + FIRST_S, ended_s),
        all=found,
        usual_s=usual_s,
        normal_s=max([healed_s, *bad_ends]) - ended_s,
    )


def clients(mesh: Machines) -> list[Client]:
    """Returns the four kinds of clients."""
    return [
        Client(name=FIRST, url=mesh.url(FIRST)),
        Client(name=SECOND, url=mesh.url(SECOND)),
        Client(name=UNTOUCHED, url=mesh.url(SECOND), pins={"prefill": "prefill-2", "decode": "decode-2"}),
        Client(name=TOUCHED, url=mesh.url(SECOND), pins=TOUCHED_PINS),
    ]


async def _wait_normal(traffic: Traffic, client: Client, limit_s: float) -> None:
    """Waits until NORMAL_IN_A_ROW consecutive requests are right and take at most `limit_s`."""
    in_a_row = 0
    async with asyncio.timeout(NORMAL_S_MAX), aiohttp.ClientSession() as session:
        while in_a_row < NORMAL_IN_A_ROW:
            sample = await traffic.ask(session, client)
            is_normal = sample.outcome == RIGHT and sample.wait_s <= limit_s
            in_a_row = in_a_row + 1 if is_normal else 0
            await asyncio.sleep(0.05)
