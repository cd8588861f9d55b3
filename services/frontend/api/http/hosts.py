"""Which names of this server requests may use in `Host`, and which pages may send it forms.

A page can give its own name the address 127.0.0.1 (DNS rebinding); a browser then sends its requests here as if they were of the same
origin. The name in `Host` stays that of the page, so a server that listens on loopback only accepts the names of loopback.
"""

from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import hdrs, web

from kvmesh.errors import MeshError, PermissionDeniedError
from kvmesh.network.names import LOOPBACK, bare, is_loopback
from services.frontend.settings import HttpSettings

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Respond = Callable[[web.Request, MeshError], web.Response]


def with_host_check(handler: Handler, settings: HttpSettings, respond: Respond) -> Handler:
    """Returns `handler` behind the check of `Host`; unchanged if every name is allowed."""
    accepts_loopback = is_loopback(settings.host or LOOPBACK)
    if not accepts_loopback and not settings.hosts:
        return handler
    names = frozenset(each.lower() for each in settings.hosts)
    known: set[str] = set()

    def is_allowed(host: str) -> bool:
        name = name_of(host)
        allowed = not host or name in names or (accepts_loopback and is_loopback_name(name))
        # A limit, since clients choose the header.
        if allowed and len(known) < 64:
            known.add(host)
        return allowed

    async def check(request: web.Request) -> web.StreamResponse:
        host = request.headers.get(hdrs.HOST, "")
        if host in known or is_allowed(host):
            return await handler(request)
        message = f"the name {name_of(host)[:64]!r} of this server is not allowed; --http-hosts lists more names"
        return respond(request, PermissionDeniedError(message, field=hdrs.HOST, reason="host_not_allowed"))

    return check


def check_form_origin(request: web.Request, settings: HttpSettings) -> None:
    """Refuses a form that a page of another origin sends; browsers send forms without asking the server."""
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is None or "*" in settings.cors_origins or origin in settings.cors_origins:
        return
    if urlsplit(origin).netloc.lower() != request.headers.get(hdrs.HOST, "").lower():
        raise PermissionDeniedError("pages of this origin may not send files", field=hdrs.ORIGIN, reason="origin")


def name_of(host: str) -> str:
    """Returns the name or address in a `Host` header, in lower case and without the port."""
    name, separator, port = host.rpartition(":")
    return bare(name if separator and port.isdigit() else host).lower()


def is_loopback_name(name: str) -> bool:
    """Returns whether browsers resolve the name to this machine, whatever DNS answers."""
    return name.endswith(".localhost") or is_loopback(name)
