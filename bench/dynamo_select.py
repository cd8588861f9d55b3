"""Dynamo's `SelectionService` on prompts that `bench.router_beside` describes: run by the interpreter that has Dynamo.

Reads one JSON object per line: `blocks`, and `held`, for each prompt how many of its blocks each worker has. Tells them as vLLM's
KV events over ZMQ, one publisher per worker, which is how the service is fed; prints microseconds per `select`, given ready
hashes: of the processor, all threads together, and of the clock. Nothing is reserved and nothing is remembered. It imports nothing of
the mesh, so that Dynamo's environment needs nothing of it.
"""

import asyncio
import json
import os
import random
import struct
import sys
import time
from typing import Any

os.environ.setdefault("DYN_LOG", "error")

import msgspec
import zmq
from dynamo._core import (  # type: ignore[import-not-found]
    SelectionService,
    compute_block_hash_for_seq,
)

BLOCK = 16
SEED = 7
ROUNDS = 5
ROUND_S = 0.15
INDEXED_S_MAX = 60.0


def prompts_of(count: int, blocks: int) -> list[list[int]]:
    """Token ids."""
    generator = random.Random(SEED)
    return [generator.choices(range(128_000), k=blocks * BLOCK) for _ in range(count)]


def publishers(workers: int) -> tuple[list[Any], list[str]]:
    """A socket per worker, and the endpoints."""
    context = zmq.Context()
    sockets, endpoints = [], []
    for _ in range(workers):
        socket = context.socket(zmq.PUB)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        endpoints.append(f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}")
        sockets.append(socket)
    return sockets, endpoints


def publish(sockets: list[Any], prompts: list[list[int]], held: list[list[int]]) -> None:
    """Each worker tells its part of each prompt."""
    encode = msgspec.msgpack.Encoder().encode
    generator = random.Random(SEED + 1)
    for number, (tokens, depths) in enumerate(zip(prompts, held, strict=True)):
        hashes = [generator.getrandbits(63) for _ in range(len(tokens) // BLOCK)]
        for worker, depth in enumerate(depths):
            event = ["BlockStored", hashes[:depth], None, tokens[: depth * BLOCK], BLOCK, None]
            sockets[worker].send_multipart([b"", struct.pack(">Q", number), encode([0.0, [event], 0])])


async def indexed(service: Any, prompts: list[list[int]], held: list[list[int]]) -> None:
    """Until the service finds every worker with all it told of the last prompt, which is told last."""
    until = time.monotonic() + INDEXED_S_MAX
    while time.monotonic() < until:
        found = await service.overlap_scores({"token_ids": prompts[-1]})
        if {each["worker_id"]: each["device_blocks"] for each in found["workers"]} == dict(enumerate(held[-1])):
            return
        await asyncio.sleep(0.02)
    raise TimeoutError(f"not everything was indexed within {INDEXED_S_MAX:g} s")


def request_of(tokens: list[int]) -> dict[str, Any]:
    """What `select` takes, hashes ready; the service wants them signed."""
    hashes = [each - (1 << 64) if each >> 63 else each for each in compute_block_hash_for_seq(tokens, BLOCK)]
    return {
        "block_hashes": hashes,
        "sequence_hashes": [each ^ 0x5555 for each in hashes],
        "isl_tokens": len(tokens) + 5,
    }


async def figures(given: dict[str, Any]) -> dict[str, float]:
    """Best of a few rounds."""
    held, blocks = given["held"], given["blocks"]
    prompts = prompts_of(len(held), blocks)
    sockets, endpoints = publishers(len(held[0]))
    service = SelectionService(indexer_threads=4)
    for worker, endpoint in enumerate(endpoints):
        await service.upsert_worker(
            {
                "worker_id": worker,
                "endpoint": "http://127.0.0.1:9",
                "block_size": BLOCK,
                "kv_events_endpoints": {0: endpoint},
            }
        )
    # A publisher drops what is said before its subscriber has come.
    await asyncio.sleep(1.5)
    publish(sockets, prompts, held)
    await indexed(service, prompts, held)
    requests = [request_of(tokens) for tokens in prompts]
    cpu_us = wall_us = float("inf")
    for _ in range(ROUNDS):
        cpu, wall, calls = time.process_time(), time.perf_counter(), 0
        while time.perf_counter() - wall < ROUND_S:
            await service.select(requests[calls % len(requests)])
            calls += 1
        cpu_us = min(cpu_us, 1e6 * (time.process_time() - cpu) / calls)
        wall_us = min(wall_us, 1e6 * (time.perf_counter() - wall) / calls)
    return {"select_cpu_us": cpu_us, "select_us": wall_us}


def main() -> None:
    """One line in, one line of figures out. One per process: the service's threads outlive it."""
    print(json.dumps(asyncio.run(figures(json.loads(sys.stdin.readline())))), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
