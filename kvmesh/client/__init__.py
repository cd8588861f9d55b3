"""Clients of a mesh's gRPC API: `Client` blocks, `AsyncClient` is for asyncio. Same methods, same errors (`kvmesh.errors`).

with Client("127.0.0.1:50051") as client:
    answer = client.chat("demo", [{"role": "user", "content": "Hello"}], sampling=SamplingParams(max_tokens=32))
    print(answer.text)
"""

from kvmesh.client.aio import AsyncClient, AsyncStream
from kvmesh.client.answer import Answer, Choice, ToolCall
from kvmesh.client.settings import ClientSettings, RetryPolicy
from kvmesh.client.sync import Client, Stream
from kvmesh.core import Constraint, ConstraintKind, SamplingParams, Usage
from kvmesh.rpc.codec.client_batches import Batch, BatchAnswer, BatchProblem
from kvmesh.rpc.codec.client_inference import Embedded, ModelInfo, Piece
from kvmesh.rpc.codec.inference import Options

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "Batch",
    "BatchAnswer",
    "BatchProblem",
    "Choice",
    "Client",
    "ClientSettings",
    "Constraint",
    "ConstraintKind",
    "Embedded",
    "ModelInfo",
    "Options",
    "Piece",
    "RetryPolicy",
    "SamplingParams",
    "Stream",
    "ToolCall",
    "Usage",
]
