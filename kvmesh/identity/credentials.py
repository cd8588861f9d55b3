"""The files with which services and operators of a mesh authenticate: one folder, which only its user can read.

registry-token              for the registry
mesh-secret                 seals registrations and KV handles
tls/ROLE/tls.crt, tls.key, ca.crt
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvmesh.errors import InvalidRequestError
from kvmesh.identity.certificates import AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE, Certificates
from kvmesh.identity.roles import MeshRole
from kvmesh.identity.secret import new_secret, write_private
from kvmesh.identity.settings import IdentitySource

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from kvmesh.identity.authority import Authority

S = TypeVar("S", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class Credentials:
    """Names of the files in a folder. A name is empty where the folder lacks the file."""

    folder: Path

    @property
    def token_file(self) -> str:
        return _if_exists(self.folder / "registry-token")

    @property
    def secret_file(self) -> str:
        return _if_exists(self.folder / "mesh-secret")

    def tls_directory(self, role: MeshRole) -> str:
        return _if_exists(self.folder / "tls" / role)

    @property
    def argv(self) -> tuple[str, ...]:
        """Flags of services. The folder, not what is in it: other users can read command lines.

        A shell may have exported another identity for services that are started alone.
        """
        return ("--mesh-credentials", str(self.folder), "--mesh-identity", IdentitySource.FILES)


def _if_exists(path: Path) -> str:
    return str(path) if path.exists() else ""


def find_credentials(folder: str) -> Credentials:
    """Returns an existing folder. InvalidRequestError when it has none of the files."""
    found = Credentials(Path(folder).expanduser().resolve())
    if not (found.token_file or found.secret_file or (found.folder / "tls").exists()):
        raise InvalidRequestError(
            f"{folder} has no credentials; `kvmesh credentials DIR` makes them", field="credentials"
        )
    return found


def with_credentials(settings: S, role: MeshRole) -> S:
    """Returns the settings of a service with the names of files from `mesh.credentials`, where they name none themselves.

    `settings` has the fields `mesh` and `discovery`. InvalidRequestError when the folder has no certificate for the role, but for others.
    """
    given: Any = settings
    mesh, discovery = given.mesh, given.discovery
    if not mesh.credentials:
        return settings
    found = find_credentials(mesh.credentials)
    uses_files = mesh.identity is IdentitySource.FILES
    tls_directory = mesh.tls_directory or (found.tls_directory(role) if uses_files else "")
    if uses_files and not tls_directory and (found.folder / "tls").exists():
        raise InvalidRequestError(f"{found.folder} has no certificate for {role}", field="mesh.credentials")
    token_file = discovery.token_file or ("" if discovery.token else found.token_file)
    changes: dict[str, Any] = {
        "mesh": replace(mesh, secret_file=mesh.secret_file or found.secret_file, tls_directory=tls_directory),
        "discovery": replace(discovery, token_file=token_file),
    }
    return replace(settings, **changes)


def make_credentials(folder: Path, *, authority: "Authority | None", token: bytes | None = None) -> Credentials:
    """Writes what the folder lacks, and new certificates. Returns the folder's names.

    `authority` None: no certificates. `token`: the registry's; None: a new one, empty: none.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    made = Credentials(folder)
    if token is None and not made.token_file:
        token = new_secret()
    if token:
        write_private(folder / "registry-token", token)
    if not made.secret_file:
        write_private(folder / "mesh-secret", new_secret())
    if authority is not None:
        for role in MeshRole:
            write_certificates(folder / "tls" / role, authority.issue(role))
    return made


def write_certificates(folder: Path, certificates: Certificates) -> None:
    """Replaces the certificates of one member. Readers check that key and certificate belong together, and read again."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(folder / AUTHORITY_FILE, certificates.authority)
    write_private(folder / KEY_FILE, certificates.key)
    write_private(folder / CERTIFICATE_FILE, certificates.certificate)
