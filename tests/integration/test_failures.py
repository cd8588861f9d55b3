"""Short runs of the commands of `tests/chaos`: cancels in every phase, prefill workers that die in a transfer, and churn."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.chaos.cancels import BEHIND, WAYS, Times, run, run_short
from tests.chaos.processes import ROOT
from tests.parts import require_part


async def output_of(*words: str) -> str:
    """Runs a command and returns its output. Raises AssertionError if it fails."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", *words),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-8000:]
    return output.decode()


@pytest.mark.parametrize("engine", ["simulated", "rendezvous"])
async def test_cancels_free_both_sides(engine: str, tmp_path: Path) -> None:
    """For all ways to cancel and phases of a request, blocks, leases and queue places are freed, and no block is lost."""
    require_part("nixl")
    times = await run(engine, 1, tmp_path)
    check(times)
    assert sum(times.ways.values()) > len(WAYS) * len(BEHIND) // 2, times.ways


@pytest.mark.vllm
@pytest.mark.timeout(400)
async def test_cancels_on_vllm_free_both_sides(tmp_path: Path) -> None:
    """The same with real KV, for some of the combinations; `python -m tests.chaos.cancels --engine vllm` runs all."""
    require_part("vllm")
    require_part("nixl")
    check(await run_short("vllm", tmp_path))


@pytest.mark.sglang
@pytest.mark.timeout(400)
async def test_cancels_on_sglang_free_both_sides(tmp_path: Path) -> None:
    """The same in SGLang's queues, for some of the combinations; `python -m tests.chaos.cancels --engine sglang` runs all."""
    require_part("sglang")
    check(await run_short("sglang", tmp_path))


def check(times: Times) -> None:
    assert not times.problems, times.problems
    assert times.sides >= {"prefill", "decode"}


async def test_prefill_workers_that_die_in_a_transfer() -> None:
    """The decode worker computes the prompt itself. The answer is right, and no block, lease or leg is left."""
    require_part("nixl")
    assert "2 kills in transfer, 0 problems" in await output_of("tests.chaos.prefill_kills", "--kills", "2")


async def test_churn_leaves_no_state() -> None:
    """Workers are killed, drained, stopped and moved between pools, and clients cancel. Answers are right, and no state is left at the end."""
    require_part("nixl")
    output = await output_of("tests.chaos.soak", "--minutes", "0.25", "--in-flight", "6", "--pause-s", "1.0")
    assert "PROBLEM" not in output
