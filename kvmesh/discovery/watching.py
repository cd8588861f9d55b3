"""The rules of Consul's blocking queries, without I/O.

1. Only an index above 0 makes a query block. A response without an index counts as index 1.
2. A response with an index that goes backwards counts as a failure: the registry lost its state, perhaps while this process was paused and
   saw no query fail, and its members have not registered again yet.
3. A failure drops the index too, so that the next response arrives at once and makes the view fresh.
4. A response that equals the previous one is not passed on, whatever its index.
5. A failure is passed on once, as the last good view marked stale, or as an empty view if there was none.
"""

from collections.abc import Sequence

from kvmesh.discovery.base import Instance, View


class WatchState:
    """One service's watch: the index of the next query, and which responses change the view.

    `index` 0: the next query does not block.
    """

    def __init__(self, service: str) -> None:
        self._service = service
        self.index = 0
        self._last: View | None = None

    @property
    def has_seen(self) -> bool:
        """True after the first response."""
        return self._last is not None and self._last.index > 0

    def on_response(self, index: int, instances: Sequence[Instance]) -> View | None:
        """Returns the new view, or None when nothing changed."""
        if index < self.index:
            return self.on_failure()
        self.index = max(1, index)
        view = View(service=self._service, index=max(1, index), instances=tuple(instances))
        last, self._last = self._last, view
        is_changed = last is None or last.is_stale or last.instances != view.instances
        return view if is_changed else None

    def on_failure(self) -> View | None:
        """Returns the stale view, or None when the view is stale already."""
        self.index = 0
        if self._last is not None and self._last.is_stale:
            return None
        last = self._last or View(service=self._service, index=0, instances=())
        self._last = View(service=self._service, index=last.index, instances=last.instances, is_stale=True)
        return self._last
