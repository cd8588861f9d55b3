"""Simulations."""

from kvmesh.api.planner.v1 import planner_pb2 as pb
from kvmesh.api.types.v1 import model_pb2
from kvmesh.checks import check_length, check_range
from kvmesh.core import PerformanceProfile
from kvmesh.core.whatif import RecordedLoad, RecordedRequest, SimulationOutcome, SimulationRequest, SteadyLoad
from kvmesh.errors import InvalidRequestError
from kvmesh.rpc.codec.message_codec import MessageCodec
from kvmesh.rpc.codec.planner import ALTERNATIVE, SHAPE, check_targets, to_targets
from kvmesh.rpc.codec.planner import from_targets as _from_targets
from kvmesh.rpc.codec.scalars import required_text

REQUESTS_MAX = 50_000
"""Of a record, and of a steady load."""
TOKENS_MAX = 10_000_000
DURATION_S_MAX = 86_400.0
SIMULATED_WORKERS_MAX = 1000
_STEADY = MessageCodec(pb.SteadyLoad, SteadyLoad)
_RECORDED = MessageCodec(pb.RecordedLoad, RecordedLoad, requests=MessageCodec(pb.RecordedRequest, RecordedRequest))
_PROFILE = MessageCodec(model_pb2.PerformanceProfile, PerformanceProfile)
_REQUEST = MessageCodec(
    pb.SimulateRequest,
    SimulationRequest,
    steady=_STEADY,
    recorded=_RECORDED,
    targets=(to_targets, _from_targets),
    profile=_PROFILE,
)
_OUTCOME = MessageCodec(pb.SimulateResponse, SimulationOutcome, shape=SHAPE, expected=ALTERNATIVE)
to_simulation_request = _REQUEST.encode
to_simulation_outcome, from_simulation_outcome = _OUTCOME.encode, _OUTCOME.decode


def from_simulation_request(message: pb.SimulateRequest) -> SimulationRequest:
    """Raises InvalidRequestError, which names the field."""
    request = _REQUEST.decode(message)
    check_simulation(request)
    return request


def check_simulation(request: SimulationRequest) -> None:
    """Raises InvalidRequestError for a value that is out of range."""
    required_text(request.model, field="model", characters_max=256)
    if request.steady is not None:
        _check_steady(request.steady)
    elif request.recorded is not None:
        _check_recorded(request.recorded)
    else:
        raise InvalidRequestError("load is required: steady or recorded", field="load")
    if request.targets is not None:
        check_targets(request.targets)
    check_range(request.prefill_workers, "prefill_workers", low=0, high=SIMULATED_WORKERS_MAX)
    check_range(request.decode_workers, "decode_workers", low=1, high=SIMULATED_WORKERS_MAX)
    if request.profile is not None:
        for name in PerformanceProfile.__dataclass_fields__:
            low = 1.0 if name == "kv_bytes_per_token" else 0.0
            check_range(getattr(request.profile, name), f"profile.{name}", low=low, high=1e15)
        check_range(request.profile.transfer_bytes_per_s, "profile.transfer_bytes_per_s", low=1, high=1e15)


def _check_steady(load: SteadyLoad) -> None:
    check_range(load.requests_per_s, "steady.requests_per_s", low=0, high=1e6, above=True)
    check_range(load.prompt_tokens, "steady.prompt_tokens", low=1, high=TOKENS_MAX)
    check_range(load.output_tokens, "steady.output_tokens", low=1, high=TOKENS_MAX)
    check_range(load.duration_s, "steady.duration", low=0, high=DURATION_S_MAX, above=True)
    check_range(load.prompt_variation, "steady.prompt_variation", low=0, high=10)
    check_range(load.output_variation, "steady.output_variation", low=0, high=10)
    count = load.requests_per_s * load.duration_s
    if count > REQUESTS_MAX:
        raise InvalidRequestError(
            f"steady.requests_per_s times steady.duration must be at most {REQUESTS_MAX} requests, not {count:.0f}",
            field="steady.duration",
        )


def _check_recorded(load: RecordedLoad) -> None:
    check_length(len(load.requests), "recorded.requests", low=1, high=REQUESTS_MAX)
    before_s = 0.0
    for i, request in enumerate(load.requests):
        field = f"recorded.requests[{i}]"
        check_range(request.at_s, f"{field}.at", low=before_s, high=DURATION_S_MAX)
        check_range(request.prompt_tokens, f"{field}.prompt_tokens", low=1, high=TOKENS_MAX)
        check_range(request.output_tokens, f"{field}.output_tokens", low=1, high=TOKENS_MAX)
        before_s = request.at_s
