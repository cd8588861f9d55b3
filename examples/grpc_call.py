"""Calls any gRPC method through server reflection: no generated code, no .proto files.

    .venv/bin/python examples/grpc_call.py ADDRESS                                   lists services
    .venv/bin/python examples/grpc_call.py ADDRESS SERVICE                           lists its methods
    .venv/bin/python examples/grpc_call.py ADDRESS SERVICE/METHOD '{"json": ...}'    calls one; each message is a line of JSON

Sends the API key in KVMESH_API_KEY, if it is set. Needs grpcio, grpcio-reflection and protobuf; any Python with these packages works.
"""

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

TIMEOUT_S = 60.0


def main() -> int:
    """Prints the result. Returns 1 after one line of error if the call fails, 2 if the arguments are wrong."""
    address, what, text = (*sys.argv[1:], "", "", "")[:3]
    if not address:
        print(__doc__)
        return 2
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        try:
            for line in answer(channel, database, what, text):
                print(line, flush=True)
        except grpc.RpcError as error:
            call: Any = error
            print(f"{call.code().name}: {call.details()}", file=sys.stderr)
            return 1
        except (KeyError, ValueError, ParseError) as error:
            print(f"wrong request: {error}", file=sys.stderr)
            return 2
    return 0


def answer(channel: grpc.Channel, database: Any, what: str, text: str) -> Iterator[str]:
    """Yields the lines to print."""
    if not what:
        yield from sorted(database.get_services())
        return
    service_name, _, method_name = what.partition("/")
    service = DescriptorPool(database).FindServiceByName(service_name)
    if not method_name:
        yield from (signature(method) for method in service.methods)
        return
    method = service.methods_by_name[method_name]
    request = ParseDict(json.loads(text or "{}"), GetMessageClass(method.input_type)())
    for response in responses(channel, f"/{service_name}/{method_name}", method, request):
        yield json.dumps(MessageToDict(response, preserving_proto_field_name=True), ensure_ascii=False)


def signature(method: Any) -> str:
    """Returns the declaration of a method."""
    before, after = ("stream " if flag else "" for flag in (method.client_streaming, method.server_streaming))
    return f"{method.name}({before}{method.input_type.full_name}) returns ({after}{method.output_type.full_name})"


def responses(channel: grpc.Channel, path: str, method: Any, request: Any) -> Iterator[Any]:
    """Yields the responses of one call of any of the four kinds. A stream of requests has one message."""
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    key = os.environ.get("KVMESH_API_KEY", "")
    call = getattr(channel, kind)(
        path,
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
    result = call(
        iter([request]) if method.client_streaming else request,
        timeout=TIMEOUT_S,
        metadata=(("authorization", f"Bearer {key}"),) if key else (),
    )
    yield from result if method.server_streaming else [result]


if __name__ == "__main__":
    sys.exit(main())
