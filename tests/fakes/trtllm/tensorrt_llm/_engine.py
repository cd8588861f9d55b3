"""The executor: batches, steps, handoffs. One step takes STEP_S."""

import asyncio
import json
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tensorrt_llm._blocks import Cache, Hold
from tensorrt_llm._tokens import sample, score_prompt
from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.executor.result import Response
from tensorrt_llm.llmapi.request_output import RequestOutput
from tensorrt_llm.sampling_params import SamplingParams

STEP_S = 0.001
TRANSFER_S = 0.001
ENGINES: dict[str, "Executor"] = {}
"""Running engines by their endpoint, which a generation engine would reach over the network."""


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A request in the executor. `kv` has the tokens whose KV it holds; in a handoff they come from another engine."""

    number: int
    tokens: Sequence[int]
    params: SamplingParams
    salt: str
    priority: float
    handoff: DisaggregatedParams | None
    result: RequestOutput
    emitted: list[int] = field(default_factory=list)
    kv: Sequence[int] = ()
    hold: Hold | None = None
    cached: int = 0
    is_aborted: bool = False
    is_moving: bool = False

    @property
    def phase(self) -> str:
        return (self.handoff.request_type or "") if self.handoff else ""


class Executor:
    """One engine. `log` keeps the arguments of all requests for tests."""

    def __init__(
        self, *, blocks: int, size: int, batch: int, events_max: int, vocabulary: int, timeout_s: float
    ) -> None:
        self.endpoint = f"tcp://127.0.0.1:{uuid.uuid4().int % 60000 + 1024}"
        while self.endpoint in ENGINES:
            self.endpoint = f"tcp://127.0.0.1:{uuid.uuid4().int % 60000 + 1024}"
        ENGINES[self.endpoint] = self
        self.cache = Cache(blocks, size, events_max)
        self.stats: deque[dict[str, Any]] = deque(maxlen=1000)
        self.transfers: dict[int, Request] = {}
        self.is_healthy = True
        self.log: list[dict[str, Any]] = []
        self._batch, self._vocabulary, self._timeout_s = batch, vocabulary, timeout_s
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._live: dict[int, Request] = {}
        self._iteration = 0
        self._task: asyncio.Task[None] | None = None
        self._moves: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, request: Request) -> None:
        self._loop = asyncio.get_running_loop()
        self._live[request.number] = request
        self._waiting.append(request)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    def abort(self, number: int) -> None:
        """Aborts a request. Like the real engine, ignores it after the final result, even if a context phase still waits to be pulled."""
        if (request := self._live.get(number)) is not None:
            request.is_aborted = True

    def die(self) -> None:
        """For tests: makes every result raise and the engine unhealthy."""
        self.is_healthy = False
        for request in self._live.values():
            request.result._put(RuntimeError("the executor died"))

    def shutdown(self) -> None:
        """May be called from another thread."""
        ENGINES.pop(self.endpoint, None)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        for task in (self._task, *self._moves):
            if task is not None:
                task.cancel()

    async def _run(self) -> None:
        while self._waiting or self._running:
            await asyncio.sleep(STEP_S)
            self._step()

    def _step(self) -> None:
        self._iteration += 1
        for request in [*self._waiting, *self._running]:
            if request.is_aborted and not request.is_moving:
                self._finish(request, Response(finish_reason="cancelled"))
        self._admit()
        for request in list(self._running):
            if not request.is_moving:
                self._advance(request)
        self._record()

    def _admit(self) -> None:
        self._waiting.sort(key=lambda request: -request.priority)
        while self._waiting and len(self._running) < self._batch:
            request = self._waiting[0]
            if not self.cache.has_room(len(request.tokens) + request.params.max_tokens):
                return
            self._running.append(self._waiting.pop(0))
            is_pull = request.phase == "generation_only"
            request.hold, request.cached = self.cache.hold(request.tokens, request.salt, reuses=not is_pull)
            if is_pull:
                self._move(request, self._pull(request))
            else:
                request.kv = request.tokens

    def _move(self, request: Request, moving: Any) -> None:
        request.is_moving = True
        task = asyncio.create_task(moving)
        self._moves.add(task)
        task.add_done_callback(self._moves.discard)

    async def _pull(self, request: Request) -> None:
        """Runs the generation side of a handoff."""
        assert request.handoff is not None
        source, number = self._source(request.handoff)
        until = asyncio.get_running_loop().time() + self._timeout_s
        while (context := source.transfers.get(number) if source else None) is None:
            # With the other schedule style, the context phase may begin later.
            if request.handoff.schedule_style != 1 or asyncio.get_running_loop().time() > until or request.is_aborted:
                self._finish(request, Response(finish_reason="cancelled"))
                return
            await asyncio.sleep(STEP_S)
        await asyncio.sleep(TRANSFER_S)
        request.kv = context.tokens
        request.emitted = list(request.handoff.first_gen_tokens or context.emitted)
        assert source is not None
        source.end_transfer(number)
        request.is_moving = False
        assert request.hold is not None
        self.cache.commit(request.hold, request.kv, request.salt)
        if not request.is_aborted:
            # The first response of a generation phase contains the token from the context phase.
            self._respond(
                request,
                Response(token_ids=list(request.emitted), logprobs=list(request.handoff.first_gen_log_probs or ())),
            )

    def _source(self, handoff: DisaggregatedParams) -> tuple["Executor | None", int]:
        if handoff.disagg_request_id is not None:
            return ENGINES.get(handoff.ctx_info_endpoint or ""), handoff.disagg_request_id
        state = json.loads(handoff.opaque_state or b"{}")
        return ENGINES.get(state.get("endpoint", "")), handoff.ctx_request_id or -1

    def _advance(self, request: Request) -> None:
        """Generates one token."""
        params, tokens = request.params, [*request.kv, *request.emitted]
        token, scores = sample(tokens, len(request.emitted), params, self._vocabulary)
        is_first = not request.emitted
        request.emitted.append(token)
        assert request.hold is not None
        if is_first:
            self.cache.commit(request.hold, request.kv, request.salt)
        self.cache.grow(request.hold, len(tokens) + 1)
        response = Response(token_ids=[token], logprobs=[scores] if scores else [], cached_tokens=request.cached)
        if is_first and params.prompt_logprobs is not None:
            response.prompt_logprobs = score_prompt(request.tokens, params.prompt_logprobs, self._vocabulary)
        if request.phase == "context_only":
            self._hand_over(request, response)
            return
        if token == params.end_id and not params.ignore_eos:
            response.finish_reason = "stop"
        elif token in (params.stop_token_ids or ()):
            response.finish_reason, response.stop_reason = "stop", token
        elif len(request.emitted) >= params.max_tokens:
            response.finish_reason = "length"
        if response.finish_reason:
            self.cache.commit(request.hold, tokens, request.salt)
            self._finish(request, response)
        else:
            self._respond(request, response)

    def _hand_over(self, request: Request, response: Response) -> None:
        """Ends the context phase. The blocks stay until they are pulled, or for the transfer's time limit."""
        assert request.handoff is not None
        self._running.remove(request)
        number = request.handoff.disagg_request_id or request.number
        self.transfers[number] = request
        asyncio.get_running_loop().call_later(self._timeout_s, self.end_transfer, number)
        if request.handoff.disagg_request_id is not None:
            return
        self._close_context(request, response)

    def _close_context(self, request: Request, response: Response) -> None:
        self._live.pop(request.number, None)
        response.finish_reason = "length"
        response.params = DisaggregatedParams(
            request_type="context_only",
            first_gen_tokens=list(request.emitted),
            first_gen_log_probs=list(response.logprobs) or None,
            ctx_request_id=request.number,
            opaque_state=json.dumps({"endpoint": self.endpoint}).encode(),
        )
        request.result._put(response)

    def end_transfer(self, number: int) -> None:
        """Frees the blocks of a context phase."""
        request = self.transfers.pop(number, None)
        if request is None:
            return
        assert request.hold is not None and request.handoff is not None
        self.cache.free(request.hold)
        if request.handoff.disagg_request_id is not None:
            self._close_context(request, Response(token_ids=list(request.emitted)))
        self._record()

    def _respond(self, request: Request, response: Response) -> None:
        request.result._put(response)

    def _finish(self, request: Request, response: Response) -> None:
        self._live.pop(request.number, None)
        for requests in (self._waiting, self._running):
            if request in requests:
                requests.remove(request)
        request.is_moving = False
        if request.hold is not None:
            self.cache.free(request.hold)
        response.cached_tokens = request.cached
        request.result._put(response)

    def _record(self) -> None:
        used = self.cache.used
        self.stats.append(
            {
                "iter": self._iteration,
                "iterLatencyMS": STEP_S * 1000,
                "numActiveRequests": len(self._running),
                "numQueuedRequests": len(self._waiting),
                "kvCacheStats": {
                    "maxNumBlocks": self.cache.total,
                    "usedNumBlocks": used,
                    "freeNumBlocks": self.cache.total - used,
                    "tokensPerBlock": self.cache.size,
                },
                "inflightBatchingStats": {"numPausedRequests": 0},
            }
        )
