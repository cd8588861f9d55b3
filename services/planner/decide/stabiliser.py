"""Lets pools grow at once and shrink late. Pure."""

from collections import deque

from kvmesh.core.planning import Shape


class Stabiliser:
    """Keeps the sizes that were needed within `calm_s`. A pool shrinks to the largest of them.

    Source: `stabilizationWindowSeconds` of Kubernetes' HorizontalPodAutoscaler, with 0 s for growth.
    """

    def __init__(self, calm_s: float) -> None:
        self._calm_s = calm_s
        self._needed: deque[tuple[float, Shape]] = deque()
        self._began_s: float | None = None

    def restart(self) -> None:
        """Forgets everything: the next shrinking is `calm_s` away."""
        self._needed.clear()
        self._began_s = None

    def settle(self, needed: Shape, wanted: Shape, now_s: float) -> Shape:
        """Adds a needed size. Returns the size to have, given the size that is wanted so far."""
        self._began_s = now_s if self._began_s is None else self._began_s
        self._needed.append((now_s, needed))
        while self._needed[0][0] < now_s - self._calm_s:
            self._needed.popleft()
        is_calm = now_s - self._began_s >= self._calm_s
        return Shape(
            prefill_workers=self._settle(
                needed.prefill_workers,
                wanted=wanted.prefill_workers,
                largest=max(shape.prefill_workers for _, shape in self._needed) if is_calm else wanted.prefill_workers,
            ),
            decode_workers=self._settle(
                needed.decode_workers,
                wanted=wanted.decode_workers,
                largest=max(shape.decode_workers for _, shape in self._needed) if is_calm else wanted.decode_workers,
            ),
            deflect_tokens=wanted.deflect_tokens,
        )

    @staticmethod
    def _settle(needed: int, wanted: int, largest: int) -> int:
        return needed if needed > wanted else min(wanted, largest)
