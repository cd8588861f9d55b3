"""Starts a gateway, a frontend and a router in one process: `python -m services.gateway FRONTEND'S FLAGS -- ROUTER'S FLAGS`.

With --help before the `--` the frontend's flags are shown, after it the router's. Both read the same variables and the same file
as they do in processes of their own.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from random import Random, SystemRandom

from kvmesh.clock import SystemClock
from kvmesh.errors import InvalidRequestError
from kvmesh.identity.credentials import with_credentials
from kvmesh.identity.roles import MeshRole
from kvmesh.lifecycle import run_process, stop_on_signals
from kvmesh.network.place import place_service
from kvmesh.settings import load_or_exit
from kvmesh.telemetry import configure_logging
from services.frontend.__main__ import Frontend, instance_id
from services.frontend.settings import FrontendSettings
from services.gateway.link import HostedRouterLink
from services.router.__main__ import Router, new_generator
from services.router.settings import RouterSettings

PROGRAM = "python -m services.gateway"
SEPARATOR = "--"


async def serve(frontend_settings: FrontendSettings, router_settings: RouterSettings) -> None:
    """Runs both until a signal, or until one fails. The frontend stops first, because requests in flight need the router."""
    if frontend_settings.processes > 1:
        raise InvalidRequestError(
            "a gateway is one process; to use several processes, run frontends and routers separately",
            field="processes",
        )
    frontend_settings = place_service(with_credentials(frontend_settings, MeshRole.FRONTEND))
    router_settings = place_service(with_credentials(router_settings, MeshRole.ROUTER))
    clock = SystemClock()
    router = Router(router_settings, clock, new_generator(router_settings.seed))
    link = HostedRouterLink(
        router.servicer.handler,
        frontend_id=instance_id(frontend_settings),
        clock=clock,
        settings=frontend_settings.router,
    )
    frontend = Frontend(frontend_settings, clock, Random(SystemRandom().getrandbits(128)), router=link)
    stop, hurry, router_stop = asyncio.Event(), asyncio.Event(), asyncio.Event()
    with stop_on_signals(stop, hurry):
        routing = asyncio.create_task(router.run(stop=router_stop, hurry=hurry, on_joined=link.open), name="router")
        serving = asyncio.create_task(frontend.run(stop=stop, hurry=hurry), name="frontend")
        try:
            await asyncio.wait({routing, serving}, return_when=asyncio.FIRST_COMPLETED)
            stop.set()
            await asyncio.wait({serving})
        finally:
            router_stop.set()
            for task in (serving, routing):
                await _end(task)
    serving.result()
    routing.result()


async def _end(task: "asyncio.Task[None]") -> None:
    """Waits for a stopping task. If cancelled, cancels the task and still waits for its end."""
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        raise


def split(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Splits the command line into the frontend's flags and the router's."""
    if SEPARATOR not in argv:
        return argv, ()
    at = argv.index(SEPARATOR)
    return argv[:at], argv[at + 1 :]


def main() -> int:
    """Runs the process; returns its exit status."""
    # Otherwise the tokenizer library starts a pool of threads for single prompts.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    frontend_argv, router_argv = split(sys.argv[1:])
    description = __doc__ or ""
    router_settings = load_or_exit(RouterSettings, program=PROGRAM, description=description, argv=router_argv)
    frontend_settings = load_or_exit(FrontendSettings, program=PROGRAM, description=description, argv=frontend_argv)
    telemetry = frontend_settings.telemetry
    configure_logging(level=telemetry.log_level, style=telemetry.log_format, service="kvmesh-gateway")
    return run_process(lambda: serve(frontend_settings, router_settings))


if __name__ == "__main__":
    sys.exit(main())
