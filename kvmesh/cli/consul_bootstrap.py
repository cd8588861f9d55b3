"""`kvmesh consul-bootstrap DIR`: gives a Consul with ACLs the mesh's policies, tokens and intentions. Repeating it changes nothing.

DIR gets a folder of credentials for each policy, with files that only this user can read: registry-token, and for services mesh-secret.
Tokens are never printed, and never part of a command line.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvmesh.discovery.acl import NEEDED_INTENTIONS, ConsulAcl, bootstrap, is_token
from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.errors import InvalidRequestError, MeshError, OverloadedError, PermissionDeniedError, UnavailableError
from kvmesh.identity.secret import new_secret, read_private, write_private

MANAGEMENT_FILE, TOKEN_FILE, SECRET_FILE = "management-token", "registry-token", "mesh-secret"
POLICIES = (
    "frontend",
    "router",
    "gateway",
    "prefill",
    "decode",
    "worker",
    "planner",
    "operator",
    "prometheus",
    "agent",
)
OUTSIDERS = ("prometheus", "agent")
"""They get no mesh secret: they are no members."""
RETRY_S = 1.0


def main(argv: Sequence[str]) -> int:
    """Returns 1 when Consul or a file cannot be used."""
    options = _parser().parse_args(argv)
    try:
        asyncio.run(_run(options))
    except (MeshError, OSError, TimeoutError) as error:
        print(f"kvmesh: {getattr(error, 'message', error) or 'Consul did not answer in time'}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvmesh consul-bootstrap", description=__doc__)
    parser.add_argument(
        "folder", metavar="DIR", type=Path, help="where the credentials are written; only this user can read it"
    )
    parser.add_argument("--consul", default="127.0.0.1:8500", help="Consul agent: host:port or URL")
    parser.add_argument("--ca-file", default="", help="PEM file with the agent's CA")
    parser.add_argument(
        "--policies", type=Path, default=Path("compose/consul"), help="folder with the policies (*.hcl)"
    )
    parser.add_argument(
        "--management-token-file",
        type=Path,
        help="a token that may write ACLs; else DIR/management-token, else the ACLs are bootstrapped and it is written there",
    )
    parser.add_argument(
        "--wait-s", type=float, default=60.0, help="how long to wait until Consul answers and has a leader"
    )
    return parser


async def _run(options: argparse.Namespace) -> None:
    folder: Path = _own_folder(options.folder)
    rules = {name: _rules(options.policies / f"{name}.hcl") for name in POLICIES}
    consul = DiscoverySettings(address=options.consul, ca_file=options.ca_file)
    async with asyncio.timeout(options.wait_s):
        token = await _management_token(consul, folder, options.management_token_file)
    acl = ConsulAcl(replace(consul, token=token))
    try:
        made = 0
        for name, text in rules.items():
            await acl.set_policy(f"kvmesh-{name}", rules=text)
            made += await _write_token(acl, consul, folder / name, policy=f"kvmesh-{name}")
        await acl.set_agent_token(read_private(str(folder / "agent" / TOKEN_FILE), field="folder").decode())
        allowed = await acl.allow(NEEDED_INTENTIONS)
    finally:
        await acl.aclose()
    _write_secrets(folder)
    print(f"{folder}: {len(rules)} policies, {made} new tokens, {allowed} new intentions of {len(NEEDED_INTENTIONS)}")


def _own_folder(folder: Path) -> Path:
    folder = folder.expanduser()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


def _rules(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}", field="policies") from error


async def _management_token(consul: DiscoverySettings, folder: Path, given: Path | None) -> str:
    """Returns the given token, the one of an earlier run, or that of Consul's bootstrap. Waits while Consul does not answer."""
    file = given or folder / MANAGEMENT_FILE
    while True:
        try:
            if file.exists() or given is not None:
                token = read_private(str(file), field="management_token_file").decode(errors="replace")
                if await is_token(replace(consul, token=token)):
                    return token
                raise InvalidRequestError(f"Consul does not know the token in {file}", field="management_token_file")
            token = await bootstrap(consul)
            write_private(file, token.encode())
            return token
        except PermissionDeniedError as error:
            raise InvalidRequestError(
                f"Consul's ACLs were bootstrapped before; give --management-token-file ({error.message})",
                field="management_token_file",
            ) from error
        except (UnavailableError, OverloadedError):
            await asyncio.sleep(RETRY_S)  # It starts, or elects a leader.


async def _write_token(acl: ConsulAcl, consul: DiscoverySettings, folder: Path, *, policy: str) -> bool:
    """Writes a new token, unless the folder has one that Consul knows. Returns whether it is new."""
    file = _own_folder(folder) / TOKEN_FILE
    if file.exists():
        earlier = read_private(str(file), field="folder").decode(errors="replace")
        if await is_token(replace(consul, token=earlier)):
            return False
    write_private(file, (await acl.new_token(policy)).encode())
    return True


def _write_secrets(folder: Path) -> None:
    """All members have one secret."""
    if not (folder / SECRET_FILE).exists():
        write_private(folder / SECRET_FILE, new_secret())
    secret = (folder / SECRET_FILE).read_bytes()
    for name in POLICIES:
        if name not in OUTSIDERS:
            write_private(folder / name / SECRET_FILE, secret)
