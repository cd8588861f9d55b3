"""Replays a minute of a day's traffic on a mesh of processes, with the command that replays a whole day."""

import json
from pathlib import Path

from bench.day import Hour, day_requests, memory_rows
from kvmesh.core.whatif import RecordedRequest
from tests.integration.test_bench import run_module

TRACE = [RecordedRequest(at_s=at_s, prompt_tokens=10, output_tokens=1) for at_s in (0.0, 10.0, 30.0)]


async def test_a_minute_of_traffic_has_no_error(tmp_path: Path) -> None:
    """All requests are answered, and the report has the memory of every process."""
    file = tmp_path / "day.json"
    flags = ("--hours", "0.012", "--speed", "6", "--share", "1", "--samples", "3", "--memory-may-grow")
    status, printed, errors = await run_module("bench.day", *flags, "--json", str(file))
    assert status == 0, errors + printed
    found = json.loads(file.read_text())
    assert found["errors"] == 0
    # 43 seconds at 5.4 requests per second, in 7 seconds.
    assert 150 <= found["requests"] <= 330
    assert len(found["rss_mib"]) == 3
    for sizes in found["rss_mib"]:
        assert {"gateway", "prefill", "decode", "planner", "up"} == set(sizes)
        assert min(sizes.values()) > 10


def test_the_trace_is_repeated_until_the_day_is_full() -> None:
    """Repetitions of the trace follow each other at its mean gap. A share of the trace keeps its times."""
    whole = [request.at_s for request in day_requests(TRACE, day_s=100, share=1, seed=1)]
    assert whole == [0, 10, 30, 40, 50, 70, 80, 90]
    part = [request.at_s for request in day_requests(TRACE, day_s=10_000, share=0.25, seed=1)]
    assert 0.15 < len(part) / 750 < 0.35
    assert set(part) <= {request.at_s for request in day_requests(TRACE, day_s=10_000, share=1, seed=1)}


def test_memory_growth_in_the_second_half_is_reported() -> None:
    """Growth in the first half, while caches fill, is not reported."""
    filling = [Hour(rss_mib={"router": mib, "leaky": mib * (1 + i / 4)}) for i, mib in enumerate([50, 90, 92, 91])]
    router, leaky = memory_rows(filling)
    assert router == ["router", "50", "90", "92", "91", "+1.0", "flat"]
    assert leaky[-1] == "grows"
