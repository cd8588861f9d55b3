"""The generated client of InferenceService."""

from typing import Any

from kvmesh.api.inference.v1.inference_pb2_grpc import InferenceServiceStub


def inference_stub(channel: Any) -> Any:
    """Its methods over a channel, of grpc or of grpc.aio."""
    return InferenceServiceStub(channel)
