"""Settings of the planner."""

from dataclasses import dataclass, field

from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.identity.settings import MeshSettings
from kvmesh.lifecycle import LifecycleSettings
from kvmesh.network.settings import NetworkSettings
from kvmesh.rpc.settings import RpcSettings
from kvmesh.settings import setting
from kvmesh.telemetry import TelemetrySettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings(NetworkSettings):
    """The planner's process."""

    prometheus: str = setting("", "URL of a Prometheus to query. Empty: the planner scrapes the services.")
    mode: str = setting(
        "observe",
        "observe: report only; dry_run: decide, and change nothing; act: decide and act.",
        choices=("observe", "dry_run", "act"),
    )
    scaler_address: str = setting(
        "",
        "Address of a ScalerService that starts and stops workers. Empty: the planner moves workers between pools only.",
    )
    interval_s: float = setting(5.0, "Time between two observations.", min=0.1)
    window_s: float = setting(60.0, "Time over which rates and latencies are computed; at least two scrapes.", min=1)
    planner_id: str = setting("", "Registered id, unique in the mesh. Empty: host name and process id.")
    fetch_timeout_s: float = setting(2.0, "Longest wait for one response.", min=0.01)
    discovery: DiscoverySettings = field(default_factory=DiscoverySettings)
    rpc: RpcSettings = field(default_factory=RpcSettings)
    mesh: MeshSettings = field(default_factory=MeshSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    lifecycle: LifecycleSettings = field(default_factory=LifecycleSettings)
