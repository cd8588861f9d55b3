"""The workers of a simulation, which start, drain, flip and stop."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvmesh.core import Role
from kvmesh.core.planning import Shape
from services.whatif.engine import ReplayEngine
from services.whatif.mesh import Replay
from services.whatif.placers import RouterPlacer

OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTimes:
    """`start_s`: from the start of a worker until it serves. `flip_s`: from the end of its drain until it serves in its new role."""

    start_s: float = 60.0
    flip_s: float = 1.0


@dataclass(slots=True, kw_only=True, eq=False)
class _Member:
    role: Role
    began_s: float
    engine: ReplayEngine | None = None
    is_draining: bool = False
    becomes: Role | None = None


class ChangingFleet:
    """Changes the workers of a replay, and counts their hours: from the start of their process to its end."""

    def __init__(self, replay: Replay, placer: RouterPlacer, times: FleetTimes) -> None:
        self._replay = replay
        self._placer = placer
        self._times = times
        self._members: list[_Member] = []
        self._worker_s: dict[Role, float] = {Role.PREFILL: 0.0, Role.DECODE: 0.0}
        self._names = 0
        self.flips = 0
        self.starts = 0
        self.stops = 0
        for role, engines in ((Role.PREFILL, replay.prefills), (Role.DECODE, replay.decodes)):
            self._members += [_Member(role=role, began_s=0.0, engine=engine) for engine in engines]
        self._serving = {member.engine.name: member for member in self._members if member.engine is not None}
        replay.on_idle = self._on_idle

    def ready(self) -> Shape:
        """Returns the workers that take requests."""
        return self._count(lambda member: member.engine is not None and not member.is_draining)

    def wanted(self) -> Shape:
        """Returns the workers that serve or start; one that flips counts for its new pool."""
        return Shape(
            prefill_workers=sum(self._counts_for(member, Role.PREFILL) for member in self._members),
            decode_workers=sum(self._counts_for(member, Role.DECODE) for member in self._members),
            deflect_tokens=self._placer.bounds.deflect_tokens,
        )

    def engines(self) -> list[tuple[Role, ReplayEngine]]:
        """Returns all workers that run, draining ones included."""
        return [(member.role, member.engine) for member in self._members if member.engine is not None]

    def worker_s(self, role: Role) -> float:
        """Worker seconds of a role so far."""
        now_s = self._replay.now_s
        return self._worker_s[role] + sum(now_s - member.began_s for member in self._members if member.role is role)

    def scale(self, shape: Shape) -> None:
        """Starts or drains workers until each pool has its size."""
        wanted = self.wanted()
        for role, size, had in (
            (Role.PREFILL, shape.prefill_workers, wanted.prefill_workers),
            (Role.DECODE, shape.decode_workers, wanted.decode_workers),
        ):
            for _ in range(size - had):
                self._start(role)
            for _ in range(had - size):
                self._stop_one(role)

    def flip(self, to_prefill: int) -> None:
        """Moves workers to prefill; below 0, to decode."""
        role = Role.DECODE if to_prefill > 0 else Role.PREFILL
        for _ in range(abs(to_prefill)):
            member = self._idlest(role)
            if member is None:
                return
            self.flips += 1
            member.becomes = OTHER[role]
            self._drain(member)

    def deflect(self, tokens: int) -> None:
        self._placer.set_bounds(replace(self._placer.bounds, deflect_tokens=tokens))

    def set_ttft(self, ttft_s: float) -> None:
        """Tells the router the target. Requests that are expected to miss it wait for spare time. 0: none."""
        self._placer.set_bounds(replace(self._placer.bounds, ttft_s=ttft_s))

    def _start(self, role: Role) -> None:
        self.starts += 1
        member = _Member(role=role, began_s=self._replay.now_s)
        self._members.append(member)
        self._replay.at(self._replay.now_s + self._times.start_s, lambda: self._serve(member))

    def _serve(self, member: _Member) -> None:
        # It was stopped while it started.
        if member not in self._members:
            return
        self._names += 1
        member.engine = self._replay.add(f"{member.role.value}-new-{self._names}")
        self._serving[member.engine.name] = member
        self._placer.join(member.engine, member.role)

    def _stop_one(self, role: Role) -> None:
        self.stops += 1
        # A worker that does not serve yet is stopped first.
        starting = [
            each for each in self._members if each.role is role and each.engine is None and each.becomes is None
        ]
        if starting:
            self._end(starting[-1])
            return
        coming = [each for each in self._members if each.becomes is role]
        if coming:
            # It ends when it has drained, instead of a worker that serves.
            coming[-1].becomes = None
            return
        member = self._idlest(role)
        if member is not None:
            self._drain(member)

    def _idlest(self, role: Role) -> _Member | None:
        ready = [
            (self._replay.assigned(each.engine), number, each)
            for number, each in enumerate(self._members)
            if each.role is role and each.engine is not None and not each.is_draining
        ]
        return min(ready, default=(0, 0, None))[2]

    def _drain(self, member: _Member) -> None:
        assert member.engine is not None
        member.is_draining = True
        self._placer.mark_draining(member.engine, member.role)
        if not self._replay.assigned(member.engine):
            self._drained(member)

    def _on_idle(self, engine: ReplayEngine) -> None:
        member = self._serving[engine.name]
        if member.is_draining:
            self._drained(member)

    def _drained(self, member: _Member) -> None:
        assert member.engine is not None
        self._placer.leave(member.engine)
        del self._serving[member.engine.name]
        member.engine = None
        if member.becomes is None:
            self._end(member)
            return
        # The process continues; its hours so far count for its old role.
        role, member.becomes = member.becomes, None
        self._end(member)
        flipped = _Member(role=role, began_s=self._replay.now_s)
        self._members.append(flipped)
        self._replay.at(self._replay.now_s + self._times.flip_s, lambda: self._serve(flipped))

    def _end(self, member: _Member) -> None:
        self._worker_s[member.role] += self._replay.now_s - member.began_s
        self._members.remove(member)

    def _counts_for(self, member: _Member, role: Role) -> bool:
        if member.becomes is not None:
            return member.becomes is role
        return member.role is role and not member.is_draining

    def _count(self, takes: Callable[[_Member], bool]) -> Shape:
        found = [member.role for member in self._members if takes(member)]
        return Shape(prefill_workers=found.count(Role.PREFILL), decode_workers=found.count(Role.DECODE))
