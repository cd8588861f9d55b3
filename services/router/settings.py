"""Settings of the router."""

from dataclasses import dataclass, field

from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.lifecycle import LifecycleSettings
from kvmesh.rpc.settings import RpcSettings
from kvmesh.settings import setting
from kvmesh.telemetry import TelemetrySettings
from services.router.health.monitor import HealthSettings
from services.router.queue.round_robin import read_weights
from services.router.workers.cost_settings import CostSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipSettings:
    """How the router follows workers."""

    describe_timeout_s: float = setting(2.0, "Longest wait for a worker's description.", min=0.01)
    describe_interval_s: float = setting(
        5.0, "Time between two requests for a worker's description; adapters come and go.", min=0.1
    )
    load_interval_s: float = setting(0.1, "Shortest time between two load records of a worker.", min=0.01, max=60)
    silence_s: float = setting(
        3.0,
        "A worker without a load record for so long gets no requests. Workers repeat their record every second.",
        min=0.1,
    )
    reconnect_min_s: float = setting(0.1, "First pause before the router connects to a worker again.", min=0.001)
    reconnect_max_s: float = setting(2.0, "Longest pause before the router connects to a worker again.", min=0.001)


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
    quantum_tokens: int = setting(
        4096, "Prompt tokens that a tenant of weight 1 is served per round; smaller interleaves finer.", min=16
    )
    tenants_max: int = setting(
        256, "Tenants with a queue of their own per model and priority; the others share one.", min=1, max=65_536
    )
    tenant_weights: tuple[str, ...] = setting(
        (), "Shares of tenants that differ from 1: tenant=weight,... The default tenant has the empty name."
    )
    retry_after_s_max: float = setting(60.0, "Longest retry delay sent to refused callers.", min=0.1)

    def __post_init__(self) -> None:
        """Checks the weights."""
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
    heartbeat_s: float = setting(0.5, "Longest time without a message to a peer.", min=0.01, max=60)
    silence_s: float = setting(2.0, "A peer without a message for so long is lost.", min=0.05)
    peers_max: int = setting(16, "Other routers; each costs a stream and a copy of every change.", min=1, max=256)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoiningSettings:
    """What a router waits for before it takes requests."""

    peers_wait_s: float = setting(5.0, "Longest wait for the reservations of other routers.", min=0)
    index_wait_s: float = setting(10.0, "Longest wait for the blocks of the workers.", min=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """The router's process."""

    policy: str = setting(
        "kv",
        "Placement policy: kv, round_robin, random, least_loaded, power_of_two, consistent_hash, pinned, or the name"
        " of an entry point of the group kvmesh.router_policies.",
    )
    router_id: str = setting("", "Registered id, unique in the mesh. Empty: made from host and process.")
    seed: int = setting(0, "Seed of tie-breaks and of the random policy. 0: a new one each time.", min=0)
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
    retry_after_s: float = setting(1.0, "Retry delay sent to refused callers.", min=0.001)
    reservations_max: int = setting(65_536, "Placed requests that are not finished, of all workers.", min=1)
    reservation_s_max: float = setting(3600.0, "Longest life of a reservation without a report.", min=1)
    reservation_grace_s: float = setting(
        10.0, "Time for which reservations outlive the stream of their frontend, which may come back.", min=0
    )
    history_max: int = setting(
        1000, "Placements that Explain remembers; 6 kB each with 64 workers, 33 kB with 512. 0: none.", min=0
    )
    index: IndexSettings = field(default_factory=IndexSettings)
    health: HealthSettings = field(default_factory=HealthSettings)
    queue: QueueSettings = field(default_factory=QueueSettings)
    sync: SyncSettings = field(default_factory=SyncSettings)
    joining: JoiningSettings = field(default_factory=JoiningSettings)
    membership: MembershipSettings = field(default_factory=MembershipSettings)
    discovery: DiscoverySettings = field(default_factory=DiscoverySettings)
    rpc: RpcSettings = field(default_factory=RpcSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    lifecycle: LifecycleSettings = field(default_factory=LifecycleSettings)
