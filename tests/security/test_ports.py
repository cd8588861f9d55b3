"""A new mesh without any configuration exposes only the public API, health and metrics."""

from pathlib import Path

from tests.integration.mesh import argv_simulated, chat, running_mesh, wait_until
from tests.patience import PATIENCE_S
from tests.security.anonymous import kinds_of_ports, try_ports


async def test_unauthenticated_clients_get_only_the_public_api(tmp_path: Path) -> None:
    """Another user of the machine, who tries every port over HTTP and gRPC, reaches only the public API. The mesh keeps serving."""
    async with running_mesh(tmp_path, *argv_simulated("--no-gateway")) as mesh:

        async def all_listen() -> bool:
            kinds = await kinds_of_ports(mesh)
            return kinds["gRPC"] >= 4 and kinds["metrics"] >= 5 and kinds["private"] > 0

        # Workers start UCX after they have registered.
        await wait_until(all_listen, PATIENCE_S, "all services and UCX listen")
        ports = await try_ports(mesh)
        assert [each for each in ports if each.problem] == []
        found = sorted(each.what for each in ports)
        # A gRPC server and metrics of each service; UCX of the workers that have started it.
        assert [found.count(what) for what in ("public HTTP", "public gRPC", "registry")] == [1, 1, 1], found
        assert found.count("gRPC") == 4 and found.count("metrics") == 5, found
        assert "private" in found, found
        await chat(mesh.url, "still there?", max_tokens=3)
