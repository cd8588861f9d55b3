"""Checks the files of compose/ without containers: generated files are current, queries use existing metrics, configurations are valid."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from dashboard_panels import DASHBOARDS
from prometheus_client import CollectorRegistry

from kvmesh.telemetry import Telemetry
from kvmesh.worker import metrics as worker_metrics
from services.frontend.metrics import FrontendMetrics
from services.planner.metrics import PlannerMetrics
from services.router.metrics import RouterMetrics
from services.router.replicas.peer_reservations import PeerReservations
from services.router.settings import RouterSettings
from tests.compose.collector_model import CollectorModel
from tests.compose.grafana_model import DashboardModel, DataSources, Providers
from tests.parts import ROOT, require_part
from tests.unit.router_fleets import core

COMPOSE = ROOT / "compose"
BOARDS = sorted((COMPOSE / "grafana" / "dashboards").glob("*.json"))
PROFILES = ("simulated", "vllm-cpu", "vllm", "sglang")
WORKER_NAMES = ("failing_kv_paths", "leases_handles", "legs_requests", "kv_announced_blocks")
"""Gauges of workers that are not in GAUGES."""


def metric_names() -> set[str]:
    """Returns every metric of the services, with the suffixes of histograms and counters."""
    registry = CollectorRegistry()
    FrontendMetrics(Telemetry.create("frontend", registry=registry).instruments)
    router = core()
    metrics = RouterMetrics(Telemetry.create("router", registry=registry).instruments, router)
    metrics.add_peer_gauges(PeerReservations(router, RouterSettings().sync))
    PlannerMetrics(Telemetry.create("planner", registry=registry).instruments)
    names = {f"kvmesh_worker_{name}" for name in (*worker_metrics.GAUGES, *worker_metrics.COUNTERS, *WORKER_NAMES)}
    endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
    for family in registry.collect():
        names.update(family.name + ending for ending in endings.get(family.type, [""]))
    return names


def test_generated_files_are_current() -> None:
    """Dashboards and Prometheus' configuration equal the output of scripts/compose_files.py."""
    check = subprocess.run([sys.executable, ROOT / "scripts" / "compose_files.py", "--check"], check=False)
    assert check.returncode == 0


def test_queries_name_metrics_that_exist() -> None:
    """Every metric in a dashboard or an alert exists. A renamed metric would leave a panel empty or silence an alert."""
    queries = [query for board in DASHBOARDS for panel in board.panels for query in panel.queries.values()]
    named = set(re.findall(r"kvmesh_\w+", " ".join(queries)))
    rules = yaml.safe_load((COMPOSE / "prometheus" / "alerts.yml").read_text())
    expressions = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    named |= set(re.findall(r"kvmesh_\w+", " ".join(expressions)))
    assert len(named) > 40
    assert not named - metric_names()


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_dashboards_follow_grafanas_model(path: Path) -> None:
    """Dashboards match Grafana's model. Their ids and references are unique, and their panels do not overlap."""
    board = msgspec.json.decode(path.read_bytes(), type=DashboardModel)
    assert len({panel.id for panel in board.panels}) == len(board.panels)
    cells: set[tuple[int, int]] = set()
    for panel in board.panels:
        place = panel.grid_pos
        own = {(x, y) for x in range(place.x, place.x + place.w) for y in range(place.y, place.y + place.h)}
        assert max(x for x, _ in own) < 24
        assert not cells & own, panel.title
        cells |= own
        assert len({target.ref_id for target in panel.targets}) == len(panel.targets)


def test_there_is_a_dashboard_for_each_part() -> None:
    assert [path.stem for path in BOARDS] == ["mesh", "planner", "router", "workers"]


def test_grafana_is_provisioned() -> None:
    """Grafana's data sources refer to services of the stack, and its panels to data sources."""
    folder = COMPOSE / "grafana" / "provisioning"
    text = (folder / "datasources" / "kvmesh.yaml").read_bytes()
    sources = msgspec.yaml.decode(text, type=DataSources).datasources
    services = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    assert {source.url.split("/")[2].split(":")[0] for source in sources} <= services.keys()
    boards = [msgspec.json.decode(path.read_bytes(), type=DashboardModel) for path in BOARDS]
    used = {target.datasource.uid for board in boards for panel in board.panels for target in panel.targets}
    assert used <= {source.uid for source in sources}
    text = (folder / "dashboards" / "kvmesh.yaml").read_bytes()
    [provider] = msgspec.yaml.decode(text, type=Providers).providers
    mounts = services["grafana"]["volumes"]
    assert f"./grafana/dashboards:{provider.options.path}:ro" in mounts


def test_the_collectors_configuration_is_valid() -> None:
    """The collector's pipeline uses the configured components and exports to a service of the stack."""
    found = msgspec.yaml.decode((COMPOSE / "collector" / "config.yaml").read_bytes(), type=CollectorModel)
    pipeline = found.service.pipelines.traces
    assert pipeline.receivers == list(found.receivers.__struct_fields__)
    assert sorted(pipeline.processors) == sorted(found.processors.__struct_fields__)
    # Required by the collector: the limiter comes first, the batch last.
    assert pipeline.processors[0] == "memory_limiter" and pipeline.processors[-1] == "batch"
    assert pipeline.exporters == list(found.exporters.__struct_fields__)
    services = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    assert found.exporters.otlp.endpoint.split(":")[0] in services
    environment = services["frontend"]["environment"]
    port = found.receivers.otlp.protocols.grpc.endpoint.rpartition(":")[2]
    assert environment["KVMESH_TELEMETRY_OTLP_ENDPOINT"] == f"http://collector:{port}"


@pytest.mark.parametrize("profile", PROFILES)
def test_compose_accepts_each_profile(profile: str) -> None:
    """Each profile has a prefill and a decode worker, and no worker of another profile."""
    config = rendered(profile)
    engines = {name: service for name, service in config["services"].items() if "models/served" in str(service)}
    ending = "" if profile == "simulated" else f"-{profile}"
    assert sorted(engines) == [f"decode{ending}", f"prefill{ending}"]
    for name, service in engines.items():
        role = name.partition("-")[0]
        assert service["command"] == [f"services.{role}"]
        assert {each["source"] for each in service["volumes"] if each["type"] == "volume"} == {f"credentials-{role}"}
        assert service["networks"].keys() == {"default", "kv"}
        assert service["build"]["target"] == f"worker-{profile}"
        needs_gpu = profile in ("vllm", "sglang")
        assert ("devices" in str(service.get("deploy"))) == needs_gpu


def test_every_service_is_hardened() -> None:
    """No service can write to its image, gain privileges or use a capability, and no port is published to the network by default."""
    for name, service in rendered("simulated", "postgres.yaml")["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        for port in service.get("ports", []):
            assert port["host_ip"] == "127.0.0.1", f"{name} is published to the network by default"


def rendered(profile: str, *overlays: str) -> dict[str, Any]:
    """Returns Compose's result for compose.yaml with overlays and .env."""
    files = [word for name in ("compose.yaml", *overlays) for word in ("-f", COMPOSE / name)]
    command = [require_part("docker-compose"), *files, "--profile", profile]
    finished = subprocess.run(
        [*command, "config", "--format", "json"],
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    config: dict[str, Any] = json.loads(finished.stdout)
    return config


def test_targets_of_the_dockerfile_are_those_of_compose() -> None:
    """The Dockerfile has the target of every service, and all targets that it documents."""
    stages = set(re.findall(r"^FROM .* AS (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    targets = {
        service["build"]["target"]
        for profile in PROFILES
        for service in rendered(profile)["services"].values()
        if "build" in service
    }
    assert targets <= stages
    assert {"frontend", "router", "gateway", "planner"} | {f"worker-{profile}" for profile in PROFILES} <= stages


def test_promtool_accepts_configuration_and_rules() -> None:
    """promtool accepts the configuration and the rules, and its unit tests of the rules pass."""
    promtool = require_part("promtool")
    folder = COMPOSE / "prometheus"
    for command in (
        ["check", "config", folder / "prometheus.yml"],
        ["check", "config", folder / "compose.yml"],
        ["check", "rules", folder / "alerts.yml"],
        ["test", "rules", ROOT / "tests" / "compose" / "alerts_test.yml"],
    ):
        finished = subprocess.run([promtool, *command], capture_output=True, text=True, check=False)
        assert finished.returncode == 0, finished.stdout + finished.stderr


def test_every_alert_has_a_unit_test() -> None:
    rules = (COMPOSE / "prometheus" / "alerts.yml").read_text()
    tested = (ROOT / "tests" / "compose" / "alerts_test.yml").read_text()
    assert set(re.findall(r"alert: (\w+)", rules)) == set(re.findall(r"alertname: (\w+)", tested))


def test_builds_read_only_what_images_contain() -> None:
    """.dockerignore has no exception with a wildcard, which makes a build read `.venv` and `.cache`: 7 s of a second start of 20 s."""
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert not [each for each in allowed if "*" in each]
    assert {path.name for path in ROOT.glob("constraints*.txt")} <= allowed
