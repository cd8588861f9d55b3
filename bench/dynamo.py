"""Starts NVIDIA Dynamo with its mocker engine on loopback: frontend, one prefill and one decode process.

Runs without etcd and NATS, in Dynamo's configuration for a single machine: discovery through files, requests over TCP, events over ZMQ.
"""

import asyncio
import os
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.http_target import HttpTarget
from bench.mesh import Served
from bench.target import LoadRequest

READY_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 8.0
SETTLE_S = 1.0
POLL_S = 0.05
MODEL_NAME = "bench"
MODULES = "import dynamo._core, dynamo.frontend, dynamo.mocker"


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoKind:
    """Engine speed. `speedup_ratio` 1 is the mocker's own pace. Dynamo treats 0 like 1, so use a million for steps that take no time."""

    name: str
    speedup_ratio: int
    model_dir: Path
    is_split: bool = True
    """True: a prefill and a decode process. False: one process for both roles."""
    tokenizer: str = "default"
    """`fastokens` is in the same wheel, takes a tenth of the default's time for a long prompt, and is off by default."""


async def missing(folder: Path | None) -> str:
    """Returns an error message if Dynamo cannot run; empty if it can."""
    if folder is None:
        return "Dynamo is not measured: name its virtual environment with --dynamo DIR"
    python = folder / "bin" / "python"
    if not python.exists():
        return f"Dynamo is not measured: {python} does not exist"
    process = await asyncio.create_subprocess_exec(
        str(python), "-c", MODULES, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, problem = await process.communicate()
    lines = problem.decode(errors="replace").strip().splitlines()
    return f"Dynamo is not measured: {lines[-1] if lines else 'it cannot be imported'}" if process.returncode else ""


@asynccontextmanager
async def running_dynamo(folder: Path, kind: DynamoKind) -> AsyncIterator[Served]:
    """Starts Dynamo with KV routing, and with the simulated engine's defaults for block size, pool and batch."""
    with tempfile.TemporaryDirectory(prefix="dynamo-bench-") as run_dir:
        port = _free_port()
        url = f"http://127.0.0.1:{port}"
        processes: dict[str, asyncio.subprocess.Process] = {}
        try:
            for name, argv in _commands(kind, port).items():
                processes[name] = await _start(folder, name, argv, run_dir=Path(run_dir))
            await _wait_ready(url, processes, Path(run_dir))
            yield Served(
                system="dynamo",
                url=url,
                model=MODEL_NAME,
                model_dir=kind.model_dir,
                watch={name: process.pid for name, process in processes.items()},
            )
        finally:
            await _stop(list(processes.values()))


def _commands(kind: DynamoKind, port: int) -> Mapping[str, Sequence[str]]:
    worker = (
        *("-m", "dynamo.mocker", "--model-path", str(kind.model_dir), "--model-name", MODEL_NAME),
        *("--block-size", "16", "--num-gpu-blocks-override", "16384", "--kv-transfer-bandwidth", "0"),
        *("--speedup-ratio", str(kind.speedup_ratio)),
    )
    frontend = (
        *("-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port), "--router-mode", "kv"),
        *("--tokenizer", kind.tokenizer),
    )
    if not kind.is_split:
        return {"frontend": frontend, "worker": worker}
    return {
        "frontend": frontend,
        "prefill": (*worker, "--disaggregation-mode", "prefill"),
        "decode": (*worker, "--disaggregation-mode", "decode"),
    }


def _environment(folder: Path, run_dir: Path) -> Mapping[str, str]:
    return {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        # Dynamo copies every model to the home directory.
        "HOME": str(run_dir),
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(run_dir / "kv"),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        "DYN_SELF_HOST_METADATA": "0",
        "DYN_LOG": "warn",
        "HF_HUB_OFFLINE": "1",
    }


async def _start(folder: Path, name: str, argv: Sequence[str], *, run_dir: Path) -> asyncio.subprocess.Process:
    with (run_dir / f"{name}.log").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            str(folder / "bin" / "python"),
            *argv,
            cwd=run_dir,
            env=_environment(folder, run_dir),
            stdout=log,
            stderr=log,
        )


async def _wait_ready(url: str, processes: Mapping[str, asyncio.subprocess.Process], run_dir: Path) -> None:
    """Waits until Dynamo answers, then a moment longer: prefill and decode register one after the other."""
    target = HttpTarget(url, MODEL_NAME, timeout_s=10.0)
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            while (await target.send(LoadRequest(prompt="hello", output_tokens=1), time.perf_counter())).error:
                for name, process in processes.items():
                    if process.returncode is not None:
                        log = (run_dir / f"{name}.log").read_text(errors="replace")
                        raise RuntimeError(f"Dynamo's {name} ended with status {process.returncode}:\n{log[-2000:]}")
                await asyncio.sleep(POLL_S)
    finally:
        await target.aclose()
    await asyncio.sleep(SETTLE_S)


async def _stop(processes: Sequence[asyncio.subprocess.Process]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
