"""GET /openapi.json and /docs."""

import asyncio
from functools import cache

import orjson
from aiohttp import web

from services.frontend.api.http.boundary import Boundary
from services.frontend.api.openapi.document import openapi_document
from services.frontend.api.openapi.page import docs_page

# The page contains its style; the browser must load nothing else into it.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def add_description_routes(app: web.Application, boundary: Boundary) -> None:
    """The description does not depend on the served models, so it needs no key."""
    app.router.add_get("/openapi.json", _serve_document)
    app.router.add_get("/docs", _serve_page)


async def _serve_document(_: web.Request) -> web.StreamResponse:
    document, _page = await asyncio.to_thread(_description)
    return web.Response(body=document, content_type="application/json")


async def _serve_page(_: web.Request) -> web.StreamResponse:
    _document, page = await asyncio.to_thread(_description)
    headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
    return web.Response(text=page, content_type="text/html", headers=headers)


@cache
def _description() -> tuple[bytes, str]:
    document = openapi_document()
    return orjson.dumps(document), docs_page(document)
