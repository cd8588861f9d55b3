"""Kills the prefill worker of a request during its KV transfer: `python -m tests.chaos.prefill_kills --kills 100`.

Simulated engines pull real memory over NIXL and pause in the middle of each transfer. Each kill ends a prefill worker's process when the decode
worker has read half of the blocks. The answer must equal that of an undisturbed mesh, no request may hang, and the gauges of all workers must
return to zero. The prefill worker is replaced before the next kill.
"""

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from bench.figures import percentiles
from kvmesh.cli.forked import Forked
from tests.chaos.processes import ProcessMesh, fork_spares, process_mesh
from tests.chaos.samples import metrics_of, total
from tests.patience import PATIENCE_S

PAUSE_S = 0.6
"""Pause in the middle of a transfer. Shorter than the time limit of a first transfer."""
NOTICED_S_MAX = 1.0
"""The decode worker must notice the loss and continue with the request within this time."""
ENGINE = (
    *("--simulated-time-factor", "1", "--simulated-kv-transfer-pause-s", str(PAUSE_S)),
    *("--kv-lease-s", "10", "--kv-pull-timeout-s", "5", "--no-worker-warm-up"),
)
GAUGES = (
    "kv_blocks_used",
    "kv_blocks_held",
    "kv_blocks_unaccounted",
    "pulling_requests",
    "leases_handles",
    "legs_requests",
)
# Every request is handed off, and a restarted worker is used at once.
ROUTER = "round_robin"


@dataclass(slots=True)
class Outcome:
    """Results of the kills."""

    kills: int = 0
    transfer_end_s: list[float] = field(default_factory=list)
    """Time from a kill to the end of the transfer on the decode worker."""
    answered_s: list[float] = field(default_factory=list)
    """Time from a kill to the complete answer."""
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class PrefillKills:
    """A mesh with two prefill workers and one decode worker."""

    mesh: ProcessMesh
    session: aiohttp.ClientSession
    random: Random
    outcome: Outcome = field(default_factory=Outcome)

    async def ask(self, prompt: Sequence[int], salt: str = "") -> list[int]:
        """Returns the answer's tokens. Raises AssertionError for an error."""
        body = {
            "model": "demo", "prompt": list(prompt), "max_tokens": 8, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "cache_salt": salt,
        }  # fmt: skip
        async with asyncio.timeout(PATIENCE_S):
            while True:
                async with self.session.post(f"{self.mesh.url}/v1/completions", json=body) as response:
                    answer: Any = await response.json()
                    if response.status == 200:
                        tokens: list[int] = answer["choices"][0]["token_ids"]
                        return tokens
                    # A busy machine may delay the load records of the decode worker. No kill gives this error.
                    assert answer["error"]["code"] == "no_worker", answer
                await asyncio.sleep(0.05)

    async def kill_one(self) -> None:
        """Sends one request and kills its prefill worker in the middle of its transfer."""
        prompt = [self.random.randrange(10, 400) for _ in range(self.random.randrange(200, 600))]
        expected = await self.ask(prompt, salt="undisturbed")
        asking = asyncio.create_task(self.ask(prompt))
        name = await self._prefill_in_transfer(asking)
        if name is None:
            await asyncio.wait([asking])
            return  # The transfer ended before a metric showed it.
        await self.mesh.kill(name)
        self.outcome.kills += 1
        killed_s = time.perf_counter()
        transfer_end = asyncio.create_task(self._transfer_end())
        try:
            tokens = await asking
        except (AssertionError, TimeoutError, aiohttp.ClientError) as error:
            self.outcome.problems.append(f"kill {self.outcome.kills}: {error!r}")
        else:
            self.outcome.answered_s.append(time.perf_counter() - killed_s)
            if tokens != expected:
                self.outcome.problems.append(f"kill {self.outcome.kills}: {tokens} instead of {expected}")
        self.outcome.transfer_end_s.append(await transfer_end - killed_s)
        await self.mesh.start(name)
        await self._wait_recovered()

    async def _prefill_in_transfer(self, asking: "asyncio.Task[list[int]]") -> str | None:
        """Returns the prefill worker whose blocks are leased while the decode worker pulls; None if the request ended first."""
        while not asking.done():
            texts = await metrics_of(self.mesh)
            names = {child.pid: name for name, child in self.mesh.children.items()}
            found = {names[pid]: text for pid, text in texts.items() if pid in names}
            if total(found.get("decode-0", ""), "pulling_requests"):
                holders = [name for name in ("prefill-0", "prefill-1") if total(found.get(name, ""), "leases_handles")]
                if holders:
                    return holders[0]
            await asyncio.sleep(0.005)
        return None

    async def _transfer_end(self) -> float:
        """Returns the time at which the decode worker's transfer ended."""
        while True:
            child = self.mesh.children["decode-0"]
            text = (await metrics_of(self.mesh)).get(child.pid)
            if text is not None and not total(text, "pulling_requests"):
                return time.perf_counter()
            await asyncio.sleep(0.01)

    async def _wait_recovered(self) -> None:
        """Waits until both prefill workers take requests and all gauges are zero."""
        left: list[str] = []
        try:
            async with asyncio.timeout(2 * PATIENCE_S):
                await self.mesh.wait_ready(2, 1)
            async with asyncio.timeout(PATIENCE_S):
                while left := await self._in_use():
                    await asyncio.sleep(0.05)
        except TimeoutError:
            self.outcome.problems.append(f"kill {self.outcome.kills}: {left or 'the worker did not return'}")

    async def _in_use(self) -> list[str]:
        names = {child.pid: name for name, child in self.mesh.children.items()}
        return [
            f"{names[pid]}: {gauge} {value:g}"
            for pid, text in (await metrics_of(self.mesh)).items()
            if names.get(pid, "").startswith(("prefill", "decode"))
            for gauge in GAUGES
            if (value := total(text, gauge))
        ]


async def run(
    kills: int, directory: Path, *, seconds: float = float("inf"), seed: int = 1, spares: Sequence[Forked] = ()
) -> Outcome:
    """Runs `kills` kills, each in the middle of a transfer, or as many as `seconds` allow."""
    async with (
        process_mesh(
            directory, prefill=2, decode=1, routers=1, policy=ROUTER, engine_argv=ENGINE, spares=spares
        ) as mesh,
        aiohttp.ClientSession() as session,
    ):
        running = PrefillKills(mesh, session, Random(seed))
        for _ in range(4):  # The first transfers connect the workers.
            await running.ask([running.random.randrange(10, 400) for _ in range(100)])
        ends_s = time.monotonic() + seconds
        while running.outcome.kills < kills and not running.outcome.problems and time.monotonic() < ends_s:
            await running.kill_one()
        if running.outcome.problems:
            running.outcome.problems.append(mesh.logs())
        return running.outcome


def main() -> int:
    """Returns 0 if every answer was right, none hung, and all resources were freed. Only prints the times, because a busy machine makes them
    longer."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.prefill_kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=60.0, help="time limit, with fewer kills")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    spares = fork_spares(5 + options.kills)
    with tempfile.TemporaryDirectory() as directory:
        seconds = 60 * options.minutes
        outcome = asyncio.run(run(options.kills, Path(directory), seconds=seconds, seed=options.seed, spares=spares))
    for name, seconds in (("transfer ended", outcome.transfer_end_s), ("answered", outcome.answered_s)):
        found = percentiles(seconds)
        late = sum(each > NOTICED_S_MAX for each in seconds)
        print(f"{name:18} p50 {found['p50']:.0f} ms, p99 {found['p99']:.0f} ms, {late} of {len(seconds)} after 1 s")
    print(f"{outcome.kills} kills in transfer, {len(outcome.problems)} problems")
    for problem in outcome.problems:
        print(f"PROBLEM {problem}")
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
