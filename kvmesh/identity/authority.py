"""A private certificate authority for one mesh. Keys are ECDSA P-256."""

import datetime
from dataclasses import dataclass
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvmesh.identity.certificates import Certificates
from kvmesh.identity.roles import SERVER_NAME, SERVING, MeshRole, uri_of

AUTHORITY_LIFETIME = datetime.timedelta(days=3650)
LIFETIME = datetime.timedelta(days=30)
CLOCK_SKEW = datetime.timedelta(hours=1)
"""Certificates are valid from before they are made, for members whose clock is behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """Signs the certificates of one mesh."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def make(cls) -> Self:
        """Returns a new authority with a key of its own."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("kvmesh mesh authority")
        builder = _builder(key.public_key(), subject=name, issuer=name, lifetime=AUTHORITY_LIFETIME)
        usage = x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        # Path length 0: it may sign members, but no other authorities.
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        return cls(key=key, certificate=builder.add_extension(usage, critical=True).sign(key, hashes.SHA256()))

    @classmethod
    def load(cls, key: bytes, certificate: bytes) -> Self:
        """Returns the authority in PEM texts. ValueError when they are none."""
        loaded = serialization.load_pem_private_key(key, None)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise ValueError("the authority's key is not an elliptic-curve key")
        return cls(key=loaded, certificate=x509.load_pem_x509_certificate(certificate))

    @property
    def key_pem(self) -> bytes:
        return _key_pem(self.key)

    @property
    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, role: MeshRole, lifetime: datetime.timedelta = LIFETIME) -> Certificates:
        """Returns a certificate with a new key for a role."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri_of(role))]
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if role in SERVING:
            names.append(x509.DNSName(SERVER_NAME))
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        certificate = (
            _builder(
                key.public_key(), subject=_name(f"kvmesh {role}"), issuer=self.certificate.subject, lifetime=lifetime
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()),
                critical=False,
            )
            .sign(self.key, hashes.SHA256())
        )
        return Certificates(
            certificate=certificate.public_bytes(serialization.Encoding.PEM),
            key=_key_pem(key),
            authority=self.certificate_pem,
        )


def _builder(
    key: ec.EllipticCurvePublicKey, *, subject: x509.Name, issuer: x509.Name, lifetime: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + lifetime)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
