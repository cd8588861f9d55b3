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
    """How workers are followed."""

    describe_timeout_s: float = setting(2.0, "Longest wait for a worker to say what it is.", min=0.01)
    describe_interval_s: float = setting(5.0, "How often a worker is asked again; adapters come and go.", min=0.1)
    load_interval_s: float = setting(0.1, "Shortest time between two load records of a worker.", min=0.01, max=60)
    silence_s: float = setting(
        3.0, "A worker without a load record for so long gets no requests; it repeats its record every second.", min=0.1
    )
    reconnect_min_s: float = setting(0.1, "First pause before connecting to a worker again.", min=0.001)
    reconnect_max_s: float = setting(2.0, "Longest pause before connecting to a worker again.", min=0.001)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """Who waits when all workers that could serve a request are busy, and for how long."""

    requests_max: int = setting(
        4096, "Asks that wait, all together. 0: nobody waits, busy workers refuse.", min=0, max=65_536
    )
    prompt_tokens_max: int = setting(
        4_194_304, "Prompt tokens that wait, all together; an empty queue takes any prompt. Bounds memory too.", min=1
    )
    lanes_max: int = setting(
        64, "Kinds of asks (model, adapter, features, labels, workers excluded) that wait at a time.", min=1, max=1024
    )
    wait_s_max: float = setting(
        30.0,
        "Longest wait; a request's own time may end it earlier. Callers try again better than they wait.",
        min=0.01,
    )
    quantum_tokens: int = setting(
        4096, "Prompt tokens a tenant of weight 1 is served per turn; smaller interleaves finer.", min=16
    )
    tenants_max: int = setting(
        256, "Tenants with turns of their own per model and priority; those beyond share one.", min=1, max=65_536
    )
    tenant_weights: tuple[str, ...] = setting(
        (), "Shares of tenants that differ from 1: tenant=weight,... The default tenant has the empty name."
    )
    retry_after_s_max: float = setting(60.0, "Most that refused callers are told to wait.", min=0.1)
    tick_s: float = setting(
        0.05, "While asks wait: how often it is looked for room that no report told of.", min=0.001, max=1
    )
    notice_s: float = setting(
        0.5,
        "How often frontends are told which asks wait; they give a router up that says nothing for 2 s.",
        min=0.01,
        max=1,
    )

    def __post_init__(self) -> None:
        """Weights are pairs, with a number within bounds."""
        read_weights(self.tenant_weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSettings:
    """How long, and how many, own placements are believed to be cached."""

    predicted_s: float = setting(
        10.0, "A placement counts as cached until the worker's own event comes, for so long at most.", min=0.001
    )
    approximate_s: float = setting(
        120.0,
        "The same on engines that tell no cache events; about the time a prefix stays in a busy cache.",
        min=0.001,
    )
    placements_max: int = setting(65_536, "Placements that are believed at a time, of either kind.", min=1)
    believed_blocks_max: int = setting(
        1_048_576, "Blocks of those placements, each counted once; 40 to 80 bytes a block.", min=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSettings:
    """How routers share what is in flight."""

    interval_s: float = setting(
        0.05,
        "Longest time for which a change is kept back to be told with others; routers differ by what changes meanwhile.",
        min=0.001,
        max=1,
    )
    batch_max: int = setting(512, "Changes of a kind in one message; a full one is sent at once.", min=1, max=8192)
    changes_max: int = setting(
        65_536, "Changes kept for a peer that does not take them; beyond, it begins anew with a snapshot.", min=1
    )
    strangers_max: int = setting(16_384, "Peers' reservations on workers that are not known here.", min=0)
    blocks_max: int = setting(
        2048,
        "Blocks of a prompt to compute that peers are told of at most, 8 bytes each: what they ask for next with the same beginning"
        " goes to the same worker. 0: none, and each router has a hot beginning computed once.",
        min=0,
        max=65_536,
    )
    heartbeat_s: float = setting(0.5, "Longest time without a message to a peer.", min=0.01, max=60)
    silence_s: float = setting(2.0, "A peer without a message for so long is lost.", min=0.05)
    reconnect_min_s: float = setting(0.05, "First pause before a stream to a peer is opened again.", min=0.001)
    reconnect_max_s: float = setting(1.0, "Longest pause before a stream to a peer is opened again.", min=0.001)
    peers_max: int = setting(16, "Other routers; each costs a stream and a copy of every change.", min=1, max=256)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoiningSettings:
    """What a router waits for before it takes requests."""

    peers_wait_s: float = setting(5.0, "Longest wait for what routers that take requests have in flight.", min=0)
    index_wait_s: float = setting(10.0, "Longest wait for the blocks of the workers that are there.", min=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """The router's process."""

    policy: str = setting(
        "kv",
        "How workers are weighed: kv, round_robin, random, least_loaded, power_of_two, consistent_hash, pinned, or the name"
        " of an entry point of the group kvmesh.router_policies.",
    )
    router_id: str = setting("", "Registered id, unique in the mesh. Empty: made from host and process.")
    seed: int = setting(0, "Seed of tie-breaks and of the random policy. 0: a new one each time.", min=0)
    cost: CostSettings = field(default_factory=CostSettings)
    local_prefill_tokens_max: int = setting(
        15,
        "A decode worker that lacks at most so many prompt tokens computes them itself; less than a block is not worth a"
        " handoff. 0: never for that reason.",
        min=0,
    )
    prefill_congested_s: float = setting(
        0.5, "Wait for a prefill worker from which on a decode worker may compute the prompt itself, in chunks.", min=0
    )
    sessions_max: int = setting(
        65_536, "Sessions whose workers are remembered; the one unused longest goes first.", min=1
    )
    session_s: float = setting(600.0, "How long after its last request a session prefers its workers.", min=0)
    requests_per_decode_max: int = setting(1024, "Requests placed on one decode worker at a time.", min=1)
    prompt_tokens_per_prefill_max: int = setting(
        262_144,
        "Uncomputed prompt tokens on one worker from which on it gets no more; an idle one takes any prompt.",
        min=1,
    )
    kv_used_ratio_max: float = setting(
        0.95,
        "Part of a decode worker's KV blocks in use from which on it gets no more; an idle one takes any.",
        min=0,
        max=1,
    )
    retry_after_s: float = setting(1.0, "What refused callers are told to wait.", min=0.001)
    reservations_max: int = setting(65_536, "Requests placed and not settled, all workers together.", min=1)
    reservation_s_max: float = setting(3600.0, "Longest life of a reservation of which nothing is heard.", min=1)
    reservation_grace_s: float = setting(
        10.0, "How long reservations outlive the stream of their frontend, which may come back.", min=0
    )
    history_max: int = setting(
        1000, "Placements that Explain remembers; 6 kB each with 64 workers, 33 kB with 512. 0: none.", min=0
    )
    sweep_blocks: int = setting(
        5000, "Blocks looked at per millisecond-long turn to free what workers left behind.", min=1
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
