"""Measures the code's size and depth, now and before the work to simplify it: `python -m bench.size [--before COMMIT]`.

Prints the table of docs/contribute/size.md. Unpacks the earlier tree from git into a temporary folder.
"""

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import resources
from pathlib import Path

from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorSet

from bench.earlier import BEFORE, earlier_tree

ROOT = Path(__file__).resolve().parents[1]
FEW_LINES = 50
OLD_NAMES = {
    "services.frontend.api.http.server": "services.frontend.openai.http",
    "services.frontend.pipeline.pipeline": "services.frontend.pipeline",
    "links=mesh,": "prefill=mesh, links=mesh,",
}
"""Replacements in `bench/request_path.py` for trees before the work to simplify the code, which lack the script and use other names."""
EXAMPLES = {
    "a sampling parameter": "min_p",
    "an engine, outside its folder": "vllm",
    "a routing policy": "round_robin",
    "a metric": "refused_requests",
    "a setting": "move_pause_s",
    "a family of parsers": "glm",
}
"""Examples of what the walk-throughs of CONTRIBUTING.md add or change. Both trees have each of them."""
ADDED = {
    "SGLang and TensorRT-LLM": ("kvmesh/engines/sglang", "kvmesh/engines/trtllm"),
    "simulation of whole meshes": ("kvmesh/simulation", "services/simulation"),
    "planning of pools": tuple(
        f"services/planner/{each}" for each in ("connectors", "decide", "keda", "predict", "sizing")
    ),
    "what-if": ("services/whatif",),
    "identity and addresses": ("kvmesh/identity", "kvmesh/network", "kvmesh/discovery/connect"),
    "profiles, advice and engines' flags": tuple(
        f"kvmesh/cli/{each}" for each in ("advise", "engine_flags", "profile")
    ),
    "status page": ("services/frontend/ui",),
}
"""Folders of features that the earlier tree lacks."""
_WORD = re.compile(r"\w+")


class Tree:
    """The handwritten files of one checkout, without tests and documentation."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.product = {
            path: path.read_text()
            for folder in ("kvmesh", "services")
            for path in sorted((root / folder).rglob("*.py"))
            if root / "kvmesh" / "api" not in path.parents
        }
        self.nodes = {path: list(ast.walk(ast.parse(text))) for path, text in self.product.items()}
        others = [*(root / "protos").rglob("*.proto"), root / "pyproject.toml", root / "importlinter.toml"]
        self._names = {path: frozenset(_names(nodes)) for path, nodes in self.nodes.items()}
        self._names |= {path: frozenset(_WORD.findall(path.read_text())) for path in others}

    def lines_in(self, folders: Iterable[str]) -> int:
        """Returns the product lines of these folders."""
        parts = [self.root / folder for folder in folders]
        return sum(_lines_of(text) for path, text in self.product.items() if any(map(path.is_relative_to, parts)))

    def files_with(self, name: str) -> list[Path]:
        """Returns the files that contain the name."""
        return [path for path, names in self._names.items() if name in names]


def product_lines(tree: Tree) -> str:
    return _number(sum(map(_lines_of, tree.product.values())))


def lines_of_features(tree: Tree) -> str:
    return _number(sum(map(tree.lines_in, ADDED.values())))


def files(tree: Tree) -> str:
    return _number(len(tree.product))


def short_files(tree: Tree) -> str:
    return _number(sum(_lines_of(text) < FEW_LINES for text in tree.product.values()))


def request_path(tree: Tree) -> str:
    """Runs `bench.request_path` in the tree. The last line of its output is the result."""
    script = (ROOT / "bench" / "request_path.py").read_text()
    if tree.root != ROOT:
        if not (tree.root / "services" / "frontend" / "pipeline").is_dir():
            for new, old in OLD_NAMES.items():
                script = script.replace(new, old)
        (tree.root / "bench" / "request_path.py").write_text(script)
    output = _run([sys.executable, "-m", "bench.request_path"], tree.root)
    functions, among = re.findall(r"\d+", output.splitlines()[-1])
    return f"{functions} in {among} files"


def files_of(tree: Tree, name: str) -> str:
    own = tree.root / "kvmesh" / "engines" / name
    return _number(sum(own not in path.parents for path in tree.files_with(name)))


def messages(tree: Tree) -> str:
    return _number(len(_messages(tree)))


def fields(tree: Tree) -> str:
    return _number(sum(len(message.field) for message in _messages(tree)))


def settings_count(tree: Tree) -> str:
    return _number(len(_settings(tree)))


ROWS: Mapping[str, Callable[[Tree], str]] = {
    "product lines: Python of `kvmesh/` and `services/`, without generated code": product_lines,
    "of them in folders of new features": lines_of_features,
    "product files": files,
    f"product files of less than {FEW_LINES} lines": short_files,
    "functions between the socket and the router, of a streaming chat request": request_path,
    **{f"files that name {what}: `{name}`": partial(files_of, name=name) for what, name in EXAMPLES.items()},
    "messages of `protos/`": messages,
    "fields of `protos/`": fields,
    "settings": settings_count,
}


def _settings(tree: Tree) -> list[str]:
    """Returns the fields of settings classes that have a flag, without groups of further settings and internal fields."""
    classes = [node for nodes in tree.nodes.values() for node in nodes if isinstance(node, ast.ClassDef)]
    return [
        each.target.id
        for node in classes
        if node.name.endswith("Settings")
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and not _is_without_flag(each.value)
    ]


def _is_without_flag(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and getattr(value.func, "id", "") in ("field", "group", "internal")


def _messages(tree: Tree) -> list[DescriptorProto]:
    """Returns the messages of the contracts, including nested ones, without map entries."""
    protos = tree.root / "protos"
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "contracts.binpb"
        includes = [f"-I{protos}", f"-I{resources.files('grpc_tools') / '_proto'}"]
        tool = [sys.executable, "-m", "grpc_tools.protoc", *includes, f"--descriptor_set_out={target}"]
        _run([*tool, *(str(path.relative_to(protos)) for path in sorted(protos.rglob("*.proto")))], tree.root)
        found = FileDescriptorSet.FromString(target.read_bytes())
    todo = [message for file in found.file for message in file.message_type]
    for message in todo:
        todo += message.nested_type
    return [message for message in todo if not message.options.map_entry]


def _names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yields identifiers and one-word strings."""
    for node in nodes:
        for field in ("id", "attr", "arg", "name", "value"):
            value = getattr(node, field, None)
            if isinstance(value, str) and value.isidentifier():
                yield value


def _lines_of(text: str) -> int:
    return text.count("\n")


def _number(value: int) -> str:
    return f"{value:,}".replace(",", " ")


def _run(command: list[str], root: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.run(command, cwd=root, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default=BEFORE, help="the earlier commit")
    commit = parser.parse_args().before
    with earlier_tree(commit) as earlier:
        before, now = Tree(earlier), Tree(ROOT)
        print(f"| | {commit} | now |\n|---|---|---|")
        for name, measure in ROWS.items():
            print(f"| {name} | {measure(before)} | {measure(now)} |")
        print("\n| feature | product lines |\n|---|---|")
        for feature, folders in ADDED.items():
            print(f"| {feature} | {_number(now.lines_in(folders))} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
