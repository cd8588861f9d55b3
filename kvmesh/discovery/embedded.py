"""A registry for one machine: an in-memory agent that serves the part of Consul's HTTP API that the mesh uses.

Run it alone with `python -m kvmesh.discovery.embedded --port 8500`, or within a process with `EmbeddedAgent`.
"""

import argparse
import asyncio
import logging
import random
import signal
import socket
import ssl
import sys
import uuid
from pathlib import Path

from aiohttp import web

from kvmesh.clock import Clock, SystemClock
from kvmesh.discovery.agent.answering import BlockingQueries, error_middleware
from kvmesh.discovery.agent.live import LiveState
from kvmesh.discovery.agent.probes import Probes
from kvmesh.discovery.agent.routes import AgentRoutes
from kvmesh.discovery.agent.shapes import Node
from kvmesh.discovery.agent.state import AgentState
from kvmesh.discovery.connection import DEFAULT_PORT
from kvmesh.discovery.limits import VALUE_BYTES_MAX
from kvmesh.discovery.settings import AgentSettings
from kvmesh.event_log import event_logger
from kvmesh.identity.certificates import source_of
from kvmesh.network.names import host_port, is_loopback

_log = event_logger(__name__)


class EmbeddedAgent:
    """The agent on the running event loop. Its state is in memory only: after a restart, instances register again."""

    def __init__(
        self,
        settings: AgentSettings | None = None,
        clock: Clock | None = None,
        generator: random.Random | None = None,
    ) -> None:
        self._settings = settings or AgentSettings()
        self._clock = clock or SystemClock()
        # Starts at the time of day, so that no index of an earlier run matches by accident.
        self.state = AgentState(self._settings, first_index=max(1, int(self._clock.wall())))
        self._live = LiveState(self.state, self._clock)
        self.queries = BlockingQueries(
            self._live, generator or random.Random(), waiting_max=self._settings.watchers_max
        )
        self._probes: Probes | None = None
        self._runner: web.AppRunner | None = None
        self._task: asyncio.Task[None] | None = None
        self.port = 0

    @property
    def address(self) -> str:
        """http://host:port (https:// over TLS), once started."""
        scheme = "https" if self._settings.certificate_file else "http"
        return f"{scheme}://{host_port(self._settings.host, self.port)}"

    async def start(self) -> None:
        """Serves. OSError when the port is taken or a file cannot be read; leaves nothing open then."""
        settings = self._settings
        mesh = source_of(settings.check_tls_directory)
        tls = _tls_context(settings) if settings.certificate_file else None
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        listener = socket.create_server((settings.host, settings.port), family=family)
        self.port = int(listener.getsockname()[1])
        # handler_cancellation: a client that disconnects frees its blocking query immediately.
        self._runner = web.AppRunner(
            self._application(), handler_cancellation=True, access_log=None, shutdown_timeout=settings.close_timeout_s
        )
        try:
            await self._runner.setup()
            await web.SockSite(self._runner, listener, ssl_context=tls).start()
        except BaseException:
            listener.close()
            await self._runner.cleanup()
            raise
        self._probes = Probes(self._live, self._clock, probes_max=settings.probes_max, mesh=mesh)
        self._task = asyncio.create_task(self._run(self._probes), name="embedded agent")
        self._task.add_done_callback(_log_defect)
        _log.info("embedded_agent_started", address=self.address)

    async def aclose(self) -> None:
        """Answers blocking queries, ends checks and connections, and drops the state. Idempotent."""
        self._live.close()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def _application(self) -> web.Application:
        settings = self._settings
        node = Node(
            # Derived from name and port, so that a restarted agent is the same node.
            node_id=str(uuid.uuid5(uuid.NAMESPACE_DNS, f"{settings.node_name}:{self.port}")),
            name=settings.node_name,
            address=settings.host,
            port=self.port,
            index=self.state.index,
        )
        application = web.Application(
            # Larger than the limit, which the key's own check enforces: a value of exactly the limit must pass.
            client_max_size=VALUE_BYTES_MAX + 1024,
            middlewares=[error_middleware(settings.token)],
        )
        routes = AgentRoutes(live=self._live, queries=self.queries, node=node)
        application.add_routes(routes.routes())
        return application

    async def _run(self, probes: Probes) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._live.run(), name="embedded agent deadlines")
            group.create_task(probes.run(), name="embedded agent checks")


def _tls_context(settings: AgentSettings) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=settings.client_ca_file or None)
    context.load_cert_chain(settings.certificate_file, settings.key_file or None)
    if settings.client_ca_file:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _log_defect(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (defect := task.exception()) is not None:
        _log.critical("embedded_agent_ended_by_defect", exc_info=defect)


async def serve(settings: AgentSettings) -> None:
    """Runs an agent until SIGINT or SIGTERM."""
    loop = asyncio.get_running_loop()
    is_over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, is_over.set)
    agent = EmbeddedAgent(settings)
    await agent.start()
    try:
        sys.stdout.write(f"{agent.address}\n")
        sys.stdout.flush()
        await is_over.wait()
    finally:
        await agent.aclose()


def main(arguments: list[str] | None = None) -> int:
    """Returns the command line. Prints the address once it serves."""
    parser = argparse.ArgumentParser(prog="python -m kvmesh.discovery.embedded", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to serve on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--node-name", default="kvmesh-embedded", help="name of the one node (default: %(default)s)")
    parser.add_argument("--token-file", help="file with a token that every call must carry")
    parser.add_argument(
        "--insecure-listen", action="store_true", help="allow a host that other machines reach, in plain text"
    )
    given = parser.parse_args(arguments)
    if not given.insecure_listen and not is_loopback(given.host):
        parser.error(
            f"{given.host} is reached by other machines, and this registry speaks plain text: give --insecure-listen too"
        )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        token = Path(given.token_file).read_text().strip() if given.token_file else ""
        settings = AgentSettings(host=given.host, port=given.port, node_name=given.node_name, token=token)
        asyncio.run(serve(settings))
    except (OSError, OverflowError) as error:
        sys.stderr.write(f"cannot serve on {given.host}:{given.port}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
