"""The simulated engine: the scheduler's steps on a clock, with real bytes behind the KV handles."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from random import Random, SystemRandom

from xxhash import xxh3_64_hexdigest

from kvmesh.clock import Clock
from kvmesh.core import Capabilities, Handoff, KvEvent, LoadRecord, ModelCard, Role
from kvmesh.engines.base import EngineDescription, EngineRequest, StepOutput
from kvmesh.engines.simulated.fault_injection import Die, Fault, FaultState
from kvmesh.engines.simulated.handles import FORMAT
from kvmesh.engines.simulated.model_card import TokenRange, read_card
from kvmesh.engines.simulated.output_buffers import EventOutlet, StepOutlet
from kvmesh.engines.simulated.pulls import RELEASED, Pulls
from kvmesh.engines.simulated.scheduler import Scheduler
from kvmesh.engines.simulated.settings import SimulatedSettings
from kvmesh.engines.simulated.step import Step
from kvmesh.engines.simulated.tokens import LOGPROBS_MAX
from kvmesh.errors import InvalidRequestError, MeshError, OverloadedError, UnavailableError, UnsupportedError
from kvmesh.kv.transport import KvTransport

log = logging.getLogger(__name__)

VERSION = "1"
ADAPTER_CHARACTERS_MAX = 256
ADAPTERS_MAX = 64
FEATURES = (
    "embeddings", "kv_events", "logit_bias", "logprobs", "lora", "priority", "prompt_logprobs", "reset_cache", "seed", "sleep",
)  # fmt: skip


class SimulatedEngine:
    """An Engine without a model. `transport` None: it serves alone, prefill legs are refused.

    The engine owns the transport: it starts it in the background, so that serving begins at once, and closes it.
    `generator` makes what tells this incarnation's handles and blocks from others'; simulations give a seeded one.
    """

    def __init__(
        self,
        settings: SimulatedSettings,
        clock: Clock,
        transport: KvTransport | None = None,
        *,
        generator: Random | None = None,
    ) -> None:
        self.settings = settings
        self._clock = clock
        self._transport = transport
        self._role = Role(settings.role)
        self._faults = FaultState(settings.seed)
        self._random = generator or SystemRandom()
        self._incarnation = f"{self._random.getrandbits(64):016x}"
        self._card, self._range = read_card(settings)
        self._compatibility = compatibility_hash(settings, self._card, self._range)
        self._scheduler = self._make_scheduler()
        self._outlet = StepOutlet(settings.output_buffer_steps)
        self._events = EventOutlet(settings.kv_event_buffer_blocks, self._scheduler.pool.snapshot_events)
        self._pulls: Pulls | None = None
        if transport is not None:
            self._pulls = Pulls(
                scheduler=self._scheduler,
                transport=transport,
                timeout_s=settings.pull_timeout_s,
                on_change=self._wake,
                on_defect=self._on_defect,
            )
        self._woken = asyncio.Event()
        self._leased = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._step = 0
        self._step_s = 0.0
        self._description: EngineDescription | None = None
        self._described: tuple[frozenset[str], Role] | None = None
        self._is_asleep = False
        self._is_closed = False
        self._is_listening = False

    def _make_scheduler(self) -> Scheduler:
        return Scheduler(
            self.settings,
            self._card,
            self._range,
            incarnation=self._incarnation,
            compatibility_hash=self._compatibility,
            has_transport=self._transport is not None,
            first_stamp=self._random.getrandbits(63),
        )

    @property
    def token_range(self) -> TokenRange:
        """The ids this engine generates, for `expected_tokens`."""
        return self._range

    @property
    def scheduler(self) -> Scheduler:
        """The decisions behind the engine, for tests and simulations that look inside."""
        return self._scheduler

    def inject(self, fault: Fault) -> None:
        self._faults.inject(fault)
        if isinstance(fault, Die):
            self._fail(self._faults.death)
            if self._transport is not None:
                # Peers must not be able to read the memory of a dead process.
                self._tasks.append(asyncio.create_task(self._transport.aclose(), name="kv-transport-death"))
        self._wake()

    async def start(self) -> None:
        """Starts stepping. A prefill engine can do nothing without its transport and waits for it.

        A decode engine serves at once; its transport comes up beside it after `kv_transport_delay_s`, since loading NIXL
        takes a core for more than a second, just when the first requests come.
        """
        self._tasks.append(asyncio.create_task(self._run(), name="simulated-engine"))
        self._tasks.append(asyncio.create_task(self._end_leases(), name="simulated-leases"))
        if self._transport is None:
            return
        if self._role is Role.PREFILL:
            await self._start_transport(self._transport, 0.0)
            return
        starting = self._start_transport(self._transport, self.settings.kv_transport_delay_s)
        self._tasks.append(asyncio.create_task(starting, name="kv-transport-start"))

    async def _start_transport(self, transport: KvTransport, delay_s: float) -> None:
        try:
            if delay_s:
                await self._clock.sleep(delay_s)
            await transport.start(self._scheduler.memory.buffer, self._on_message)
        except MeshError as error:
            log.error("kv_transport_failed", extra={"data": {"reason": error.reason, "detail": error.message}})
            self._fail(error)
            return
        self._scheduler.peer = transport.metadata
        self._wake()

    def describe(self) -> EngineDescription:
        """What it is; the same before and after `start`, loaded adapters aside."""
        now = (self._scheduler.adapters, self._role)
        if self._description is None or self._described != now:
            # Read with every request, but changed only by adapters and roles.
            self._description, self._described = self._describe(), now
        return self._description

    def _describe(self) -> EngineDescription:
        return EngineDescription(
            model=self._card_now(),
            capabilities=self._capabilities(),
            role=self._role,
            block_size_tokens=self.settings.block_size_tokens,
            kv_blocks_total=self.settings.kv_blocks,
            kv_compatibility_hash=self._compatibility,
            lease_s=self.settings.lease_s,
            profile=self.settings.performance(),
            removes_kv_from_ends=True,
        )

    def _card_now(self) -> ModelCard:
        card = self._card
        return ModelCard(
            name=card.name,
            source=card.source,
            context_tokens_max=card.context_tokens_max,
            vocabulary_size=card.vocabulary_size,
            revision=card.revision,
            eos_token_ids=card.eos_token_ids,
            adapters=sorted(self._scheduler.adapters),
        )

    def _capabilities(self) -> Capabilities:
        return capabilities(has_transport=self._transport is not None, can_write=self._scheduler.can_write)

    def submit_nowait(self, request: EngineRequest) -> None:
        if self._is_closed or self._is_asleep or self._faults.death is not None:
            raise UnavailableError("the engine is closed, asleep or dead", reason="engine_unavailable")
        self._faults.check_submit()
        self._scheduler.submit(request, self._clock.now())
        self._wake()

    def cancel_nowait(self, key: int) -> None:
        """See Engine. Blocks are free at once, those of a pull as soon as it has stopped."""
        self._scheduler.cancel(key)
        self._settle()
        self._wake()

    def release_nowait(self, handle_id: str) -> bool:
        is_known = self._scheduler.leases.end(handle_id)
        self._after_lease_change()
        return is_known

    def leased_handles(self) -> int:
        return len(self._scheduler.leases)

    def _on_message(self, message: bytes) -> None:
        if message.startswith(RELEASED):
            for handle_id in message[len(RELEASED) :].decode().split():
                self.release_nowait(handle_id)

    def _after_lease_change(self) -> None:
        self._is_listening = bool(len(self._scheduler.leases))
        if self._is_listening:
            self._leased.set()
        if self._transport is not None:
            self._transport.expect_messages(self._is_listening)
        self._wake()

    def steps(self) -> AsyncIterator[StepOutput]:
        return self._outlet.outputs()

    async def deliver(self, take: Callable[[StepOutput], None]) -> None:
        await self._outlet.deliver(take)

    def kv_events(self) -> AsyncIterator[Sequence[KvEvent]]:
        """See Engine. A reader that lags gets a cleared event and the present blocks in place of what it missed."""
        return self._events.batches()

    def load(self) -> LoadRecord:
        scheduler = self._scheduler
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
        )

    async def load_adapter(self, name: str, source: str) -> None:
        """An adapter is a name; `source` is not read."""
        if not 0 < len(name) <= ADAPTER_CHARACTERS_MAX:
            raise InvalidRequestError(f"an adapter's name has 1 to {ADAPTER_CHARACTERS_MAX} characters", field="name")
        adapters = self._scheduler.adapters | {name}
        if len(adapters) > ADAPTERS_MAX:
            raise OverloadedError(f"{len(adapters) - 1} adapters are loaded already", reason="adapters_full")
        self._scheduler.adapters = adapters

    async def unload_adapter(self, name: str) -> None:
        """Running requests keep it; new ones are refused."""
        self._scheduler.adapters -= {name}

    async def reset_cache(self) -> bool:
        pool = self._scheduler.pool
        if pool.available < pool.total:
            return False
        pool.forget_idle()
        self._publish_events()
        return True

    async def sleep(self, level: int) -> None:
        """Pauses all requests and evicts cached blocks without a holder, at every level from 1."""
        if level < 1:
            raise UnsupportedError("sleep levels begin at 1", field="level")
        self._is_asleep = True
        self._scheduler.pool.forget_idle()
        self._publish_events()

    async def wake(self) -> None:
        self._is_asleep = False
        self._wake()

    async def set_role(self, role: Role) -> None:
        """See Engine; requests in flight go on."""
        if role not in self._capabilities().roles:
            raise UnsupportedError(f"this engine does not take the role {role}", field="role")
        self._role = role

    async def aclose(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._scheduler.cancel_all()
        self._settle()
        if self._pulls is not None:
            await self._pulls.aclose()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        step = self._scheduler.take_finishes()
        if step.has_output and self._faults.death is None:
            self._step += 1
            self._outlet.put_nowait(step.output(self._step))
        self._publish_events()
        self._events.close_nowait()
        self._outlet.close_nowait(self._faults.death)
        if self._transport is not None:
            await self._transport.aclose()

    # The loop

    async def _run(self) -> None:
        try:
            while self._faults.death is None:
                await self._run_once()
        except Exception as error:  # noqa: BLE001  # The boundary of the loop.
            self._on_defect(error)

    def _on_defect(self, error: BaseException) -> None:
        """Ends the engine with an exception that it cannot handle."""
        if self._is_closed:
            return
        log.error("simulated_engine_failed", exc_info=error)
        self._fail(MeshError(f"{type(error).__name__} in the engine"))

    def _fail(self, error: MeshError | None) -> None:
        self._faults.die_of(error)
        self._events.close_nowait()
        self._outlet.close_nowait(self._faults.death)
        self._wake()

    async def _run_once(self) -> None:
        if self._is_asleep:
            # Cancels are answered while the engine sleeps, without a step.
            if (ended := self._scheduler.take_finishes()).has_output:
                self._deliver(ended)
            await self._wait_woken()
            return
        if not self._scheduler.has_work:
            await self._wait_woken()
            return
        if not self._outlet.has_room:
            await self._outlet.wait_room()
            return
        if (stall_s := self._faults.take_stall_s()) > 0:
            await self._clock.sleep(stall_s)
            return
        self._woken.clear()
        step = self._scheduler.step(self._clock.now())
        self._settle(step)
        if not step.has_progress:
            await self._wait_woken()
            return
        factor = self.settings.time_factor
        self._step_s = factor * self.settings.profile.step_s(step.prefill_tokens, step.decode_requests)
        try:
            if factor:
                await self._clock.sleep(self._step_s)
        finally:
            # Closing interrupts the sleep, but the step's output is delivered. Cancels of that time are answered with it: the
            # next step would hold their finishes back as long again.
            step.finishes.extend(self._scheduler.take_finishes().finishes)
            self._deliver(step)
        if not factor:
            await asyncio.sleep(0)

    def _settle(self, step: Step | None = None) -> None:
        """Passes on what a step or a cancel decided: pulls to begin, pulls to stop, releases to send."""
        if self._pulls is None:
            return
        if step is not None:
            for order in step.pulls:
                self._pulls.start_nowait(order)
            self._lose_handles(step)
        if self._scheduler.aborted_pulls or self._scheduler.releases:
            self._pulls.settle_nowait()
        if self._is_listening != bool(len(self._scheduler.leases)):
            self._after_lease_change()

    def _lose_handles(self, step: Step) -> None:
        for finish in step.finishes:
            if finish.handle is not None and self._faults.takes_handle():
                self._scheduler.lose(finish.handle.handle_id)

    def _deliver(self, step: Step) -> None:
        self._step += 1
        self._publish_events()
        if step.has_output:
            self._outlet.put_nowait(step.output(self._step))

    def _publish_events(self) -> None:
        pool = self._scheduler.pool
        if blocks := pool.event_blocks:
            self._events.put_nowait(pool.take_events(), blocks)

    async def _wait_woken(self) -> None:
        self._publish_events()
        await self._woken.wait()
        self._woken.clear()

    async def _end_leases(self) -> None:
        """Ends leases that are over, whether there are steps or not."""
        while True:
            ends_at_s = self._scheduler.leases.next_end_s()
            if ends_at_s is None:
                self._leased.clear()
                await self._leased.wait()
                continue
            await self._clock.sleep(max(ends_at_s - self._clock.now(), 0.0))
            if self._scheduler.leases.expire(self._clock.now()):
                self._after_lease_change()

    def _wake(self) -> None:
        self._woken.set()


def capabilities(*, has_transport: bool, can_write: bool) -> Capabilities:
    """The capability record. `can_write`: a tokenizer is there, with which constrained answers are written."""
    return Capabilities(
        engine="simulated",
        engine_version=VERSION,
        handoffs=(Handoff.SEQUENTIAL,) if has_transport else (),
        roles=(Role.PREFILL, Role.DECODE) if has_transport else (Role.DECODE,),
        features=(*FEATURES, "structured_output") if can_write else FEATURES,
        logprobs_max=LOGPROBS_MAX,
    )


def compatibility_hash(settings: SimulatedSettings, card: ModelCard, token_range: TokenRange) -> str:
    """Covers everything that two engines must share to read each other's blocks."""
    parts = (
        FORMAT, VERSION, card.name, card.revision, card.vocabulary_size, token_range.first_id, token_range.span,
        settings.block_size_tokens, settings.kv_bytes_per_block,
    )  # fmt: skip
    return xxh3_64_hexdigest("\0".join(str(part) for part in parts).encode())
