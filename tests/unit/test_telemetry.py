"""Logs, metrics and traces have the formats that other programs parse."""

import io
import json
import logging
import os
from collections.abc import Iterator

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvmesh.event_log import event_logger
from kvmesh.telemetry import (
    Instruments,
    LogFormat,
    LogLevel,
    MetricsServer,
    Telemetry,
    TelemetrySettings,
    Tracing,
    configure_logging,
    current_traceparent,
)
from kvmesh.telemetry.metrics import ClosedSet
from tests.collector import collecting
from tests.patience import PATIENCE_S

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


class BrokenStream(io.StringIO):
    """A closed terminal or pipe."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.usefixtures("root_logger")
def test_a_record_that_cannot_be_written_prints_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong format of another package becomes one log line. A closed terminal prints nothing."""
    stream = io.StringIO()
    configure_logging(service="router", stream=stream)
    logging.getLogger("some.package").warning("wrong %d", "number")
    line = json.loads(stream.getvalue())
    assert (line["event"], line["level"], line["failed_logger"]) == ("log_record_failed", "error", "some.package")
    assert line["failed_event"] == "wrong %d" and line["error"].startswith("TypeError")
    configure_logging(service="router", stream=BrokenStream())
    logging.getLogger("some.package").warning("fine")
    logging.getLogger("some.package").warning("wrong %d", "number")
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("root_logger")
def test_records_have_the_process_id() -> None:
    """vLLM's handler formats it as a number."""
    configure_logging(service="router", stream=io.StringIO())
    record = logging.getLogger("vllm").makeRecord("vllm", logging.INFO, "", 0, "started", (), None)
    assert logging.Formatter("pid=%(process)d %(message)s").format(record) == f"pid={os.getpid()} started"


@pytest.mark.usefixtures("root_logger")
def test_logs_are_json_lines() -> None:
    """Each record is one JSON object per line, with its data as keys. A traceback is one string, and reserved keys are not overwritten."""
    stream = io.StringIO()
    configure_logging(level=LogLevel.INFO, service="router", stream=stream)
    log = event_logger("kvmesh.test")
    log.debug("hidden")
    log.info("request_finished", request_id="r1", tokens=3, level="mine", path=b"x")
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        log.error("part_failed", exc_info=error)
    logging.getLogger("foreign").warning("plain %s\nwords", "old")
    logging.getLogger("kvmesh.lifecycle").info("part_started", extra={"data": {"part": "P"}})
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["request_finished", "part_failed", "plain old\nwords", "part_started"]
    assert lines[0] | {"time": ""} == {
        "time": "", "level": "info", "service": "router", "logger": "kvmesh.test", "event": "request_finished",
        "request_id": "r1", "tokens": 3, "path": "b'x'",
    }  # fmt: skip
    assert lines[0]["time"].endswith("Z")
    assert lines[1]["error"] == "ValueError: two\nlines"
    assert "test_logs_are_json_lines" in lines[1]["traceback"]
    assert lines[3]["part"] == "P"


@pytest.mark.usefixtures("root_logger")
def test_logs_are_text_lines() -> None:
    """Each record is one line, with values quoted where necessary."""
    stream = io.StringIO()
    configure_logging(style=LogFormat.TEXT, service="router", stream=stream)
    event_logger("kvmesh.test").warning("peer_lost", peer="w 1", words="a\x1b[31m\nb", count=2)
    (line,) = stream.getvalue().splitlines()
    assert line.partition(" ")[2] == 'WARNING peer_lost peer="w 1" words="a\\u001b[31m\\nb" count=2'


@pytest.mark.usefixtures("root_logger")
def test_logs_carry_the_trace() -> None:
    """Within a span, or within a caller's context with tracing off, a line has the trace id."""
    stream = io.StringIO()
    configure_logging(service="router", stream=stream)
    with Tracing(TelemetrySettings(), service="router").span("x", parent=PARENT):
        event_logger("kvmesh.test").info("inside")
    event_logger("kvmesh.test").info("outside")
    inside, outside = (json.loads(line) for line in stream.getvalue().splitlines())
    assert inside["trace_id"] == PARENT.split("-")[1]
    assert "trace_id" not in outside


def test_long_values_are_truncated(root_logger: logging.Logger) -> None:
    """The length of a line is bounded."""
    stream = io.StringIO()
    configure_logging(service="router", stream=stream)
    event_logger("kvmesh.test").info("long", words="x" * 100_000)
    assert len(stream.getvalue()) < 10_000


def test_metric_names_follow_the_rules() -> None:
    """Names with abbreviated units, invalid characters or a suffix that is added anyway are refused, and so are duplicates."""
    instruments = Instruments(CollectorRegistry(), "router")
    instruments.counter("placed_requests", "Placed.", ["policy"]).labels("kv").inc()
    instruments.gauge_function("index_blocks", "Blocks.", lambda: 7.0)
    instruments.histogram("place_duration_seconds", "Placing.").observe(0.001)
    text = generate_latest(instruments.registry).decode()
    assert 'kvmesh_router_placed_requests_total{policy="kv"} 1.0' in text
    assert "kvmesh_router_index_blocks 7.0" in text
    assert 'kvmesh_router_place_duration_seconds_bucket{le="0.001"} 1.0' in text
    for wrong in ("lease_s", "latency_ms", "requests_total", "Requests", "a-b", ""):
        with pytest.raises(ValueError, match="metric name"):
            instruments.gauge(wrong, "Wrong.")
    with pytest.raises(ValueError, match="Duplicated"):
        instruments.gauge("index_blocks", "Again.")


def test_label_values_are_bounded() -> None:
    """Values beyond the bound, and values that are not words, become `other`."""
    closed = ClosedSet(2)
    assert [closed.label(word) for word in ("a", "b", "c", "a", "No Word")] == ["a", "b", "other", "a", "other"]


async def test_the_metrics_server_serves_metrics_and_health() -> None:
    """/metrics has the requested format, /live is always 200, and /health follows the process. The port is free after closing."""
    registry, is_healthy = CollectorRegistry(), [False]
    Instruments(registry, "router").counter("placed_requests", "Placed.").inc()
    server = MetricsServer(registry, "127.0.0.1", 0, is_healthy=lambda: is_healthy[0])
    await server.start()
    async with aiohttp.ClientSession(f"http://{server.address}") as http:
        async with http.get("/metrics") as response:
            assert response.status == 200
            assert "kvmesh_router_placed_requests_total 1.0" in await response.text()
        async with http.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}) as response:
            assert response.headers["Content-Type"].startswith("application/openmetrics-text")
            assert (await response.text()).endswith("# EOF\n")
        for healthy, status in ((False, 503), (True, 200)):
            is_healthy[0] = healthy
            async with http.get("/health") as response:
                assert response.status == status
            async with http.get("/live") as response:
                assert response.status == 200
    await server.aclose()
    await server.aclose()
    again = MetricsServer(registry, "127.0.0.1", server.port)
    await again.start()
    assert again.port == server.port
    await again.aclose()


def test_tracing_off_passes_the_context_on() -> None:
    """A mesh without an exporter does not break the traces of its callers."""
    tracing = Telemetry.create("router").tracing
    assert not tracing.is_on
    with tracing.span("place", parent=PARENT):
        assert current_traceparent() == PARENT
        with tracing.span("inner"):
            assert current_traceparent() == PARENT
    with tracing.span("place", parent=""):
        assert current_traceparent() == ""


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "x",
        PARENT[:-1],
        PARENT.upper(),
        "ff" + PARENT[2:],
        PARENT + "-x",
        PARENT.replace("b7ad6b7169203331", "0" * 16),
    ],
)
def test_an_invalid_traceparent_starts_a_new_trace(wrong: str) -> None:
    """An invalid header never fails a request. A later version of the format may have more fields."""
    tracing = Tracing(TelemetrySettings(), service="router")
    with tracing.span("place", parent=wrong):
        assert current_traceparent() == ""
    with tracing.span("place", parent="01" + PARENT[2:] + "-more"):
        assert current_traceparent() == PARENT


async def test_spans_reach_a_real_collector_over_otlp() -> None:
    """With an endpoint configured, spans arrive there under the service's name, at the latest when the process closes."""
    async with collecting() as collector:
        settings = TelemetrySettings(otlp_endpoint=collector.url, otlp_timeout_s=PATIENCE_S)
        tracing = Tracing(settings, service="router", instance_id="r1")
        with tracing.span("place", parent=PARENT, attributes={"kvmesh.policy": "kv"}), tracing.span("inner"):
            pass
        with pytest.raises(RuntimeError), tracing.span("broken"):
            raise RuntimeError("secret words")
        await tracing.aclose()
        await tracing.aclose()
    assert collector.resources["router"]["service.instance.id"] == "r1"
    spans = {span.name: span for span in collector.spans["router"]}
    assert spans["place"].trace_id.hex() == PARENT.split("-")[1]
    assert spans["inner"].parent_span_id == spans["place"].span_id
    assert spans["broken"].status.code == 2


async def test_a_ratio_of_zero_follows_the_callers_decision() -> None:
    """New traces are not sampled, and a caller's sampled trace is."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans = InMemorySpanExporter()
    tracing = Tracing(TelemetrySettings(trace_ratio=0.0), service="router", span_processor=SimpleSpanProcessor(spans))
    with tracing.span("new"):
        pass
    with tracing.span("asked", parent=PARENT):
        pass
    assert [span.name for span in spans.get_finished_spans()] == ["asked"]
    await tracing.aclose()
