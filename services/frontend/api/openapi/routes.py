"""GET /openapi.json and /docs."""

import asyncio

import orjson
from aiohttp import web

from services.frontend.api.http.boundary import Boundary
from services.frontend.api.openapi.document import openapi_document
from services.frontend.api.openapi.page import docs_page

# The page brings its own style and nothing else may be loaded into it.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


class Description:
    """Made once, when somebody first asks; it does not depend on what is served, so no key is needed."""

    def __init__(self) -> None:
        self._document: bytes | None = None
        self._page = ""
        self._making = asyncio.Lock()

    def add_routes(self, app: web.Application, boundary: Boundary) -> None:
        """See Extension."""
        app.router.add_get("/openapi.json", self._openapi)
        app.router.add_get("/docs", self._docs)

    async def _openapi(self, _: web.Request) -> web.StreamResponse:
        return web.Response(body=await self._made(), content_type="application/json")

    async def _docs(self, _: web.Request) -> web.StreamResponse:
        await self._made()
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
        return web.Response(text=self._page, content_type="text/html", headers=headers)

    async def _made(self) -> bytes:
        async with self._making:
            if self._document is None:
                document = await asyncio.to_thread(openapi_document)
                self._page = docs_page(document)
                self._document = orjson.dumps(document)
            return self._document
