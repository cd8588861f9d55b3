"""The credentials of a mesh that `kvmesh up` starts: given ones, or new ones that end with the mesh."""

import asyncio
from pathlib import Path

from kvmesh.cli.up_settings import UpSettings
from kvmesh.errors import InvalidRequestError
from kvmesh.identity.authority import LIFETIME, Authority
from kvmesh.identity.credentials import Credentials, find_credentials, make_credentials, write_certificates
from kvmesh.identity.roles import MeshRole
from kvmesh.identity.secret import read_private

RENEW_S = LIFETIME.total_seconds() / 3
"""After a failed renewal the next one is still in time."""


def own_credentials(settings: UpSettings, folder: Path) -> tuple[Credentials, Authority | None]:
    """Returns the credentials, and the authority that renews them; None: there is nothing to renew.

    InvalidRequestError when the given folder or token cannot be used. The authority's key is never written.
    """
    if settings.credentials:
        found = find_credentials(settings.credentials)
        if not settings.consul and not found.token_file:
            raise InvalidRequestError(f"{settings.credentials} has no registry-token", field="credentials")
        return found, None
    authority = Authority.make() if settings.mesh_tls else None
    return make_credentials(folder, authority=authority, token=_consul_token(settings)), authority


def has_mesh_tls(settings: UpSettings) -> bool:
    """InvalidRequestError when the given folder has no credentials."""
    if settings.credentials:
        return bool(find_credentials(settings.credentials).tls_directory(MeshRole.DECODE))
    return settings.mesh_tls


def _consul_token(settings: UpSettings) -> bytes | None:
    """Returns the token of the registry: empty for Consul without a token, None for a new one of the embedded registry."""
    if not settings.consul:
        return None
    if settings.discovery_token_file:
        return read_private(settings.discovery_token_file, field="discovery_token_file")
    return settings.discovery_token.encode()


async def keep_renewed(credentials: Credentials, authority: Authority) -> None:
    """Writes new certificates long before the old ones expire, until it is cancelled."""
    while True:
        await asyncio.sleep(RENEW_S)
        for role in MeshRole:
            write_certificates(credentials.folder / "tls" / role, authority.issue(role))
