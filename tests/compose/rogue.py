"""Attacks the stack's network from a container without credentials. Runs in an image of kvmesh; prints the results as JSON.

The arguments are a token of Consul that was stolen from a worker, a worker's `host:port`, its id, and the `host:port` at which it listens for KV
transfers.
"""

import json
import socket
import sys
import threading
import time
import urllib.error
import urllib.request

import grpc

from kvmesh.api.worker.v1 import worker_pb2, worker_pb2_grpc
from kvmesh.identity.authority import Authority
from kvmesh.identity.roles import SERVER_NAME, MeshRole

CONSUL = "http://consul:8500"
TIMEOUT_S = 60.0
"""A refusal takes milliseconds. On a busy machine a shorter timeout may end a call before the refusal."""
WATCH_S = 8.0
"""Routers and frontends read the registry at once and connect to new instances."""


def call_consul(method: str, path: str, body: object = None, token: str = "") -> int:
    """Calls Consul. Returns the status."""
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(CONSUL + path, data=data, headers={"X-Consul-Token": token}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def drain(address: str, credentials: grpc.ChannelCredentials | None) -> str:
    """Calls Drain of the worker. Returns the status code."""
    options = [("grpc.ssl_target_name_override", SERVER_NAME)]
    channel = (
        grpc.secure_channel(address, credentials, options) if credentials else grpc.insecure_channel(address, options)
    )
    with channel:
        try:
            worker_pb2_grpc.WorkerServiceStub(channel).Drain(worker_pb2.DrainRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def connect(address: str) -> bool:
    """Returns whether a port accepts connections."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
    except OSError:
        return False
    return True


def forged() -> grpc.ChannelCredentials:
    """Returns an operator's certificate of another authority."""
    own = Authority.make().issue(MeshRole.OPERATOR)
    # The attacker trusts any server; the worker must not trust the attacker.
    return grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)


def registration(port: int) -> dict[str, object]:
    """Returns the registration of a decode worker in this container. It lacks a seal."""
    return {
        "ID": "rogue-1",
        "Name": "kvmesh-decode",
        "Address": socket.gethostbyname(socket.gethostname()),
        "Port": port,
        "Meta": {"role": "decode", "model": "demo", "version": "0.1.0"},
        "Check": {"TTL": "60s", "Status": "passing"},
    }


class ConnectionCounter:
    """Counts connections to a port."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("0.0.0.0", 0))
        self.port = int(self._socket.getsockname()[1])
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            self._socket.accept()[0].close()
            self.connections += 1


def main() -> int:
    stolen, worker, worker_id, kv = sys.argv[1:]
    counter = ConnectionCounter()
    outcome: dict[str, object] = {
        "register": call_consul("PUT", "/v1/agent/service/register", registration(counter.port)),
        "write a key": call_consul("PUT", "/v1/kv/kvmesh/rogue", "x"),
        "remove a worker": call_consul("PUT", f"/v1/agent/service/deregister/{worker_id}"),
        "mark a worker": call_consul("PUT", f"/v1/agent/service/maintenance/{worker_id}?enable=true"),
        "drain in plain text": drain(worker, None),
        "drain without a certificate": drain(worker, grpc.ssl_channel_credentials()),
        "drain with a forged certificate": drain(worker, forged()),
        "connect to its KV port": connect(kv),
        "register with a stolen token": call_consul(
            "PUT", "/v1/agent/service/register", registration(counter.port), token=stolen
        ),
    }
    time.sleep(WATCH_S)
    outcome["connections"] = counter.connections
    call_consul("PUT", "/v1/agent/service/deregister/rogue-1", token=stolen)
    print(json.dumps(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main())
