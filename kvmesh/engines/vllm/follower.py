"""A machine of an engine of several machines that does not lead: its ranks compute, and it serves nothing.

vLLM's own server does this with `--headless`.
"""

import asyncio
from typing import Any

from kvmesh.engines.node_watch import NodeWatch
from kvmesh.engines.vllm import environment
from kvmesh.engines.vllm.settings import VllmSettings
from kvmesh.engines.vllm.thread import EngineThread
from kvmesh.errors import LostError, MeshError, UnavailableError

CLOSE_TIMEOUT_S = 10.0


class VllmFollower:
    """The ranks of this machine as a part of the process. It fails when one of them ends, or the leader does."""

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._executor: Any = None
        self._nodes = NodeWatch(
            nodes=settings.nodes,
            node_rank=settings.node_rank,
            nodes_address=settings.nodes_address,
            secret_file=settings.mesh_secret_file,
            start_timeout_s=settings.start_timeout_s,
            end=lambda reason: self._post(reason),
        )
        # Ranks die with the thread that starts them.
        self._thread = EngineThread(build=self._build, iterate=lambda: None, died=self._died, ended=self._ended)

    async def start(self) -> None:
        """Loads the ranks' part of the model, together with the leader."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._over: asyncio.Future[str] = self._loop.create_future()
        environment.prepare(self._settings)
        self._thread.start()
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                done, _ = await asyncio.wait((self._ready, self._over), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError as error:
            raise UnavailableError("vLLM did not start in time", reason="engine_start_failed") from error
        if self._ready not in done:
            raise UnavailableError(self._over.result(), reason="engine_start_failed")
        self._ready.result()

    async def run(self) -> None:
        """LostError when the engine has ended here or on another machine."""
        raise LostError(await self._over, reason="engine_died")

    async def aclose(self) -> None:
        self._thread.stop()
        await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)

    # ---- on the engine thread, and on threads of vLLM and the watch ----

    def _build(self) -> None:
        self._nodes.join()
        from kvmesh.engines.vllm.rank_executor import start_ranks

        self._executor = start_ranks(self._settings, lambda: self._post("a rank of the engine has ended"))
        self._loop.call_soon_threadsafe(_set, self._ready)

    def _died(self, error: BaseException) -> None:
        message = error.message if isinstance(error, MeshError) else f"{type(error).__name__}: {error}"
        self._post(f"vLLM did not start: {message}")

    def _ended(self) -> None:
        self._nodes.close()
        if self._executor is not None:
            self._executor.shutdown()

    def _post(self, reason: str) -> None:
        self._loop.call_soon_threadsafe(_set, self._over, reason)


def _set(future: "asyncio.Future[Any]", value: Any = None) -> None:
    if not future.done():
        future.set_result(value)
