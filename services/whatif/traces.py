"""Request traces: loaders for published formats, and a generator for machines without the files."""

import csv
import gzip
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request: time (seconds from the start), lengths, and the 512-token blocks of its prompt."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()


def load_trace(path: Path) -> list[TraceRequest]:
    """Loads a Mooncake `.jsonl[.gz]` or an Azure 2023 `.csv[.gz]` file, in order of time."""
    name = path.name.removesuffix(".gz")
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        if name.endswith(".jsonl"):
            requests = list(_mooncake(file))
        elif name.endswith(".csv"):
            requests = list(_azure(file))
        else:
            raise ValueError(f"{path}: neither .jsonl nor .csv")
    return sorted(requests, key=lambda request: request.at_s)


def _mooncake(lines: Iterator[str]) -> Iterator[TraceRequest]:
    for line in lines:
        row = json.loads(line)
        yield TraceRequest(
            at_s=row["timestamp"] / 1000,
            prompt_tokens=row["input_length"],
            output_tokens=row["output_length"],
            block_ids=tuple(row["hash_ids"]),
        )


def _azure(lines: Iterator[str]) -> Iterator[TraceRequest]:
    start: datetime | None = None
    for row in csv.DictReader(lines):
        at = datetime.fromisoformat(row["TIMESTAMP"][:26])
        start = start or at
        yield TraceRequest(
            at_s=(at - start).total_seconds(),
            prompt_tokens=max(1, int(row["ContextTokens"])),
            output_tokens=max(1, int(row["GeneratedTokens"])),
        )


def generate_trace(count: int, *, rate_per_s: float, seed: int) -> list[TraceRequest]:
    """Poisson arrivals of sessions that grow, each turn repeating its session's blocks and adding new ones.

    Fitted to the Mooncake conversation trace: prompts of 7 100 tokens in the median (there 6 900), 15 600 and 29 700 at the
    third quartile and the ninth decile (15 400, 27 400), 350 output tokens, 0.38 of all blocks seen before (0.37).
    """
    rng = random.Random(seed)
    at_s, next_block = 0.0, 1
    sessions: list[tuple[int, ...]] = []
    requests: list[TraceRequest] = []
    for _ in range(count):
        at_s += rng.expovariate(rate_per_s)
        known = sessions.pop(rng.randrange(len(sessions))) if sessions and rng.random() < 0.35 else (0,)
        fresh = max(1, round(rng.lognormvariate(math.log(8), 1.2)))
        blocks = (*known, *range(next_block, next_block + fresh))[:250]
        next_block += fresh
        requests.append(
            TraceRequest(
                at_s=at_s,
                prompt_tokens=MOONCAKE_BLOCK_TOKENS * len(blocks) - rng.randrange(MOONCAKE_BLOCK_TOKENS),
                output_tokens=min(2000, max(1, round(rng.lognormvariate(math.log(350), 0.6)))),
                block_ids=blocks,
            )
        )
        sessions.append(blocks)
    return requests
