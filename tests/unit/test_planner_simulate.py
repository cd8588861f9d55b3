"""PlannerService.Simulate and `kvmesh simulate`, which run the same code in a child process."""

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvmesh.core import PerformanceProfile
from kvmesh.core.planning import Targets
from kvmesh.core.whatif import RecordedLoad, RecordedRequest, SimulationRequest, SteadyLoad
from kvmesh.errors import DeadlineError, InternalError, InvalidRequestError, OverloadedError
from kvmesh.rpc.codec.whatif import REQUESTS_MAX, from_simulation_request, to_simulation_request
from services.planner.simulations import SimulationRunner
from services.whatif.command import main
from services.whatif.run import run_request
from tests.patience import PATIENCE_S

STEADY = SteadyLoad(requests_per_s=4.0, prompt_tokens=500, output_tokens=20, duration_s=20.0)
TARGETS = Targets(model="m", ttft_s=1.0, itl_s=0.05)
REQUEST = SimulationRequest(model="m", steady=STEADY, targets=TARGETS, prefill_workers=1, decode_workers=1)
RECORDED = RecordedLoad(
    requests=(
        RecordedRequest(at_s=0.0, prompt_tokens=1024, output_tokens=5, block_ids=(1, 2)),
        RecordedRequest(at_s=1.0, prompt_tokens=1024, output_tokens=5, block_ids=(1, 2)),
    )
)


def test_requests_survive_encoding():
    """A request keeps every field through encoding and decoding. Absent pool sizes stay absent."""
    for request in (
        REQUEST,
        SimulationRequest(model="m", recorded=RECORDED, has_planner=True),
        replace(REQUEST, prefill_workers=0, profile=PerformanceProfile(prefill_s_per_token=1e-4)),
    ):
        assert from_simulation_request(to_simulation_request(request)) == request


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": ""}, "model"),
        ({"steady": None}, "load"),
        ({"steady": replace(STEADY, requests_per_s=0.0)}, "steady.requests_per_s"),
        ({"steady": replace(STEADY, duration_s=1e6)}, "steady.duration"),
        ({"steady": replace(STEADY, requests_per_s=REQUESTS_MAX)}, "steady.duration"),
        ({"steady": replace(STEADY, prompt_tokens=0)}, "steady.prompt_tokens"),
        ({"decode_workers": 0}, "decode_workers"),
        ({"prefill_workers": 1001}, "prefill_workers"),
        ({"targets": replace(TARGETS, percentile=1.5)}, "targets.percentile"),
        ({"profile": PerformanceProfile(decode_step_base_s=-1.0)}, "profile.decode_step_base_s"),
        ({"steady": None, "recorded": RecordedLoad(requests=())}, "recorded.requests"),
        (
            {"steady": None, "recorded": RecordedLoad(requests=RECORDED.requests[::-1])},
            "recorded.requests[1].at",
        ),
    ],
)
def test_requests_out_of_range_are_refused_by_name(change: dict[str, object], field: str):
    """The error names the invalid field."""
    with pytest.raises(InvalidRequestError) as refusal:
        from_simulation_request(to_simulation_request(replace(REQUEST, **change)))
    assert refusal.value.field == field


async def test_a_child_process_gives_the_same_result():
    """A simulation in a child process gives exactly the result of a call in this process."""
    outcome = await SimulationRunner().run(REQUEST, timeout_s=PATIENCE_S)
    assert outcome == run_request(REQUEST)[0]
    assert outcome.requests > 50
    assert outcome.attainment > 0.9
    assert outcome.expected is not None


async def test_errors_of_the_child_are_errors_of_the_call():
    """An incomplete profile, a crash and a timeout of the child become errors of the call, and only one simulation runs at a time."""
    runner = SimulationRunner()
    with pytest.raises(InvalidRequestError) as refusal:
        await runner.run(replace(REQUEST, profile=PerformanceProfile(prefill_base_s=0.1)), timeout_s=PATIENCE_S)
    assert refusal.value.field == "profile.prefill_s_per_token"
    with pytest.raises(InternalError):
        await SimulationRunner(("-c", "raise SystemExit(3)")).run(REQUEST, timeout_s=PATIENCE_S)
    hanging = SimulationRunner(("-c", "import sys, time; sys.stdin.read(); time.sleep(600)"))
    first = asyncio.ensure_future(hanging.run(REQUEST, timeout_s=1.0))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError) as busy:
        await hanging.run(REQUEST, timeout_s=1.0)
    assert busy.value.reason == "simulation_running"
    with pytest.raises(DeadlineError):
        await first


BLOCKED = """
import os, time
if not os.path.exists({mark!r}):
    with open({mark!r} + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename({mark!r} + ".new", {mark!r})
    time.sleep(600)
"""
"""Blocks the first process, which writes its id."""


async def test_a_cancelled_simulation_ends_its_process(tmp_path: Path):
    """After the caller cancels, the process has ended, and the runner can start another simulation."""
    mark = tmp_path / "started"
    runner = SimulationRunner(("-c", BLOCKED.format(mark=str(mark))))
    task = asyncio.ensure_future(runner.run(REQUEST, timeout_s=PATIENCE_S))
    async with asyncio.timeout(PATIENCE_S):
        while not mark.exists():
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)
    # The second process ends at once, without a result.
    with pytest.raises(InternalError):
        await runner.run(REQUEST, timeout_s=PATIENCE_S)


def test_the_command_compares_with_the_planner(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """`kvmesh simulate` prints a table with the given pools and with the planner, or JSON. Errors name invalid arguments."""
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 500 * i, "input_length": 1024, "output_length": 10, "hash_ids": [1, i + 2]} for i in range(40)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    assert main(["--trace", str(trace), "--prefill", "1", "--decode", "1", "--planner", "--decisions"]) == 0
    output = capsys.readouterr().out
    assert "1 + 1, planner (0 starts" in output
    assert "HITS" in output
    assert "40 requests" in output
    assert main(["--rate", "2", "--duration", "10", "--json"]) == 0
    [outcome] = json.loads(capsys.readouterr().out)
    assert outcome["shape"]["decode_workers"] == 1
    for arguments, word in (
        (["--targets", "ttft=1"], "--trace or --rate"),
        (["--rate", "1", "--targets", "x=1"], "'x' is not one of"),
        (["--rate", "1", "--targets", "ttft=-1"], "ttft is out of range"),
        (["--trace", str(tmp_path / "none.csv")], "none.csv"),
        (["--rate", "1", "--profile", str(trace)], "trace.jsonl"),
    ):
        assert main(arguments) == 2
        assert word in capsys.readouterr().err
