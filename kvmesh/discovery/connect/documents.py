"""Consul's JSON of certificates and intentions. No I/O. A document that cannot be used is an UnavailableError."""

import datetime
import json
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import NameOID

from kvmesh.errors import MeshError, UnavailableError
from kvmesh.identity.certificates import Certificates
from kvmesh.identity.roles import MeshRole, connect_names

ROOTS_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """Certificates of Consul and the time until which they are valid."""

    certificates: Certificates
    expires_at: datetime.datetime


def read_issued(leaf: bytes, roots: bytes, role: MeshRole) -> Issued:
    """Returns the certificates of a role from the agent's two answers. UnavailableError when they are not usable."""
    try:
        return _issued(_object(leaf), _object(roots), role)
    except (ValueError, TypeError, KeyError, x509.ExtensionNotFound) as error:
        raise _unusable(f"{type(error).__name__}: {error}") from error
    except MeshError as error:
        raise _unusable(error.message) from error


def read_allowed(answer: bytes) -> bool:
    """Returns the answer to one check of intentions. Only a plain yes allows."""
    try:
        return _object(answer).get("Allowed") is True
    except ValueError as error:
        raise _unusable(str(error)) from error


def _issued(leaf: dict[str, Any], roots: dict[str, Any], role: MeshRole) -> Issued:
    chain, key = str(leaf["CertPEM"]).encode(), str(leaf["PrivateKeyPEM"]).encode()
    authorities = [str(root["RootCert"]).strip() for root in roots["Roots"][:ROOTS_MAX]]
    if not authorities:
        raise ValueError("Consul has no root certificate; is Connect enabled?")
    x509.load_pem_x509_certificates("\n".join(authorities).encode())
    own = x509.load_pem_x509_certificates(chain)[0]
    if _public(load_pem_private_key(key, None).public_key()) != _public(own.public_key()):
        raise ValueError("the key does not belong to the certificate")
    names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    [uri] = names.get_values_for_type(x509.UniformResourceIdentifier)
    common_names = own.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    peers = connect_names(uri, common_name=str(common_names[0].value) if common_names else "", role=role)
    return Issued(
        certificates=Certificates(
            certificate=chain, key=key, authority="\n".join([*authorities, ""]).encode(), names=peers
        ),
        expires_at=own.not_valid_after_utc,
    )


def _public(key: Any) -> bytes:
    encoded: bytes = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return encoded


def _object(document: bytes) -> dict[str, Any]:
    found = json.loads(document)
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def _unusable(why: str) -> UnavailableError:
    return UnavailableError(f"Consul's answer cannot be used: {why[:500]}", reason="identity_unusable")
