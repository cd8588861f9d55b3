"""vLLM's engine core as the runner uses it: requests in, one list of outputs per step out. One thread uses it.

vLLM's detokeniser and output processor are left out: the core's own step outputs hold token ids, which is all we send.
"""

import gc
from collections.abc import Callable, Sequence
from typing import Any

from kvmesh.core import LoadRecord
from kvmesh.engines.vllm.arguments import engine_arguments, usage_context
from kvmesh.engines.vllm.cpu import allow_model_compiling, forbid_compiling
from kvmesh.engines.vllm.holds import HoldMemory
from kvmesh.engines.vllm.preload import collector_off
from kvmesh.engines.vllm.ranks import ranks_die_with_this_thread
from kvmesh.engines.vllm.settings import VllmSettings


def reports_transfer(future: Any) -> bool:
    """Whether a batch's output is there and names finished transfers. One that failed counts: the step raises its error."""
    if not future.done():
        return False
    if future.exception() is not None:
        return True
    report = getattr(future.result(), "kv_connector_output", None)
    return report is not None and bool(report.finished_recving or report.finished_sending)


class EventCatcher:
    """vLLM's publisher interface, handing batches to a function of this process instead of a socket."""

    def __init__(self, receive: Callable[[Sequence[Any]], None]) -> None:
        self._receive = receive

    def publish(self, events: Any) -> None:
        """Called by the scheduler at the end of a step that changed the cache."""
        self._receive(events.events)

    def shutdown(self) -> None:
        """Nothing is held."""

    def get_publisher_config(self) -> None:
        """There is no endpoint to tell."""


class VllmCore:
    """Builds the engine in the calling thread, which takes seconds. Raises what vLLM raises."""

    def __init__(self, settings: VllmSettings, receive_events: Callable[[Sequence[Any]], None]) -> None:
        with collector_off():
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
        self.can_chunk = bool(self.config.scheduler_config.enable_chunked_prefill)
        """Whether a prompt may be computed in several steps."""
        self.chunk_tokens_min = (
            int(self.config.cache_config.block_size) if self._scheduler.need_mamba_block_aligned_split else 1
        )
        """Smallest part of a prompt that a step can compute."""
        self.step_tokens_max = int(self._scheduler.max_num_scheduled_tokens)
        self.step_prompt_tokens = 0
        """Tokens of the newest step beyond one for each running request."""

    def limit_steps(self, tokens: Callable[[int], int]) -> None:
        """Asks for each step's token budget. The argument is how many tokens running requests may decode."""
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
        # The scheduler tells preemptions only to vLLM's own statistics, which are off because they cost per request.
        preempt = self._scheduler._preempt_request

        def counting(*arguments: Any, **named: Any) -> Any:
            self.preempted_total += 1
            return preempt(*arguments, **named)

        self._scheduler._preempt_request = counting

    def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Calls the worker extension on every rank."""
        return list(self._core.collective_rpc(method, None, arguments))

    def add(self, request: Any) -> None:
        self._client.add_request(request)

    def abort(self, request_id: str) -> None:
        """Ends a request; frees its blocks unless a pull is writing into them."""
        self._client.abort_requests([request_id])

    def has_work(self) -> bool:
        """True while stepping changes anything: requests, leases, pulls, cleaning up."""
        return bool(self._scheduler.has_requests() or self._core.batch_queue)

    def step(self) -> tuple[Sequence[Any], bool]:
        """One step: its outputs, and whether the model ran."""
        outputs, was_executed = self._core.step_fn()
        self._core.post_step(model_executed=was_executed)
        mine = outputs.get(0) if outputs else None
        return (mine.outputs if mine is not None else ()), was_executed

    def has_transfer_result(self) -> bool:
        """True when a batch that waits in vLLM's queue says that a transfer is over: the next step takes that in.

        With asynchronous scheduling a step returns nothing until two batches are queued.
        """
        return any(reports_transfer(entry[0]) for entry in self._core.batch_queue or ())

    def is_held(self, request_id: str) -> bool:
        """True while the scheduler knows the request, a finished one with leased blocks included."""
        return request_id in self._scheduler.requests

    def has_begun(self, request_id: str) -> bool:
        """True once a step has taken the request up; also when it is over and forgotten."""
        request = self._scheduler.requests.get(request_id)
        return request is None or request.num_computed_tokens > 0

    def is_pulling(self, request_id: str) -> bool:
        """True from the allocation of blocks until the transfer is over."""
        request = self._scheduler.requests.get(request_id)
        return (
            request is not None
            and request.status == self._pulling
            and request_id not in self._scheduler.finished_recving_kv_req_ids
        )

    def is_queued(self, request_id: str) -> bool:
        """True until the pull of a request with a handle begins: the connector takes the mark off then, for good."""
        request = self._scheduler.requests.get(request_id)
        parameters = request.kv_transfer_params if request is not None else None
        return bool(parameters and parameters.get("do_remote_prefill"))

    def has_failed_pull(self, request_id: str) -> bool:
        """True between the step that noticed a failed transfer and the one that computes instead."""
        return request_id in self._scheduler.failed_recving_kv_req_ids

    def blocks_of(self, request_id: str) -> int:
        return sum(len(group) for group in self._scheduler.kv_cache_manager.get_block_ids(request_id))

    def reset_cache(self) -> bool:
        """Forgets cached blocks and publishes that at once; vLLM would wait for the next step."""
        is_done = bool(self._scheduler.reset_prefix_cache())
        if events := self._scheduler.kv_cache_manager.take_events():
            self._receive_events(events)
        return is_done

    def cache_group_kinds(self) -> Sequence[str]:
        """vLLM's word for each KV cache group, by number."""
        return [kind for kind, _ in self._scheduler.kv_cache_manager.kv_cache_event_metadata]

    def add_adapter(self, request: Any) -> bool:
        """Loads a LoRA adapter; raises to the caller only."""
        return bool(self._client.add_lora(request))

    def remove_adapter(self, number: int) -> None:
        self._client.remove_lora(number)

    @property
    def running_requests_max(self) -> int:
        return int(self.config.scheduler_config.max_num_seqs)

    @property
    def blocks_total(self) -> int:
        """Blocks of the pool; one more is vLLM's placeholder."""
        return int(self._pool.num_gpu_blocks) - 1

    def bytes_per_block(self) -> int:
        """KV bytes of one block over all layers and ranks."""
        tensors = self._scheduler.kv_cache_config.kv_cache_tensors
        total = sum(int(tensor.size) for tensor in tensors)
        return total // int(self._pool.num_gpu_blocks) * int(self.config.parallel_config.tensor_parallel_size)

    def load(self) -> LoadRecord:
        """Occupancy now; the runner adds its counters."""
        scheduler = self._scheduler
        running, waiting = scheduler.get_request_counts()
        free = int(self._pool.get_num_free_blocks())
        left = sum(
            max(0, request.num_prompt_tokens - request.num_computed_tokens)
            # Iterating over vLLM's priority queue copies and sorts it: 1.2 ms with 1 000 waiting, at every turn.
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
        """Ends worker processes, the connector and its agent.

        vLLM would thaw the whole heap to collect it: seconds of work, and every page that a forked child shares with its
        siblings becomes its own. The process ends soon, so the heap stays frozen.
        """
        thaw = gc.unfreeze
        gc.unfreeze = lambda: None
        try:
            self._client.shutdown()
        finally:
            gc.unfreeze = thaw
            self._hold_memory.close()
