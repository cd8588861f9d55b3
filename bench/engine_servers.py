"""Starts an engine's own OpenAI servers, with the flags that kvmesh gives its worker on this machine."""

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from bench.bound import bound
from bench.http_target import HttpTarget
from bench.mesh import Served
from bench.services import ROOT
from bench.target import LoadRequest, LoadResult, Target
from kvmesh.cli.doctor import free_port
from kvmesh.engines.sglang.host_process import find_python
from kvmesh.engines.sglang.settings import CPU_KV_CACHE_BYTES, CPU_RUNNING_REQUESTS
from kvmesh.engines.vllm.settings import CPU_BLOCK_SIZE_TOKENS

MODEL_NAME = "bench"
OWN = "own server"
READY_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.2
KV_CACHE_BYTES = 128 << 20
RUNNING_REQUESTS = 64
SITE = "from kvmesh.engines.sglang.host import cpu\ncpu.prepare()\n"
"""SGLang's processes need the same replacements for its missing CPU build as under kvmesh."""
PLUGIN = "[sglang.srt.plugins]\nkvmesh_bench = kvmesh.engines.sglang.host.cpu:prepare_transfers\n"
"""SGLang loads this plug-in in each of its processes."""
VLLM_TRANSFER = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def vllm_command(model: Path, port: int, *more: str) -> Sequence[str]:
    return (
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"),
        *("--block-size", str(CPU_BLOCK_SIZE_TOKENS), "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)),
        *("--max-num-seqs", str(RUNNING_REQUESTS)),
        *more,
    )


def vllm_pair_commands(model: Path, ports: tuple[int, int]) -> list[Sequence[str]]:
    """Returns the commands of a prefill and a decode server. They connect through the prefill server's side channel."""
    return [
        [
            *("env", "VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1", f"VLLM_NIXL_SIDE_CHANNEL_PORT={free_port()}"),
            *vllm_command(model, port, "--kv-transfer-config", json.dumps(VLLM_TRANSFER | {"kv_role": role})),
        ]
        for port, role in zip(ports, ("kv_producer", "kv_consumer"), strict=True)
    ]


def sglang_command(model: Path, port: int, kv_tokens: int, *more: str) -> Sequence[str]:
    return (
        *(find_python(""), "-m", "sglang.launch_server", "--model-path", str(model)),
        *("--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port)),
        *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
        *("--mem-fraction-static", "0.1", "--max-total-tokens", str(kv_tokens), "--page-size", "16"),
        *("--max-running-requests", str(CPU_RUNNING_REQUESTS), "--chunked-prefill-size", "256"),
        *("--disable-overlap-schedule", "--disable-cuda-graph", "--skip-server-warmup", "--log-level", "warning"),
        *more,
    )


def sglang_pair_commands(
    model: Path, ports: tuple[int, int], *, bootstrap_port: int, kv_tokens: int
) -> list[Sequence[str]]:
    """Returns the commands of a prefill and a decode server. Each sets the port of torch's ranks; otherwise both might choose the same one."""
    shared = ("--disaggregation-transfer-backend", "nixl", "--disaggregation-bootstrap-port", str(bootstrap_port))
    decode = ("--disaggregation-decode-enable-radix-cache", "--disaggregation-decode-retraction-backup", "cpu_tensor")
    return [
        [
            *sglang_command(model, port, kv_tokens, *shared, "--disaggregation-mode", mode),
            *("--nccl-port", str(free_port()), *more),
        ]
        for port, mode, more in zip(ports, ("prefill", "decode"), ((), decode), strict=True)
    ]


def environment(engine: str, folder: Path) -> Mapping[str, str]:
    if engine == "vllm":
        return {**os.environ, **THREADS, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    (folder / "sitecustomize.py").write_text(SITE)
    metadata = folder / "kvmesh_bench-0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvmesh-bench\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(PLUGIN)
    path = os.pathsep.join((str(folder), str(ROOT)))
    return {**os.environ, **THREADS, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


@asynccontextmanager
async def running_server(engine: str, model: Path, kv_bytes_per_token: int) -> AsyncIterator[Served]:
    """Starts the engine's own server and waits until it is ready. Ends it and its child processes on exit."""
    port, kv_tokens = free_port(), kv_tokens_of(kv_bytes_per_token)
    command = vllm_command(model, port) if engine == "vllm" else sglang_command(model, port, kv_tokens)
    async with _running(engine, [command]) as started:
        served = Served(
            system=OWN, url=_url(port), model=MODEL_NAME, model_dir=model, watch={"server": started.processes[0].pid}
        )
        await _wait_ready(served, started)
        yield served


@asynccontextmanager
async def running_pair(engine: str, model: Path, kv_bytes_per_token: int) -> AsyncIterator[Served]:
    """Starts the engine's own prefill and decode servers and waits until they are ready. The load generator sends each request to both, as a
    router would."""
    prefill, decode = free_port(), free_port()
    if engine == "vllm":
        bootstrap, commands = 0, vllm_pair_commands(model, (prefill, decode))
    else:
        bootstrap = free_port()
        commands = sglang_pair_commands(
            model, (prefill, decode), bootstrap_port=bootstrap, kv_tokens=kv_tokens_of(kv_bytes_per_token)
        )
    async with _running(engine, commands) as started:
        served = Served(
            system=OWN,
            url=_url(decode),
            model=MODEL_NAME,
            model_dir=model,
            watch=dict(zip(("prefill", "decode"), (each.pid for each in started.processes), strict=True)),
            prefill_url=_url(prefill),
            bootstrap_port=bootstrap,
        )
        await _wait_ready(served, started)
        yield served


class SglangPairTarget:
    """Sends every request to SGLang's prefill and decode servers, with a common bootstrap room. The decode server answers."""

    def __init__(self, served: Served, timeout_s: float) -> None:
        self._prefill = HttpTarget(served.prefill_url, served.model, timeout_s=timeout_s)
        self._decode = HttpTarget(served.url, served.model, timeout_s=timeout_s)
        self._port = served.bootstrap_port
        self._rooms = count(1)

    async def send(self, request: LoadRequest, intended_at_s: float) -> LoadResult:
        fields = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self._port,
            "bootstrap_room": next(self._rooms) + time.time_ns() // 1000 * 1000,
        }
        targets = (self._prefill, self._decode)
        _, result = await asyncio.gather(*(target.send(request, intended_at_s, fields) for target in targets))
        return result

    async def aclose(self) -> None:
        await self._prefill.aclose()
        await self._decode.aclose()


class VllmPairTarget:
    """Has vLLM's prefill server compute the prompt, then sends the request to the decode server with the transfer parameters of its KV."""

    def __init__(self, served: Served, timeout_s: float) -> None:
        self._served = served
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(timeout_s))
        self._decode = HttpTarget(served.url, served.model, timeout_s=timeout_s)

    async def send(self, request: LoadRequest, intended_at_s: float) -> LoadResult:
        body = {
            "model": self._served.model,
            "messages": [{"role": "user", "content": request.prompt}],
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
        try:
            async with self._session.post(f"{self._served.prefill_url}/v1/chat/completions", json=body) as response:
                answer: Any = await response.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            return LoadResult(error=repr(error))
        if response.status != 200:
            return LoadResult(error=str(answer))
        fields = {"kv_transfer_params": answer["kv_transfer_params"]}
        return await self._decode.send(request, intended_at_s, fields)

    async def aclose(self) -> None:
        await self._session.close()
        await self._decode.aclose()


def target_of(served: Served, timeout_s: float) -> Target:
    """Returns the load generator's target for a server or a pair."""
    if not served.prefill_url:
        return HttpTarget(served.url, served.model, timeout_s=timeout_s)
    if served.bootstrap_port:
        return SglangPairTarget(served, timeout_s)
    return VllmPairTarget(served, timeout_s)


def kv_tokens_of(kv_bytes_per_token: int) -> int:
    """Returns the size of SGLang's KV cache in tokens, rounded down to whole blocks."""
    return CPU_KV_CACHE_BYTES // kv_bytes_per_token // 16 * 16


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    processes: Sequence[asyncio.subprocess.Process]
    log: Path


@asynccontextmanager
async def _running(engine: str, commands: Sequence[Sequence[str]]) -> AsyncIterator[_Started]:
    """Starts servers that share one log. Ends them and their child processes on exit."""
    processes: list[asyncio.subprocess.Process] = []
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder:
        log_path = Path(folder) / "server.log"
        try:
            with log_path.open("wb") as log:
                for command in commands:
                    process = await asyncio.create_subprocess_exec(
                        *bound(command),
                        cwd=ROOT,
                        env=environment(engine, Path(folder)),
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                    processes.append(process)
            yield _Started(processes=processes, log=log_path)
        finally:
            for process in processes:
                await _stop(process)


async def _wait_ready(served: Served, started: _Started) -> None:
    target = target_of(served, 30.0)
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            while (await target.send(LoadRequest(prompt="hello", output_tokens=2), time.perf_counter())).error:
                for process in started.processes:
                    if process.returncode is not None:
                        raise RuntimeError(f"the server ended with status {process.returncode}: {log_end(started.log)}")
                await asyncio.sleep(POLL_S)
    finally:
        await target.aclose()


def log_end(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Ends a server's process group: the server and the processes that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
