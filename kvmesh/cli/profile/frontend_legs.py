"""Runs requests through a frontend as if they were legs on a worker, so that times include what a client of the mesh sees."""

from collections.abc import AsyncGenerator

from kvmesh.client import AsyncClient, Options
from kvmesh.core import Leg, LegFinish, Role
from kvmesh.errors import LostError


class FrontendLegs:
    """Has the method of PlainLegClient that measures need. The mesh chooses the worker, so that it should have one only."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def run(
        self, address: str, role: Role, leg: Leg, *, timeout_s: float
    ) -> AsyncGenerator[int | LegFinish, None]:
        """As PlainLegClient.run, for a leg without a handle. `address` and `role` are those of the worker, which is not called itself."""
        generation = leg.generation
        options = Options(sampling=generation.sampling, returns_token_ids=True)
        stream = self._client.generate_stream(
            generation.model, generation.token_ids, options=options, timeout_s=timeout_s
        )
        async with stream:
            finish: LegFinish | None = None
            async for piece in stream:
                if piece.token_ids:
                    yield len(piece.token_ids)
                if piece.finish_reason is not None and finish is None:
                    finish = LegFinish(reason=piece.finish_reason)
                if piece.usage is not None and finish is not None:
                    finish = LegFinish(reason=finish.reason, usage=piece.usage)
        if finish is None:
            raise LostError("the frontend ended the call without a finish", reason="no_finish", where=address)
        yield finish
