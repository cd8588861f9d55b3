"""`python -m kvmesh.engines.sglang.host SOCKET`: the engine process. It connects to the adapter's Unix socket."""

import os
import sys
import traceback

from kvmesh.engines.sglang.host.link import HostSocket
from kvmesh.engines.sglang.host.ranks import start_other_ranks
from kvmesh.engines.sglang.messages import Failed, Start
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
    """Runs rank 0 until the adapter closes the socket."""
    link.wait(60.0)
    (start,) = link.receive()
    assert isinstance(start, Start)
    settings = SglangSettings(**start.settings)
    # Imports sglang.
    from kvmesh.engines.sglang.host.rank import Rank

    rank = Rank(settings, number=0, distributed_port=0)
    set_title((f"kvmesh SGLang engine ({settings.mode})",))
    with start_other_ranks(settings, rank.distributed_port):
        rank.start(link)
        link.send(rank.describe())
        link.send_alive()
        rank.run()


def failed(error: BaseException) -> Failed:
    message = error.message if isinstance(error, MeshError) else " ".join(str(error).split())
    return Failed(type(error).__name__, message[:MESSAGE_CHARACTERS_MAX] or type(error).__name__)


if __name__ == "__main__":
    main()
