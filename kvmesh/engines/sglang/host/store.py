"""Where PyTorch's store of an engine's ranks listens. By itself it listens on all interfaces and authenticates nobody."""

import errno
import importlib
import socket
from datetime import timedelta
from typing import Any

BACKLOG = 128


def restrict_store() -> None:
    """Makes stores that are created from now on listen on the address only that the ranks connect to."""
    from torch.distributed import TCPStore

    # `torch.distributed` has a function of this name, too.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    create_anywhere = rendezvous._create_c10d_store

    def create(  # noqa: PLR0917  # torch.distributed calls it.
        hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True
    ) -> Any:
        listener = listen(hostname, port) if rank == 0 else None
        if listener is None:
            return create_anywhere(hostname, port, rank, world_size, timeout, use_libuv)
        return TCPStore(
            host_name=hostname,
            port=port,
            world_size=world_size,
            is_master=True,
            timeout=timeout,
            multi_tenant=True,
            # The store closes it.
            master_listen_fd=listener.detach(),
            use_libuv=use_libuv,
        )

    rendezvous._create_c10d_store = create


def listen(host: str, port: int) -> socket.socket | None:
    """Returns a listening socket. None: no interface of this machine has the address, as with the name of a Kubernetes service."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise
