"""Creates certificates at test time: a CA, and PEM files of the certificates that it signs."""

import datetime
import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Paths of the PEM files of a certificate and its key."""

    certificate_file: str
    key_file: str


@dataclass
class Authority:
    """A certificate authority that writes its files to `folder`."""

    folder: Path
    name: str
    _key: Any = field(init=False)
    _certificate: Any = field(init=False)

    def __post_init__(self) -> None:
        pytest.importorskip("cryptography")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._key = _new_key()
        self._certificate = _sign(self._key, self.name, self._key, self.name, is_authority=True)
        (self.folder / "ca.pem").write_bytes(_pem(self._certificate))

    @property
    def ca_file(self) -> str:
        return str(self.folder / "ca.pem")

    def issue(self, name: str, *addresses: str) -> KeyPair:
        """Returns a certificate for a DNS name and IP addresses, valid for servers and clients."""
        from cryptography.hazmat.primitives import serialization

        key = _new_key()
        certificate = _sign(key, name, self._key, self.name, addresses=addresses)
        paths = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        paths[0].write_bytes(_pem(certificate))
        form, no_password = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, no_password))
        return KeyPair(str(paths[0]), str(paths[1]))


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _pem(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    pem: bytes = certificate.public_bytes(serialization.Encoding.PEM)
    return pem


def _sign(
    key: Any, name: str, signer: Any, issuer: str, *, addresses: tuple[str, ...] = (), is_authority: bool = False
) -> Any:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import NameOID

    def named(text: str) -> Any:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    now = datetime.datetime.now(datetime.UTC)
    alternatives = [x509.DNSName(name), *(x509.IPAddress(ipaddress.ip_address(address)) for address in addresses)]
    builder = (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if not is_authority:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    return builder.sign(signer, hashes.SHA256())
