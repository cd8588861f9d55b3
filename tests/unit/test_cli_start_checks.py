"""The checks of `kvmesh up` before it starts processes, with real sockets on loopback."""

import os
import socket
from collections.abc import AsyncIterator, Iterator

import pytest
from aiohttp import web
from huggingface_hub import constants

from kvmesh.cli import start_checks
from kvmesh.cli.start_checks import consul_problem, engine_problem, hub_problem, is_hub_name, port_problems
from tests.patience import PATIENCE_S
from tests.servers import closed_port


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_checks, "HUB_TIMEOUT_S", PATIENCE_S)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_taken_port_is_named_with_its_process(taken: int) -> None:
    """The message names the process that uses the port, and the flag that sets another one."""
    problem = port_problems("127.0.0.1", taken, 0)
    assert problem.startswith(f"port {taken} is taken by PID {os.getpid()} (")
    assert problem.endswith("); use --port")
    assert port_problems("127.0.0.1", 0, taken).endswith("use --grpc-port")
    assert port_problems("127.0.0.1", 0, 0) == ""


def test_an_address_of_another_machine_is_refused() -> None:
    """An address that this machine does not have is refused before a worker loads its model."""
    assert port_problems("192.0.2.1", 8000).startswith("cannot listen on 192.0.2.1 port 8000: ")
    assert "is not an address of this machine" in port_problems("no-such-host.invalid", 8000)


def test_a_missing_engine_is_reported_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check runs before any process starts. Workers of other engines report missing packages themselves."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "KVMESH_ENGINE_BUILD=cpu make up" in engine_problem("vllm")
    assert engine_problem("simulated") == engine_problem("sglang") == ""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert engine_problem("vllm") == ""


async def test_an_unreachable_consul_is_reported_once() -> None:
    """The first failure is reported immediately with the address and the cause, and so is the final one."""
    lines: list[str] = []
    with closed_port() as port:
        address = f"127.0.0.1:{port}"
        problem = await consul_problem(address, say=lines.append, limit_s=0.0)
        assert problem == f"the Consul agent at {address} did not answer for 0 s: Connection refused; see --consul"
        assert lines == [f"the Consul agent at {address} cannot be reached: Connection refused; retrying for 0 s"]
        lines.clear()
        await consul_problem(address, say=lines.append, limit_s=0.01)
        assert len(lines) == 1


@pytest.fixture
async def server() -> AsyncIterator[str]:
    """A model hub with one model, and a Consul agent that refuses requests without a token."""
    app = web.Application()

    async def model(request: web.Request) -> web.Response:
        return web.json_response({}, status=200 if request.match_info["name"] == "org/good" else 401)

    async def leader(request: web.Request) -> web.Response:
        return web.Response(status=403)

    app.router.add_get("/api/models/{name:.+}", model)
    app.router.add_get("/v1/status/leader", leader)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_a_consul_that_answers_passes_the_check(server: str) -> None:
    """The address may have a scheme. A Consul that refuses the token counts as reachable."""
    for address in (server, server.removeprefix("http://")):
        assert await consul_problem(address, say=pytest.fail) == ""


async def test_models_on_the_hub_are_checked(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output says that the model is downloaded. The errors say that the hub lacks the model or is unreachable, and how to download it."""
    monkeypatch.setattr(constants, "ENDPOINT", server)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    lines: list[str] = []
    assert await hub_problem("org/good", say=lines.append) == ""
    assert lines[0].startswith(f"org/good is a name on the Hugging Face hub, {server}; workers download it to ")
    problem = await hub_problem("org/absent", say=pytest.fail)
    assert "which has no such model, or only for those who set HF_TOKEN" in problem
    assert "hf download org/absent --local-dir DIR" in problem
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert "which cannot be reached: Connection refused" in await hub_problem("org/good", say=pytest.fail)


def test_hub_names_are_distinguished_from_paths() -> None:
    """Existing directories and paths are not hub names."""
    assert is_hub_name("org/model-1.5") and is_hub_name("gpt2")
    assert not is_hub_name("/models/x") and not is_hub_name("models/demo") and not is_hub_name("a/b/c")
