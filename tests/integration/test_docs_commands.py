"""Runs the command blocks of README and docs as written, on one mesh of simulated engines.

A fenced block marked `bash` or `python` is a command block. Each runs separately, in a directory that looks like a clone. Ports 8000 and 50051
are replaced by the mesh's own. A `make up` line starts no mesh: the test only checks its flags, because starting all of them would take minutes.
The blocks run on the tutorial's mesh. `<!-- not run: REASON -->` in the line before a block excludes it.
"""

import asyncio
import os
import re
import shlex
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from kvmesh.cli.up_settings import UpSettings
from kvmesh.settings import load
from tests.integration.mesh import ROOT, RunningMesh, grpc_address, running_mesh
from tests.parts import require_part

TUTORIAL = ROOT / "docs/start/tutorial.md"
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "bench/README.md", "examples/README.md", "models/demo/README.md")
    ),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("services/**/README.md")),
    *sorted(ROOT.glob("kvmesh/**/README.md")),
]
COMMAND_LANGUAGES = ("bash", "python")
OTHER_LANGUAGES = ("ini", "json", "mermaid", "text", "toml")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^\n {4,}\S.*$", re.MULTILINE)
NOT_RUN = re.compile(r"<!-- not run: \S.* -->\n\Z")
UP = re.compile(r'^make up(?: ARGS="([^"]*)")? *(?:#.*)?$', re.MULTILINE)
LINKED = ("Makefile", "bench", "examples", "kvmesh", "models", "scripts", "services", "tests")


@dataclass(frozen=True, kw_only=True)
class Block:
    page: Path
    line: int
    language: str
    code: str
    is_run: bool


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        before = text[: match.start()]
        yield Block(
            page=page,
            line=before.count("\n") + 1,
            language=match[1],
            code=match[2],
            is_run=NOT_RUN.search(before) is None,
        )


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
COMMANDS = [block for block in BLOCKS if block.language in COMMAND_LANGUAGES]


def name_of(block: Block) -> str:
    return f"{block.page.relative_to(ROOT)}:{block.line}"


def up_flags(code: str) -> list[list[str]]:
    """Returns the flags of each `make up` in a block."""
    return [shlex.split(arguments or "") for arguments in UP.findall(code)]


@dataclass(frozen=True, kw_only=True)
class Clone:
    """A running mesh, and a directory from which commands reach it."""

    mesh: RunningMesh
    grpc_address: str
    directory: Path
    env: dict[str, str]

    async def run(self, block: Block) -> tuple[int, str]:
        code = UP.sub("true", block.code)
        code = code.replace("http://127.0.0.1:8000", self.mesh.url).replace("127.0.0.1:50051", self.grpc_address)
        command = ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else [sys.executable, "-c"]
        process = await asyncio.create_subprocess_exec(
            *(*command, code),
            cwd=self.directory,
            env=self.env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode(errors="replace")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clone(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Clone]:
    """The tutorial's mesh on free ports, and a directory with the repository's files and a `.venv`."""
    directory = tmp_path_factory.mktemp("clone")
    for name in LINKED:
        (directory / name).symlink_to(ROOT / name)
    (directory / ".venv").symlink_to(sys.prefix)
    logs = tmp_path_factory.mktemp("logs")
    (flags,) = [flags for block in blocks_of(TUTORIAL) if block.is_run for flags in up_flags(block.code)]
    env = {"XDG_STATE_HOME": str(tmp_path_factory.mktemp("state"))}
    async with running_mesh(logs, *flags, "--grpc-port", "0", "--greeting", "", env=env) as mesh:
        state = {"KVMESH_STATE": str(logs / "mesh.json"), "PYTHONPATH": str(ROOT)}
        yield Clone(
            mesh=mesh,
            grpc_address=(await grpc_address(mesh))[0],
            directory=directory,
            env={**os.environ, **env, **state},
        )


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("block", [block for block in COMMANDS if block.is_run], ids=name_of)
async def test_a_command_block_runs(block: Block, clone: Clone) -> None:
    """Every command of the block ends with status 0, and prints no error of the API."""
    if "curl " in block.code:
        require_part("curl")
    status, output = await clone.run(block)
    assert status == 0, f"{output}\n{clone.mesh.logs()}"
    assert '"error":{' not in output, output


@pytest.mark.parametrize("block", COMMANDS, ids=name_of)
def test_make_up_takes_the_flags(block: Block) -> None:
    """The flags of each `make up` are valid, also in blocks that are not run."""
    for flags in up_flags(block.code):
        load(UpSettings, argv=flags, environ={}, program="kvmesh up", description="")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_names_its_language(page: Path) -> None:
    """Every block is fenced and names its language, because commands in an unmarked or indented block would not run."""
    assert {block.language for block in blocks_of(page)} <= {*COMMAND_LANGUAGES, *OTHER_LANGUAGES}
    assert INDENTED.findall(FENCE.sub("", page.read_text(encoding="utf-8"))) == []
