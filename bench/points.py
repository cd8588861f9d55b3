"""Measures one scenario on one server."""

import time
from dataclasses import dataclass
from itertools import islice
from typing import Any

from bench.grpc_target import GrpcTarget
from bench.http_target import HttpTarget
from bench.loops import closed_loop, for_seconds, measure
from bench.mesh import Served
from bench.prompts import PromptShape, make_prompts, one_token_words
from bench.scenarios import Scenario
from bench.target import LoadRequest, Target

WARM_UP_REQUESTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What was measured, on what, and the summary of a LoadReport."""

    system: str
    kind: str
    scenario: Scenario
    summary: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return {"system": self.system, "kind": self.kind, "scenario": self.scenario.name, **self.summary}


class Bench:
    """Measures scenarios on one server; prompts are as long as asked in its own tokenizer, template included."""

    def __init__(self, served: Served, kind: str, seed: int) -> None:
        self._served = served
        self._kind = kind
        self._seed = seed
        self._words = one_token_words(served.model_dir)
        self._template_tokens = 0

    async def warm_up(self) -> None:
        """Once per server: connections between services, transfer agents and caches are made by the first requests."""
        target = self._target(Scenario(protocol="http", prompt_tokens=1, output_tokens=1, concurrency=1))
        try:
            probe = await target.send(LoadRequest(prompt=self._words[0], output_tokens=1), time.perf_counter())
            if probe.error:
                raise RuntimeError(f"the first request failed: {probe.error}")
            self._template_tokens = max(0, probe.prompt_tokens - 1)
        finally:
            await target.aclose()

    async def measure(self, scenario: Scenario, seconds: float) -> Point:
        """A few requests that do not count, then `seconds` of load."""
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
            counted = for_seconds(requests, seconds)
            report = await measure(closed_loop(target, counted, scenario.concurrency), self._served.watch)
        finally:
            await target.aclose()
        return Point(system=self._served.system, kind=self._kind, scenario=scenario, summary=report.summary())

    def _target(self, scenario: Scenario) -> Target:
        if scenario.protocol == "grpc":
            return GrpcTarget(self._served.grpc_address, self._served.model)
        return HttpTarget(self._served.url, self._served.model, quick_acks=scenario.quick_acks)
