"""Runs the benchmark commands to their end on real meshes. Asserts no times, because machines differ."""

import asyncio
import json
import sys
from pathlib import Path

from bench.scenarios import QUICK
from bench.services import ROOT


async def run_module(*argv: str) -> tuple[int, str, str]:
    """Returns a command's status, standard output and standard error."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *argv), cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(280):
        out, errors = await process.communicate()
    return process.returncode or 0, out.decode(), errors.decode()


async def test_the_quick_run_completes_and_prints_all_rows(tmp_path: Path) -> None:
    """The quick run measures every scenario, the link and the start without errors, and writes all of them to the file."""
    file = tmp_path / "bench.json"
    status, printed, errors = await run_module("bench", "--quick", "--json", str(file))
    assert status == 0, errors
    names = [(kind.name, scenario.name) for kind, scenarios in QUICK for scenario in scenarios]
    for kind, name in names:
        assert any(kind in line and name in line for line in printed.splitlines()), printed
    found = json.loads(file.read_text())
    assert [(point["kind"], point["scenario"]) for point in found["load"]] == names
    for point in found["load"]:
        assert point["errors"] == 0, point["error_sample"]
        assert point["requests"] > 0
        assert {"gateway", "prefill", "decode"} <= set(point["cpu_s_per_1k_tokens"])
    assert found["link"]["tokens_per_s"] > 0
    assert found["link"]["error"] == ""
    assert [start["engine"] for start in found["start"]] == ["simulated"]


async def test_side_by_side_names_the_missing_file(tmp_path: Path) -> None:
    """If Dynamo is not at the given path, the command exits with status 1 and names the file that is missing."""
    status, _, errors = await run_module("bench.side_by_side", "--dynamo", str(tmp_path), "--json", str(tmp_path / "f"))
    assert status == 1
    assert str(tmp_path / "bin" / "python") in errors
