"""Which machine of an engine of several machines this is. Engines have the settings `nodes`, `node_rank` and `nodes_address` for it."""

from typing import Any

from kvmesh.errors import InvalidRequestError
from kvmesh.network.names import split_host_port
from kvmesh.settings import setting

NODES_MAX = 64


def nodes_setting() -> Any:
    return setting(
        1,
        "Machines of this worker. Its tensor-parallel ranks are divided equally among them.",
        min=1,
        max=NODES_MAX,
    )


def node_rank_setting() -> Any:
    return setting(
        0,
        "Number of this machine. Machine 0 leads: it registers and serves. The others compute only.",
        min=0,
        max=NODES_MAX - 1,
    )


def nodes_address_setting() -> Any:
    return setting(
        "",
        "HOST:PORT of the leader, where the machines of this worker meet. The leader also listens at the next port. Needed with"
        " several machines.",
    )


def check_nodes(*, nodes: int, node_rank: int, nodes_address: str, ranks: int) -> None:
    """InvalidRequestError for settings of several machines that contradict each other. `ranks` are those of all machines."""
    if not node_rank < nodes:
        raise InvalidRequestError(f"node_rank must be below nodes, which is {nodes}", field="node_rank")
    if ranks % nodes:
        raise InvalidRequestError(
            f"tensor_parallel_size must be a multiple of nodes, which is {nodes}", field="tensor_parallel_size"
        )
    host, port = split_host_port(nodes_address)
    if not host or not 0 < port < 65535:
        raise InvalidRequestError("nodes_address must be HOST:PORT, with a port below 65535", field="nodes_address")


def meeting_address(nodes_address: str) -> tuple[str, int]:
    """Returns where the engine's ranks meet."""
    return split_host_port(nodes_address)


def watch_address(nodes_address: str) -> tuple[str, int]:
    """Returns where the leader watches the other machines."""
    host, port = split_host_port(nodes_address)
    return host, port + 1
