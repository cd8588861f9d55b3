"""gRPC credentials of mesh TLS: both sides show a certificate of the mesh's authority."""

from collections.abc import Sequence
from typing import Any

import grpc

from kvmesh.identity.certificates import Certificates, CertificateSource


def mesh_channel_options(server_name: str) -> Sequence[tuple[str, str]]:
    """The name that the server's certificate must have, whatever the address."""
    return (("grpc.ssl_target_name_override", server_name),)


def mesh_server_credentials(source: CertificateSource) -> grpc.ServerCredentials:
    """Each handshake uses the newest certificates. Connections that exist keep theirs."""
    served = source.current()

    def fetch() -> Any:
        """None: as before. Called by threads of gRPC."""
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
