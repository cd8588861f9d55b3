"""Registers a worker: its description, its drain mark, its role."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from typing import Any, cast

from kvmesh.clock import Clock
from kvmesh.core import ModelCard, Role, WorkerDescription, WorkerRef
from kvmesh.discovery.base import (
    DECODE,
    KVMESH_VERSION,
    LABEL_PREFIX,
    PREFILL,
    ROLE_CHANGE,
    ROLE_SEQUENCE_KEY,
    VERSION_KEY,
    Registration,
    Registry,
)
from kvmesh.discovery.presence import Presence
from kvmesh.errors import MeshError, UnsupportedError
from kvmesh.network.names import host_port
from kvmesh.worker.model_files import ServedFiles
from kvmesh.worker.profile import profile_of
from kvmesh.worker.worker import Worker

CARD_PREFIX = "kvmesh/workers/"
SERVICE_OF_ROLE = {Role.PREFILL: PREFILL, Role.DECODE: DECODE}

ROLE_NOTICE_S = 0.2
"""From the drain mark to the change of role. Routers learn of the mark in this time, so they send few legs that are refused."""

PrepareIdentity = Callable[[Role], Awaitable[Callable[[], None]]]
"""Gets a worker's identity in a role; the returned function takes it."""


class _CardPublishingRegistry:
    """Publishes the worker's description with every registration: a registry that lost the instance has lost the description too."""

    def __init__(self, registry: Registry, publish: Callable[[], Awaitable[None]]) -> None:
        self._registry = registry
        self._publish = publish

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)

    async def register(self, registration: Registration) -> None:
        """Publishes the description first, so that it exists when routers see the instance."""
        await self._publish()
        await self._registry.register(registration)


class WorkerMembership:
    """Keeps one worker registered. The instance's meta holds what routers read often; the key-value store holds the whole description.

    Simulations pass `make_presence` to give the presence their own clock and generator.
    """

    def __init__(
        self,
        worker: Worker,
        registry: Registry,
        *,
        host: str,
        uses_tls: bool,
        clock: Clock,
        make_presence: Callable[[Registry, Registration], Presence] = Presence,
        prepare_identity: PrepareIdentity | None = None,
    ) -> None:
        """`prepare_identity` gets the certificate of the role that the worker changes to, or raises MeshError."""
        self._worker = worker
        self._registry = registry
        self._host = host
        self._uses_tls = uses_tls
        self._clock = clock
        self._role_lock = asyncio.Lock()
        self._role_tasks: set[asyncio.Task[Role]] = set()
        self._role_changes = 0
        self.files = ServedFiles(lambda: worker.description.model)
        """The model's files, whose digest is a part of the description."""
        self._make_presence = make_presence
        self._prepare_identity = prepare_identity
        self._port = 0
        self._metrics_port = 0
        self._presence: Presence | None = None

    def set_ports(self, *, port: int, metrics_port: int) -> None:
        """Sets the ports that the servers listen on. Call it before `start`."""
        self._port, self._metrics_port = port, metrics_port

    def worker_ref(self) -> WorkerRef:
        """Returns the worker's reference in placements."""
        identity = self._worker.identity
        return WorkerRef(worker_id=identity.worker_id, address=host_port(self._host, self._port), epoch=identity.epoch)

    def describe(self) -> WorkerDescription:
        """Returns the worker as it is now."""
        description = self._worker.description
        return WorkerDescription(
            worker=self.worker_ref(),
            role=description.role,
            model=self._model(),
            capabilities=description.capabilities,
            kv_compatibility_hash=description.kv_compatibility_hash,
            block_size_tokens=description.block_size_tokens,
            kv_blocks_total=description.kv_blocks_total,
            lease_s=description.lease_s,
            rendezvous_address=description.rendezvous_address,
            rank_rendezvous_addresses=description.rank_rendezvous_addresses,
            requires_prefill=description.requires_prefill,
            is_draining=self._worker.is_draining,
            profile=profile_of(description.profile, self._worker.settings.profile),
        )

    def _model(self) -> ModelCard:
        return replace(self._worker.description.model, files_digest=self.files.digest)

    def registration(self) -> Registration:
        description = self._worker.description
        return Registration(
            service=SERVICE_OF_ROLE[description.role],
            instance_id=self._worker.identity.worker_id,
            host=self._host,
            port=self._port,
            uses_tls=self._uses_tls,
            meta={
                VERSION_KEY: KVMESH_VERSION,
                "model": description.model.name,
                "role": description.role.value,
                ROLE_SEQUENCE_KEY: str(self._role_changes),
                "engine": description.capabilities.engine,
                "epoch": str(self._worker.identity.epoch),
                "kv_compatibility_hash": description.kv_compatibility_hash,
                "block_size_tokens": str(description.block_size_tokens),
                "metrics_port": str(self._metrics_port),
                **{f"{LABEL_PREFIX}{name}": value for name, value in self._worker.settings.label_values.items()},
            },
        )

    def card(self) -> bytes:
        """Returns the whole description as JSON, for the registry's key-value store."""
        description = self._worker.description
        record = {
            **asdict(self._model()),
            **asdict(description.capabilities),
            "role": description.role.value,
            "block_size_tokens": description.block_size_tokens,
            "kv_blocks_total": description.kv_blocks_total,
            "kv_compatibility_hash": description.kv_compatibility_hash,
            "lease_s": description.lease_s,
            "rendezvous_address": description.rendezvous_address,
            "rank_rendezvous_addresses": list(description.rank_rendezvous_addresses),
            "requires_prefill": description.requires_prefill,
        }
        return json.dumps(record, sort_keys=True).encode()

    async def start(self) -> None:
        """Registers the worker and starts its heartbeats. The presence retries while the registry cannot be reached."""
        registry = cast(Registry, _CardPublishingRegistry(self._registry, self.publish))
        self._presence = self._make_presence(registry, self.registration())
        await self._presence.start()

    async def publish(self) -> None:
        """Writes the description to the registry's key-value store."""
        await self._registry.put(CARD_PREFIX + self._worker.identity.worker_id, self.card())

    async def set_draining(self, is_draining: bool) -> None:
        """Marks the worker as draining: first in this process, then in the registry."""
        self._worker.set_draining(is_draining)
        if self._presence is not None:
            await self._presence.set_draining(is_draining, reason="drain requested")

    async def set_role(self, role: Role) -> Role:
        """Moves the worker to the other pool and returns its role. Legs in flight continue, and handles stay valid until they are
        pulled or expire. Legs of the former role that still arrive are refused as `role_changed`, and placed again.

        An engine with one role at a time waits for its legs, and ends what is left after a limit of its own. UnsupportedError if the
        engine cannot change its role. Idempotent. The change continues if the caller is cancelled, so that the registry matches the
        engine.
        """
        change = asyncio.create_task(self._change_role(role), name="role-change")
        # asyncio itself keeps only weak references to tasks.
        self._role_tasks.add(change)
        change.add_done_callback(self._role_tasks.discard)
        return await asyncio.shield(change)

    async def _change_role(self, role: Role) -> Role:
        async with self._role_lock:
            description = self._worker.description
            if role is description.role:
                return role
            if role not in description.capabilities.roles:
                raise UnsupportedError(
                    f"this {description.capabilities.engine} worker cannot change its role to {role.value}",
                    reason="role_unsupported",
                    field="role",
                )
            await self._announce_draining(True, role)
            try:
                take = await self._prepare_identity(role) if self._prepare_identity is not None else None
                await self._clock.sleep(ROLE_NOTICE_S)
                await self._worker.engine.set_role(role)
                if take is not None:
                    # After the engine: a failed change keeps the certificate of the former role.
                    take()
                self._role_changes += 1
                if self._presence is not None:
                    await self._presence.update(self.registration())
            finally:
                # The worker may have begun to drain for another reason meanwhile.
                await self._announce_draining(self._worker.is_draining, role)
            return role

    async def _announce_draining(self, is_draining: bool, role: Role) -> None:
        """Sets the mark in the registry only: the worker accepts legs that are on their way."""
        if self._presence is not None:
            await self._presence.set_draining(is_draining, reason=ROLE_CHANGE + role.value)

    async def aclose(self) -> None:
        """Leaves the registry. Bounded by the registry's own timeouts; idempotent."""
        for change in self._role_tasks:
            change.cancel()
        await asyncio.gather(*self._role_tasks, return_exceptions=True)
        if self._presence is not None:
            presence, self._presence = self._presence, None
            await presence.aclose()
            # A description without an instance is harmless.
            with contextlib.suppress(MeshError):
                await self._registry.delete(CARD_PREFIX + self._worker.identity.worker_id)
