"""Runs aiohttp's server with connections of our own."""

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from services.frontend.api.http.connection import Connection
from services.frontend.api.http.hosts import Handler


class _Server(web.Server):
    """Makes a Connection per connection."""

    def __call__(self) -> Connection:
        return Connection(self, loop=self._loop, **self._kwargs)


class ConnectionRunner(web.AppRunner):
    """Runs a server of Connections, which take the runner's arguments.

    `wrap` returns the handler of all requests, around the application's. aiohttp's middlewares cost two more coroutines per request.
    """

    def __init__(self, app: web.Application, *, wrap: Callable[[Handler], Handler], **kwargs: Any) -> None:
        super().__init__(app, **kwargs)
        self._wrap = wrap

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        handler: Any = self._wrap(made.request_handler)  # An application's requests are web.Requests.
        return _Server(
            handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=asyncio.get_running_loop(),
            **made._kwargs,
        )
