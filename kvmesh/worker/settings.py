"""Settings that prefill and decode workers share."""

import re
from dataclasses import dataclass, make_dataclass
from typing import TYPE_CHECKING, Any

from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.engines.registry import ENGINES
from kvmesh.identity.settings import MeshSettings
from kvmesh.kv.settings import KvSettings
from kvmesh.network.settings import NetworkSettings
from kvmesh.rpc.settings import RpcSettings
from kvmesh.settings import group, internal, required, setting
from kvmesh.telemetry import TelemetrySettings
from kvmesh.worker.profile import ProfileSettings

_LABEL = re.compile(r"[A-Za-z0-9._-]{1,64}=[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Limits of one worker. Times in seconds."""

    legs_max: int = setting(1024, "requests accepted at once over all links; beyond it requests are shed", min=1)
    submissions_max: int = setting(1024, "requests one frontend stream may have in flight", min=1)
    request_timeout_s: float = setting(600.0, "longest life of a request that states no deadline", min=0.1)
    drain_timeout_s: float = setting(30.0, "longest wait for requests in flight when draining", min=0.0)
    heartbeat_s: float = setting(
        0.6,
        "longest silence on a frontend stream; after three a frontend starts requests without a token elsewhere, after ten it gives"
        " the others up",
        min=0.05,
    )
    load_interval_s: float = internal(1.0, "longest silence on a load watch; a router gives up after three")
    warm_up: bool = setting(
        True,
        "before it registers, a worker runs a short prompt and checks a handoff with one worker of the other pool;"
        " false: the first requests do that",
    )
    cancel_timeout_s: float = setting(
        60.0,
        "longest time in which the engine ends a cancelled leg; longer than any of its steps. Then it is wedged: the worker ends with an"
        " error, and its supervisor starts it again",
        min=0.1,
    )
    link_buffer_frames: int = internal(4096, "step frames a slow frontend may lag behind before its stream is ended")
    lease_check_s: float = internal(0.5, "how often expired leases and deadlines are looked for")
    labels: tuple[str, ...] = setting(
        (),
        "NAME=VALUE each; requests can ask for them, and `zone=...` tells the router how near workers are to each other",
    )
    profile: ProfileSettings = group(ProfileSettings)

    def __post_init__(self) -> None:
        """Labels become part of registry keys, so their characters are few."""
        for label in self.labels:
            if not _LABEL.fullmatch(label):
                raise ValueError(f"labels: {label!r} is not NAME=VALUE of A-Z a-z 0-9 . _ -, 64 characters each")

    @property
    def label_values(self) -> dict[str, str]:
        return dict(label.split("=", 1) for label in self.labels)


@dataclass(frozen=True, kw_only=True)
class _CommonSettings(NetworkSettings):
    """Settings of a worker process, whatever its engine."""

    model: str = required("model directory in Hugging Face layout, or a name the engine can fetch")
    engine: str = setting("vllm", "engine to run", choices=tuple(ENGINES))
    served_name: str = setting("", "name clients ask for; empty: the last part of the model's name")
    worker_id: str = setting("", "unique in the mesh; empty: made of role, host and process id")
    waiting_prompt_tokens_max: int = setting(
        262144, "prefill workers: prompt tokens that may wait; beyond it prompts are shed; 0: no limit", min=0
    )
    waiting_requests_max: int = setting(
        1024,
        "decode workers: requests that may wait for a place in the batch; beyond it they are shed; 0: no limit",
        min=0,
    )
    worker: WorkerSettings = group(WorkerSettings)
    kv: KvSettings = group(KvSettings)
    rpc: RpcSettings = group(RpcSettings)
    mesh: MeshSettings = group(MeshSettings)
    discovery: DiscoverySettings = group(DiscoverySettings)
    telemetry: TelemetrySettings = group(TelemetrySettings)

    @property
    def engine_settings(self) -> Any:
        """Settings of the engine that runs: the group of its name."""
        return getattr(self, self.engine)


if TYPE_CHECKING:
    HostSettings = _CommonSettings
else:
    # A group of settings per engine, by its name, so that a new engine is declared in ENGINES only.
    HostSettings = make_dataclass(
        "HostSettings",
        [
            (engine.name, engine.settings_type, group(engine.make_settings, without=engine.set_by_host))
            for engine in ENGINES.values()
        ],
        bases=(_CommonSettings,),
        frozen=True,
        kw_only=True,
    )
