"""Cross-origin requests (CORS): which pages may ask from a browser, and the preflight requests with which browsers find out."""

from aiohttp import web

from services.frontend.settings import HttpSettings

_METHODS = "GET, POST, DELETE, OPTIONS"
_EXPOSED = "x-request-id, x-kvmesh-request-id, request-id, retry-after, x-kvmesh-warning, x-kvmesh-max-tokens"


class CrossOrigin:
    """The answer to an `Origin` header. Without allowed origins nothing is said, which forbids."""

    def __init__(self, settings: HttpSettings) -> None:
        self._origins = frozenset(settings.cors_origins)
        self._age_s = round(settings.cors_age_s)

    def headers(self, request: web.Request) -> dict[str, str]:
        """Response headers for the request's origin; none when it is not allowed."""
        origin = request.headers.get("Origin", "")
        if not origin or not self._origins:
            return {}
        if "*" in self._origins:
            return {"Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": _EXPOSED}
        if origin not in self._origins:
            return {"Vary": "Origin"}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": _EXPOSED,
            "Vary": "Origin",
        }

    def preflight(self, request: web.Request) -> web.Response:
        """The answer to OPTIONS: 204, with what is allowed if the origin is."""
        headers = self.headers(request)
        if "Access-Control-Allow-Origin" in headers:
            headers["Access-Control-Allow-Methods"] = _METHODS
            asked = request.headers.get("Access-Control-Request-Headers", "")
            headers["Access-Control-Allow-Headers"] = asked or "authorization, content-type, x-request-id"
            headers["Access-Control-Max-Age"] = str(self._age_s)
        return web.Response(status=204, headers=headers)
