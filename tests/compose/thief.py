"""Attacks from a container with a frontend's stolen token of Consul. Runs in an image of kvmesh; prints the results as JSON.

The token gives access to a frontend's certificate, with which the attacker may submit legs, as frontends do. The arguments are the token and the
`ID@HOST:PORT` of a prefill and of a decode worker.
"""

import json
import queue
import sys
import urllib.request
from dataclasses import dataclass, replace
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration

from kvmesh.api.decode.v1 import decode_pb2_grpc
from kvmesh.api.prefill.v1 import prefill_pb2_grpc
from kvmesh.api.worker.v1 import legs_pb2, worker_pb2, worker_pb2_grpc
from kvmesh.core import Generation, KvHandle, KvReader, Leg, LegFinish, LegTask, SamplingParams
from kvmesh.discovery.connect.documents import read_issued
from kvmesh.identity.certificates import Certificates
from kvmesh.identity.roles import MeshRole
from kvmesh.rpc.codec.legs import from_finish, to_leg

CONSUL = "http://consul:8500"
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Target:
    """A worker."""

    worker_id: str
    address: str

    @classmethod
    def parse(cls, text: str) -> "Target":
        return cls(*text.split("@"))


def ask_consul(path: str, token: str) -> bytes:
    request = urllib.request.Request(CONSUL + path, headers={"X-Consul-Token": token})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        return bytes(response.read())


def certificates_of(token: str) -> Certificates:
    """Returns a frontend's certificates."""
    leaf = ask_consul("/v1/agent/connect/ca/leaf/kvmesh-frontend", token)
    return read_issued(leaf, ask_consul("/v1/agent/connect/ca/roots", token), MeshRole.FRONTEND).certificates


def channel_to(target: Target, role: MeshRole, own: Certificates) -> grpc.Channel:
    credentials = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
    options = [("grpc.ssl_target_name_override", own.names.server_name(role))]
    return grpc.secure_channel(target.address, credentials, options)


def finish_of(attach: Any, leg: Leg) -> LegFinish:
    """Submits a leg on a new stream. Returns how it ends."""
    requests: queue.SimpleQueue[legs_pb2.AttachRequest | None] = queue.SimpleQueue()
    requests.put(legs_pb2.AttachRequest(hello=legs_pb2.Hello(frontend_id="thief")))
    submission = legs_pb2.Submission(slot=1, leg=to_leg(leg), timeout=Duration(seconds=int(TIMEOUT_S)))
    requests.put(legs_pb2.AttachRequest(submissions=[submission]))
    call = attach(iter(requests.get, None), timeout=TIMEOUT_S)
    try:
        for response in call:
            for finish in response.frame.finishes:
                return from_finish(finish)
        raise AssertionError("the stream ended before the leg")
    finally:
        requests.put(None)
        call.cancel()


def main() -> int:
    token = sys.argv[1]
    prefill, decode = (Target.parse(text) for text in sys.argv[2:])
    own = certificates_of(token)
    prompt = Generation(
        model="demo",
        token_ids=list(range(20, 148)),
        cache_salt="victim",
        sampling=SamplingParams(max_tokens=4, temperature=0.0),
    )
    with (
        channel_to(prefill, MeshRole.PREFILL, own) as to_prefill,
        channel_to(decode, MeshRole.DECODE, own) as to_decode,
    ):
        reader = KvReader(worker_id=decode.worker_id, leg_id="victim")
        leg = Leg(leg_id="thief-p", task=LegTask.PREFILL, generation=prompt, reader=reader)
        handle = finish_of(prefill_pb2_grpc.PrefillServiceStub(to_prefill).Attach, leg).handle
        assert handle is not None
        attach = decode_pb2_grpc.DecodeServiceStub(to_decode).Attach

        def read(leg_id: str, stolen: KvHandle) -> str:
            """Returns the reason for which the worker refuses the handle; empty if the worker reads the KV."""
            brought = Leg(leg_id=leg_id, task=LegTask.GENERATE, generation=prompt, handle=stolen)
            error = finish_of(attach, brought).error
            return error.reason if error is not None else ""

        outcome = {
            "forged": read("victim", replace(handle, seal=bytes(len(handle.seal)))),
            "for another request": read("thief", handle),
            "its own": read("victim", handle),
            "replayed": read("victim", handle),
            "drain": drain(to_decode),
        }
    print(json.dumps(outcome))
    return 0


def drain(channel: grpc.Channel) -> str:
    """Makes a call that only operators and planners may make. Returns the status code."""
    try:
        worker_pb2_grpc.WorkerServiceStub(channel).Drain(worker_pb2.DrainRequest(), timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


if __name__ == "__main__":
    sys.exit(main())
