"""The engines that the conformance suite runs against. To add an engine, add a case to `CASES`."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from random import Random
from shutil import rmtree
from tempfile import gettempdir
from typing import Any

import pytest

from kvmesh.clock import SystemClock
from kvmesh.core import FinishReason, Generation, Handoff, LegTask, Rendezvous, Role
from kvmesh.engines.base import Engine
from kvmesh.engines.simulated.engine import SimulatedEngine
from kvmesh.engines.simulated.rendezvous.wire import HttpWire, Wire
from kvmesh.engines.simulated.settings import SimulatedSettings, StepProfile
from kvmesh.kv.transport import KvTransport
from kvmesh.simulation.kv_transport import MemoryKvNetwork, MemoryTransport
from kvmesh.simulation.rendezvous import MemoryRendezvousNetwork, MemoryWire
from tests.conformance.engine_driver import EngineDriver, Record, greedy
from tests.parts import require_part
from tests.patience import PATIENCE_S


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options that a test may set beyond the case's defaults.

    `is_alone`: the engine computes prompts and generates, whatever the case's handoff.
    """

    role: Role
    is_alone: bool = False
    lease_s: float = 30.0
    running_requests_max: int = 8
    waiting_requests_max: int = 32


Make = Callable[[EngineOptions], Engine]


@dataclass(frozen=True, kw_only=True)
class EngineCase:
    """One kind of engine. `open` prepares what all engines of a module share, and returns a function that makes an engine, not started yet.

    `open` skips the tests if packages are missing. Resources that it opens go on the stack.

    `free_s`: how long the engine may take to free blocks, including delays by other programs. `adapter`: a source that `load_adapter` accepts;
    empty if the engine has no adapters. A case with `is_real=False` runs a stand-in for the engine: it tests the adapter, and proves no feature.
    `uncontinued`: sampling parameters with which the case cannot test a continuation, and why.
    """

    name: str
    open: Callable[[AsyncExitStack], Awaitable[Make]]
    timeout_s: float = PATIENCE_S
    free_s: float = PATIENCE_S
    adapter: str = ""
    is_real: bool = True
    uncontinued: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Fleet:
    """Engines of one case for all tests of a module. `alone` computes prompts itself and is the reference."""

    case: EngineCase
    alone: EngineDriver
    prefill: EngineDriver
    decode: EngineDriver
    _make: Make
    _stack: AsyncExitStack
    _random: Random = field(default_factory=lambda: Random(5))

    @classmethod
    async def start(cls, case: EngineCase, stack: AsyncExitStack) -> "Fleet":
        make = await case.open(stack)
        engines = (
            EngineOptions(role=Role.DECODE, is_alone=True),
            EngineOptions(role=Role.PREFILL),
            EngineOptions(role=Role.DECODE),
        )
        started = [start_engine(case, make, stack, options) for options in engines]
        alone, prefill, decode = await asyncio.gather(*started)
        return cls(case=case, alone=alone, prefill=prefill, decode=decode, _make=make, _stack=stack)

    async def another(self, role: Role, **options: Any) -> EngineDriver:
        """Starts an engine for one test. A decode engine computes prompts, whatever the case's handoff."""
        options = {"is_alone": role is Role.DECODE, **options}
        return await start_engine(self.case, self._make, self._stack, EngineOptions(role=role, **options))

    @property
    def is_rendezvous(self) -> bool:
        """Whether both legs start at once, and neither engine serves alone."""
        return Handoff.RENDEZVOUS in self.prefill.engine.describe().capabilities.handoffs

    def rendezvous(self) -> Rendezvous | None:
        """Returns a new room at the prefill engine. None: the handoff is sequential."""
        if not self.is_rendezvous:
            return None
        host, _, port = self.prefill.engine.describe().rendezvous_address.rpartition(":")
        return Rendezvous(host=host, port=int(port), room=self._random.getrandbits(63))

    def submit_prefill(self, generation: Generation) -> Record:
        """Submits a prefill leg without a decode leg."""
        return self.prefill.submit(generation, task=LegTask.PREFILL, rendezvous=self.rendezvous())

    async def begin(self, generation: Generation) -> tuple[Record, Record]:
        """Starts both legs. With a sequential handoff, the decode leg starts after the prefill leg."""
        if (where := self.rendezvous()) is None:
            prefill = await self.prefill.wait(self.submit_prefill(generation))
            return prefill, self.decode.submit(generation, handle=prefill.done.handle)
        decode = self.decode.submit(generation, rendezvous=where)
        return self.prefill.submit(generation, task=LegTask.PREFILL, rendezvous=where), decode

    async def hand_over(self, generation: Generation) -> Record:
        """Returns the answer of a decode engine whose prompt a prefill engine computed."""
        prefill, decode = await self.begin(generation)
        assert (await self.prefill.wait(prefill)).done.reason is FinishReason.HANDED_OFF, prefill.done
        assert not prefill.tokens, "a prefill leg has no tokens"
        return await self.decode.wait(decode)

    async def answer(self, generation: Generation) -> Record:
        """Returns the answer of a decode engine that computes the prompt if it can."""
        return await (self.hand_over(generation) if self.is_rendezvous else self.decode.run(generation))

    @property
    def model(self) -> str:
        return self.alone.engine.describe().model.name

    @property
    def block_size(self) -> int:
        return self.alone.engine.describe().block_size_tokens

    def prompt(self, blocks: float) -> list[int]:
        """Returns a prompt of so many blocks, with tokens that no other test uses."""
        top = self.alone.engine.describe().model.vocabulary_size
        return [self._random.randrange(top) for _ in range(max(1, round(blocks * self.block_size)))]

    def greedy(self, blocks: float, max_tokens: int = 12, **sampling: Any) -> Generation:
        """Returns a greedy generation over a new prompt of so many blocks."""
        return greedy(self.model, self.prompt(blocks), max_tokens, **sampling)

    def check(self) -> None:
        """Fails if an engine of the fleet broke an ordering rule, leaked a block, or gave a block to two owners."""
        for driver in (self.alone, self.prefill, self.decode):
            assert driver.violations == []
            load = driver.engine.load()
            assert load.kv_blocks_unaccounted in (0, None), load


async def start_engine(case: EngineCase, make: Make, stack: AsyncExitStack, options: EngineOptions) -> EngineDriver:
    """Returns a running engine, closed with the stack."""
    driver = EngineDriver(make(options), case.timeout_s)
    stack.push_async_callback(driver.aclose)
    async with asyncio.timeout(case.timeout_s):
        return await driver.start()


_NETWORK = MemoryKvNetwork(clock=SystemClock(), latency_s=0.001)
_ROOMS = MemoryRendezvousNetwork(latency_s=0.001)
_HOSTS = count(1)
# Steps take some time, so that a test can act between them.
_PROFILE = StepProfile(base_s=0.001, per_prefill_token_s=0.00001, per_decode_request_s=0.0)


def _simulated(
    transport: Callable[[], KvTransport], wire: Callable[[], Wire] | None = None, *, event_loop: str = "normal"
) -> Callable[[AsyncExitStack], Awaitable[Make]]:
    """Returns the `open` of a simulated engine. With a `wire` the handoff is a rendezvous."""

    def make(options: EngineOptions) -> Engine:
        settings = SimulatedSettings(
            role=options.role.value,
            lease_s=options.lease_s,
            running_requests_max=options.running_requests_max,
            waiting_requests_max=options.waiting_requests_max,
            kv_blocks=512,
            context_tokens_max=2048,
            step_tokens_max=256,
            profile=_PROFILE,
            event_loop=event_loop,
            processing_s=0.0005 if event_loop == "overlap" else 0.0,
        )
        if wire is None:
            return SimulatedEngine(settings, SystemClock(), transport())
        settings = replace(settings, handoff="rendezvous", handshake_timeout_s=1.0)
        if options.is_alone:
            return SimulatedEngine(settings, SystemClock())
        return SimulatedEngine(settings, SystemClock(), transport(), wire=wire())

    async def open_case(_: AsyncExitStack) -> Make:
        return make

    return open_case


def _nixl() -> KvTransport:
    require_part("nixl")
    from kvmesh.kv.nixl_transport import NixlTransport

    return NixlTransport()


SGLANG_ADAPTER = str(Path(gettempdir()) / f"kvmesh-sglang-adapter-{os.getpid()}")
VLLM_ADAPTER = str(Path(gettempdir()) / f"kvmesh-adapter-{os.getpid()}")


async def _vllm(stack: AsyncExitStack) -> Make:
    require_part("vllm")
    from tests.conformance.vllm_case import open_vllm
    from tests.integration.vllm_model import make_adapter

    stack.callback(rmtree, make_adapter(Path(VLLM_ADAPTER)))
    return await open_vllm(stack)


async def _sglang(stack: AsyncExitStack) -> Make:
    python = require_part("sglang")
    from tests.conformance.sglang_case import open_sglang
    from tests.integration.vllm_model import make_adapter

    stack.callback(rmtree, make_adapter(Path(SGLANG_ADAPTER)))
    return await open_sglang(stack, python)


TRTLLM_ADAPTER = str(Path(gettempdir()) / f"kvmesh-trtllm-adapter-{os.getpid()}")


async def _trtllm(stack: AsyncExitStack) -> Make:
    from tests.conformance.trtllm_case import open_trtllm, write_adapter

    stack.callback(rmtree, write_adapter(Path(TRTLLM_ADAPTER)))
    return await open_trtllm(stack)


CASES = [
    pytest.param(
        EngineCase(name="simulated", open=_simulated(lambda: MemoryTransport(_NETWORK)), adapter="any"), id="simulated"
    ),
    pytest.param(EngineCase(name="simulated", open=_simulated(_nixl), adapter="any"), id="simulated-nixl"),
    pytest.param(
        EngineCase(
            name="simulated",
            open=_simulated(
                lambda: MemoryTransport(_NETWORK),
                lambda: MemoryWire(_ROOMS, f"host-{next(_HOSTS)}"),
                event_loop="overlap",
            ),
            adapter="any",
        ),
        id="simulated-rendezvous-overlap",
    ),
    pytest.param(
        EngineCase(name="simulated", open=_simulated(_nixl, lambda: HttpWire("127.0.0.1")), adapter="any"),
        id="simulated-rendezvous-nixl",
    ),
    pytest.param(
        EngineCase(name="vllm", open=_vllm, timeout_s=90.0, adapter=VLLM_ADAPTER),
        id="vllm",
        marks=[pytest.mark.vllm, pytest.mark.timeout(300)],
    ),
    pytest.param(
        EngineCase(
            name="sglang",
            open=_sglang,
            timeout_s=90.0,
            adapter=SGLANG_ADAPTER,
            uncontinued={
                "min_tokens": "this engine has no tokenizer, without which SGLang refuses min_tokens",
                "logprobs": "in bfloat16 log-probabilities differ by up to 0.1 (docs/engines/sglang.md)",
            },
        ),
        id="sglang",
        marks=[pytest.mark.sglang, pytest.mark.timeout(300)],
    ),
    pytest.param(
        EngineCase(name="trtllm", open=_trtllm, adapter=TRTLLM_ADAPTER, is_real=False),
        id="trtllm",
    ),
]
