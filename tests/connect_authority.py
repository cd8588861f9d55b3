"""A certificate authority like that of Consul since 1.11: its certificates have a SPIFFE ID and no other name."""

import datetime
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from kvmesh.identity.certificates import Certificates
from kvmesh.identity.roles import ConnectNames, MeshRole

PREFIX = "spiffe://11111111-2222-3333.consul/ns/default/dc/dc1"
LIFETIME = datetime.timedelta(hours=1)
NAMES = ConnectNames(prefix=PREFIX, domain="")


@dataclass(frozen=True, slots=True)
class UriAuthority:
    """Issues certificates for URIs. `pem` is its own certificate."""

    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))
    pem: bytes = field(init=False)

    def __post_init__(self) -> None:
        builder = _builder(_name("authority"), self.key.public_key())
        made = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        object.__setattr__(self, "pem", made.sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM))

    def issue(
        self,
        uri: str,
        *,
        trusted: bytes = b"",
        names: ConnectNames = NAMES,
        lifetime: datetime.timedelta = LIFETIME,
    ) -> Certificates:
        """Returns a certificate for `uri`. `trusted`: the roots that the holder trusts; empty: this authority."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(x509.Name([]), key.public_key(), lifetime).add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=True
        )
        certificate = builder.sign(self.key, hashes.SHA256())
        return Certificates(
            certificate=certificate.public_bytes(Encoding.PEM),
            key=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
            authority=trusted or self.pem,
            names=names,
        )

    def member(self, role: MeshRole, *, trusted: bytes = b"") -> Certificates:
        return self.issue(NAMES.server_uri(role), trusted=trusted)


def _builder(
    subject: x509.Name, key: ec.EllipticCurvePublicKey, lifetime: datetime.timedelta = LIFETIME
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(_name("authority"))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + lifetime)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
