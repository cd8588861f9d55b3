"""Settings of the planner."""

from dataclasses import dataclass, field

from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.lifecycle import LifecycleSettings
from kvmesh.rpc.settings import RpcSettings
from kvmesh.settings import setting
from kvmesh.telemetry import TelemetrySettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """The planner's process."""

    prometheus: str = setting("", "URL of a Prometheus to ask. Empty: the services are scraped directly.")
    interval_s: float = setting(5.0, "Time between two observations.", min=0.1)
    window_s: float = setting(60.0, "Rates and latencies are those of this time; at least two scrapes long.", min=1)
    planner_id: str = setting("", "Registered id, unique in the mesh. Empty: made from host and process.")
    fetch_timeout_s: float = setting(2.0, "Longest wait for one answer.", min=0.01)
    answer_bytes_max: int = setting(16 << 20, "Longest answer that is read.", min=1024)
    fetches_max: int = setting(16, "Answers fetched at a time.", min=1)
    discovery: DiscoverySettings = field(default_factory=DiscoverySettings)
    rpc: RpcSettings = field(default_factory=RpcSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    lifecycle: LifecycleSettings = field(default_factory=LifecycleSettings)
