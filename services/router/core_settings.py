"""Settings of the router's decisions. They import nothing but the settings of its parts, so that every part can read them."""

from dataclasses import dataclass, field

from kvmesh.settings import internal, setting
from services.router.health.breaker import BreakerSettings
from services.router.queue.accounts import read_weights
from services.router.workers.cost_settings import CostSettings

RETRY_AFTER_S = 1.0
"""Shortest retry delay sent to refused callers. A short answer takes about as long, so the load has changed when they retry."""


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
    tenant_weights: tuple[str, ...] = setting(
        (), "Shares of tenants that differ from 1: tenant=weight,... The default tenant has the empty name."
    )
    subqueues_max: int = internal(64, "Sets of requests that the same workers could serve. A drain tries each.")

    def __post_init__(self) -> None:
        read_weights(self.tenant_weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSettings:
    """How long blocks are predicted to be cached."""

    predicted_s: float = setting(
        10.0, "Longest time from a placement until the worker's cache event replaces the prediction.", min=0.001
    )
    approximate_s: float = setting(
        120.0,
        "The same for engines without cache events: about the time that a prefix stays in a busy cache.",
        min=0.001,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSettings:
    """How routers exchange their reservations."""

    interval_s: float = internal(
        0.05, "Time for which changes are collected into one message. Routers differ by the changes of that time."
    )
    blocks_max: int = setting(
        2048,
        "Blocks of a prompt that peers are sent, 8 bytes each, so that later prompts with the same prefix go to the same worker."
        " 0: none, and each router has a hot prefix computed once.",
        min=0,
        max=65_536,
    )
    heartbeat_s: float = internal(0.5, "Longest time without a message to a peer.")
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
    reservation_grace_s: float = internal(
        10.0, "Time for which reservations outlive the stream of their frontend, which may come back."
    )
    history_max: int = setting(
        1000, "Placements that Explain remembers; 6 kB each with 64 workers, 17 kB with 512. 0: none.", min=0
    )
    index: IndexSettings = field(default_factory=IndexSettings)
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    queue: QueueSettings = field(default_factory=QueueSettings)
