"""Places with perfect knowledge of the present."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvmesh.core import KvEvent
from services.whatif.engine import Job, ReplayEngine
from services.whatif.placers import Spot

if TYPE_CHECKING:
    from services.whatif.mesh import Replay


class OraclePlacer:
    """Places with perfect knowledge of all caches and queues. Prompts being computed count as cached.

    Takes the worker that will finish the prompt first. Does not know the future.
    """

    def __init__(self, replay: "Replay") -> None:
        self._computing = replay.prefills or replay.decodes
        self._decodes = replay.decodes
        self._has_prefills = bool(replay.prefills)
        self._coming: dict[str, dict[int, int]] = {engine.name: {} for engine in self._computing}
        self._uncached: dict[int, int] = {}
        self._ahead: dict[str, int] = dict.fromkeys(self._coming, 0)

    def place(self, job: Job) -> Spot | None:
        uncached = {engine.name: self._uncached_tokens(engine, job) for engine in self._computing}
        best = min(self._computing, key=lambda engine: self._ahead[engine.name] + uncached[engine.name])
        self._uncached[job.ask_id] = uncached[best.name]
        self._ahead[best.name] += uncached[best.name]
        coming = self._coming[best.name]
        for name in job.names:
            coming[name] = coming.get(name, 0) + 1
        decode = min(self._decodes, key=lambda engine: engine.running + len(engine.waiting))
        return Spot(prefill=best, decode=decode) if self._has_prefills else Spot(prefill=None, decode=best)

    def on_events(self, engine: ReplayEngine, events: Sequence[KvEvent]) -> None:
        """Does nothing: the oracle sees the caches."""

    def on_load(self, engine: ReplayEngine) -> None:
        """Does nothing: the oracle sees the queues."""

    def on_prefilled(self, job: Job) -> None:
        """Counts the prompt as cached."""
        engine = job.prefill or job.decode
        uncached = self._uncached.pop(job.ask_id, None)
        if uncached is None or engine is None:
            return
        self._ahead[engine.name] -= uncached
        coming = self._coming[engine.name]
        for name in job.names:
            coming[name] -= 1
            if not coming[name]:
                del coming[name]

    def on_first_token(self, job: Job) -> None:
        """Counts the prompt as cached, without a prefill worker."""
        self.on_prefilled(job)

    def on_done(self, job: Job) -> None:
        """Does nothing: the oracle keeps no state."""

    def _uncached_tokens(self, engine: ReplayEngine, job: Job) -> int:
        held = len(engine.pool.match(job.names))
        coming = self._coming[engine.name]
        for name in job.names[held:]:
            if name not in coming:
                break
            held += 1
        return max(1, job.trace.prompt_tokens - held * self._size(engine))

    @staticmethod
    def _size(engine: ReplayEngine) -> int:
        return engine.shape.block_tokens
