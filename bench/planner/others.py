"""A load-threshold scaler, and policies that know the true load."""

from collections.abc import Sequence
from dataclasses import replace

from kvmesh.core import Role
from kvmesh.core.planning import Shape, Targets
from kvmesh.core.whatif import RecordedRequest
from services.planner.observation import ModelObservation
from services.planner.sizing.demand import Demand
from services.planner.sizing.size import Sizer
from services.planner.sizing.speed import Speed
from services.whatif.fleet import ChangingFleet

INTERVAL_S = 15.0
COOL_S = 300.0


class Thresholds:
    """Kubernetes' HorizontalPodAutoscaler with its defaults: every 15 s `ceil(size * value / target)`, no change within 10 %, and shrinking to
    the largest size of the last 300 s.

    Its metrics are the share of time in which prefill workers compute (target 70 %), and the requests per decode worker divided by the largest
    batch that keeps the ITL target (70 %).
    """

    def __init__(self, targets: Targets, speed: Speed) -> None:
        assert targets.itl_s is not None
        self._speed, self._itl_s = speed, targets.itl_s
        self._next_s = INTERVAL_S
        self._busy_s: dict[str, float] = {}
        self._needed: list[tuple[float, Shape]] = []

    def tick(self, observation: ModelObservation, fleet: ChangingFleet, now_s: float) -> None:
        if now_s < self._next_s:
            return
        self._next_s += INTERVAL_S
        demand, wanted = observation.demand, fleet.wanted()
        if demand is None:
            return
        prefills = [engine for role, engine in fleet.engines() if role is Role.PREFILL]
        decodes = [engine for role, engine in fleet.engines() if role is Role.DECODE]
        busy = [engine.busy_s - self._busy_s.get(engine.name, engine.busy_s) for engine in prefills]
        self._busy_s = {engine.name: engine.busy_s for engine in prefills}
        context = demand.prompt_tokens + demand.output_tokens / 2
        per_request_s = self._speed.decode_s(1, context) - self._speed.decode_step_base_s
        batch_max = min(self._speed.running_max, (self._itl_s - self._speed.decode_step_base_s) / per_request_s)
        used = sum(engine.running + len(engine.waiting) for engine in decodes) / max(1, len(decodes)) / batch_max
        needed = Shape(
            prefill_workers=desired(len(prefills), sum(busy) / max(1, len(busy)) / INTERVAL_S, target=0.7),
            decode_workers=desired(len(decodes), used, target=0.7),
        )
        self._needed = [(at_s, shape) for at_s, shape in self._needed if at_s >= now_s - COOL_S] + [(now_s, needed)]
        fleet.scale(
            Shape(
                prefill_workers=self._settle(
                    [shape.prefill_workers for _, shape in self._needed], wanted.prefill_workers
                ),
                decode_workers=self._settle([shape.decode_workers for _, shape in self._needed], wanted.decode_workers),
            )
        )

    @staticmethod
    def _settle(needed: Sequence[int], wanted: int) -> int:
        return needed[-1] if needed[-1] > wanted else min(wanted, max(needed))


def desired(size: int, value: float, *, target: float) -> int:
    """Source: Kubernetes documentation, Horizontal Pod Autoscaling, algorithm details."""
    ratio = value / target
    return max(1, size if abs(ratio - 1) <= 0.1 else -int(-size * ratio // 1))


class TrueLoad:
    """Sizes each pool at any time for the true load of the next seconds, by the planner's formulas.

    Workers start early enough to be ready in time.
    """

    STEP_S = 20.0

    def __init__(
        self,
        trace: Sequence[RecordedRequest],
        targets: Targets,
        speed: Speed,
        *,
        start_s: float,
        hit_rate: float,
    ) -> None:
        self._start_s = start_s
        self._sizes = self._needed(trace, Sizer(speed=speed, targets=targets), factor=1.0, hit_rate=hit_rate)

    def _needed(
        self, trace: Sequence[RecordedRequest], sizer: Sizer, *, factor: float, hit_rate: float
    ) -> Sequence[Shape]:
        """Returns the shape for each step."""
        steps = int(trace[-1].at_s / self.STEP_S) + 1
        found: list[list[RecordedRequest]] = [[] for _ in range(steps)]
        for request in trace:
            found[int(request.at_s / self.STEP_S)].append(request)
        overall = demand_of_requests(trace, trace[-1].at_s, hit_rate)
        return [
            sizer.size(
                replace(self._near(found, i, hit_rate) or overall, requests_per_s=factor * len(each) / self.STEP_S)
            ).shape
            for i, each in enumerate(found)
        ]

    @property
    def first(self) -> Shape:
        return self._sizes[0]

    def peak(self) -> Shape:
        return Shape(
            prefill_workers=max(shape.prefill_workers for shape in self._sizes),
            decode_workers=max(shape.decode_workers for shape in self._sizes),
        )

    def tick(self, observation: ModelObservation, fleet: ChangingFleet, now_s: float) -> None:
        first = int(now_s / self.STEP_S)
        last = int((now_s + self._start_s) / self.STEP_S)
        coming = self._sizes[first : last + 1] or [self._sizes[-1]]
        shape = Shape(
            prefill_workers=max(each.prefill_workers for each in coming),
            decode_workers=max(each.decode_workers for each in coming),
        )
        wanted = fleet.wanted()
        if (shape.prefill_workers, shape.decode_workers) != (wanted.prefill_workers, wanted.decode_workers):
            fleet.scale(shape)

    def _near(self, found: Sequence[Sequence[RecordedRequest]], i: int, hit_rate: float) -> Demand | None:
        """Returns the demand of the two minutes around a step."""
        near = [request for step in found[max(0, i - 3) : i + 3] for request in step]
        return demand_of_requests(near, 1.0, hit_rate) if near else None


class Present(TrueLoad):
    """Knows the load of the current step exactly, and nothing of later ones. Its workers take the usual time to start.

    For `SURGE_S` after a pool has to grow, it is sized for `surge` times the load, to clear the backlog. It shrinks at once.
    """

    SURGE_S = 60.0

    def __init__(
        self,
        trace: Sequence[RecordedRequest],
        targets: Targets,
        speed: Speed,
        *,
        surge: float,
        start_s: float,
        hit_rate: float,
    ) -> None:
        super().__init__(trace, targets, speed, start_s=start_s, hit_rate=hit_rate)
        self._surges = self._needed(trace, Sizer(speed=speed, targets=targets), factor=surge, hit_rate=hit_rate)
        self._until_s = 0.0

    def tick(self, observation: ModelObservation, fleet: ChangingFleet, now_s: float) -> None:
        step = min(int(now_s / self.STEP_S), len(self._sizes) - 1)
        needed, before, wanted = self._sizes[step], self._sizes[max(0, step - 1)], fleet.wanted()
        if needed.prefill_workers > before.prefill_workers or needed.decode_workers > before.decode_workers:
            self._until_s = step * self.STEP_S + self.SURGE_S
        shape = self._surges[step] if now_s < self._until_s else needed
        if (shape.prefill_workers, shape.decode_workers) != (wanted.prefill_workers, wanted.decode_workers):
            fleet.scale(shape)


def demand_of_requests(requests: Sequence[RecordedRequest], span_s: float, hit_rate: float) -> Demand:
    """Returns the exact load of some requests, with 16 equally likely prompt lengths."""
    lengths = sorted(request.prompt_tokens for request in requests)
    points = min(16, len(lengths))
    parts = [lengths[i * len(lengths) // points : (i + 1) * len(lengths) // points] for i in range(points)]
    return Demand(
        requests_per_s=len(requests) / span_s,
        prompt_lengths=[(sum(part) / len(part), len(part) / len(lengths)) for part in parts],
        output_tokens=sum(request.output_tokens for request in requests) / len(requests),
        hit_rate=hit_rate,
    )
