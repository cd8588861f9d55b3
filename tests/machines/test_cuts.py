"""A mesh on eight hosts, real Consul among them: paths between hosts are cut and slowed down, and hosts lose their power.

Some faults come two at once. `python -m tests.machines` prints what requests noticed of each one, and whether the mesh met its goals.
"""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.machines.faults import TOGETHER, measure
from tests.machines.layouts import simulated_mesh
from tests.machines.mesh import Machines
from tests.machines.table import table
from tests.machines.traffic import HANGS, WRONG, Questions

WAIT_S_MAX = 30.0
"""No statement about speed. The mesh is to notice each fault within 2 s; the table shows how long it took."""

FAULT_S = 7.0
"""Longer than ten heartbeats, without which a worker is given up."""
ALONE = ("cut prefill-1, decode-1", "cut frontend-1, decode", "Consul empty")

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Machines, Questions]]:
    async with simulated_mesh(tmp_path_factory.mktemp("machines")) as mesh:
        yield mesh


@pytest.mark.parametrize("fault", [*ALONE, *TOGETHER])
async def test_fault(running: tuple[Machines, Questions], fault: str) -> None:
    """No wrong token, no request that hangs, and no error while the request has another way. Afterwards all paths are used again."""
    mesh, questions = running
    effect = await measure(mesh, fault, questions, fault_s=FAULT_S)
    assert effect.all.count(WRONG) == 0
    assert effect.all.count(HANGS) == 0
    for kind in effect.with_a_way:
        assert kind not in effect.errors, f"{table([effect])}\n{mesh.logs()}"
        assert effect.all.of(kind).longest_s < WAIT_S_MAX, f"{table([effect])}\n{mesh.logs()}"
