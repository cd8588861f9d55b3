"""Hosts and ports as text. No I/O."""

import ipaddress
from urllib.parse import urlsplit

LOOPBACK = "127.0.0.1"


def host_port(host: str, port: int) -> str:
    """host:port, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def bare(host: str) -> str:
    """An IPv6 address without its brackets."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_loopback(host: str) -> bool:
    """True for an address that only this machine reaches, and for `localhost`."""
    ip = _ip(host)
    return host == "localhost" if ip is None else ip.is_loopback


def is_unspecified(host: str) -> bool:
    """True for 0.0.0.0 and ::, on which one can listen, but not be reached."""
    ip = _ip(host)
    return ip is not None and ip.is_unspecified


def registry_host(address: str) -> str:
    """The host in a registry's address: host:port or a URL. Empty: there is none."""
    return urlsplit(address if "://" in address else f"//{address}").hostname or ""


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(bare(host))
    except ValueError:
        return None
