"""Dynamo's `RadixTree` on the prompts that `bench.router_index` gives: run by the interpreter that has Dynamo.

Reads one JSON object per line: `prompts`, and `held`, [worker, depth] pairs per prompt; prints microseconds per lookup. It
imports nothing of the mesh, so that Dynamo's environment needs nothing of it.
"""

import json
import os
import sys
import time

os.environ.setdefault("DYN_LOG", "error")

from dynamo._core import RadixTree  # type: ignore[import-not-found]  # after its logging's setting, which it reads now

ROUNDS = 5
ROUND_S = 0.15


def stored(number: int, blocks: list[int]) -> bytes:
    """A stored event; sequence hashes differ from token hashes, as an engine's do."""
    told = [{"block_hash": block ^ 0x5555, "tokens_hash": block} for block in blocks]
    return json.dumps(
        {"event_id": number, "data": {"stored": {"parent_hash": None, "blocks": told}}, "dp_rank": 0}
    ).encode()


def lookup_us(tree: RadixTree, prompts: list[list[int]]) -> float:
    """Processor time of one lookup with its scores read, in the best round; that of the tree's own thread is part of it."""
    best = float("inf")
    for _ in range(ROUNDS):
        started, calls = time.process_time(), 0
        while (spent := time.process_time() - started) < ROUND_S:
            for _ in range(20):
                tree.find_matches(prompts[calls % len(prompts)]).scores  # noqa: B018 - reading converts it
                calls += 1
        best = min(best, spent / calls)
    return 1e6 * best


def main() -> None:
    """One line in, one figure out."""
    for line in sys.stdin:
        given = json.loads(line)
        tree, number = RadixTree(), 0
        for prompt, held in zip(given["prompts"], given["held"], strict=True):
            for worker, depth in held:
                number += 1
                tree.apply_event(worker, stored(number, prompt[:depth]))
        for prompt, held in zip(given["prompts"], given["held"], strict=True):
            found = {worker: depth for (worker, _), depth in tree.find_matches(prompt).scores.items()}
            assert found == dict(held), "other depths than were stored"
        print(json.dumps({"lookup_us": lookup_us(tree, given["prompts"])}), flush=True)


if __name__ == "__main__":
    main()
