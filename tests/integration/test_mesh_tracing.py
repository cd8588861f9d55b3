"""One trace through the whole mesh: frontend, router, prefill and decode report spans of the client's trace."""

import os
from pathlib import Path

import aiohttp

from tests.collector import collecting
from tests.integration.mesh import argv_simulated, running_mesh, wait_until
from tests.patience import PATIENCE_S


async def test_a_trace_crosses_every_hop(tmp_path: Path) -> None:
    """The client's span is the parent of the request's span, and spans of all services are in its trace."""
    trace_id, span_id = os.urandom(16).hex(), os.urandom(8).hex()
    async with collecting() as collector:
        # By default the SDK batches spans for 5 s, in each of four processes.
        env = {"KVMESH_TELEMETRY_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        async with running_mesh(tmp_path, *argv_simulated(), env=env) as mesh:
            body = {"model": "demo", "messages": [{"role": "user", "content": "hello " * 50}], "max_tokens": 5}
            headers = {"traceparent": f"00-{trace_id}-{span_id}-01"}
            url = f"{mesh.url}/v1/chat/completions"
            async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as response:
                assert response.status == 200
            wanted = {"request", "place", "prefill leg", "generate leg"}

            def missing() -> set[str]:
                return wanted - {span.name for span in collector.of_trace(trace_id)}

            await wait_until(lambda: not missing(), PATIENCE_S, lambda: f"no {missing()}\n{mesh.logs()}")
    spans = collector.of_trace(trace_id)
    assert span_id in [span.parent_span_id.hex() for span in spans if span.name == "request"]
