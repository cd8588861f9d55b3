"""Checks of KV paths: a decode worker makes a prefill worker compute a short prompt, and pulls its KV.

Nobody waits for these checks, so they show a failing path before or instead of a client's request.
"""

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import aclosing, suppress
from random import Random
from typing import Protocol

from kvmesh.clock import Clock
from kvmesh.core import Handoff, KvHandle, KvPathCheck, KvReader, Leg, LegFinish, LegTask, Role, WorkerRef
from kvmesh.discovery.base import PREFILL, Instance, Registry, View
from kvmesh.errors import DeadlineError, KvLostError, LostError, MeshError, UnavailableError
from kvmesh.event_log import event_logger
from kvmesh.kv.path_causes import REASONS
from kvmesh.worker.short_prompt import short_prompt
from kvmesh.worker.single_leg import stream_leg
from kvmesh.worker.worker import Worker

_log = event_logger(__name__)

LEG_ID_PREFIX = "kv-check-"
NAME_CHARACTERS_MAX = 64
CHECK_TIMEOUT_S = 6.0
"""Longest check: the source's short prompt, then the pull."""
PREFILL_TIMEOUT_S = 2.0
"""Longest wait for the source's handle."""
RELEASE_TIMEOUT_S = 1.0
"""Longest wait for the source to free what a failed check leaves."""
CHECKS_MAX = 2
"""Concurrent checks in the background."""
JITTER_S = 0.5
"""Workers check a new prefill worker at random times within this period, not all at the same time."""
TICK_S = 0.25
"""How often the checker looks for checks that are due."""
ROLE_CHECK_S = 2.0
"""The same for a prefill worker, which may become a decode worker."""


class PrefillClient(Protocol):
    """What checks need of a prefill worker; see `kvmesh.rpc.prefill_client`."""

    async def prefill(self, address: str, leg: Leg, *, timeout_s: float) -> KvHandle: ...

    async def release(self, address: str, leg_id: str, *, timeout_s: float) -> None: ...

    def reconnect(self, address: str) -> None: ...


class KvChecks:
    """Checks the paths to one decode worker: on request, for each new prefill worker, and while a path fails.

    Prefill workers count if they have the same model and KV compatibility hash. `run` makes the checks in the background.
    """

    def __init__(
        self, worker: Worker, registry: Registry, client: PrefillClient, *, host: str, clock: Clock, random: Random
    ) -> None:
        self._worker = worker
        self._registry = registry
        self._client = client
        self._host = host
        self._clock = clock
        self._random = random
        self._sources: dict[str, WorkerRef] = {}
        self._new: dict[str, float] = {}
        """Prefill workers that were not checked yet, with the time of their check."""
        self._running: set[str] = set()
        # The prefill worker's log shows which worker checks.
        prefix = f"{LEG_ID_PREFIX}{worker.identity.worker_id[:NAME_CHARACTERS_MAX]}"
        self._leg_ids = (f"{prefix}-{random.getrandbits(64):016x}-{number}" for number in itertools.count())

    @property
    def can_check(self) -> bool:
        """True if the engine pulls KV. Known after its start."""
        description = self._worker.description
        return description.role is Role.DECODE and Handoff.SEQUENTIAL in description.capabilities.handoffs

    async def start(self) -> None:
        """Part of the interface; `run` does the work."""

    async def aclose(self) -> None:
        """Part of the interface: `run` is cancelled."""

    async def check(self, source: WorkerRef) -> KvPathCheck:
        """Checks one path. Never raises a MeshError: whatever fails is the result."""
        started_s, leg_id = self._clock.now(), next(self._leg_ids)
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                failure = await self._find_failure(source, leg_id)
        except TimeoutError:
            failure = "timed_out", f"the check did not end in {CHECK_TIMEOUT_S:.0f} s"
        elapsed_s = self._clock.now() - started_s
        if failure is not None:
            await self._release(source, leg_id)
        self._worker.load_signal.notify()
        reason, detail = failure or ("", "")
        return KvPathCheck(is_ok=failure is None, reason=reason, detail=detail, elapsed_s=elapsed_s)

    async def _find_failure(self, source: WorkerRef, leg_id: str) -> tuple[str, str] | None:
        """Reason and detail. None: KV was pulled."""
        if source.worker_id not in self._sources:
            # It is about to register. The address of a registered worker comes from the registry only: later pulls go there.
            self._worker.engine.kv_paths.set_host(source.worker_id, host=_host(source))
        name = f"{self._worker.identity.worker_id}/{self._worker.identity.epoch}/{source.worker_id}"
        generation = short_prompt(self._worker.description, name, tokens=1)
        reader = KvReader(worker_id=self._worker.identity.worker_id, leg_id=leg_id)
        leg = Leg(leg_id=leg_id, task=LegTask.PREFILL, generation=generation, reader=reader)
        try:
            handle = await self._client.prefill(source.address, leg, timeout_s=PREFILL_TIMEOUT_S)
        except MeshError as error:
            if isinstance(error, DeadlineError | LostError | UnavailableError):
                self._client.reconnect(source.address)
                return "unreachable", f"the prefill worker at {source.address} does not answer: {error.message}"
            return "failed", f"the prefill worker at {source.address} made no handle: {error.message}"
        return await self._pull(source, leg, handle)

    async def _pull(self, source: WorkerRef, leg: Leg, handle: KvHandle) -> tuple[str, str] | None:
        paths = self._worker.engine.kv_paths
        paths.expect_check(handle.handle_id)
        try:
            finish = await self._run(
                Leg(leg_id=leg.leg_id, task=LegTask.GENERATE, generation=leg.generation, handle=handle)
            )
        except KvLostError as error:
            return REASONS.get(error.reason, "failed"), error.message
        except MeshError as error:
            return "failed", f"this worker could not run the check: {error.message}"
        finally:
            paths.end_check(handle.handle_id)
        if finish.usage.transferred_tokens and not finish.was_recomputed:
            return None
        cause = paths.cause(source.worker_id)
        return (cause.reason, cause.detail) if cause is not None else ("failed", "the KV was not pulled")

    async def _run(self, leg: Leg) -> LegFinish:
        async with aclosing(stream_leg(self._worker, leg, timeout_s=CHECK_TIMEOUT_S)) as steps:  # type: ignore[type-var]
            async for step in steps:
                if step.finish is not None:
                    return step.finish
        raise LostError("the engine did not finish the leg", reason="engine_closed")

    async def _release(self, source: WorkerRef, leg_id: str) -> None:
        """Releases by the leg: a check that timed out may not have received the handle that was made for it."""
        with suppress(MeshError):
            await self._client.release(source.address, leg_id, timeout_s=RELEASE_TIMEOUT_S)

    async def check_one(self) -> None:
        """Checks the path from one registered prefill worker, if there is any. Logs a failure."""
        with suppress(MeshError):
            self._take(await self._registry.instances(PREFILL))
        if self.can_check and self._sources:
            source = self._sources[self._random.choice(sorted(self._sources))]
            self._start_check(source.worker_id)
            await self._check_and_log(source)

    async def run(self) -> None:
        """Follows the registry, and checks new and failing paths while it is a decode worker, until it is cancelled."""
        if Handoff.SEQUENTIAL not in self._worker.description.capabilities.handoffs:
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(), name="kv-checks-watch")
            while True:
                for source in self._take_due(self._clock.now()):
                    group.create_task(self._check_and_log(source), name="kv-check")
                await self._clock.sleep(TICK_S if self.can_check else ROLE_CHECK_S)

    async def _watch(self) -> None:
        async with aclosing(self._registry.watch(PREFILL)) as views:
            async for view in views:
                self._take(view)

    def _take(self, view: View) -> None:
        """Replaces the known prefill workers. A stale view says nothing about workers that it lacks."""
        before = self._sources
        own_id = (
            self._worker.identity.worker_id
        )  # The pool includes this worker while it is a prefill worker; it cannot pull from itself.
        others = [each for each in view.instances if each.instance_id != own_id]
        found = {each.instance_id: _reference(each) for each in others if exchanges_kv(self._worker, each)}
        self._sources = {**before, **found} if view.is_stale else found
        paths = self._worker.engine.kv_paths
        paths.own_host = self._host
        for worker_id, source in found.items():
            paths.set_host(worker_id, host=_host(source))
            known = before.get(worker_id)
            if known is None or known.epoch != source.epoch:
                self._new[worker_id] = self._clock.now() + self._random.uniform(0, JITTER_S)
        if not view.is_stale:
            # All instances, not only those of `found`: the handles of draining workers are still pulled.
            paths.forget_others([each.instance_id for each in view.instances])
            self._new = {worker_id: at_s for worker_id, at_s in self._new.items() if worker_id in found}

    def _take_due(self, now_s: float) -> Sequence[WorkerRef]:
        """Prefill workers whose check is due, as many as may be checked now."""
        if self._worker.is_draining or not self.can_check:
            return ()
        due = [worker_id for worker_id, at_s in self._new.items() if at_s <= now_s]
        due += [each for each in self._worker.engine.kv_paths.due_checks(now_s) if each in self._sources]
        due = [each for each in dict.fromkeys(due) if each not in self._running]
        taken = due[: max(0, CHECKS_MAX - len(self._running))]
        for worker_id in taken:
            self._start_check(worker_id)
        return [self._sources[worker_id] for worker_id in taken]

    def _start_check(self, worker_id: str) -> None:
        self._new.pop(worker_id, None)
        self._running.add(worker_id)

    async def _check_and_log(self, source: WorkerRef) -> None:
        """Makes a check that `_start_check` has noted."""
        paths = self._worker.engine.kv_paths
        was_failing = paths.cause(source.worker_id) is not None
        try:
            result = await self.check(source)
        finally:
            self._running.discard(source.worker_id)
            paths.put_off(source.worker_id, self._clock.now())
        if not result.is_ok and not was_failing:
            _log.warning(
                "kv_path_check_failed", prefill_worker_id=source.worker_id, reason=result.reason, detail=result.detail
            )


def exchanges_kv(worker: Worker, other: Instance) -> bool:
    """Returns True if the other worker takes requests, and has the same model and KV compatibility hash."""
    description, meta = worker.description, other.meta
    return (
        other.takes_requests
        and meta.get("model") == description.model.name
        and meta.get("kv_compatibility_hash") == description.kv_compatibility_hash
    )


def _host(worker: WorkerRef) -> str:
    return worker.address.rpartition(":")[0].strip("[]")


def _reference(instance: Instance) -> WorkerRef:
    epoch = instance.meta.get("epoch", "")
    return WorkerRef(
        worker_id=instance.instance_id, address=instance.address, epoch=int(epoch) if epoch.isdecimal() else 0
    )
