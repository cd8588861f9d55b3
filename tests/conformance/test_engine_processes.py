"""KV between two processes over real NIXL, for problems that do not occur within one process."""

import asyncio
import base64
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvmesh.clock import SystemClock
from kvmesh.core import FinishReason, KvHandle
from kvmesh.engines.simulated.engine import SimulatedEngine
from kvmesh.engines.simulated.settings import SimulatedSettings
from kvmesh.kv.nixl_transport import NixlTransport
from tests.conformance.engine_driver import EngineDriver, greedy
from tests.integration.mesh import stop_process
from tests.parts import ROOT, require_part
from tests.patience import PATIENCE_S


class PrefillProcess:
    """A process with a simulated prefill engine."""

    async def start(self) -> "PrefillProcess":
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.conformance.prefill_process",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=ROOT,
        )  # fmt: skip
        return self

    async def ask(self, order: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        async with asyncio.timeout(PATIENCE_S):
            return json.loads(await self._process.stdout.readline())

    async def prefill(self, prompt: list[int]) -> KvHandle:
        fields = await self.ask(prompt)
        payload = base64.b64decode(fields.pop("payload"))
        return KvHandle(worker_id="other", worker_epoch=1, payload=payload, **fields)

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    async def aclose(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


@pytest.fixture
async def other() -> AsyncIterator[PrefillProcess]:
    require_part("nixl")
    process = await PrefillProcess().start()
    yield process
    await process.aclose()


@asynccontextmanager
async def decode_engine(pull_timeout_s: float) -> AsyncIterator[EngineDriver]:
    settings = SimulatedSettings(kv_blocks=512, context_tokens_max=2048, time_factor=0.0, pull_timeout_s=pull_timeout_s)
    driver = await EngineDriver(SimulatedEngine(settings, SystemClock(), NixlTransport()), PATIENCE_S).start()
    try:
        yield driver
    finally:
        await driver.aclose()


@pytest.fixture
async def decode() -> AsyncIterator[EngineDriver]:
    require_part("nixl")
    async with decode_engine(pull_timeout_s=2.0) as driver:
        yield driver


async def test_prompts_are_pulled_from_another_process(other: PrefillProcess) -> None:
    """KV pulled from another process gives the same tokens as a local prompt. The reader's message then frees the source's blocks."""
    async with decode_engine(pull_timeout_s=PATIENCE_S) as decode:
        for length in (1, 16, 100, 1000):
            generation = greedy("demo", [length + i for i in range(length)])
            record = await decode.run(generation, handle=await other.prefill(list(generation.token_ids)))
            assert not record.done.was_recomputed
            assert record.done.usage.transferred_tokens > 0
            assert record.tokens == (await decode.run(generation)).tokens
        async with asyncio.timeout(PATIENCE_S):
            while await other.ask("used"):
                await asyncio.sleep(0.02)


async def test_transports_over_tcp() -> None:
    """Runs the suite of the transports over TCP, as where processes cannot read each other's memory (CMA)."""
    require_part("nixl")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pytest", "-q", "-k", "nixl", "tests/conformance/test_transport.py",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        cwd=ROOT, env={**os.environ, "UCX_TLS": "tcp,self"},
    )  # fmt: skip
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()


async def test_killed_source(other: PrefillProcess, decode: EngineDriver) -> None:
    """If the source is killed after it made the handle, the reader soon computes the prompt itself."""
    generation = greedy("demo", list(range(100, 300)))
    handle = await other.prefill(list(generation.token_ids))
    await other.aclose()
    async with asyncio.timeout(PATIENCE_S):
        record = await decode.run(generation, handle=handle)
    assert record.done.was_recomputed
    assert record.tokens == (await decode.run(generation)).tokens


async def test_stopped_source(other: PrefillProcess, decode: EngineDriver) -> None:
    """A source that hangs delays the reader at most until the pull's deadline. A cancel meanwhile ends the leg.

    The reader's blocks stay in use until the source continues or dies, because the requested bytes may still arrive.
    """
    generation = greedy("demo", list(range(100, 300)))
    handles = [await other.prefill(list(generation.token_ids)) for _ in range(2)]
    await stop_process(other.pid)
    cancelled = decode.submit(generation, handle=handles[0])
    await asyncio.sleep(0.1)
    decode.engine.cancel_nowait(cancelled.key)
    assert (await decode.wait(cancelled)).done.reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
    record = await decode.run(generation, handle=handles[1])
    again = await decode.run(greedy("demo", list(range(500, 900))))
    assert record.tokens == (await decode.run(generation)).tokens
    other.signal(signal.SIGCONT)
    await decode.wait_blocks(0, PATIENCE_S)
    assert again.tokens == (await decode.run(greedy("demo", list(range(500, 900))))).tokens
