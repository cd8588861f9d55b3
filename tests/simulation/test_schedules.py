"""Schedules of faults from seeds: a sample of the seeds passes. Schedules repeat exactly, can be stored in a file, and can be shrunk."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from kvmesh.simulation.virtual_loop import VirtualLoop, process_context
from services.simulation.campaign import Campaign, Totals, run_seeds
from services.simulation.command import _campaign, _parser, main
from services.simulation.draw import draw_topology
from services.simulation.draw_faults import draw_faults
from services.simulation.inject import Injector
from services.simulation.mesh import SimulatedMesh
from services.simulation.play import play
from services.simulation.schedule import RequestPlan, Schedule, TimedFault, Topology, read_schedule
from services.simulation.shapes import shape_of
from services.simulation.shrink import Shrinker
from tests.virtual_loop import run_virtual

ROOT = Path(__file__).resolve().parents[2]
EARLY_PROGRESS = """
import sys
from services.simulation import command
command.PROGRESS_S = 0.5
sys.exit(command.main())
"""
SLICE = range(20)


def test_a_sample_of_the_seeds_passes() -> None:
    """All requests end exactly once with the right answer and usage, no state is left, and all workers are used. For more seeds see
    docs/operate/reliability.md."""
    totals = Totals()
    for outcome in run_seeds(Campaign(), SLICE, jobs=os.cpu_count() or 1):
        assert not outcome.problems, outcome
        totals.add(outcome)
    assert totals.requests == 50 * len(SLICE)
    assert totals.outcomes["answered"] > 0.6 * totals.requests
    assert totals.outcomes["cancelled"] and totals.continued


def test_a_schedule_repeats_from_its_file(tmp_path: Path) -> None:
    """Another process, with other string hashes, replays the schedule from its file message by message."""
    schedule = Campaign(requests=20).schedule(3)
    path = tmp_path / "schedule.json"
    schedule.write(path)
    assert read_schedule(path) == schedule
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "--replay", str(path)],
        cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "4711"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    outcome = play(schedule)
    assert f"hash      {outcome.hash}" in done.stdout
    assert "is killed" in done.stdout or "FAULT" in done.stdout


def test_a_machine_suspended_twice_serves_at_once() -> None:
    """Routers do not take their own suspension for silence of all workers, also when one suspension follows another."""
    faults = tuple(TimedFault(at_s=at_s, kind="suspend", target="machine", amount=5.6) for at_s in (1.8, 2.2))
    topology = Topology(prefill=1, decode=2, routers=2, frontends=2, is_crowded=True)
    assert not play(Schedule(seed=74, topology=topology, faults=faults)).problems


def test_tool_calls_continue_on_another_worker() -> None:
    """The client's parser reads whole calls, piece by piece, although the worker dies in the middle of them."""
    plan = RequestPlan(request_id="r0", at_s=0.0, tail_tokens=40, max_tokens=200, has_tools=True)
    topology = Topology(prefill=1, decode=2, routers=1, frontends=1, output_tokens_max=200)
    for seed in range(20):
        kill = TimedFault(at_s=0.15, kind="kill", target=f"decode-{seed % 2}", duration_s=0.5)
        outcome = play(Schedule(seed=seed, topology=topology, requests=(plan,), faults=(kill,)))
        assert not outcome.problems and outcome.outcomes == {"answered": 1}, outcome.problems
        if outcome.continued:
            return
    raise AssertionError("no worker died in the middle of an answer")


def test_a_paused_process_resumes_where_it_stopped() -> None:
    """None of its tasks runs while it is paused, and its timers fire late. Other processes continue."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        seen: list[tuple[str, float]] = []

        async def tick(name: str) -> None:
            for _ in range(4):
                await asyncio.sleep(1.0)
                seen.append((name, loop.time()))

        both = [loop.create_task(tick(name), context=process_context(name)) for name in ("a", "b")]
        await asyncio.sleep(1.5)
        loop.pause("a")
        await asyncio.sleep(2.0)
        assert loop.is_paused("a") and [at_s for name, at_s in seen if name == "a"] == [1.0]
        loop.resume("a")
        await asyncio.gather(*both)
        assert [at_s for name, at_s in seen if name == "a"] == [1.0, 3.5, 4.5, 5.5]
        assert [at_s for name, at_s in seen if name == "b"] == [1.0, 2.0, 3.0, 4.0]

    run_virtual(run())


def test_requests_leave_a_paused_worker_and_return() -> None:
    """A decode worker is paused for longer than its heartbeats may be missing. Its requests continue elsewhere, and all are answered."""
    plans = tuple(
        RequestPlan(
            request_id=f"r{i}", at_s=0.02 * i, family=i, tail_tokens=60, tail_seed=i, max_tokens=60, ignore_eos=True
        )
        for i in range(12)
    )
    topology = Topology(prefill=1, decode=2, routers=1, frontends=1)
    pause = TimedFault(at_s=0.3, kind="pause", target="decode-1", duration_s=6.0)
    outcome = play(Schedule(seed=3, topology=topology, requests=plans, faults=(pause,)))
    assert not outcome.problems and outcome.continued
    assert outcome.outcomes == {"answered": 12}


def test_shrinking_is_bounded_and_keeps_the_failure() -> None:
    """Shrinking removes all requests and faults that the failure does not need. The number of runs is limited."""
    schedule = Campaign(requests=30).schedule(1)
    wanted = {schedule.requests[4].request_id, schedule.requests[23].request_id}
    shrinker = Shrinker(lambda shorter: wanted <= {each.request_id for each in shorter.requests}, runs_max=400)
    shrunk = shrinker.shrink(schedule)
    assert ({each.request_id for each in shrunk.requests}, shrunk.faults) == (wanted, ())
    few = Shrinker(lambda shorter: True, runs_max=1)
    few.shrink(schedule)
    assert few.runs == 1


def test_every_drawn_fault_can_be_injected() -> None:
    """The drawn kinds are exactly those that the injector knows, and all of them are drawn over some seeds."""
    kinds = {fault.kind for seed in range(120) for fault in Campaign().schedule(seed).faults}

    async def known() -> set[str]:
        mesh = SimulatedMesh(1, shape_of(Topology()))
        return set(Injector(mesh)._kinds)

    assert kinds == run_virtual(known())


def test_overlapping_faults_of_one_kind_end_with_the_last() -> None:
    """The first fault that ends does not end another one of its kind."""

    async def failing() -> list[bool]:
        mesh = SimulatedMesh(1, shape_of(Topology()))
        spans = ((0.0, 2.0), (1.0, 4.0))
        faults = tuple(TimedFault(at_s=at_s, kind="fail-pulls", duration_s=end_s - at_s) for at_s, end_s in spans)
        injecting = asyncio.create_task(Injector(mesh).run(faults))
        seen = []
        for pause_s in (0.5, 1.0, 1.0, 1.0, 1.0):
            await mesh.world.clock.sleep(pause_s)
            seen.append(mesh.world.kv_network.fails_pulls)
        await injecting
        return seen

    assert run_virtual(failing()) == [True, True, True, True, False]


def test_one_worker_of_each_pool_is_exempt_from_faults() -> None:
    """So every request can be answered, and a request that fails is a defect."""
    taking = {"kill", "lose-engine", "partition", "restart", "drain", "refuse", "change-role", "cut", "reset", "pause"}
    for seed in range(60):
        schedule = Campaign().schedule(seed)
        hit = {fault.target for fault in schedule.faults if fault.kind in taking}
        hit |= {name for fault in schedule.faults if fault.kind == "rolling-restart" for name in fault.other.split(",")}
        for role, count in (("prefill", schedule.topology.prefill), ("decode", schedule.topology.decode)):
            assert not count or {f"{role}-{i}" for i in range(count)} - hit, schedule


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--decode", "0"], "decode"),
        (["--prefill", "0", "--rendezvous"], "prefill"),
        (["--replay", "{bad}"], "schedule"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command exits with status 2 and names the field."""
    bad = tmp_path / "bad.json"
    bad.write_text('{"seed": "x"}')
    assert main([each.format(bad=bad) for each in arguments]) == 2
    assert field in capsys.readouterr().err


def test_misleading_flags_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """The command rejects an abbreviated flag, accepts a single flag of the mesh, and warns of a pool whose only worker is exempt from
    faults."""
    with pytest.raises(SystemExit) as refused:
        main(["--prefil", "1"])
    assert refused.value.code == 2 and "--prefil" in capsys.readouterr().err
    for arguments, note in ((["--tight"], ""), (["--decode", "1"], "the only decode worker")):
        assert main([*arguments, "--seeds", "1", "--requests", "2", "--jobs", "1"]) == 0
        assert note in capsys.readouterr().err
    options = _parser("simulate").parse_args(["--tight"])
    assert _campaign(options).topology == Topology(is_tight=True)


def test_an_interrupt_ends_a_campaign_with_its_totals() -> None:
    """SIGINT to all processes, as from Ctrl-C, ends the campaign with status 130 and its totals, and without a stack trace."""
    campaign = subprocess.Popen(
        [sys.executable, "-c", EARLY_PROGRESS, "--seeds", "1000", "--requests", "5", "--jobs", "2"],
        cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert campaign.stderr is not None
    progress = campaign.stderr.readline()  # All processes run by then.
    os.killpg(campaign.pid, signal.SIGINT)
    printed, complaints = campaign.communicate()
    complaints = progress + complaints
    assert campaign.returncode == 130
    assert "requests  " in printed
    assert "of 1000 seeds" in complaints and "Traceback" not in complaints


def test_topologies_are_small() -> None:
    """A drawn mesh has at most 9 workers, so that a run stays cheap. Drawing no faults returns an empty list."""
    for seed in range(200):
        topology = draw_topology(Random(seed))
        assert 2 <= topology.prefill + topology.decode <= 9
        assert draw_faults(Random(seed), topology, 0, over_s=1.0, is_survivable=True) == []
