"""Consul's access control for a mesh: policies, tokens and intentions. Every step may be repeated."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from kvmesh.discovery.connection import ConsulConnection
from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.errors import PermissionDeniedError, UnauthenticatedError, UnavailableError
from kvmesh.identity.permissions import callers_of
from kvmesh.identity.roles import SERVICE_PREFIX, SERVING

NEEDED_INTENTIONS: Collection[tuple[str, str]] = sorted(
    (SERVICE_PREFIX + caller, SERVICE_PREFIX + server) for server in SERVING for caller in callers_of(server)
)
"""Source and destination of each call that the mesh makes."""
DESCRIPTION = "kvmesh"


async def bootstrap(settings: DiscoverySettings) -> str:
    """Returns the first management token. PermissionDeniedError: there is one already."""
    connection = ConsulConnection(settings)
    try:
        return str((await _json(connection, method="PUT", path="/v1/acl/bootstrap"))["SecretID"])
    finally:
        await connection.aclose()


async def is_token(settings: DiscoverySettings) -> bool:
    """Returns whether Consul knows the token of the settings."""
    connection = ConsulConnection(settings)
    try:
        await connection.call("GET", "/v1/acl/token/self")
    except (PermissionDeniedError, UnauthenticatedError):
        return False
    else:
        return True
    finally:
        await connection.aclose()


class ConsulAcl:
    """Calls with a management token."""

    def __init__(self, settings: DiscoverySettings) -> None:
        self._connection = ConsulConnection(settings)

    async def set_policy(self, name: str, rules: str) -> None:
        """Makes the policy, or gives it these rules."""
        found = {each["Name"]: each["ID"] for each in await self._get("/v1/acl/policies")}
        path = f"/v1/acl/policy/{found[name]}" if name in found else "/v1/acl/policy"
        body = {"Name": name, "Description": DESCRIPTION, "Rules": rules}
        await _json(
            self._connection, method="PUT", path=path, body={**body, "ID": found[name]} if name in found else body
        )

    async def new_token(self, policy: str) -> str:
        body = {"Description": DESCRIPTION, "Policies": [{"Name": policy}]}
        return str((await _json(self._connection, method="PUT", path="/v1/acl/token", body=body))["SecretID"])

    async def set_agent_token(self, token: str) -> None:
        """Of the agent at this address. It forgets the token when it restarts, unless it has `enable_token_persistence`."""
        await self._connection.call("PUT", "/v1/agent/token/agent", body={"Token": token})

    async def allow(self, pairs: Collection[tuple[str, str]]) -> int:
        """Makes the intentions that Consul lacks; returns how many. One that exists stays, also one that denies."""
        listed = await self._get("/v1/connect/intentions")
        existing = {(each["SourceName"], each["DestinationName"]) for each in listed}
        missing = [pair for pair in pairs if pair not in existing]
        for source, destination in missing:
            body = {"SourceName": source, "DestinationName": destination, "SourceType": "consul", "Action": "allow"}
            await _json(
                self._connection,
                method="POST",
                path="/v1/connect/intentions",
                body={**body, "Description": DESCRIPTION},
            )
        return len(missing)

    async def aclose(self) -> None:
        await self._connection.aclose()

    async def _get(self, path: str) -> list[Any]:
        found = await _json(self._connection, method="GET", path=path)
        return found if isinstance(found, list) else []


async def _json(connection: ConsulConnection, *, method: str, path: str, body: bytes | Mapping[str, Any] = b"") -> Any:
    answer = (await connection.call(method, path, body=body)).body
    try:
        return json.loads(answer)
    except ValueError as error:
        raise UnavailableError(f"Consul's answer to {path} is not JSON", reason="registry_garbled") from error
