"""Which roles may call this service at all, by rules that others set while it runs. They are on top of `permissions.py`."""

from collections.abc import Callable, Collection
from typing import Protocol

from kvmesh.identity.roles import MeshRole

OnDenied = Callable[[Collection[MeshRole]], None]


class Intentions(Protocol):
    """The rules for calls of one service."""

    def allows(self, role: MeshRole) -> bool:
        """By the newest rules that are known; False before the first. It must not wait."""
        ...

    def on_denied(self, callback: OnDenied) -> None:
        """From now on `callback` gets the roles that lose their permission, in the event loop of the calls."""
        ...
