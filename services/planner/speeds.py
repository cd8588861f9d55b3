"""How fast the workers of each model are, as they describe themselves."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from kvmesh.core import PerformanceProfile, Role, WorkerDescription
from kvmesh.discovery.base import Instance
from kvmesh.errors import MeshError
from kvmesh.event_log import event_logger
from kvmesh.rpc.worker_client import GrpcWorkerClient
from services.planner.sizing.speed import Speed, speed_of

_log = event_logger(__name__)
ASKS_MAX = 16
PER_POOL_MAX = 8
"""Workers of a pool that are asked; the others are expected to be like them."""
COEFFICIENTS = tuple(PerformanceProfile.__dataclass_fields__)


class WorkerSpeeds:
    """Asks each worker once, and again when it registers again."""

    def __init__(self, client: GrpcWorkerClient, *, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._descriptions: dict[tuple[str, str], WorkerDescription] = {}
        self._slots = asyncio.Semaphore(ASKS_MAX)

    async def update(self, instances: Sequence[Instance]) -> Mapping[str, Speed]:
        """Returns the speed of each model whose workers registered enough. A worker that does not answer is asked again next time."""
        wanted = {(each.instance_id, each.address): each for each in _some_of_each_pool(instances)}
        self._descriptions = {key: value for key, value in self._descriptions.items() if key in wanted}
        missing = [each for key, each in wanted.items() if key not in self._descriptions]
        await asyncio.gather(*map(self._ask, missing))
        return speeds_of(self._descriptions.values())

    async def _ask(self, instance: Instance) -> None:
        try:
            async with self._slots:
                found = await self._client.describe(instance.address, timeout_s=self._timeout_s)
        except MeshError as error:
            _log.info("worker_not_described", worker_id=instance.instance_id, reason=error.reason)
        else:
            self._descriptions[instance.instance_id, instance.address] = found


def speeds_of(descriptions: Iterable[WorkerDescription]) -> dict[str, Speed]:
    """Means over the workers of a model: prefill coefficients of prefill workers, where there are any, the others of decode workers."""
    by_model: dict[str, list[WorkerDescription]] = {}
    for each in descriptions:
        by_model.setdefault(each.model.name, []).append(each)
    found = {model: _speed(workers) for model, workers in by_model.items()}
    return {model: speed for model, speed in found.items() if speed is not None}


def _speed(workers: Sequence[WorkerDescription]) -> Speed | None:
    decodes = [each for each in workers if each.role is Role.DECODE] or workers
    prefills = [each for each in workers if each.role is Role.PREFILL] or workers
    profile = PerformanceProfile()
    for name in COEFFICIENTS:
        side = prefills if name.startswith("prefill_") else decodes
        values = [value for each in side if each.profile and (value := getattr(each.profile, name)) is not None]
        if values:
            mean = sum(values) / len(values)
            profile = replace(profile, **{name: round(mean) if name == "kv_bytes_per_token" else mean})
    kv_tokens = sum(each.kv_blocks_total * each.block_size_tokens for each in decodes) // len(decodes)
    speed = speed_of(profile, kv_tokens=kv_tokens)
    return speed if isinstance(speed, Speed) else None


def _some_of_each_pool(instances: Sequence[Instance]) -> list[Instance]:
    pools: dict[tuple[str, str], list[Instance]] = {}
    for each in sorted(instances, key=lambda each: each.instance_id):
        if each.takes_requests and each.meta.get("role") in (Role.PREFILL, Role.DECODE):
            pools.setdefault((each.meta.get("model", ""), each.meta["role"]), []).append(each)
    return [each for pool in pools.values() for each in pool[:PER_POOL_MAX]]
