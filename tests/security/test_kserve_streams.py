"""A ModelStreamInfer call carries requests for hours. Each request needs a key that is still valid, and counts against the quotas if it is
refused."""

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kvmesh.api.inference import grpc_service_pb2 as pb
from kvmesh.api.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from kvmesh.api.inference.v1 import inference_pb2
from kvmesh.api.inference.v1.inference_pb2_grpc import InferenceServiceStub
from services.frontend.models import ServedModel
from tests.patience import PATIENCE_S
from tests.security.rig import frontend, write_keys

GOOD = (("authorization", "Bearer good"),)


def infer(**parameters: int) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="tiny", id="1")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"Hi")
    for name, value in parameters.items():
        request.parameters[name].int64_param = value
    return request


async def ask(stream: Any, request: pb.ModelInferRequest) -> str:
    """Sends a request. Returns the error message; empty if the request was answered."""
    await stream.write(request)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            response = await stream.read()
            if response.error_message:
                return str(response.error_message)
            if response.infer_response.parameters["triton_final_response"].bool_param:
                return ""


async def test_a_key_that_is_removed_ends_its_streams_too(model: ServedModel, tmp_path: Path) -> None:
    """The next request of a call that began with the removed key is refused."""
    path = write_keys(tmp_path / "keys.json", [{"tenant": "acme", "key": "good"}, {"tenant": "acme", "key": "left"}])
    async with frontend(model, keys=path) as rig, grpc.aio.insecure_channel(rig.rpc_address) as channel:
        stream = GRPCInferenceServiceStub(channel).ModelStreamInfer(metadata=GOOD)
        assert await ask(stream, infer(max_tokens=2)) == ""
        write_keys(path, [{"tenant": "acme", "key": "left"}])
        await rig.pipeline.access.start()
        assert "unknown" in await ask(stream, infer(max_tokens=2))
        stream.cancel()


@pytest.mark.parametrize("limit", [{"requests_per_minute": 3}, {"tokens_per_minute": 100}])
async def test_refused_requests_of_a_stream_are_charged(
    model: ServedModel, tmp_path: Path, limit: dict[str, int]
) -> None:
    """The quota is checked for each request, not only at the start of the call."""
    path = write_keys(tmp_path / "keys.json", [{"tenant": "acme", "key": "good", **limit}])
    async with frontend(model, keys=path) as rig, grpc.aio.insecure_channel(rig.rpc_address) as channel:
        stream = GRPCInferenceServiceStub(channel).ModelStreamInfer(metadata=GOOD)
        refused = infer(nonsense=1, **{"x" * 100: 2})
        words = [await ask(stream, refused) for _ in range(50)]
        assert "a minute" not in words[0] and "a minute" in words[-1]
        stream.cancel()


@pytest.mark.parametrize("limit", [{"requests_per_minute": 3}, {"tokens_per_minute": 1000}])
@pytest.mark.parametrize("method", ["Generate", "Chat", "Embed", "Tokenize", "Detokenize", "ModelInfer"])
async def test_refused_calls_are_charged(
    model: ServedModel, tmp_path: Path, limit: dict[str, int], method: str
) -> None:
    """As over HTTP, a refused call counts as one request, and its bytes count as tokens."""
    path = write_keys(tmp_path / "keys.json", [{"tenant": "acme", "key": "good", **limit}])
    kind: Any = pb.ModelInferRequest if method == "ModelInfer" else getattr(inference_pb2, f"{method}Request")
    request = kind(**{"model_name" if method == "ModelInfer" else "model": "x" * 10_000})
    async with frontend(model, keys=path) as rig, grpc.aio.insecure_channel(rig.rpc_address) as channel:
        stub: Any = (GRPCInferenceServiceStub if method == "ModelInfer" else InferenceServiceStub)(channel)
        codes = [await getattr(stub, method)(request, metadata=GOOD).code() for _ in range(6)]
        assert codes[0] is grpc.StatusCode.INVALID_ARGUMENT and codes[-1] is grpc.StatusCode.RESOURCE_EXHAUSTED
