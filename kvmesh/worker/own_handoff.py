"""A prefill worker's own handoff, checked before it registers: where its handle says that the KV is, and a pull by one decode worker."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Protocol

from kvmesh.core import Handoff, KvHandle, KvPathCheck, Role, WorkerRef
from kvmesh.discovery.base import DECODE, Instance, Registry
from kvmesh.errors import MeshError
from kvmesh.event_log import event_logger
from kvmesh.kv.path_causes import Cause, find_own_fault
from kvmesh.worker.kv_checks import exchanges_kv
from kvmesh.worker.worker import Worker

_log = event_logger(__name__)

CONNECT_TIMEOUT_S = 2.0
PULL_TIMEOUT_S = 8.0
"""Longest check by a decode worker; a little more than it takes itself (`kv_checks.CHECK_TIMEOUT_S`), so that it says what failed."""


class CheckClient(Protocol):
    """What the check needs of a decode worker; see `kvmesh.rpc.worker_client`."""

    async def check_kv_path(self, address: str, source: WorkerRef, *, timeout_s: float) -> KvPathCheck: ...


class OwnHandoff:
    """Checks the handoff of one prefill worker. A failure is logged and does not stop the start: the pair may work later.

    NIXL refuses to load an agent's metadata into the same agent, so a worker cannot pull from itself. Instead it checks that its handle
    names an address that other hosts can reach, and that its side channel answers there. `address` is the address of its own gRPC server.
    """

    def __init__(
        self,
        worker: Worker,
        registry: Registry,
        client: CheckClient,
        *,
        host: str,
        address: Callable[[], str],
        random: Random,
    ) -> None:
        self._worker = worker
        self._registry = registry
        self._client = client
        self._host = host
        self._address = address
        self._random = random

    async def check(self, handle: KvHandle) -> None:
        """`handle` is one that this worker has made. Takes at most 10 s."""
        description = self._worker.description
        if description.role is not Role.PREFILL or Handoff.SEQUENTIAL not in description.capabilities.handoffs:
            return
        source = self._worker.engine.kv_source(handle)
        fault = find_own_fault(source, self._host) or await side_channel_fault(source)
        # KV may have a network of its own, where the address is another: a pull that works is the proof.
        if not await self._is_pulled_from() and fault is not None:
            _log.warning("kv_source_unreachable", reason=fault.reason, detail=fault.detail)

    async def _is_pulled_from(self) -> bool:
        """Has one decode worker pull a short prompt from this worker. False if that fails, or if there is none."""
        peers: list[Instance] = []
        with suppress(MeshError):
            view = await self._registry.instances(DECODE)
            peers = [each for each in view.instances if exchanges_kv(self._worker, each)]
        if not peers:
            return False
        peer = self._random.choice(sorted(peers, key=lambda each: each.instance_id))
        identity = self._worker.identity
        source = WorkerRef(worker_id=identity.worker_id, address=self._address(), epoch=identity.epoch)
        try:
            result = await self._client.check_kv_path(peer.address, source, timeout_s=PULL_TIMEOUT_S)
        except MeshError as error:
            # Says nothing about this worker: the decode worker may just be leaving.
            _log.info("kv_path_not_checked", decode_worker_id=peer.instance_id, reason=error.reason)
            return False
        if result.is_ok:
            _log.info("kv_path_checked", decode_worker_id=peer.instance_id, elapsed_s=round(result.elapsed_s, 3))
        else:
            _log.warning(
                "kv_path_check_failed", decode_worker_id=peer.instance_id, reason=result.reason, detail=result.detail
            )
        return result.is_ok


async def side_channel_fault(source: str | bytes) -> Cause | None:
    """Returns why a side channel does not answer. NIXL's metadata names no port, so a pull has to show that."""
    if not isinstance(source, str) or not source:
        return None
    host, _, port = source.rpartition(":")
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except TimeoutError:
        return Cause(
            reason="timed_out",
            detail=f"this worker's side channel at {source} does not answer in {CONNECT_TIMEOUT_S:g} s",
        )
    except OSError as error:
        return Cause(reason="unreachable", detail=f"this worker's side channel at {source}: {error.strerror or error}")
    writer.close()
    return None
