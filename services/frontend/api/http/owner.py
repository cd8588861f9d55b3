"""Whose request it is: what one client stored, another does not find."""

from aiohttp import web

OWNER = web.RequestKey("owner", str)
"""Set by whatever checks credentials; without such a check everything belongs to one nameless owner."""


def owner_of(request: web.Request) -> str:
    """The tenant's name, empty where nobody checks."""
    owner: str = request.get(OWNER, "")
    return owner
