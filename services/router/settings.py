"""Settings of the router."""

from dataclasses import dataclass, field

from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.lifecycle import LifecycleSettings
from kvmesh.rpc.settings import RpcSettings
from kvmesh.settings import setting
from kvmesh.telemetry import TelemetrySettings
from services.router.health import HealthSettings


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
class RouterSettings:
    """The router's process."""

    policy: str = setting("kv", "How workers are weighed.", choices=("kv", "round_robin", "least_loaded", "random"))
    router_id: str = setting("", "Registered id, unique in the mesh. Empty: made from host and process.")
    seed: int = setting(0, "Seed of tie-breaks and of the random policy. 0: a new one each time.", min=0)
    transfer_weight: float = setting(
        0.05, "Cost of moving one token's KV, in prompt tokens to compute; moving is cheap, not free.", min=0
    )
    decode_load_weight: float = setting(
        0.1, "Cost of one token held on a decode worker, in prompt tokens to compute; it slows every step.", min=0
    )
    local_prefill_tokens_max: int = setting(
        0, "A decode worker that lacks at most so many prompt tokens computes them itself. 0: never.", min=0
    )
    requests_per_decode_max: int = setting(1024, "Requests placed on one decode worker at a time.", min=1)
    prompt_tokens_per_prefill_max: int = setting(
        1_048_576,
        "Uncomputed prompt tokens placed on one prefill worker at a time; an idle one takes any prompt.",
        min=1,
    )
    retry_after_s: float = setting(1.0, "What refused callers are told to wait.", min=0.001)
    reservations_max: int = setting(65_536, "Requests placed and not settled, all workers together.", min=1)
    reservation_s_max: float = setting(3600.0, "Longest life of a reservation of which nothing is heard.", min=1)
    reservation_grace_s: float = setting(
        10.0, "How long reservations outlive the stream of their frontend, which may come back.", min=0
    )
    history_max: int = setting(1000, "Placements that Explain remembers; a few kilobytes each. 0: none.", min=0)
    sweep_blocks: int = setting(
        5000, "Blocks looked at per millisecond-long turn to free what workers left behind.", min=1
    )
    health: HealthSettings = field(default_factory=HealthSettings)
    membership: MembershipSettings = field(default_factory=MembershipSettings)
    discovery: DiscoverySettings = field(default_factory=DiscoverySettings)
    rpc: RpcSettings = field(default_factory=RpcSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    lifecycle: LifecycleSettings = field(default_factory=LifecycleSettings)
