"""KEDA's external scaler contract over gRPC: the sizes that the planner publish_sizes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from kvmesh.api.externalscaler import externalscaler_pb2 as pb
from kvmesh.api.externalscaler.externalscaler_pb2_grpc import ExternalScalerStub
from kvmesh.clock import SystemClock
from kvmesh.core.planning import Alternative, Decision, DecisionAction, Shape
from kvmesh.rpc.interceptors import server_interceptors
from kvmesh.simulation.registry import MemoryAgent
from kvmesh.telemetry import Telemetry
from services.planner.keda.servicer import ExternalScalerServicer
from services.planner.metrics import PlannerMetrics
from services.planner.observe import Observation
from services.planner.planner import Planner
from services.planner.settings import PlannerSettings
from tests.patience import PATIENCE_S


class EmptySource:
    """A source without observations."""

    name = "scrape"

    async def observe(self, instances: object) -> Observation:
        return Observation(window=None)

    async def history(self, *, span_s: float, step_s: float) -> dict[str, list[float]]:
        return {}


@asynccontextmanager
async def planner_and_stub() -> AsyncIterator[tuple[Planner, Any]]:
    clock, telemetry = SystemClock(), Telemetry.create("planner")
    registry = MemoryAgent(clock=clock).registry()
    planner = Planner(
        registry=registry,
        source=EmptySource(),
        metrics=PlannerMetrics(telemetry.instruments),
        clock=clock,
        settings=PlannerSettings(),
    )
    server = grpc.aio.server(interceptors=server_interceptors(telemetry))
    ExternalScalerServicer(planner).add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield planner, ExternalScalerStub(channel)  # type: ignore[no-untyped-call]
    finally:
        await planner.aclose()
        await server.stop(None)


def publish_sizes(planner: Planner, prefill: int, decode: int) -> None:
    shape = Shape(prefill_workers=prefill, decode_workers=decode)
    decision = Decision(
        number=1,
        model="Llama-3.1",
        decided_at_s=0.0,
        action=DecisionAction.SCALE,
        reason="prefill_short",
        alternatives=(Alternative(action=DecisionAction.SCALE, shape=shape),),
    )
    planner._publish(replace(planner.newest, decisions=(decision,)))


def trigger(role: str = "prefill", model: str = "Llama-3.1") -> pb.ScaledObjectRef:
    metadata = {"scalerAddress": "planner:50100", "model": model, "role": role}
    return pb.ScaledObjectRef(name="scaled", namespace="inference", scalerMetadata=metadata)


async def test_keda_reads_the_wanted_workers() -> None:
    """The target is one worker per replica, so that an autoscaler with AverageValue runs as many replicas as the planner wants workers."""
    async with planner_and_stub() as (planner, stub):
        publish_sizes(planner, 3, 0)
        [spec] = (await stub.GetMetricSpec(trigger(), timeout=PATIENCE_S)).metricSpecs
        assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == ("kvmesh-llama-3-1-prefill-workers", 1, 1.0)
        request = pb.GetMetricsRequest(scaledObjectRef=trigger(), metricName=spec.metricName)
        [value] = (await stub.GetMetrics(request, timeout=PATIENCE_S)).metricValues
        assert (value.metricName, value.metricValue, value.metricValueFloat) == (spec.metricName, 3, 3.0)
        assert (await stub.IsActive(trigger(), timeout=PATIENCE_S)).result
        assert not (await stub.IsActive(trigger("decode"), timeout=PATIENCE_S)).result


async def test_the_stream_sends_changes_of_activity_only() -> None:
    """The first response is sent with the first plan of the pool. A change from 2 to 3 workers does not change the activity."""
    async with planner_and_stub() as (planner, stub):
        call = stub.StreamIsActive(trigger(), timeout=PATIENCE_S)
        answers = aiter(call)
        first = asyncio.ensure_future(anext(answers))
        publish_sizes(planner, 2, 1)
        assert (await first).result
        publish_sizes(planner, 3, 1)
        await asyncio.sleep(0)
        publish_sizes(planner, 0, 1)
        assert not (await anext(answers)).result
        call.cancel()


@pytest.mark.parametrize(
    ("reference", "code", "word"),
    [
        (trigger(role="router"), grpc.StatusCode.INVALID_ARGUMENT, "role"),
        (trigger(model=""), grpc.StatusCode.INVALID_ARGUMENT, "model"),
        (trigger(model="other"), grpc.StatusCode.UNAVAILABLE, "no plan"),
    ],
)
async def test_an_invalid_trigger_is_reported(reference: pb.ScaledObjectRef, code: grpc.StatusCode, word: str) -> None:
    """The error names the invalid metadata. Without a plan the status is UNAVAILABLE, so that KEDA keeps the replicas."""
    async with planner_and_stub() as (planner, stub):
        publish_sizes(planner, 1, 1)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.IsActive(reference, timeout=PATIENCE_S)
        assert error.value.code() is code
        assert word in (error.value.details() or "")
        request = pb.GetMetricsRequest(scaledObjectRef=trigger(), metricName="another")
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stub.GetMetrics(request, timeout=PATIENCE_S)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
