"""The simulated engine: runs the scheduler's steps on a clock, with real bytes behind the KV handles."""

import asyncio
from dataclasses import replace
from random import Random, SystemRandom

from xxhash import xxh3_64_hexdigest

from kvmesh.clock import Clock
from kvmesh.core import Capabilities, Handoff, KvHandle, LoadRecord, ModelCard, Role
from kvmesh.engines.base import EngineDescription, EngineRequest
from kvmesh.engines.loads import BlockCount, HeldBlocks
from kvmesh.engines.output_buffers import BufferedEngine, KvEventBuffer, StepOutputBuffer
from kvmesh.engines.simulated.handles import FORMAT, unpack
from kvmesh.engines.simulated.model_card import TokenRange, read_card
from kvmesh.engines.simulated.pulls import RELEASED, Pulls
from kvmesh.engines.simulated.rendezvous.exchange import RendezvousExchange
from kvmesh.engines.simulated.rendezvous.wire import Wire
from kvmesh.engines.simulated.scheduler import Scheduler
from kvmesh.engines.simulated.settings import SimulatedSettings
from kvmesh.engines.simulated.step import Step
from kvmesh.engines.simulated.tokens import LOGPROBS_MAX
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
from kvmesh.kv.transport import KvTransport

_log = event_logger(__name__)

VERSION = "1"
ADAPTER_CHARACTERS_MAX = 256
ADAPTERS_MAX = 64
FEATURES = (
    "embeddings", "kv_events", "logit_bias", "logprobs", "lora", "priority", "prompt_logprobs", "reset_cache", "seed", "sleep",
    "continued_penalties", "continued_seed",
)  # fmt: skip
WRITER_FEATURES = ("structured_output", "continued_structured_output")


class SimulatedEngine(BufferedEngine):
    """An Engine without a model. Without a `transport` it refuses prefill legs and serves alone.

    The engine starts and closes the transport, and the `wire`, which a rendezvous handoff needs. `paths` None: it has its own.
    `generator` makes the random numbers that distinguish this engine's handles and
    blocks from those of other engines; simulations pass a seeded one. `scheduler` and `token_range` are public for tests.
    """

    def __init__(
        self,
        settings: SimulatedSettings,
        clock: Clock,
        transport: KvTransport | None = None,
        *,
        wire: Wire | None = None,
        paths: KvPaths | None = None,
        generator: Random | None = None,
    ) -> None:
        self.settings = settings
        self._clock = clock
        self._transport = transport
        generator = generator or SystemRandom()
        incarnation = f"{generator.getrandbits(64):016x}"
        self._card, self.token_range = read_card(settings)
        self._compatibility_hash = compatibility_hash(settings, self._card, self.token_range)
        self.scheduler = Scheduler(
            settings,
            self._card,
            self.token_range,
            incarnation=incarnation,
            compatibility_hash=self._compatibility_hash,
            has_transport=transport is not None,
            first_stamp=generator.getrandbits(63),
            paths=paths,
        )
        self._outputs = StepOutputBuffer(settings.output_buffer_steps)
        self._events = KvEventBuffer(settings.kv_event_buffer_blocks, self.scheduler.pool.snapshot_events)
        self._pulls: Pulls | None = None
        self._held_blocks = HeldBlocks()
        if transport is not None:
            self._pulls = Pulls(
                scheduler=self.scheduler,
                transport=transport,
                clock=clock,
                on_change=self._on_pull_change,
                on_defect=self._on_defect,
            )
        self._exchange: RendezvousExchange | None = None
        if self.scheduler.is_rendezvous and self._pulls is not None:
            if wire is None:
                raise InternalError("a rendezvous handoff needs a wire")
            self._exchange = RendezvousExchange(
                scheduler=self.scheduler,
                wire=wire,
                pulls=self._pulls,
                on_change=self._wake,
                on_defect=self._on_defect,
            )
        self._woken = asyncio.Event()
        self._leased = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._step = 0
        self._step_s = 0.0
        self._processing: Step | None = None
        """The step whose results are being processed while the next one runs."""
        self._description: EngineDescription | None = None
        self._described: tuple[frozenset[str], Role] | None = None
        self._death: LostError | None = None
        self._is_asleep = False
        self._is_closed = False
        self._is_listening = False

    async def start(self) -> None:
        """See Engine. A prefill engine waits for its transport, without which it can do nothing.

        A decode engine serves immediately and starts its transport `kv_transport_delay_s` later, because loading NIXL occupies a core for
        more than a second, just when the first requests arrive.
        """
        self._tasks.append(asyncio.create_task(self._run(), name="simulated-engine"))
        self._tasks.append(asyncio.create_task(self._end_leases(), name="simulated-leases"))
        if self._transport is None:
            self.scheduler.peer = b""  # No prefill leg needs it, except those that move no KV.
            return
        if self._role is Role.PREFILL:
            await self._start_transport(self._transport, 0.0)
            if self._exchange is not None and self._death is None:
                await self._exchange.serve()
            return
        starting = self._start_transport(self._transport, self.settings.kv_transport_delay_s)
        self._tasks.append(asyncio.create_task(starting, name="kv-transport-start"))

    async def _start_transport(self, transport: KvTransport, delay_s: float) -> None:
        try:
            if delay_s:
                await self._clock.sleep(delay_s)
            await transport.start(self.scheduler.memory.buffer, self._on_message)
        except MeshError as error:
            _log.error("kv_transport_failed", reason=error.reason, detail=error.message)
            self._fail(error)
            return
        self.scheduler.peer = transport.metadata
        self._wake()

    def describe(self) -> EngineDescription:
        """See Engine. Callers read it with every request, but only adapters and the role change it, so it is cached."""
        state = (self.scheduler.adapters, self._role)
        if self._description is None or self._described != state:
            self._described = state
            self._description = EngineDescription(
                model=replace(self._card, adapters=sorted(self.scheduler.adapters)),
                capabilities=self._capabilities(),
                role=self._role,
                block_size_tokens=self.settings.block_size_tokens,
                kv_blocks_total=self.settings.kv_blocks,
                kv_compatibility_hash=self._compatibility_hash,
                lease_s=self.settings.lease_s,
                rendezvous_address=self._exchange.address if self._exchange is not None else "",
                requires_prefill=self.scheduler.is_rendezvous and self._role is Role.DECODE,
                profile=self.settings.performance(),
                removes_kv_from_ends=True,
            )
        return self._description

    def _capabilities(self) -> Capabilities:
        can_write = self.scheduler.can_write
        if self.scheduler.is_rendezvous:
            return rendezvous_capabilities(self._role, has_transport=self._transport is not None, can_write=can_write)
        return capabilities(has_transport=self._transport is not None, can_write=can_write)

    @property
    def _role(self) -> Role:
        return self.scheduler.role

    def submit_nowait(self, request: EngineRequest) -> None:
        self._check_running()
        self.scheduler.submit(request, self._clock.now())
        self._flush_signals()
        self._wake()

    def _check_running(self) -> None:
        if self._is_closed or self._is_asleep or self._death is not None:
            raise UnavailableError("the engine is closed, asleep or dead", reason="engine_unavailable")

    def cancel_nowait(self, key: int) -> None:
        """See Engine. Frees blocks immediately; those of a pull when the pull has stopped."""
        self.scheduler.cancel(key)
        self._settle()
        self._wake()

    def release_nowait(self, handle_id: str) -> bool:
        is_known = self.scheduler.leases.end(handle_id)
        self._after_lease_change()
        return is_known

    def leased_handles(self) -> int:
        return len(self.scheduler.leases)

    def _on_message(self, message: bytes) -> None:
        if message.startswith(RELEASED):
            for handle_id in message[len(RELEASED) :].decode().split():
                self.release_nowait(handle_id)

    def _after_lease_change(self) -> None:
        self._is_listening = bool(len(self.scheduler.leases))
        if self._is_listening:
            self._leased.set()
        if self._transport is not None:
            self._transport.expect_messages(self._is_listening)
        self._wake()

    def load(self) -> LoadRecord:
        scheduler = self.scheduler
        running, waiting, waiting_tokens = scheduler.counts()
        available, total = scheduler.pool.available, scheduler.pool.total
        return LoadRecord(
            step=self._step,
            taken_at_s=self._clock.wall(),
            running_requests=running,
            waiting_requests=waiting,
            waiting_prompt_tokens=waiting_tokens,
            kv_blocks_used=total - available,
            kv_blocks_free=available,
            kv_blocks_total=total,
            kv_blocks_leased=scheduler.pool.leased,
            running_requests_max=self.settings.running_requests_max,
            step_s=self._step_s,
            prompt_tokens_total=scheduler.prompt_tokens_total,
            output_tokens_total=scheduler.output_tokens_total,
            cached_tokens_total=scheduler.cached_tokens_total,
            transferred_tokens_total=scheduler.transferred_tokens_total,
            preempted_requests_total=scheduler.preempted_total,
            bootstrapping_requests=scheduler.prefills.bootstrapping,
            sending_requests=scheduler.prefills.sending,
            preallocating_requests=scheduler.decodes.preallocating,
            receiving_requests=scheduler.decodes.receiving,
            retracted_requests=scheduler.decodes.retracted,
            pulling_requests=self._pulls.in_flight if self._pulls is not None else 0,
            **self._held_blocks.load_fields(
                free=available,
                used=total - available,
                total=total,
                count=self._count_blocks,
                now_s=self._clock.now(),
            ),
            **scheduler.paths.load_fields(),
        )

    def _count_blocks(self) -> BlockCount:
        pulled = self._pulls.blocks() if self._pulls is not None else ()
        return BlockCount(held=self.scheduler.held_blocks(pulled), cached=self.scheduler.pool.counts().cached)

    @property
    def kv_paths(self) -> KvPaths:
        return self.scheduler.paths

    def kv_source(self, handle: KvHandle) -> str | bytes:
        """NIXL's metadata. See Engine."""
        description = self.describe()
        return unpack(handle, description.kv_compatibility_hash, description.block_size_tokens).peer

    async def load_adapter(self, name: str, source: str) -> None:
        """An adapter is only a name; `source` is ignored."""
        if not 0 < len(name) <= ADAPTER_CHARACTERS_MAX:
            raise InvalidRequestError(
                f"an adapter's name must have 1 to {ADAPTER_CHARACTERS_MAX} characters", field="name"
            )
        adapters = self.scheduler.adapters | {name}
        if len(adapters) > ADAPTERS_MAX:
            raise OverloadedError(f"{len(adapters) - 1} adapters are already loaded", reason="adapters_full")
        self.scheduler.adapters = adapters

    async def unload_adapter(self, name: str) -> None:
        """See Engine. Running requests keep the adapter."""
        self.scheduler.adapters -= {name}

    async def reset_cache(self) -> bool:
        pool = self.scheduler.pool
        if pool.available < pool.total:
            return False
        pool.evict_idle()
        self._publish_events()
        return True

    async def sleep(self, level: int) -> None:
        """Pauses all requests and evicts cached blocks without a holder. All levels from 1 do the same."""
        if level < 1:
            raise UnsupportedError("sleep levels begin at 1", field="level")
        self._is_asleep = True
        self.scheduler.pool.evict_idle()
        self._publish_events()

    async def wake(self) -> None:
        self._is_asleep = False
        self._wake()

    async def set_role(self, role: Role) -> None:
        """See Engine. Requests in flight continue."""
        if role not in self._capabilities().roles:
            raise UnsupportedError(f"this engine does not support the role {role}", field="role")
        self.scheduler.role = role

    async def aclose(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.scheduler.cancel_all()
        self._settle()
        if self._exchange is not None:
            await self._exchange.aclose()
        if self._pulls is not None:
            await self._pulls.aclose()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # In this order: the tokens of the last step before the finishes of the legs that were cancelled above.
        if self._processing is not None and self._death is None:
            self._deliver(self._processing)
        if (finishes := self.scheduler.take_finishes()) and self._death is None:
            self._step += 1
            self._outputs.put_nowait(Step(finishes=finishes).output(self._step))
        self._publish_events()
        self._events.close_nowait()
        self._outputs.close_nowait(self._death)
        if self._transport is not None:
            # Last, because pulls and releases use it.
            await self._transport.aclose()

    def _on_defect(self, error: BaseException) -> None:
        if not self._is_closed:
            _log.error("simulated_engine_failed", exc_info=error)
            self._fail(MeshError(f"{type(error).__name__} in the engine"))

    def _fail(self, error: MeshError) -> None:
        if self._death is None:
            self._death = LostError(error.message, reason=error.reason)
        if self._exchange is not None:
            self._exchange.close_nowait()
        self._events.close_nowait()
        self._outputs.close_nowait(self._death)
        self._wake()

    # The engine's task

    async def _run(self) -> None:
        try:
            while self._death is None:
                # No next step follows with which the processing could overlap.
                if self._processing is not None and (self._is_asleep or not self.scheduler.has_work):
                    await self._end_processing()
                elif self._is_asleep:
                    # A sleeping engine makes no step but answers cancels.
                    if finishes := self.scheduler.take_finishes():
                        self._deliver(Step(finishes=finishes))
                    await self._wait_woken()
                elif not self.scheduler.has_work:
                    await self._wait_woken()
                elif not self._outputs.has_room:
                    await self._outputs.wait_room()
                else:
                    await self._step_once()
        except Exception as error:  # noqa: BLE001  # The boundary of the task.
            self._on_defect(error)

    async def _step_once(self) -> None:
        self._woken.clear()
        # Cleared before the step: what arrives after the scheduler has decided must wake the engine again.
        step = self.scheduler.step(self._clock.now())
        self._settle(step)
        if not step.has_progress:
            await self._end_processing()
            await self._wait_woken()
            return
        factor = self.settings.time_factor
        self._step_s = factor * self.settings.step_s(
            prefill_tokens=step.prefill_tokens,
            decode_requests=step.decode_requests,
            prompts=step.prompts,
            token_pairs=step.token_pairs,
        )
        if factor and self.settings.event_loop == "overlap":
            await self._overlap(step)
            return
        try:
            if factor:
                await self._clock.sleep(self._step_s)
        finally:
            # `aclose` interrupts the sleep, but the output is still delivered. Legs that were cancelled during the sleep finish with
            # this step, since the next step's output is a whole step away.
            step.finishes.extend(self.scheduler.take_finishes())
            self._deliver(step)
        # Without simulated time nothing else in this loop yields to other tasks.
        if not factor:
            await asyncio.sleep(0)

    async def _overlap(self, step: Step) -> None:
        """Runs a step while the results of the one before are processed. Its own are processed during the next one."""
        started_s = self._clock.now()
        try:
            await self._end_processing()
            await self._clock.sleep(max(0.0, started_s + self._step_s - self._clock.now()))
        finally:
            # Also after a cancel: `aclose` then delivers the step.
            self._processing = step

    async def _end_processing(self) -> None:
        """Waits until the results of the step before are processed, and delivers them. There are none in the normal loop."""
        if self._processing is not None:
            try:
                await self._clock.sleep(self.settings.time_factor * self.settings.processing_s)
            finally:
                step, self._processing = self._processing, None
                self._deliver(step)

    def _settle(self, step: Step | None = None) -> None:
        """Carries out what a step or a cancel decided: starts pulls, stops pulls, sends releases and messages of a rendezvous."""
        self._flush_signals()
        if self._pulls is None:
            return
        if step is not None:
            for order in step.pulls:
                self._pulls.start_nowait(order)
        if self.scheduler.aborted_pulls or self.scheduler.releases:
            self._pulls.settle_nowait()
        if self._is_listening != bool(len(self.scheduler.leases)):
            self._after_lease_change()

    def _flush_signals(self) -> None:
        if self._exchange is not None:
            self._exchange.flush_nowait()
        else:
            self.scheduler.signals.clear()

    def _on_pull_change(self) -> None:
        self._flush_signals()
        self._wake()

    def _deliver(self, step: Step) -> None:
        self._step += 1
        self._publish_events()
        if step.has_output:
            self._outputs.put_nowait(step.output(self._step))

    def _publish_events(self) -> None:
        if events := self.scheduler.pool.take_events():
            self._events.put_nowait(events)

    async def _wait_woken(self) -> None:
        self._publish_events()
        await self._woken.wait()
        self._woken.clear()

    async def _end_leases(self) -> None:
        """Ends expired leases, also while the engine makes no steps."""
        while True:
            ends_at_s = self.scheduler.leases.next_end_s()
            if ends_at_s is None:
                self._leased.clear()
                await self._leased.wait()
                continue
            await self._clock.sleep(max(ends_at_s - self._clock.now(), 0.0))
            if self.scheduler.leases.expire(self._clock.now()):
                self._after_lease_change()

    def _wake(self) -> None:
        self._woken.set()


def capabilities(*, has_transport: bool, can_write: bool) -> Capabilities:
    """Returns the capability record. `can_write`: there is a tokenizer, which constrained answers need."""
    return Capabilities(
        engine="simulated",
        engine_version=VERSION,
        handoffs=(Handoff.SEQUENTIAL,) if has_transport else (),
        roles=(Role.PREFILL, Role.DECODE) if has_transport else (Role.DECODE,),
        features=(*FEATURES, *WRITER_FEATURES) if can_write else FEATURES,
        logprobs_max=LOGPROBS_MAX,
    )


def rendezvous_capabilities(role: Role, *, has_transport: bool, can_write: bool) -> Capabilities:
    """Returns the record of an engine that serves one leg of each request. It announces no handoff if it moves no KV."""
    return replace(
        capabilities(has_transport=has_transport, can_write=can_write),
        handoffs=(Handoff.RENDEZVOUS,) if has_transport else (),
        roles=(role,),
        features=[feature for feature in FEATURES if feature != "embeddings"]
        + (["structured_output"] if can_write else []),
    )


def compatibility_hash(settings: SimulatedSettings, card: ModelCard, token_range: TokenRange) -> str:
    """Returns a hash of everything that two engines must have in common to read each other's blocks."""
    parts = (
        FORMAT, VERSION, card.name, card.revision, card.vocabulary_size, token_range.first_id, token_range.span,
        settings.block_size_tokens, settings.kv_bytes_per_block,
    )  # fmt: skip
    return xxh3_64_hexdigest("\0".join(str(part) for part in parts).encode())
