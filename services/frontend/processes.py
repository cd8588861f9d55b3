"""Runs several frontend processes on one HTTP port: with SO_REUSEPORT the kernel spreads connections over them.

Each is a whole frontend: it registers itself, has its own gRPC and metrics ports unless these are set, and shares only the
state directory. A gRPC port that is set is shared in the same way. A metrics port that is set belongs to the first process;
the others count up from it.
"""

import asyncio
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace

from kvmesh.clock import Clock
from kvmesh.identity.credentials import with_credentials
from kvmesh.identity.roles import MeshRole
from kvmesh.lifecycle import STOP_TIMEOUT_S, Supervisor, stop_on_signals
from kvmesh.network.place import place_service
from services.frontend.settings import FrontendSettings


async def supervise(settings: FrontendSettings, argv: Sequence[str], clock: Clock) -> None:
    """Runs `settings.processes` processes with this process's flags until a signal."""
    # Each process takes its own ports from the range.
    http = place_service(with_credentials(replace(settings, port_range=""), MeshRole.FRONTEND)).http
    stop, hurry = asyncio.Event(), asyncio.Event()
    with stop_on_signals(stop, hurry), reserved_port(http.host, http.port) as holder:
        port = holder.getsockname()[1]
        commands = [process_command(settings, argv, number=number, port=port) for number in range(settings.processes)]
        supervisor = Supervisor(commands, clock=clock, stop_timeout_s=stop_timeout_s(settings))
        await supervisor.run(stop=stop, hurry=hurry)


def process_command(settings: FrontendSettings, argv: Sequence[str], *, number: int, port: int) -> list[str]:
    """Returns the command line of one process: the common flags, then its own. If a flag occurs twice, the last one counts."""
    own = ["--http-port", str(port)]
    if settings.instance_id:
        own += ["--instance-id", f"{settings.instance_id}-{number}"]
    if settings.telemetry.metrics_port:
        own += ["--telemetry-metrics-port", str(settings.telemetry.metrics_port + number)]
    return [sys.executable, "-m", "services.frontend.shared_port", *argv, *own]


def stop_timeout_s(settings: FrontendSettings) -> float:
    """Returns the longest time of an orderly stop of one process, including closing its parts."""
    return settings.pipeline.drain_notice_s + settings.lifecycle.drain_timeout_s + 2 * STOP_TIMEOUT_S


def reserved_port(host: str, port: int) -> socket.socket:
    """Returns a bound socket that reserves the port while processes restart. It never listens, so it gets no connection.

    Raises OSError if the port is in use, also by another set of processes.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    if port:
        # Without SO_REUSEPORT binding fails if another program uses the port; with it the kernel would share it silently.
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _bind(probe, address)
    holder = socket.socket(family, kind, protocol)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _bind(holder, address)
    except OSError:
        holder.close()
        raise
    return holder


def _bind(endpoint: socket.socket, address: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]) -> None:
    try:
        endpoint.bind(address)
    except OSError as error:
        raise OSError(f"cannot listen on {address[0]!s}:{address[1]!s}: {error.strerror}") from error
