"""vLLM engines for the conformance suite, each in its own process, forked from a process that has imported vLLM."""

from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from kvmesh.engines.base import Engine, EngineRequest
from kvmesh.engines.vllm.registration import VLLM
from kvmesh.engines.vllm.settings import VllmSettings
from kvmesh.errors import UnavailableError
from kvmesh.worker.fork_server import ForkServer
from tests.conformance.engine_cases import EngineOptions, Make
from tests.integration.vllm_model import make_model
from tests.integration.vllm_process import RemoteEngine


class ProcessEngine(RemoteEngine):
    """An engine in another process. Once that process has ended, submitting raises UnavailableError, as the engine itself does."""

    def submit_nowait(self, request: EngineRequest) -> None:
        """See Engine."""
        try:
            super().submit_nowait(request)
        except ConnectionError as error:
            raise UnavailableError("the engine's process is gone") from error


async def open_vllm(stack: AsyncExitStack) -> Make:
    """Prepares a model and a fork server. Returns a function that makes an engine from them."""
    folder = Path(stack.enter_context(TemporaryDirectory()))
    model = make_model(folder / "llama")
    server = await ForkServer.start(VLLM.preload)
    stack.push_async_callback(server.aclose)

    def make(options: EngineOptions) -> Engine:
        settings = VllmSettings(
            model=str(model),
            dtype="float32",
            kv_cache_bytes=16 << 20,
            role=options.role.value,
            lease_s=options.lease_s,
            pull_timeout_s=min(10.0, options.lease_s / 2),
            running_requests_max=options.running_requests_max,
            waiting_requests_max=options.waiting_requests_max,
            enable_lora=True,
        )
        return ProcessEngine(server, settings, folder)

    return make
