"""Hosts and ports as text. No I/O."""

import ipaddress
from urllib.parse import unquote, urlsplit

LOOPBACK = "127.0.0.1"


def host_port(host: str, port: int) -> str:
    """host:port, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def split_host_port(address: str) -> tuple[str, int]:
    """Returns the host without brackets, and the port. The port is 0 if it is absent or not a number."""
    host, _, port = address.rpartition(":")
    return bare(host), int(port) if port.isascii() and port.isdigit() else 0


def bare(host: str) -> str:
    """Returns an IPv6 address without its brackets."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_loopback(host: str) -> bool:
    """Returns True for an address that only this machine reaches, and for `localhost`."""
    ip = _ip(host)
    return host == "localhost" if ip is None else ip.is_loopback


def is_unspecified(host: str) -> bool:
    """Returns True for 0.0.0.0 and ::, on which one can listen, but not be reached."""
    ip = _ip(host)
    return ip is not None and ip.is_unspecified


def registry_host(address: str) -> str:
    """Returns the host in a registry's address: host:port or a URL. Empty: there is none."""
    return urlsplit(address if "://" in address else f"//{address}").hostname or ""


def peer_host(peer: str) -> str:
    """Returns the address in gRPC's name of a peer, such as ipv4:10.0.0.1:4711 or ipv6:%5Bfd00::1%5D:4711. Empty: it is not an address."""
    kind, _, address = peer.partition(":")
    return bare(unquote(address).rpartition(":")[0]) if kind in ("ipv4", "ipv6") else ""


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(bare(host))
    except ValueError:
        return None
