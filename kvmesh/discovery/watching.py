"""The rules of Consul's blocking queries, without I/O.

1. An index is used only while it is above 0; an answer without one counts as 1, since 0 would not block.
2. An index that goes backwards (the registry lost its state) is forgotten: the next question does not block.
3. After a failure the index is forgotten too: the next answer comes at once, and makes the view fresh.
4. Answers that say what was said before are not passed on, whatever their index.
5. A failure is passed on once, as the last good view marked stale; an empty one where there was none yet.
"""

from collections.abc import Sequence

from kvmesh.discovery.base import Instance, View


class Watching:
    """One service's watch: what to ask next, and which view to give for an answer."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._index = 0
        self._last: View | None = None

    @property
    def index(self) -> int:
        """What to ask with; 0 asks without blocking."""
        return self._index

    @property
    def has_seen(self) -> bool:
        """True once there was an answer."""
        return self._last is not None and self._last.index > 0

    def answered(self, index: int, instances: Sequence[Instance]) -> View | None:
        """The view to give for an answer, if any."""
        went_backwards = index < self._index
        self._index = 0 if went_backwards else max(1, index)
        view = View(service=self._service, index=max(1, index), instances=tuple(instances))
        last, self._last = self._last, view
        is_news = last is None or last.is_stale or last.instances != view.instances
        return view if is_news else None

    def failed(self) -> View | None:
        """The view to give for a failure, if any."""
        self._index = 0
        if self._last is not None and self._last.is_stale:
            return None
        last = self._last or View(service=self._service, index=0, instances=())
        self._last = View(service=self._service, index=last.index, instances=last.instances, is_stale=True)
        return self._last
