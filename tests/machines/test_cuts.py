"""A mesh on eight hosts with real Consul, while paths between hosts are cut or slowed down and hosts lose their power.

Some faults occur in pairs. `python -m tests.machines` prints the effect of each fault and whether the mesh met its goals.
"""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.machines.faults import COMBINED, measure
from tests.machines.layouts import simulated_mesh
from tests.machines.mesh import Machines
from tests.machines.table import table
from tests.machines.traffic import HANGS, WRONG, Questions

WAIT_S_MAX = 30.0
"""Only an upper bound, because the machine may be busy. The goal is to notice each fault within 2 s; the table shows the measured time."""

FAULT_S = 7.0
"""Longer than ten heartbeats, after which a silent worker counts as lost."""
ALONE = ("cut prefill-1, decode-1", "cut frontend-1, decode", "Consul empty")

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Machines, Questions]]:
    async with simulated_mesh(tmp_path_factory.mktemp("machines")) as mesh:
        yield mesh


@pytest.mark.parametrize("fault", [*ALONE, *COMBINED])
async def test_requests_survive_a_fault(running: tuple[Machines, Questions], fault: str) -> None:
    """A fault causes no wrong token and no hanging request, and no error for requests that can run elsewhere. Afterwards all paths are used
    again."""
    mesh, questions = running
    effect = await measure(mesh, fault, questions, fault_s=FAULT_S)
    assert effect.all.count(WRONG) == 0
    assert effect.all.count(HANGS) == 0
    for kind in effect.kinds_with_workers:
        assert kind not in effect.errors, f"{table([effect])}\n{mesh.logs()}"
        assert effect.all.of(kind).longest_s < WAIT_S_MAX, f"{table([effect])}\n{mesh.logs()}"
