"""Sends random and mutated bodies to a frontend with all of its APIs.

python -m tests.fuzz --bodies 100000 --seed 1

Every response must have a status below 500, or 503 with an error object. Nothing may be logged as an error. At the end no task, leg or memory
may be leaked. A failure prints the body.
"""

import argparse
import asyncio
import gc
import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from bench.processes import PAGE_BYTES
from services.frontend.api.responses import serve
from services.frontend.models import ServedModel
from services.frontend.settings import ResponsesSettings
from tests.frontend_apps import AppSettings, RunningApps, running_apps
from tests.frontend_mesh import FakeMesh, served_model, write_model
from tests.fuzz_bodies import ANSWERS, APP_FIELDS, FIELDS, encoded
from tests.patience import PATIENCE_S

FEATURES = frozenset({"logprobs", "logit_bias", "structured_output", "prompt_logprobs"})
PATHS = sorted([*FIELDS, *APP_FIELDS])
MANGLED_SHARE = 0.15
PARTS = 10
GROWTH_BYTES_MAX = 24 << 20
"""Allowed growth from a quarter of the run to its end. The allocator alone varies by about half of it."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """Results of a run. `failures` is empty if the run passed."""

    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)
    tasks: list[int] = field(default_factory=list)

    def check_run(self) -> None:
        """Adds the failures that only the whole run can show: growth of tasks and memory."""
        if len(self.rss_bytes) < 4:
            return
        if self.tasks[-1] > self.tasks[0]:
            self.failures.append(f"tasks grew: {self.tasks}")
        growth = self.rss_bytes[-1] - self.rss_bytes[len(self.rss_bytes) // 4]
        if growth > GROWTH_BYTES_MAX:
            self.failures.append(f"memory grew by {growth >> 20} MiB: {[size >> 20 for size in self.rss_bytes]}")


class _Errors(logging.Handler):
    """Adds everything that is logged as an error to the failures."""

    def __init__(self, findings: Findings) -> None:
        super().__init__(logging.ERROR)
        self._findings = findings

    def emit(self, record: logging.LogRecord) -> None:
        self._findings.failures.append(f"logged: {record.name} {record.getMessage()} {record.exc_info}")


async def fuzz(directory: Path, *, bodies: int, seed: int, concurrency: int = 8) -> Findings:
    """Runs the fuzzer once and returns its findings."""
    findings = Findings()
    # Tasks of earlier tests may log errors when they are collected.
    gc.collect()
    handler = _Errors(findings)
    logging.getLogger().addHandler(handler)
    rng = random.Random(seed)
    model = served_model(write_model(directory / "model"), features=FEATURES)
    answers = [[*model.text.tokenise(text, adds_special_tokens=False), 2] for text in ANSWERS]
    mesh = FakeMesh(answer=lambda _: rng.choice(answers))
    # The store of responses is bounded by size. With a small bound the run fills it early, and memory is constant from then on.
    apps = AppSettings(responses=ResponsesSettings(stored_bytes_max=1 << 20))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(serve, "SWEEP_S", 1.0)
            async with running_apps([model], mesh, directory, apps=apps, seed=seed) as running:
                for _ in range(PARTS):
                    await _part(running, mesh, model, rng, bodies // PARTS, concurrency, findings)
                    if findings.failures:
                        break
    finally:
        logging.getLogger().removeHandler(handler)
    findings.check_run()
    return findings


async def _part(
    running: RunningApps,
    mesh: FakeMesh,
    model: ServedModel,
    rng: random.Random,
    bodies: int,
    concurrency: int,
    findings: Findings,
) -> None:
    sent = ((path := rng.choice(PATHS), encoded(rng, path, mangled_share=MANGLED_SHARE)) for _ in range(bodies))

    async def client() -> None:
        for path, data in sent:
            if findings.failures:
                return
            await _send(running.session, running.url, path, data, findings)

    await asyncio.gather(*(client() for _ in range(concurrency)))
    await _settle(running, mesh, findings)
    # The records of the fake mesh grow with each request and would look like a leak.
    for log in (mesh.asks, mesh.reports, mesh.prefills, mesh.generations, mesh.legs, mesh.released, mesh.cancelled):
        log.clear()
    gc.collect()
    end_s = time.monotonic() + PATIENCE_S
    # The server's tasks of calls and connections end a moment after their clients.
    while findings.tasks and len(asyncio.all_tasks()) > findings.tasks[0] and time.monotonic() < end_s:
        await asyncio.sleep(0.01)
    findings.tasks.append(len(asyncio.all_tasks()))
    findings.rss_bytes.append(int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES)  # noqa: ASYNC240


async def _send(session: aiohttp.ClientSession, url: str, path: str, data: bytes, findings: Findings) -> None:
    async with session.post(url + path, data=data, headers={"Content-Type": "application/json"}) as response:
        text = await response.text()
    findings.statuses[response.status] += 1
    if problem := _problem(response.status, text, response.headers.get("Retry-After", "")):
        findings.failures.append(f"{problem}: POST {path} {data[:2000]!r} -> {response.status} {text[:1000]}")


def _problem(status: int, text: str, retry_after: str) -> str:
    """Returns what is wrong with a response, or an empty string."""
    if status >= 400:
        try:
            error = json.loads(text)["error"]
        except (ValueError, KeyError, TypeError):
            return "no error object"
        if not isinstance(error, dict) or not error.get("message"):
            return "an error without a message"
        if status >= 500 and not (status == 503 and retry_after):
            return "a server error"
    return "an internal error in a stream" if '"internal_error"' in text or "internal error" in text else ""


async def _settle(running: RunningApps, mesh: FakeMesh, findings: Findings) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while running.pipeline.in_flight or mesh.running or mesh.handles:
        if time.monotonic() > end_s:
            left = f"{running.pipeline.in_flight} requests, {len(mesh.running)} legs, {len(mesh.handles)} handles"
            findings.failures.append(f"left behind: {left}")
            return
        await asyncio.sleep(0.01)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. The status is 1 if there are failures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bodies", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=8)
    options = parser.parse_args(argv)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvmesh-fuzz-") as folder:
        findings = asyncio.run(
            fuzz(Path(folder), bodies=options.bodies, seed=options.seed, concurrency=options.concurrency)
        )
    took_s = time.monotonic() - began_s
    total = findings.statuses.total()
    print(f"{total} bodies in {took_s:.0f} s; statuses {dict(sorted(findings.statuses.items()))}")
    print(f"tasks {findings.tasks}; RSS MiB {[size >> 20 for size in findings.rss_bytes]}")
    for failure in findings.failures[:20]:
        print(f"FAILED: {failure}")
    return 1 if findings.failures else 0


if __name__ == "__main__":
    sys.exit(main())
