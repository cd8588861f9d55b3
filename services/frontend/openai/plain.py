"""Endpoints that take one JSON object and answer one, without a stream."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from services.frontend.openai.boundary import Boundary
from services.frontend.openai.embeddings import serve_embeddings
from services.frontend.openai.fields import read_object
from services.frontend.openai.serve import Exchange
from services.frontend.openai.tokens import serve_detokenize, serve_tokenize

Answerer = Callable[[Exchange, Mapping[str, Any]], Awaitable[web.StreamResponse]]

ANSWERERS: Mapping[str, Answerer] = {
    "/v1/embeddings": serve_embeddings,
    "/tokenize": serve_tokenize,
    "/detokenize": serve_detokenize,
    "/v1/tokenize": serve_tokenize,
    "/v1/detokenize": serve_detokenize,
}


class PlainEndpoints:
    """An extension of the HTTP server."""

    def add_routes(self, app: web.Application, boundary: Boundary) -> None:
        """Adds the paths above."""
        for path, answerer in ANSWERERS.items():
            app.router.add_post(path, _handler(boundary, answerer))


def _handler(boundary: Boundary, answerer: Answerer) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        async def work(exchange: Exchange) -> web.StreamResponse:
            return await answerer(exchange, read_object(await boundary.body(request)))

        return await boundary.handle(request, work)

    return handle
