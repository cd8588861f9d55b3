"""The TensorRT-LLM engine: the Engine interface on the event loop. The engine runs its model in processes of its own."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvmesh.core import KvHandle, LoadRecord, Role
from kvmesh.engines.adapters import EngineAdapters
from kvmesh.engines.base import EngineDescription, EngineRequest
from kvmesh.engines.loads import share_of_load
from kvmesh.engines.output_buffers import BufferedEngine, KvEventBuffer, StepOutputBuffer
from kvmesh.engines.trtllm.arguments import check_launcher, engine_arguments, loads_tokenizer
from kvmesh.engines.trtllm.description import capabilities, generation_defaults, handle_form, model_card
from kvmesh.engines.trtllm.events import SeedClaims, TrtllmEvents
from kvmesh.engines.trtllm.feeds import pull_events, read_statistics, subscribe_events
from kvmesh.engines.trtllm.intake import TrtllmIntake, first_line
from kvmesh.engines.trtllm.settings import TrtllmSettings
from kvmesh.engines.trtllm.stats import LoadCounts
from kvmesh.engines.trtllm.streams import Streams
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

if TYPE_CHECKING:
    from tensorrt_llm.executor.request import LoRARequest
    from tensorrt_llm.llmapi.llm import LLM

_log = event_logger(__name__)
OVERLOAD_RETRY_S = 0.5
OUTPUT_BUFFER_STEPS = 256
KV_EVENT_BUFFER_BLOCKS = 65536
CLOSE_TIMEOUT_S = 10.0
"""How long closing waits for the engine's processes."""
ADAPTER_TIMEOUT_S = 60.0
"""How long loading an adapter may take."""


class TrtllmEngine(BufferedEngine):
    """One TensorRT-LLM engine, in the process of the worker that is rank 0."""

    def __init__(self, settings: TrtllmSettings, *, now: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._now = now
        self._adapters: EngineAdapters[LoRARequest] = EngineAdapters(
            adapters_max=settings.adapters_max, is_enabled=settings.enable_lora
        )
        self._claims = SeedClaims(settings.block_size_tokens)
        self._translator = TrtllmEvents(settings.block_size_tokens, self._claims)
        self._outputs = StepOutputBuffer(OUTPUT_BUFFER_STEPS)
        self._events = KvEventBuffer(KV_EVENT_BUFFER_BLOCKS, self._translator.snapshot)
        self.kv_paths = KvPaths(pull_timeout_s=settings.pull_timeout_s)
        """Empty: the engine does not say which transfer failed."""
        self._failure: MeshError | None = None
        self._is_closing = False
        self._is_started = False
        self._llm: LLM | None = None
        self._streams: Streams | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Imports the engine and loads the model, on a thread. After a cancel, the thread finishes loading and closes the engine."""
        if self._is_started:
            raise InvalidRequestError("the engine has already been started")
        self._is_started = True
        check_launcher(self._settings, os.environ)
        arguments = engine_arguments(self._settings)
        loading = asyncio.get_running_loop().run_in_executor(None, load_engine, arguments, self._settings.device_ids)
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                # A thread cannot be stopped. After a timeout or a cancel, `shut_down_late` closes what it has loaded.
                self._llm = await asyncio.shield(loading)
            self._describe(self._llm)
        except TimeoutError as error:
            raise UnavailableError("TensorRT-LLM did not start in time", reason="engine_start_failed") from error
        except Exception as error:
            raise start_failure(error) from error
        finally:
            if self._llm is None:
                loading.add_done_callback(shut_down_late)
        self._read_feeds(self._llm)

    def _describe(self, llm: "LLM") -> None:
        import tensorrt_llm

        settings, capacity = self._settings, llm.get_kv_cache_capacity()
        card = model_card(settings, int(capacity["maxNumTokens"]))
        form = handle_form(settings, tensorrt_llm.__version__)
        if int(capacity["tokensPerBlock"]) != settings.block_size_tokens:
            raise InvalidRequestError(
                f"the engine uses blocks of {capacity['tokensPerBlock']} tokens: set block_size_tokens to that",
                field="block_size_tokens",
                reason="invalid_settings",
            )
        self._counts = LoadCounts(
            blocks_total=int(capacity["maxNumBlocks"]), running_requests_max=settings.running_requests_max
        )
        self._description = EngineDescription(
            model=card,
            capabilities=capabilities(settings, version=tensorrt_llm.__version__),
            role=Role(settings.role),
            block_size_tokens=settings.block_size_tokens,
            kv_blocks_total=self._counts.blocks_total,
            kv_compatibility_hash=form.compatibility_hash,
            lease_s=settings.lease_s,
            rendezvous_address=meeting_point(llm.disaggregated_params) if settings.is_generation_first else "",
        )
        self._intake = TrtllmIntake(
            settings=settings,
            card=card,
            form=form,
            has_tokenizer=loads_tokenizer(settings),
            defaults=generation_defaults(settings),
        )
        self._streams = Streams(
            llm,
            intake=self._intake,
            form=form,
            counts=self._counts,
            claims=self._claims,
            now=self._now,
            deliver=self._outputs.put_nowait,
            died=self._die,
        )

    def _read_feeds(self, llm: "LLM") -> None:
        settings = self._settings
        feeds = [read_statistics(llm, self._counts.on_statistics, check=self._check_health)]
        if settings.kv_events == "pull":
            feeds.append(pull_events(llm, self._take_event))
        if settings.kv_events == "push":
            feeds.append(subscribe_events(settings, self._take_event))
        for feed in feeds:
            task = asyncio.create_task(feed)
            task.add_done_callback(self._feed_ended)
            self._tasks.append(task)

    def describe(self) -> EngineDescription:
        """See Engine."""
        return replace(self._description, model=replace(self._description.model, adapters=self._adapters.names()))

    def submit_nowait(self, request: EngineRequest) -> None:
        """See Engine."""
        streams = self._running()
        if request.key in streams.legs:
            raise InvalidRequestError(f"key {request.key} is in use", field="key")
        if len(streams.legs) >= self._settings.running_requests_max + self._settings.waiting_requests_max:
            raise OverloadedError("too many requests are waiting", retry_after_s=OVERLOAD_RETRY_S)
        name = request.generation.adapter
        leg = self._intake.make_leg(
            request, adapter=self._adapters.get(name), identity=self._adapters.identity_of(name), now=self._now()
        )
        try:
            streams.start(leg)
        except RuntimeError as error:
            raise UnavailableError(
                f"TensorRT-LLM does not accept requests: {first_line(error)}", reason="engine_not_running"
            ) from error

    def cancel_nowait(self, key: int) -> None:
        """See Engine."""
        if self._streams is not None:
            self._streams.cancel(key)

    def release_nowait(self, handle_id: str) -> bool:
        """Ends the lease. The engine has no call that frees a handed-over prompt: it does so after `kv_transfer_timeout_ms`."""
        if self._failure is not None or self._is_closing or self._streams is None:
            return False
        return self._counts.release(handle_id, self._now())

    def leased_handles(self) -> int:
        """See Engine, and LoadCounts on when a pull is noticed."""
        return self._counts.leases(self._now())

    def kv_source(self, handle: KvHandle) -> str:
        """Nothing: the engine's handles are opaque. See Engine."""
        return ""

    def rank_loads(self) -> Sequence[LoadRecord]:
        """Divides the engine's report, which covers all ranks. Each rank's requests are its own; other numbers are even shares."""
        ranks = self._settings.data_parallel_size
        if ranks == 1:
            return (self.load(),)
        legs = list(self._streams.legs.values()) if self._streams is not None else []
        records, now = [], self._now()
        for rank in range(ranks):
            own = [leg for leg in legs if leg.request.generation.data_parallel_rank == rank]
            record = self._counts.record(own, now)
            shares = share_of_load(self._counts.record((), now), rank, ranks=ranks)
            records.append(
                replace(
                    shares,
                    running_requests=record.running_requests,
                    waiting_requests=record.waiting_requests,
                    waiting_prompt_tokens=record.waiting_prompt_tokens,
                )
            )
        return records

    def load(self) -> LoadRecord:
        """See Engine. Blocks are those of the newest statistics."""
        legs = self._streams.legs.values() if self._streams is not None else ()
        return self._counts.record(legs, self._now())

    async def load_adapter(self, name: str, source: str) -> None:
        """The engine loads an adapter with the first request that names it, so one token is generated to see whether that works."""
        self._running()
        identity = await asyncio.to_thread(self._adapters.identity, name, source)
        if self._adapters.is_loaded(identity):
            return
        from tensorrt_llm.executor.request import LoRARequest

        adapter = LoRARequest(lora_name=identity, lora_int_id=next(self._adapters.numbers), lora_path=source)
        try:
            await self._try_adapter(adapter)
        except Exception as error:  # The engine's loaders raise errors of any class.
            raise InvalidRequestError(
                f"TensorRT-LLM cannot load adapter {name}: {first_line(error)}", field="source"
            ) from error
        self._adapters.add(identity, adapter)

    async def _try_adapter(self, adapter: "LoRARequest") -> None:
        from tensorrt_llm.sampling_params import SamplingParams

        assert self._llm is not None
        params = SamplingParams(end_id=-1, max_tokens=1, top_k=1, detokenize=False)
        result = self._llm.generate_async([0], sampling_params=params, lora_request=adapter, streaming=True)
        try:
            async with asyncio.timeout(ADAPTER_TIMEOUT_S):
                async for each in result:
                    if each.error:
                        raise ValueError(each.error)
        finally:
            if not result.finished:
                result.abort()

    async def unload_adapter(self, name: str) -> None:
        """Refuses new legs with the adapter. The engine evicts its weights when others need the room."""
        self._adapters.remove(name)

    async def reset_cache(self) -> bool:
        """Always refused."""
        raise UnsupportedError("TensorRT-LLM publishes no call that resets the prefix cache")

    async def sleep(self, level: int) -> None:
        """Always refused."""
        raise UnsupportedError("TensorRT-LLM cannot free memory that its transceiver has registered", field="level")

    async def wake(self) -> None:
        """Always refused."""
        raise UnsupportedError("this engine does not sleep")

    async def set_role(self, role: Role) -> None:
        """See Engine. The engine's transfer limit is that of its role (`TrtllmSettings.kv_timeout_s`) and fixed at its start."""
        if role.value != self._settings.role:
            raise UnsupportedError(
                f"this TensorRT-LLM engine cannot serve the {role} pool: start another", field="role"
            )

    async def aclose(self) -> None:
        """See Engine."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._streams is not None:
            # First, because it delivers the finishes, which the outputs take until they are closed below.
            self._streams.cancel_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._streams is not None:
            await self._streams.aclose()
        self._outputs.close_nowait(self._failure)
        self._events.close_nowait()
        if self._llm is not None:
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await asyncio.to_thread(self._llm.shutdown)
            except TimeoutError:
                _log.warning("engine_left", timeout_s=CLOSE_TIMEOUT_S)

    def _running(self) -> Streams:
        if self._failure is not None:
            raise UnavailableError("the engine has died", reason="engine_dead")
        if self._streams is None or self._is_closing:
            raise UnavailableError("the engine is not running", reason="engine_not_running")
        return self._streams

    def _take_event(self, event: Mapping[str, Any]) -> None:
        events = self._translator.translate(event)
        if events:
            self._events.put_nowait(events)

    def _check_health(self) -> None:
        if self._llm is not None and not self._llm._check_health():
            self._die(LostError("the TensorRT-LLM engine died", reason="engine_died"))

    def _feed_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("engine_feed_failed", exc_info=error)
            self._die(LostError(f"the TensorRT-LLM engine died: {type(error).__name__}", reason="engine_died"))

    def _die(self, failure: LostError) -> None:
        if self._failure is None and not self._is_closing:
            _log.error("engine_died")
            self._failure = failure
            self._outputs.close_nowait(failure)


def load_engine(arguments: Mapping[str, Any], device_ids: Sequence[str]) -> "LLM":
    """Loads the engine with its devices in the environment: it has no argument for them, and its ranks inherit the variable."""
    if device_ids:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(device_ids)
    from tensorrt_llm.llmapi import LLM

    return LLM(**arguments)


def shut_down_late(loading: "asyncio.Future[LLM]") -> None:
    """Closes an engine whose start was given up."""
    if not loading.cancelled() and loading.exception() is None:
        loading.result().shutdown()


def meeting_point(params: Mapping[str, Any]) -> str:
    """host:port of the context engine's endpoint; empty if the engine names none. The first one is that of rank 0."""
    value = params.get("ctx_info_endpoint") or ""
    endpoint = value[0] if isinstance(value, list) else value
    return str(endpoint).rpartition("//")[2]


def start_failure(error: BaseException) -> MeshError:
    """Returns the error that `start` raises."""
    if isinstance(error, MeshError):
        return error
    if isinstance(error, ImportError):
        return UnavailableError(
            f"TensorRT-LLM is not installed here ({first_line(error)}): it needs a GPU, MPI and the package tensorrt-llm from NVIDIA's index",
            reason="engine_missing",
        )
    if isinstance(error, ValueError | OSError):
        return InvalidRequestError(
            f"TensorRT-LLM refused its settings: {first_line(error)}", field="trtllm", reason="invalid_settings"
        )
    return InternalError(f"TensorRT-LLM did not start: {first_line(error)}", reason="engine_start_failed")
