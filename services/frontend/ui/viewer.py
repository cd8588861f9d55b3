"""Decides who may see /ui: by the client's address, the origin of the request, and the key."""

from collections.abc import Mapping
from urllib.parse import urlsplit

from aiohttp import hdrs, web

from kvmesh.errors import NotFoundError, PermissionDeniedError
from kvmesh.network.names import LOOPBACK, is_loopback
from services.frontend.access.access import Access
from services.frontend.api.http.hosts import is_loopback_name, name_of
from services.frontend.settings import HttpSettings, UiSettings

FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP", "Via")
"""Headers of proxies, which may make a server on loopback public."""
SAME_SITE = ("same-origin", "none")
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # The browser refuses to parse text as HTML, whoever calls innerHTML.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def is_served(ui: UiSettings, http: HttpSettings) -> bool:
    """Returns whether this server has the page at all."""
    return ui.is_on and (ui.allows_public or is_loopback(http.host or LOOPBACK))


def check_address(request: web.Request, ui: UiSettings) -> None:
    """Raises NotFoundError for a request from outside: one under a name that is not of loopback, or that a proxy forwards."""
    if ui.allows_public:
        return
    name = name_of(request.headers.get(hdrs.HOST, ""))
    is_local = not name or is_loopback_name(name)
    if not is_local or any(header in request.headers for header in FORWARDED):
        raise NotFoundError("/ui is for this machine only; --ui-allows-public opens it", reason="not_found")


def check_origin(request: web.Request) -> None:
    """Raises PermissionDeniedError for a request that a page of another origin makes. CORS settings do not apply to /ui."""
    origin, site = request.headers.get(hdrs.ORIGIN), request.headers.get("Sec-Fetch-Site")
    is_foreign = origin is not None and urlsplit(origin).netloc.lower() != request.headers.get(hdrs.HOST, "").lower()
    if is_foreign or (site is not None and site not in SAME_SITE):
        raise PermissionDeniedError("pages of other origins may not read the mesh", field=hdrs.ORIGIN, reason="origin")


def check_operator(request: web.Request, access: Access) -> None:
    """Raises UnauthenticatedError without a valid key, and PermissionDeniedError without `operator`. Keys are read from headers only."""
    caller = access.authenticate(request.headers)
    if access.needs_key and not caller.is_operator:
        raise PermissionDeniedError(
            "this key may not see the mesh; its entry needs `operator: true`", reason="operator_key_needed"
        )
