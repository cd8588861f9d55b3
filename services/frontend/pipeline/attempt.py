"""Runs one placement of a request: prefill, decode, wait for the end, report to the router."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from random import Random

from kvmesh.clock import WAKING_S, Clock, stood_still
from kvmesh.core import (
    Handoff,
    KvHandle,
    KvReader,
    Leg,
    LegTask,
    Placement,
    Rendezvous,
    Report,
    ReportKind,
    Role,
    Usage,
    WorkerRef,
)
from kvmesh.errors import (
    IDLE_TIMEOUT,
    CancelledByCallerError,
    DeadlineError,
    InternalError,
    KvLostError,
    LostError,
    MeshError,
    OverloadedError,
    UnavailableError,
)
from kvmesh.rpc.clients import LegLink, LegLinks, LegSink, Placed, RouterLink
from kvmesh.rpc.codec.legs import spend_lease
from kvmesh.rpc.whole_leg import WholeLeg, run_leg
from services.frontend.pipeline.choice_sink import ChoiceSink
from services.frontend.pipeline.held_sink import HeldSink
from services.frontend.pipeline.placements import CLOCK_GRAIN_S, RETRIABLE
from services.frontend.pipeline.prepare import Prepared
from services.frontend.settings import PipelineSettings


class Attempt:
    """Runs the choices of a placed request to their end. Choices that an earlier attempt ended get no leg. Invariants:

    1. The router receives exactly one of finished, failed, cancelled.
    2. However `run` ends, no leg of this attempt runs or will start, and every handle was submitted or is being released.
    """

    def __init__(
        self,
        prepared: Prepared,
        placed: Placed,
        *,
        number: int,
        deadline_s: float,
        links: LegLinks,
        router: RouterLink,
        clock: Clock,
        settings: PipelineSettings,
        generator: Random,
    ) -> None:
        self._prepared = prepared
        self._placed = placed
        self._placement = placed.placement
        self._suffix = f"-{number}" if number else ""
        self._deadline_s = deadline_s
        self._links = links
        self._router = router
        self._clock = clock
        self._settings = settings
        self._random = generator
        self._began_s = clock.now()
        self._choices: Mapping[int, ChoiceSink] = {}
        """The choices that are not over, by number."""
        self._last = 0
        """Number of the last one."""
        self._open = 0
        self._tokens_before = 0
        """Tokens that the choices received in earlier attempts."""
        self._has_token = False
        self._uses_decode = False
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._handoff_ends_s: dict[int, float] = {}
        """Rendezvous handoff, by choice: when the first token must have come, since the KV was sent."""
        self._due_s = float("inf")
        """When the timer is due."""
        self._is_waking = False
        """The timer fired late and was set once more."""
        self.failed_worker_id = ""
        """The worker that the next placement excludes; empty if no worker caused the failure."""
        self._prefill_usage: Usage | None = None
        """Usage of the prefill worker's first leg; None if no prefill worker has computed the prompt."""
        self._is_exchange_failure = False
        """The legs of a rendezvous lost each other. Either worker may be the cause, so that no breaker counts it: one decode worker that
        cannot receive would open those of all prefill workers."""

    @property
    def placement(self) -> Placement:
        """Where the attempt runs."""
        return self._placement

    @property
    def has_failed_at_prefill(self) -> bool:
        """True if the prefill worker caused the failure."""
        prefill = self._placement.prefill
        return prefill is not None and prefill.worker_id == self.failed_worker_id

    @property
    def has_token(self) -> bool:
        """True once a leg of this attempt has generated a token."""
        return self._has_token

    async def run(self, choices: Mapping[int, ChoiceSink]) -> None:
        """Runs the choices, by number, to their end; at least one. Raises the first failure. Cancelling it cancels every leg."""
        self._choices = choices
        self._last = max(choices)
        self._open = len(choices)
        self._tokens_before = sum([choice.tokens for choice in choices.values()])
        try:
            await self._run()
        except MeshError as error:
            self._report(ReportKind.FAILED, error=error)
            raise
        except asyncio.CancelledError:
            self._report(ReportKind.CANCELLED)
            raise
        except BaseException:
            self._report(ReportKind.FAILED, error=InternalError("internal error of the frontend"))
            raise
        else:
            self._report(
                ReportKind.FINISHED,
                # PREFILLED has reported those of a prefill worker.
                cached_tokens=self.cached_tokens() if self._prefill_usage is None else None,
                is_answered_by_prefill=not self._uses_decode,
                was_recomputed=any(each.finish is not None and each.finish.was_recomputed for each in choices.values()),
            )
        finally:
            for choice in choices.values():
                choice.close()
            if self._ended.done() and not self._ended.cancelled():
                self._ended.exception()  # Prevents asyncio's warning about an exception that was never retrieved.

    async def _run(self) -> None:
        prefill = await self._link_prefill()
        is_answered_by_prefill = prefill is not None and self._may_answer(prefill)
        decode = None if is_answered_by_prefill else await self._link(self._placement.decode, Role.DECODE)
        if len(self._choices) == 1 and self._placement.handoff is not Handoff.RENDEZVOUS:
            await self._start_legs(prefill, decode)
            await self._wait_end()
            return
        starting = asyncio.ensure_future(self._start_legs(prefill, decode))
        try:
            # A failing leg ends the request at once, even while prompts of other choices are still computed.
            await asyncio.wait({starting, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if not self._ended.done():
                starting.result()
            await self._wait_end()
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)

    async def _link_prefill(self) -> LegLink | None:
        """Returns None if the decode worker computes the prompt.

        It must if the client wants the prompt's log-probabilities: they are computed with the prompt and not transferred with
        its KV (sequential handoff). A prefill worker that gives the whole answer gives them too, and so does one of a rendezvous.
        """
        worker = self._placement.prefill
        if worker is None:
            return None
        link = await self._link(worker, Role.PREFILL)
        if self._placement.handoff is Handoff.RENDEZVOUS or not any(map(self._scores_prompt, self._choices)):
            return link
        return link if self._may_answer(link) else None

    def _scores_prompt(self, i: int) -> bool:
        """Returns whether a choice still needs the prompt's log-probabilities."""
        return self._prepared.generation.sampling.prompt_logprobs is not None and not self._choices[i].has_prompt

    def _may_answer(self, prefill: LegLink) -> bool:
        """Returns whether the prefill worker can answer alone. It computes the first token, so it can if only one is left."""
        max_tokens = self._prepared.generation.sampling.max_tokens
        is_single = all(max_tokens == choice.tokens + 1 for choice in self._choices.values())
        return is_single and self._placement.handoff is Handoff.SEQUENTIAL and LegTask.GENERATE in prefill.tasks

    async def _link(self, worker: WorkerRef, role: Role) -> LegLink:
        try:
            timeout_s = min(self._left_s(), self._settings.link_timeout_s)
            # At first another worker is faster than a link that was lost. A request that gets the worker again waits for its link.
            return await self._links.link(worker, role, timeout_s=timeout_s, waits_for_lost=bool(self._suffix))
        except RETRIABLE:
            self.failed_worker_id = worker.worker_id
            raise

    async def _start_legs(self, prefill: LegLink | None, decode: LegLink | None) -> None:
        """Starts one choice after the other: from the second one on the prompt is in the prefill worker's cache.

        Without `prefill` the decode worker computes the prompt; without `decode` the prefill worker answers.
        """
        for i in self._choices:
            if prefill is None:
                assert decode is not None
                self._submit(i, decode)
            elif decode is None:
                await self._answer_at_prefill(i, prefill)
            elif self._placement.handoff is Handoff.RENDEZVOUS:
                await self._start_rendezvous(i, prefill, decode)
            elif self._placement.handoff is Handoff.SEQUENTIAL:
                await self._hand_over(i, prefill, decode)
            else:
                raise InternalError(f"the router chose a handoff that is not supported: {self._placement.handoff}")
            if decode is not None:
                # The link writes in this iteration of the event loop. Reporting afterwards keeps it off the path to the first token.
                await asyncio.sleep(0)
                if prefill is not None:
                    self._report_prefilled(i)

    def _report_prefilled(self, i: int) -> None:
        """Reports PREFILLED after the prompt of the last choice."""
        if i == self._last:
            self._report(ReportKind.PREFILLED, cached_tokens=self.cached_tokens())

    async def _answer_at_prefill(self, i: int, prefill: LegLink) -> None:
        """Runs the whole leg on the prefill worker and passes its single token to the sink like a step frame."""
        whole = await self._run_prefill(i, prefill, LegTask.GENERATE)
        choice = self._choices[i]
        self._report_prefilled(i)
        if whole.prompt_logprobs is not None:
            choice.on_prompt(whole.prompt_logprobs)
        if whole.token_ids:
            choice.on_tokens(whole.token_ids, whole.logprobs or None, whole.came_s)
        assert whole.finish is not None
        choice.on_finish(whole.finish)

    async def _hand_over(self, i: int, prefill: LegLink, decode: LegLink) -> None:
        """Sequential handoff: prefill computes the prompt, then decode pulls its KV and answers."""
        whole = await self._run_prefill(i, prefill, LegTask.PREFILL)
        assert whole.finish is not None
        handle = whole.finish.handle
        if handle is None:
            raise KvLostError("the prefill worker gave no handle", where=prefill.worker.worker_id)
        try:
            self._submit(i, decode, handle=spend_lease(handle, self._clock.now() - whole.ended_s))
        except BaseException:
            prefill.release_nowait(handle.handle_id)
            raise

    async def _start_rendezvous(self, i: int, prefill: LegLink, decode: LegLink) -> None:
        """Rendezvous handoff: both legs start at once, and the first failure of either ends both.

        After the first token the decode worker has the prompt's KV, so a failure of the prefill leg no longer matters.
        """
        # The link is that of all ranks of the worker.
        placed = self._placement.prefill or prefill.worker
        rendezvous = _rendezvous(self._placement.rendezvous_address, placed, room=self._random.getrandbits(63))
        choice = self._choices[i]
        held = HeldSink(choice) if self._scores_prompt(i) else None
        self._submit(i, decode, rendezvous=rendezvous, sink=held)
        try:
            whole = await self._run_prefill(i, prefill, LegTask.PREFILL, rendezvous=rendezvous)
        except KvLostError:
            if choice.has_leg_tokens:
                return
            # The prefill worker found no counterpart, or the wrong one.
            self._exclude_counterpart(decode.worker)
            raise
        except (UnavailableError, LostError):
            if choice.has_leg_tokens:
                self.failed_worker_id = ""
                return
            raise
        self._handoff_ends_s[i] = self._clock.now() + self._settings.handoff_timeout_s
        if held is not None:
            held.release(whole.prompt_logprobs)

    async def _run_prefill(
        self, i: int, link: LegLink, task: LegTask, *, rendezvous: Rendezvous | None = None
    ) -> WholeLeg:
        """Runs a leg on the prefill worker to its end."""
        leg = self._leg(i, task, self._placement.prefill, rendezvous=rendezvous)
        left_s = self._left_s()
        timeout_s = min(left_s, self._settings.first_token_timeout_s)
        try:
            whole = await run_leg(link, leg, timeout_s=timeout_s)
        except (UnavailableError, LostError, OverloadedError):
            self.failed_worker_id = link.worker.worker_id
            raise
        except DeadlineError as error:
            if timeout_s == left_s:
                raise
            self.failed_worker_id = link.worker.worker_id
            message = "the prefill worker did not compute the prompt in time (first_token_timeout_s)"
            raise DeadlineError(message, reason=IDLE_TIMEOUT, where=link.worker.worker_id) from error
        if self._prefill_usage is None and whole.finish is not None:
            self._prefill_usage = whole.finish.usage
        return whole

    def _leg(
        self,
        i: int,
        task: LegTask,
        worker: WorkerRef | None,
        *,
        handle: KvHandle | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> Leg:
        leg_id = f"{self._prepared.request.request_id}-{i}{self._suffix}"
        reader = None
        if task is LegTask.PREFILL:
            # The handle is sealed for the leg of the same choice.
            reader = KvReader(worker_id=self._placement.decode.worker_id, leg_id=leg_id)
            leg_id += "p"
        choice = self._choices[i]
        generation = self._prepared.generation_of(i, choice.emitted_token_ids)
        if worker is not None and worker.data_parallel_rank is not None:
            generation = replace(generation, data_parallel_rank=worker.data_parallel_rank)
        # With a rendezvous the prefill leg scores the prompt.
        is_scored = choice.has_prompt or (rendezvous is not None and task is LegTask.GENERATE)
        if is_scored and generation.sampling.prompt_logprobs is not None:
            generation = replace(generation, sampling=replace(generation.sampling, prompt_logprobs=None))
        return Leg(
            leg_id=leg_id,
            task=task,
            generation=generation,
            handle=handle,
            rendezvous=rendezvous,
            reader=reader,
        )

    def _submit(
        self,
        i: int,
        link: LegLink,
        *,
        handle: KvHandle | None = None,
        rendezvous: Rendezvous | None = None,
        sink: LegSink | None = None,
    ) -> None:
        """Submits the decode leg of a choice. `sink` None: the choice itself."""
        choice = self._choices[i]
        if self._ended.done():
            self._ended.result()
            raise CancelledByCallerError("the request is over")
        leg = self._leg(i, LegTask.GENERATE, self._placement.decode, handle=handle, rendezvous=rendezvous)
        try:
            choice.begin(link.submit_nowait(leg, sink or choice, timeout_s=self._left_s()))
        except RETRIABLE:
            self.failed_worker_id = link.worker.worker_id
            raise
        choice.last_token_at_s = self._clock.now()
        self._uses_decode = True

    async def _wait_end(self) -> None:
        """Waits until all choices are over. Raises DeadlineError at the deadline, or if a choice gets no token for too long."""
        self._check_timeouts()
        try:
            await self._ended
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _check_timeouts(self) -> None:
        """Fails the attempt if a timeout has passed; else sets the timer for the next one."""
        if self._ended.done():
            return
        silent_s = self._silence_ends_s()
        now_s = self._clock.now()
        left_s = min(self._deadline_s, silent_s) - now_s
        # Not twice in a row, or a process that is always late would never end its requests.
        self._is_waking = left_s <= 0 and not self._is_waking and stood_still(self._due_s, now_s)
        if self._is_waking:
            # This process was suspended, not the worker: its tokens or its end may be unread in the socket.
            left_s = WAKING_S
        if left_s > 0:
            # Timers may fire slightly early; without the grain this would become a busy loop.
            self._due_s = now_s + left_s + CLOCK_GRAIN_S
            self._timer = asyncio.get_running_loop().call_later(left_s + CLOCK_GRAIN_S, self._check_timeouts)
            return
        where = self._placement.decode.worker_id
        if self._deadline_s <= silent_s:  # No worker caused it.
            self._ended.set_exception(DeadlineError("the request's time is over", where=where))
            return
        self.failed_worker_id = where
        if any(ends_s <= now_s for ends_s in self._handoff_ends()):
            message = (
                "the decode worker sent no token in time after the prefill worker had sent the KV (handoff_timeout_s)"
            )
            self._ended.set_exception(KvLostError(message, reason="handoff_timeout", where=where))
            return
        self._ended.set_exception(DeadlineError("the worker sent no token in time", reason=IDLE_TIMEOUT, where=where))

    def _silence_ends_s(self) -> float:
        """Returns when the first choice will have been without a token for too long; infinity if all are over."""
        silent_s = min(self._handoff_ends(), default=float("inf"))
        settings = self._settings
        for choice in self._choices.values():
            if not choice.is_over:
                allowed_s = settings.idle_timeout_s if choice.has_leg_tokens else settings.first_token_timeout_s
                silent_s = min(silent_s, choice.last_token_at_s + allowed_s)
        return silent_s

    def _handoff_ends(self) -> list[float]:
        """When the decode legs whose KV was sent and that have no token yet must have one."""
        choices = self._choices
        return [
            ends_s
            for i, ends_s in self._handoff_ends_s.items()
            if not (choices[i].has_leg_tokens or choices[i].is_over)
        ]

    def on_first(self) -> None:
        """A choice received its first token. If prefill answers, FINISHED follows at once and reports it too."""
        if not self._has_token:
            self._has_token = True
            if self._uses_decode:
                self._report(ReportKind.FIRST_TOKEN)

    def on_over(self, choice: ChoiceSink, error: MeshError | None) -> None:
        """A choice ended; `error` is None if it succeeded."""
        if self._ended.done():
            return
        if error is not None:
            if not isinstance(error, KvLostError):
                self.failed_worker_id = self._placement.decode.worker_id
            elif self._placement.handoff is Handoff.RENDEZVOUS and self._placement.prefill is not None:
                # The decode worker found no counterpart, or the wrong one.
                self._exclude_counterpart(self._placement.prefill)
            self._ended.set_exception(error)
            return
        self._open -= 1
        if self._open == 0:
            self._ended.set_result(None)

    def _exclude_counterpart(self, worker: WorkerRef) -> None:
        self.failed_worker_id = worker.worker_id
        self._is_exchange_failure = True

    def output_tokens(self) -> int:
        """Tokens received in this attempt so far, over all choices."""
        return sum([choice.tokens for choice in self._choices.values()]) - self._tokens_before

    def _left_s(self) -> float:
        left_s = self._deadline_s - self._clock.now()
        if left_s <= 0:
            raise DeadlineError("the request's time is over")
        return left_s

    def cached_tokens(self) -> int | None:
        """Returns the prompt tokens in the cache of the worker that computed the prompt; None: not known.

        The usage of the answer and the reports to the router both use it.
        """
        if self._prefill_usage is not None:
            return self._prefill_usage.cached_tokens
        finish = next(iter(self._choices.values())).finish if self._choices else None
        # A leg that failed has no usage.
        return None if finish is None or finish.error is not None else finish.usage.cached_tokens

    def _report(
        self,
        kind: ReportKind,
        *,
        error: MeshError | None = None,
        cached_tokens: int | None = None,
        is_answered_by_prefill: bool = False,
        was_recomputed: bool = False,
    ) -> None:
        names_worker = kind is ReportKind.FAILED and not self._is_exchange_failure
        report = Report(
            kind=kind,
            elapsed_s=self._clock.now() - self._began_s,
            cached_tokens=cached_tokens,
            output_tokens=self.output_tokens(),
            error=error,
            failed_worker_id=self.failed_worker_id if names_worker else "",
            is_answered_by_prefill=is_answered_by_prefill,
            was_recomputed=was_recomputed,
        )
        self._router.report_nowait(self._placed.ask_id, report)


def _rendezvous(address: str, prefill: WorkerRef, *, room: int) -> Rendezvous:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise InternalError(f"the router gave no rendezvous address for {prefill.worker_id}")
    return Rendezvous(
        host=host.strip("[]"), port=int(port), room=room, prefill_data_parallel_rank=prefill.data_parallel_rank
    )
