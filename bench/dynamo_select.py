"""Measures Dynamo's `SelectionService` on the prompts of `bench.router_beside`. Runs in Dynamo's environment.

Reads one JSON object per line: `blocks`, and `held`, for each prompt the number of its blocks on each worker. Publishes them as vLLM's KV events
over ZMQ, with one publisher per worker. Prints microseconds per `select` with precomputed hashes: CPU time of all threads, and wall time.
Reserves nothing. Does not import kvmesh, which that environment lacks.
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
    """Returns prompts as token ids."""
    generator = random.Random(SEED)
    return [generator.choices(range(128_000), k=blocks * BLOCK) for _ in range(count)]


def publishers(workers: int) -> tuple[list[Any], list[str]]:
    """Opens a socket per worker; returns sockets and endpoints."""
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
    """Publishes the blocks of each prompt that each worker holds."""
    encode = msgspec.msgpack.Encoder().encode
    generator = random.Random(SEED + 1)
    for number, (tokens, depths) in enumerate(zip(prompts, held, strict=True)):
        hashes = [generator.getrandbits(63) for _ in range(len(tokens) // BLOCK)]
        for worker, depth in enumerate(depths):
            event = ["BlockStored", hashes[:depth], None, tokens[: depth * BLOCK], BLOCK, None]
            sockets[worker].send_multipart([b"", struct.pack(">Q", number), encode([0.0, [event], 0])])


async def indexed(service: Any, prompts: list[list[int]], held: list[list[int]]) -> None:
    """Waits until the service finds all published blocks of the last prompt, for every worker."""
    until = time.monotonic() + INDEXED_S_MAX
    while time.monotonic() < until:
        found = await service.overlap_scores({"token_ids": prompts[-1]})
        if {each["worker_id"]: each["device_blocks"] for each in found["workers"]} == dict(enumerate(held[-1])):
            return
        await asyncio.sleep(0.02)
    raise TimeoutError(f"the service did not index all blocks within {INDEXED_S_MAX:g} s")


def request_of(tokens: list[int]) -> dict[str, Any]:
    """Returns the argument of `select`, with precomputed hashes; the service expects signed integers."""
    hashes = [each - (1 << 64) if each >> 63 else each for each in compute_block_hash_for_seq(tokens, BLOCK)]
    return {
        "block_hashes": hashes,
        "sequence_hashes": [each ^ 0x5555 for each in hashes],
        "isl_tokens": len(tokens) + 5,
    }


async def figures(given: dict[str, Any]) -> dict[str, float]:
    """Returns the figures of the best of a few rounds."""
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
    # A publisher drops messages that it sends before its subscriber connects.
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
    """Reads one line and prints one line of figures. Use one process per line, because the service's threads outlive it."""
    print(json.dumps(asyncio.run(figures(json.loads(sys.stdin.readline())))), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
