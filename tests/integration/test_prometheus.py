"""Runs real Prometheus with the configuration of `compose/`: it finds services in the registry, and the planner queries it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import ClientSession
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvmesh.clock import SystemClock
from kvmesh.core import Role
from kvmesh.core.planning import PlanReport
from kvmesh.discovery.base import DECODE, FRONTEND, PLANNER, Registration
from kvmesh.discovery.consul import ConsulRegistry
from kvmesh.discovery.embedded import EmbeddedAgent
from kvmesh.discovery.settings import AgentSettings, DiscoverySettings
from kvmesh.telemetry import MetricsServer, Telemetry
from services.planner.metrics import PlannerMetrics
from services.planner.observe import Fetcher, PrometheusSource, ScrapeSource
from services.planner.planner import Planner
from services.planner.settings import PlannerSettings
from tests.patience import PATIENCE_S
from tests.servers import Server

CONFIG = Path(__file__).parents[2] / "compose" / "prometheus" / "prometheus.yml"


class FrontendMetrics:
    """The metrics of a frontend that the planner reads."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        options = {"registry": self.registry}
        self.requests = Counter("kvmesh_frontend_requests", "d", ("model", "code"), **options)
        self.ttft = Histogram("kvmesh_frontend_ttft_seconds", "d", ("model",), buckets=(0.1, 0.2, 0.4), **options)
        self.itl = Histogram("kvmesh_frontend_itl_seconds", "d", ("model",), buckets=(0.01, 0.02), **options)
        self.prompt = Counter("kvmesh_frontend_prompt_tokens", "d", ("model",), **options)
        self.output = Counter("kvmesh_frontend_output_tokens", "d", ("model",), **options)
        self.lengths = Histogram("kvmesh_frontend_prompt_length_tokens", "d", ("model",), **options)
        self.serve(0)

    def serve(self, requests: int) -> None:
        """Counts so many requests of 100 + 10 tokens, with 0.15 s to the first token and 15 ms between tokens."""
        self.requests.labels("demo", "200").inc(requests)
        self.prompt.labels("demo").inc(100 * requests)
        self.output.labels("demo").inc(10 * requests)
        ttft, itl, lengths = self.ttft.labels("demo"), self.itl.labels("demo"), self.lengths.labels("demo")
        for _ in range(requests):
            lengths.observe(100)
            ttft.observe(0.15)
            itl.observe(0.015)


def worker_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    for name, value in (
        ("running_requests", 3),
        ("waiting_requests", 1),
        ("kv_blocks_used", 25),
        ("kv_blocks_total", 100),
    ):
        Gauge(f"kvmesh_worker_{name}", "d", ("model", "role"), registry=registry).labels("demo", "decode").set(value)
    for name in ("prompt_tokens", "output_tokens"):
        Counter(f"kvmesh_worker_{name}", "d", ("model", "role"), registry=registry).labels("demo", "decode")
    return registry


@asynccontextmanager
async def listed_services() -> AsyncIterator[tuple[EmbeddedAgent, ConsulRegistry, FrontendMetrics]]:
    """An embedded agent that lists a frontend and a decode worker with real metrics servers."""
    agent = EmbeddedAgent(AgentSettings())
    await agent.start()
    registry = ConsulRegistry(DiscoverySettings(address=agent.address))
    frontend = FrontendMetrics()
    servers = [MetricsServer(frontend.registry, "127.0.0.1", 0), MetricsServer(worker_registry(), "127.0.0.1", 0)]
    try:
        for server in servers:
            await server.start()
        await register(registry, FRONTEND, "frontend-1", servers[0].port)
        await register(registry, DECODE, "decode-1", servers[1].port, model="demo", role="decode")
        yield agent, registry, frontend
    finally:
        for server in servers:
            await server.aclose()
        await registry.aclose()
        await agent.aclose()


async def register(registry: ConsulRegistry, service: str, name: str, metrics_port: int | None, **meta: str) -> None:
    """Registers an instance whose metrics can be scraped. It serves no gRPC; its failing check does not matter for that."""
    if metrics_port is not None:
        meta["metrics_port"] = str(metrics_port)
    await registry.register(
        Registration(
            service=service, instance_id=name, host="127.0.0.1", port=1, meta=meta, check_interval_s=60, ttl_s=60
        )
    )
    await registry.heartbeat(name)


def check(plan: PlanReport, *, rel: float = 1e-6) -> None:
    """Checks that the plan has the metrics of the services above."""
    [latency] = plan.latencies
    assert latency.ttft_mean_s == pytest.approx(0.15, rel=rel)
    assert latency.ttft_p99_s == pytest.approx(0.1 + 0.99 * 0.1, rel=rel)
    assert latency.itl_mean_s == pytest.approx(0.015, rel=rel)
    assert latency.prompt_tokens_mean == pytest.approx(100, rel=rel)
    assert latency.output_tokens_mean == pytest.approx(10, rel=rel)
    assert latency.requests_per_s > 0
    [pool] = plan.pools
    assert (pool.model, pool.role) == ("demo", Role.DECODE)
    assert (pool.running_requests, pool.waiting_requests, pool.kv_usage) == (3, 1, 0.25)


async def observe_checked(planner: Planner, frontend: FrontendMetrics) -> PlanReport:
    """Returns the first plan without a problem that has the right metrics, while the frontend serves.

    Plans before it may differ: of a scrape between two queries, one query has the samples, and a scrape that was late has none.
    """
    last: Exception | None = None
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                frontend.serve(20)
                await asyncio.sleep(0.3)
                plan = await planner.observe()
                try:
                    check(plan, rel=0.05)
                    assert plan.problems == ()
                except (AssertionError, ValueError) as error:
                    last = error
                else:
                    return plan
    except TimeoutError:
        raise AssertionError("no plan has the right metrics") from last


async def test_the_planner_scrapes_registered_services():
    """Two scrapes give rates, means and percentiles. The plan reports services that cannot be scraped."""
    async with listed_services() as (_, registry, frontend), ClientSession() as session:
        planner = Planner(
            registry=registry,
            source=ScrapeSource(Fetcher(session, timeout_s=PATIENCE_S), SystemClock(), window_s=60),
            metrics=PlannerMetrics(Telemetry.create("planner").instruments),
            clock=SystemClock(),
            settings=PlannerSettings(),
        )
        first = await planner.observe()
        assert first.latencies[0].ttft_mean_s is None
        frontend.serve(20)
        plan = await planner.observe()
        check(plan)
        assert plan.source == "scrape"
        assert plan.problems == ()
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            await register(registry, PLANNER, "planner-1", unused.getsockname()[1])
            await register(registry, PLANNER, "planner-2", None)
            plan = await planner.observe()
        assert len(plan.problems) == 2
        assert plan.problems[0] == "kvmesh-planner planner-2 has no metrics port"
        assert plan.problems[1].startswith("kvmesh-planner planner-1 cannot be scraped: ")


async def test_prometheus_finds_the_services_and_answers_the_planner(
    start_prometheus: Callable[[Path], Server], tmp_path: Path
):
    """Uses the configuration in `compose/prometheus` with another address and a shorter interval."""
    async with listed_services() as (agent, registry, frontend), ClientSession() as session:
        await register(registry, PLANNER, "planner-1", None)
        text = CONFIG.read_text()
        assert text.count('"127.0.0.1:8500"') == 1
        text = text.replace('"127.0.0.1:8500"', f'"127.0.0.1:{agent.port}"')
        text = text.replace("scrape_interval: 5s", "scrape_interval: 1s").replace(
            "scrape_timeout: 3s", "scrape_timeout: 1s"
        )
        config = tmp_path / "prometheus.yml"
        config.write_text(text)
        server = await asyncio.to_thread(start_prometheus, config)
        source = PrometheusSource(Fetcher(session, timeout_s=PATIENCE_S), server.url, SystemClock(), window_s=10)
        planner = Planner(
            registry=registry,
            source=source,
            metrics=PlannerMetrics(Telemetry.create("planner").instruments),
            clock=SystemClock(),
            settings=PlannerSettings(),
        )
        plan = await observe_checked(planner, frontend)
        async with asyncio.timeout(PATIENCE_S):
            while not max((await source.history(span_s=60.0, step_s=1.0)).get("demo", (0.0,))):
                await asyncio.sleep(0.3)
        assert plan.source == "prometheus"
        targets = await session.get(f"{server.url}/api/v1/targets")
        labels = [target["labels"] for target in (await targets.json())["data"]["activeTargets"]]
        assert sorted(label["instance"] for label in labels) == ["decode-1", "frontend-1"]
        [decode] = [label for label in labels if label["instance"] == "decode-1"]
        assert decode == {"job": "kvmesh", "service": DECODE, "instance": "decode-1", "model": "demo", "role": "decode"}


async def test_an_unreachable_prometheus_is_reported():
    """The plan then has the registry's pools and reports the problem."""
    async with listed_services() as (_, registry, _), ClientSession() as session:
        source = PrometheusSource(
            Fetcher(session, timeout_s=PATIENCE_S), "http://127.0.0.1:1", SystemClock(), window_s=10
        )
        planner = Planner(
            registry=registry,
            source=source,
            metrics=PlannerMetrics(Telemetry.create("planner").instruments),
            clock=SystemClock(),
            settings=PlannerSettings(),
        )
        plan = await planner.observe()
        assert plan.latencies == ()
        assert plan.pools[0].kv_usage is None
        assert plan.problems[0].startswith("Prometheus does not answer: ")
