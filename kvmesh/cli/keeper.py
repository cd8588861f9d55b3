"""Keeps the child processes of a mesh running: restarts a process that dies, and gives up on one that dies too often."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvmesh.cli.children import Child, ChildSpec
from kvmesh.clock import Clock
from kvmesh.discovery.base import DECODE, FRONTEND, PREFILL, ROUTER, Registry
from kvmesh.errors import MeshError

FIRST_DELAY_S = 0.5
DELAY_MAX_S = 30.0
"""Long enough that a child which loads a model for minutes does not keep the machine busy, short enough to watch."""
DOUBLINGS_MAX = 30
"""Bounds the exponent. The delay reaches its maximum long before."""
RECHECK_S = 1.0
"""Poll interval for other instances of a service whose children have all been given up."""
REGISTRATION_POLL_S = 0.2
NEEDED = {
    "frontend": (FRONTEND, ("services.frontend", "services.gateway")),
    "router": (ROUTER, ("services.router", "services.gateway")),
    "decode worker": (DECODE, ("services.decode",)),
}
"""Services that a mesh needs, with the modules of the children that provide them. Decode workers can compute prompts themselves, so no
prefill worker is needed."""
Start = Callable[[ChildSpec], Awaitable[Child]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Allows `restarts_max` restarts in a row. The count returns to 0 after a child has run for `window_s`."""

    restarts_max: int
    window_s: float


class RestartHistory:
    """The restarts of one child."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.restarts = 0

    def on_death(self, lived_s: float) -> float | None:
        """Returns the delay before the next start, doubled with each restart in a row; None if the limit is reached."""
        if lived_s >= self._policy.window_s:
            self.restarts = 0
        if self.restarts >= self._policy.restarts_max:
            return None
        delay_s = min(FIRST_DELAY_S * 2.0 ** min(self.restarts, DOUBLINGS_MAX), DELAY_MAX_S)
        self.restarts += 1
        return delay_s


@dataclass(slots=True, eq=False, kw_only=True)
class Slot:
    """One child. `child` is its newest process; None before the first start."""

    spec: ChildSpec
    history: RestartHistory
    child: Child | None = None
    started_at_s: float = 0.0
    is_given_up: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class Keeper:
    """The slots of one mesh, in groups that are stopped one after the other.

    1. A slot has at most one process at a time.
    2. A process is in its slot from its start on, so that a stop always finds it.
    """

    registry: Registry
    clock: Clock
    policy: RestartPolicy
    say: Callable[[str], None]
    """Prints one line for people."""
    restart: Start
    """Restarts a child, possibly in another way than its first start."""
    groups: list[list[Slot]] = field(default_factory=list)
    _dead_ids: set[str] = field(default_factory=set)
    _gave_up: asyncio.Event = field(default_factory=asyncio.Event)
    _keeping: "dict[Slot, asyncio.Task[None]] | None" = None
    """The task of each slot; None before `keep_running` and after it."""

    def slots(self) -> Iterator[Slot]:
        """Returns all slots, in the order of their groups."""
        return (slot for group in self.groups for slot in group)

    def running(self) -> Sequence[Sequence[Child]]:
        """Returns the newest process of each slot by group, ended ones included."""
        return [[slot.child for slot in group if slot.child is not None] for group in self.groups]

    def processes(self) -> Sequence[Child]:
        """Returns the newest process of each slot."""
        return [child for group in self.running() for child in group]

    async def wait_registered(self, slots: Sequence[Slot]) -> bool:
        """Waits until the registry lists the processes of these slots. False as soon as one of them dies."""
        while True:
            children = [slot.child for slot in slots if slot.child is not None]
            if any(child.exited.is_set() for child in children):
                return False
            listed: set[str] = set()
            # Retries while the registry is unreachable.
            with contextlib.suppress(MeshError):
                for service in {service_of(slot.spec) for slot in slots}:
                    view = await self.registry.instances(service)
                    listed.update(each.instance_id for each in view.instances if each.takes_requests)
            if listed.issuperset(instance_id(child) for child in children):
                return True
            await self.clock.sleep(REGISTRATION_POLL_S)

    async def start(self, spec: ChildSpec, group: list[Slot], start: Start) -> None:
        """Starts a child for the first time. Raises what `start` raises."""
        slot = Slot(spec=spec, history=RestartHistory(self.policy))
        slot.child = await start(spec)
        slot.started_at_s = self.clock.now()
        group.append(slot)
        if self._keeping is not None:
            self._keep_slot(slot, self._keeping)

    async def remove(self, slot: Slot, *, stop_timeout_s: float) -> None:
        """Stops a child for good. After a cancel it is not restarted either, but may run on until the mesh stops."""
        # Before the stop, or the task would restart the child.
        if self._keeping is not None and (task := self._keeping.pop(slot, None)) is not None:
            task.cancel()
            await asyncio.wait([task])
        if slot.child is not None:
            await slot.child.stop(stop_timeout_s)
        for group in self.groups:
            if slot in group:
                group.remove(slot)

    def _keep_slot(self, slot: Slot, keeping: "dict[Slot, asyncio.Task[None]]") -> None:
        keeping[slot] = asyncio.create_task(self._keep(slot), name=f"keep-{slot.spec.name}")

    async def keep_running(self) -> str:
        """Restarts children until a needed service is missing. Returns its name. Cancel it to stop."""
        keeping: dict[Slot, asyncio.Task[None]] = {}
        self._keeping = keeping
        for slot in self.slots():
            self._keep_slot(slot, keeping)
        try:
            await self._gave_up.wait()
            # Another mesh with the same registry may provide the service, until that ends.
            while not (missing := await self._missing_service()):
                await self.clock.sleep(RECHECK_S)
            return missing
        finally:
            self._keeping = None
            for keeper in keeping.values():
                keeper.cancel()
            if keeping:
                await asyncio.wait(keeping.values())

    async def _keep(self, slot: Slot) -> None:
        assert slot.child is not None
        cause, lived_s = await self._wait_death(slot, slot.child)
        while (delay_s := slot.history.on_death(lived_s)) is not None:
            count = f"restart {slot.history.restarts} of {self.policy.restarts_max}"
            self.say(
                f"{slot.spec.name} {cause}; starting it again in {delay_s:g} s ({count}); log: {slot.spec.log_path}"
            )
            await self.clock.sleep(delay_s)
            slot.started_at_s = self.clock.now()
            try:
                slot.child = await self.restart(slot.spec)
            except (MeshError, OSError) as error:
                cause, lived_s = f"could not be started: {error}", 0.0
                continue
            self.say(f"{slot.spec.name} started again (pid {slot.child.pid})")
            cause, lived_s = await self._wait_death(slot, slot.child)
        slot.is_given_up = True
        restarts = f"{slot.history.restarts} restarts in a row"
        self.say(f"{slot.spec.name} {cause}; giving up after {restarts}; log: {slot.spec.log_path}")
        self._gave_up.set()

    async def _wait_death(self, slot: Slot, child: Child) -> tuple[str, float]:
        """Returns the cause of death and the lifetime in seconds."""
        await child.exited.wait()
        # The registry lists a killed process until its TTL expires.
        service = slot.spec.module.rpartition(".")[2]
        names = ("frontend", "router") if service == "gateway" else (service,)
        self._dead_ids.update(f"{name}-{socket.gethostname()}-{child.pid}" for name in names)
        return child.cause(), self.clock.now() - slot.started_at_s

    async def _missing_service(self) -> str:
        """Returns a needed service without a child here and without another instance in the registry; empty: none is missing."""
        kept = {slot.spec.module for slot in self.slots() if not slot.is_given_up}
        for name, (service, modules) in NEEDED.items():
            if not kept.intersection(modules) and not await self._has_other(service):
                return name
        return ""

    async def _has_other(self, service: str) -> bool:
        """Returns True when the registry lists an instance that is not a dead child, or is unreachable."""
        try:
            view = await self.registry.instances(service)
        except MeshError:
            return True
        return any(each.takes_requests and each.instance_id not in self._dead_ids for each in view.instances)


def service_of(spec: ChildSpec) -> str:
    """Returns the worker's service in the registry."""
    return {"services.prefill": PREFILL, "services.decode": DECODE}[spec.module]


def instance_id(child: Child) -> str:
    """Returns the default instance id of a process."""
    return f"{child.spec.module.rpartition('.')[2]}-{socket.gethostname()}-{child.pid}"


def with_ports(flags: Sequence[str], ports: Mapping[str, int]) -> Sequence[str]:
    """Replaces values of flags: `--http-port` 0 becomes the port that the first process chose."""
    words = list(flags)
    for flag, port in ports.items():
        if flag in words:
            words[words.index(flag) + 1] = str(port)
    return tuple(words)
