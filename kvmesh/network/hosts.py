"""Addresses of this machine."""

import socket

from kvmesh.errors import InvalidRequestError, UnavailableError
from kvmesh.network.names import bare

_ANY_PORT = 9
"""A UDP socket that connects sends nothing; any port will do."""


def resolve(host: str, *, flag: str) -> str:
    """Returns the first address of a name; returns an address unchanged. UnavailableError if the name has none."""
    try:
        return str(socket.getaddrinfo(bare(host), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UnavailableError(
            f"{flag} {host!r} cannot be resolved: {error.strerror}", reason="address_unresolved", field="address"
        ) from error


def check_own(address: str) -> None:
    """InvalidRequestError unless this machine has the address."""
    try:
        with socket.socket(family(address), socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        raise InvalidRequestError(
            f"--address {address} is not an address of this machine ({error.strerror}); `ip -br address` lists them",
            reason="address_not_here",
            field="address",
        ) from error


def address_towards(host: str) -> str:
    """Returns the address from which this machine reaches another one. UnavailableError if there is no route."""
    remote = resolve(host, flag="the registry")
    try:
        with socket.socket(family(remote), socket.SOCK_DGRAM) as probe:
            probe.connect((remote, _ANY_PORT))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UnavailableError(
            f"there is no route to the registry at {host} ({error.strerror}); give this host's address with --address",
            reason="registry_unreachable",
            field="address",
        ) from error


def family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
