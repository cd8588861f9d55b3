"""Settings that prefill and decode workers share."""

from dataclasses import dataclass

from kvmesh.settings import setting


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Limits of one worker. Times in seconds."""

    legs_max: int = setting(1024, "requests accepted at once over all links; beyond it requests are shed", min=1)
    submissions_max: int = setting(1024, "requests one frontend stream may have in flight", min=1)
    request_timeout_s: float = setting(600.0, "longest life of a request that states no deadline", min=0.1)
    drain_timeout_s: float = setting(30.0, "longest wait for requests in flight when draining", min=0.0)
    heartbeat_s: float = setting(2.0, "longest silence on a frontend stream; a frontend gives up after three", min=0.05)
    load_interval_s: float = setting(1.0, "longest silence on a load watch; a router gives up after three", min=0.05)
    kv_history_batches: int = setting(4096, "KV-event batches kept for routers that resume", min=1)
    kv_watch_buffer_batches: int = setting(8192, "KV-event batches a slow router may lag behind", min=1)
    link_buffer_frames: int = setting(
        4096, "step frames a slow frontend may lag behind before its stream is ended", min=1
    )
    lease_check_s: float = setting(0.5, "how often expired leases and deadlines are looked for", min=0.01)
