"""Measures one scenario on one server."""

import asyncio
import time
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from bench.grpc_target import GrpcTarget
from bench.http_target import HttpTarget
from bench.loops import arrive, closed_loop, for_seconds, measure, open_loop, poisson
from bench.mesh import Served
from bench.processes import process_use
from bench.prompts import PromptShape, make_prompts, one_token_words
from bench.scenarios import Scenario
from bench.target import LoadRequest, LoadResult, Target

WARM_UP_REQUESTS = 20
WARM_UP_TOKENS = 64
IDLE_CORES_MAX = 0.25
IDLE_INTERVAL_S = 0.5
IDLE_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measurement: scenario, system, and the summary of its LoadReport."""

    system: str
    kind: str
    scenario: Scenario
    summary: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {"system": self.system, "kind": self.kind, "scenario": self.scenario.name, **self.summary}


class Bench:
    """Measures scenarios on one server. Prompt lengths count the server's own tokens, template included."""

    def __init__(self, served: Served, kind: str, seed: int) -> None:
        self._served = served
        self._kind = kind
        self._seed = seed
        self._words = one_token_words(served.model_dir)
        self._template_tokens = 0

    async def warm_up(self) -> None:
        """Warms up the server. Runs once per server: the first requests create transfer agents, connections between services, and caches.

        The prompts are long enough to be transferred. Afterwards waits until the server is idle, because agents are still starting after the
        first answers.
        """
        target = self._target(Scenario(protocol="http", prompt_tokens=1, output_tokens=1, concurrency=1))
        try:
            probe = await target.send(LoadRequest(prompt=self._words[0], output_tokens=1), time.perf_counter())
            if probe.error:
                raise RuntimeError(f"the first request failed: {probe.error}")
            self._template_tokens = max(0, probe.prompt_tokens - 1)
            prompts = make_prompts(PromptShape(tokens=WARM_UP_TOKENS), seed=self._seed, words=self._words)
            requests = (LoadRequest(prompt=prompt, output_tokens=WARM_UP_TOKENS) for prompt in prompts)
            await closed_loop(target, islice(requests, WARM_UP_REQUESTS), 1)
        finally:
            await target.aclose()
        await self._wait_idle()

    async def _wait_idle(self) -> None:
        """Waits until all processes of the server use little CPU, at most for a bounded time."""
        end_s = time.perf_counter() + IDLE_TIMEOUT_S
        used_s = self._cpu_s()
        while time.perf_counter() < end_s:
            await asyncio.sleep(IDLE_INTERVAL_S)
            before_s, used_s = used_s, self._cpu_s()
            if used_s - before_s < IDLE_CORES_MAX * IDLE_INTERVAL_S:
                return

    def _cpu_s(self) -> float:
        return sum(process_use(pid).cpu_s for pid in self._served.watch.values())

    async def measure(self, scenario: Scenario, seconds: float) -> Point:
        """Runs a few requests that are not counted, then `seconds` of load."""
        self._seed += 1
        shape = PromptShape(tokens=max(1, scenario.prompt_tokens - self._template_tokens))
        requests = (
            LoadRequest(prompt=prompt, output_tokens=scenario.output_tokens)
            for prompt in make_prompts(shape, seed=self._seed, words=self._words)
        )
        target = self._target(scenario)
        try:
            warm_up = islice(requests, WARM_UP_REQUESTS + scenario.concurrency)
            await closed_loop(target, warm_up, scenario.concurrency)
            report = await measure(self._load(target, requests, scenario=scenario, seconds=seconds), self._served.watch)
        finally:
            await target.aclose()
        return Point(system=self._served.system, kind=self._kind, scenario=scenario, summary=report.summary())

    def _load(
        self, target: Target, requests: Iterator[LoadRequest], *, scenario: Scenario, seconds: float
    ) -> Awaitable[list[LoadResult]]:
        if not scenario.rate_per_s:
            return closed_loop(target, for_seconds(requests, seconds), scenario.concurrency)
        counted = islice(requests, round(scenario.rate_per_s * seconds))
        return open_loop(target, arrive(poisson(counted, scenario.rate_per_s, self._seed)))

    def _target(self, scenario: Scenario) -> Target:
        if scenario.protocol == "grpc":
            return GrpcTarget(self._served.grpc_address, self._served.model)
        return HttpTarget(self._served.url, self._served.model, quick_acks=scenario.quick_acks, key=self._served.key)
