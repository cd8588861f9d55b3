"""Draws faults. In each pool one worker is exempt from those that take a worker away, if requests must survive."""

from collections.abc import Callable, Sequence
from random import Random

from services.simulation.schedule import TimedFault, Topology

REGISTRY, KV_NETWORK, MACHINE, WORKERS = "registry", "kv-network", "machine", "workers"
"""Targets that are not one process."""
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
        self._kinds = self._possible()

    def _roles(self) -> list[str]:
        return [role for role in ("prefill", "decode") if any(name.startswith(role) for name in self._workers)]

    def _possible(self) -> list[Callable[[], TimedFault]]:
        anywhere = [
            self._stall, self._slow_step, self._lose_kv, self._lose_events, self._lose_worker_registry, self._slow_link,
            self._reset, self._cut, self._fail_pulls, self._hang_pulls, self._slow_kv, self._registry_away, self._registry_empty,
            self._kill_router, self._kill_router, self._restart_router, self._part_router, self._skew, self._lead_lost, self._resign,
            self._suspend, self._part_frontend, self._pause_other,
        ]  # fmt: skip
        taken = [
            self._kill, self._kill, self._kill, self._lose_engine, self._part, self._part, self._drain, self._restart, self._refuse,
            self._rolling, self._change_role, self._pause, self._pause,
        ]  # fmt: skip
        frontends = [self._kill_frontend, self._kill_frontend, self._restart_frontend]
        return [
            *anywhere,
            *(taken if self._frail else []),
            *(frontends if len(self._frontends) > 1 else []),
        ]

    def fault(self) -> TimedFault:
        return self._random.choice(self._kinds)()

    def _make(self, kind: str, target: str, *, lasts: tuple[float, float] = (0.0, 0.0), **more: object) -> TimedFault:
        return TimedFault(
            at_s=round(self._random.uniform(0.0, self._over_s), 6),
            kind=kind,
            target=target,
            duration_s=round(self._random.uniform(*lasts), 6),
            **more,  # type: ignore[arg-type]
        )

    def _pick(self, names: Sequence[str]) -> str:
        return self._random.choice(names)

    def _pair(self) -> dict[str, object]:
        return {"other": self._pick(self._frontends)}

    # Workers that go away

    def _kill(self) -> TimedFault:
        return self._make("kill", target=self._pick(self._frail), lasts=(0.05, 3.0))

    def _lose_engine(self) -> TimedFault:
        return self._make("lose-engine", target=self._pick(self._frail), lasts=(0.3, 2.0))

    def _part(self) -> TimedFault:
        return self._make("partition", target=self._pick(self._frail), lasts=(0.1, 12.0))

    def _pause(self) -> TimedFault:
        return self._make("pause", target=self._pick(self._frail), lasts=(0.1, 10.0))

    def _drain(self) -> TimedFault:
        return self._make("drain", target=self._pick(self._frail), lasts=(0.3, 3.0))

    def _restart(self) -> TimedFault:
        return self._make("restart", target=self._pick(self._frail), lasts=(1.0, 3.0))

    def _refuse(self) -> TimedFault:
        return self._make("refuse", target=self._pick(self._frail), lasts=(0.1, 1.0), amount=0.5)

    def _rolling(self) -> TimedFault:
        fault = self._make("rolling-restart", target=WORKERS, other=",".join(self._frail))
        return TimedFault(
            at_s=fault.at_s,
            kind=fault.kind,
            target=WORKERS,
            other=fault.other,
            duration_s=ROLLING_STEP_S * len(self._frail),
        )

    def _change_role(self) -> TimedFault:
        if self._topology.rendezvous or self._topology.kv_groups > 1 or not self._topology.prefill:
            return self._drain()
        return self._make("change-role", target=self._pick(self._frail), lasts=(0.5, 4.0))

    # Faults that leave the worker there

    def _stall(self) -> TimedFault:
        return self._make("stall", target=self._pick(self._workers), amount=round(self._random.uniform(0.1, 3.0), 3))

    def _slow_step(self) -> TimedFault:
        factor = float(self._random.choice((2, 5, 20)))
        return self._make("slow-steps", target=self._pick(self._workers), lasts=(0.2, 4.0), amount=factor)

    def _lose_kv(self) -> TimedFault:
        return self._make("lose-kv", target=self._pick(self._workers), amount=float(self._random.randint(1, 4)))

    def _lose_events(self) -> TimedFault:
        return self._make("lose-events", target=self._pick(self._workers))

    def _lose_worker_registry(self) -> TimedFault:
        return self._make("lose-registry", target=self._pick(self._frail or self._workers), lasts=(0.1, 12.0))

    # Connections

    def _reset(self) -> TimedFault:
        return self._make("reset", target=self._pick([*self._frail, *self._routers]))

    def _cut(self) -> TimedFault:
        return self._make("cut", target=self._pick(self._frail or self._routers), lasts=(0.1, 8.0), **self._pair())

    def _slow_link(self) -> TimedFault:
        target = self._pick([*self._workers, *self._routers])
        return self._make(
            "slow-link", target=target, lasts=(0.2, 4.0), amount=round(self._random.uniform(0.01, 0.3), 3)
        )

    def _part_frontend(self) -> TimedFault:
        return self._make("part-frontend", target=self._pick(self._frontends), lasts=(0.1, 1.5))

    def _fail_pulls(self) -> TimedFault:
        return self._make(
            "fail-pulls" if not self._topology.rendezvous else "slow-kv", target=KV_NETWORK, lasts=(0.1, 0.5)
        )

    def _hang_pulls(self) -> TimedFault:
        return self._make(
            "hang-pulls" if not self._topology.rendezvous else "slow-kv", target=KV_NETWORK, lasts=(0.05, 0.3)
        )

    def _slow_kv(self) -> TimedFault:
        return self._make("slow-kv", target=KV_NETWORK, lasts=(0.2, 3.0))

    # Registry, routers, frontends, clocks

    def _registry_away(self) -> TimedFault:
        return self._make("registry-away", target=REGISTRY, lasts=(0.1, 15.0))

    def _registry_empty(self) -> TimedFault:
        return self._make("registry-empty", target=REGISTRY, lasts=(0.0, 2.0))

    def _kill_router(self) -> TimedFault:
        return self._make("kill", target=self._pick(self._routers), lasts=(0.05, 3.0))

    def _restart_router(self) -> TimedFault:
        return self._make("restart-router", target=self._pick(self._routers), lasts=(0.0, 2.0))

    def _part_router(self) -> TimedFault:
        return self._make("partition", target=self._pick(self._routers), lasts=(0.1, 6.0))

    def _kill_frontend(self) -> TimedFault:
        return self._make("kill", target=self._pick(self._frontends[1:]), lasts=(0.05, 2.0))

    def _restart_frontend(self) -> TimedFault:
        return self._make("restart-frontend", target=self._pick(self._frontends[1:]), lasts=(0.05, 1.0))

    def _skew(self) -> TimedFault:
        process = self._pick([*self._workers, *self._routers, *self._frontends, "planner-0", "planner-1"])
        amount = self._random.choice((-86_400.0, -30.0, -1.0, 0.5, 30.0, 86_400.0))
        return self._make("clock-jump", target=process, amount=amount)

    def _lead_lost(self) -> TimedFault:
        return self._make("lose-registry", target=self._pick(("planner-0", "planner-1")), lasts=(1.0, 15.0))

    def _resign(self) -> TimedFault:
        return self._make("resign", target=self._pick(("planner-0", "planner-1")))

    def _pause_other(self) -> TimedFault:
        return self._make("pause", target=self._pick([*self._routers, *self._frontends]), lasts=(0.1, 6.0))

    def _suspend(self) -> TimedFault:
        return self._make("suspend", target=MACHINE, amount=round(self._random.uniform(0.3, 6.0), 3))
