"""Runs legs on the engine: starts attempts, reads their results, ends them."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvmesh.core import FinishReason
from kvmesh.engines.base import EngineFinish, StepOutput
from kvmesh.engines.handles import HandleForm
from kvmesh.engines.output_buffers import StepBuilder
from kvmesh.engines.trtllm.events import SeedClaims
from kvmesh.engines.trtllm.handles import make_handle
from kvmesh.engines.trtllm.intake import TrtllmIntake, first_line
from kvmesh.engines.trtllm.leg import (
    TrtllmLeg,
    engine_finish,
    failed,
    finish,
    new_logprobs,
    new_tokens,
    prompt_logprobs,
)
from kvmesh.engines.trtllm.stats import LoadCounts
from kvmesh.errors import InternalError, InvalidRequestError, KvLostError, LostError, MeshError
from kvmesh.event_log import event_logger

if TYPE_CHECKING:
    from tensorrt_llm.executor.result import CompletionOutput
    from tensorrt_llm.llmapi.llm import LLM, RequestOutput

_log = event_logger(__name__)
ABORT_TIMEOUT_S = 5.0
"""How long an aborted leg waits for the engine's last result."""


class Streams:
    """The running legs. All methods run on the event loop. `deliver` gets one StepOutput for each of the loop's iterations with results.

    A leg ends with the engine's last result, at a stop that the adapter finds itself, or with an error. In the
    last two cases the adapter aborts the request in the engine.
    """

    def __init__(
        self,
        llm: "LLM",
        *,
        intake: TrtllmIntake,
        form: HandleForm,
        counts: LoadCounts,
        claims: SeedClaims,
        now: Callable[[], float],
        deliver: Callable[[StepOutput], None],
        died: Callable[[LostError], None],
    ) -> None:
        self._llm = llm
        self._intake = intake
        self._form = form
        self._counts = counts
        self._claims = claims
        self._now = now
        self._deliver = deliver
        self._died = died
        self._loop = asyncio.get_running_loop()
        self._building = StepBuilder()
        self._is_flush_planned = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.legs: dict[int, TrtllmLeg] = {}

    def start(self, leg: TrtllmLeg) -> None:
        """Accepts a leg. InvalidRequestError when the engine refuses it."""
        self._begin_attempt(leg)
        # The reader first runs in a later iteration of the loop, so it finds the leg.
        self.legs[leg.key] = leg
        self._claims.begin(leg.tokens, leg.seed)

    def cancel(self, key: int) -> None:
        """The leg ends with the engine's last result, or after ABORT_TIMEOUT_S."""
        leg = self.legs.get(key)
        if leg is None or leg.is_cancelled:
            return
        leg.is_cancelled = True
        self._abort(leg)
        self._set_deadline(leg, ABORT_TIMEOUT_S, lambda: self._end(leg, finish(leg, FinishReason.CANCELLED)))

    def cancel_all(self) -> None:
        """Aborts all legs and ends them immediately."""
        for leg in list(self.legs.values()):
            self._abort(leg)
            self._end(leg, finish(leg, FinishReason.CANCELLED))
        self._flush()

    async def aclose(self) -> None:
        """Stops all readers."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- attempts ----

    def _begin_attempt(self, leg: TrtllmLeg) -> None:
        result = self._intake.start(leg, self._llm)
        leg.result = result
        if leg.reads_handle:
            self._set_deadline(leg, self._pull_s(leg), lambda: self._recompute(leg))
        leg.reader = asyncio.create_task(self._read(leg, result))
        self._tasks.add(leg.reader)
        leg.reader.add_done_callback(self._tasks.discard)

    def _pull_s(self, leg: TrtllmLeg) -> float:
        """Returns the longest time of a pull.

        The engine's own limit counts from the start of the transfer; this one also covers the time before, and a hung
        engine.
        """
        lease_s = leg.request.handle.lease_s if leg.request.handle is not None else 0.0
        return lease_s + self._intake.settings.pull_timeout_s

    async def _read(self, leg: TrtllmLeg, result: "RequestOutput") -> None:
        from tensorrt_llm.executor import RequestError

        try:
            async for each in result:
                # The engine yields the same object, with more in it.
                if leg.result is not result or self.legs.get(leg.key) is not leg:
                    return
                if each.error:
                    self._fail(leg, result, str(each.error))
                    return
                self._on_result(leg, result, each.outputs[0])
        except RequestError as error:
            self._fail(leg, result, first_line(error))
        except Exception as error:  # noqa: BLE001  # The engine passes on any exception of its processes.
            _log.error("engine_result_failed", exc_info=error)
            if not self._llm._check_health():
                # The leg gets no finish: its frontend continues it on another worker.
                self._died(LostError(f"the TensorRT-LLM engine died: {type(error).__name__}", reason="engine_died"))
                return
            self._fail(leg, result, first_line(error))
        else:
            self._fail(leg, result, "the results ended before the answer")

    def _fail(self, leg: TrtllmLeg, result: "RequestOutput", text: str) -> None:
        """An attempt that failed in the engine. One that was pulling is computed here instead. Ignored if the attempt is over."""
        if self.legs.get(leg.key) is not leg or leg.result is not result:
            return
        if leg.is_cancelled:
            self._end(leg, finish(leg, FinishReason.CANCELLED))
        elif leg.reads_handle and not leg.output_tokens:
            self._recompute(leg)
        else:
            self._abort(leg)
            error = InternalError(f"TensorRT-LLM failed the request: {text}", reason="engine_request_failed")
            self._end(leg, failed(leg, error))

    def _recompute(self, leg: TrtllmLeg) -> None:
        """Restarts the leg without its handoff. A rendezvous fails instead, because its counterpart must be notified."""
        self._abort(leg)
        self._counts.failed_handoffs += 1
        if leg.request.rendezvous is not None:
            error: MeshError = KvLostError("the KV of the prefill engine did not arrive", reason="kv_pull_failed")
            self._end(leg, failed(leg, error))
            return
        # Without `result`, late results of the first attempt are ignored.
        leg.params, leg.was_recomputed, leg.result = None, True, None
        self._clear_deadline(leg)
        try:
            self._begin_attempt(leg)
        except (InvalidRequestError, RuntimeError) as error:
            self._end(leg, failed(leg, InternalError(f"TensorRT-LLM refused a second attempt: {first_line(error)}")))

    # ---- results ----

    def _on_result(self, leg: TrtllmLeg, result: "RequestOutput", output: "CompletionOutput") -> None:
        if leg.is_context:
            if result.finished:
                self._hand_off(leg, result, output)
            return
        is_over = result.finished
        was_cancelled = output.finish_reason == "cancelled" and not leg.is_cancelled
        if is_over and was_cancelled and leg.reads_handle and not leg.output_tokens:
            # The engine cancels a request whose transfer exceeds its limit.
            self._recompute(leg)
            return
        token_ids = new_tokens(leg, output)
        if token_ids and not leg.output_tokens and not self._begin_output(leg, result, output):
            return
        end = leg.rules.end(token_ids, leg.output_tokens) if not leg.is_cancelled else None
        if end is not None:
            token_ids = token_ids[: end[0]]
        self._emit(leg, output, token_ids)
        if end is not None:
            reason = FinishReason.LENGTH if end[1] is None else FinishReason.STOP
            if not is_over:
                self._abort(leg)
            self._end(leg, finish(leg, reason, stop_token_id=end[1]))
        elif is_over:
            self._end(leg, self._engine_end(leg, output, was_cancelled=was_cancelled))

    def _engine_end(self, leg: TrtllmLeg, output: "CompletionOutput", *, was_cancelled: bool) -> EngineFinish:
        if was_cancelled:
            return failed(leg, LostError("TensorRT-LLM cancelled the request", reason="engine_cancelled"))
        ends = self._intake.card.eos_token_ids
        return engine_finish(leg, output, ends[0] if ends else None)

    def _has_first_tokens(self, leg: TrtllmLeg, output: "CompletionOutput") -> bool:
        """Returns whether a generation phase begins with the handle's first token, as it must. Otherwise the leg fails."""
        first = list(leg.request.handle.first_token_ids) if leg.reads_handle and leg.request.handle is not None else []
        if output.token_ids[: len(first)] == first:
            return True
        self._abort(leg)
        error = InternalError("the answer does not begin with the handed-over token", reason="first_token_mismatch")
        self._end(leg, failed(leg, error))
        return False

    def _begin_output(self, leg: TrtllmLeg, result: "RequestOutput", output: "CompletionOutput") -> bool:
        """Records the first tokens of a leg. False: they are not the handed-over ones, and the leg failed."""
        if not self._has_first_tokens(leg, output):
            return False
        if not leg.is_cancelled:
            self._clear_deadline(leg)
        if leg.reads_handle:
            leg.transferred_tokens = len(leg.tokens)
        else:
            leg.queue_s = max(0.0, self._now() - leg.submitted_at_s)
            leg.cached_tokens = min(int(result.cached_tokens), len(leg.tokens))
        self._counts.on_begin(leg)
        if leg.request.generation.sampling.prompt_logprobs is not None and not leg.request.generation.emitted_token_ids:
            self._building.prompt_logprobs[leg.key] = prompt_logprobs(leg, output)
        return True

    def _emit(self, leg: TrtllmLeg, output: "CompletionOutput", token_ids: list[int]) -> None:
        if not token_ids:
            return
        if leg.entry_step == self._counts.step:
            # A step has one entry for each leg.
            self._flush()
        leg.entry_step = self._counts.step
        if leg.request.generation.sampling.logprobs is not None:
            self._building.logprobs[leg.key] = new_logprobs(leg, output, token_ids)
        leg.output_tokens += len(token_ids)
        self._counts.output_tokens += len(token_ids)
        self._building.add(leg.key, token_ids)
        self._plan_flush()

    def _hand_off(self, leg: TrtllmLeg, result: "RequestOutput", output: "CompletionOutput") -> None:
        leg.cached_tokens = min(int(result.cached_tokens), len(leg.tokens))
        self._counts.prompt_tokens += len(leg.tokens)
        params, lease_s = output.disaggregated_params, self._intake.settings.kv_timeout_s
        if leg.is_cancelled or output.finish_reason == "cancelled":
            self._end(leg, finish(leg, FinishReason.CANCELLED))
        elif leg.request.rendezvous is not None:
            self._end(leg, finish(leg, FinishReason.HANDED_OFF))
        elif params is None or params.ctx_request_id is None or not params.first_gen_tokens:
            self._fail(leg, result, "the context phase gave no handoff")
        else:
            handle = make_handle(
                self._form,
                params,
                handle_id=f"{leg.request.leg_id}~{result.request_id}",
                tokens=len(leg.tokens),
                prompt=leg.prompt,
                lease_s=lease_s,
            )
            blocks = -(-len(leg.tokens) // self._form.block_size_tokens)
            self._counts.lease(handle.handle_id, blocks, self._now() + lease_s)
            self._end(leg, finish(leg, FinishReason.HANDED_OFF, handle=handle))

    # ---- ends ----

    def _abort(self, leg: TrtllmLeg) -> None:
        result = leg.result
        if result is None or result.finished or result.aborted():
            return
        try:
            result.abort()
        except Exception as error:  # noqa: BLE001
            # The engine is going down; its death is reported by the health check.
            _log.error("engine_abort_failed", exc_info=error)

    def _end(self, leg: TrtllmLeg, ended: EngineFinish) -> None:
        # A cancel, a deadline and the engine's result may all end the leg. The first one counts.
        if self.legs.pop(leg.key, None) is None:
            return
        self._clear_deadline(leg)
        self._claims.end(leg.tokens, leg.seed)
        self._counts.on_finish(leg)
        self._building.finishes.append(ended)
        self._plan_flush()

    def _set_deadline(self, leg: TrtllmLeg, delay_s: float, act: Callable[[], None]) -> None:
        self._clear_deadline(leg)
        leg.deadline = self._loop.call_later(delay_s, act)

    def _clear_deadline(self, leg: TrtllmLeg) -> None:
        if leg.deadline is not None:
            leg.deadline.cancel()
            leg.deadline = None

    def _plan_flush(self) -> None:
        if not self._is_flush_planned:
            self._is_flush_planned = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Delivers the results since the last iteration of the loop as one step."""
        self._is_flush_planned = False
        if not self._building.has_output:
            return
        self._counts.step += 1
        output = self._building.take(self._counts.step)
        self._building = StepBuilder()
        if output is not None:
            self._deliver(output)
