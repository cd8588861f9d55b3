"""Checks of a mesh of real SGLang engines: their listening addresses, and the effect of an expensive grammar on other requests."""

import asyncio
import json
from ipaddress import ip_address
from typing import Any

from tests.chaos.rendezvous import Rendezvous
from tests.integration.mesh import command_line, descendants
from tests.security.anonymous import listening

ALLOWED, TOO_MANY = 230, 3000
"""Number of integers with a range in the largest allowed schema, and in one that used to make a worker silent."""
GRAMMARS = 8
"""Enough that every worker compiles some."""


def schema(count: int) -> dict[str, Any]:
    fields = {f"f{i}": {"type": "integer", "minimum": -(10**12) + i, "maximum": 10**15 + i * 7} for i in range(count)}
    return {"type": "object", "properties": fields, "required": list(fields)}


async def check_listeners(mesh: Rendezvous) -> None:
    """No channel of SGLang, none of which has authentication, listens on a network address.

    Includes the ZeroMQ sockets between the engines, PyTorch's store, the bootstrap server and UCX.
    """
    await mesh.ask(mesh.prompts([300])[0])
    pids = (mesh.mesh.process.pid, *descendants(mesh.mesh.process.pid))
    found = list(listening(pids))
    assert [(pid, host, port) for pid, host, port in found if not ip_address(host).is_loopback] == []
    engines = {pid for pid in pids if any(b"SGLang engine" in word for word in command_line(pid))}
    assert len(engines) == mesh.workers
    assert engines <= {pid for pid, _, _ in found}


async def ask_for(mesh: Rendezvous, count: int) -> int:
    """Requests JSON with `count` integers. Returns the status."""
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema(count)}}
    messages = [{"role": "user", "content": "Numbers"}]
    body = {"model": "demo", "messages": messages, "max_tokens": 4, "response_format": form}
    async with mesh.session.post(f"{mesh.mesh.url}/v1/chat/completions", json=body) as response:
        answer = await response.json()
        if response.status == 400:
            assert answer["error"]["code"] == "constraint_too_complex", answer
        return response.status


async def chunks_of_stream(mesh: Rendezvous, started: asyncio.Event) -> int:
    """Returns the number of chunks of another client's answer."""
    body = {
        "model": "demo", "prompt": list(mesh.prompts([20])[0]), "max_tokens": 200, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    chunks = 0
    async with mesh.session.post(f"{mesh.mesh.url}/v1/completions", json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                assert "error" not in json.loads(line[6:])
                chunks += 1
                started.set()
    return chunks


async def check_expensive_grammars(mesh: Rendezvous) -> None:
    """A schema of 3 000 ranged integers is refused before it reaches the engine. Compiling the largest allowed schemas does not stop other
    streams."""
    assert await ask_for(mesh, TOO_MANY) == 400
    placed_again = len(mesh.placed_again_s())
    started = asyncio.Event()
    stream = asyncio.create_task(chunks_of_stream(mesh, started))
    await started.wait()
    statuses = await asyncio.gather(*(ask_for(mesh, ALLOWED - number) for number in range(GRAMMARS)))
    assert await stream > 20
    assert statuses == [200] * GRAMMARS
    # The frontend treats a worker that is silent for five seconds as lost and places its requests again.
    assert len(mesh.placed_again_s()) == placed_again
