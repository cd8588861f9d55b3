"""`kvmesh credentials DIR`: makes the credentials of a mesh on several machines, or renews their certificates."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvmesh.identity.authority import LIFETIME, Authority
from kvmesh.identity.certificates import AUTHORITY_FILE
from kvmesh.identity.credentials import make_credentials
from kvmesh.identity.roles import MeshRole
from kvmesh.identity.secret import write_private

AUTHORITY_KEY_FILE = "ca.key"


def main(argv: Sequence[str]) -> int:
    """Writes the folder. A folder that exists keeps its authority, token and secret, and gets new certificates."""
    parser = argparse.ArgumentParser(prog="kvmesh credentials", description=__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, help="only this user will be able to read it")
    folder = parser.parse_args(argv).folder.expanduser()
    try:
        make_credentials(folder, authority=find_authority(folder))
    except (OSError, ValueError) as error:
        print(f"kvmesh: the credentials cannot be written to {folder}: {error}", file=sys.stderr)
        return 1
    print(
        f"{folder}: registry-token, mesh-secret, and tls/ for {', '.join(MeshRole)}; certificates of {LIFETIME.days} days"
    )
    print(f"give each machine what its services need; {AUTHORITY_KEY_FILE} stays here, and renews the certificates")
    return 0


def find_authority(folder: Path) -> Authority:
    """Returns the folder's authority, or a new one. OSError or ValueError when its files cannot be used."""
    key, certificate = folder / AUTHORITY_KEY_FILE, folder / AUTHORITY_FILE
    if key.exists():
        return Authority.load(key=key.read_bytes(), certificate=certificate.read_bytes())
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = Authority.make()
    write_private(certificate, made.certificate_pem)
    write_private(key, made.key_pem)
    return made
