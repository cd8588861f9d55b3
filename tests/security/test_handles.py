"""Stolen KV handles on a mesh of simulated engines; tests/integration/test_mesh_vllm.py has those of vLLM."""

from pathlib import Path

import pytest

from tests.integration.mesh import argv_simulated, running_mesh
from tests.security.handle_attacks import check_stolen_handles


@pytest.mark.timeout(300)
async def test_workers_refuse_handles_that_are_not_theirs(tmp_path: Path) -> None:
    """What an attacker submits with a victim's handle is refused before a block is read, and the victim is served."""
    async with running_mesh(tmp_path, *argv_simulated(), ready_timeout_s=180) as mesh:
        await check_stolen_handles(mesh)
