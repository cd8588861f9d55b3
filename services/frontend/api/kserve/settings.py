"""Settings of the Open Inference Protocol."""

from dataclasses import dataclass

from kvmesh.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class KserveSettings:
    """Limits of KServe v2 calls."""

    is_on: bool = setting(True, "Serve GRPCInferenceService (KServe v2) beside InferenceService.")
    stream_requests_max: int = setting(
        64, "Requests of one ModelStreamInfer call in flight; the next one is read when there is room.", min=1
    )
