"""Running calls that end when their caller's role loses its permission."""

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from kvmesh.errors import PermissionDeniedError
from kvmesh.identity.roles import MeshRole

INTENTION_DENIED = "intention_denied"


class RunningCalls:
    """The calls of a server, by the caller's role. On one event loop."""

    def __init__(self) -> None:
        self._tasks: dict[MeshRole, set[asyncio.Task[object]]] = {}
        self._ended: set[asyncio.Task[object]] = set()

    @contextmanager
    def call_of(self, role: MeshRole) -> Iterator[None]:
        """Runs a call in the current task. PermissionDeniedError if `end` names its role while it runs; other cancels pass through."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.setdefault(role, set()).add(task)
        cancels = task.cancelling()
        try:
            yield
        except asyncio.CancelledError:
            # As in asyncio.timeout: another cancel that came, too, is the caller's and stays one.
            if task in self._ended and task.uncancel() <= cancels:
                raise denied(role) from None
            raise
        finally:
            self._tasks[role].discard(task)
            self._ended.discard(task)

    def end(self, roles: Collection[MeshRole]) -> None:
        for role in roles:
            for task in tuple(self._tasks.get(role, ())):
                if task not in self._ended:
                    self._ended.add(task)
                    task.cancel()


def denied(role: MeshRole) -> PermissionDeniedError:
    return PermissionDeniedError(f"Consul's intentions deny calls of {role}", reason=INTENTION_DENIED)
