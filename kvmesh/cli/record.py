"""`kvmesh record`: writes the traffic of a mesh as a trace for `kvmesh simulate --trace`: lengths, arrival times and shared blocks.

No text and no token is recorded. Block ids are hashed with a random salt that is made for the file and not kept, so that they say which requests
of the file share a prefix, and nothing else.
"""

import asyncio
import gzip
import json
import secrets
import sys
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

from kvmesh.cli.connection import MeshChoice, MeshTarget, connect, run_command
from kvmesh.core.whatif import RecordedTraffic
from kvmesh.discovery.base import ROUTER
from kvmesh.errors import MeshError, UnavailableError
from kvmesh.rpc.router.client import GrpcRouterClient
from kvmesh.settings import setting

SALT_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class RecordSettings(MeshChoice):
    """What to record."""

    out: str = setting("traffic.jsonl.gz", "file to write, .jsonl or .jsonl.gz; it must not exist")
    duration_s: float = setting(60.0, "how long to record", min=0.1, max=86_400)
    requests_max: int = setting(1_000_000, "requests after which the recording ends", min=1, max=10_000_000)


@dataclass(slots=True, kw_only=True)
class Recording:
    """What was recorded so far."""

    requests_max: int
    requests: list[RecordedTraffic] = field(default_factory=list)
    lost: int = 0
    is_full: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, found: Sequence[RecordedTraffic], lost: int) -> None:
        self.lost += lost
        self.requests += found[: self.requests_max - len(self.requests)]
        if len(self.requests) >= self.requests_max:
            self.is_full.set()


async def record(settings: RecordSettings, target: MeshTarget) -> Recording:
    """Records what finishes at all routers. Raises UnavailableError if none is registered, or when one ends."""
    recording = Recording(requests_max=settings.requests_max)
    salt = secrets.token_bytes(SALT_BYTES)
    async with connect(target) as connection:
        routers = (await connection.registry.instances(ROUTER)).instances
        if not routers:
            raise UnavailableError("no router is registered", reason="no_router")
        clients = [GrpcRouterClient(connection.channels, router.address) for router in routers]
        tasks = [asyncio.create_task(_read(client, salt, recording)) for client in clients]
        full = asyncio.create_task(recording.is_full.wait())
        try:
            done, _ = await asyncio.wait(
                [*tasks, full], timeout=settings.duration_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
        finally:
            for each in (*tasks, full):
                each.cancel()
            await asyncio.gather(*tasks, full, return_exceptions=True)
    return recording


async def _read(client: GrpcRouterClient, salt: bytes, recording: Recording) -> None:
    async with aclosing(client.record_requests(salt)) as batches:
        async for batch in batches:
            recording.add(batch.requests, batch.lost_requests)


def lines_of(requests: Sequence[RecordedTraffic]) -> list[str]:
    """Mooncake's format, in order of time, which begins at 0."""
    ordered = sorted(requests, key=lambda each: each.arrived_at_s)
    return [
        json.dumps(
            {
                "timestamp": round(1000 * (each.arrived_at_s - ordered[0].arrived_at_s)),
                "input_length": each.prompt_tokens,
                "output_length": each.output_tokens,
                "hash_ids": list(each.block_ids),
            }
        )
        for each in ordered
    ]


def _write(path: Path, lines: Sequence[str]) -> None:
    data = "".join(f"{line}\n" for line in lines).encode()
    with path.open("xb") as file:
        file.write(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def main(argv: Sequence[str]) -> int:
    return run_command(RecordSettings, argv, _record_to_file, program="kvmesh record", description=__doc__)


def _record_to_file(settings: RecordSettings) -> int:
    path = Path(settings.out)
    if path.exists() or not path.name.removesuffix(".gz").endswith(".jsonl"):
        print(f"kvmesh record: {path} exists already, or is neither .jsonl nor .jsonl.gz", file=sys.stderr)
        return 2
    try:
        recording = asyncio.run(record(settings, settings.target()))
        _write(path, lines_of(recording.requests))
    except (MeshError, OSError) as error:
        print(f"kvmesh record: {error}", file=sys.stderr)
        return 1
    lost = f", {recording.lost} lost" if recording.lost else ""
    print(f"{len(recording.requests)} requests{lost} in {path}")
    return 0
