"""Draws faults. In each pool one worker is exempt from those that take a worker away, if requests must survive."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from services.simulation.schedule import TimedFault, Topology

Draw = Callable[[], TimedFault]

REGISTRY, KV_NETWORK, MACHINE, WORKERS = "registry", "kv-network", "machine", "workers"
"""Targets that are not one process."""
PLANNERS = ("planner-0", "planner-1")
JUMPS_S = (-86_400.0, -30.0, -1.0, 0.5, 30.0, 86_400.0)
"""How far a wall clock jumps."""
ROLLING_STEP_S = 4.0
"""What one worker's turn of a rolling restart takes at most, about."""


def workers_of(topology: Topology) -> list[str]:
    """Their ids."""
    return [
        f"{role}-{number}"
        for role, count in (("prefill", topology.prefill), ("decode", topology.decode))
        for number in range(count)
    ]


def draw_faults(
    generator: Random, topology: Topology, count: int, *, over_s: float, is_survivable: bool
) -> list[TimedFault]:
    """1 to twice `count` faults, sorted by time; none for a `count` of 0."""
    if not count:
        return []
    draw = _Draw(generator=generator, topology=topology, over_s=over_s, is_survivable=is_survivable)
    return sorted(
        (draw.fault() for _ in range(generator.randint(1, 2 * count - 1))),
        key=lambda fault: (fault.at_s, fault.kind, fault.target),
    )


class _Draw:
    def __init__(self, *, generator: Random, topology: Topology, over_s: float, is_survivable: bool) -> None:
        self._random = generator
        self._over_s = max(over_s, 1.0)
        self._topology = topology
        self._workers = workers_of(topology)
        exempt = {
            self._random.choice([name for name in self._workers if name.startswith(role)]) for role in self._roles()
        }
        if topology.kv_groups > 1 or topology.rendezvous:
            # A decode worker that cannot compute prompts needs the prefill worker of its group.
            exempt = {f"{role}-0" for role in self._roles()}
        self._frail = [name for name in self._workers if not is_survivable or name not in exempt]
        self._frontends = [f"frontend-{i}" for i in range(topology.frontends)]
        self._routers = [f"router-{i}" for i in range(topology.routers)]
        self._draws = self._possible()

    def _roles(self) -> list[str]:
        return [role for role in ("prefill", "decode") if any(name.startswith(role) for name in self._workers)]

    def fault(self) -> TimedFault:
        return self._random.choice(self._draws)()

    def _possible(self) -> list[Draw]:
        """Returns a function for each kind of fault, several times for kinds that are drawn more often."""
        drawn, random = self._drawn, self._random
        workers, frail, routers, frontends = self._workers, self._frail, self._routers, self._frontends
        has_pulls = not self._topology.rendezvous
        kill_router = drawn("kill", routers, (0.05, 3.0))
        anywhere = [
            drawn("stall", workers, amount=lambda: round(random.uniform(0.1, 3.0), 3)),
            self._slow_step,
            drawn("lose-kv", workers, amount=lambda: float(random.randint(1, 4))),
            drawn("lose-events", workers),
            drawn("lose-registry", frail or workers, (0.1, 12.0)),
            drawn("slow-link", [*workers, *routers], (0.2, 4.0), amount=lambda: round(random.uniform(0.01, 0.3), 3)),
            drawn("reset", [*frail, *routers]),
            drawn("cut", frail or routers, (0.1, 8.0), others=frontends),
            drawn("fail-pulls" if has_pulls else "slow-kv", KV_NETWORK, (0.1, 0.5)),
            drawn("hang-pulls" if has_pulls else "slow-kv", KV_NETWORK, (0.05, 0.3)),
            drawn("slow-kv", KV_NETWORK, (0.2, 3.0)),
            drawn("registry-away", REGISTRY, (0.1, 15.0)),
            drawn("registry-empty", REGISTRY, (0.0, 2.0)),
            kill_router,
            kill_router,
            drawn("restart-router", routers, (0.0, 2.0)),
            drawn("partition", routers, (0.1, 6.0)),
            drawn("clock-jump", [*workers, *routers, *frontends, *PLANNERS], amount=lambda: random.choice(JUMPS_S)),
            drawn("lose-registry", PLANNERS, (1.0, 15.0)),
            drawn("resign", PLANNERS),
            drawn("suspend", MACHINE, amount=lambda: round(random.uniform(0.3, 6.0), 3)),
            drawn("part-frontend", frontends, (0.1, 1.5)),
            drawn("pause", [*routers, *frontends], (0.1, 6.0)),
        ]
        drain = drawn("drain", frail, (0.3, 3.0))
        changes_roles = has_pulls and self._topology.kv_groups <= 1 and self._topology.prefill
        taken = [
            *3 * [drawn("kill", frail, (0.05, 3.0))],
            drawn("lose-engine", frail, (0.3, 2.0)),
            *2 * [drawn("partition", frail, (0.1, 12.0))],
            drain,
            drawn("restart", frail, (1.0, 3.0)),
            drawn("refuse", frail, (0.1, 1.0), amount=lambda: 0.5),
            self._rolling,
            drawn("change-role", frail, (0.5, 4.0)) if changes_roles else drain,
            *2 * [drawn("pause", frail, (0.1, 10.0))],
        ]
        ended = [
            # The first frontend never ends, so that clients always reach the mesh.
            *2 * [drawn("kill", frontends[1:], (0.05, 2.0))],
            drawn("restart-frontend", frontends[1:], (0.05, 1.0)),
        ]
        return [*anywhere, *(taken if frail else []), *(ended if len(frontends) > 1 else [])]

    def _drawn(
        self,
        kind: str,
        targets: str | Sequence[str],
        lasts: tuple[float, float] = (0.0, 0.0),
        *,
        amount: Callable[[], float] = lambda: 0.0,
        others: Sequence[str] = (),
    ) -> Draw:
        """Returns a function that draws a fault of one kind, with one of `targets` and one of `others`."""

        def draw() -> TimedFault:
            target = targets if isinstance(targets, str) else self._random.choice(targets)
            other = self._random.choice(others) if others else ""
            return self._make(kind, target, lasts=lasts, amount=amount(), other=other)

        return draw

    def _make(
        self, kind: str, target: str, *, lasts: tuple[float, float] = (0.0, 0.0), amount: float = 0.0, other: str = ""
    ) -> TimedFault:
        return TimedFault(
            at_s=round(self._random.uniform(0.0, self._over_s), 6),
            kind=kind,
            target=target,
            duration_s=round(self._random.uniform(*lasts), 6),
            amount=amount,
            other=other,
        )

    def _slow_step(self) -> TimedFault:
        factor = float(self._random.choice((2, 5, 20)))
        return self._make("slow-steps", self._random.choice(self._workers), lasts=(0.2, 4.0), amount=factor)

    def _rolling(self) -> TimedFault:
        fault = self._make("rolling-restart", WORKERS, other=",".join(self._frail))
        return replace(fault, duration_s=ROLLING_STEP_S * len(self._frail))
