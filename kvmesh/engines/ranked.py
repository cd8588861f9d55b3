"""Data-parallel ranks: several engines of one model behind one worker, each with its own cache, queue and devices.

The router places requests on single ranks. A leg names its rank in `generation.data_parallel_rank`; without one, ranks take turns.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kvmesh.core import Capabilities, KvEvent, KvHandle, LoadRecord, Role
from kvmesh.engines.base import Engine, EngineDescription, EngineRequest, StepOutput
from kvmesh.engines.loads import sum_loads
from kvmesh.engines.registration import with_features
from kvmesh.errors import InvalidRequestError
from kvmesh.kv.paths import KvPaths

FEATURE = "data_parallel_ranks"
T = TypeVar("T")


def with_ranks(capabilities: Capabilities) -> Capabilities:
    """With the feature: requests may name a rank."""
    return with_features(capabilities, FEATURE)


class RankedEngine:
    """An Engine made of one engine per rank. The engines must have equal settings, devices aside.

    The loss of one rank is the loss of the engine. `kv_paths` is shared by all ranks.
    """

    def __init__(self, engines: Sequence[Engine], kv_paths: KvPaths) -> None:
        self._engines = engines
        self._kv_paths = kv_paths
        self._ranks: dict[int, int] = {}
        """The rank of each live key."""
        self._turns = itertools.cycle(range(len(engines)))

    # ---- life ----

    async def start(self) -> None:
        try:
            await self._all([engine.start() for engine in self._engines])
        except BaseException:
            await asyncio.gather(*(engine.aclose() for engine in self._engines), return_exceptions=True)
            raise

    async def aclose(self) -> None:
        await self._all([engine.aclose() for engine in self._engines])

    def describe(self) -> EngineDescription:
        """The figures are those of one rank, because the router places on and counts each rank separately."""
        first, *others = [engine.describe() for engine in self._engines]
        addresses = [each.rendezvous_address for each in (first, *others)]
        return replace(
            first,
            capabilities=replace(with_ranks(first.capabilities), data_parallel_size=len(self._engines)),
            rank_rendezvous_addresses=addresses if all(addresses) else (),
        )

    @property
    def is_responsive(self) -> bool:
        return all(engine.is_responsive for engine in self._engines)

    # ---- legs ----

    def submit_nowait(self, request: EngineRequest) -> None:
        if request.key in self._ranks:
            raise InvalidRequestError(f"key {request.key} is in use", field="key")
        asked = request.generation.data_parallel_rank
        rank = next(self._turns) if asked is None else asked
        if not 0 <= rank < len(self._engines):
            raise InvalidRequestError(
                f"this worker has the data-parallel ranks 0 to {len(self._engines) - 1}",
                field="generation.data_parallel_rank",
            )
        generation = replace(request.generation, data_parallel_rank=None)
        # The engine may report the leg's end before this call returns.
        self._ranks[request.key] = rank
        try:
            self._engines[rank].submit_nowait(replace(request, generation=generation))
        except BaseException:
            self._ranks.pop(request.key, None)
            raise

    def cancel_nowait(self, key: int) -> None:
        if (rank := self._ranks.get(key)) is not None:
            self._engines[rank].cancel_nowait(key)

    def release_nowait(self, handle_id: str) -> bool:
        # Only the rank that handed it out knows it.
        return any(engine.release_nowait(handle_id) for engine in self._engines)

    def leased_handles(self) -> int:
        return sum(engine.leased_handles() for engine in self._engines)

    # ---- outputs ----

    def steps(self) -> AsyncIterator[StepOutput]:
        return self._forgetting(merged([engine.steps() for engine in self._engines]))

    async def _forgetting(self, outputs: AsyncIterator[StepOutput]) -> AsyncIterator[StepOutput]:
        async for output in outputs:
            self._forget(output)
            yield output

    async def deliver(self, take: Callable[[StepOutput], None]) -> None:
        def take_and_forget(output: StepOutput) -> None:
            self._forget(output)
            take(output)

        await self._all([engine.deliver(take_and_forget) for engine in self._engines])

    def _forget(self, output: StepOutput) -> None:
        for finish in output.finishes:
            # Before the output is passed on: the receiver may submit a new leg with this key immediately.
            self._ranks.pop(finish.key, None)

    async def kv_events(self) -> AsyncIterator[Sequence[KvEvent]]:
        async for events in merged([of_rank(rank, engine.kv_events()) for rank, engine in enumerate(self._engines)]):
            yield events

    def load(self) -> LoadRecord:
        return sum_loads([engine.load() for engine in self._engines])

    def rank_loads(self) -> Sequence[LoadRecord]:
        return [replace(engine.load(), data_parallel_rank=rank) for rank, engine in enumerate(self._engines)]

    @property
    def kv_paths(self) -> KvPaths:
        return self._kv_paths

    def kv_source(self, handle: KvHandle) -> str | bytes:
        """Reads it from the handle, so any rank can do so."""
        return self._engines[0].kv_source(handle)

    # ---- administration: of all ranks ----

    async def load_adapter(self, name: str, source: str) -> None:
        """One rank after the other: what the first one refuses, no rank has."""
        for engine in self._engines:
            await engine.load_adapter(name, source=source)

    async def unload_adapter(self, name: str) -> None:
        await self._all([engine.unload_adapter(name) for engine in self._engines])

    async def reset_cache(self) -> bool:
        """Returns False if requests hold blocks of a rank; the others' are evicted."""
        return all(await self._all([engine.reset_cache() for engine in self._engines]))

    async def sleep(self, level: int) -> None:
        await self._all([engine.sleep(level) for engine in self._engines])

    async def wake(self) -> None:
        await self._all([engine.wake() for engine in self._engines])

    async def set_role(self, role: Role) -> None:
        """All ranks or none: after a failure the ranks that have changed change back."""
        before = self.describe().role
        try:
            await self._all([engine.set_role(role) for engine in self._engines])
        except BaseException:
            changed = [engine for engine in self._engines if engine.describe().role is not before]
            await asyncio.gather(*(engine.set_role(before) for engine in changed), return_exceptions=True)
            raise

    async def _all(self, calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Runs the calls concurrently. Raises the first failure itself, not in a group."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                # After a failure or a cancel, no call runs on in the background.
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def of_rank(rank: int, batches: AsyncIterator[Sequence[KvEvent]]) -> AsyncIterator[Sequence[KvEvent]]:
    async for events in batches:
        yield [replace(event, data_parallel_rank=rank) for event in events]


async def merged(sources: Sequence[AsyncIterator[T]]) -> AsyncIterator[T]:
    """Yields all items as they arrive, those of one source in order. Ends with the last source, or with the first failure."""
    waiting = {asyncio.ensure_future(anext(source)): source for source in sources}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                source = waiting.pop(task)
                try:
                    # Only StopAsyncIteration is caught: another failure ends the iteration, and the sources are cancelled below.
                    item = task.result()
                except StopAsyncIteration:
                    continue
                # Before the yield, so that `waiting` holds every source if the consumer closes this generator.
                waiting[asyncio.ensure_future(anext(source))] = source
                yield item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
