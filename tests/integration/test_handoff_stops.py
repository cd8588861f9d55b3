"""Checks for wrong tokens when services are stopped, or the network between them is cut, at any step of the handoff.

A short run of `python -m tests.chaos.handoff`, which can run for any time.
"""

import os
from pathlib import Path

import pytest

from tests.chaos.handoff import run, some_faults
from tests.chaos.hosts import network_problem
from tests.parts import is_required, require_part

SEED = 20


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("engine", "offset"),
    [pytest.param("simulated", 0, id="simulated"), pytest.param("vllm", 1, id="vllm", marks=pytest.mark.vllm)],
)
async def test_stops_and_cuts_give_no_wrong_token(engine: str, offset: int, tmp_path: Path) -> None:
    """Each service is stopped, and each network path cut, while other requests reuse the blocks.

    A fault lasts for 0.5, 1 or 2 leases. Both engines use each duration, and for each fault the engines use different ones.
    """
    require_part("nixl")
    if engine == "vllm":
        require_part("vllm")
    problem = network_problem()
    todo = some_faults(not problem, offset)
    outcomes = await run(engine, 0, SEED, todo, with_network=not problem, directory=tmp_path)
    assert not outcomes.wrong
    assert not outcomes.counts["hung"]
    assert outcomes.answers > 0
    if problem:
        can_be_had = is_required() and os.geteuid() == 0 and "command ip is missing" in problem
        (pytest.fail if can_be_had else pytest.skip)(f"services were stopped, but no path was cut: {problem}")
