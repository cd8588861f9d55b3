"""Request traces in published formats."""

import csv
import gzip
import json
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
