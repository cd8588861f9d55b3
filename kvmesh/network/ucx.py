"""Variables of UCX, which moves KV: the interface, the ports, the address family. UCX reads them when NIXL makes its agent."""

import os
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvmesh.event_log import event_logger
from kvmesh.network.names import LOOPBACK, is_loopback
from kvmesh.network.ports import PortRange

_log = event_logger(__name__)
RDMA_DEVICES = Path("/sys/class/infiniband")
_RTM_NEWADDR, _RTM_GETADDR, _NLMSG_DONE = 20, 22, 3
# NLM_F_REQUEST | NLM_F_DUMP of linux/netlink.h.
_NLM_F_REQUEST_DUMP = 0x301
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_HEADER = struct.Struct("=LHHLL")
_MESSAGE = struct.Struct("=BBBBL")
_ATTRIBUTE = struct.Struct("=HH")


def set_ucx_variables(address: str, ports: PortRange | None) -> None:
    """Sets the variables that the operator has not set. UnavailableError when UCX would find no port."""
    if ports is not None:
        ports.check_ucx(address)
    interface = interface_of(LOOPBACK if address == "localhost" else address)
    if not interface:
        _log.warning("interface_not_found", address=address)
    # On one machine shared memory is faster than RDMA, whose devices others can reach.
    rdma = () if is_loopback(address) else rdma_devices()
    wanted = ucx_variables(address, interface=interface, ports=ports, rdma=rdma)
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    if wanted:
        _log.info("ucx_variables_set", **{name: os.environ[name] for name in wanted})


def ucx_variables(
    address: str, *, interface: str, ports: PortRange | None, rdma: tuple[str, ...] = ()
) -> Mapping[str, str]:
    """Returns the variables for an address and the interface that has it.

    Without UCX_NET_DEVICES, UCX listens on all interfaces and announces them: anybody who reaches one of them could connect. A bridge
    such as docker0 has the same address on every machine, and UCX would connect to itself.
    """
    variables = {} if ports is None else {"UCX_TCP_PORT_RANGE": ports.ucx}
    if interface:
        variables["UCX_NET_DEVICES"] = ",".join((interface, *rdma))
        if ":" in address:
            variables["UCX_TCP_AF_PRIO"] = "inet6,inet"
    return variables


def rdma_devices() -> tuple[str, ...]:
    """RDMA devices as UCX names them, such as mlx5_0:1. They are allowed in addition to the interface, because they are faster."""
    return tuple(sorted(f"{port.parent.parent.name}:{port.name}" for port in RDMA_DEVICES.glob("*/ports/*")))


def interface_of(address: str) -> str:
    """Returns the interface that has an address, also as a secondary one. Empty: none has."""
    is_v6 = ":" in address
    wanted = socket.inet_pton(socket.AF_INET6 if is_v6 else socket.AF_INET, address.partition("%")[0])
    try:
        return next((socket.if_indextoname(index) for index, found in _addresses() if found == wanted), "")
    except (OSError, AttributeError):
        return ""


def _addresses() -> Iterator[tuple[int, bytes]]:
    """Interface index and address of all addresses, by rtnetlink(7)."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as link:
        request = _HEADER.pack(_HEADER.size + _MESSAGE.size, _RTM_GETADDR, _NLM_F_REQUEST_DUMP, 1, 0)
        link.send(request + _MESSAGE.pack(0, 0, 0, 0, 0))
        while True:
            data = link.recv(1 << 16)
            while data:
                size, kind, *_ = _HEADER.unpack_from(data)
                if kind == _NLMSG_DONE or size < _HEADER.size:
                    return
                if kind == _RTM_NEWADDR:
                    yield from _parse(data[_HEADER.size : size])
                # Messages and attributes begin at multiples of 4 bytes (NLMSG_ALIGN, RTA_ALIGN).
                data = data[(size + 3) & ~3 :]


def _parse(message: bytes) -> Iterator[tuple[int, bytes]]:
    *_, index = _MESSAGE.unpack_from(message)
    rest = message[_MESSAGE.size :]
    while len(rest) >= _ATTRIBUTE.size:
        size, kind = _ATTRIBUTE.unpack_from(rest)
        if size < _ATTRIBUTE.size:
            return
        if kind in (_IFA_ADDRESS, _IFA_LOCAL):
            yield index, rest[_ATTRIBUTE.size : size]
        rest = rest[(size + 3) & ~3 :]
