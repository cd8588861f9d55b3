"""A transport in memory behind grpc.aio's own interface, for whole meshes on one event loop and on virtual time.

    network = MemoryNetwork()
    server = network.server("worker-1:1")
    add_WorkerServiceServicer_to_server(servicer, server)
    await server.start()
    stub = WorkerServiceStub(network.channel("worker-1:1"))

It uses no threads, no sockets and no clock but the loop's. `tests/conformance/test_channel.py` holds it to what
grpc.aio does.
"""

from kvmesh.simulation.rpc.channel import MemoryChannel
from kvmesh.simulation.rpc.network import MemoryNetwork, MemoryPool
from kvmesh.simulation.rpc.server import MemoryServer

__all__ = ["MemoryChannel", "MemoryNetwork", "MemoryPool", "MemoryServer"]
