"""Runs legs on vLLM and collects one StepOutput per step, on the engine thread.

It adds three things that vLLM lacks: a deadline on a pull, a limit on how long a handle may wait without a heartbeat to its owner, and
the early release of leases.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvmesh.core import FinishReason, LegTask, LoadRecord
from kvmesh.engines.base import EngineFinish, StepOutput
from kvmesh.engines.handles import HandleForm
from kvmesh.engines.loads import HeldBlocks
from kvmesh.engines.output_buffers import StepBuilder
from kvmesh.engines.sampling_names import FIELD
from kvmesh.engines.vllm.budget import TOKENS_MIN, StepBudget
from kvmesh.engines.vllm.core import VllmCore
from kvmesh.engines.vllm.handles import make_handle
from kvmesh.engines.vllm.intake import prepare_recomputation
from kvmesh.engines.vllm.leg import REASONS, VllmLeg, stop_token, token_logprobs
from kvmesh.engines.vllm.pull_reports import PullReports
from kvmesh.engines.vllm.settings import CPU_STEP_BUDGET_S, VllmSettings
from kvmesh.errors import InternalError, InvalidRequestError, MeshError
from kvmesh.kv.paths import KvPaths

TRANSFER_GRACE_S = 0.1
"""Time for an aborted pull to complete, which notifies the peer. Then it is abandoned."""


@dataclass(frozen=True, slots=True)
class AbortedPull:
    """A pull that may still write to the blocks of an aborted leg. From `overdue_s` on its peer is not pulled from."""

    peer: str
    aborted_s: float
    overdue_s: float


def step_budget(core: VllmCore, settings: VllmSettings) -> StepBudget | None:
    """Returns the limit on the time of steps; None when there is none, or when prompts cannot be computed in parts."""
    budget_s = settings.step_budget_s
    if budget_s is None:
        budget_s = CPU_STEP_BUDGET_S if core.is_cpu else 0.0
    if not budget_s or not core.can_chunk:
        return None
    return StepBudget(
        budget_s=budget_s, tokens_max=core.step_tokens_max, tokens_min=max(TOKENS_MIN, core.chunk_tokens_min)
    )


def unmet_constraint() -> InvalidRequestError:
    """InvalidRequestError, since another attempt would fail in the same way."""
    return InvalidRequestError(
        "the constraint cannot be compiled or cannot be met by any token of the model",
        field=f"{FIELD}.constraint",
        reason="constraint_unmet",
    )


class Runner:
    """Owns all legs. `now` returns monotonic seconds. Use it on the engine thread only."""

    def __init__(
        self, core: VllmCore, *, settings: VllmSettings, form: HandleForm, now: Callable[[], float], paths: KvPaths
    ) -> None:
        self._core = core
        self._pull_reports = PullReports(core, paths, now)
        self._settings = settings
        self._form = form
        self._now = now
        self._legs: dict[str, VllmLeg] = {}
        self._inner_ids: dict[int, str] = {}
        self._queued: dict[str, VllmLeg] = {}
        """Legs that compute their prompt here and have not been in a step yet."""
        self._pulls: dict[str, VllmLeg] = {}
        self._aborted_pulls: dict[str, AbortedPull] = {}
        self._leases: dict[str, int] = {}
        self._building = StepBuilder()
        self._step = 0
        self._load = LoadRecord()
        self._held_blocks = HeldBlocks()
        self._budget = step_budget(core, settings)
        if self._budget is not None:
            core.limit_steps(self._budget.tokens)

    def add(self, leg: VllmLeg) -> None:
        """Passes a leg to vLLM. A refusal by vLLM becomes the leg's finish."""
        # The intake found that the handle cannot be pulled. Later attempts are counted by `_recompute`.
        if leg.was_recomputed and not leg.attempt:
            self._pull_reports.recomputed(leg)
        if leg.pulls and (self._is_overdue(leg) or not self._pull_reports.begin(leg)):
            self._recompute(leg)
        try:
            self._core.add(leg.core_request, leg.emitted_token_ids)
        except self._core.refusals as error:
            self._finish(leg, FinishReason.ERROR, error=InvalidRequestError(f"vLLM refused the request: {error}"))
            return
        self._legs[leg.inner_id] = leg
        self._inner_ids[leg.key] = leg.inner_id
        if leg.computes_prompt:
            self._queued[leg.inner_id] = leg
        if leg.pulls:
            self._pulls[leg.inner_id] = leg

    def refuse(self, key: int, error: MeshError | None) -> None:
        """Ends a leg that was never added; None: it was cancelled."""
        reason = FinishReason.ERROR if error is not None else FinishReason.CANCELLED
        self._building.finishes.append(EngineFinish(key=key, reason=reason, error=error))

    def cancel(self, key: int) -> None:
        """Ends a leg and frees its blocks, also those at the source."""
        inner_id = self._inner_ids.get(key)
        if inner_id is not None:
            leg = self._legs[inner_id]
            self._abort(leg)
            self._finish(leg, FinishReason.CANCELLED)

    def cancel_all(self) -> None:
        for key in list(self._inner_ids):
            self.cancel(key)

    def release(self, handle_id: str) -> None:
        """Frees a lease in the next step."""
        if self._leases.pop(handle_id, None) is not None and self._core.is_held(handle_id):
            self._core.call_workers("kvmesh_release", [handle_id])

    def is_leased(self, handle_id: str) -> bool:
        """Returns True while a handle's blocks are held. Safe on any thread."""
        return handle_id in self._leases and self._core.is_held(handle_id)

    @property
    def leased_handles(self) -> int:
        """Handles whose blocks were held at the last `load`."""
        return len(self._leases)

    def is_pulling(self) -> bool:
        """Returns True while blocks are being transferred."""
        return any(leg.pull_ends_s is not None for leg in self._pulls.values())

    def uses_adapter(self, number: int) -> bool:
        """Returns True while a leg uses the adapter."""
        return any(leg.adapter_number == number for leg in self._legs.values())

    def step(self) -> bool:
        """Makes one step. True when the model ran or there are outputs."""
        started_s = self._now()
        outputs, was_executed = self._core.step()
        self._record_queue_times(started_s)
        for output in outputs:
            leg = self._legs.get(output.request_id)
            if leg is not None:
                self._take(leg, output)
        # After the outputs: a leg that has ended in this step must not be restarted.
        self._watch_pulls()
        self._watch_aborted_pulls()
        self._step += 1
        if was_executed:
            self._load = replace(self._load, step_s=self._now() - started_s)
            if self._budget is not None:
                self._budget.observe(self._core.step_prompt_tokens, self._load.step_s)
        return was_executed or bool(outputs)

    def _record_queue_times(self, step_started_s: float) -> None:
        for inner_id, leg in list(self._queued.items()):
            if self._core.has_begun(inner_id):
                leg.queue_s = max(0.0, step_started_s - leg.submitted_at_s)
                del self._queued[inner_id]

    @property
    def has_output(self) -> bool:
        return self._building.has_output

    def take_output(self) -> StepOutput | None:
        """Returns the output since the last call; None when there is none."""
        output = self._building.take(self._step)
        if output is not None:
            self._building = StepBuilder()
        return output

    def load(self) -> LoadRecord:
        # vLLM forgets a handed-out request when its blocks are freed, and reports nothing then.
        for handle_id in [handle_id for handle_id in self._leases if not self._core.is_held(handle_id)]:
            del self._leases[handle_id]
        now = self._core.load()
        return replace(
            self._load,
            step=self._step,
            running_requests=now.running_requests,
            waiting_requests=now.waiting_requests,
            waiting_prompt_tokens=now.waiting_prompt_tokens,
            kv_blocks_used=now.kv_blocks_used,
            kv_blocks_free=now.kv_blocks_free,
            kv_blocks_total=now.kv_blocks_total,
            kv_blocks_leased=sum(self._leases.values()),
            running_requests_max=now.running_requests_max,
            preempted_requests_total=now.preempted_requests_total,
            pulling_requests=len(self._aborted_pulls)
            + sum(leg.pull_ends_s is not None for leg in self._pulls.values()),
            **self._held_blocks.load_fields(
                free=now.kv_blocks_free,
                used=now.kv_blocks_used,
                total=now.kv_blocks_total,
                count=self._core.count_blocks,
                now_s=self._now(),
            ),
        )

    def _take(self, leg: VllmLeg, output: Any) -> None:
        if output.prefill_stats is not None:
            self._count_prompt(leg, output.prefill_stats)
        if leg.prompt_logprobs is not None and output.new_prompt_logprobs_tensors is not None:
            rows = output.new_prompt_logprobs_tensors.tolists()
            self._building.prompt_logprobs[leg.key] = token_logprobs(rows, leg.prompt_logprobs)
        if output.new_token_ids and not leg.is_prefill:
            self._building.add(leg.key, output.new_token_ids)
            leg.output_tokens += len(output.new_token_ids)
            if leg.logprobs is not None and output.new_logprobs is not None:
                self._building.logprobs[leg.key] = token_logprobs(output.new_logprobs, leg.logprobs)
        if output.finish_reason is not None:
            self._end(leg, output)

    def _count_prompt(self, leg: VllmLeg, stats: Any) -> None:
        """Adds a prompt to the counters. Even after a full transfer the model computes the last token."""
        transferred = 0 if leg.was_recomputed else stats.num_external_cached_tokens
        local = stats.num_local_cached_tokens
        computed = max(1, stats.num_prompt_tokens - local - transferred)
        self._pull_reports.prompt_done(leg, transferred)
        leg.transferred_tokens = transferred
        leg.cached_tokens = local
        if leg.parameters is not None and transferred:
            leg.cached_tokens += int(leg.parameters.get("remote_prefill_cached_tokens") or 0)
        if leg.request.is_internal:
            return
        self._load = replace(
            self._load,
            prompt_tokens_total=self._load.prompt_tokens_total + computed,
            cached_tokens_total=self._load.cached_tokens_total + local,
            transferred_tokens_total=self._load.transferred_tokens_total + transferred,
        )

    def _end(self, leg: VllmLeg, output: Any) -> None:
        reason = REASONS[str(output.finish_reason)]
        if reason is FinishReason.ERROR and leg.request.generation.sampling.constraint is not None:
            # vLLM ends a request if its grammar does not compile or allows no further token.
            self._finish(leg, reason, error=unmet_constraint())
        elif reason is FinishReason.ERROR:
            self._finish(leg, reason, error=InternalError("vLLM failed the request", reason="engine_error"))
        elif leg.request.task is LegTask.EMBED and reason is FinishReason.STOP:
            self._finish(leg, reason, embedding=output.pooling_output.float().tolist())
        elif not leg.is_prefill:
            self._finish(leg, reason, stop_token_id=stop_token(output, reason))
        elif not output.kv_transfer_params:
            self._finish(leg, FinishReason.ERROR, error=InternalError("vLLM handed out no KV", reason="engine_error"))
        else:
            self._hand_off(leg, output.kv_transfer_params)

    def _hand_off(self, leg: VllmLeg, parameters: dict[str, Any]) -> None:
        if (hold := parameters.get("hold")) is not None:
            hold["addresses"] = self._core.hold_addresses
        handle = make_handle(
            self._form, parameters, tokens=leg.prompt_tokens, prompt=leg.prompt, lease_s=self._settings.lease_s
        )
        self._leases[handle.handle_id] = sum(len(group) for group in parameters["remote_block_ids"])
        self._finish(leg, FinishReason.HANDED_OFF, handle=handle)

    def _finish(self, leg: VllmLeg, reason: FinishReason, **more: Any) -> None:
        self._pull_reports.drop(leg)
        self._core.forget(leg.inner_id)
        self._legs.pop(leg.inner_id, None)
        self._pulls.pop(leg.inner_id, None)
        self._queued.pop(leg.inner_id, None)
        self._inner_ids.pop(leg.key, None)
        if not leg.request.is_internal:
            self._load = replace(self._load, output_tokens_total=self._load.output_tokens_total + leg.output_tokens)
        finish = EngineFinish(
            key=leg.key,
            reason=reason,
            usage=leg.usage(),
            was_recomputed=leg.was_recomputed,
            queue_s=leg.queue_s,
            **more,
        )
        self._building.finishes.append(finish)

    def _abort(self, leg: VllmLeg, *, is_overdue: bool = False) -> None:
        # Before the abort, which changes the request's status.
        was_pulling = leg.inner_id in self._pulls and self._core.is_pulling(leg.inner_id)
        self._core.abort(leg.inner_id)
        if was_pulling and leg.parameters is not None:
            now = self._now()
            overdue_s = now if is_overdue else now + self._settings.pull_timeout_s
            self._aborted_pulls[leg.inner_id] = AbortedPull(
                peer=leg.parameters["remote_engine_id"], aborted_s=now, overdue_s=overdue_s
            )

    def _watch_aborted_pulls(self) -> None:
        """Abandons aborted pulls that do not complete. Their blocks are freed when no transfer writes to them any longer."""
        now = self._now()
        for inner_id, pull in list(self._aborted_pulls.items()):
            if not self._core.is_held(inner_id):
                del self._aborted_pulls[inner_id]
            elif now >= pull.aborted_s + TRANSFER_GRACE_S:
                self._core.call_workers("kvmesh_abandon", inner_id)

    def _is_overdue(self, leg: VllmLeg) -> bool:
        """Returns True when an earlier pull from the leg's peer is overdue. Another pull would block more memory."""
        if not self._aborted_pulls or leg.parameters is None:
            return False
        peer, now = leg.parameters["remote_engine_id"], self._now()
        return any(pull.peer == peer and now >= pull.overdue_s for pull in self._aborted_pulls.values())

    def _watch_pulls(self) -> None:
        """Enforces deadlines. A leg is watched until its transfer ends: afterwards it has tokens and must not restart."""
        now = self._now()
        for leg in list(self._pulls.values()):
            if self._core.is_pulling(leg.inner_id):
                if self._pull_reports.is_late(leg, now):
                    self._pull_reports.timed_out(leg)
                    self._compute_instead(leg, is_overdue=True)
            elif not self._core.is_queued(leg.inner_id):
                # vLLM itself computes the prompt of a pull that failed.
                leg.was_recomputed = self._core.has_failed_pull(leg.inner_id)
                self._pull_reports.ended(leg, now)
                del self._pulls[leg.inner_id]
            elif self._is_overdue(leg) or self._pull_reports.is_path_failing(leg):
                self._compute_instead(leg)
            elif now >= leg.pull_by_s:
                self._check_queued(leg, now)

    def _check_queued(self, leg: VllmLeg, now: float) -> None:
        """Heartbeats renew the handle of a queued leg, but only if the handshake with its peer has succeeded."""
        assert leg.parameters is not None
        if self._core.call_workers("kvmesh_has_peer", leg.parameters["remote_engine_id"])[0]:
            leg.pull_by_s = now + self._settings.lease_s / 3
        else:
            self._compute_instead(leg)

    def _compute_instead(self, leg: VllmLeg, *, is_overdue: bool = False) -> None:
        self._abort(leg, is_overdue=is_overdue)
        self._legs.pop(leg.inner_id)
        self._pulls.pop(leg.inner_id)
        self._recompute(leg)
        self.add(leg)

    def _recompute(self, leg: VllmLeg) -> None:
        self._pull_reports.drop(leg)
        self._pull_reports.recomputed(leg)
        prepare_recomputation(leg)
