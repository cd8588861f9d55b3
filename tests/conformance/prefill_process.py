"""A simulated prefill engine in its own process. It reads JSON lines: for a prompt it prints a handle, for "used" the number of used blocks."""

import asyncio
import base64
import json
import sys

from kvmesh.clock import SystemClock
from kvmesh.engines.simulated.engine import SimulatedEngine
from kvmesh.engines.simulated.settings import SimulatedSettings
from kvmesh.kv.nixl_transport import NixlTransport
from tests.conformance.engine_driver import EngineDriver, greedy


async def main() -> None:
    settings = SimulatedSettings(role="prefill", kv_blocks=512, context_tokens_max=2048, time_factor=0.0)
    driver = await EngineDriver(SimulatedEngine(settings, SystemClock(), NixlTransport()), 30.0).start()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        if order == "used":
            print(json.dumps(driver.engine.load().kv_blocks_used), flush=True)
            continue
        handle = await driver.prefill(greedy("demo", order))
        fields = {"payload": base64.b64encode(handle.payload).decode(), "tokens": handle.tokens}
        fields |= {"handle_id": handle.handle_id, "format": handle.format, "lease_s": handle.lease_s}
        fields |= {"compatibility_hash": handle.compatibility_hash}
        print(json.dumps(fields), flush=True)
    await driver.aclose()


if __name__ == "__main__":
    asyncio.run(main())
