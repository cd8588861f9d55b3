"""Readiness of a prefill engine: its ranks must be registered with its bootstrap server.

SGLang tries that for about 13 s and then reports ready, although it does not try again.
"""

import asyncio

import aiohttp

from kvmesh.errors import UnavailableError

ROUTE = {
    "prefill_dp_rank": "-1",
    "prefill_cp_rank": "-1",
    "target_tp_rank": "-1",
    "target_pp_rank": "-1",
}
"""Asks for the whole topology, which the server knows when all ranks are registered."""
TIMEOUT_S = 20.0
POLL_S = 0.1


async def wait_registered(address: str) -> None:
    """UnavailableError when the ranks are not registered after TIMEOUT_S."""
    try:
        async with asyncio.timeout(TIMEOUT_S), aiohttp.ClientSession() as session:
            while not await _is_registered(session, f"http://{address}/route"):  # noqa: ASYNC110 (a server to ask)
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise UnavailableError(
            f"the prefill engine did not register with its bootstrap server {address} within {TIMEOUT_S:g} s",
            reason="engine_start_failed",
        ) from error


async def _is_registered(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url, params=ROUTE, timeout=aiohttp.ClientTimeout(total=2.0)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
