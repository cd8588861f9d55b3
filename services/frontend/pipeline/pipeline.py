"""Runs requests through the mesh. Knows neither HTTP nor gRPC.

It uses only the event loop's timers and the injected clock, makes ids with the injected generator, and starts no thread for
prompts up to INLINE_CHARACTERS_MAX. So the same code runs in a whole-mesh simulation on virtual time.
"""

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from kvmesh.clock import Clock
from kvmesh.constraint_costs import judge_long
from kvmesh.core import Usage
from kvmesh.errors import MeshError, OverloadedError, UnavailableError, UnsupportedError
from kvmesh.rpc.clients import EmbedResult, LegLinks, RouterLink
from kvmesh.telemetry import TelemetrySettings, Tracing, current_traceparent
from services.frontend.access.access import Access
from services.frontend.access.caller import Caller
from services.frontend.access.isolation import isolated
from services.frontend.access.settings import AccessSettings
from services.frontend.metrics import FrontendMetrics, ModelMetrics
from services.frontend.models import Models, ServedModel
from services.frontend.parser_process.relay import relayed
from services.frontend.pipeline.attempt import Attempt
from services.frontend.pipeline.embed import Embedder, EmbedRequest
from services.frontend.pipeline.hedging import PrefillTimes
from services.frontend.pipeline.leg_spans import LegSpans
from services.frontend.pipeline.losses import LostWorkers, is_stall
from services.frontend.pipeline.overload import OverloadLimit
from services.frontend.pipeline.placements import RETRIABLE, RETRY_AFTER_S, RequestPlacements
from services.frontend.pipeline.prepare import Prepared, check_request, hashes_of, prepare, tokens_of
from services.frontend.pipeline.request import AnswerSink, Request, RequestResult
from services.frontend.pipeline.request_run import RequestRun
from services.frontend.pipeline.retry_budget import RetryBudget
from services.frontend.pipeline.tenant_turns import RequestStarts
from services.frontend.pipeline.tool_choice import with_tool_constraint
from services.frontend.settings import PipelineSettings

TOKENISED_PER_CHARGED = 16
"""Tokens of a text that is only tokenised, for each token that a quota is charged."""
DETOKENISED_INLINE_MAX = 16_384
"""Token ids that are detokenised on the event loop, which takes about 5 ms; more use a thread."""
CONSTRAINT_CHARACTERS_PER_CHARGED = 4
"""Characters of a schema, grammar or regular expression, for each token that a quota is charged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShared:
    """What the requests of one model share. `prefill_times` None: prompts are not hedged."""

    metrics: ModelMetrics
    retry_budget: RetryBudget
    prefill_times: PrefillTimes | None


class Pipeline:
    """Invariants:

    1. However `run` ends, it leaves no leg, no reservation and no handle behind.
    2. A request whose worker is lost is placed again and continues after the tokens that have arrived, so that its sink receives
       each token once.
    3. At most `requests_max` requests are in flight, and at most `tenant_share_max` of them are of one tenant.
    """

    def __init__(
        self,
        *,
        models: Models,
        links: LegLinks,
        router: RouterLink,
        clock: Clock,
        generator: Random,
        metrics: FrontendMetrics,
        settings: PipelineSettings,
        tracing: Tracing | None = None,
        access: Access | None = None,
        lost_workers: LostWorkers | None = None,
    ) -> None:
        self.models = models
        self.access = access or Access(AccessSettings(), clock)
        self._of_tenant: dict[str, int] = {}
        self.overload = OverloadLimit(self._of_tenant)
        self.starts = RequestStarts(allows=self.overload.allows)
        """APIs wait here before they parse a request."""
        self._lost_workers = lost_workers or LostWorkers()
        self._shared: dict[str, ModelShared] = {}
        self._embedder = Embedder(
            links=links,
            router=router,
            clock=clock,
            settings=settings,
            lost_workers=self._lost_workers,
        )
        self._tracing = tracing or Tracing(TelemetrySettings(), service="frontend")
        self.settings = settings
        self.metrics = metrics
        self.clock = clock
        self._links = links
        self._router = router
        self._random = generator
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._is_draining = False
        self._refuses = False

    @property
    def in_flight(self) -> int:
        """Number of requests."""
        return self._in_flight

    @property
    def is_draining(self) -> bool:
        """True from the time at which clients should use another frontend."""
        return self._is_draining

    def on_loop_lag(self, lag_s: float) -> None:
        """Applies a measurement of the event loop: while it is overloaded, tenants get equal parts of it."""
        self.overload.on_lag(lag_s, has_waiting=self.starts.has_waiting)
        self.starts.wake()

    def new_id(self) -> str:
        """Returns a random request id of 128 bits."""
        return f"{self._random.getrandbits(128):032x}"

    async def drain(self) -> None:
        """Reports not ready, refuses new requests after `drain_notice_s`, and waits for those in flight."""
        self._is_draining = True
        await self.clock.sleep(self.settings.drain_notice_s)
        self._refuses = True
        while self._in_flight:
            # It may be set since an earlier time without requests.
            self._idle.clear()
            await self._idle.wait()

    async def prepare(self, request: Request, model: ServedModel, *, caller: Caller, began_s: float) -> Prepared:
        """Checks and tokenises a request for a model that the caller may use.

        Raises errors of the client before the request takes any resource of the mesh.
        """
        self._check_room()
        self.access.check_priority(request, caller)
        request = with_tool_constraint(request, model.text.selection.tools)
        if request.sampling.constraint is not None:
            await judge_long(request.sampling.constraint)
        features = check_request(request, model, self.settings)
        request = isolated(request, caller.tenant, self.access.sharing_tenants)
        token_ids = await tokens_of(request, model)
        hashes = await hashes_of(token_ids, request, model)
        # Above 0, because routers refuse an ask without time.
        left_s = max(1e-3, began_s + self._limit_s(request) - self.clock.now())
        return prepare(
            request, model, token_ids, hashes=hashes, features=features, caller=caller, attempt_timeout_s=left_s
        )

    async def tokenise(self, request: Request, model: ServedModel, *, caller: Caller) -> "array[int]":
        """Returns the token ids of a request's prompt, for a client that only wants to know them. Charges a part of what a run costs."""
        self.access.check_priority(request, caller)
        self.access.check_level(caller)
        request = isolated(request, caller.tenant, self.access.sharing_tenants)
        token_ids = await tokens_of(request, model)
        self.access.charge(caller, tokens=len(token_ids) // TOKENISED_PER_CHARGED)
        return token_ids

    async def detokenise(
        self, token_ids: Sequence[int], model: ServedModel, *, caller: Caller, skip_special_tokens: bool
    ) -> str:
        """Returns the text of token ids. Charges as much as `tokenise`."""
        decode = partial(model.text.decode, token_ids, skip_special_tokens=skip_special_tokens)
        text = decode() if len(token_ids) <= DETOKENISED_INLINE_MAX else await asyncio.to_thread(decode)
        self.access.charge(caller, tokens=len(token_ids) // TOKENISED_PER_CHARGED)
        return text

    async def run(self, prepared: Prepared, sink: AnswerSink, *, began_s: float) -> RequestResult:
        """Runs a request to its end; the sink receives the answer. `began_s`: when the client's request arrived.

        Raises the failure that ended the request. Cancelling it cancels the request on every hop.
        """
        request_id, model, caller = prepared.request.request_id, prepared.model, prepared.caller
        shared = self._shared_of(model)
        process = model.text.parser_process
        # Outside of the admission: while the parser process finishes, the request is not in flight.
        async with nullcontext(sink) if process is None else relayed(process, request_id, sink) as relay:
            run = RequestRun(
                prepared, relay, metrics=shared.metrics, clock=self.clock, settings=self.settings, began_s=began_s
            )
            with self._admitted(caller):
                permit = self.access.enter(
                    caller,
                    prompt_tokens=prepared.ask.prompt_tokens,
                    output_tokens_max=(prepared.generation.sampling.max_tokens or 0) * prepared.request.choices,
                )
                if (constraint := prepared.generation.sampling.constraint) is not None:
                    self.access.charge(caller, tokens=len(constraint.text) // CONSTRAINT_CHARACTERS_PER_CHARGED)
                usage: Usage | None = None
                try:
                    if self._tracing.is_on:
                        result = await self._run_traced(run, shared, began_s)
                    else:
                        result = await self._run_placements(run, shared, began_s)
                    usage = result.usage
                    return result
                finally:
                    self.access.leave(
                        permit, usage or run.spent(), caller=caller, request_id=request_id, model=model.name
                    )

    def _shared_of(self, model: ServedModel) -> ModelShared:
        found = self._shared.get(model.name)
        if found is None:
            found = self._shared[model.name] = ModelShared(
                metrics=self.metrics.of_model(model.name),
                retry_budget=RetryBudget(self.clock.now()),
                prefill_times=PrefillTimes(self.settings.hedge) if self.settings.hedge.share_max else None,
            )
        return found

    async def _run_traced(self, run: RequestRun, shared: ModelShared, began_s: float) -> RequestResult:
        """Runs the request in a span. Router and workers get it as their parent."""
        prepared = run.prepared
        attributes = {"gen_ai.request.model": prepared.model.name, "kvmesh.request_id": prepared.request.request_id}
        with self._tracing.span("request", parent=prepared.request.traceparent or None, attributes=attributes) as span:
            run.prepared = prepared.with_traceparent(current_traceparent())
            result = await self._run_placements(run, shared, began_s)
            span.set_attribute("gen_ai.usage.input_tokens", result.usage.prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", result.usage.output_tokens)
            return result

    async def _run_placements(self, run: RequestRun, shared: ModelShared, began_s: float) -> RequestResult:
        """Places the request and runs it, again after a failure that allows it."""
        prepared = run.prepared
        run.metrics.prompt_tokens.value += prepared.ask.prompt_tokens
        run.metrics.prompt_lengths.observe(prepared.ask.prompt_tokens)
        deadline_s = began_s + self._limit_s(prepared.request)
        placements = RequestPlacements(
            prepared.request,
            prepared.ask,
            router=self._router,
            clock=self.clock,
            settings=self.settings,
            lost_workers=self._lost_workers,
            budget=shared.retry_budget,
            deadline_s=deadline_s,
        )
        traced = prepared
        with closing(LegSpans()) as spans:
            while True:
                attempt = Attempt(
                    traced,
                    await placements.place(),
                    number=placements.number,
                    deadline_s=deadline_s,
                    links=self._links,
                    router=self._router,
                    clock=self.clock,
                    settings=self.settings,
                    generator=self._random,
                    metrics=run.metrics,
                    prefill_times=shared.prefill_times,
                )
                try:
                    await attempt.run(run.begin_attempt(attempt))
                except MeshError as error:
                    if not self._goes_on(run, placements, attempt, error=error):
                        break
                    emitted = run.emitted_tokens
                    spans.begin_next(self._tracing, error, number=placements.number + 1, emitted_tokens=emitted)
                    traced = spans.traced(prepared)
                    placements.next(run.ask(traced), error, emitted_tokens=emitted)
                    if not emitted:
                        run.metrics.retried.value += 1
                else:
                    break
                finally:
                    # Also after a failure, since the tokens were received.
                    run.metrics.output_tokens.value += attempt.state.output_tokens()
        return RequestResult(usage=run.usage(), ttft_s=run.ttft_s)

    @staticmethod
    def _goes_on(run: RequestRun, placements: RequestPlacements, attempt: Attempt, *, error: MeshError) -> bool:
        """Returns whether another placement follows; False if the answer is complete. Raises the error that ends the request."""
        # An engine that cannot continue the answer. No worker has failed, and `recover` decides whether the answer starts again.
        is_refusal = isinstance(error, UnsupportedError) and run.emitted_tokens > 0
        if not is_refusal and not isinstance(error, RETRIABLE) and not is_stall(error):
            raise error
        if not is_refusal:
            placements.count_failure(
                error,
                failed_worker_id=attempt.state.failed_worker_id,
                has_progress=attempt.state.has_token,
                is_prefill=attempt.state.has_failed_at_prefill,
            )
        return run.recover(error)

    async def embed(self, request: EmbedRequest, *, caller: Caller, began_s: float) -> EmbedResult:
        """Embeds texts or token ids; see `Embedder`. Counts as one request in flight."""
        caller.check_model(request.asked.adapter or request.asked.model)
        self.access.check_priority(request.asked, caller)
        asked = isolated(request.asked, caller.tenant, self.access.sharing_tenants)
        request = replace(request, asked=asked)
        model = self.models.find(asked.model)
        with self._admitted(caller), self._tracing.span("embed", parent=asked.traceparent or None):
            deadline_s = began_s + self._limit_s(asked)
            inputs = await self._embedder.tokens(request, model)
            permit = self.access.enter(caller, prompt_tokens=sum(map(len, inputs)), output_tokens_max=0)
            usage = Usage()
            try:
                result = await self._embedder.run(
                    request,
                    model,
                    inputs,
                    tenant=caller.tenant,
                    budget=self._shared_of(model).retry_budget,
                    deadline_s=deadline_s,
                )
                usage = result.usage
            finally:
                self.access.leave(permit, usage, caller=caller, request_id=asked.request_id, model=model.name)
            self.metrics.prompt_tokens.of(model.name).value += usage.prompt_tokens
            self.metrics.prompt_lengths.of(model.name).observe(usage.prompt_tokens)
            return result

    def _check_room(self) -> None:
        if self._refuses:
            raise UnavailableError("the frontend is shutting down", reason="draining", retry_after_s=RETRY_AFTER_S)
        if self._in_flight >= self.settings.requests_max:
            raise OverloadedError("too many requests in flight", reason="frontend_full", retry_after_s=RETRY_AFTER_S)

    @contextmanager
    def _admitted(self, caller: Caller) -> Iterator[None]:
        """Counts the request as in flight. Raises OverloadedError or UnavailableError if no more are admitted."""
        self._check_room()
        tenant, of_tenant = caller.tenant, self._of_tenant
        if tenant and of_tenant.get(tenant, 0) >= self.settings.requests_max * self.settings.tenant_share_max:
            message = "too many requests of this tenant in flight"
            raise OverloadedError(message, reason="tenant_full", retry_after_s=RETRY_AFTER_S)
        self._in_flight += 1
        of_tenant[tenant] = of_tenant.get(tenant, 0) + 1
        try:
            yield
        finally:
            self._in_flight -= 1
            of_tenant[tenant] -= 1
            if not of_tenant[tenant]:
                del of_tenant[tenant]
            self.starts.wake()
            if not self._in_flight:
                self._idle.set()

    def _limit_s(self, request: Request) -> float:
        limit_s = self.settings.request_timeout_s
        return limit_s if request.timeout_s is None else min(limit_s, request.timeout_s)
