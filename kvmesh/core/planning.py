"""Targets, decisions and reports of planners; fields as in `protos/kvmesh/planner/v1/planner.proto`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvmesh.core.worker import Role
from kvmesh.errors import UnsupportedError


class ObservationState(StrEnum):
    """Whether the planner can act on an observation. With any value except COMPLETE it keeps the plan."""

    COMPLETE = "complete"
    MISSING = "missing"
    STALE = "stale"
    CONTRADICTORY = "contradictory"


class DecisionAction(StrEnum):
    """What a decision does. KEEP and HOLD change nothing."""

    KEEP = "keep"
    HOLD = "hold"
    DEFLECT = "deflect"
    FLIP = "flip"
    SCALE = "scale"

    @property
    def changes_pools(self) -> bool:
        return self not in (DecisionAction.KEEP, DecisionAction.HOLD)


class DecisionOutcome(StrEnum):
    """What became of a decision."""

    NONE = "none"
    PROPOSED = "proposed"
    ACCEPTED = "accepted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """Limits and hourly cost of one pool. `workers_max` None: the planner's setting."""

    workers_min: int = 1
    workers_max: int | None = None
    cost_per_worker: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Latency targets of a model. `percentile`: the share of requests that must meet both. None: no target or limit."""

    model: str
    ttft_s: float | None = None
    itl_s: float | None = None
    percentile: float = 0.95
    prefill: PoolLimits = field(default_factory=PoolLimits)
    decode: PoolLimits = field(default_factory=PoolLimits)
    cost_max: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The pools of a model, and the prompt tokens up to which decode workers compute prompts themselves."""

    prefill_workers: int = 0
    decode_workers: int = 0
    deflect_tokens: int = 0

    @property
    def text(self) -> str:
        """`2 + 3`: prefill and decode workers, and the bound of deflection."""
        deflect = f", deflect {self.deflect_tokens}" if self.deflect_tokens else ""
        return f"{self.prefill_workers} + {self.decode_workers}{deflect}"

    def workers(self, role: Role) -> int:
        """Returns the size of one pool."""
        return self.prefill_workers if role is Role.PREFILL else self.decode_workers


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementBounds:
    """What a planner wants of the placements of a model.

    Decode workers may compute prompts of which they lack at most `deflect_tokens` tokens. A request whose time to first token is expected
    to exceed `ttft_s` waits for spare time of the workers. 0: no such bound.
    """

    deflect_tokens: int = 0
    ttft_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Mean load of a model."""

    requests_per_s: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    hit_rate: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One way to continue. `ttft_s` and `itl_s` None: the pools cannot serve the load. `limit` empty: it meets the targets."""

    action: DecisionAction
    shape: Shape
    takes_s: float = 0.0
    goodput_per_s: float = 0.0
    attainment: float = 0.0
    cost: float = 0.0
    ttft_s: float | None = None
    itl_s: float | None = None
    limit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionInputs:
    """What a decision was based on."""

    state: ObservationState = ObservationState.MISSING
    observed: Load = field(default_factory=Load)
    predicted: Load = field(default_factory=Load)
    predictor: str = ""
    predictor_error: float | None = None
    ready: Shape = field(default_factory=Shape)
    wanted: Shape = field(default_factory=Shape)
    ttft_correction: float = 1.0
    itl_correction: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A decision. The first of the `alternatives` was chosen; HOLD has none."""

    number: int
    model: str
    decided_at_s: float
    action: DecisionAction
    reason: str
    detail: str = ""
    inputs: DecisionInputs = field(default_factory=DecisionInputs)
    alternatives: Sequence[Alternative] = ()
    outcome: DecisionOutcome = DecisionOutcome.NONE
    outcome_detail: str = ""
    fencing_token: int = 0

    @property
    def shape(self) -> Shape:
        """The pools that the decision wants."""
        if self.action is DecisionAction.HOLD or not self.alternatives:
            return self.inputs.wanted
        return self.alternatives[0].shape


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTarget:
    """The wanted size of one pool. `drain_worker_ids`: workers to stop first when it shrinks; the connector chooses any others.

    `drain_timeout_s`: longest drain of one worker; None: the worker's setting.
    """

    model: str
    role: Role
    workers: int
    drain_worker_ids: Sequence[str] = ()
    drain_timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """One pool as the connector sees it.

    `workers_wanted` is the newest size that was set, by the planner or by others. A size that the planner did not set is a change by
    hand, which it respects. `workers_running` includes starting and draining workers. `ready_worker_ids` are ids of the registry.
    `workers_max` None: the connector has no limit.
    """

    model: str
    role: Role
    workers_wanted: int
    workers_running: int
    ready_worker_ids: Sequence[str] = ()
    workers_max: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """The workers of one model and role; see `kvmesh.planner.v1.PoolView`. None: nothing observed."""

    model: str
    role: Role
    workers_ready: int = 0
    workers_draining: int = 0
    workers_critical: int = 0
    workers_planned: int | None = None
    running_requests: int = 0
    waiting_requests: int = 0
    kv_usage: float | None = None
    prompt_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    waiting_prompt_tokens: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyReport:
    """Latencies of one model as its clients see them; see `kvmesh.planner.v1.LatencyView`. None: nothing observed."""

    model: str
    requests_per_s: float | None = None
    ttft_mean_s: float | None = None
    ttft_p99_s: float | None = None
    itl_mean_s: float | None = None
    itl_p99_s: float | None = None
    prompt_tokens_mean: float | None = None
    output_tokens_mean: float | None = None
    hit_rate: float | None = None
    queue_wait_mean_s: float | None = None
    queued_requests: float | None = None
    failed_rate: float | None = None
    state: ObservationState = ObservationState.MISSING


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """An observation and the decisions about it. `mode`: observe, dry_run or act. `observed_at_s`: None before the first observation."""

    mode: str
    source: str
    observed_at_s: float | None = None
    pools: Sequence[PoolReport] = ()
    latencies: Sequence[LatencyReport] = ()
    problems: Sequence[str] = ()
    targets: Sequence[Targets] = ()
    decisions: Sequence[Decision] = ()
    is_leader: bool = False
    leader_id: str = ""


class Fence:
    """Remembers the newest leader's token. See Kleppmann, "How to do distributed locking" (2016), on fencing tokens."""

    def __init__(self) -> None:
        self.newest_token = 0

    def check(self, token: int) -> None:
        """Raises UnsupportedError for a token older than the newest one. 0 is not a planner's token and always passes."""
        if not token:
            return
        if token < self.newest_token:
            raise UnsupportedError(
                "the fencing token is outdated: another planner leads now", reason="not_leader", field="fencing_token"
            )
        self.newest_token = token
