"""Runs real Prometheus with the alert rules of `compose/`: each rule fires on the metrics that it names."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

from aiohttp import ClientSession
from prometheus_client import CollectorRegistry, Counter, Gauge

from kvmesh.telemetry import MetricsServer, Telemetry
from services.router.metrics import RouterMetrics
from tests.patience import PATIENCE_S
from tests.servers import Server
from tests.unit.router_fleets import core

RULES = Path(__file__).parents[2] / "compose" / "prometheus" / "alerts.yml"
CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: [alerts.yml]
scrape_configs:
  - job_name: kvmesh
    honor_labels: true
    static_configs: [{{targets: ["127.0.0.1:{port}", "127.0.0.1:1"]}}]
"""


def test_the_routers_metrics_have_the_names_of_the_rules() -> None:
    """The router has all metrics that the alert rules name, because a renamed metric would disable its alert."""
    telemetry = Telemetry.create("router", registry=CollectorRegistry())
    RouterMetrics(telemetry.instruments, core())
    there = {metric.name for metric in telemetry.registry.collect()}
    named = set(re.findall(r"kvmesh_router_\w+", RULES.read_text()))
    assert named and named <= there


async def test_every_alert_fires(start_prometheus: Callable[[Path], Server], tmp_path: Path) -> None:
    """Each alert fires if its cause is present. The test uses shorter waits than production, and port 1 for a target that is down."""
    registry = CollectorRegistry()
    labels = ("instance", "model")
    Gauge("kvmesh_worker_failing_kv_paths", "d", labels, registry=registry).labels("decode-1", "demo").set(2)
    Gauge("kvmesh_router_open_paths", "d", ("instance",), registry=registry).labels("router-1").set(1)
    Gauge("kvmesh_router_decode_workers", "d", registry=registry).set(0)
    counters = [
        Counter(f"kvmesh_worker_{name}", "d", labels, registry=registry).labels("decode-1", "demo")
        for name in ("recomputed_tokens", "failed_handoffs")
    ]
    metrics = MetricsServer(registry, "127.0.0.1", 0)
    await metrics.start()
    try:
        text = RULES.read_text()
        (tmp_path / "alerts.yml").write_text(re.sub(r"for: \w+", "for: 0s", text).replace("[5m]", "[10s]"))
        config = tmp_path / "prometheus.yml"
        config.write_text(CONFIG.format(port=metrics.port))
        server = await asyncio.to_thread(start_prometheus, config)
        wanted, fired = set(re.findall(r"alert: (\w+)", text)), set()
        async with ClientSession() as session, asyncio.timeout(PATIENCE_S):
            # Not all at the same time: after slow scrapes an alert pauses.
            while not fired >= wanted:
                for counter in counters:
                    counter.inc(100)
                await asyncio.sleep(0.5)
                response = await session.get(f"{server.url}/api/v1/alerts")
                alerts = (await response.json())["data"]["alerts"]
                fired |= {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}
    finally:
        await metrics.aclose()
    assert fired == wanted
