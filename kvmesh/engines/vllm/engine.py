"""The vLLM engine: the Engine interface on the event loop, vLLM on a thread of its own.

An iteration of the thread ends with at most one `call_soon_threadsafe`, which passes the StepOutput of all requests and the KV
events together.
"""

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kvmesh.core import KvEvent, KvHandle, LegTask, LoadRecord, PerformanceProfile, Role
from kvmesh.engines.adapters import EngineAdapters
from kvmesh.engines.base import EngineDescription, EngineRequest, StepOutput
from kvmesh.engines.node_watch import NodeWatch
from kvmesh.engines.output_buffers import BufferedEngine, KvEventBuffer, StepOutputBuffer
from kvmesh.engines.vllm import environment
from kvmesh.engines.vllm.arguments import loads_tokenizer
from kvmesh.engines.vllm.constraints import VllmConstraints
from kvmesh.engines.vllm.core import VllmCore
from kvmesh.engines.vllm.description import capabilities, handle_form, model_card
from kvmesh.engines.vllm.events import VllmEvents, prefix_group
from kvmesh.engines.vllm.handles import unpack
from kvmesh.engines.vllm.intake import VllmIntake
from kvmesh.engines.vllm.leg import VllmLeg
from kvmesh.engines.vllm.runner import Runner
from kvmesh.engines.vllm.settings import VllmSettings
from kvmesh.engines.vllm.thread import EngineThread, IdlePauses
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
from kvmesh.network.names import host_port

_log = event_logger(__name__)
T = TypeVar("T")
MESSAGE_CHARACTERS_MAX = 400
OVERLOAD_RETRY_S = 0.5
"""`retry_after_s` of a leg that is refused because too many wait."""
OUTPUT_BUFFER_STEPS = 256
"""Step outputs that the consumer may lag behind before the engine pauses."""
KV_EVENT_BUFFER_BLOCKS = 65536
"""Block changes kept for a slow reader of KV events; beyond it they are replaced by a snapshot."""
IDLE_POLL_S = 0.005
"""Longest pause between two polls of transfers when there is nothing to compute."""
CLOSE_TIMEOUT_S = 10.0
"""How long closing waits for the engine thread."""


class VllmEngine(BufferedEngine):
    """One vLLM engine in this process; vLLM's globals allow one at a time."""

    def __init__(self, settings: VllmSettings, *, now: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._now = now
        self._role = Role(settings.role)
        self._adapters = EngineAdapters[Any](adapters_max=settings.adapters_max, is_enabled=settings.enable_lora)
        self._retired: dict[int, Any] = {}
        self._keys: set[int] = set()
        self._preparing: dict[int, asyncio.Task[None]] = {}
        """By key: legs whose constraints are being validated."""
        self._numbers = itertools.count()
        self._load = LoadRecord()
        self.kv_paths = KvPaths(pull_timeout_s=settings.pull_timeout_s, lock=threading.Lock())
        self._leased_handles = 0
        self._outputs = StepOutputBuffer(OUTPUT_BUFFER_STEPS)
        self._events = KvEventBuffer(KV_EVENT_BUFFER_BLOCKS, self._request_snapshot)
        self._failure: MeshError | None = None
        self._is_over = False
        self._is_closing = False
        # Used on the engine thread only.
        self._translator = VllmEvents()
        self._fresh_events: list[KvEvent] = []
        self._posted = 0
        self._pauses = IdlePauses(IDLE_POLL_S)
        self._core: VllmCore | None = None
        self._thread: EngineThread | None = None
        self._nodes = NodeWatch(
            nodes=settings.nodes,
            node_rank=settings.node_rank,
            nodes_address=settings.nodes_address,
            secret_file=settings.mesh_secret_file,
            start_timeout_s=settings.start_timeout_s,
            end=self._lose_node,
        )

    # ---- on the event loop ----

    async def start(self) -> None:
        """Imports vLLM and loads the model. After a cancel, the thread finishes loading and then closes the engine."""
        if self._thread is not None:
            raise InvalidRequestError("the engine has already been started")
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        environment.prepare(self._settings)
        self._thread = EngineThread(build=self._build, iterate=self._iterate, died=self._died, ended=self._ended)
        self._thread.start()
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                with self._failing_with_threads():
                    await self._ready
        except TimeoutError as error:
            self._thread.stop()
            raise UnavailableError("vLLM did not start in time", reason="engine_start_failed") from error
        except asyncio.CancelledError:
            self._thread.stop()
            raise

    @contextlib.contextmanager
    def _failing_with_threads(self) -> Iterator[None]:
        """While this context is active, an exception in any thread fails the start. vLLM would wait forever for a listener thread that
        failed.
        """
        before, loop, ready = threading.excepthook, asyncio.get_running_loop(), self._ready

        def died(words: str) -> None:
            if not ready.done():
                ready.set_exception(UnavailableError(f"a thread of vLLM died: {words}", reason="engine_start_failed"))

        def hook(args: threading.ExceptHookArgs) -> None:
            before(args)
            loop.call_soon_threadsafe(died, repr(args.exc_value))

        threading.excepthook = hook
        try:
            yield
        finally:
            threading.excepthook = before

    def describe(self) -> EngineDescription:
        return replace(
            self._description, role=self._role, model=replace(self._description.model, adapters=self._adapters.names())
        )

    def submit_nowait(self, request: EngineRequest) -> None:
        thread = self._running_thread()
        if request.key in self._keys:
            raise InvalidRequestError(f"key {request.key} is in use", field="key")
        settings = self._settings
        if len(self._keys) >= self._running_requests_max + settings.waiting_requests_max:
            raise OverloadedError("too many requests are waiting", retry_after_s=OVERLOAD_RETRY_S)
        if not self._has_ready_constraint(request):
            self._keys.add(request.key)
            self._preparing[request.key] = self._loop.create_task(self._add_prepared(request), name="constraint")
            return
        leg = self._make_leg(request)
        self._keys.add(request.key)
        thread.call(lambda: self._runner.add(leg))

    def _has_ready_constraint(self, request: EngineRequest) -> bool:
        # A prefill leg samples without the constraint, and without a tokenizer it is refused.
        is_used = request.task is LegTask.GENERATE and self._intake.has_tokenizer
        return not is_used or self._constraints.is_ready(request.generation.sampling.constraint)

    def _make_leg(self, request: EngineRequest) -> VllmLeg:
        return self._intake.make_leg(
            request,
            adapter=self._adapters.get(request.generation.adapter),
            number=next(self._numbers),
            now=self._now(),
            validated=self._constraints.validated(request.generation.sampling.constraint)
            if request.task is LegTask.GENERATE
            else None,
        )

    async def _add_prepared(self, request: EngineRequest) -> None:
        """Adds a leg after its constraint was validated. A refusal becomes the leg's finish."""
        constraint, key = request.generation.sampling.constraint, request.key
        assert constraint is not None, "a request without constraint is added at once"
        try:
            await self._constraints.prepare(constraint)
            leg = self._make_leg(request)
            self._running_thread().call(lambda: self._runner.add(leg))
        except MeshError as error:
            self._refuse(key, error)
        except Exception as error:  # noqa: BLE001  # Foreign code. The engine is intact.
            _log.error("constraint_not_prepared", exc_info=error)
            self._refuse(key, InternalError(f"the constraint was not validated: {type(error).__name__}"))
        finally:
            self._preparing.pop(key, None)

    def _refuse(self, key: int, error: MeshError | None) -> None:
        if self._thread is not None:
            self._thread.call(lambda: self._runner.refuse(key, error))

    def cancel_nowait(self, key: int) -> None:
        if (preparing := self._preparing.pop(key, None)) is not None:
            # The task does not answer for its own cancel, so the finish is sent here.
            preparing.cancel()
            self._refuse(key, None)
        elif key in self._keys and self._thread is not None:
            self._thread.call(lambda: self._runner.cancel(key))

    def release_nowait(self, handle_id: str) -> bool:
        """See Engine. Reads vLLM's table from another thread, which is safe for a single dict lookup."""
        if self._failure is not None or self._is_over or not self._runner.is_leased(handle_id):
            return False
        self._running_thread().call(lambda: self._runner.release(handle_id))
        return True

    def leased_handles(self) -> int:
        """As of the newest iteration of the engine thread."""
        return self._leased_handles

    def kv_source(self, handle: KvHandle) -> str:
        """Returns the side channel. See Engine."""
        parameters = unpack(handle.payload)[1]
        return host_port(parameters["remote_host"], parameters["remote_port"])

    def load(self) -> LoadRecord:
        """Returns the load after the newest iteration of the engine thread."""
        return replace(self._load, **self.kv_paths.load_fields())

    async def load_adapter(self, name: str, source: str) -> None:
        identity = await asyncio.to_thread(self._adapters.identity, name, source)
        if self._adapters.is_loaded(identity):
            return
        from vllm.lora.request import LoRARequest

        request = LoRARequest(lora_name=identity, lora_int_id=next(self._adapters.numbers), lora_path=source)
        try:
            is_loaded = await self._call(lambda core: core.add_adapter(request))
        except MeshError:
            raise
        except Exception as error:  # vLLM's loaders raise errors of any class. The engine is intact.
            raise InvalidRequestError(
                f"vLLM cannot load adapter {name}: {str(error).splitlines()[0]}", field="source"
            ) from error
        if not is_loaded:
            raise InvalidRequestError(f"vLLM did not load adapter {name}", field="source")
        self._adapters.add(identity, request)

    async def unload_adapter(self, name: str) -> None:
        """Immediately refuses new legs with the adapter. vLLM unloads it after the last leg that uses it."""
        request = self._adapters.remove(name)
        if request is not None:
            await self._call(lambda core: self._retire(request))

    async def reset_cache(self) -> bool:
        return await self._call(lambda core: core.reset_cache())

    async def sleep(self, level: int) -> None:
        """Always refused: vLLM on CPU frees nothing, and on a GPU the connector cannot register its memory again."""
        raise UnsupportedError("vLLM cannot free memory that NIXL has registered", field="level")

    async def wake(self) -> None:
        """Always refused."""
        raise UnsupportedError("this engine does not sleep")

    async def set_role(self, role: Role) -> None:
        """See Engine. The engine itself supports both roles from its start."""
        if role is self._role:
            return
        if role not in self._description.capabilities.roles or not self._settings.can_switch_role:
            raise UnsupportedError(f"this engine cannot serve the {role} pool", field="role")
        self._role = role

    async def aclose(self) -> None:
        thread = self._thread
        if self._is_closing:
            return
        self._is_closing = True
        if preparing := dict(self._preparing):
            for key in preparing:
                self.cancel_nowait(key)
            # No task may add a leg after `_cancel_all`.
            await asyncio.wait(preparing.values())
        if self._core is not None:
            await self._constraints.aclose()
        if thread is None:
            self._finish_streams()
            return
        if not self._is_over and self._failure is None and self._core is not None:
            thread.call(self._cancel_all)
        thread.stop()
        if not await asyncio.to_thread(thread.join, CLOSE_TIMEOUT_S):
            _log.warning("engine_thread_left", timeout_s=CLOSE_TIMEOUT_S)
            self._finish_streams()

    def _running_thread(self) -> EngineThread:
        if self._failure is not None:
            raise UnavailableError("the engine has died", reason="engine_dead")
        if self._thread is None or self._core is None or self._is_closing or self._is_over:
            raise UnavailableError("the engine is not running", reason="engine_not_running")
        return self._thread

    async def _call(self, function: Callable[[VllmCore], T]) -> T:
        """Runs a function on the engine thread. Cancelling the caller does not stop it."""
        thread = self._running_thread()
        result: asyncio.Future[T] = self._loop.create_future()

        def command() -> None:
            assert self._core is not None
            try:
                value = function(self._core)
            except Exception as error:  # noqa: BLE001  # Raised in the caller.
                self._post_call(set_exception, result, error)
            else:
                self._post_call(set_result, result, value)

        thread.call(command)
        return await result

    def _receive(self, output: StepOutput | None, events: Sequence[KvEvent]) -> None:
        if output is not None:
            # Before the output is delivered, because its consumer may use a key again immediately.
            self._keys.difference_update(finish.key for finish in output.finishes)
            self._outputs.put_nowait(output)
        if events:
            self._events.put_nowait(events)

    def _request_snapshot(self) -> None:
        if self._thread is not None:
            self._thread.call(self._send_snapshot)

    def _finish_streams(self) -> None:
        self._is_over = True
        self._outputs.close_nowait(self._failure)
        self._events.close_nowait()

    def _fail(self, failure: MeshError) -> None:
        if not self._ready.done():
            self._ready.set_exception(failure)
        elif self._failure is None:
            self._failure = failure
            self._outputs.close_nowait(failure)

    # ---- on the engine thread ----

    def _build(self) -> None:
        self._nodes.join()
        core = VllmCore(self._settings, self._take_events)
        self._translator.count_group(prefix_group(core.cache_group_kinds()))
        form = handle_form(core, self._settings)
        has_tokenizer = loads_tokenizer(self._settings)
        self._runner = Runner(core, settings=self._settings, form=form, now=self._now, paths=self.kv_paths)
        card = model_card(core, self._settings)
        self._constraints = VllmConstraints(
            core, cpu_s_max=self._settings.grammar_cpu_s_max, wait_s_max=self._settings.grammar_wait_s_max
        )
        self._intake = VllmIntake(
            core=core,
            settings=self._settings,
            card=card,
            form=form,
            has_tokenizer=has_tokenizer,
            defaults=core.config.model_config.get_diff_sampling_param(),
            paths=self.kv_paths,
        )
        self._description = EngineDescription(
            model=card,
            capabilities=capabilities(
                self._settings, has_tokenizer=has_tokenizer, tasks=core.supported_tasks, continues=core.continues
            ),
            role=self._role,
            block_size_tokens=form.block_size_tokens,
            kv_blocks_total=core.blocks_total,
            kv_compatibility_hash=form.compatibility_hash,
            lease_s=self._settings.lease_s,
            profile=PerformanceProfile(kv_bytes_per_token=max(1, form.kv_bytes_per_block // form.block_size_tokens)),
        )
        self._load = self._runner.load()
        self._running_requests_max = core.running_requests_max
        # Last: the event loop takes a set `_core` as the sign that all other attributes exist.
        self._core = core
        self._post_call(set_result, self._ready, None)

    def _iterate(self) -> float | None:
        assert self._core is not None
        if not self._core.has_work():
            self._post()
            return None
        # `taken` is written on the event loop. An older value only makes the engine pause earlier.
        if self._posted - self._outputs.taken >= OUTPUT_BUFFER_STEPS:
            # The consumer lags behind. The engine pauses, including transfers and leases.
            self._post()
            return IDLE_POLL_S
        if self._runner.has_output:
            # Posts cancels before the next step, which may be long.
            self._post()
        was_active = self._runner.step()
        self._post()
        return self._pauses.after_step(
            is_active=was_active or self._core.has_transfer_result(), is_pulling=self._runner.is_pulling()
        )

    def _post(self) -> None:
        self._remove_retired()
        self._load, self._leased_handles = self._runner.load(), self._runner.leased_handles
        output, events = self._runner.take_output(), self._fresh_events
        if output is None and not events:
            return
        self._fresh_events = []
        self._posted += output is not None
        self._post_call(self._receive, output, events)

    def _send_snapshot(self) -> None:
        # The snapshot contains all events that were translated so far.
        self._fresh_events = []
        self._post_call(self._events.replace, self._translator.snapshot())

    def _take_events(self, events: Sequence[Any]) -> None:
        self._fresh_events.extend(self._translator.translate(events))

    def _retire(self, request: Any) -> None:
        self._retired[request.lora_int_id] = request
        self._remove_retired()

    def _remove_retired(self) -> None:
        assert self._core is not None
        for number in [number for number in self._retired if not self._runner.uses_adapter(number)]:
            del self._retired[number]
            self._core.remove_adapter(number)

    def _cancel_all(self) -> None:
        self._runner.cancel_all()
        self._post()

    def _died(self, error: BaseException) -> None:
        _log.error("engine_died", exc_info=error)
        self._post_call(self._fail, start_failure(error) if self._core is None else lost(error))

    def _lose_node(self, reason: str) -> None:
        """Called on a thread of the watch. The remaining ranks would wait forever for the others, and the engine thread for them."""
        _log.error("engine_node_lost", detail=reason)
        self._post_call(self._fail, LostError(reason, reason="engine_died"))

    def _ended(self) -> None:
        self._nodes.close()
        try:
            if self._core is not None:
                self._core.close()
        except Exception as error:  # noqa: BLE001  # The thread ends here, so there is no caller.
            _log.error("engine_close_failed", exc_info=error)
        finally:
            self._post_call(self._finish_streams)

    def _post_call(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The loop is closed.
            if self._thread is not None:
                self._thread.stop()


def set_result(future: "asyncio.Future[Any]", value: object) -> None:
    """Does nothing if the waiter was cancelled."""
    if not future.done():
        future.set_result(value)


def set_exception(future: "asyncio.Future[Any]", error: BaseException) -> None:
    """Does nothing if the waiter was cancelled."""
    if not future.done():
        future.set_exception(error)


def start_failure(error: BaseException) -> MeshError:
    """Returns the error that `start` raises."""
    text = " ".join(str(error).split())[:MESSAGE_CHARACTERS_MAX] or type(error).__name__
    if isinstance(error, MeshError):
        return error
    if isinstance(error, ImportError):
        return UnavailableError(f"vLLM cannot be imported: {text}", reason="engine_missing")
    if isinstance(error, ValueError | OSError):
        return InvalidRequestError(f"vLLM refused its settings: {text}", field="vllm", reason="invalid_settings")
    return InternalError(f"vLLM did not start: {text}", reason="engine_start_failed")


def lost(error: BaseException) -> LostError:
    """Returns the error that the consumer of steps gets."""
    return LostError(f"the vLLM engine died: {type(error).__name__}", reason="engine_died")
