"""Wraps vLLM's engine core for the runner. Not thread-safe.

vLLM's detokeniser and output processor are not used: the core's step outputs contain the token ids, which is all that workers send.
"""

import gc
from collections.abc import Callable, Sequence
from typing import Any

from kvmesh.core import LoadRecord
from kvmesh.engines.loads import BlockCount
from kvmesh.engines.vllm.arguments import engine_arguments, usage_context
from kvmesh.engines.vllm.continuation import Continuations
from kvmesh.engines.vllm.cpu import allow_model_compiling, forbid_compiling
from kvmesh.engines.vllm.holds import HoldMemory
from kvmesh.engines.vllm.preload import garbage_collection_off
from kvmesh.engines.vllm.ranks import ranks_die_with_this_thread
from kvmesh.engines.vllm.sampling import Continuable
from kvmesh.engines.vllm.settings import VllmSettings


def reports_transfer(future: Any) -> bool:
    """Returns True when a batch's output is ready and names finished transfers, or the batch failed: the next step raises its error."""
    if not future.done():
        return False
    if future.exception() is not None:
        return True
    report = getattr(future.result(), "kv_connector_output", None)
    return report is not None and bool(report.finished_recving or report.finished_sending)


class EventCatcher:
    """vLLM's publisher interface. Passes event batches to a function of this process instead of a socket."""

    def __init__(self, receive: Callable[[Sequence[Any]], None]) -> None:
        self._receive = receive

    def publish(self, events: Any) -> None:
        """The scheduler calls this at the end of a step that changed the cache."""
        self._receive(events.events)

    def shutdown(self) -> None:
        """Part of vLLM's interface."""

    def get_publisher_config(self) -> None:
        """Part of vLLM's interface: there is no endpoint."""


class VllmCore:
    """Builds the engine in the calling thread, which takes seconds or minutes. Raises vLLM's errors."""

    def __init__(self, settings: VllmSettings, receive_events: Callable[[Sequence[Any]], None]) -> None:
        with garbage_collection_off():
            from vllm.platforms import current_platform

            self.is_cpu = bool(current_platform.is_cpu())
            if self.is_cpu:
                forbid_compiling()
            from vllm.exceptions import VLLMError
            from vllm.v1.engine.llm_engine import LLMEngine
            from vllm.v1.request import RequestStatus

            self._hold_memory = HoldMemory()
            arguments = engine_arguments(settings, is_cpu=self.is_cpu, holds_path=self._hold_memory.path)
            if self.is_cpu:
                allow_model_compiling(not arguments.enforce_eager)
            with ranks_die_with_this_thread():
                engine = LLMEngine.from_engine_args(arguments, usage_context=usage_context(is_cpu=self.is_cpu))
        self.refusals: tuple[type[Exception], ...] = (VLLMError, ValueError, TypeError)
        self._pulling = RequestStatus.WAITING_FOR_REMOTE_KVS
        self._client: Any = engine.engine_core
        self._core: Any = engine.engine_core.engine_core
        self._scheduler: Any = self._core.scheduler
        self._pool: Any = self._scheduler.kv_cache_manager.block_pool
        self._receive_events = receive_events
        self.config: Any = engine.vllm_config
        self.input_processor: Any = engine.input_processor
        self.supported_tasks: tuple[str, ...] = engine.get_supported_tasks()
        prepared = self.call_workers("kvmesh_prepare")
        self.nixl_hash: str = prepared[0][0]
        self.hold_addresses: list[int] = [address for _, address in prepared]
        self.splits_heads = all(self.call_workers("kvmesh_splits_heads"))
        self.preempted_total = 0
        self._scheduler.kv_event_publisher = EventCatcher(receive_events)
        self._count_preemptions()
        self._continuations = Continuations(self._core)
        self.can_chunk = bool(self.config.scheduler_config.enable_chunked_prefill)
        """True when a prompt may be computed in several steps."""
        self.chunk_tokens_min = (
            int(self.config.cache_config.block_size) if self._scheduler.need_mamba_block_aligned_split else 1
        )
        """Smallest part of a prompt that a step can compute."""
        self.step_tokens_max = int(self._scheduler.max_num_scheduled_tokens)
        self.continues = Continuable(
            seeds=self.config.speculative_config is None,
            constraints=not self.config.structured_outputs_config.reasoning_parser,
        )
        self.step_prompt_tokens = 0
        """Prompt tokens of the newest step: its tokens minus one per running request."""

    def limit_steps(self, tokens: Callable[[int], int]) -> None:
        """Makes the scheduler call `tokens` for each step's budget, with the number of tokens that running requests may decode."""
        scheduler = self._scheduler
        schedule = scheduler.schedule
        per_request = 1 + int(getattr(scheduler, "num_spec_tokens", 0) or 0)

        def schedule_within(*arguments: Any, **named: Any) -> Any:
            decode_tokens = per_request * len(scheduler.running)
            scheduler.max_num_scheduled_tokens = tokens(decode_tokens)
            output = schedule(*arguments, **named)
            requests = per_request * len(output.num_scheduled_tokens)
            self.step_prompt_tokens = max(0, output.total_num_scheduled_tokens - requests)
            return output

        scheduler.schedule = schedule_within

    def _count_preemptions(self) -> None:
        # vLLM counts preemptions in its statistics only, which are off because they cost time per request.
        preempt = self._scheduler._preempt_request

        def counting(*arguments: Any, **named: Any) -> Any:
            self.preempted_total += 1
            return preempt(*arguments, **named)

        self._scheduler._preempt_request = counting

    def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of the worker extension on every rank."""
        return list(self._core.collective_rpc(method, None, arguments))

    def add(self, request: Any, emitted_token_ids: Sequence[int] = ()) -> None:
        """Starts a request. The emitted tokens are the end of its prompt."""
        if emitted_token_ids:
            self._continuations.add(request, emitted_token_ids)
        else:
            self._client.add_request(request)

    def abort(self, request_id: str) -> None:
        """Ends a request. Frees its blocks unless a pull is writing to them."""
        self._client.abort_requests([request_id])
        self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """Drops what is kept about a request that has ended. Idempotent."""
        self._continuations.forget(request_id)

    def has_work(self) -> bool:
        """Returns True while there are requests, leases, pulls or queued batches."""
        return bool(self._scheduler.has_requests() or self._core.batch_queue)

    def step(self) -> tuple[Sequence[Any], bool]:
        """Makes one step. Returns its outputs and whether the model ran."""
        outputs, was_executed = self._core.step_fn()
        self._core.post_step(model_executed=was_executed)
        # By client of the engine core. A core in this process has one client, number 0.
        mine = outputs.get(0) if outputs else None
        return (mine.outputs if mine is not None else ()), was_executed

    def has_transfer_result(self) -> bool:
        """Returns True when a queued batch reports the end of a transfer, which the next step handles.

        With asynchronous scheduling a step returns nothing until two batches are queued.
        """
        return any(reports_transfer(entry[0]) for entry in self._core.batch_queue or ())

    def is_held(self, request_id: str) -> bool:
        """Returns True while the scheduler knows the request, also after its end while its blocks are leased."""
        return request_id in self._scheduler.requests

    def has_begun(self, request_id: str) -> bool:
        """Returns True after the first step that computed for the request, also when the request has ended."""
        request = self._scheduler.requests.get(request_id)
        return request is None or request.num_computed_tokens > 0

    def is_pulling(self, request_id: str) -> bool:
        """Returns True from the allocation of blocks until the end of the transfer."""
        request = self._scheduler.requests.get(request_id)
        return (
            request is not None
            and request.status == self._pulling
            and request_id not in self._scheduler.finished_recving_kv_req_ids
        )

    def is_queued(self, request_id: str) -> bool:
        """Returns True until the pull of a request with a handle starts: the connector clears the flag then."""
        request = self._scheduler.requests.get(request_id)
        parameters = request.kv_transfer_params if request is not None else None
        return bool(parameters and parameters.get("do_remote_prefill"))

    def has_failed_pull(self, request_id: str) -> bool:
        """Returns True between the step that detects a failed transfer and the step that computes the prompt."""
        return request_id in self._scheduler.failed_recving_kv_req_ids

    def reset_cache(self) -> bool:
        """Drops cached blocks and publishes that immediately; vLLM would publish it with the next step."""
        is_done = bool(self._scheduler.reset_prefix_cache())
        if events := self._scheduler.kv_cache_manager.take_events():
            self._receive_events(events)
        return is_done

    def cache_group_kinds(self) -> Sequence[str]:
        """vLLM's kind of each KV cache group, by group number."""
        return [kind for kind, _ in self._scheduler.kv_cache_manager.kv_cache_event_metadata]

    def add_adapter(self, request: Any) -> bool:
        """Loads a LoRA adapter. An error leaves the engine intact."""
        return bool(self._client.add_lora(request))

    def remove_adapter(self, number: int) -> None:
        self._client.remove_lora(number)

    @property
    def running_requests_max(self) -> int:
        return int(self.config.scheduler_config.max_num_seqs)

    @property
    def blocks_total(self) -> int:
        """Blocks of the pool without vLLM's placeholder block."""
        return int(self._pool.num_gpu_blocks) - 1

    def bytes_per_block(self) -> int:
        """KV bytes of one block over all layers and ranks."""
        tensors = self._scheduler.kv_cache_config.kv_cache_tensors
        total = sum(int(tensor.size) for tensor in tensors)
        return total // int(self._pool.num_gpu_blocks) * int(self.config.parallel_config.tensor_parallel_size)

    def count_blocks(self) -> BlockCount:
        """Counts the blocks in the block tables of requests, leased ones included. The pool is not asked, so that leaks are found.

        Blocks with the same cached content count once as cached.
        """
        tables = [
            table
            for manager in self._scheduler.kv_cache_manager.coordinator.single_type_managers
            for table in manager.req_to_blocks.values()
        ]
        held = {block.block_id: block.block_hash for table in tables for block in table if not block.is_null}
        names = {name for name in held.values() if name is not None}
        return BlockCount(held=len(held), cached=max(0, len(self._pool.cached_block_hash_to_block) - len(names)))

    def load(self) -> LoadRecord:
        """Returns the present occupancy. The runner adds its counters."""
        scheduler = self._scheduler
        running, waiting = scheduler.get_request_counts()
        free = int(self._pool.get_num_free_blocks())
        left = sum(
            max(0, request.num_prompt_tokens - request.num_computed_tokens)
            # Iterating over vLLM's priority queue copies and sorts it: 1.2 ms per step with 1 000 waiting requests.
            for queue in (getattr(scheduler.waiting, "_heap", scheduler.waiting), scheduler.running)
            for request in queue
        )
        return LoadRecord(
            running_requests=running,
            waiting_requests=waiting,
            waiting_prompt_tokens=left,
            kv_blocks_used=self.blocks_total - free,
            kv_blocks_free=free,
            kv_blocks_total=self.blocks_total,
            running_requests_max=self.running_requests_max,
            preempted_requests_total=self.preempted_total,
        )

    def close(self) -> None:
        """Ends worker processes, the connector and its NIXL agent.

        vLLM's shutdown calls `gc.unfreeze`, which is disabled here: collecting the whole heap takes seconds and copies every page that
        forked workers share, although the process ends soon.
        """
        thaw = gc.unfreeze
        gc.unfreeze = lambda: None
        try:
            self._client.shutdown()
        finally:
            gc.unfreeze = thaw
            self._hold_memory.close()
