"""Settings of the router."""

from dataclasses import dataclass, field

from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.identity.settings import MeshSettings
from kvmesh.lifecycle import LifecycleSettings
from kvmesh.network.settings import NetworkSettings
from kvmesh.rpc.settings import RpcSettings
from kvmesh.settings import internal, setting
from kvmesh.telemetry import TelemetrySettings
from services.router.core_settings import CoreSettings, SyncSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipSettings:
    """How the router follows workers."""

    describe_timeout_s: float = internal(2.0, "Longest wait for a worker's description.")
    describe_interval_s: float = internal(
        5.0, "Time between two requests for a worker's description; adapters come and go."
    )
    load_interval_s: float = internal(0.1, "Shortest time between two load records of a worker.")
    silence_s: float = setting(
        3.0,
        "A worker without a load record for so long gets no requests. Workers repeat their record every second.",
        min=0.1,
    )
    reconnect_min_s: float = internal(0.1, "First pause before the router connects to a worker again.")
    reconnect_max_s: float = internal(2.0, "Longest pause before the router connects to a worker again.")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoiningSettings:
    """What a router waits for before it takes requests."""

    peers_wait_s: float = internal(5.0, "Longest wait for the reservations of other routers.")
    workers_wait_s: float = internal(
        5.0, "Longest wait for the first decode worker. A registry that has lost its state lists none for about 4 s."
    )
    index_wait_s: float = internal(10.0, "Longest wait for the blocks of the workers.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings(CoreSettings, NetworkSettings):
    """The router's process."""

    router_id: str = setting("", "Registered id, unique in the mesh. Empty: made from host and process.")
    seed: int = setting(0, "Seed of tie-breaks and of the random policy. 0: a new one each time.", min=0)
    sync: SyncSettings = field(default_factory=SyncSettings)
    joining: JoiningSettings = field(default_factory=JoiningSettings)
    membership: MembershipSettings = field(default_factory=MembershipSettings)
    discovery: DiscoverySettings = field(default_factory=DiscoverySettings)
    rpc: RpcSettings = field(default_factory=RpcSettings)
    mesh: MeshSettings = field(default_factory=MeshSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    lifecycle: LifecycleSettings = field(default_factory=LifecycleSettings)
