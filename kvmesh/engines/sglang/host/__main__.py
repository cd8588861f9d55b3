"""`python -m kvmesh.engines.sglang.host SOCKET`: the engine process. It connects to the adapter's Unix socket."""

import os
import sys
import traceback

from kvmesh.engines.node_watch import NodeWatch
from kvmesh.engines.sglang.host.link import HostSocket
from kvmesh.engines.sglang.host.ranks import start_other_ranks
from kvmesh.engines.sglang.messages import Failed, Start, ToHost
from kvmesh.engines.sglang.settings import SglangSettings
from kvmesh.errors import MeshError
from kvmesh.lifecycle.process import die_with_parent
from kvmesh.lifecycle.title import set_title

MESSAGE_CHARACTERS_MAX = 300


def main() -> None:
    die_with_parent(os.getppid())
    link = HostSocket.connect(sys.argv[1])
    try:
        serve(link)
    except BaseException as error:  # noqa: BLE001  # The end of the process: the adapter gets the reason, the log the trace.
        traceback.print_exc()
        link.send(failed(error))
        sys.stderr.flush()
        # Threads of transfers and device libraries may hang a normal exit.
        os._exit(1)


def serve(link: HostSocket) -> None:
    """Runs the first rank of this machine until the adapter closes the socket."""
    messages: list[ToHost] = []
    # A message may arrive in several parts. The adapter ends this process if the engine does not start in time.
    while not messages:
        link.wait(60.0)
        messages = link.receive()
    start = messages[0]
    assert isinstance(start, Start)
    settings = SglangSettings(**start.settings)
    # Imports sglang.
    from kvmesh.engines.sglang.host.rank import Rank

    rank = Rank(settings, number=settings.ranks_here[0], distributed_port=0)
    set_title((f"kvmesh SGLang engine ({settings.mode})",))
    with start_other_ranks(settings, rank.distributed_port):
        watch_of(settings).join()
        rank.start(None if settings.node_rank else link)
        link.send(rank.describe())
        link.send_alive()
        rank.run()


def watch_of(settings: SglangSettings) -> NodeWatch:
    return NodeWatch(
        nodes=settings.nodes,
        node_rank=settings.node_rank,
        nodes_address=settings.nodes_address,
        secret_file=settings.secret_file,
        start_timeout_s=settings.start_timeout_s,
    )


def failed(error: BaseException) -> Failed:
    message = error.message if isinstance(error, MeshError) else " ".join(str(error).split())
    return Failed(kind=type(error).__name__, message=message[:MESSAGE_CHARACTERS_MAX] or type(error).__name__)


if __name__ == "__main__":
    main()
