"""Keeps what tenants share apart: cached blocks of prompts, cached tokens of texts, and sessions.

A tenant that can use another's cached blocks can guess the other's prompts: a right guess has a higher count of cached tokens and an
earlier first token. So the tenant is part of the cache salt, which router, frontend and engines hash into the names of blocks.
"""

from collections.abc import Collection
from dataclasses import replace
from hashlib import blake2b

from services.frontend.pipeline.request import Request

ALL = "*"
_DIGEST_BYTES = 16


def isolated(request: Request, tenant: str, sharing: Collection[str]) -> Request:
    """Returns the request with its cache salt and session in the tenant's own space.

    `sharing`: tenants that share cached prefixes with each other; `*` for all. Without a tenant (that is, without API keys) the request
    is unchanged.
    """
    if not tenant:
        return request
    session_id = request.session_id and _within("session", space=tenant, name=request.session_id)
    if ALL in sharing:
        return replace(request, session_id=session_id) if session_id else request
    # No tenant can have the name of the shared space, since names have at least one character.
    space = "" if tenant in sharing else tenant
    return replace(request, cache_salt=_within("prefix", space=space, name=request.cache_salt), session_id=session_id)


def _within(kind: str, space: str, name: str) -> str:
    """Returns a name that no other space can have: the client chooses `name`, so the parts must not run into each other."""
    # Tenants' names have no NUL (`keys.py`), so the space ends at the first one.
    return blake2b(f"{space}\0{name}".encode(), digest_size=_DIGEST_BYTES, person=kind.encode()).hexdigest()
