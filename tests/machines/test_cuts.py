"""A mesh on eight hosts, real Consul among them: paths between hosts are cut and slowed down, and hosts lose their power.

`python -m pytest -s tests/machines/test_cuts.py` prints what requests noticed of each fault.
"""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.machines.faults import FAULTS, FIRST, HEADER, SECOND, UNTOUCHED, Effect, measure
from tests.machines.mesh import Machines, machines
from tests.machines.traffic import HANGS, MODEL, WRONG

HOSTS = ["router", "prefill-1", "prefill-2", "decode-1", "decode-2", "frontend-1", "frontend-2"]
ENGINE = ("--engine", "simulated", "--simulated-kv-transport-delay-s", "0")
NO_WAY = {("cut frontend-1, decode", FIRST)}
"""Faults that leave a kind of requests no worker to run on."""
WAIT_S_MAX = 30.0
"""No statement about speed. The mesh is to notice each fault within 2 s; the table shows how long it took."""

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Machines]:
    directory = tmp_path_factory.mktemp("machines")
    async with machines(directory, HOSTS, model=MODEL, engine_argv=ENGINE) as running:
        yield running


@pytest.fixture(scope="module")
def effects() -> Iterator[list[Effect]]:
    """Of the faults so far; printed as a table."""
    found: list[Effect] = []
    yield found
    print("\n" + HEADER, *(effect.row() for effect in found), sep="\n")


@pytest.mark.parametrize("fault", FAULTS)
async def test_fault(mesh: Machines, effects: list[Effect], fault: str) -> None:
    """No wrong token, no request that hangs, and no error while the request has another way. Afterwards all paths are used again."""
    effect = await measure(mesh, fault)
    effects.append(effect)
    assert effect.all.count(WRONG) == 0
    assert effect.all.count(HANGS) == 0
    for kind in (FIRST, SECOND, UNTOUCHED):
        if (fault, kind) not in NO_WAY:
            assert kind not in effect.errors, f"{effect.row()}\n{mesh.logs()}"
            assert effect.all.of(kind).longest_s < WAIT_S_MAX, f"{effect.row()}\n{mesh.logs()}"
