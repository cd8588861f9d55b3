"""Gives a service its address and ports, before any of its parts is made."""

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kvmesh.errors import InvalidRequestError
from kvmesh.event_log import event_logger
from kvmesh.network.hosts import address_towards, check_own, resolve
from kvmesh.network.names import LOOPBACK, bare, is_loopback, is_unspecified, registry_host
from kvmesh.network.ports import PortRange
from kvmesh.network.settings import NetworkSettings

_log = event_logger(__name__)
S = TypeVar("S", bound=NetworkSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenAddress:
    """A service's address, and why it is this one."""

    host: str
    why: str


def place_service(settings: S) -> S:
    """Returns the settings of a service with hosts and ports filled in, where the operator left them open.

    `settings` has the fields `discovery`, `mesh`, `rpc` and `telemetry` too; a frontend's `http` is filled in too.
    InvalidRequestError when others could not reach the registered address, or when strangers could reach one without mesh TLS;
    UnavailableError when the range has no free port.
    """
    given: Any = settings
    chosen = choose_address(given.address, registry=registry_host(given.discovery.address))
    _log.info("address_chosen", address=chosen.host, detail=chosen.why)
    ports = given.ports
    rpc = replace(given.rpc, host=bare(given.rpc.host) or chosen.host)
    if not rpc.advertise_host and is_unspecified(rpc.host) and given.address:
        rpc = replace(rpc, advertise_host=chosen.host)
    check_advertised(rpc.advertised_host, registry=registry_host(given.discovery.address))
    if not given.insecure_listen:
        check_protected(rpc.host, has_tls=given.mesh.has_tls)
    telemetry = replace(given.telemetry, metrics_host=bare(given.telemetry.metrics_host) or chosen.host)
    changes: dict[str, Any] = {"address": chosen.host}
    if (http := getattr(given, "http", None)) is not None:
        http = replace(http, host=bare(http.host) or chosen.host)
        changes["http"] = replace(http, port=_port(http.port, http.host, ports))
    changes["rpc"] = replace(rpc, port=_port(rpc.port, rpc.host, ports))
    changes["telemetry"] = replace(telemetry, metrics_port=_port(telemetry.metrics_port, telemetry.metrics_host, ports))
    return replace(settings, **changes)


def choose_address(address: str, registry: str) -> ChosenAddress:
    """Returns the address for `--address` and the registry's host. UnavailableError when a name has no address or no way leads to it."""
    if address:
        host = resolve(address, flag="--address")
        if is_unspecified(host):
            raise InvalidRequestError(
                f"--address {address} is not an address that others can reach; to listen on all addresses, give --rpc-host {host} too",
                reason="address_unspecified",
                field="address",
            )
        check_own(host)
        return ChosenAddress(host=host, why=f"--address {address}")
    if is_loopback(registry) or is_loopback(resolve(registry, flag="the registry")):
        return ChosenAddress(
            host=LOOPBACK, why="the registry is on this machine; --address opens the service to others"
        )
    return ChosenAddress(
        host=address_towards(registry), why=f"it reaches the registry at {registry}; --address names another"
    )


def check_advertised(host: str, registry: str) -> None:
    """InvalidRequestError when peers could not reach a service at the host that it registers."""
    if is_unspecified(host):
        raise InvalidRequestError(
            f"the service listens on {host} and would register it, but no peer can connect to it; give --address HOST,"
            " or --rpc-advertise-host HOST where others reach it at an address that this machine does not have",
            reason="address_unspecified",
            field="rpc.advertise_host",
        )
    if is_loopback(host) and not is_loopback(resolve(registry, flag="the registry")):
        raise InvalidRequestError(
            f"the service would register {host} at the registry on {registry}, but other machines cannot connect to it;"
            " give --address HOST, this host's address, and no --rpc-host",
            reason="address_loopback",
            field="rpc.host",
        )


def check_protected(host: str, *, has_tls: bool) -> None:
    """InvalidRequestError when a service would listen in plain text where other machines reach it."""
    if not has_tls and not is_loopback(host):
        raise InvalidRequestError(
            f"the service would listen on {host} without mesh TLS, so that anybody who reaches it could call it; give"
            " --mesh-tls-directory (`kvmesh credentials` makes certificates), --mesh-identity consul, or --insecure-listen on a network"
            " of its own",
            reason="insecure_listen",
            field="insecure_listen",
        )


def _port(port: int, host: str, ports: PortRange | None) -> int:
    return port if port or ports is None else ports.claim(host)
