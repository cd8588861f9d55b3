"""Measures the CPU of one step frame over gRPC with mesh TLS and in plain text, both ends in this process: `python -m bench.tls_frames`.

"relay" is mesh TLS through `kvmesh/rpc/tls_relay.py`, for certificates without names. The modes alternate, so that a slow phase of the machine
affects all of them. Unlike wall time, CPU time hardly depends on other processes.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import grpc

from kvmesh.identity.authority import Authority
from kvmesh.identity.certificates import Certificates, CertificateSource
from kvmesh.identity.roles import ConnectNames, MeshRole, uri_of
from kvmesh.lifecycle import run
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.interceptors import server_interceptors
from kvmesh.rpc.server import RpcServer
from kvmesh.rpc.settings import RpcSettings
from kvmesh.telemetry import Telemetry

METHOD = "/kvmesh.decode.v1.DecodeService/Attach"
FRAME = bytes(700)
"""About the size of a step's frame for 128 streams."""


@dataclass(frozen=True, slots=True)
class FixedSource:
    certificates: Certificates

    def current(self) -> Certificates:
        return self.certificates


@dataclass(frozen=True, slots=True)
class Frames(grpc.GenericRpcHandler):
    """Answers each message of a stream with `count` frames."""

    count: int

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def stream(requests: Any, context: Any) -> None:
            async for _ in requests:
                for _ in range(self.count):
                    await context.write(FRAME)

        return grpc.stream_stream_rpc_method_handler(stream)


async def frame_us(count: int, server_side: CertificateSource | None, client_side: CertificateSource | None) -> float:
    """Returns the CPU microseconds of one frame, sender and receiver together."""
    server = RpcServer(
        RpcSettings(grace_s=0),
        service_names=(),
        add_services=lambda server: server.add_generic_rpc_handlers((Frames(count),)),
        interceptors=server_interceptors(Telemetry.create("worker"), server_side),
        mesh=server_side,
    )
    await server.start()
    pool = ChannelPool(settings=RpcSettings(), mesh=client_side)
    call: Any = pool.channel(server.address).stream_stream(METHOD)()
    await call.write(b"go")
    await call.read()
    began_s = time.process_time()
    for _ in range(count - 1):
        await call.read()
    used_s = time.process_time() - began_s
    call.cancel()
    await pool.aclose()
    await server.aclose()
    return 1e6 * used_s / (count - 1)


async def _main(options: argparse.Namespace) -> int:
    authority = Authority.make()
    server, client = (FixedSource(authority.issue(role)) for role in (MeshRole.DECODE, MeshRole.FRONTEND))
    names = ConnectNames(prefix=uri_of(MeshRole.DECODE).partition("/svc/")[0], domain="")
    relayed = [FixedSource(replace(each.certificates, names=names)) for each in (server, client)]
    sides = {"mesh TLS": (server, client), "relay": relayed, "plain text": (None, None)}
    found: Mapping[str, list[float]] = {mode: [] for mode in sides}
    for number in range(options.rounds):
        for mode in list(found)[:: 1 if number % 2 == 0 else -1]:
            found[mode].append(await frame_us(options.frames, *sides[mode]))
    for mode, values in found.items():
        print(f"{mode}: median {statistics.median(values):.1f} us of CPU per frame, least {min(values):.1f}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--frames", type=int, default=4000)
    return run(_main(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
