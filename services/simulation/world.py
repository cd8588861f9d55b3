"""What all processes of one simulated mesh stand on: virtual time, the networks, the registry, seeded randomness, the trace of events."""

import asyncio
import hashlib
import struct
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from kvmesh.clock import Clock
from kvmesh.discovery.base import Health, Registration, Registry
from kvmesh.discovery.presence import Presence
from kvmesh.simulation.kv_transport import MemoryKvNetwork
from kvmesh.simulation.registry import MemoryAgent
from kvmesh.simulation.rendezvous import MemoryRendezvousNetwork
from kvmesh.simulation.rpc import MemoryNetwork
from kvmesh.simulation.virtual_loop import VirtualLoop, process_context

_CROSSING = struct.Struct("<dd")
T = TypeVar("T")
EPOCH_S = 1_700_000_000.0
"""The wall clock's time when the loop's is 0."""


class Trace:
    """Lines of (time, event, ids), and the time of every crossing of the network.

    Two runs are equal when their hashes are: a message that takes another turn anywhere changes the hash.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._digest = hashlib.sha256()
        self.lines: list[str] = []
        self.crossings = 0

    def note(self, event: str, *ids: object) -> None:
        """Something happened now."""
        line = f"{self._now():.6f} #{self.crossings} {event} {' '.join(map(str, ids))}"
        self.lines.append(line)
        self._digest.update(line.encode())

    def crossed(self, latency_s: float) -> None:
        """A message left for the other side of a link."""
        self.crossings += 1
        self._digest.update(_CROSSING.pack(self._now(), latency_s))

    @property
    def hash(self) -> str:
        """Of everything so far."""
        return self._digest.hexdigest()


class VirtualClock:
    """The loop's time, for people too: `SystemClock.wall` would differ from run to run. `skew_s`: how much the process's wall clock is ahead."""

    def __init__(self) -> None:
        self.skew_s = 0.0

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        return EPOCH_S + self.now() + self.skew_s

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(max(0.0, delay_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Seconds that a message and a KV transfer take."""

    least_s: float = 0.0002
    spread_s: float = 0.0008
    kv_s: float = 0.001
    kv_bytes_per_s: float = 1e6


class World:
    """Made on a virtual loop. Everything random is drawn from `seed`, by name, so that parts do not disturb each other."""

    def __init__(self, seed: int, latencies: Latencies) -> None:
        self.seed = seed
        self.clock: Clock = VirtualClock()
        self._clocks: dict[str, VirtualClock] = {}
        self.trace = Trace(self.clock.now)
        self.violations: list[str] = []
        """What processes did that they must not do."""
        self._network_random = self.random("network")
        self._latencies = latencies
        self.network = MemoryNetwork(latency_s=self._latency_s)
        self.kv_network = MemoryKvNetwork(
            clock=self.clock, latency_s=latencies.kv_s, bandwidth=latencies.kv_bytes_per_s
        )
        self.rendezvous_network = MemoryRendezvousNetwork(latency_s=latencies.kv_s)
        sessions = self.random("sessions")
        self.agent = MemoryAgent(
            clock=self.clock,
            new_session_id=lambda: f"{sessions.getrandbits(128):032x}",
            connect=lambda check: self.network.channel(check.grpc_target),
        )

    def clock_of(self, process: str) -> VirtualClock:
        """Returns the clock of a process, which keeps its skew over restarts."""
        return self._clocks.setdefault(process, VirtualClock())

    async def run_in(self, process: str, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` as a task of a process. The task does not run while the process is paused."""
        return await asyncio.get_running_loop().create_task(work, context=process_context(process))

    def pause(self, process: str) -> None:
        """SIGSTOP. The process must not be paused."""
        self.trace.note("pause", process)
        _loop().pause(process)

    def is_paused(self, process: str) -> bool:
        return _loop().is_paused(process)

    def resume(self, process: str) -> None:
        """SIGCONT, if the process is paused."""
        if self.is_paused(process):
            self.trace.note("resume", process)
            _loop().resume(process)

    def random(self, name: str) -> Random:
        """Returns a generator of its own for each name."""
        return Random(f"{self.seed}/{name}")

    def make_presence(self, registry: Registry, registration: Registration, *, is_joining: bool = False) -> Presence:
        """Returns a presence without the machine's clock and randomness."""
        generator = self.random(f"presence/{registration.instance_id}")
        health = Health.CRITICAL if is_joining else Health.PASSING
        return Presence(registry, registration, clock=self.clock, generator=generator, health=health)

    def _latency_s(self) -> float:
        latency_s = self._latencies.least_s + self._latencies.spread_s * self._network_random.random()
        self.trace.crossed(latency_s)
        return latency_s


def _loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop
