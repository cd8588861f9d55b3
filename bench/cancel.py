"""Measures the time from a cancel to freed blocks, by phase of the request and worker. The target is 250 ms.

The prefill and the decode worker are processes; this process acts as the frontend. The time ends when a load record shows that the worker holds
no block and no batch or queue entry of the request. Load records arrive every 10 ms, which the figures include.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

from bench.figures import percentiles
from bench.services import one_worker
from kvmesh.clock import SystemClock
from kvmesh.core import (
    Generation,
    KvHandle,
    Leg,
    LegFinish,
    LegTask,
    LoadRecord,
    Role,
    SamplingParams,
    TokenLogprob,
    WorkerRef,
)
from kvmesh.errors import MeshError
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.clients import LegLink
from kvmesh.rpc.leg_link import GrpcLegLinks
from kvmesh.rpc.settings import RpcSettings
from kvmesh.rpc.whole_leg import run_leg
from kvmesh.rpc.worker_client import GrpcWorkerClient

PROMISE_S = 0.25
PROMPT_TOKENS, ANSWER_TOKENS = 1900, 120
LOOK_S = 0.01
TRIAL_S = 60.0
"""Timeout of each wait in a trial."""
ENGINES = {
    # The batch has room for one request, so that a second one waits. A prompt takes 0.8 s, as on vLLM.
    "simulated": (
        *("--engine", "simulated", "--simulated-running-requests-max", "1"),
        *("--simulated-profile-per-prefill-token-s", "0.0004"),
    ),
    "vllm": ("--engine", "vllm", "--vllm-running-requests-max", "1"),
}
START_S = {"simulated": 30.0, "vllm": 180.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTimes:
    """Seconds from the cancel to freed blocks, for one phase on one side."""

    engine: str
    phase: str
    side: str
    seconds: list[float]

    def row(self) -> list[str]:
        times_ms = percentiles(self.seconds)
        late = sum(each > PROMISE_S for each in self.seconds)
        return [
            self.engine,
            self.phase,
            self.side,
            str(len(self.seconds)),
            f"{times_ms['p50']:.0f}",
            f"{times_ms['p99']:.0f}",
            str(late),
        ]


COLUMNS = ("engine", "cancelled while", "side", "cancels", "freed p50 ms", "p99", f"over {PROMISE_S * 1000:.0f} ms")


class Side:
    """One worker and its latest load record."""

    def __init__(self, worker: WorkerRef, channels: ChannelPool) -> None:
        self.worker = worker
        self.load = LoadRecord()
        self._error: MeshError | None = None
        self._changed = asyncio.Condition()
        self._client = GrpcWorkerClient(channels)

    async def watch(self) -> None:
        """Updates the load. If the watch fails, all pending and later waits for a load raise its error."""
        try:
            async for load in self._client.watch_load(self.worker.address, interval_s=LOOK_S):
                async with self._changed:
                    self.load = load
                    self._changed.notify_all()
        except MeshError as error:
            async with self._changed:
                self._error = error
                self._changed.notify_all()

    async def until(self, holds: Callable[[LoadRecord], bool]) -> float:
        """Waits for a load record that satisfies `holds`. Returns its arrival time by the performance counter.

        Raises the watch's MeshError if the watch has ended, and TimeoutError with the last load after TRIAL_S.
        """
        try:
            async with asyncio.timeout(TRIAL_S), self._changed:
                await self._changed.wait_for(lambda: self._error is not None or holds(self.load))
        except TimeoutError:
            raise TimeoutError(f"after {TRIAL_S:.0f} s the load of {self.worker.worker_id} is {self.load}") from None
        if self._error is not None:
            raise self._error
        return time.perf_counter()

    async def until_idle(self, after_s: float = 0.0) -> float:
        """Waits for a load record taken after a wall-clock time that shows no request and no block in use."""
        return await self.until(lambda load: load.taken_at_s >= after_s and is_idle(load))


def is_idle(load: LoadRecord) -> bool:
    """Returns whether the worker has no request, no waiting token and no block in use."""
    return not (load.kv_blocks_used or load.running_requests or load.waiting_requests)


@dataclass(slots=True)
class RecordingSink:
    """Collects the results of a leg on the decode side."""

    first: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    cancel: Callable[[], None] = lambda: None

    def on_tokens(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None, came_s: float) -> None:
        self.first.set()

    def on_prompt(self, logprobs: Sequence[TokenLogprob]) -> None:
        """See LegSink."""

    def on_finish(self, finish: LegFinish) -> None:
        self.ended.set()


class Trials:
    """Runs one request at a time. A trial returns None if the request had already left the phase when the cancel was sent."""

    def __init__(self, *, prefill: Side, decode: Side, prefill_link: LegLink, decode_link: LegLink, seed: int) -> None:
        self._prefill, self._decode = prefill, decode
        self._prefill_link, self._decode_link = prefill_link, decode_link
        self._random = Random(seed)
        self._numbers = count(1)
        self.phases: dict[str, Callable[[], Awaitable[dict[str, float] | None]]] = {
            "queued, prefill": self.queued_prefill,
            "queued, decode": self.queued_decode,
            "prefilling": self.prefilling,
            "prefilling on decode": self.prefilling_on_decode,
            "in transfer": self.in_transfer,
            "decoding": self.decoding,
        }

    async def idle(self) -> None:
        """Waits until the next trial can start."""
        await self._prefill.until_idle()
        await self._decode.until_idle()

    async def queued_prefill(self) -> dict[str, float] | None:
        """Cancels a request that waits while the worker computes another prompt."""
        running = self._start_prefill()
        await self._prefill.until(lambda load: load.running_requests == 1 or running.done())
        waiting = self._start_prefill()
        await self._prefill.until(lambda load: load.waiting_requests == 1 or running.done())
        began = await cancelled(waiting)
        freed = await self._prefill.until(lambda load: not load.waiting_requests)
        was_done = running.done()
        for prompt in (running, waiting):
            await cancelled(prompt)
            if not prompt.cancelled() and prompt.exception() is None:
                await self._release(prompt)
        return None if was_done else {"prefill": freed - began}

    async def queued_decode(self) -> dict[str, float] | None:
        """Cancels a request that waits while the worker generates for another request."""
        running = self._submit(self._generation(20))
        await running.first.wait()
        waiting = self._submit(self._generation())
        await self._decode.until(lambda load: load.waiting_requests == 1 or running.ended.is_set())
        began = time.perf_counter()
        waiting.cancel()
        freed = await self._decode.until(lambda load: not load.waiting_requests)
        was_done = running.ended.is_set()
        running.cancel()
        return None if was_done else {"decode": freed - began}

    async def prefilling(self) -> dict[str, float] | None:
        """Cancels at a random time during prefill."""
        prompt = self._start_prefill()
        await self._prefill.until(lambda load: load.kv_blocks_used > 0)
        await asyncio.sleep(self._random.uniform(0, 0.2))
        if prompt.done():
            await self._release(prompt)
            return None
        began = await cancelled(prompt)
        return {"prefill": await self._prefill.until_idle() - began}

    async def prefilling_on_decode(self) -> dict[str, float] | None:
        """Cancels at a random time while the decode worker computes the prompt."""
        answer = self._submit(self._generation())
        await self._decode.until(lambda load: load.kv_blocks_used > 0 or answer.ended.is_set())
        await asyncio.sleep(self._random.uniform(0, 0.2))
        was_further, began = answer.first.is_set(), time.perf_counter()
        answer.cancel()
        freed = await self._decode.until_idle()
        return None if was_further else {"decode": freed - began}

    async def in_transfer(self) -> dict[str, float] | None:
        """Cancels between the submission with a handle and the first token."""
        generation = self._generation()
        prompt = self._start_prefill(generation)
        answer = self._submit(generation, await prompt)
        await asyncio.sleep(self._random.uniform(0, 0.01))
        was_further, began, cancelled_at_s = answer.first.is_set(), time.perf_counter(), time.time()
        answer.cancel()
        # A load record from before the submission also shows an idle worker. The finish of the leg takes a step, which sends a new record.
        prefill, decode = await asyncio.gather(
            self._prefill.until_idle(cancelled_at_s), self._decode.until_idle(cancelled_at_s)
        )
        return None if was_further else {"prefill": prefill - began, "decode": decode - began}

    async def decoding(self) -> dict[str, float] | None:
        """Cancels after the first tokens, when the worker holds transferred KV."""
        generation = self._generation()
        answer = self._submit(generation, await self._start_prefill(generation))
        await answer.first.wait()
        await asyncio.sleep(self._random.uniform(0, 0.05))
        was_further, began, cancelled_at_s = answer.ended.is_set(), time.perf_counter(), time.time()
        answer.cancel()
        freed = await self._decode.until_idle(cancelled_at_s)
        return None if was_further else {"decode": freed - began}

    def _generation(self, tokens: int = PROMPT_TOKENS) -> Generation:
        ids = [self._random.randrange(300, 2000) for _ in range(tokens)]
        sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        return Generation(model="demo", token_ids=ids, sampling=sampling)

    def _start_prefill(self, generation: Generation | None = None) -> "asyncio.Task[KvHandle]":
        return asyncio.create_task(self._prefill_prompt(generation or self._generation()))

    async def _prefill_prompt(self, generation: Generation) -> KvHandle:
        leg = Leg(leg_id=f"prompt-{next(self._numbers)}", task=LegTask.PREFILL, generation=generation)
        whole = await run_leg(self._prefill_link, leg, timeout_s=TRIAL_S)
        assert whole.finish is not None and whole.finish.handle is not None
        return whole.finish.handle

    async def _release(self, prompt: "asyncio.Task[KvHandle]") -> None:
        self._prefill_link.release_nowait((await prompt).handle_id)

    def _submit(self, generation: Generation, handle: KvHandle | None = None) -> RecordingSink:
        answer = RecordingSink()
        leg_id = f"answer-{next(self._numbers)}"
        leg = Leg(leg_id=leg_id, task=LegTask.GENERATE, generation=generation, handle=handle)
        answer.cancel = self._decode_link.submit_nowait(leg, answer, timeout_s=TRIAL_S)
        return answer


async def cancelled(task: "asyncio.Task[Any]") -> float:
    """Cancels a call and returns the time. If the call had already ended, its lease remains."""
    began = time.perf_counter()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, MeshError):
        await task
    return began


async def measure_cancels(engine: str, cancels: int, seed: int) -> list[CancelTimes]:
    """Measures `cancels` cancels in each phase."""
    found: dict[tuple[str, str], list[float]] = {}
    async with running_trials(engine, seed) as trials:
        for phase, trial in trials.phases.items():
            measured = 0
            for attempt in range(3 * cancels + 1):
                await trials.idle()
                if measured == cancels:
                    break
                times = await trial()
                # The first cancel of each phase warms up connections, memory and the step budget. It is not counted.
                if times is not None and attempt:
                    measured += 1
                    for side, seconds in times.items():
                        found.setdefault((phase, side), []).append(seconds)
    return [
        CancelTimes(engine=engine, phase=phase, side=side, seconds=seconds) for (phase, side), seconds in found.items()
    ]


@asynccontextmanager
async def running_trials(engine: str, seed: int) -> AsyncIterator[Trials]:
    """Starts a prefill and a decode worker and watches their load."""
    argv, start_s = ENGINES[engine], START_S[engine]
    channels = ChannelPool(settings=RpcSettings())
    async with (
        one_worker("prefill", argv, start_s) as (prefill_ref, _),
        one_worker("decode", argv, start_s) as (decode_ref, _),
    ):
        prefill, decode = Side(prefill_ref, channels), Side(decode_ref, channels)
        watches = [asyncio.create_task(side.watch()) for side in (prefill, decode)]
        links = GrpcLegLinks(channels, frontend_id="bench", clock=SystemClock())
        try:
            prefill_link = await links.link(prefill_ref, Role.PREFILL, timeout_s=10.0)
            decode_link = await links.link(decode_ref, Role.DECODE, timeout_s=10.0)
            yield Trials(prefill=prefill, decode=decode, prefill_link=prefill_link, decode_link=decode_link, seed=seed)
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
            await links.aclose()
            await channels.aclose()
