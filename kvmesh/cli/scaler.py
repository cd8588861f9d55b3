"""Sizes the pools of a mesh that `kvmesh up` runs: starts and stops worker processes."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from kvmesh.cli.children import ChildSpec
from kvmesh.cli.keeper import Keeper, Slot, Start, instance_id
from kvmesh.core import Role
from kvmesh.core.planning import Fence, PoolState, PoolTarget
from kvmesh.discovery.base import DECODE, PREFILL
from kvmesh.errors import InvalidRequestError, MeshError, NotFoundError
from kvmesh.event_log import event_logger

_log = event_logger(__name__)

SERVICE_OF_ROLE = {Role.PREFILL: PREFILL, Role.DECODE: DECODE}
ROLES = {role.value: role for role in SERVICE_OF_ROLE}
WORKERS_MIN = {Role.PREFILL: 0, Role.DECODE: 1}
"""Decode workers can compute prompts, so that a mesh needs one of them."""
DRAIN_S = 60.0
"""Longest drain of a worker that is stopped. Requests that are still in flight then continue on other workers."""
STOP_MARGIN_S = 10.0
RETRY_S = 1.0


class LocalScaler:
    """Implements what ScalerService offers for one `kvmesh up`.

    1. Calls set the wanted sizes and return; `run` starts and stops one worker after the other until the sizes are reached.
    2. A worker that changes its role takes its place with it: the wanted sizes of both pools change by one when the change begins.
    """

    def __init__(
        self,
        keeper: Keeper,
        workers: list[Slot],
        *,
        model: str,
        make_spec: Callable[[Role, int], ChildSpec],
        start: Start,
        workers_max: Mapping[Role, int],
    ) -> None:
        """`workers` is the keeper's group of workers. `make_spec` makes the child with a number, which names it."""
        self._keeper = keeper
        self._slots = workers
        self._model = model
        self._make_spec = make_spec
        self._start = start
        self._workers_max = workers_max
        self._fence = Fence()
        self._roles: dict[Slot, Role] = {}
        """The role of each slot when it was last looked up."""
        self._wanted: Counter[Role] = Counter()
        self._drain_first: dict[Role, Sequence[str]] = {}
        self._drain_s: dict[Role, float] = {}
        self._stopping: set[Slot] = set()
        self._changed = asyncio.Event()

    async def pools(self) -> Sequence[PoolState]:
        """Both pools."""
        ready = await self._update_roles()
        return [
            PoolState(
                model=self._model,
                role=role,
                workers_wanted=self._wanted[role],
                workers_running=sum(its_role is role for its_role in self._roles.values()),
                ready_worker_ids=sorted(worker_id for worker_id, its_role in ready.items() if its_role is role),
                workers_max=self._workers_max[role],
            )
            for role in SERVICE_OF_ROLE
        ]

    async def scale(self, target: PoolTarget, *, fencing_token: int) -> int:
        """Sets the wanted size of a pool. Returns it, within the limits."""
        if target.model != self._model:
            raise NotFoundError(f"this mesh serves {self._model}", reason="model_not_found", field="model")
        if target.role not in SERVICE_OF_ROLE:
            raise InvalidRequestError("role must be prefill or decode", field="role")
        self._fence.check(fencing_token)
        await self._update_roles()
        wanted = min(max(target.workers, WORKERS_MIN[target.role]), self._workers_max[target.role])
        self._wanted[target.role] = wanted
        self._drain_first[target.role] = tuple(target.drain_worker_ids)
        self._drain_s[target.role] = DRAIN_S if target.drain_timeout_s is None else target.drain_timeout_s
        self._changed.set()
        return wanted

    async def run(self) -> None:
        """Reaches the wanted sizes until it is cancelled."""
        while True:
            await self._changed.wait()
            # Cleared first: a target that is set during a step starts another round.
            self._changed.clear()
            try:
                while await self._take_step():
                    pass
            except (MeshError, OSError) as error:
                self._keeper.say(f"scaling: {error}; retrying")
                _log.warning("scaling_failed", detail=str(error))
                await self._keeper.clock.sleep(RETRY_S)
                self._changed.set()

    async def _take_step(self) -> bool:
        """Starts or stops one worker. False when both pools have their size."""
        await self._update_roles()
        for role in SERVICE_OF_ROLE:
            slots = [slot for slot in self._slots if self._roles.get(slot) is role and slot not in self._stopping]
            if len(slots) < self._wanted[role]:
                await self._add(role)
                return True
            if len(slots) > self._wanted[role]:
                await self._remove(self._choose(role, slots), role)
                return True
        return False

    async def _add(self, role: Role) -> None:
        numbers = {slot.spec.name for slot in self._slots}
        number = next(each for each in range(len(numbers) + 1) if f"{role.value}-{each}" not in numbers)
        spec = self._make_spec(role, number)
        self._keeper.say(f"scaling: starting {spec.name}")
        await self._keeper.start(spec, self._slots, self._start)
        # No await since `start` appended the slot: `_update_roles` takes a slot without a role as a worker that was wanted from the start,
        # and would raise the wanted size.
        self._roles[self._slots[-1]] = role

    def _choose(self, role: Role, slots: Sequence[Slot]) -> Slot:
        """Returns the first that the caller named, otherwise the newest."""
        by_id = {instance_id(slot.child): slot for slot in slots if slot.child is not None}
        named = (by_id[worker_id] for worker_id in self._drain_first.get(role, ()) if worker_id in by_id)
        return next(named, slots[-1])

    async def _remove(self, slot: Slot, role: Role) -> None:
        self._keeper.say(f"scaling: stopping {slot.spec.name}")
        self._stopping.add(slot)
        try:
            await self._keeper.remove(slot, stop_timeout_s=self._drain_s.get(role, DRAIN_S) + STOP_MARGIN_S)
        finally:
            self._stopping.discard(slot)
            if slot not in self._slots:
                self._roles.pop(slot, None)

    async def _update_roles(self) -> Mapping[str, Role]:
        """Looks the roles up in the registry. Returns those of the workers that accept requests, by id."""
        listed: dict[str, Role] = {}
        ready: dict[str, Role] = {}
        for role, service in SERVICE_OF_ROLE.items():
            for instance in (await self._keeper.registry.instances(service)).instances:
                # A planner counts a worker in its new pool as soon as the change begins.
                listed[instance.instance_id] = ROLES.get(instance.next_role, role)
                if instance.takes_requests:
                    ready[instance.instance_id] = role
        own: dict[str, Role] = {}
        for slot in self._slots:
            worker_id = instance_id(slot.child) if slot.child is not None else ""
            role = listed.get(worker_id, self._roles.get(slot, Role(slot.spec.module.rpartition(".")[2])))
            former = self._roles.get(slot)
            if former is None:
                self._wanted[role] += 1
            elif former is not role and slot not in self._stopping:
                self._wanted[former] -= 1
                self._wanted[role] += 1
            self._roles[slot] = role
            if worker_id in ready:
                own[worker_id] = ready[worker_id]
        return own
