from pathlib import Path

from generate_protos import differences, package_path, rewritten


def test_imports_and_module_names_move_below_the_api_package() -> None:
    """Generated modules import each other from `kvmesh.api`, and their classes can be pickled by name."""
    source = (
        "from google.protobuf import duration_pb2 as d\n"
        "from kvmesh.types.v1 import kv_pb2 as kv\n"
        "_builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, 'kvmesh.router.v1.router_pb2', _globals)\n"
    )
    assert rewritten(source) == (
        "from google.protobuf import duration_pb2 as d\n"
        "from kvmesh.api.types.v1 import kv_pb2 as kv\n"
        "_builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, 'kvmesh.api.router.v1.router_pb2', _globals)\n"
    )


def test_protos_of_other_roots_keep_their_folder() -> None:
    """The package of the Open Inference Protocol is `inference`, beside the areas of kvmesh."""
    assert package_path(Path("kvmesh/router/v1/router_pb2.py")) == Path("router/v1/router_pb2.py")
    assert package_path(Path("inference/grpc_service_pb2.py")) == Path("inference/grpc_service_pb2.py")


def test_each_kind_of_difference_is_reported(tmp_path: Path) -> None:
    """`make check` lists stale, missing and superfluous files."""
    fresh, committed = tmp_path / "fresh", tmp_path / "committed"
    for folder, files in ((fresh, {"a.py": "1", "b.py": "1"}), (committed, {"b.py": "2", "c.py": "1"})):
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    assert sorted(differences(fresh, committed)) == ["differs: b.py", "missing: a.py", "no proto generates c.py"]
