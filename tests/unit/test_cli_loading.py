"""The progress that `kvmesh up` shows of a loading engine, and when it considers a start stuck."""

import asyncio
from pathlib import Path

import pytest

from kvmesh.cli.loading import LogWatch, phase_of, wait_while_it_goes_on
from tests.virtual_loop import run_virtual


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("Downloading shards:  55%|#####     | 3/5 [00:10<00:08]", "downloading the model: 50 %"),
        ("Fetching 12 files: 100%|####| 12/12", "downloading the model: 100 %"),
        ("INFO 11-23 [gpu_model_runner.py:68] Starting to load model org/name...", "loading weights"),
        ("Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:01<00:03]", "loading weights: 25 %"),
        (
            "INFO [backends.py:399] Compiling a graph for compile range (1, 8192) takes 12 s",
            "compiling the model (torch.compile)",
        ),
        ("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  99%|##", "capturing CUDA graphs: 75 %"),
        ("INFO Graph capturing finished in 12 secs, took 0.58 GiB", "CUDA graphs are captured"),
        ('{"event":"heartbeat_failed"}', ""),
    ],
)
def test_log_lines_of_vllm_are_recognised(line: str, phase: str) -> None:
    """The lines are those of vLLM 0.32, its loaders and the Hugging Face client."""
    assert phase_of(line) == phase


def test_a_log_is_read_as_it_grows(tmp_path: Path) -> None:
    """Each phase is shown once. Only complete lines count, including those that a progress bar overwrites."""
    path = tmp_path / "log"
    watch = LogWatch(path)
    assert watch.new_phases() == []
    path.write_text("x\nLoading safetensors checkpoint shards:   0%|\rLoading safetensors checkpoint sha")
    assert watch.new_phases() == ["loading weights: 0 %"]
    with path.open("a") as file:
        file.write("rds:  30%|\rLoading safetensors checkpoint shards:  40%|\r")
    assert watch.new_phases() == ["loading weights: 25 %"]
    assert watch.new_phases() == []


def test_a_start_has_no_time_limit_while_it_makes_progress() -> None:
    """The start fails when there is no progress for the limit."""
    lines = 0

    async def load(steps: int) -> str:
        nonlocal lines
        for _ in range(steps):
            await asyncio.sleep(100)
            lines += 1
        await asyncio.sleep(100)
        return "ready"

    async def stuck() -> float:
        began = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError):
            await wait_while_it_goes_on(asyncio.sleep(10**6), lambda: lines, 300)
        return asyncio.get_running_loop().time() - began

    assert run_virtual(wait_while_it_goes_on(load(100), lambda: lines, 300)) == "ready"
    assert 300 <= run_virtual(stuck()) < 302
