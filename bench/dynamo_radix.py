"""Measures Dynamo's `RadixTree` on the prompts of `bench.router_index`. Runs in Dynamo's environment.

Reads one JSON object per line: `prompts`, and `held`, which has [worker, depth] pairs for each prompt. Prints microseconds per lookup. Does not
import kvmesh, which that environment lacks.
"""

import json
import os
import sys
import time

os.environ.setdefault("DYN_LOG", "error")

from dynamo._core import RadixTree  # type: ignore[import-not-found]  # reads the logging setting at import

ROUNDS = 5
ROUND_S = 0.15


def stored(number: int, blocks: list[int]) -> bytes:
    """Returns a stored event. Its sequence hashes differ from its token hashes, as in real engines."""
    told = [{"block_hash": block ^ 0x5555, "tokens_hash": block} for block in blocks]
    return json.dumps(
        {"event_id": number, "data": {"stored": {"parent_hash": None, "blocks": told}}, "dp_rank": 0}
    ).encode()


def lookup_us(tree: RadixTree, prompts: list[list[int]]) -> float:
    """Returns the CPU time of one lookup, including reading its scores and the tree's own thread, in the best round."""
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
    """Reads one line and prints one figure, until input ends."""
    for line in sys.stdin:
        given = json.loads(line)
        tree, number = RadixTree(), 0
        for prompt, held in zip(given["prompts"], given["held"], strict=True):
            for worker, depth in held:
                number += 1
                tree.apply_event(worker, stored(number, prompt[:depth]))
        for prompt, held in zip(given["prompts"], given["held"], strict=True):
            found = {worker: depth for (worker, _), depth in tree.find_matches(prompt).scores.items()}
            assert found == dict(held), "the tree found depths that were not stored"
        print(json.dumps({"lookup_us": lookup_us(tree, given["prompts"])}), flush=True)


if __name__ == "__main__":
    main()
