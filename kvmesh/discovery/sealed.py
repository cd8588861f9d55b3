"""A registry whose instances are sealed with the mesh's secret: members ignore entries that others write."""

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

from kvmesh.discovery.base import Instance, Registration, Registry, View
from kvmesh.discovery.consul import ConsulRegistry
from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.event_log import event_logger
from kvmesh.identity.secret import MeshSecret
from kvmesh.identity.settings import MeshSettings

SEAL_KEY = "seal"
"""Registry meta with the tag of an instance."""
REPORTED_MAX = 1024
_PURPOSE = "registration"
_log = event_logger(__name__)


class SealedRegistry:
    """Seals what it registers, and lists only instances whose seal fits service, id, address and meta.

    A copied registration still leads to the member that made it. The rest of the interface is the inner registry's.
    """

    def __init__(self, registry: Registry, secret: MeshSecret) -> None:
        self._registry = registry
        self._secret = secret
        self._reported: set[tuple[str, str]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)

    async def register(self, registration: Registration) -> None:
        """See `Registry.register`."""
        seal = self._secret.tag(_PURPOSE, _parts(registration)).hex()
        await self._registry.register(replace(registration, meta={**registration.meta, SEAL_KEY: seal}))

    async def instances(self, service: str) -> View:
        return self._believed(await self._registry.instances(service))

    async def watch(self, service: str) -> AsyncGenerator[View, None]:
        async with aclosing(self._registry.watch(service)) as views:
            async for view in views:
                yield self._believed(view)

    def _believed(self, view: View) -> View:
        return replace(view, instances=tuple(each for each in view.instances if self._is_sealed(each)))

    def _is_sealed(self, instance: Instance) -> bool:
        try:
            seal = bytes.fromhex(instance.meta.get(SEAL_KEY, ""))
        except ValueError:
            seal = b""
        if self._secret.is_tag(seal, _PURPOSE, _parts(instance)):
            return True
        key = (instance.instance_id, instance.address)
        if key not in self._reported and len(self._reported) < REPORTED_MAX:
            self._reported.add(key)
            _log.warning(
                "registration_not_sealed",
                consul_service=instance.service,
                instance_id=instance.instance_id,
                address=instance.address,
            )
        return False


def _parts(record: Registration | Instance) -> Iterator[bytes]:
    """The fields that a seal covers, in order."""
    yield from (record.service.encode(), record.instance_id.encode(), record.host.encode(), b"%d" % record.port)
    yield from _pairs(record.meta)


def _pairs(meta: Mapping[str, str]) -> Sequence[bytes]:
    return [word.encode() for key, value in sorted(meta.items()) if key != SEAL_KEY for word in (key, value)]


def open_registry(discovery: DiscoverySettings, mesh: MeshSettings) -> Registry:
    """Returns the registry client of a service or a tool. InvalidRequestError when a file of the settings cannot be used."""
    registry = cast(Registry, ConsulRegistry(discovery))
    secret = MeshSecret.from_file(mesh.secret_file)
    return registry if secret is None else cast(Registry, SealedRegistry(registry, secret))
