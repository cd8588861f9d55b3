"""Makes what the containers of the stack need to trust each other: Consul's policies, tokens and intentions, and a folder for each role.

Runs in a container of its own before the others start, and again at each `docker compose up`, which changes nothing that works. Folders in
/credentials are volumes, one for each role, so that no service can read another's token or Consul's management token. With
KVMESH_MESH_IDENTITY=files also certificates of a private authority, new ones at each run.
"""

import asyncio
import os
import sys
from pathlib import Path

from kvmesh.cli import consul_bootstrap
from kvmesh.cli.credentials import find_authority
from kvmesh.discovery.acl import ConsulAcl
from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.identity.credentials import write_certificates
from kvmesh.identity.roles import MeshRole
from kvmesh.identity.secret import new_secret
from kvmesh.identity.settings import IdentitySource

AGENT, SERVER = "consul:8500", "consul-server:8500"
FOLDER = Path("/credentials")
GENERATED = Path("/generated")
"""Files for containers that are no services of kvmesh; they belong to this user's group."""
CONFIGURATION = Path("/etc/kvmesh")
ROLES = (
    MeshRole.FRONTEND,
    MeshRole.ROUTER,
    MeshRole.PREFILL,
    MeshRole.DECODE,
    MeshRole.PLANNER,
    MeshRole.OPERATOR,
)


def main() -> int:
    """Returns 0 when every container has what it needs."""
    policies = str(CONFIGURATION / "consul")
    if status := consul_bootstrap.main([str(FOLDER), "--consul", AGENT, "--policies", policies]):
        return status
    asyncio.run(give_token_to_server())
    if os.environ["KVMESH_MESH_IDENTITY"] == IdentitySource.FILES:
        authority = find_authority(FOLDER)
        for role in ROLES:
            write_certificates(FOLDER / role / "tls" / role, authority.issue(role))
    write_prometheus(GENERATED / "prometheus", (FOLDER / "prometheus" / "registry-token").read_text())
    write_password(GENERATED / "postgres")
    return 0


async def give_token_to_server() -> None:
    """The token of its own node, as `kvmesh consul-bootstrap` gives it to the other agent."""
    acl = ConsulAcl(DiscoverySettings(address=SERVER, token=(FOLDER / "management-token").read_text()))
    try:
        await acl.set_agent_token((FOLDER / "agent" / "registry-token").read_text())
    finally:
        await acl.aclose()


def write_prometheus(folder: Path, token: str) -> None:
    """Writes Prometheus' configuration with its token, which Prometheus cannot read from a file of its own."""
    text = (CONFIGURATION / "prometheus" / "compose.yml").read_text()
    line = '      - server: "consul:8500"\n'
    if line not in text:
        raise ValueError(f"compose.yml has no line {line!r}")
    write_shared(folder / "compose.yml", text.replace(line, f'{line}        token: "{token}"\n'))
    write_shared(folder / "alerts.yml", (CONFIGURATION / "prometheus" / "alerts.yml").read_text())


def write_password(folder: Path) -> None:
    """Of the database, once. Only the overlay postgres.yaml mounts the folder."""
    if os.access(folder, os.W_OK) and not (folder / "password").exists():
        write_shared(folder / "password", new_secret().decode())


def write_shared(path: Path, text: str) -> None:
    """Writes a file that the group can read."""
    path.touch(mode=0o640)
    path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
