"""A NIXL transport in its own process: `source` holds ones, `reader` zeros. It executes one-line commands.

metadata            prints its metadata
pull PEER SECONDS   pulls all of a peer's memory: "pulled", or the reason of the failure
cancel PEER SECONDS pulls, and cancels the pull after some seconds: "cancelled"
clear               zeros its memory, as if another request used it now
close-in-pull PEER  closes during a pull: "closed"
look                "clear" if all bytes are still zero, else how many are not

After the word `announced`, `pull` and `cancel` also print "abandoned", before the answer, when the pull is over but may still write.
"""

import asyncio
import sys
from typing import Any

import numpy as np

from kvmesh.errors import KvLostError
from kvmesh.kv.nixl_transport import NixlTransport
from kvmesh.lifecycle import end_process

SIZE = 8 << 20
"""More than a socket's buffers hold, so that a stopped source cannot have sent everything."""
QUIET_S = 0.5
"""How long bytes in flight on loopback may take. On a slow machine the test may miss a bug, but cannot report one that does not exist."""


class SayingTransport(NixlTransport):
    """Says when it begins to wait for the late bytes of a pull that has timed out or was cancelled."""

    announces = False

    async def _abort(self, handle: Any) -> None:
        if self.announces:
            print("abandoned", flush=True)
        await super()._abort(handle)


async def main(role: str) -> None:
    memory = np.full(SIZE, int(role == "source"), np.uint8)
    transport = SayingTransport(inline_bytes_max=0, close_s=1.0)
    await transport.start(memory, lambda _: None)
    loop = asyncio.get_running_loop()
    while words := (await loop.run_in_executor(None, sys.stdin.readline)).split():
        if words[0] == "announced":
            del words[0]
            transport.announces = True
        if words[0] == "metadata":
            answer = transport.metadata.hex()
        elif words[0] == "pull":
            answer = await pull(transport, bytes.fromhex(words[1]), float(words[2]))
        elif words[0] == "cancel":
            pulling = asyncio.create_task(pull(transport, bytes.fromhex(words[1]), 600.0))
            await asyncio.sleep(float(words[2]))
            pulling.cancel()
            await asyncio.wait([pulling])
            answer = "cancelled" if pulling.cancelled() else pulling.result()
        elif words[0] == "clear":
            memory[:] = 0
            answer = "clear"
        elif words[0] == "close-in-pull":
            pulling = asyncio.create_task(pull(transport, bytes.fromhex(words[1]), 60.0))
            await asyncio.sleep(QUIET_S)
            await transport.aclose()
            pulling.cancel()
            answer = "closed"
        else:
            await asyncio.sleep(QUIET_S)
            answer = "clear" if not memory.any() else f"{np.count_nonzero(memory)} bytes came late"
        print(answer, flush=True)


async def pull(transport: NixlTransport, peer: bytes, timeout_s: float) -> str:
    try:
        rest = transport.pull_nowait(peer, [(0, 0, SIZE)], timeout_s=timeout_s)
        if rest is not None:
            await rest
    except KvLostError as error:
        return error.reason
    return "pulled"


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
    end_process(0)
