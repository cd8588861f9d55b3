"""Requests of a load: traces in published formats, and drawn ones."""

import csv
import gzip
import json
import math
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from random import Random

from kvmesh.core.whatif import RecordedRequest

MOONCAKE_BLOCK_TOKENS = 512
LENGTH_MAX = 100_000


def load_trace(path: Path) -> list[RecordedRequest]:
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


def _mooncake(lines: Iterator[str]) -> Iterator[RecordedRequest]:
    for line in lines:
        row = json.loads(line)
        yield RecordedRequest(
            at_s=row["timestamp"] / 1000,
            prompt_tokens=row["input_length"],
            output_tokens=row["output_length"],
            block_ids=tuple(row["hash_ids"]),
        )


def _azure(lines: Iterator[str]) -> Iterator[RecordedRequest]:
    start: datetime | None = None
    for row in csv.DictReader(lines):
        at = datetime.fromisoformat(row["TIMESTAMP"][:26])
        start = start or at
        yield RecordedRequest(
            at_s=(at - start).total_seconds(),
            prompt_tokens=max(1, int(row["ContextTokens"])),
            output_tokens=max(1, int(row["GeneratedTokens"])),
        )


def make_load(
    rate: Callable[[float], float],
    *,
    peak: float,
    duration_s: float,
    prompt_tokens: float,
    output_tokens: float,
    prompt_cv: float = 0.8,
    output_cv: float = 0.8,
    seed: int = 1,
) -> list[RecordedRequest]:
    """Draws arrivals by thinning (Lewis and Shedler 1979) and log-normal lengths. `rate` never exceeds `peak`."""
    generator = Random(seed)
    at_s, requests = 0.0, []
    while (at_s := at_s + generator.expovariate(peak)) < duration_s:
        if generator.random() * peak < rate(at_s):
            requests.append(
                RecordedRequest(
                    at_s=at_s,
                    prompt_tokens=draw_length(generator, mean=prompt_tokens, cv=prompt_cv),
                    output_tokens=draw_length(generator, mean=output_tokens, cv=output_cv),
                )
            )
    return requests


def draw_length(generator: Random, mean: float, cv: float) -> int:
    """Log-normal with this mean and coefficient of variation."""
    if cv <= 0:
        return max(1, round(mean))
    sigma2 = math.log(1 + cv * cv)
    return min(LENGTH_MAX, max(1, round(generator.lognormvariate(math.log(mean) - sigma2 / 2, math.sqrt(sigma2)))))
