"""Features of the in-memory transport only: faults, seeded latency and virtual time."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from kvmesh.api.worker.v1 import worker_pb2, worker_pb2_grpc
from kvmesh.simulation.rpc import MemoryNetwork
from tests.virtual_loop import run_virtual


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self) -> None:
        self.events: list[str] = []

    def note(self, words: str) -> None:
        self.events.append(f"{words} {asyncio.get_running_loop().time():g}")

    async def Wake(self, request: Any, context: Any) -> Any:
        self.note("wake")
        return worker_pb2.WakeResponse()

    async def Describe(self, request: Any, context: Any) -> Any:
        return request

    async def Drain(self, request: Any, context: Any) -> Any:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            self.note("cancelled")
            raise

    async def WatchKv(self, request: Any, context: Any) -> AsyncIterator[Any]:
        for sequence in range(5):
            yield worker_pb2.WatchKvResponse(sequence=sequence)
            await asyncio.sleep(1)


async def serve(network: MemoryNetwork, address: str = "w:1") -> tuple[Worker, Any]:
    worker, server = Worker(), network.server(address)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    await server.start()
    return worker, worker_pb2_grpc.WorkerServiceStub(network.channel(address))


async def code_of(call: Any) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def now() -> float:
    return asyncio.get_running_loop().time()


def test_kill_and_restart() -> None:
    """Running and new calls fail immediately with UNAVAILABLE until a new server listens at the address."""

    async def main() -> list[str]:
        network = MemoryNetwork()
        worker, stub = await serve(network)
        call = stub.Drain(worker_pb2.DrainRequest())
        await asyncio.sleep(1)
        network.kill("w:1")
        assert await code_of(call) is grpc.StatusCode.UNAVAILABLE
        assert await code_of(stub.Wake(worker_pb2.WakeRequest())) is grpc.StatusCode.UNAVAILABLE
        waiting = stub.Wake(worker_pb2.WakeRequest(), wait_for_ready=True, timeout=100)
        await asyncio.sleep(9)
        again, _ = await serve(network)
        assert await code_of(waiting) is grpc.StatusCode.OK
        return worker.events + again.events

    assert run_virtual(main()) == ["cancelled 1", "wake 10"]


def test_a_partition_is_silent_and_heals() -> None:
    """No call fails before its deadline. Messages sent during the partition arrive in order after it."""

    async def main() -> list[Any]:
        network = MemoryNetwork(keepalive_s=None)
        worker, stub = await serve(network)
        stream = stub.WatchKv(worker_pb2.WatchKvRequest())
        first = await stream.read()
        drain = stub.Drain(worker_pb2.DrainRequest())
        await asyncio.sleep(0.5)
        network.partition("w:1")
        assert await code_of(stub.Wake(worker_pb2.WakeRequest(), timeout=2)) is grpc.StatusCode.DEADLINE_EXCEEDED
        held = stub.Wake(worker_pb2.WakeRequest())
        drain.cancel()
        await asyncio.sleep(10)
        assert worker.events == []
        network.heal("w:1")
        assert await code_of(held) is grpc.StatusCode.OK
        assert now() == pytest.approx(12.5)
        rest = [each.sequence async for each in _rest(stream)]
        return [first.sequence, *rest, *worker.events]

    assert run_virtual(main()) == [0, 1, 2, 3, 4, "cancelled 12.5", "wake 12.5"]


def test_keepalive_ends_a_long_partition() -> None:
    """Calls from before and during the partition fail with UNAVAILABLE after the keepalive, and the servicer is cancelled."""

    async def main() -> list[Any]:
        network = MemoryNetwork(keepalive_s=30)
        worker, stub = await serve(network)
        old = stub.Drain(worker_pb2.DrainRequest())
        await asyncio.sleep(1)
        network.partition("w:1")
        assert await code_of(old) is grpc.StatusCode.UNAVAILABLE
        ends_s = [now()]
        assert await code_of(stub.Wake(worker_pb2.WakeRequest())) is grpc.StatusCode.UNAVAILABLE
        return [*ends_s, now(), *worker.events]

    assert run_virtual(main()) == [31, 61, "cancelled 31"]


def test_latency_applies_to_each_message_in_order() -> None:
    """A unary call has the latency of one request and one response. Messages stay in order with any latencies."""

    async def main() -> tuple[float, list[int]]:
        _, stub = await serve(network := MemoryNetwork(latency_s=lambda: 0.5))
        await stub.Wake(worker_pb2.WakeRequest())
        took_s = now()
        shaky = MemoryNetwork(latency_s=random.Random(1).random)
        _, stub = await serve(shaky)
        del network
        return took_s, [each.sequence async for each in stub.WatchKv(worker_pb2.WatchKvRequest())]

    took_s, order = run_virtual(main())
    assert took_s == pytest.approx(1.0)
    assert order == [0, 1, 2, 3, 4]


def test_a_run_repeats_exactly_from_a_seed() -> None:
    """The same seed gives the same history and exactly the same times. Another seed gives a different history."""

    async def main(seed: int) -> list[Any]:
        network = MemoryNetwork(latency_s=random.Random(seed).random)
        workers = [await serve(network, f"w:{port}") for port in range(4)]
        history: list[Any] = []

        async def client(number: int) -> None:
            for turn in range(20):
                _, stub = workers[(number + turn) % 4]
                code = await code_of(stub.Wake(worker_pb2.WakeRequest(), timeout=1.2))
                history.append((number, turn, code.name, now()))

        await asyncio.gather(*(client(number) for number in range(8)))
        return history + [worker.events for worker, _ in workers]

    assert run_virtual(main(1)) == run_virtual(main(1))
    assert run_virtual(main(1)) != run_virtual(main(2))


def test_messages_are_serialised_by_default() -> None:
    """A servicer never shares an object with a client, except in pass-through mode."""

    async def main(is_serialising: bool) -> tuple[bool, bool]:
        network = MemoryNetwork(is_serialising=is_serialising)
        seen: list[Any] = []

        class RecordingServicer(worker_pb2_grpc.WorkerServiceServicer):
            async def Wake(self, request: Any, context: Any) -> Any:
                seen.append(request)
                return worker_pb2.WakeResponse()

        server = network.server("w:1")
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(RecordingServicer(), server)
        await server.start()
        request = worker_pb2.WakeRequest()
        await worker_pb2_grpc.WorkerServiceStub(network.channel("w:1")).Wake(request)
        return seen[0] is request, seen[0] == request

    assert run_virtual(main(True)) == (False, True)
    assert run_virtual(main(False)) == (True, True)


def test_stop_gives_grace() -> None:
    """Calls that end within the grace period succeed. Others fail with UNAVAILABLE when the server stops."""

    async def main() -> list[Any]:
        worker, server = Worker(), (network := MemoryNetwork()).server("w:1")
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
        await server.start()
        stub = worker_pb2_grpc.WorkerServiceStub(network.channel("w:1"))
        stream, drain = stub.WatchKv(worker_pb2.WatchKvRequest()), stub.Drain(worker_pb2.DrainRequest())
        stopping = asyncio.create_task(server.stop(20))
        await asyncio.sleep(0)
        refused = await code_of(stub.Wake(worker_pb2.WakeRequest()))
        got = [each.sequence async for each in stream]
        return [got, refused.name, (await code_of(drain)).name, await stopping, now(), worker.events]

    assert run_virtual(main()) == [[0, 1, 2, 3, 4], "UNAVAILABLE", "UNAVAILABLE", None, 20.0, ["cancelled 20"]]


async def _rest(stream: Any) -> AsyncIterator[Any]:
    while (each := await stream.read()) is not grpc.aio.EOF:
        yield each


def test_a_partition_may_affect_a_single_client() -> None:
    """A partition of one client also affects its later channels, but no other clients. A partition of the address affects all clients."""

    async def main() -> list[Any]:
        network = MemoryNetwork(keepalive_s=None)
        await serve(network)
        first, second = (
            worker_pb2_grpc.WorkerServiceStub(network.channel("w:1", client=client)) for client in ("a", "b")
        )
        network.partition("w:1", client="a")
        request = worker_pb2.WakeRequest()
        codes = [await code_of(stub.Wake(request, timeout=1)) for stub in (first, second)]
        network.partition("w:1")
        network.heal("w:1", client="a")
        codes += [await code_of(stub.Wake(request, timeout=1)) for stub in (first, second)]
        network.heal("w:1")
        return codes + [await code_of(stub.Wake(request, timeout=1)) for stub in (first, second)]

    late, ok = grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.OK
    assert run_virtual(main()) == [late, ok, late, late, ok, ok]
