"""Which role serves at an address, by the registry: what a client expects of the certificate there."""

from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from kvmesh.discovery.base import Registry, View
from kvmesh.identity.names import SERVICE_PREFIX
from kvmesh.identity.roles import MeshRole

ADDRESSES_MAX = 16_384


class AddressBook:
    """The roles of addresses as the registry listed them last. Addresses that it lists no more stay until there are too many."""

    def __init__(self) -> None:
        self._roles: OrderedDict[str, MeshRole] = OrderedDict()

    def note(self, view: View) -> None:
        role = MeshRole(view.service.removeprefix(SERVICE_PREFIX))
        for instance in view.instances:
            self._roles[instance.address] = role
            self._roles.move_to_end(instance.address)
        while len(self._roles) > ADDRESSES_MAX:
            self._roles.popitem(last=False)

    def role_of(self, address: str) -> MeshRole | None:
        """None: the registry has not listed it."""
        return self._roles.get(address)


class NotedRegistry:
    """Writes the instances that pass through it into a book. The rest of the interface is the inner registry's."""

    def __init__(self, registry: Registry, book: AddressBook) -> None:
        self._registry = registry
        self._book = book

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)

    async def instances(self, service: str) -> View:
        """See `Registry.instances`."""
        view = await self._registry.instances(service)
        self._book.note(view)
        return view

    async def watch(self, service: str) -> AsyncGenerator[View, None]:
        """See `Registry.watch`."""
        async with aclosing(self._registry.watch(service)) as views:
            async for view in views:
                self._book.note(view)
                yield view
