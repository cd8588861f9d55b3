"""A machine of an engine of several machines that does not lead: it computes, and serves nothing."""

from kvmesh.engines.sglang.engine import SglangEngine


class SglangFollower:
    """The ranks of this machine as a part of the process. It fails when they end, which they do with the leader's."""

    def __init__(self, engine: SglangEngine) -> None:
        self._engine = engine

    async def start(self) -> None:
        await self._engine.start()

    async def run(self) -> None:
        """LostError when the engine has ended here or on another machine."""
        async for _ in self._engine.steps():
            pass

    async def aclose(self) -> None:
        await self._engine.aclose()
