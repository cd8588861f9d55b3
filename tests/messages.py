"""Builds protobuf messages of the contracts from domain values."""

from collections.abc import Callable
from typing import Any

from kvmesh.api.router.v1 import router_pb2
from kvmesh.api.types.v1 import kv_pb2, prompt_pb2
from kvmesh.core import Ask, Generation, KvHandle, Placement, Report
from kvmesh.rpc.codec.router import fill_ask, fill_placement, fill_report
from kvmesh.rpc.codec.types import fill_generation, fill_handle


def to_ask(ask_id: int, ask: Ask) -> router_pb2.Ask:
    return _filled(router_pb2.Ask(), fill_ask, ask_id, ask)


def to_placement(ask_id: int, placement: Placement) -> router_pb2.Placement:
    return _filled(router_pb2.Placement(), fill_placement, ask_id, placement)


def to_report(ask_id: int, report: Report) -> router_pb2.Report:
    return _filled(router_pb2.Report(), fill_report, ask_id, report)


def to_generation(generation: Generation) -> prompt_pb2.Generation:
    return _filled(prompt_pb2.Generation(), fill_generation, generation)


def to_handle(handle: KvHandle) -> kv_pb2.KvHandle:
    return _filled(kv_pb2.KvHandle(), fill_handle, handle)


def _filled(message: Any, fill: Callable[..., None], *values: Any) -> Any:
    fill(message, *values)
    return message
