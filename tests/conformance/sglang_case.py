"""SGLang engines for the conformance suite. Each engine process is forked from a process that has imported SGLang."""

import signal
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from kvmesh.engines.base import Engine
from kvmesh.engines.sglang.engine import SglangEngine
from kvmesh.engines.sglang.host_process import HOST_MODULE, HostProcess, Launch
from kvmesh.engines.sglang.settings import SglangSettings
from kvmesh.worker.fork_server import ForkedChild, ForkServer
from tests.conformance.engine_cases import EngineOptions, Make
from tests.integration.vllm_model import add_tokenizer, make_model
from tests.parts import ROOT

PRELOAD = "kvmesh.engines.sglang.host.preload:preload"


class ForkedHost:
    """An engine process that was forked."""

    def __init__(self, server: ForkServer, child: ForkedChild) -> None:
        self._server, self._child = server, child

    def kill(self) -> None:
        self._child.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        self._child.send_signal(number)

    async def wait(self) -> int:
        return await self._server.wait(self._child)


def forking_launch(server: ForkServer, log: str, env: Mapping[str, str] | None = None) -> Launch:
    async def launch(arguments: Sequence[str]) -> HostProcess:
        return ForkedHost(server, await server.spawn(HOST_MODULE, arguments, env=env, log=log))

    return launch


async def open_fork_server(stack: AsyncExitStack, python: Path, log: str) -> ForkServer:
    server = await ForkServer.start(PRELOAD, python=str(python), env={"PYTHONPATH": str(ROOT)}, log=log)
    stack.push_async_callback(server.aclose)
    return server


async def open_sglang(stack: AsyncExitStack, python: Path) -> Make:
    """Prepares a model and a fork server. Returns a function that makes an engine from them."""
    folder = Path(stack.enter_context(TemporaryDirectory()))
    model = add_tokenizer(make_model(folder / "llama"))
    log = str(folder / "engines.txt")
    server = await open_fork_server(stack, python, log)

    def make(options: EngineOptions) -> Engine:
        settings = SglangSettings(
            model=str(model),
            dtype="float32",
            kv_cache_bytes=16 << 20,
            role=options.role.value,
            has_kv_transfer=not options.is_alone,
            lease_s=options.lease_s,
            pull_timeout_s=min(10.0, options.lease_s / 2),
            running_requests_max=options.running_requests_max,
            waiting_requests_max=options.waiting_requests_max,
            enable_lora=True,
        )
        return SglangEngine(settings, launch=forking_launch(server, log), random=Random(3))

    return make
