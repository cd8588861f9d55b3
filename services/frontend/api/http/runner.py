"""Runs aiohttp's server with connections of our own."""

import asyncio

from aiohttp import web

from services.frontend.api.http.connection import Connection


class _Server(web.Server):
    """Makes a Connection per connection."""

    def __call__(self) -> Connection:
        return Connection(self, loop=self._loop, **self._kwargs)


class ConnectionRunner(web.AppRunner):
    """Runs a server of Connections, which take the runner's arguments."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=asyncio.get_running_loop(),
            **made._kwargs,
        )
