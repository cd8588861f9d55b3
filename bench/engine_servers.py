"""Starts an engine's own OpenAI server, with the flags that kvmesh gives its worker on this machine."""

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from bench.http_target import HttpTarget
from bench.mesh import Served
from bench.services import ROOT
from bench.target import LoadRequest
from kvmesh.cli.doctor import free_port
from kvmesh.engines.sglang.host_process import find_python
from kvmesh.engines.sglang.settings import CPU_KV_CACHE_BYTES, CPU_RUNNING_REQUESTS
from kvmesh.engines.vllm.settings import CPU_BLOCK_SIZE_TOKENS

MODEL_NAME = "bench"
READY_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.2
KV_CACHE_BYTES = 128 << 20
RUNNING_REQUESTS = 64
SITE = "from kvmesh.engines.sglang.host import cpu\ncpu.prepare()\n"
"""SGLang's processes need the same stand-ins for its missing CPU build as under kvmesh."""
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def vllm_command(model: Path, port: int) -> Sequence[str]:
    return (
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"),
        *("--block-size", str(CPU_BLOCK_SIZE_TOKENS), "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)),
        *("--max-num-seqs", str(RUNNING_REQUESTS)),
    )


def sglang_command(model: Path, port: int, kv_tokens: int) -> Sequence[str]:
    return (
        *(find_python(""), "-m", "sglang.launch_server", "--model-path", str(model)),
        *("--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port)),
        *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
        *("--mem-fraction-static", "0.1", "--max-total-tokens", str(kv_tokens), "--page-size", "16"),
        *("--max-running-requests", str(CPU_RUNNING_REQUESTS), "--chunked-prefill-size", "512"),
        *("--disable-overlap-schedule", "--disable-cuda-graph", "--skip-server-warmup", "--log-level", "warning"),
    )


def environment(engine: str, folder: Path) -> Mapping[str, str]:
    if engine == "vllm":
        return {**os.environ, **THREADS, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    (folder / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join((str(folder), str(ROOT)))
    return {**os.environ, **THREADS, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


@asynccontextmanager
async def running_server(engine: str, model: Path, kv_bytes_per_token: int) -> AsyncIterator[Served]:
    """The engine's own server, ready. Ends it and its processes at the end."""
    port = free_port()
    kv_tokens = CPU_KV_CACHE_BYTES // kv_bytes_per_token // 16 * 16
    command = vllm_command(model, port) if engine == "vllm" else sglang_command(model, port, kv_tokens)
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder:
        log_path = Path(folder) / "server.log"
        with log_path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *command, env=environment(engine, Path(folder)), stdout=log, stderr=log, start_new_session=True
            )
        try:
            url = f"http://127.0.0.1:{port}"
            await _wait_ready(url, process, log_path)
            yield Served(system="own server", url=url, model=MODEL_NAME, model_dir=model, watch={"server": process.pid})
        finally:
            await _stop(process)


async def _wait_ready(url: str, process: asyncio.subprocess.Process, log: Path) -> None:
    target = HttpTarget(url, MODEL_NAME, timeout_s=30.0)
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            while (await target.send(LoadRequest(prompt="hello", output_tokens=2), time.perf_counter())).error:
                if process.returncode is not None:
                    raise RuntimeError(f"the server ended with status {process.returncode}: {log_end(log)}")
                await asyncio.sleep(POLL_S)
    finally:
        await target.aclose()


def log_end(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


async def _stop(process: asyncio.subprocess.Process) -> None:
    """The server and the processes that it has started lead one group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
