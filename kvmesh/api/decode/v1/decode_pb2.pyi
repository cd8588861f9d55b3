from kvmesh.api.worker.v1 import legs_pb2 as _legs_pb2
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor
