"""Measures the step-frame link alone: one simulated decode worker at factor 0, one frontend link, many requests, no text.

python -m bench.link --concurrency 256 --seconds 5
"""

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

from bench.processes import process_use
from bench.services import one_worker
from kvmesh.clock import SystemClock
from kvmesh.core import Generation, Leg, LegFinish, LegTask, Role, SamplingParams, TokenLogprob
from kvmesh.lifecycle import run
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.clients import LegLink
from kvmesh.rpc.leg_link import GrpcLegLinks
from kvmesh.rpc.settings import RpcSettings

PROMPT_TOKENS = 32
OUTPUT_TOKENS = 512


class _Sink:
    """Counts tokens and submits the next leg when one ends."""

    def __init__(self, load: "_Load") -> None:
        self._load = load

    def on_tokens(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None, came_s: float) -> None:
        self._load.tokens += len(token_ids)

    def on_prompt(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Ignored, because no leg requests log-probabilities."""

    def on_finish(self, finish: LegFinish) -> None:
        self._load.on_finish(finish)


class _Load:
    """Keeps `concurrency` legs in flight until it is stopped."""

    def __init__(self, link: LegLink) -> None:
        self._link = link
        self.tokens = self.legs = self.in_flight = 0
        self.error = ""
        self.is_stopping = False
        self.idle = asyncio.Event()

    def submit(self) -> None:
        self.legs += 1
        self.in_flight += 1
        generation = Generation(
            model="demo",
            token_ids=[5 + (self.legs + i) % 100 for i in range(PROMPT_TOKENS)],
            sampling=SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True),
        )
        leg = Leg(leg_id=f"leg-{self.legs}", task=LegTask.GENERATE, generation=generation)
        self._link.submit_nowait(leg, _Sink(self), timeout_s=60.0)

    def on_finish(self, finish: LegFinish) -> None:
        self.in_flight -= 1
        if finish.error is not None:
            self.error = finish.error.message
        elif not self.is_stopping:
            self.submit()
        if not self.in_flight:
            self.idle.set()


async def measure_link(concurrency: int, seconds: float) -> dict[str, Any]:
    """Measures tokens per second over one link, and their CPU on each side."""
    argv = (
        "--simulated-time-factor",
        "0",
        "--simulated-kv-transport",
        "none",
        "--simulated-running-requests-max",
        "512",
    )
    channels = ChannelPool(settings=RpcSettings())
    async with one_worker("decode", argv) as (worker, pid):
        links = GrpcLegLinks(channels, frontend_id="bench", clock=SystemClock())
        load = _Load(await links.link(worker, Role.DECODE, timeout_s=5.0))
        for _ in range(concurrency):
            load.submit()
        await asyncio.sleep(min(1.0, seconds / 4))
        tokens, worker_cpu, own_cpu, started = (
            load.tokens,
            process_use(pid).cpu_s,
            time.process_time(),
            time.perf_counter(),
        )
        await asyncio.sleep(seconds)
        tokens, wall_s = load.tokens - tokens, time.perf_counter() - started
        worker_cpu, own_cpu = process_use(pid).cpu_s - worker_cpu, time.process_time() - own_cpu
        load.is_stopping = True
        async with asyncio.timeout(30):
            await load.idle.wait()
        await links.aclose()
    await channels.aclose()
    return {
        "concurrency": concurrency,
        "tokens_per_s": tokens / wall_s,
        "worker_cpu_s_per_1m_tokens": 1e6 * worker_cpu / max(1, tokens),
        "frontend_cpu_s_per_1m_tokens": 1e6 * own_cpu / max(1, tokens),
        "error": load.error,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args(argv)
    print(json.dumps(run(measure_link(options.concurrency, options.seconds)), indent=1))


if __name__ == "__main__":
    main()
