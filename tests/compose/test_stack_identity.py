"""The stack with identities from Consul Connect, under attacks by clients without credentials or with stolen ones, intentions and rotation."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from openai import APIError, OpenAI

from tests.compose.load import running_load
from tests.compose.stack import Stack, wait_for
from tests.connect_identities import ACCEPTED, REFUSED, is_plain_http, member_files, presented_certificate, s_client
from tests.connect_mesh import ConsulAdmin
from tests.parts import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
GRPC, METRICS, HTTP = 7000, 9100, 8000
SERVICES = ("frontend", "router", "prefill", "decode", "planner")
SERVERS = ("router", "prefill", "decode", "planner")
STREAMS, TOKENS = 32, 300


@pytest.fixture(scope="module")
def consul(stack: Stack) -> ConsulAdmin:
    return ConsulAdmin(url=stack.url("CONSUL"), management_token=stack.management_token())


def test_every_port_refuses_clients_without_a_certificate(stack: Stack, consul: ConsulAdmin, tmp_path: Path) -> None:
    """Without a certificate, a TLS client gets no answer on any port of any service. With an operator's certificate, gRPC answers.

    Metrics, health and the public API are plain HTTP.
    """
    own = member_files(consul, "operator", tmp_path)
    for service in SERVICES:
        [container, *_] = stack.containers(service)
        host, plain, closed = stack.address(container), set(), set()
        ports = listening(stack, container)
        for port in ports:
            assert s_client(host, port) == REFUSED, (service, port)
            if is_plain_http(host, port):
                plain.add(port)
            elif s_client(host, port, *own) == ACCEPTED:
                closed.add(port)
        assert plain == ({METRICS, HTTP} if service == "frontend" else {METRICS}), service
        assert closed == (set() if service == "frontend" else {GRPC}), service
        # The only other port is a frontend's public gRPC, which uses keys instead of certificates.
        assert len(ports) == len(plain | closed) + (service == "frontend"), (service, ports)


def listening(stack: Stack, container: str, network: str = "default") -> set[int]:
    """Returns the TCP ports on which a container listens at its address on a network of the stack."""
    address = bytes(reversed([int(each) for each in stack.address(container, network).split(".")])).hex().upper()
    lines = stack.docker.run("exec", container, "cat", "/proc/net/tcp").splitlines()[1:]
    sockets = [words[1].split(":") for words in map(str.split, lines) if words[3] == "0A"]
    return {int(port, 16) for host, port in sockets if host in (address, "00000000")}


def run_attack(stack: Stack, module: str, *arguments: str) -> dict[str, object]:
    """Returns the results of an attack from a container on the stack's network without credentials."""
    start = ["run", "--rm", "--network", f"{stack.name}_default", "--volume", f"{ROOT}/tests:/app/tests:ro"]
    image = ["--entrypoint", "python", "kvmesh/planner:test", "-m", f"tests.compose.{module}"]
    outcome: dict[str, object] = json.loads(stack.docker.run(*start, *image, *arguments))
    return outcome


def token_of(stack: Stack, service: str) -> str:
    return stack.docker.run("exec", stack.containers(service)[0], "cat", "/credentials/own/registry-token").strip()


def worker_of(stack: Stack, consul: ConsulAdmin, service: str) -> tuple[str, str]:
    """Returns id and address of a worker. An earlier container with the same address may still be registered, as critical."""
    host = stack.address(stack.containers(service)[0])
    listed = consul.call("GET", f"/v1/health/service/kvmesh-{service}?passing=1")
    [found] = [each["Service"] for each in listed if each["Service"]["Address"] == host]
    return str(found["ID"]), f"{host}:{GRPC}"


def test_a_rogue_container_can_neither_register_nor_drain_nor_read_kv(stack: Stack, consul: ConsulAdmin) -> None:
    """A container without credentials can neither register nor drain a worker nor read KV, even with a decode worker's token of Consul.

    Registrations are sealed, calls need a certificate of the mesh, and KV has a separate network.
    """
    worker_id, address = worker_of(stack, consul, "decode")
    [container, *_] = stack.containers("decode")
    [port] = listening(stack, container, "kv")
    kv = f"{stack.address(container, 'kv')}:{port}"
    outcome = run_attack(stack, "rogue", token_of(stack, "decode"), address, worker_id, kv)
    assert outcome.pop("register with a stolen token") == 200
    assert outcome == {
        "register": 403,
        "write a key": 403,
        "remove a worker": 403,
        "mark a worker": 403,
        "drain in plain text": "UNAVAILABLE",
        "drain without a certificate": "UNAVAILABLE",
        "drain with a forged certificate": "UNAVAILABLE",
        "connect to its KV port": False,
        "connections": 0,
    }
    assert [each["value"][1] for each in stack.query("max(kvmesh_router_decode_workers)")] == ["2"]


def test_a_thief_can_neither_forge_nor_replay_a_handle(stack: Stack, consul: ConsulAdmin) -> None:
    """With a frontend's stolen token, an attacker can submit prompts, read the KV of each of them once, and do nothing else."""
    workers = ["@".join(worker_of(stack, consul, service)) for service in ("prefill", "decode")]
    assert run_attack(stack, "thief", token_of(stack, "frontend"), *workers) == {
        "forged": "kv_seal",
        "for another request": "kv_seal",
        "its own": "",
        "replayed": "kv_seal",
        "drain": "PERMISSION_DENIED",
    }


def test_a_denied_intention_stops_calls(stack: Stack, consul: ConsulAdmin) -> None:
    """Denying an intention ends the running answer early and refuses new requests. Allowing it again restores service."""
    with OpenAI(base_url=stack.url("KVMESH", "/v1"), api_key="none", max_retries=0) as client:

        def ask(tokens: int, on_first: Callable[[], None] = lambda: None) -> None:
            body = {"ignore_eos": True}
            chunks = client.completions.create(
                model="demo", prompt="word " * 8, max_tokens=tokens, stream=True, extra_body=body
            )
            next(chunks)
            on_first()
            for _ in chunks:
                pass

        def is_answered() -> bool:
            try:
                ask(3)
            except APIError:
                return False
            return True

        def permit(action: str) -> None:
            consul.set_intention("kvmesh-frontend", "kvmesh-decode", action)

        try:
            with pytest.raises(APIError):  # noqa: PT012 (the first answer that is long enough)
                for _ in range(5):
                    ask(1900, on_first=lambda: permit("deny"))
                    # On a busy machine the answer may end before the denial arrives.
                    permit("allow")
                    wait_for(is_answered, "a request is answered")
            # The other decode worker may learn of the denial later.
            wait_for(lambda: not any(is_answered() for _ in range(STREAMS)), "requests are refused")
        finally:
            permit("allow")
        wait_for(lambda: all(is_answered() for _ in range(STREAMS)), "requests are answered again")


async def test_certificate_rotation_drops_no_stream(stack: Stack, consul: ConsulAdmin) -> None:
    """No stream fails when Consul rotates its root and the services get new certificates."""
    addresses = [f"{stack.address(stack.containers(service)[0])}:{GRPC}" for service in SERVERS]
    before = {address: presented_certificate(address) for address in addresses}
    async with running_load(stack.frontends, STREAMS, tokens=TOKENS) as load:
        await asyncio.to_thread(consul.rotate_root)
        for address in addresses:
            # Compares the signing key, which shows that the root changed, not only the certificate.
            await asyncio.to_thread(
                wait_for, lambda address=address: presented_certificate(address)[1] != before[address][1], address
            )
        await load.wait_answers(STREAMS)
    assert load.failures == [], stack.logs()
