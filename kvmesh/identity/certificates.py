"""Where a member's certificate comes from, and gRPC credentials of it. A folder is one source, Consul Connect another."""

import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc

from kvmesh.errors import InvalidRequestError
from kvmesh.event_log import event_logger
from kvmesh.identity.roles import FILE_NAMES, PeerNames

CERTIFICATE_FILE, KEY_FILE, AUTHORITY_FILE = "tls.crt", "tls.key", "ca.crt"
RECHECK_S = 1.0
"""Longest time until changed files are noticed."""
_log = event_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """PEM texts: this member's certificate chain and key, and the authorities of the other members' certificates."""

    certificate: bytes
    key: bytes = field(repr=False)
    authority: bytes
    names: PeerNames = FILE_NAMES


class CertificateSource(Protocol):
    """Gives the newest certificates."""

    def current(self) -> Certificates:
        """Returns the same object as before while nothing has changed. Any thread may call it; it must not wait for a network."""
        ...


class DirectorySource:
    """The files of a folder. Replacing them rotates the certificates; a folder that is half written keeps the earlier ones."""

    def __init__(self, folder: str) -> None:
        """InvalidRequestError when the files cannot be used."""
        self._folder = Path(folder)
        self._lock = threading.Lock()
        self._stamp = self._read_stamp()
        self._certificates = self._read()
        self._checked_s = time.monotonic()

    def current(self) -> Certificates:
        """See `CertificateSource.current`."""
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._checked_s >= RECHECK_S:
                self._checked_s = now_s
                self._refresh()
            return self._certificates

    def _refresh(self) -> None:
        try:
            # Before the files are read: if they change during that, the next call reads them again.
            stamp = self._read_stamp()
            if stamp == self._stamp:
                return
            found = self._read()
        except InvalidRequestError as error:
            _log.warning("certificates_not_renewed", detail=error.message)
            return
        if found != self._certificates:
            self._certificates = found
            _log.info("certificates_renewed", folder=str(self._folder))
        self._stamp = stamp

    def _read_stamp(self) -> tuple[tuple[int, int, int], ...]:
        try:
            found = [(self._folder / name).stat() for name in (CERTIFICATE_FILE, KEY_FILE, AUTHORITY_FILE)]
        except OSError as error:
            raise _unusable(self._folder, error) from error
        return tuple((each.st_mtime_ns, each.st_ino, each.st_size) for each in found)

    def _read(self) -> Certificates:
        """Reads the files and checks that they belong together."""
        folder = self._folder
        try:
            context = ssl.create_default_context(cafile=str(folder / AUTHORITY_FILE))
            context.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE)
            return Certificates(
                certificate=(folder / CERTIFICATE_FILE).read_bytes(),
                key=(folder / KEY_FILE).read_bytes(),
                authority=(folder / AUTHORITY_FILE).read_bytes(),
            )
        except OSError as error:  # ssl.SSLError is one.
            raise _unusable(folder, error) from error


def _unusable(folder: Path, error: OSError) -> InvalidRequestError:
    return InvalidRequestError(
        f"mesh.tls_directory: {folder} has no usable {CERTIFICATE_FILE}, {KEY_FILE} and {AUTHORITY_FILE}: {error}",
        field="mesh.tls_directory",
    )


def source_of(folder: str) -> CertificateSource | None:
    """Returns the certificates in a folder; None for an empty name."""
    return DirectorySource(folder) if folder else None


def mesh_channel_options(server_name: str) -> Sequence[tuple[str, str]]:
    """Returns the name that the server's certificate must have, whatever the address."""
    return (("grpc.ssl_target_name_override", server_name),)


def mesh_server_credentials(source: CertificateSource) -> grpc.ServerCredentials:
    """Each handshake uses the newest certificates. Connections that exist keep theirs."""
    served = source.current()

    def fetch() -> Any:
        """Returns None if nothing has changed. Threads of gRPC call this."""
        nonlocal served
        newest = source.current()
        if newest is served:
            return None
        served = newest
        return _configuration(newest)

    return grpc.dynamic_ssl_server_credentials(_configuration(served), fetch, require_client_authentication=True)


def mesh_channel_credentials(certificates: Certificates) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        root_certificates=certificates.authority,
        private_key=certificates.key,
        certificate_chain=certificates.certificate,
    )


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(certificates.key, certificates.certificate)], root_certificates=certificates.authority
    )
