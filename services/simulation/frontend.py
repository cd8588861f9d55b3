"""A frontend process of the simulation: the real pipeline on the real clients, without HTTP."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvmesh.clock import Clock
from kvmesh.core import Ask, FinishReason, Leg, LegFinish, LegTask, Report, Role, TokenLogprob, WorkerRef
from kvmesh.discovery.base import Registry
from kvmesh.rpc.clients import LegLink, LegLinks, LegSink, Placed, RouterLink
from kvmesh.rpc.interceptors import channel_interceptors
from kvmesh.rpc.leg_link import GrpcLegLinks
from kvmesh.rpc.router.link import GrpcRouterLink
from kvmesh.rpc.router.settings import RouterLinkSettings
from kvmesh.telemetry import Telemetry
from services.frontend.metrics import FrontendMetrics
from services.frontend.model_cards import Described
from services.frontend.models import DiscoveredModels
from services.frontend.pipeline.fallback_router import WITHOUT_ROUTER_AFTER_S, FallbackRouterLink
from services.frontend.pipeline.local_placement import LocalPlacer
from services.frontend.pipeline.losses import LostWorkers
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.settings import ModelSettings, PipelineSettings
from services.frontend.text.text_model import TextModel
from services.simulation.ledger import RequestPhase
from services.simulation.world import World

MODEL = "bytes"
EOS_TOKEN_ID = 256
VOCABULARY_SIZE = 257
OnPhase = Callable[[str, RequestPhase], None]


class _NoFiles:
    """Workers of a simulation have no files of a model."""

    async def fetch_model_files(self, address: str, digest: str, *, timeout_s: float) -> Mapping[str, bytes]:
        """See FileSource."""
        raise AssertionError("a simulated frontend loads no files")


class SimulatedModels(DiscoveredModels):
    """Follows the workers and their cards in the registry as every frontend does. Its text model is given, not loaded from files."""

    def __init__(self, registry: Registry, text: TextModel, clock: Clock) -> None:
        super().__init__(registry=registry, source=_NoFiles(), settings=ModelSettings(), clock=clock)
        self._given = text

    async def _text(self, described: Sequence[Described]) -> TextModel:
        return self._given


@cache
def byte_tokenizer() -> Tokenizer:
    """Token i below 256 is the byte i, so most answers are full of broken characters; 256 ends an answer."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet | {"<eos>": EOS_TOKEN_ID}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


@dataclass(frozen=True, slots=True)
class _PrefillSink:
    """Notes in the trace that a prompt is computed."""

    inner: LegSink
    world: World
    leg_id: str

    def on_tokens(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None, came_s: float) -> None:
        self.inner.on_tokens(token_ids, logprobs, came_s)

    def on_prompt(self, logprobs: Sequence[TokenLogprob]) -> None:
        self.inner.on_prompt(logprobs)

    def on_finish(self, finish: LegFinish) -> None:
        if finish.error is None and finish.reason is not FinishReason.CANCELLED:
            self.world.trace.note("prefilled", self.leg_id, finish.usage.cached_tokens)
        self.inner.on_finish(finish)


@dataclass(frozen=True, slots=True, kw_only=True)
class _WatchedLink:
    """Notes in the trace what goes out to a worker."""

    inner: LegLink
    role: Role
    world: World
    on_phase: OnPhase
    on_continued: Callable[[str, int], None]

    @property
    def worker(self) -> WorkerRef:
        return self.inner.worker

    @property
    def tasks(self) -> Collection[LegTask]:
        return self.inner.tasks

    def submit_nowait(self, leg: Leg, sink: LegSink, *, timeout_s: float) -> Callable[[], None]:
        worker_id = self.inner.worker.worker_id
        if self.role is Role.PREFILL:
            self.world.trace.note("prefill", leg.leg_id, worker_id)
            if leg.rendezvous is None:
                self.on_phase(request_of(leg.leg_id), RequestPhase.PREFILLING)
            return self.inner.submit_nowait(leg, _PrefillSink(sink, self.world, leg.leg_id), timeout_s=timeout_s)
        cancel = self.inner.submit_nowait(leg, sink, timeout_s=timeout_s)
        self.world.trace.note("submit", leg.leg_id, worker_id)
        if leg.generation.emitted_token_ids:
            self.on_continued(request_of(leg.leg_id), len(leg.generation.emitted_token_ids))
        if leg.rendezvous is not None:
            # The prefill leg follows in the same iteration of the loop.
            self.on_phase(request_of(leg.leg_id), RequestPhase.PREFILLING)
        self.on_phase(request_of(leg.leg_id), RequestPhase.SUBMITTED)
        return cancel

    def release_nowait(self, handle_id: str) -> None:
        self.world.trace.note("release", handle_id, self.inner.worker.worker_id)
        self.inner.release_nowait(handle_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class _WatchedLinks:
    inner: LegLinks
    world: World
    on_phase: OnPhase
    on_continued: Callable[[str, int], None]

    async def link(self, worker: WorkerRef, role: Role, *, timeout_s: float, waits_for_lost: bool = True) -> LegLink:
        link = await self.inner.link(worker, role, timeout_s=timeout_s, waits_for_lost=waits_for_lost)
        return _WatchedLink(
            inner=link, role=role, world=self.world, on_phase=self.on_phase, on_continued=self.on_continued
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _WatchedRouter:
    """Tells of asks, placements and reports."""

    inner: RouterLink
    world: World
    on_phase: OnPhase
    on_placed: Callable[[str, str, str], None]
    asked: dict[int, str] = field(default_factory=dict)

    async def place(self, ask: Ask, *, timeout_s: float) -> Placed:
        self.on_phase(ask.request_id, RequestPhase.ASKING)
        placed = await self.inner.place(ask, timeout_s=timeout_s)
        self.asked[placed.ask_id] = ask.request_id
        prefill, decode = placed.placement.prefill, placed.placement.decode.worker_id
        prefill_id = prefill.worker_id if prefill is not None else "-"
        self.world.trace.note("placed", ask.request_id, prefill_id, decode, placed.placement.cached_tokens)
        self.on_placed(ask.request_id, prefill_id, decode)
        return placed

    def report_nowait(self, ask_id: int, report: Report) -> None:
        self.world.trace.note("report", ask_id, self.asked[ask_id], report.kind.value)
        self.inner.report_nowait(ask_id, report)


def request_of(leg_id: str) -> str:
    """Returns the request of a leg.

    A leg is called request-choice, or request-choice-attempt; requests of a simulation have no dash in their ids.
    """
    return leg_id.partition("-")[0]


class SimulatedFrontend:
    """One process: pipeline, links to routers and workers."""

    def __init__(
        self,
        world: World,
        frontend_id: str,
        settings: PipelineSettings,
        *,
        on_phase: OnPhase,
        on_placed: Callable[[str, str, str], None],
        on_continued: Callable[[str, int], None],
        link: RouterLinkSettings | None = None,
        run: int = 1,
    ) -> None:
        generator = world.random(f"frontend/{frontend_id}/{run}" if run > 1 else f"frontend/{frontend_id}")
        clock = world.clock_of(frontend_id)
        self._world = world
        self.frontend_id = frontend_id
        self.run = run
        self.is_alive = False
        telemetry = Telemetry.create("frontend")
        self._channels = world.network.pool(channel_interceptors(telemetry), client=frontend_id)
        self._registry = world.agent.registry()
        self.router_link = GrpcRouterLink(
            self._registry,
            self._channels,
            frontend_id=frontend_id,
            clock=clock,
            generator=generator,
            settings=link,
            no_stream_s=WITHOUT_ROUTER_AFTER_S,
        )
        lost_workers = LostWorkers()
        self.links = GrpcLegLinks(
            self._channels,
            frontend_id=frontend_id,
            clock=clock,
            on_broken=lambda worker_id: lost_workers.add(worker_id, clock.now()),
        )
        text = TextModel(byte_tokenizer(), eos_token_ids=[EOS_TOKEN_ID])
        self.models = SimulatedModels(self._registry, text, clock)
        self.local = LocalPlacer()
        self.metrics = FrontendMetrics(telemetry.instruments)
        placing = FallbackRouterLink(
            self.router_link,
            self.local,
            knows_router=lambda: self.router_link.knows_router,
            workers=self.models.workers,
            on_placed=self.metrics.local_placements.inc,
        )
        self.pipeline = Pipeline(
            models=self.models,
            links=_WatchedLinks(inner=self.links, world=world, on_phase=on_phase, on_continued=on_continued),
            router=_WatchedRouter(inner=placing, world=world, on_phase=on_phase, on_placed=on_placed),
            clock=clock,
            generator=generator,
            metrics=self.metrics,
            settings=settings,
            lost_workers=lost_workers,
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Looks for models and a router from now on."""
        self._world.network.revive_client(self.frontend_id)
        self._tasks = [
            asyncio.create_task(self.models.run(), name=f"models-{self.frontend_id}"),
            asyncio.create_task(self.router_link.run(), name=f"router-link-{self.frontend_id}"),
        ]
        self.is_alive = True

    @property
    def takes_requests(self) -> bool:
        """Whether a load balancer uses it: its `/health` says so, as `services/frontend/__main__.py` has it."""
        return self.is_alive and bool(self.models.served()) and not self.pipeline.is_draining

    async def kill(self) -> None:
        """SIGKILL: nothing leaves the process any more. The caller cancels its requests afterwards."""
        self._world.trace.note("kill", self.frontend_id)
        self.is_alive = False
        self._world.network.kill_client(self.frontend_id)
        self._registry.set_reachable(False)
        await self.aclose()

    async def aclose(self) -> None:
        """Ends all links."""
        await self.links.aclose()
        await self.router_link.aclose()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channels.aclose()
        await self._registry.aclose()
