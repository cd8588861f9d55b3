"""A new mesh without any configuration exposes only the public API, health and metrics."""

from pathlib import Path

from tests.integration.mesh import argv_simulated, chat, running_mesh
from tests.security.anonymous import try_ports


async def test_unauthenticated_clients_get_only_the_public_api(tmp_path: Path) -> None:
    """Another user of the machine, who tries every port over HTTP and gRPC, reaches only the public API. The mesh keeps serving."""
    async with running_mesh(tmp_path, *argv_simulated("--no-gateway")) as mesh:
        ports = await try_ports(mesh)
        assert [each for each in ports if each.problem] == []
        found = sorted(each.what for each in ports)
        # A gRPC server and metrics of each service; UCX of the workers that have started it.
        assert [found.count(what) for what in ("public HTTP", "public gRPC", "registry")] == [1, 1, 1], found
        assert found.count("gRPC") == 4 and found.count("metrics") == 5, found
        assert "private" in found, found
        await chat(mesh.url, "still there?", max_tokens=3)
