"""Certificates of Consul Connect for tests, real and forged, and checks of how servers react to them."""

import datetime
import http.client
import json
import socket
import ssl
import subprocess
import threading
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from kvmesh.discovery.connect.documents import read_issued
from kvmesh.identity.certificates import Certificates
from kvmesh.identity.roles import MeshRole
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.settings import RpcSettings
from tests.connect_mesh import ConsulAdmin
from tests.patience import PATIENCE_S
from tests.security.test_methods import Fixed

ACCEPTED, REFUSED = "accepted", "refused"
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""With empty settings. A server that accepts the connection answers with its own settings."""


def issued(consul: ConsulAdmin, role: MeshRole) -> Certificates:
    """Returns a member's real certificate."""
    leaf, roots = _documents(consul, f"kvmesh-{role}")
    return read_issued(json.dumps(leaf).encode(), json.dumps(roots).encode(), role).certificates


def leaf_of(consul: ConsulAdmin, service: str) -> Certificates:
    """Returns the real certificate of a service that is registered in the same Consul but is not a member of the mesh."""
    leaf, _ = _documents(consul, service)
    member = issued(consul, MeshRole.OPERATOR)
    return Certificates(
        certificate=leaf["CertPEM"].encode(),
        key=leaf["PrivateKeyPEM"].encode(),
        authority=member.authority,
        names=member.names,
    )


def _documents(consul: ConsulAdmin, service: str) -> tuple[Any, Any]:
    leaf = consul.call("GET", f"/v1/agent/connect/ca/leaf/{service}")
    return leaf, consul.call("GET", "/v1/agent/connect/ca/roots")


def forged(member: Certificates, uri: str) -> Certificates:
    """Returns a certificate with a member's URI that another authority signed. Its holder trusts the mesh."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "another authority")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Certificates(
        certificate=certificate.public_bytes(Encoding.PEM),
        key=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        authority=member.authority,
        names=member.names,
    )


def member_files(consul: ConsulAdmin, role: str, folder: Path) -> tuple[Path, Path]:
    """Writes a member's certificate and key to files and returns their paths."""
    certificates = issued(consul, MeshRole(role))
    certificate, key = folder / f"{role}.crt", folder / f"{role}.key"
    certificate.write_bytes(certificates.certificate)
    key.write_bytes(certificates.key)
    return certificate, key


async def outcome(certificates: Certificates, address: str, method: str) -> grpc.StatusCode:
    """Returns the status code of one call to a decode worker."""
    # The worker may be slow to take the connection, which must not look like a refusal.
    pool = ChannelPool(settings=RpcSettings(connect_timeout_s=PATIENCE_S), mesh=Fixed(certificates))
    try:
        channel = pool.channel(address, MeshRole.DECODE)
        return await channel.unary_unary(method)(b"", timeout=PATIENCE_S).code()
    finally:
        await pool.aclose()


def address_of(instance: dict[str, Any]) -> str:
    return f"{instance['Address']}:{instance['Port']}"


def presented_certificate(address: str) -> tuple[int, bytes]:
    """Returns the serial number of the certificate that a server presents, and the identifier of the key that signed it."""
    found = _presented(address)
    identifier = found.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier
    return found.serial_number, identifier or b""


def presented_uri(address: str) -> str:
    """Returns the SPIFFE ID in the certificate that a server presents."""
    names = _presented(address).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return names.get_values_for_type(x509.UniformResourceIdentifier)[0]


def _presented(address: str) -> x509.Certificate:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as plain:
        with context.wrap_socket(plain) as secured:
            return x509.load_der_x509_certificate(secured.getpeercert(binary_form=True) or b"")


def is_plain_http(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=PATIENCE_S)
    try:
        connection.request("GET", "/health")
        connection.getresponse()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True


def s_client(host: str, port: int, certificate: Path | None = None, key: Path | None = None) -> str:
    """Returns ACCEPTED if `openssl s_client` receives a response to the start of an HTTP/2 connection.

    REFUSED if the server ends the connection first, or sends nothing for PATIENCE_S.
    """
    command = ["openssl", "s_client", "-quiet", "-alpn", "h2", "-connect", f"{host}:{port}"]
    command += ["-cert", str(certificate), "-key", str(key)] if certificate and key else []
    pipe = subprocess.PIPE
    # Unbuffered: `close` would write what is left in a buffer, and raise if openssl has already exited.
    with subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(PATIENCE_S, process.kill)
        timer.start()
        try:
            process.stdin.write(HTTP2_PREFACE)
            return ACCEPTED if process.stdout.read(9) else REFUSED
        except BrokenPipeError:
            return REFUSED
        finally:
            timer.cancel()
            process.kill()
