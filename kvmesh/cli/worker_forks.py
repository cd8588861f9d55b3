"""Starts workers as forks of one process that has imported the engine. Starts a new such process if it has ended."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvmesh.cli.children import Child, ChildSpec, fork_child, start_child
from kvmesh.cli.log_tail import failure_line, log_tail
from kvmesh.engines.registration import EngineRegistration
from kvmesh.errors import UnavailableError
from kvmesh.worker.fork_server import THREADS, ForkServer


class WorkerForks:
    """Starts workers. If the imports start threads, forking is not safe, and each worker starts with a new interpreter."""

    def __init__(
        self, engine: EngineRegistration[Any], *, log_path: Path, timeout_s: float, say: Callable[[str], None]
    ) -> None:
        self._engine = engine
        self._log_path = log_path
        self._timeout_s = timeout_s
        self._say = say
        self._server: ForkServer | None = None
        self._forks = True
        self._one_at_a_time = asyncio.Lock()

    async def open(self) -> None:
        """Imports the engine once. Raises UnavailableError with the log's path if the import fails."""
        async with self._one_at_a_time:
            if not self._forks or (self._server is not None and not self._server.has_ended):
                return
            await self._close_server()
            self._say(f"importing {self._engine.title}")
            try:
                self._server = await ForkServer.start(
                    self._engine.preload, timeout_s=self._timeout_s, log=str(self._log_path)
                )
            except UnavailableError as error:
                if error.reason != THREADS:
                    line = failure_line(log_tail(self._log_path))
                    raise UnavailableError(
                        f"{self._engine.title} cannot be imported: {line or error.message}; log: {self._log_path}",
                        reason=error.reason,
                    ) from error
                self._forks = False
                self._say(f"{error.message}: workers start as programs of their own, which takes longer")

    async def start(self, spec: ChildSpec) -> Child:
        """Starts a worker. Raises the errors of `open`, and OSError if no process can be created."""
        await self.open()
        return await (start_child(spec) if self._server is None else fork_child(self._server, spec))

    async def aclose(self) -> None:
        """Ends the process that forks, and every worker that still runs."""
        await self._close_server()

    async def _close_server(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.aclose()
