"""Processes of the last release and of this version in one mesh: messages lose every field that the release's contracts lack."""

import importlib
import pkgutil
from typing import Any

import pytest
from google.protobuf import symbol_database
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

import kvmesh.api
from services.simulation.mesh import MeshShape
from tests.release import Release
from tests.simulation.load import LOADS, plan_load, play_load
from tests.simulation.scripted_mesh import ScriptedMesh
from tests.virtual_loop import run_virtual

RELEASE = Release()
OWN_MESSAGES = [name for name in RELEASE.messages if name.startswith("kvmesh.")]
for module in pkgutil.walk_packages(kvmesh.api.__path__, "kvmesh.api."):
    if module.name.endswith("_pb2"):
        importlib.import_module(module.name)
REQUESTS = 60
DEPTH = 4
OLD = {
    "workers of each role": ("prefill-0", "decode-0"),
    "a router": ("router-0",),
    "all but the frontend": ("prefill-0", "prefill-1", "decode-0", "decode-1", "router-0", "router-1"),
}


@pytest.mark.parametrize("old", OLD)
def test_a_mesh_of_both_releases_answers_correctly(old: str) -> None:
    """Every answer is right and nothing is left behind, whichever processes run the old release."""

    async def play() -> None:
        mesh = ScriptedMesh(5, MeshShape(routers=2))
        network: Any = mesh.world.network
        plain, wrapped = network.channel, []

        def channel(address: str, **more: Any) -> Any:
            found = plain(address, **more)
            if address.partition(":")[0] not in OLD[old]:
                return found
            wrapped.append(address)
            return RELEASE.wrap(found)

        network.channel = channel
        await mesh.start()
        await play_load(mesh, plan_load(mesh.world.random("load"), REQUESTS, LOADS["calm"]))
        await mesh.idle()
        assert mesh.problems() == []
        assert {each.outcome for each in mesh.ledgers.values()} <= {"answered", "cancelled"}
        assert {address.partition(":")[0] for address in wrapped} == set(OLD[old])
        await mesh.aclose()

    run_virtual(play())


@pytest.mark.parametrize("name", OWN_MESSAGES)
def test_a_message_passes_both_ways(name: str) -> None:
    """A message with all fields set passes through the other release unchanged: each release keeps the other's fields as unknown fields."""
    today = symbol_database.Default().GetSymbol(name)  # type: ignore[no-untyped-call]
    message = filled(today())
    old = RELEASE.type_of(name).FromString(message.SerializeToString())
    assert today.FromString(old.SerializeToString()) == message
    of_release = filled(RELEASE.type_of(name)())
    read = today.FromString(of_release.SerializeToString())
    assert RELEASE.type_of(name).FromString(read.SerializeToString()) == of_release
    # This version keeps fields of later versions.
    later = message.SerializeToString() + b"\xfa\x3e\x03new"  # Field 1007, a string.
    assert today.FromString(later).SerializeToString() == later


def filled(message: Message, depth: int = DEPTH) -> Message:
    """Sets every field. Of a `oneof` it sets the last one."""
    for field in message.DESCRIPTOR.fields:
        if field.type != FieldDescriptor.TYPE_MESSAGE:
            value = _value(field)
            if field.is_repeated:
                getattr(message, field.name).extend([value, value])
            else:
                setattr(message, field.name, value)
        elif depth:
            _fill_message(message, field, depth - 1)
    return message


def _fill_message(message: Message, field: FieldDescriptor, depth: int) -> None:
    place = getattr(message, field.name)
    entry = field.message_type
    if entry.GetOptions().map_entry:
        value = entry.fields_by_name["value"]
        if value.type == FieldDescriptor.TYPE_MESSAGE:
            filled(place[_value(entry.fields_by_name["key"])], depth)
        else:
            place[_value(entry.fields_by_name["key"])] = _value(value)
    elif field.is_repeated:
        filled(place.add(), depth)
    else:
        place.SetInParent()
        filled(place, depth)


def _value(field: FieldDescriptor) -> Any:
    if field.enum_type is not None:
        return field.enum_type.values[-1].number
    kinds = {FieldDescriptor.CPPTYPE_STRING: "x", FieldDescriptor.CPPTYPE_BOOL: True}
    if field.type == FieldDescriptor.TYPE_BYTES:
        return b"x"
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return 0.5
    return kinds.get(field.cpp_type, 7)
