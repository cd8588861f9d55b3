"""Identities from a real Consul Connect: a mesh of real processes with ACLs that deny by default, and one token per role."""

import json
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import pytest

from kvmesh.identity.roles import ConnectNames, MeshRole
from kvmesh.rpc.revoking import INTENTION_DENIED
from tests.connect_identities import (
    ACCEPTED,
    REFUSED,
    address_of,
    forged,
    is_plain_http,
    issued,
    leaf_of,
    member_files,
    outcome,
    presented_certificate,
    presented_uri,
    s_client,
)
from tests.connect_mesh import ConnectMesh, connect_mesh, wait_for
from tests.patience import PATIENCE_S
from tests.security.anonymous import listening
from tests.security.test_methods import Fixed, serving

pytestmark = pytest.mark.timeout(600)
SERVERS = ("router", "prefill", "decode")
STREAMS, TOKENS = 16, 800
"""Answers take 40 s. After a new root, Consul spreads new certificates over up to 30 s."""
DESCRIBE = "/kvmesh.worker.v1.WorkerService/Describe"


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectMesh]:
    with connect_mesh(tmp_path_factory.mktemp("connect")) as running:
        yield running


def test_the_mesh_answers(mesh: ConnectMesh) -> None:
    """The mesh answers a long prompt with certificates, intentions and tokens from Consul only."""
    wait_answered(mesh, words=300)


def wait_answered(mesh: ConnectMesh, *, words: int = 8) -> None:
    """Waits until a new request is answered.

    A single one may be refused: on a busy machine a heartbeat may be late, and the worker takes no requests until the next one.
    """
    wait_for(lambda: mesh.ask(words=words)[0] == 200, mesh.logs)


def test_clients_without_a_certificate_are_refused_on_every_port(mesh: ConnectMesh) -> None:
    """`openssl s_client` can connect to the gRPC ports of the mesh with a member's certificate, and not without one. Metrics, health checks
    and the public API use plain HTTP."""
    plain, closed = set(), set()
    pids = [process.pid for process in mesh.processes.values()]
    own = member_files(mesh.consul, "operator", mesh.folder)
    for _, host, port in listening(pids):
        if is_plain_http(host, port):
            plain.add(port)
        elif s_client(host, port, *own) == ACCEPTED:
            closed.add(port)
            assert s_client(host, port) == REFUSED, port
    instances = mesh.instances()
    assert closed == {instances[name]["Port"] for name in ("router", "prefill", "decode")}
    metrics = {int(each["Meta"]["metrics_port"]) for each in instances.values()}
    assert plain == {*metrics, int(mesh.url.rpartition(":")[2])}


async def test_other_identities_are_refused(mesh: ConnectMesh) -> None:
    """A certificate of another trust domain ends the connection. Members, and other services of the same Consul, may call only the methods of
    their role."""
    decode = address_of(mesh.instances()["decode"])
    generate, drain = "/kvmesh.decode.v1.DecodeService/Generate", "/kvmesh.worker.v1.WorkerService/Drain"
    operator = issued(mesh.consul, MeshRole.OPERATOR)
    assert await outcome(operator, decode, DESCRIBE) is grpc.StatusCode.OK
    # Consul from 1.11 on issues certificates without a common name.
    uri = operator.names.server_uri(MeshRole.DECODE)
    relayed = replace(operator, names=ConnectNames(prefix=uri.partition("/svc/")[0], domain=""))
    assert await outcome(relayed, decode, DESCRIBE) is grpc.StatusCode.OK
    foreign = forged(operator, operator.names.server_uri(MeshRole.OPERATOR))
    assert await outcome(foreign, decode, DESCRIBE) is grpc.StatusCode.UNAVAILABLE
    for method in (generate, drain):
        assert await outcome(issued(mesh.consul, MeshRole.ROUTER), decode, method) is grpc.StatusCode.PERMISSION_DENIED
    web = leaf_of(mesh.consul, "web")
    assert await outcome(web, decode, DESCRIBE) is grpc.StatusCode.PERMISSION_DENIED


async def test_a_server_with_another_role_is_no_decode_worker(mesh: ConnectMesh) -> None:
    """Clients that expect a decode worker refuse a server at its address that has a router's certificate."""
    decode, router = issued(mesh.consul, MeshRole.DECODE), issued(mesh.consul, MeshRole.ROUTER)
    for certificates, expected in ((decode, grpc.StatusCode.OK), (router, grpc.StatusCode.UNAVAILABLE)):
        async with serving(Fixed(certificates)) as address:
            assert await outcome(issued(mesh.consul, MeshRole.FRONTEND), address, DESCRIBE) is expected


def test_an_operator_has_an_identity_of_consul(mesh: ConnectMesh) -> None:
    """An operator's commands reach routers and workers, and the audit log has each change. A frontend's token does not suffice."""
    worker = mesh.instances()["prefill"]["ID"]
    before = mesh.count("prefill", "operator_call")
    # On a busy machine the router may not answer within the timeout of the command.
    wait_for(lambda: (done := mesh.command("operator", "status")).returncode == 0 and worker in done.stdout, mesh.logs)
    for words in (("drain", worker), ("drain", worker, "--undo")):
        done = operate(mesh, *words)
        assert done.returncode == 0 and worker in done.stdout, done
    # More if a command was repeated.
    assert mesh.count("prefill", "operator_call") >= before + 2
    assert mesh.command("frontend", "drain", worker).returncode == 1


def operate(mesh: ConnectMesh, *words: str) -> "subprocess.CompletedProcess[str]":
    """Runs an operator's command, again while Consul's agent has no server: on a busy machine the server may seem to have failed."""
    done = mesh.command("operator", *words)
    while "the registry answered 500" in done.stderr:
        done = mesh.command("operator", *words)
    return done


def test_a_denied_intention_stops_calls(mesh: ConnectMesh) -> None:
    """New requests fail, and the running one ends early with an error. After the intention allows the calls again, requests succeed."""
    settle(mesh)
    try:
        with ThreadPoolExecutor() as threads:
            while True:
                running = threads.submit(mesh.ask, max_tokens=TOKENS)
                wait_for(lambda running=running: running.done() or mesh.is_decoding(), mesh.logs)
                if not running.done():
                    break
                # It was refused, as in `wait_answered`.
            mesh.consul.set_intention("kvmesh-frontend", "kvmesh-decode", "deny")
            status, body = running.result(PATIENCE_S)
        assert (status, reason_of(body)) == (503, INTENTION_DENIED), body
        status, body = mesh.ask()
        assert status == 503, body
    finally:
        mesh.consul.set_intention("kvmesh-frontend", "kvmesh-decode", "allow")
    settle(mesh)


def reason_of(body: str) -> str:
    return str(json.loads(body)["error"]["code"])


def test_a_worker_changes_its_role_and_its_identity(mesh: ConnectMesh) -> None:
    """The prefill worker's policy allows both roles. It becomes a decode worker and changes back, each time with the certificate of its role,
    and the mesh answers. The decode worker's policy allows one role, so its role change is refused."""
    workers = {name: mesh.instances()[name] for name in ("prefill", "decode")}
    refused = operate(mesh, "role", workers["decode"]["ID"], "prefill")
    assert refused.returncode == 1 and "403" in refused.stderr, refused
    address = address_of(workers["prefill"])
    for role in ("decode", "prefill"):
        done = operate(mesh, "role", workers["prefill"]["ID"], role, "--timeout-s", f"{PATIENCE_S:g}")
        assert done.returncode == 0, done
        wait_for(lambda role=role: presented_uri(address).endswith(f"/svc/kvmesh-{role}"), mesh.logs)
        wait_answered(mesh, words=300)
    assert presented_uri(address_of(workers["decode"])).endswith("/svc/kvmesh-decode")


def settle(mesh: ConnectMesh) -> None:
    """Waits until the router's circuit breakers are closed again: all of several concurrent requests are answered."""
    with ThreadPoolExecutor(STREAMS) as threads:
        wait_for(lambda: {each[0] for each in threads.map(lambda _: mesh.ask(), range(STREAMS))} == {200}, mesh.logs)


def test_rotation_drops_no_stream(mesh: ConnectMesh) -> None:
    """Consul rotates the root while 16 answers are streamed. Each ends with all its tokens, and the servers present certificates of the new
    root."""
    settle(mesh)
    before = {name: presented_certificate(address_of(mesh.instances()[name])) for name in SERVERS}
    is_rotated = threading.Event()
    begun: list[str] = []

    def stream() -> list[list[str]]:
        """Streams answers until the rotation has ended. Usually the first one outlasts it. Returns the events of each."""
        answers = []
        while not (answers and is_rotated.is_set()):
            # None: it was refused, as in `wait_answered`.
            if (events := mesh.stream(max_tokens=TOKENS, on_first=begun.append)) is not None:
                answers.append(events)
        return answers

    with ThreadPoolExecutor(STREAMS) as threads:
        streams = [threads.submit(stream) for _ in range(STREAMS)]
        try:
            wait_for(lambda: len(begun) >= STREAMS, mesh.logs)
            mesh.consul.rotate_root()
            wait_for(
                lambda: all(
                    presented_certificate(address_of(mesh.instances()[name]))[1] != before[name][1] for name in SERVERS
                ),
                mesh.logs,
            )
            wait_answered(mesh)  # New connections work during the rotation.
        finally:
            is_rotated.set()
        for events in (answer for each in streams for answer in each.result(4 * PATIENCE_S)):
            assert events[-1] == "[DONE]", events[-1]
            assert json.loads(events[-2])["usage"]["completion_tokens"] == TOKENS


def test_the_mesh_works_without_the_agent(mesh: ConnectMesh) -> None:
    """While the agent is down, certificates and intentions stay valid and requests are answered. After it restarts with new certificates, the
    services use them."""
    before = {name: presented_certificate(address_of(mesh.instances()[name])) for name in SERVERS}

    def meanwhile() -> None:
        wait_for(lambda: all(mesh.count(name, "certificates_not_renewed") for name in before), mesh.logs)
        wait_answered(mesh)

    mesh.restart_agent(meanwhile)
    wait_for(
        lambda: all(presented_certificate(address_of(mesh.instances()[name])) != before[name] for name in SERVERS),
        mesh.logs,
    )
    wait_answered(mesh)
