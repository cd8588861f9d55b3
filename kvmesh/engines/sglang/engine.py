"""The SGLang engine: the `Engine` interface on the event loop. SGLang itself runs in a process of its own (`host/`).

The loss of that process is the loss of the engine. Every number of a leg is used once, so late messages are recognised.
"""

import asyncio
import dataclasses
import itertools
from random import Random

from kvmesh.core import KvHandle, LoadRecord, PerformanceProfile, Role
from kvmesh.engines.adapters import EngineAdapters
from kvmesh.engines.base import EngineDescription, EngineRequest, StepOutput
from kvmesh.engines.output_buffers import BufferedEngine, KvEventBuffer, StepOutputBuffer
from kvmesh.engines.sglang.description import capabilities, kv_hash, model_card
from kvmesh.engines.sglang.host_process import (
    HostLink,
    HostProcess,
    Launch,
    find_python,
    launcher,
    listening,
    wait_registered,
)
from kvmesh.engines.sglang.intake import SglangIntake
from kvmesh.engines.sglang.leg import SglangLeg, asked_logprobs, cancelled, kv_events, token_logprobs
from kvmesh.engines.sglang.messages import (
    ALIVE_INTERVAL_S,
    Call,
    CallResult,
    Cancel,
    Failed,
    FromHost,
    HostLoad,
    HostStep,
    Ready,
    Snapshot,
    Start,
)
from kvmesh.engines.sglang.role_change import LegCount, end_legs, switch
from kvmesh.engines.sglang.settings import SglangSettings
from kvmesh.errors import (
    InternalError,
    InvalidRequestError,
    LostError,
    MeshError,
    OverloadedError,
    UnavailableError,
    UnsupportedError,
)
from kvmesh.event_log import event_logger
from kvmesh.kv.paths import KvPaths

_log = event_logger(__name__)

OUTPUT_BUFFER_STEPS = 1024
KV_EVENT_BUFFER_BLOCKS = 1 << 18
OVERLOAD_RETRY_S = 1.0
CLOSE_TIMEOUT_S = 5.0
ROLE_WAIT_S = 5.0
"""Longest wait for requests in flight when the role changes. The rest continues on other workers, so a longer wait gains little."""
SILENCE_S = 4 * ALIVE_INTERVAL_S
"""A process that runs says so four times in it."""
SETTINGS_ERRORS = frozenset(("ValueError", "OSError", "InvalidRequestError", "FileNotFoundError", "AssertionError"))


class SglangEngine(BufferedEngine):
    """One SGLang engine. `launch` starts its process; by default a program of the Python that has SGLang."""

    def __init__(self, settings: SglangSettings, *, launch: Launch | None = None, random: Random | None = None) -> None:
        self.settings = settings
        self._launch = launch or launcher(find_python(settings.python))
        self._random = random or Random()
        self._adapters = EngineAdapters[str](adapters_max=settings.adapters_max, is_enabled=settings.enable_lora)
        self._retired: dict[str, str] = {}
        self._legs: dict[int, SglangLeg] = {}
        self._numbers: dict[int, int] = {}
        self._leg_count = LegCount()
        self._is_changing_role = False
        self._next = itertools.count(1)
        self._calls: dict[int, asyncio.Future[CallResult]] = {}
        self._load = LoadRecord()
        self._outputs = StepOutputBuffer(OUTPUT_BUFFER_STEPS)
        self._events = KvEventBuffer(KV_EVENT_BUFFER_BLOCKS, self._request_snapshot)
        self.kv_paths = KvPaths(pull_timeout_s=settings.pull_timeout_s)
        """Empty: both engines of a rendezvous report its failure."""
        self._process: HostProcess | None = None
        self._link: HostLink | None = None
        self._ready: Ready | None = None
        self._failure: MeshError | None = None
        self._is_closing = False
        self._resuming: asyncio.Task[None] | None = None

    # ---- the Engine interface ----

    async def start(self) -> None:
        if self._link is not None:
            raise InvalidRequestError("the engine has already been started")
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._link = HostLink(self._receive, self._ended)
        try:
            async with asyncio.timeout(self.settings.start_timeout_s):
                await self._start_process(self._link)
                if address := self.describe().rendezvous_address:
                    await wait_registered(address)
        except TimeoutError as error:
            await self._kill()
            raise UnavailableError("SGLang did not start in time", reason="engine_start_failed") from error
        except BaseException:
            await self._kill()
            raise

    async def _start_process(self, link: HostLink) -> None:
        async with listening(link) as path:
            self._process = await self._launch((path,))
            ending = asyncio.create_task(self._process.wait())
            try:
                await asyncio.wait((link.connected, ending), return_when=asyncio.FIRST_COMPLETED)
                if not link.connected.done():
                    raise UnavailableError(
                        f"SGLang's process ended with status {ending.result()} before it connected; is SGLang installed? See the"
                        " worker's log",
                        reason="engine_missing",
                    )
                link.send(Start(_plain(self.settings)))
                await self._started
            finally:
                ending.cancel()

    def _take_ready(self, ready: Ready) -> None:
        self._ready = ready
        self._describe(ready)
        self._load = LoadRecord(
            kv_blocks_free=ready.kv_blocks_total,
            kv_blocks_total=ready.kv_blocks_total,
            running_requests_max=ready.running_requests_max,
        )
        if not self._started.done():
            self._started.set_result(None)

    def _describe(self, ready: Ready) -> None:
        """The engine in its present role."""
        settings = self.settings
        self._card = model_card(ready, settings)
        moves_kv = settings.mode == "null" or settings.transfer_backend != "fake"
        self._intake = SglangIntake(
            ready=ready, card=self._card, mode=settings.mode, moves_kv=moves_kv, random=self._random
        )
        address = f"{settings.bootstrap_host}:{ready.bootstrap_port}" if settings.mode == "prefill" else ""
        self._description = EngineDescription(
            model=self._card,
            capabilities=capabilities(
                settings,
                version=ready.version,
                has_tokenizer=ready.has_tokenizer,
                honors_seeds=ready.honors_seeds,
                is_embedding=ready.is_embedding,
            ),
            role=Role(settings.role),
            block_size_tokens=ready.block_size_tokens,
            kv_blocks_total=ready.kv_blocks_total,
            kv_compatibility_hash=kv_hash(ready),
            lease_s=settings.lease_s,
            rendezvous_address=address,
            requires_prefill=settings.mode == "decode",
            profile=PerformanceProfile(kv_bytes_per_token=max(1, ready.kv_bytes_per_token)),
        )

    def describe(self) -> EngineDescription:
        model = dataclasses.replace(self._card, adapters=self._adapters.names())
        return dataclasses.replace(self._description, model=model)

    def submit_nowait(self, request: EngineRequest) -> None:
        link, ready = self._running()
        if self._is_changing_role:
            raise UnavailableError("the worker is changing its role", reason="role_changed")
        if request.key in self._numbers:
            raise InvalidRequestError(f"key {request.key} is in use", field="key")
        if len(self._legs) >= ready.running_requests_max + self.settings.waiting_requests_max:
            raise OverloadedError("too many requests are waiting", retry_after_s=OVERLOAD_RETRY_S)
        if request.generation.adapter and not self.settings.enable_lora:
            raise UnsupportedError("the engine was started without --sglang-enable-lora", field="generation.adapter")
        # SGLang knows adapters by their identity.
        adapter_id = self._adapters.get(request.generation.adapter) or ""
        number = next(self._next)
        message = self._intake.message(request, number=number, adapter_id=adapter_id)
        self._legs[number] = SglangLeg(
            request=request, number=number, is_in_handoff=self.settings.mode != "null", adapter_id=adapter_id
        )
        self._numbers[request.key] = number
        self._leg_count.update(self._legs)
        link.send(message)

    def cancel_nowait(self, key: int) -> None:
        number = self._numbers.get(key)
        if number is not None and self._link is not None:
            self._legs[number].is_cancelled = True
            self._link.send(Cancel(number))

    def release_nowait(self, handle_id: str) -> bool:
        """Returns False: this engine hands out no handles."""
        return False

    def leased_handles(self) -> int:
        """0: this engine hands out no handles."""
        return 0

    def kv_source(self, handle: KvHandle) -> str:
        """Nothing: a rendezvous has no handles. See Engine."""
        return ""

    def load(self) -> LoadRecord:
        return self._load

    @property
    def is_responsive(self) -> bool:
        return self._link is None or self._link.silent_s < SILENCE_S

    async def load_adapter(self, name: str, source: str) -> None:
        adapter_id = await asyncio.to_thread(self._adapters.identity, name, source)
        if self._adapters.is_loaded(adapter_id):
            return
        # An adapter that was unloaded while legs used it may still be in the engine.
        if self._retired.pop(adapter_id, None) is None:
            answer = await self._call("load_adapter", name, adapter_id, source)
            if not answer.is_done:
                problem = (answer.problem.splitlines() or ["no reason given"])[-1]
                raise InvalidRequestError(f"SGLang cannot load adapter {name}: {problem}", field="source")
        self._adapters.add(adapter_id, adapter_id)

    async def unload_adapter(self, name: str) -> None:
        """Immediately refuses new legs with the adapter. SGLang unloads it after the last leg that uses it."""
        if adapter_id := self._adapters.remove(name):
            self._retired[adapter_id] = name
            self._remove_retired()

    async def reset_cache(self) -> bool:
        return (await self._call("reset_cache")).is_done

    async def sleep(self, level: int) -> None:
        """Always refused: the transfer backend cannot register the engine's memory again."""
        raise UnsupportedError("SGLang cannot free memory that NIXL has registered", field="level")

    async def wake(self) -> None:
        """Always refused."""
        raise UnsupportedError("this engine does not sleep")

    async def set_role(self, role: Role) -> None:
        """First waits for the legs, and ends the remaining ones after `ROLE_WAIT_S`: frontends continue them elsewhere.

        Refuses new legs during the change. Evicts the cache. A cancel leaves the role, or takes effect when the role has changed.
        """
        if role is Role(self.settings.role):
            return
        if role not in self._description.capabilities.roles:
            raise UnsupportedError(f"this engine cannot serve the {role} pool", field="role")
        self._is_changing_role = True
        try:
            await end_legs(self._leg_count, ROLE_WAIT_S, self._move_legs)
            switching = asyncio.create_task(self._switch(role), name="role-switch")
            try:
                await asyncio.shield(switching)
            finally:
                await asyncio.wait((switching,))
        finally:
            self._is_changing_role = False

    def _move_legs(self) -> None:
        for leg in self._legs.values():
            leg.is_moved = True
            if self._link is not None:
                self._link.send(Cancel(leg.number))

    async def _switch(self, role: Role) -> None:
        _, ready = self._running()
        try:
            await switch(self._call, role)
        except TimeoutError as error:
            await self._kill()
            raise LostError("the engine did not answer while it changed its role", reason="engine_silent") from error
        self.settings = dataclasses.replace(self.settings, role=role.value)
        self._describe(ready)
        if address := self._description.rendezvous_address:
            await wait_registered(address)

    async def aclose(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        # This side ends the legs itself, because `_take_step` ignores what the process still sends.
        finishes = [cancelled(leg) for leg in self._legs.values()]
        self._forget_all()
        if finishes:
            self._outputs.put_nowait(StepOutput(step=self._load.step, keys=[], token_ids=[], finishes=finishes))
        self._outputs.close_nowait(self._failure)
        self._events.close_nowait()
        await self._kill()

    # ---- messages ----

    def _receive(self, message: FromHost) -> None:
        match message:
            case HostStep():
                self._take_step(message)
            case CallResult():
                if (call := self._calls.pop(message.call_id, None)) is not None and not call.done():
                    call.set_result(message)
            case Snapshot():
                self._events.replace(kv_events(message.kv_changes))
            case Ready():
                self._take_ready(message)
            case Failed():
                self._fail(message)

    def _take_step(self, step: HostStep) -> None:
        if self._is_closing:
            return
        # Before the finishes of the same step, which report these counts.
        for begun in step.begun:
            if (leg := self._legs.get(begun.number)) is not None:
                leg.begin(begun)
                if not leg.request.is_internal:
                    self._count_prompt(leg)
        output = self._output(step)
        # After `_output`, which adds the ended legs' tokens to the counters.
        self._load = self._record(step.load)
        if output.keys or output.finishes or output.prompt_logprobs:
            self._outputs.put_nowait(output)
            self._pause_if_full()
        if step.kv_changes:
            self._events.put_nowait(kv_events(step.kv_changes))
        if step.finished:
            self._remove_retired()

    def _output(self, step: HostStep) -> StepOutput:
        keys: list[int] = []
        counts: list[int] = []
        token_ids: list[int] = []
        logprobs, start = {}, 0
        for number, count in zip(step.numbers, step.counts, strict=True):
            leg = self._legs.get(number)
            # The token of a prefill leg comes from the decode worker.
            if leg is not None and not leg.is_prefill:
                keys.append(leg.request.key)
                counts.append(count)
                token_ids += step.token_ids[start : start + count]
                leg.output_tokens += count
                if (entries := asked_logprobs(leg, step.logprobs)) is not None:
                    logprobs[leg.request.key] = entries
            start += count
        prompt_logprobs = {
            leg.request.key: token_logprobs(entries, leg.request.generation.sampling.prompt_logprobs)
            for number, entries in step.prompt_logprobs.items()
            if (leg := self._legs.get(number)) is not None
        }
        return StepOutput(
            step=step.load.step,
            keys=keys,
            token_ids=token_ids,
            counts=None if all(count == 1 for count in counts) else counts,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finishes=[leg.finish(end) for end in step.finished if (leg := self._take_leg(end.number)) is not None],
        )

    def _take_leg(self, number: int) -> SglangLeg | None:
        leg = self._legs.pop(number, None)
        if leg is not None:
            del self._numbers[leg.request.key]
            self._leg_count.update(self._legs)
            if not leg.request.is_internal:
                total = self._load.output_tokens_total + leg.output_tokens
                self._load = dataclasses.replace(self._load, output_tokens_total=total)
        return leg

    def _count_prompt(self, leg: SglangLeg) -> None:
        load, transferred = self._load, leg.transferred_tokens
        local = 0 if transferred else leg.cached_tokens
        self._load = dataclasses.replace(
            load,
            prompt_tokens_total=load.prompt_tokens_total + leg.prompt_tokens - local - transferred,
            cached_tokens_total=load.cached_tokens_total + local,
            transferred_tokens_total=load.transferred_tokens_total + transferred,
        )

    def _record(self, load: HostLoad) -> LoadRecord:
        assert self._ready is not None
        total, size = self._ready.kv_blocks_total, self._ready.block_size_tokens
        used = min(total, -(-load.kv_tokens_used // size))
        lost = load.kv_tokens_unaccounted
        return dataclasses.replace(
            self._load,
            step=load.step,
            step_s=load.step_s,
            running_requests=load.running_requests,
            waiting_requests=load.waiting_requests,
            waiting_prompt_tokens=load.waiting_prompt_tokens,
            kv_blocks_used=used,
            kv_blocks_free=total - used,
            preempted_requests_total=load.preempted_requests_total,
            bootstrapping_requests=load.bootstrapping_requests,
            sending_requests=load.sending_requests,
            preallocating_requests=load.preallocating_requests,
            receiving_requests=load.receiving_requests,
            retracted_requests=load.retracted_requests,
            pulling_requests=load.receiving_requests,
            kv_blocks_cached=load.kv_tokens_cached // size,
            kv_blocks_held=used,
            # SGLang says it about an idle engine only.
            kv_blocks_unaccounted=None if lost is None else -(-lost // size),
        )

    def _pause_if_full(self) -> None:
        """Stops reading while the consumer lags behind, so that the engine pauses."""
        if self._outputs.has_room or self._link is None or self._resuming is not None:
            return
        self._link.pause()
        self._resuming = asyncio.create_task(self._resume_with_room(self._link))

    async def _resume_with_room(self, link: HostLink) -> None:
        await self._outputs.wait_room()
        self._resuming = None
        link.resume()

    def _request_snapshot(self) -> None:
        if self._link is not None:
            self._link.send(Call(0, "snapshot"))

    def _remove_retired(self) -> None:
        used = {leg.adapter_id for leg in self._legs.values()} if self._retired else set()
        for adapter_id, name in list(self._retired.items()):
            if adapter_id not in used and self._link is not None:
                del self._retired[adapter_id]
                self._link.send(Call(next(self._next), "unload_adapter", (name, adapter_id, "")))

    async def _call(self, operation: str, *arguments: str) -> CallResult:
        """Runs an operation between two steps. Cancelling the caller does not stop it."""
        link, _ = self._running()
        call_id = next(self._next)
        answer: asyncio.Future[CallResult] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        link.send(Call(call_id, operation, arguments))
        return await answer

    # ---- ends ----

    def _running(self) -> tuple[HostLink, Ready]:
        if self._failure is not None:
            raise UnavailableError("the engine has died", reason="engine_dead")
        if self._link is None or self._ready is None or self._is_closing:
            raise UnavailableError("the engine is not running", reason="engine_not_running")
        return self._link, self._ready

    def _fail(self, failed: Failed) -> None:
        """The process says why it ends."""
        _log.error("engine_failed", kind=failed.kind, detail=failed.message)
        if not self._started.done():
            self._started.set_exception(start_failure(failed))

    def _ended(self) -> None:
        """The process is gone. Legs end with the consumer's LostError."""
        if not self._started.done():
            self._started.set_exception(
                UnavailableError(
                    "SGLang's process ended while it started; see the worker's log", reason="engine_start_failed"
                )
            )
        elif self._ready is not None and not self._is_closing:
            self._failure = LostError("the SGLang engine died", reason="engine_died")
            self._forget_all()
            self._outputs.close_nowait(self._failure)
            self._events.close_nowait()

    def _forget_all(self) -> None:
        self._legs.clear()
        self._numbers.clear()
        self._leg_count.update(self._legs)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(UnavailableError("the engine has ended", reason="engine_dead"))
        self._calls.clear()

    async def _kill(self) -> None:
        """Ends the process. Device memory and ports are free afterwards."""
        if self._resuming is not None:
            self._resuming.cancel()
        if self._link is not None:
            self._link.close()
        if self._process is None:
            return
        self._process.kill()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            _log.warning("engine_process_left", timeout_s=CLOSE_TIMEOUT_S)


def _plain(settings: SglangSettings) -> dict[str, object]:
    """Returns the settings' fields as values that msgpack can carry."""
    return {**dataclasses.asdict(settings), "engine_arguments": dict(settings.engine_arguments)}


def start_failure(failed: Failed) -> MeshError:
    """Returns the error that `start` raises."""
    if failed.kind in ("ImportError", "ModuleNotFoundError"):
        return UnavailableError(
            f'SGLang cannot be imported: {failed.message}; `make up ARGS="--engine sglang"` installs it',
            reason="engine_missing",
        )
    if failed.kind in SETTINGS_ERRORS:
        return InvalidRequestError(
            f"SGLang refused its settings: {failed.message}", field="sglang", reason="invalid_settings"
        )
    return InternalError(f"SGLang did not start: {failed.message}", reason="engine_start_failed")
