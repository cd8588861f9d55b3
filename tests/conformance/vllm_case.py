"""vLLM as a case of the conformance suite: every engine in a forked process of its own, over real NIXL."""

import asyncio
import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from kvmesh.engines.vllm import VllmSettings
from kvmesh.worker.forkserver import ForkServer
from tests.integration.vllm_model import make_adapter, make_model
from tests.integration.vllm_process import RemoteEngine
from tests.parts import require_part

if TYPE_CHECKING:
    from tests.conformance.engine_cases import EngineOptions


class SharedServer:
    """One fork server for the engines that live at the same time; the last to go ends it."""

    def __init__(self) -> None:
        self._server: ForkServer | None = None
        self._lock = asyncio.Lock()
        self._users = 0

    async def acquire(self) -> ForkServer:
        """Starts it for the first user. Users of one loop only."""
        if self._users == 0:
            self._lock = asyncio.Lock()
        self._users += 1
        async with self._lock:
            if self._server is None:
                self._server = await ForkServer.start("vllm")
        return self._server

    async def release(self) -> None:
        """Gives it back."""
        self._users -= 1
        if self._users == 0 and self._server is not None:
            server, self._server = self._server, None
            await server.aclose()


SERVER = SharedServer()


class CaseEngine(RemoteEngine):
    """A remote engine that brings the fork server with it."""

    def __init__(self, settings: VllmSettings, folder: Path) -> None:
        super().__init__(None, settings, folder)
        self._has_server = False

    async def start(self) -> None:
        self._server = await SERVER.acquire()
        self._has_server = True
        await super().start()

    async def aclose(self) -> None:
        await super().aclose()
        if self._has_server:
            self._has_server = False
            await SERVER.release()


FOLDER = Path(tempfile.gettempdir()) / f"kvmesh-vllm-{os.getpid()}"
"""Model, adapter, logs and sockets of this test run; made when the first engine is."""
ADAPTER = str(FOLDER / "adapter")


@cache
def folder() -> Path:
    """FOLDER, filled; deleted when the tests end."""
    make_model(FOLDER / "model")
    make_adapter(FOLDER / "adapter")
    atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
    return FOLDER


def make_engine(options: "EngineOptions") -> CaseEngine:
    """An engine that is not started; skips where vLLM or NIXL is missing."""
    require_part("vllm")
    require_part("nixl")
    settings = VllmSettings(
        model=str(folder() / "model"),
        role=options.role.value,
        dtype="float32",
        kv_cache_bytes=8 << 20,
        lease_s=options.lease_s,
        lease_margin_s=min(2.0, options.lease_s / 4),
        kv_pull_timeout_s=min(5.0, options.lease_s / 2),
        running_requests_max=options.running_requests_max,
        waiting_requests_max=options.waiting_requests_max,
        enable_lora=True,
    )
    return CaseEngine(settings, folder())
