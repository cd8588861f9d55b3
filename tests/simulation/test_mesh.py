"""The whole mesh on virtual time: 1 000 requests, runs that repeat exactly from a seed, and faults."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvmesh.core import SamplingParams
from kvmesh.simulation.faulty_engine import LoseKv
from services.frontend.pipeline.request import Request
from services.simulation.frontend import MODEL
from services.simulation.ledger import Ledger
from services.simulation.mesh import MeshShape, default_engine
from tests.simulation.load import CANCEL_PHASES
from tests.simulation.runs import Report, run
from tests.simulation.scripted_mesh import ScriptedMesh
from tests.virtual_loop import run_virtual

ROOT = Path(__file__).resolve().parents[2]
ITERATIONS_MAX = 220_000
"""Twice as many iterations of the event loop as a thousand requests take."""


def hash_elsewhere(report: Report) -> str:
    """Returns the hash of the same run in another process, which has other object addresses and string hashes."""
    environment = {**os.environ, "PYTHONHASHSEED": "4711"}
    done = subprocess.run(
        [sys.executable, *report.command.split()[1:]],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()[1]


def test_a_thousand_requests() -> None:
    """Each of 1 000 requests ends exactly once with the right tokens, and leaves nothing behind."""
    report = run(7, 1000).check()
    assert report.outcomes == {
        "answered": 1000 - report.outcomes["cancelled"],
        "cancelled": report.outcomes["cancelled"],
    }
    assert all(report.cancelled_in[phase.name] >= 10 for phase in CANCEL_PHASES), report.cancelled_in
    assert report.iterations < ITERATIONS_MAX


def test_runs_repeat_exactly() -> None:
    """Runs with the same seed are equal message by message, in one process and in another. Runs with other seeds differ."""
    first, second, other = (run(seed, 150).check() for seed in (7, 7, 8))
    assert first.hash == second.hash != other.hash
    assert hash_elsewhere(first) == first.hash, f"the run does not repeat; {first.command}"


def test_killed_decode_worker() -> None:
    """When a decode worker dies, its streams and its requests without a token continue elsewhere, and clients do not notice."""
    report = run(3, 300, faults="kill-decode").check()
    [killed_at_s] = report.killed_at_s.values()
    assert set(report.outcomes) == {"answered", "cancelled"}
    moved = _moved(report, from_decode="decode-0")
    assert len([each for each in moved if each.continued_after]) >= 3
    assert all(each.placements[-1][1] != "decode-0" for each in moved)
    assert not [each for each in _placed_after(report, killed_at_s + 0.1) if "decode-0" in each.placements[-1]]


def test_killed_decode_worker_with_a_held_token() -> None:
    """A request that has received tokens but shown none to its client loses nothing: the held tokens are part of the answer."""
    report = run(2, 250, faults="kill-decode-held").check()
    assert set(report.outcomes) == {"answered", "cancelled"}
    [killed_at_s] = report.killed_at_s.values()
    received = {
        line.split()[-2] for line in report.lines if line.endswith(" first_token") and _at_s(line) <= killed_at_s
    }
    again = [each for each in _moved(report, from_decode="decode-0") if each.request.request_id in received]
    assert again


def test_killed_prefill_worker() -> None:
    """Requests on a prefill worker that dies are placed again, and every client gets its whole answer."""
    report = run(3, 300, faults="kill-prefill").check()
    assert set(report.outcomes) == {"answered", "cancelled"}
    moved = [each for each in report.ledgers.values() if len(each.placements) > 1]
    assert moved and all(each.placements[0][0] == "prefill-0" for each in moved)
    assert all(each.placements[-1][0] == "prefill-1" for each in moved)
    assert any(each.outcome == "answered" for each in moved)


def test_drained_workers() -> None:
    """A draining worker gets no new requests, and its requests in flight end well. No request is refused."""
    report = run(3, 300, faults="drain").check()
    assert set(report.outcomes) == {"answered", "cancelled"}
    marks = {line.split()[3]: float(line.split()[0]) for line in report.lines if " drain " in line}
    assert set(marks) == {"decode-0", "prefill-1"}
    for worker_id, marked_at_s in marks.items():
        late = [each for each in _placed_after(report, marked_at_s + 0.2) if worker_id in each.placements[-1]]
        assert not late


def test_silent_decode_worker() -> None:
    """When a decode worker falls silent, its streams continue on another worker."""
    report = run(3, 300, faults="partition").check()
    assert set(report.outcomes) == {"answered", "cancelled"}
    assert any(each.continued_after for each in _moved(report, from_decode="decode-0"))


def test_deadlines() -> None:
    """A request whose timeout expires ends with `deadline_exceeded`, in any phase, and leaves nothing behind."""
    report = run(4, 200, load="hurried").check()
    assert set(report.outcomes) == {"answered", "cancelled", "deadline_exceeded"}
    late = [each for each in report.ledgers.values() if each.outcome == "deadline_exceeded"]
    for each in late:
        assert each.request.timeout_s is not None
        assert each.ended_s - each.arrived_s < each.request.timeout_s + 0.01


@pytest.mark.parametrize("mesh", ["tight", "no-prefill", "three-tokens"])
def test_other_meshes(mesh: str) -> None:
    """All requests are answered with evicted caches and preempted requests, without prefill workers, and with several tokens a step."""
    report = run(5, 150, mesh=mesh, load="dense").check()
    assert set(report.outcomes) == {"answered", "cancelled"}


@pytest.mark.parametrize("faults", ["none", "kill-prefill", "mixed"])
def test_single_tokens(faults: str) -> None:
    """Each answer has the right token, despite faults and cancels. Prefill workers answer nearly all requests."""
    report = run(9, 400, load="single", faults=faults).check()
    assert set(report.outcomes) <= {"answered", "cancelled", "deadline_exceeded"}
    assert report.outcomes["answered"] > 300
    prefilled = sum(line.split()[2] == "prefilled" for line in report.lines)
    submitted = sum(line.split()[2] == "submit" for line in report.lines)
    assert prefilled > 300 and submitted < prefilled / 10
    if faults == "kill-prefill":
        moved = [each for each in report.ledgers.values() if len(each.placements) > 1]
        assert moved and all(each.placements[-1][0] != "prefill-0" for each in moved)


@pytest.mark.parametrize("mesh", ["three-and-three", "rendezvous-three-and-three"])
def test_a_worker_is_killed_every_two_seconds(mesh: str) -> None:
    """Plays a part of `python -m tests.simulation --faults kills --mesh three-and-three --load long --requests 1000`.

    Every answer is right, streamed or not. `check` compares all tokens, texts, finish reasons and usage.
    """
    report = run(1, 120, faults="kills", mesh=mesh, load="long").check()
    assert set(report.outcomes) == {"answered"}, report.command
    for is_whole in (True, False):
        continued = [each for each in report.ledgers.values() if each.continued_after and each.is_whole is is_whole]
        assert continued, report.command
    assert not any(each.restarts for each in report.ledgers.values())


def test_killed_router() -> None:
    """With a second router, clients do not notice that one dies, and requests in flight continue."""

    async def kill_router(mesh: ScriptedMesh) -> None:
        await mesh.world.clock.sleep(1.0)
        await mesh.kill(mesh.frontend.router_link.router_ids[0])

    report = run(6, 150, mesh="two-routers", script=kill_router).check()
    assert set(report.outcomes) == {"answered", "cancelled"}


@pytest.mark.parametrize("load", ["calm", "halves"])
@pytest.mark.parametrize("seed", [1, 2])
def test_mixed_faults(seed: int, load: str) -> None:
    """Under mixed faults every request is answered with the right tokens, and nothing is left behind."""
    report = run(seed, 200, faults="mixed", load=load).check()
    assert set(report.outcomes) == {"answered", "cancelled"}
    longest_s = max(ledger.ended_s - ledger.arrived_s for ledger in report.ledgers.values())
    assert longest_s < 20.0


def test_the_invariants_detect_wrong_tokens() -> None:
    """An engine that does not verify lost KV gives wrong tokens, and the invariants report them."""
    shape = MeshShape(engine=default_engine(verify_kv=False))

    async def one_wrong_answer() -> list[str]:
        mesh = ScriptedMesh(1, shape)
        await mesh.start()
        for worker_id in ("prefill-0", "prefill-1"):
            mesh.workers[worker_id].engine.inject(LoseKv(handles=1))
        await mesh.request(
            Request(request_id="r0", model=MODEL, prompt=list(range(100)), sampling=SamplingParams(max_tokens=8))
        )
        await mesh.idle()
        problems = mesh.problems()
        await mesh.aclose()
        return problems

    problems = run_virtual(one_wrong_answer())
    assert problems[0].startswith("r0: wrong tokens")


def test_a_failed_run_names_its_command() -> None:
    """The error of a failed run contains the command that replays it."""

    async def leak_a_block(mesh: ScriptedMesh) -> None:
        mesh.workers["decode-0"].engine.scheduler.pool.allocate(1)

    with pytest.raises(
        AssertionError, match=r"(?s)decode-0: blocks .*\n.*python -m tests.simulation --seed 5 --requests 3"
    ):
        run(5, 3, script=leak_a_block).check()


def _moved(report: Report, *, from_decode: str) -> list[Ledger]:
    return [
        each
        for each in report.ledgers.values()
        if each.outcome == "answered" and len(each.placements) > 1 and each.placements[0][1] == from_decode
    ]


def _at_s(line: str) -> float:
    return float(line.split()[0])


def _placed_after(report: Report, time_s: float) -> list[Ledger]:
    """Returns the requests that arrived after a time and were placed."""
    return [each for each in report.ledgers.values() if each.arrived_s > time_s and each.placements]
