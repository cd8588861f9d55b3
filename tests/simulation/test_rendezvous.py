"""The whole mesh on virtual time, with engines whose legs start at once, and its faults."""

import pytest

from services.simulation.ledger import RequestPhase
from tests.simulation.load import CANCEL_PHASES
from tests.simulation.runs import run
from tests.simulation.scripted_mesh import ScriptedMesh
from tests.simulation.test_mesh import hash_elsewhere

EXCHANGE_FAILED = {"kv_peer_lost", "kv_pull_timeout", "rendezvous_lost", "rendezvous_timeout", "no_prefill_worker"}
"""How requests may end while no KV can be pulled at all, because these decode workers cannot compute prompts themselves."""


def test_requests_repeat_exactly() -> None:
    """Each request ends exactly once with the right tokens and leaves nothing behind, also when cancelled. The run repeats message by
    message."""
    report = run(7, 150, mesh="rendezvous").check()
    assert set(report.outcomes) == {"answered", "cancelled"}
    # Both legs start at once, so no request has only a prefill leg.
    assert all(report.cancelled_in[phase.name] for phase in CANCEL_PHASES if phase is not RequestPhase.PREFILLING)
    assert all("-" not in placement for each in report.ledgers.values() for placement in each.placements)
    assert hash_elsewhere(report) == report.hash, f"the run does not repeat; {report.command}"


def test_retraction_loses_and_duplicates_no_tokens() -> None:
    """With few blocks and long answers legs are retracted, and every answer has its tokens (`check` compares each)."""
    preempted: list[int] = []

    async def count(mesh: ScriptedMesh) -> None:
        while any(not each.outcome for each in mesh.ledgers.values()) or not mesh.ledgers:
            await mesh.world.clock.sleep(0.05)
        workers = [worker for worker in mesh.workers.values() if worker.worker_id.startswith("decode")]
        preempted.extend(worker.engine.load().preempted_requests_total for worker in workers)
        assert not any(worker.engine.load().prompt_tokens_total for worker in workers)

    report = run(5, 150, mesh="rendezvous-tight", load="dense", script=count).check()
    assert set(report.outcomes) == {"answered", "cancelled"}
    assert sum(preempted) > 0


@pytest.mark.parametrize("faults", ["kill-prefill", "kill-decode", "drain", "partition"])
def test_one_fault(faults: str) -> None:
    """A leg whose worker or counterpart fails ends, and every request is placed again and answered."""
    report = run(3, 200, mesh="rendezvous", faults=faults).check()
    assert set(report.outcomes) == {"answered", "cancelled"}
    longest_s = max(ledger.ended_s - ledger.arrived_s for ledger in report.ledgers.values())
    assert longest_s < 20.0


@pytest.mark.parametrize("seed", [1, 2])
def test_mixed_faults(seed: int) -> None:
    """Under mixed faults requests are answered, or end with an error of the KV exchange. Nothing is left behind."""
    report = run(seed, 200, mesh="rendezvous", faults="mixed").check()
    assert set(report.outcomes) <= {"answered", "cancelled", *EXCHANGE_FAILED}
    assert report.outcomes["answered"] > 140
