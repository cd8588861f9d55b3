"""Stolen KV handles on a mesh of simulated engines. tests/integration/test_mesh_vllm.py has the same checks for vLLM."""

from pathlib import Path

from tests.integration.mesh import argv_simulated, running_mesh
from tests.security.handle_attacks import check_stolen_handles


async def test_workers_refuse_stolen_handles(tmp_path: Path) -> None:
    """The decode worker refuses every misuse of a victim's handle before it reads a block, and still serves the victim."""
    async with running_mesh(tmp_path, *argv_simulated(), ready_timeout_s=180) as mesh:
        await check_stolen_handles(mesh)
