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
    discovery: DiscoverySettings = field(default_factory=DiscoverySettings)
    rpc: RpcSettings = field(default_factory=RpcSettings)
    mesh: MeshSettings = field(default_factory=MeshSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    lifecycle: LifecycleSettings = field(default_factory=LifecycleSettings)
