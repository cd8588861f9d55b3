"""Settings of the router's decisions. They import nothing but the settings of its parts, so that every part can read them."""

from dataclasses import dataclass, field

from kvmesh.settings import internal, setting
from services.router.health.breaker import BreakerSettings
from services.router.health.overlap import OverlapSettings
from services.router.health.wedge import WedgeSettings
from services.router.queue.accounts import read_weights
from services.router.workers.cost_settings import CostSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSettings:
    """Which workers get no requests although they are there."""

    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    wedge: WedgeSettings = field(default_factory=WedgeSettings)
    overlap: OverlapSettings = field(default_factory=OverlapSettings)
    labelled_workers_max: int = internal(
        64, "Workers with a label of their own in the metric of prediction errors; the others share one."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """Which requests wait when all workers that could serve them are busy, and for how long."""

    requests_max: int = setting(
        4096, "Requests in the queue. 0: no request waits, and busy workers refuse.", min=0, max=65_536
    )
    prompt_tokens_max: int = setting(
        4_194_304, "Prompt tokens in the queue; an empty queue takes any prompt. Bounds memory too.", min=1
    )
    wait_s_max: float = setting(
        30.0, "Longest time in the queue. A request's own timeout may end it earlier.", min=0.01
    )
    late_share: float = setting(
        0.67,
        "Part of its longest time in the queue for which a request waits for spare time of the workers, if it is expected to miss the"
        " planner's time to first token. 0: it is placed at once.",
        min=0,
        max=0.9,
    )
    output_token_weight: float = setting(
        4.0,
        "Prompt tokens that an output token counts as when a tenant is charged; it takes a worker so much longer.",
        min=0,
    )
    tenants_max: int = setting(
        256, "Tenants with a queue of their own per model and priority; the others share one.", min=1, max=65_536
    )
    tenant_weights: tuple[str, ...] = setting(
        (), "Shares of tenants that differ from 1: tenant=weight,... The default tenant has the empty name."
    )
    subqueues_max: int = internal(64, "Sets of requests that the same workers could serve. A drain tries each.")
    retry_after_s_max: float = setting(60.0, "Longest retry delay sent to refused callers.", min=0.1)

    def __post_init__(self) -> None:
        read_weights(self.tenant_weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSettings:
    """How long, and for how many placements, blocks are predicted to be cached."""

    predicted_s: float = setting(
        10.0, "Longest time from a placement until the worker's cache event replaces the prediction.", min=0.001
    )
    approximate_s: float = setting(
        120.0,
        "The same for engines without cache events: about the time that a prefix stays in a busy cache.",
        min=0.001,
    )
    placements_max: int = setting(65_536, "Placements with predicted blocks, of either kind.", min=1)
    predicted_blocks_max: int = setting(
        1_048_576, "Blocks of those placements, each counted once; 40 to 80 bytes a block.", min=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSettings:
    """How routers exchange their reservations."""

    interval_s: float = setting(
        0.05,
        "Time for which changes are collected into one message. Routers differ by the changes of that time.",
        min=0.001,
        max=1,
    )
    blocks_max: int = setting(
        2048,
        "Blocks of a prompt that peers are sent, 8 bytes each, so that later prompts with the same prefix go to the same worker."
        " 0: none, and each router has a hot prefix computed once.",
        min=0,
        max=65_536,
    )
    heartbeat_s: float = internal(0.5, "Longest time without a message to a peer.")
    silence_s: float = setting(2.0, "A peer without a message for so long is lost.", min=0.05)
    changes_per_message_max: int = internal(512, "Changes of a kind in one message: 100 kB. So many are sent at once.")
    changes_max: int = internal(
        65_536, "Unsent changes. Beyond, a snapshot takes less, so the stream ends and opens again."
    )
    pending_max: int = internal(16_384, "Reservations on unknown workers: a quarter of all that a router may have.")
    peers_max: int = setting(16, "Other routers; each costs a stream and a copy of every change.", min=1, max=256)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """What `RouterCore` and its parts read."""

    policy: str = setting(
        "kv",
        "Placement policy: kv, round_robin, random, least_loaded, power_of_two, consistent_hash, pinned, or the name"
        " of an entry point of the group kvmesh.router_policies.",
    )
    cost: CostSettings = field(default_factory=CostSettings)
    local_prefill_tokens_max: int = setting(
        15,
        "A decode worker that lacks at most so many prompt tokens computes them itself: less than a block is not worth a"
        " handoff. 0: never for that reason.",
        min=0,
    )
    prefill_congested_s: float = setting(
        0.5, "Queue of a prefill worker from which on a decode worker may compute the prompt itself, in chunks.", min=0
    )
    sessions_max: int = setting(
        65_536,
        "Sessions whose workers are remembered; beyond, the one unused for the longest time is forgotten.",
        min=1,
    )
    session_s: float = setting(600.0, "Time after its newest request for which a session prefers its workers.", min=0)
    requests_per_decode_max: int = setting(1024, "Requests placed on one decode worker at a time.", min=1)
    prompt_tokens_per_prefill_max: int = setting(
        262_144,
        "Uncomputed prompt tokens on one worker from which on it gets no more; an idle one takes any prompt.",
        min=1,
    )
    kv_used_ratio_max: float = setting(
        0.95,
        "Part of a decode worker's KV blocks in use from which on it gets no more; an idle one takes any request.",
        min=0,
        max=1,
    )
    preallocating_requests_max: int = setting(
        2,
        "Requests that may wait for KV blocks on a decode worker with rendezvous handoff; with more it gets no requests, whatever its"
        " running batch says.",
        min=0,
    )
    retry_after_s: float = setting(1.0, "Retry delay sent to refused callers.", min=0.001)
    reservations_max: int = setting(65_536, "Placed requests that are not finished, of all workers.", min=1)
    reservation_s_max: float = setting(3600.0, "Longest life of a reservation without a report.", min=1)
    reservation_grace_s: float = setting(
        10.0, "Time for which reservations outlive the stream of their frontend, which may come back.", min=0
    )
    history_max: int = setting(
        1000, "Placements that Explain remembers; 6 kB each with 64 workers, 17 kB with 512. 0: none.", min=0
    )
    index: IndexSettings = field(default_factory=IndexSettings)
    health: HealthSettings = field(default_factory=HealthSettings)
    queue: QueueSettings = field(default_factory=QueueSettings)
