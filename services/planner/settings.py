"""Settings of the planner."""

from dataclasses import dataclass, field

from kvmesh.core.planning import PoolLimits, Targets
from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.errors import InvalidRequestError
from kvmesh.identity.settings import MeshSettings
from kvmesh.lifecycle import LifecycleSettings
from kvmesh.network.settings import NetworkSettings
from kvmesh.rpc.settings import RpcSettings
from kvmesh.settings import setting
from kvmesh.telemetry import TelemetrySettings
from services.planner.connectors.compose import ComposeSettings
from services.planner.connectors.kubernetes import KubernetesSettings
from services.planner.connectors.pools import read_pools
from services.planner.decide.settings import DecideSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings:
    """Targets of every model that SetTargets gave none. Without a TTFT and an ITL target models are only observed."""

    ttft_s: float | None = setting(None, "Time to first token.", min=1e-6)
    itl_s: float | None = setting(None, "Mean time per later token of a request.", min=1e-6)
    percentile: float = setting(0.95, "Share of requests that must meet both.", min=0.01, max=0.9999)
    prefill_workers_min: int = setting(1, "Smallest prefill pool.", min=0)
    prefill_workers_max: int | None = setting(None, "Largest prefill pool; none: `decide.workers_max`.", min=0)
    prefill_cost: float = setting(1.0, "Cost of a prefill worker for an hour, in any unit.", min=1e-9)
    decode_workers_min: int = setting(1, "Smallest decode pool.", min=1)
    decode_workers_max: int | None = setting(None, "Largest decode pool; none: `decide.workers_max`.", min=1)
    decode_cost: float = setting(1.0, "Cost of a decode worker for an hour, in the same unit.", min=1e-9)
    cost_max: float | None = setting(None, "Limit of the cost of both pools per hour.", min=1e-9)

    def of_model(self, model: str) -> Targets | None:
        """Returns the targets of a model; None without any."""
        if self.ttft_s is None and self.itl_s is None:
            return None
        return Targets(
            model=model,
            ttft_s=self.ttft_s,
            itl_s=self.itl_s,
            percentile=self.percentile,
            prefill=PoolLimits(
                workers_min=self.prefill_workers_min,
                workers_max=self.prefill_workers_max,
                cost_per_worker=self.prefill_cost,
            ),
            decode=PoolLimits(
                workers_min=self.decode_workers_min,
                workers_max=self.decode_workers_max,
                cost_per_worker=self.decode_cost,
            ),
            cost_max=self.cost_max,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings(NetworkSettings):
    """The planner's process."""

    mode: str = setting(
        "observe",
        "What the planner does: `observe` reports, `dry_run` also decides, `act` also carries decisions out.",
        choices=("observe", "dry_run", "act"),
    )
    prometheus: str = setting("", "URL of a Prometheus to query. Empty: the planner scrapes the services.")
    scaler_address: str = setting("", "Address of a ScalerService that starts and stops workers.")
    connector: str = setting(
        "",
        "What changes the mesh. Empty: `scaler` with a `scaler_address`, otherwise `mesh`, which flips and deflects, while others read the"
        " sizes that the planner wants. `compose` and `kubernetes` size `pools`. `none`: nothing.",
        choices=("", "none", "mesh", "scaler", "compose", "kubernetes"),
    )
    pools: tuple[str, ...] = setting(
        (),
        "Connectors `compose` and `kubernetes`: MODEL/ROLE=UNIT or MODEL/ROLE=UNIT:MAX, with a service of compose, or a workload"
        " (NAME of a Deployment, or KIND/NAME) of Kubernetes.",
    )
    compose: ComposeSettings = field(default_factory=ComposeSettings)
    kubernetes: KubernetesSettings = field(default_factory=KubernetesSettings)
    budget_max: float | None = setting(
        None, "Limit of the cost of the workers of all models per hour. `targets.cost_max` limits each model.", min=1e-9
    )
    interval_s: float = setting(
        5.0,
        "Time between two observations, and decisions. 1 s lets a planner that acts answer a burst at once.",
        min=0.1,
    )
    window_s: float = setting(60.0, "Time over which rates and latencies are computed; at least two scrapes.", min=1)
    history_s: float = setting(
        3600.0, "Past load that predictions start from; only with `prometheus`. 0: none.", min=0, max=30 * 86_400
    )
    history_file: str = setting(
        "",
        'JSON file with past request rates by model, oldest first, one per `decide.interval_s`: {"MODEL": [1.5, 2.0]}. Instead of `history_s`.',
    )
    age_s_max: float = setting(30.0, "Age from which on samples are too old to act on.", min=1)
    planner_id: str = setting("", "Registered id, unique in the mesh. Empty: host name and process id.")
    fetch_timeout_s: float = setting(2.0, "Longest wait for one response.", min=0.01)
    targets: TargetSettings = field(default_factory=TargetSettings)
    decide: DecideSettings = field(default_factory=DecideSettings)
    discovery: DiscoverySettings = field(default_factory=DiscoverySettings)
    rpc: RpcSettings = field(default_factory=RpcSettings)
    mesh: MeshSettings = field(default_factory=MeshSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    lifecycle: LifecycleSettings = field(default_factory=LifecycleSettings)

    def __post_init__(self) -> None:
        if self.connector in ("compose", "kubernetes"):
            read_pools(self.pools, field="pools")
        if self.connector == "scaler" and not self.scaler_address:
            raise InvalidRequestError("the connector scaler needs scaler_address", field="scaler_address")
