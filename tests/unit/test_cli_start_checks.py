"""What `kvmesh up` says before it starts anything. Real sockets on loopback."""

import os
import socket
from collections.abc import AsyncIterator, Iterator

import pytest
from aiohttp import web
from huggingface_hub import constants

from kvmesh.cli.start_checks import consul_problem, engine_problem, hub_problem, is_hub_name, port_problems


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_taken_port_is_named_with_its_process(taken: int) -> None:
    """And the flag that chooses another."""
    problem = port_problems("127.0.0.1", taken, 0)
    assert problem.startswith(f"port {taken} is taken by PID {os.getpid()} (")
    assert problem.endswith("); use --port")
    assert port_problems("127.0.0.1", 0, taken).endswith("use --grpc-port")
    assert port_problems("127.0.0.1", 0, 0) == ""


def test_an_address_of_another_machine_is_refused() -> None:
    """Before a worker has loaded its model."""
    assert port_problems("192.0.2.1", 8000).startswith("cannot listen on 192.0.2.1 port 8000: ")
    assert "is not an address of this machine" in port_problems("no-such-host.invalid", 8000)


def test_a_missing_engine_is_said_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any process starts. Other engines say so when their workers start."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "KVMESH_ENGINE_BUILD=cpu make up" in engine_problem("vllm")
    assert engine_problem("simulated") == engine_problem("sglang") == ""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert engine_problem("vllm") == ""


async def test_an_unreachable_consul_is_said_once(unused_tcp_port: int) -> None:
    """At once, with the address and the cause; the end has both as well."""
    lines: list[str] = []
    address = f"127.0.0.1:{unused_tcp_port}"
    problem = await consul_problem(address, say=lines.append, limit_s=0.0)
    assert problem == f"the Consul agent at {address} did not answer for 0 s: Connection refused; see --consul"
    assert lines == [f"the Consul agent at {address} cannot be reached: Connection refused; retrying for 0 s"]
    lines.clear()
    await consul_problem(address, say=lines.append, limit_s=0.01)
    assert len(lines) == 1


@pytest.fixture
async def server() -> AsyncIterator[str]:
    """A hub with one model, and a Consul agent that wants a token."""
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


async def test_a_consul_that_answers_is_no_problem(server: str) -> None:
    """With or without a scheme, and even if it refuses the token."""
    for address in (server, server.removeprefix("http://")):
        assert await consul_problem(address, say=pytest.fail) == ""


async def test_hub_names(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said to be one; whether the hub has it; and what to do where it cannot be loaded."""
    monkeypatch.setattr(constants, "ENDPOINT", server)
    lines: list[str] = []
    assert await hub_problem("org/good", say=lines.append) == ""
    assert lines[0].startswith(f"org/good is a name on the Hugging Face hub, {server}; workers download it to ")
    problem = await hub_problem("org/absent", say=pytest.fail)
    assert "which has no such model, or only for those who set HF_TOKEN" in problem
    assert "hf download org/absent --local-dir DIR" in problem
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert "which cannot be reached: Connection refused" in await hub_problem("org/good", say=pytest.fail)


def test_what_is_a_hub_name() -> None:
    """Directories that exist and paths are none."""
    assert is_hub_name("org/model-1.5") and is_hub_name("gpt2")
    assert not is_hub_name("/models/x") and not is_hub_name("models/demo") and not is_hub_name("a/b/c")
