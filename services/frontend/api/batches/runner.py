"""Claims batches that no frontend works on, and runs them."""

import asyncio
from collections import Counter
from contextlib import suppress

from kvmesh.errors import MeshError
from kvmesh.event_log import event_logger
from services.frontend.api.batches.batch_run import BatchResources, BatchRun
from services.frontend.api.batches.line_runner import DrainingError
from services.frontend.stores.batch_rows import Claim
from services.frontend.stores.batches import LeaseLostError
from services.frontend.stores.files import FileStore

_log = event_logger(__name__)
_RELEASE_TIMEOUT_S = 2.0
SWEEP_S = 300.0
"""Pause between two deletions of expired files and batches."""
TURN_S = 60.0
"""Time after which a batch makes way for one of a tenant without a running batch. Each change drains the lines in flight."""


class BatchRunner:
    """Runs until cancelled. Processes that share a directory share its batches by leases."""

    def __init__(self, resources: BatchResources) -> None:
        self._resources = resources
        self._runs: dict[str, BatchRun] = {}
        self._wakeup = asyncio.Event()

    @property
    def running(self) -> int:
        return len(self._runs)

    def wake(self, batch_id: str = "") -> None:
        """Ends the pause between two claims. `batch_id`: a batch whose row has changed."""
        self._wakeup.set()
        if batch_id in self._runs:
            self._runs[batch_id].wake()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._sweep(), name="batches-sweep")
            while True:
                # Before the claims, so that what changes meanwhile ends the pause after them.
                self._wakeup.clear()
                # A store that fails is tried again after the pause.
                with suppress(MeshError):
                    await self._claim_all(tasks)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._resources.settings.poll_s):
                        await self._wakeup.wait()

    async def _claim_all(self, tasks: asyncio.TaskGroup) -> None:
        while len(self._runs) < self._resources.settings.running_max and not self._resources.pipeline.is_draining:
            claim = await self._resources.store.claim()
            if claim is None:
                return
            if claim.batch_id in self._runs:
                # This process was too slow to renew its lease; the old run notices that itself.
                return
            _log.info("batch_claimed", batch_id=claim.batch_id, status=claim.status, epoch=claim.epoch)
            run = self._runs[claim.batch_id] = BatchRun(claim, self._resources)
            tasks.create_task(self._run(claim, run), name=f"batch-{claim.batch_id}")

        if len(self._runs) >= self._resources.settings.running_max and await self._resources.store.has_waiting_owner():
            self._make_way()

    def _make_way(self) -> None:
        """Stops a batch, so that a batch of a tenant without a running batch can be claimed. Its lines in flight end first."""
        owners = Counter(run.owner for run in self._runs.values())
        # A batch that ended while the store answered has made way.
        has_room = len(self._runs) < self._resources.settings.running_max
        if has_room or any(run.is_leaving for run in self._runs.values()):
            return
        # The newest run of the tenant that has most; else the one that has run longest, after its turn.
        run = max(self._runs.values(), key=lambda each: (owners[each.owner] > 1, owners[each.owner], -each.age_s))
        if owners[run.owner] == 1:
            run = max(self._runs.values(), key=lambda each: each.age_s)
            if run.age_s < TURN_S:
                return
        run.leave()

    async def _run(self, claim: Claim, run: BatchRun) -> None:
        store = self._resources.store
        try:
            await run.run()
        except LeaseLostError:
            _log.warning("batch_lease_lost", batch_id=claim.batch_id)
        except (DrainingError, asyncio.CancelledError) as ending:
            # So that another frontend need not wait until the lease ends.
            with suppress(MeshError, LeaseLostError, TimeoutError):
                async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                    await store.release(claim)
            if isinstance(ending, asyncio.CancelledError):
                raise
        except Exception as error:  # noqa: BLE001 (the boundary that keeps one batch's defect from the others; logged)
            _log.error("batch_failed_for_now", exc_info=error, batch_id=claim.batch_id)
            with suppress(MeshError, LeaseLostError):
                await store.release(claim, after_failure=True, after_defect=not isinstance(error, MeshError))
        finally:
            del self._runs[claim.batch_id]
            self._wakeup.set()

    async def _sweep(self) -> None:
        files: FileStore = self._resources.files
        while True:
            # A sweep that fails is repeated later.
            with suppress(MeshError, OSError):
                if count := await files.sweep() + await self._resources.store.sweep():
                    _log.info("files_and_batches_deleted", count=count)
            await asyncio.sleep(SWEEP_S)
