"""Connections between the machines of one engine, and their settings. These tests need no engine."""

import errno
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvmesh.engines import node_watch
from kvmesh.engines.node_watch import NodeWatch, greet, introduce, watch
from kvmesh.engines.nodes import watch_address
from kvmesh.engines.sglang.host import environment
from kvmesh.engines.sglang.host.environment import core_groups
from kvmesh.engines.sglang.settings import SglangSettings
from kvmesh.engines.vllm.arguments import base_arguments, check_names, node_arguments
from kvmesh.engines.vllm.settings import VllmSettings
from kvmesh.errors import InvalidRequestError, UnavailableError
from kvmesh.identity.secret import MeshSecret
from tests.patience import PATIENCE_S
from tests.servers import closed_port

VALID: dict[str, Any] = {"model": "any", "nodes": 2, "tensor_parallel_size": 2, "nodes_address": "host:6000"}
VLLM: dict[str, Any] = {**VALID, "has_kv_transfer": False}
SECRET, OTHER = MeshSecret(b"s" * 32), MeshSecret(b"o" * 32)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_watch, "HANDSHAKE_S", PATIENCE_S)


def meet(leader: MeshSecret, follower: MeshSecret, rank: int) -> tuple[list[Any], tuple[socket.socket, socket.socket]]:
    """Runs `greet` and `introduce` on a socket pair. Returns their results or errors, and the two sockets."""
    ends = socket.socketpair()
    results: list[Any] = [None, None]

    def run(index: int, call: Any) -> None:
        try:
            results[index] = call()
        except (OSError, ValueError) as error:
            results[index] = error
            ends[index].close()

    threads = [
        threading.Thread(target=run, args=(0, lambda: greet(leader, ends[0]))),
        threading.Thread(target=run, args=(1, lambda: introduce(follower, ends[1], rank))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return results, ends


def test_the_leader_learns_the_rank_of_a_machine() -> None:
    results, ends = meet(SECRET, SECRET, 3)
    assert results == [3, None]
    for end in ends:
        end.close()


def test_a_machine_without_the_secret_is_refused_on_both_sides() -> None:
    results, ends = meet(SECRET, OTHER, 3)
    assert isinstance(results[0], ValueError) and isinstance(results[1], OSError)
    for end in ends:
        end.close()


class DrippingSocket:
    """A socket on a clock of its own, whose other side sends a byte per second."""

    def __init__(self) -> None:
        self.now_s = self._timeout_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def settimeout(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def sendall(self, data: bytes) -> None:
        pass

    def recv(self, count: int) -> bytes:
        self.now_s += min(1.0, self._timeout_s)
        if self._timeout_s < 1.0:
            raise TimeoutError("timed out")
        return b"."


@pytest.mark.parametrize("shake_hands", [lambda end: greet(SECRET, end), lambda end: introduce(SECRET, end, 1)])
def test_a_handshake_ends_though_bytes_keep_coming(
    shake_hands: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte arrives within the limit of the handshake, which applies to all of them together."""
    monkeypatch.setattr(node_watch, "HANDSHAKE_S", 5.5)
    connection = DrippingSocket()
    monkeypatch.setattr(node_watch, "time", connection)
    with pytest.raises(TimeoutError):
        shake_hands(connection)
    assert connection.now_s == 5.5


def test_a_machine_ends_when_the_other_side_closes() -> None:
    mine, theirs = socket.socketpair()
    reasons: queue.Queue[str] = queue.Queue()
    watch(mine, "machine 1", reasons.put)
    assert theirs.recv(1) == b"."
    theirs.close()
    assert reasons.get(timeout=PATIENCE_S).startswith("machine 1 ")
    mine.close()


def test_a_machine_ends_when_the_other_side_is_silent() -> None:
    mine, theirs = socket.socketpair()
    reasons: queue.Queue[str] = queue.Queue()
    watch(mine, "machine 1", reasons.put, silence_s=0.1)
    assert reasons.get(timeout=PATIENCE_S) == "machine 1 is silent"
    theirs.close()
    mine.close()


def test_machines_send_bytes_to_each_other_until_one_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each machine sends a byte per interval. A machine is not silent while its bytes arrive."""
    monkeypatch.setattr(node_watch, "INTERVAL_S", 0.01)
    mine, theirs = socket.socketpair()
    theirs.settimeout(PATIENCE_S)
    reasons: queue.Queue[str] = queue.Queue()
    watch(mine, "machine 1", reasons.put, silence_s=PATIENCE_S)
    for _ in range(3):
        assert set(theirs.recv(4096)) == set(b".")
        theirs.sendall(b".")
    assert reasons.empty()
    # Bytes that nobody reads would fill the socket, and to send would fail instead of to receive.
    monkeypatch.setattr(node_watch, "INTERVAL_S", PATIENCE_S)
    mine.settimeout(0.01)
    theirs.sendall(b".")  # Ends the wait that began with the longer timeout.
    assert reasons.get(timeout=PATIENCE_S) == "machine 1 is silent"
    mine.close()
    theirs.close()


def test_ranks_are_divided_among_machines() -> None:
    settings = SglangSettings(model="any", nodes=2, node_rank=1, tensor_parallel_size=4, nodes_address="[fd00::1]:6000")
    assert settings.ranks_here == range(2, 4) and watch_address(settings.nodes_address) == ("fd00::1", 6001)


def test_sglang_listens_at_the_workers_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address applies to SGLang's ranks and transfers, unless the operator has set the variable."""
    monkeypatch.setattr(environment.os, "environ", {})
    environment.set_defaults(SglangSettings(model="any", bootstrap_host="10.0.0.4"))
    assert environment.os.environ["SGLANG_HOST_IP"] == "10.0.0.4"
    environment.set_defaults(SglangSettings(model="any", bootstrap_host="10.0.0.5"))
    assert environment.os.environ["SGLANG_HOST_IP"] == "10.0.0.4"


def test_vllm_gets_the_arguments_of_its_machines() -> None:
    settings = VllmSettings(**VLLM, node_rank=1)
    assert base_arguments(settings) | node_arguments(settings) == base_arguments(settings)
    assert node_arguments(settings) == {
        "nnodes": 2,
        "node_rank": 1,
        "master_addr": "host",
        "master_port": 6000,
        "distributed_executor_backend": "mp",
    }


def watch_of(rank: int, port: int, end: Callable[[str], None]) -> NodeWatch:
    return NodeWatch(
        nodes=2,
        node_rank=rank,
        nodes_address=f"127.0.0.1:{port}",
        secret_file="",
        start_timeout_s=PATIENCE_S,
        end=end,
    )


def test_an_orderly_end_of_the_leader_ends_only_the_others() -> None:
    ends: queue.Queue[tuple[int, str]] = queue.Queue()
    # The watch listens at the port after that of the address.
    with closed_port() as port:
        leader, follower = (
            watch_of(rank, port - 1, lambda reason, rank=rank: ends.put((rank, reason)))  # type: ignore[misc]
            for rank in (0, 1)
        )
        leader.join()
        follower.join()
        leader.close()
        assert ends.get(timeout=PATIENCE_S)[0] == 1
        follower.close()
    assert 0 not in {ends.get_nowait()[0] for _ in range(ends.qsize())}


def test_an_unreachable_leader() -> None:
    with closed_port() as port, pytest.raises(UnavailableError, match="cannot be reached"):
        NodeWatch(
            nodes=2,
            node_rank=1,
            nodes_address=f"127.0.0.1:{port - 1}",
            secret_file="",
            start_timeout_s=0,
            end=print,
        ).join()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"node_rank": 2}, "node_rank"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size"),
        ({"data_parallel_size": 2}, "data_parallel_size"),
        ({"nodes_address": ""}, "nodes_address"),
        ({"nodes_address": "host"}, "nodes_address"),
        ({"nodes_address": "host:65535"}, "nodes_address"),
        ({"role": "prefill"}, "bootstrap_port"),
        ({"can_switch_role": True}, "bootstrap_port"),
    ],
)
def test_settings_of_several_machines_are_checked(changes: dict[str, Any], field: str) -> None:
    SglangSettings(**VALID)
    with pytest.raises(InvalidRequestError) as raised:
        SglangSettings(**{**VALID, **changes})
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"node_rank": 2}, "node_rank"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size"),
        ({"nodes_address": "host:65535"}, "nodes_address"),
        ({"has_kv_transfer": True}, "has_kv_transfer"),
    ],
)
def test_vllm_checks_settings_of_several_machines(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        VllmSettings(**{**VLLM, **changes})
    assert raised.value.field == field


def test_vllm_refuses_arguments_that_kvmesh_sets() -> None:
    with pytest.raises(InvalidRequestError, match="--vllm-nodes") as raised:
        check_names(VllmSettings(model="any", engine_arguments={"nnodes": 2}))
    assert raised.value.field == "engine_arguments"
    check_names(VllmSettings(model="any", engine_arguments={"enable_expert_parallel": True}))


@pytest.mark.parametrize(
    ("cores", "ranks", "groups"),
    [([0, 1], 2, "0|1"), ([0, 1, 4, 5], 2, "0,1|4,5"), ([3], 2, "3|3"), ([0, 1, 2], 2, "0|1")],
)
def test_cores_are_divided_among_ranks(cores: list[int], ranks: int, groups: str) -> None:
    assert core_groups(cores, ranks) == groups


def test_a_machine_that_connects_during_the_close_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handshake with a machine ends just after the leader has closed its other connections."""
    mine, theirs = socket.socketpair()
    leader = watch_of(0, 1, lambda _: None)
    connections = [mine]

    class Listener:
        def accept(self) -> tuple[socket.socket, Any]:
            if connections:
                return connections.pop(), None
            raise OSError(errno.EBADF, "closed")

    def greet_late(secret: MeshSecret, connection: socket.socket) -> int:
        leader.close()
        return 1

    monkeypatch.setattr(node_watch, "greet", greet_late)
    leader._accept(SECRET, Listener())  # type: ignore[arg-type]
    theirs.settimeout(PATIENCE_S)
    assert theirs.recv(1) == b""
    theirs.close()


class FullSocket:
    """A listening socket whose process has no descriptor for the first connection."""

    def __init__(self, watch: NodeWatch) -> None:
        self.watch = watch
        self.accepts = 0

    def accept(self) -> tuple[socket.socket, Any]:
        self.accepts += 1
        if self.accepts == 1:
            raise OSError(errno.EMFILE, "too many open files")
        self.watch.close()
        raise OSError(errno.EBADF, "closed")


def test_a_leader_without_a_free_descriptor_keeps_listening(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other machines of the engine connect once a descriptor is free. The thread ends when the watch is closed."""
    monkeypatch.setattr(node_watch, "RETRY_S", 0.0)
    leader = watch_of(0, 1, lambda _: None)
    listener = FullSocket(leader)
    leader._accept(SECRET, listener)  # type: ignore[arg-type]
    assert listener.accepts == 2
