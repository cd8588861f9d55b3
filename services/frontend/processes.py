"""Several frontend processes on one HTTP port: SO_REUSEPORT has the kernel spread connections over them.

Each is a whole frontend: it registers by itself, has its own gRPC and metrics ports unless these are given, and shares only
the state directory. gRPC shares a given port in the same way; a given metrics port is the first one's, the next ones count up.
"""

import asyncio
import socket
import sys
from collections.abc import Sequence

from kvmesh.clock import Clock
from kvmesh.lifecycle import Supervisor, stop_on_signals
from services.frontend.settings import FrontendSettings


async def supervise(settings: FrontendSettings, argv: Sequence[str], clock: Clock) -> None:
    """Runs `settings.processes` processes with this process's flags until a signal."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    with stop_on_signals(stop, hurry), reserved_port(settings.http.host, settings.http.port) as holder:
        port = holder.getsockname()[1]
        commands = [command(settings, argv, number, port) for number in range(settings.processes)]
        await Supervisor(
            commands, clock=clock, stop_timeout_s=stop_timeout_s(settings), settings=settings.supervisor
        ).run(stop=stop, hurry=hurry)


def command(settings: FrontendSettings, argv: Sequence[str], number: int, port: int) -> list[str]:
    """One process's command line: the same flags, then those that are its own. The last of equal flags counts."""
    own = ["--processes", "1", "--http-port", str(port), "--http-shares-port"]
    if settings.instance_id:
        own += ["--instance-id", f"{settings.instance_id}-{number}"]
    if settings.telemetry.metrics_port:
        own += ["--telemetry-metrics-port", str(settings.telemetry.metrics_port + number)]
    return [sys.executable, "-m", "services.frontend", *argv, *own]


def stop_timeout_s(settings: FrontendSettings) -> float:
    """What an orderly stop of one process takes at most, closes of its parts included."""
    lifecycle = settings.lifecycle
    return settings.pipeline.drain_notice_s + lifecycle.drain_timeout_s + 2 * lifecycle.stop_timeout_s


def reserved_port(host: str, port: int) -> socket.socket:
    """A bound socket that keeps the port while processes come and go. It never listens, so it gets no connection.

    OSError when the port is in use, by another set of processes too.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    if port:
        # Without SO_REUSEPORT it fails where the kernel would silently share the port with somebody else's.
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
