"""The whole mesh on virtual time: 1 000 requests, runs that repeat exactly from a seed, and the faults that it handles today."""

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
CPU_S_MAX = 40.0
"""Several times what it takes; processor time, since the machine may run other things beside it."""


def hash_elsewhere(report: Report) -> str:
    """The hash of the same run in another process, where addresses and the hashes of texts are others."""
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


@pytest.mark.timeout(300)
def test_a_thousand_requests() -> None:
    """Every request of 1 000 ends once, with its tokens and nothing left behind."""
    report = run(7, 1000).check()
    assert report.outcomes == {
        "answered": 1000 - report.outcomes["cancelled"],
        "cancelled": report.outcomes["cancelled"],
    }
    assert all(report.cancelled_in[phase.name] >= 10 for phase in CANCEL_PHASES), report.cancelled_in
    assert report.cpu_s < CPU_S_MAX


def test_runs_repeat_exactly() -> None:
    """The same seed repeats message by message, in one process and in another. Another seed is another run."""
    first, second, other = (run(seed, 150).check() for seed in (7, 7, 8))
    assert first.hash == second.hash != other.hash
    assert hash_elsewhere(first) == first.hash, f"the run does not repeat; {first.command}"


def test_killed_decode_worker() -> None:
    """Streams on a decode worker that dies continue elsewhere, and so do requests without a token: no client notices."""
    report = run(3, 300, faults="kill-decode").check()
    [killed_at_s] = report.killed_at_s.values()
    assert set(report.outcomes) == {"answered", "cancelled"}
    moved = _moved(report, from_decode="decode-0")
    assert len([each for each in moved if each.continued_after]) >= 3
    assert all(each.placements[-1][1] != "decode-0" for each in moved)
    assert not [each for each in _placed_after(report, killed_at_s + 0.1) if "decode-0" in each.placements[-1]]


def test_killed_decode_worker_with_a_held_token() -> None:
    """Who has received tokens but shown none of them loses nothing: the held tokens are part of the answer."""
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
    """From its mark on a worker takes nothing new (`problems` has that), what it had ends well, and nobody is refused."""
    report = run(3, 300, faults="drain").check()
    assert set(report.outcomes) == {"answered", "cancelled"}
    marks = {line.split()[3]: float(line.split()[0]) for line in report.lines if " drain " in line}
    assert set(marks) == {"decode-0", "prefill-1"}
    for worker_id, marked_at_s in marks.items():
        late = [each for each in _placed_after(report, marked_at_s + 0.2) if worker_id in each.placements[-1]]
        assert not late


def test_silent_decode_worker() -> None:
    """A decode worker that falls silent is given up: its streams continue elsewhere, and it comes back."""
    report = run(3, 300, faults="partition").check()
    assert set(report.outcomes) == {"answered", "cancelled"}
    assert any(each.continued_after for each in _moved(report, from_decode="decode-0"))


def test_deadlines() -> None:
    """A request that has too little time ends as such, in whatever phase that finds it, and leaves nothing behind."""
    report = run(4, 200, load="hurried").check()
    assert set(report.outcomes) == {"answered", "cancelled", "deadline_exceeded"}
    late = [each for each in report.ledgers.values() if each.outcome == "deadline_exceeded"]
    for each in late:
        assert each.request.timeout_s is not None
        assert each.ended_s - each.arrived_s < each.request.timeout_s + 0.01


@pytest.mark.parametrize("mesh", ["tight", "no-prefill", "three-tokens"])
def test_other_meshes(mesh: str) -> None:
    """Caches that are evicted and requests that are preempted, no prefill workers, several tokens a step: all answered."""
    report = run(5, 150, mesh=mesh, load="dense").check()
    assert set(report.outcomes) == {"answered", "cancelled"}


@pytest.mark.parametrize("faults", ["none", "kill-prefill", "mixed"])
def test_single_tokens(faults: str) -> None:
    """Each has the token it should have, whatever breaks and whoever leaves; nearly all come from prefill workers."""
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
    """A slice of what `python -m tests.simulation --faults kills --mesh three-and-three --load long --requests 1000` plays.

    Every answer is right, streamed or not. `check` compares all tokens, texts, ends and usage.
    """
    report = run(1, 120, faults="kills", mesh=mesh, load="long").check()
    assert set(report.outcomes) == {"answered"}, report.command
    for is_whole in (True, False):
        continued = [each for each in report.ledgers.values() if each.continued_after and each.is_whole is is_whole]
        assert continued, report.command
    assert not any(each.restarts for each in report.ledgers.values())


def test_killed_router() -> None:
    """With another router there, nobody notices that one dies; requests in flight go on."""

    async def kill_router(mesh: ScriptedMesh) -> None:
        await mesh.world.clock.sleep(1.0)
        await mesh.kill(mesh.frontend.router_link.router_ids[0])

    report = run(6, 150, mesh="two-routers", script=kill_router).check()
    assert set(report.outcomes) == {"answered", "cancelled"}


@pytest.mark.parametrize("load", ["calm", "halves"])
@pytest.mark.parametrize("seed", [1, 2])
def test_mixed_faults(seed: int, load: str) -> None:
    """Whatever breaks: every request is answered with the tokens it should have; then nothing is left."""
    report = run(seed, 200, faults="mixed", load=load).check()
    assert set(report.outcomes) == {"answered", "cancelled"}
    longest_s = max(ledger.ended_s - ledger.arrived_s for ledger in report.ledgers.values())
    assert longest_s < 20.0


def test_the_account_finds_wrong_tokens() -> None:
    """The check itself can fail: an engine that does not verify lost KV gives wrong tokens, and that is found."""
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
    """Whoever sees a run fail can play it again."""

    async def leave_something(mesh: ScriptedMesh) -> None:
        mesh.workers["decode-0"].engine.scheduler.pool.allocate(1)

    with pytest.raises(
        AssertionError, match=r"(?s)decode-0: blocks .*\n.*python -m tests.simulation --seed 5 --requests 3"
    ):
        run(5, 3, script=leave_something).check()


def _moved(report: Report, *, from_decode: str) -> list[Ledger]:
    return [
        each
        for each in report.ledgers.values()
        if each.outcome == "answered" and len(each.placements) > 1 and each.placements[0][1] == from_decode
    ]


def _at_s(line: str) -> float:
    return float(line.split()[0])


def _placed_after(report: Report, time_s: float) -> list[Ledger]:
    """Requests that arrived after a time and got as far as a placement."""
    return [each for each in report.ledgers.values() if each.arrived_s > time_s and each.placements]
