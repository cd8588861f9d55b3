"""Cuts and heals a network link between two hosts, and tests NIXL's connections over TCP."""

import asyncio

from tests.conformance.network_namespaces import network_hosts
from tests.conformance.test_transport import TransportProcess
from tests.parts import require_part

CUT_S = 14.0
"""The kernel retransmits 13 s and 25 s after the cut: an old connection would wait 11 s for the healed link."""
HEAL_S = 9.0
"""Less than the old connection would wait. A new one takes about a second."""


async def test_pulls_work_soon_after_a_cut_has_healed() -> None:
    """Connections from before the cut are dropped: an abandoned pull ends during the cut, and a pull soon after it succeeds."""
    require_part("nixl")
    with network_hosts() as hosts:
        async with (
            TransportProcess.start("source", hosts.command(1)) as source,
            TransportProcess.start("reader", hosts.command(2)) as reader,
        ):
            peer = await source.say("metadata")
            assert await reader.say(f"pull {peer} 30") == "pulled"
            hosts.set_link(False)
            healing = asyncio.create_task(asyncio.sleep(CUT_S))
            while not healing.done():
                assert await reader.say(f"pull {peer} 1") != "pulled"
                await asyncio.wait([healing], timeout=0.5)
            hosts.set_link(True)
            async with asyncio.timeout(HEAL_S):
                while await reader.say(f"pull {peer} 1") != "pulled":
                    await asyncio.sleep(0.5)
