"""A fake mesh that implements the client interfaces of the frontend in one process.

`FakeMesh` answers with tokens that a test scripts, one engine step at a time. `Faults` makes it fail at each place where a real mesh can fail.
It counts running legs and held handles, so that tests can check that none leak.
"""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvmesh.clock import SystemClock
from kvmesh.core import (
    Ask,
    FinishReason,
    Generation,
    Handoff,
    KvHandle,
    Leg,
    LegFinish,
    LegTask,
    Placement,
    Rendezvous,
    Report,
    ReportKind,
    Role,
    TokenLogprob,
    Usage,
    WorkerRef,
)
from kvmesh.errors import LostError, MeshError, UnavailableError, UnsupportedError
from kvmesh.rpc.clients import LegSink, Placed
from kvmesh.telemetry import Instruments
from services.frontend.access.caller import ANYBODY, model_not_found
from services.frontend.api.run import ApiRequest
from services.frontend.metrics import FrontendMetrics
from services.frontend.models import Models, ServedModel, with_adapters
from services.frontend.pipeline.losses import LostWorkers
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.pipeline.prepare import Prepared, prepare
from services.frontend.settings import PipelineSettings
from services.frontend.text.text_model import TextModel, load_text_model

TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif -%}"
    "{%- for message in messages %}{% if message.role == 'tool' and not message.tool_call_id %}"
    "{{ raise_exception('a tool message needs tool_call_id') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)
EOS = "<|im_end|>"
CORPUS = [
    "Hello! How are you today? I am a small model. The sky is blue and the sea is deep.",
    'call get_weather {"name": "get_weather", "arguments": {"city": "Paris"}} one two three four five six',
]


def write_model(directory: Path) -> Path:
    """Writes a byte-level tokenizer that can encode any text, with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", EOS],
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>"), AddedToken("</tool_call>")])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2], "temperature": 0.5}))
    return directory


def served_model(directory: Path, *, name: str = "tiny", **more: object) -> ServedModel:
    """Returns the model of `write_model` as the frontend gets it from the registry."""
    text = load_text_model(directory, SystemClock())
    values: dict[str, object] = {
        "name": name,
        "text": text,
        "context_tokens_max": 512,
        "vocabulary_size": 402,
        "block_size_tokens": 4,
        "eos_token_ids": frozenset({2}),
        "features": frozenset({"logprobs", "logit_bias"}),
        **more,
    }
    return ServedModel(**values)  # type: ignore[arg-type]


@dataclass
class Faults:
    """Failures to inject, by place. A list is consumed from the front, one entry per call."""

    place: list[MeshError] = field(default_factory=list)
    prefill: list[MeshError | None] = field(default_factory=list)
    link: list[MeshError] = field(default_factory=list)
    submit: list[MeshError] = field(default_factory=list)
    leg_after: int | None = None
    leg_error: MeshError | None = None
    legs: list[tuple[int, MeshError]] = field(default_factory=list)
    """(tokens, error): the first leg that has sent so many tokens fails with the error. Then the next entry applies."""
    cannot_continue: MeshError | None = None
    """The error of a leg that continues an answer with emitted tokens."""
    loses_finish: bool = False
    """Legs are lost between their last token and their finish."""
    stalls_after: int | None = None
    prefill_hangs: bool = False
    prefill_hangs_after: int | None = None
    """So many prefills finish, and all later ones hang."""
    prefill_s: float | None = None
    """Duration of a prefill. None: one step."""
    prefill_s_of: dict[str, float] = field(default_factory=dict)
    """Overrides `prefill_s` by worker id."""
    prefill_ends_with: MeshError | None = None
    """The error with which the next prefill ends after its duration."""
    stands_still_s: float = 0.0
    """Time for which the event loop is blocked after the finish of a prefill."""


def cut_off(after: int) -> Faults:
    """Returns faults that lose a leg after so many tokens when no engine can continue its answer: the client sees the answer end with an
    error."""
    refusal = UnsupportedError("no engine continues it", field="generation.sampling.seed")
    return Faults(leg_after=after, leg_error=LostError("the worker is gone"), cannot_continue=refusal)


CUT_OFF = "a worker was lost (worker_lost), and the answer cannot be continued on another one: no engine continues it"
"""The error message that the client receives then."""


@dataclass
class FakeMesh:
    """Implements LegLinks and RouterLink."""

    answer: Callable[[Generation], Sequence[int]]
    step_s: float = 0.0
    tokens_per_step: int = 1
    has_prefill: bool = True
    prefill_answers: bool = True
    """Whether prefill workers can answer requests for a single token."""
    answered_by_prefill: list[int] = field(default_factory=list)
    reported_failures: list[str] = field(default_factory=list)
    reported_cached_tokens: dict[ReportKind, int] = field(default_factory=dict)
    expected_ttft_s: float | None = None
    prefill_cached: int = 4
    """Prompt tokens that are in the prefill worker's cache."""
    decode_cached: int = 0
    """Prompt tokens in the decode worker's cache when a prefill worker computes the prompt."""
    handoff: Handoff = Handoff.SEQUENTIAL
    ranks: tuple[int | None, int | None] = (None, None)
    """The data-parallel ranks of a placement: prefill, decode."""
    leg_ranks: list[tuple[LegTask, int | None]] = field(default_factory=list)
    """The task and the data-parallel rank of each leg."""
    faults: Faults = field(default_factory=Faults)
    asks: list[Ask] = field(default_factory=list)
    reports: list[tuple[int, ReportKind]] = field(default_factory=list)
    prefills: list[str] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    legs: list[Leg] = field(default_factory=list)
    timeouts_s: list[float] = field(default_factory=list)
    """The timeouts of `legs`, in the same order."""
    handles: set[str] = field(default_factory=set)
    released: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    rendezvous: list[Rendezvous] = field(default_factory=list)
    running: dict[str, asyncio.Task[LegFinish]] = field(default_factory=dict)
    prefilling: int = 0
    stalled: int = 0
    before_step: Callable[[Generation, int], Awaitable[object]] | None = None
    """Awaited before each step of an answer, with the tokens sent so far: decides when the answer continues, independently of time."""

    async def place(self, ask: Ask, *, timeout_s: float) -> Placed:
        assert timeout_s > 0
        if self.faults.place:
            raise self.faults.place.pop(0)
        names = [name for name in ("d0", "d1", "d2") if name not in ask.excluded_worker_ids]
        prefills = [name for name in ("p0", "p1", "p2") if name not in ask.excluded_worker_ids]
        if not names or not prefills:
            raise UnavailableError("no worker left", reason="no_worker")
        self.asks.append(ask)
        number = len(self.asks)
        has_prefill = self.has_prefill
        return Placed(
            ask_id=number,
            placement=Placement(
                reservation_id=f"r{number}",
                decode=WorkerRef(worker_id=names[0], address=f"{names[0]}:1", data_parallel_rank=self.ranks[1]),
                prefill=WorkerRef(worker_id=prefills[0], address=f"{prefills[0]}:1", data_parallel_rank=self.ranks[0])
                if has_prefill
                else None,
                handoff=self.handoff if has_prefill else None,
                rendezvous_address="p0:9" if self.handoff is Handoff.RENDEZVOUS else "",
                cached_tokens=2,
                expected_ttft_s=self.expected_ttft_s,
            ),
        )

    def report_nowait(self, ask_id: int, report: Report) -> None:
        self.reports.append((ask_id, report.kind))
        if report.kind is ReportKind.FAILED:
            self.reported_failures.append(report.failed_worker_id)
        if report.is_answered_by_prefill:
            self.answered_by_prefill.append(ask_id)
        if report.cached_tokens is not None:
            self.reported_cached_tokens[report.kind] = report.cached_tokens

    async def link(self, worker: WorkerRef, role: Role, *, timeout_s: float, waits_for_lost: bool = True) -> "FakeLink":
        assert timeout_s > 0
        if role is Role.DECODE and self.faults.link:
            raise self.faults.link.pop(0)
        # One link serves all ranks of the worker.
        return FakeLink(self, replace(worker, data_parallel_rank=None), role)

    def start(self, leg: Leg, sink: LegSink, worker: WorkerRef) -> Callable[[], None]:
        """Runs a leg in a task and returns a function that cancels it. The sink always gets exactly one finish."""
        assert leg.leg_id not in self.running, "leg ids must be unique among running legs"
        self.leg_ranks.append((leg.task, leg.generation.data_parallel_rank))
        match leg.task:
            case LegTask.PREFILL:
                run = self._prefill(leg, sink, worker)
            case LegTask.EMBED:
                run = self._embed(leg)
            case _:
                run = self._generate(leg, sink)
        task = self.running[leg.leg_id] = asyncio.get_running_loop().create_task(run)

        def end(task: asyncio.Task[LegFinish]) -> None:
            del self.running[leg.leg_id]
            sink.on_finish(LegFinish(reason=FinishReason.CANCELLED) if task.cancelled() else task.result())
            if leg.task is LegTask.PREFILL and self.faults.stands_still_s:
                loop: Any = asyncio.get_running_loop()
                loop.stand_still(self.faults.stands_still_s)

        task.add_done_callback(end)

        def cancel() -> None:
            if leg.leg_id in self.running:
                self.cancelled.append(leg.leg_id)
                task.cancel()

        return cancel

    async def _prefill(self, leg: Leg, sink: LegSink, worker: WorkerRef) -> LegFinish:
        faults = self.faults
        self.prefilling += 1
        try:
            takes_s = self.step_s if faults.prefill_s is None else faults.prefill_s
            takes_s = faults.prefill_s_of.get(worker.worker_id, takes_s)
            await asyncio.sleep(1000 if self._hangs() else takes_s)
        finally:
            self.prefilling -= 1
        if (error := faults.prefill_ends_with) is not None:
            faults.prefill_ends_with = None
            return LegFinish(reason=FinishReason.ERROR, error=error)
        if leg.rendezvous is not None and leg.generation.sampling.prompt_logprobs is not None:
            sink.on_prompt([TokenLogprob(logprob=-0.5) for _ in leg.generation.token_ids[1:]])
        usage = Usage(prompt_tokens=len(leg.generation.token_ids), cached_tokens=self.prefill_cached)
        return LegFinish(reason=FinishReason.HANDED_OFF, usage=usage, handle=self._handle(leg, worker))

    async def _embed(self, leg: Leg) -> LegFinish:
        await asyncio.sleep(self.step_s)
        usage = Usage(prompt_tokens=len(leg.generation.token_ids), cached_tokens=1)
        return LegFinish(reason=FinishReason.STOP, usage=usage, embedding=[0.5, 0.5])

    def _hangs(self) -> bool:
        after = self.faults.prefill_hangs_after
        return self.faults.prefill_hangs or (after is not None and len(self.prefills) > after)

    def _handle(self, leg: Leg, worker: WorkerRef) -> KvHandle | None:
        if leg.rendezvous is not None:
            return None
        self.handles.add(leg.leg_id)
        return KvHandle(
            handle_id=leg.leg_id, format="fake", compatibility_hash="c", payload=b"", worker_id=worker.worker_id,
            worker_epoch=0, tokens=len(leg.generation.token_ids), lease_s=30.0,
        )  # fmt: skip

    async def _generate(self, leg: Leg, sink: LegSink) -> LegFinish:
        is_answered_by_prefill = leg.leg_id in self.prefills
        if is_answered_by_prefill and self._hangs():
            await asyncio.sleep(1000)
        computes = leg.handle is None and leg.rendezvous is None
        cached = self.prefill_cached if is_answered_by_prefill else 2 if computes else self.decode_cached
        usage = Usage(prompt_tokens=len(leg.generation.token_ids), cached_tokens=cached)
        finish = await self._tokens(leg.generation, sink)
        return LegFinish(reason=finish, usage=usage) if isinstance(finish, FinishReason) else finish

    async def _tokens(self, generation: Generation, sink: LegSink) -> FinishReason | LegFinish:
        faults = self.faults
        tokens, emitted = list(self.answer(generation)), len(generation.emitted_token_ids)
        assert list(generation.emitted_token_ids) == tokens[:emitted], (
            "a continued answer must start with its own tokens"
        )
        if emitted and self.faults.cannot_continue is not None:
            return LegFinish(reason=FinishReason.ERROR, error=self.faults.cannot_continue)
        if generation.sampling.prompt_logprobs is not None and not emitted:
            sink.on_prompt([TokenLogprob(logprob=-0.5) for _ in generation.token_ids[1:]])
        tokens = tokens[emitted:]
        limit = (generation.sampling.max_tokens or 10**9) - emitted
        assert limit > 0
        sent = 0
        while True:
            await asyncio.sleep(self.step_s)
            if self.before_step is not None:
                await self.before_step(generation, sent)
            if faults.leg_after is not None and sent >= faults.leg_after:
                error, faults.leg_after = faults.leg_error, None
                return LegFinish(reason=FinishReason.ERROR, error=error)
            if faults.legs and sent >= faults.legs[0][0]:
                return LegFinish(reason=FinishReason.ERROR, error=faults.legs.pop(0)[1])
            if faults.stalls_after is not None and sent >= faults.stalls_after:
                self.stalled += 1
                await asyncio.sleep(10_000)
            step = tokens[sent : min(limit, sent + self.tokens_per_step)]
            if step:
                sink.on_tokens(step, self._logprobs(generation, step), asyncio.get_running_loop().time())
                sent += len(step)
            if sent >= min(len(tokens), limit):
                if faults.loses_finish:
                    return LegFinish(reason=FinishReason.ERROR, error=LostError("lost before the end"))
                return FinishReason.LENGTH if sent == limit and step[-1:] != [2] else FinishReason.STOP

    def _logprobs(self, generation: Generation, tokens: Sequence[int]) -> list[TokenLogprob] | None:
        count = generation.sampling.logprobs
        if count is None:
            return None
        return [
            TokenLogprob(logprob=-0.25, alternatives=tuple((token + k, -0.25 - k) for k in range(count)))
            for token in tokens
        ]

    def settled(self) -> list[tuple[int, ReportKind]]:
        """Returns the settling reports. Without faults there is one per placement."""
        return [(ask_id, kind) for ask_id, kind in self.reports if kind.settles]


@dataclass(frozen=True)
class FakeLink:
    """A link to one worker of the fake mesh."""

    mesh: FakeMesh
    worker: WorkerRef
    role: Role

    @property
    def tasks(self) -> Collection[LegTask]:
        if self.role is Role.DECODE:
            return (LegTask.GENERATE, LegTask.EMBED)
        return (LegTask.PREFILL, LegTask.GENERATE) if self.mesh.prefill_answers else (LegTask.PREFILL,)

    def submit_nowait(self, leg: Leg, sink: LegSink, *, timeout_s: float) -> Callable[[], None]:
        mesh = self.mesh
        assert timeout_s > 0 and leg.task in self.tasks
        if self.role is Role.PREFILL:
            mesh.prefills.append(leg.leg_id)
            if mesh.faults.prefill and (error := mesh.faults.prefill.pop(0)) is not None:
                sink.on_finish(LegFinish(reason=FinishReason.ERROR, error=error))
                return lambda: None
            if leg.task is LegTask.GENERATE:
                mesh.generations.append(leg.generation)
            return mesh.start(leg, sink, self.worker)
        if mesh.faults.submit:
            raise mesh.faults.submit.pop(0)
        mesh.legs.append(leg)
        mesh.timeouts_s.append(timeout_s)
        mesh.generations.append(leg.generation)
        if leg.handle is not None:
            assert 0 < leg.handle.lease_s <= 30.0
            mesh.handles.discard(leg.handle.handle_id)
        if leg.rendezvous is not None:
            mesh.rendezvous.append(leg.rendezvous)
        return mesh.start(leg, sink, self.worker)

    def release_nowait(self, handle_id: str) -> None:
        self.mesh.handles.discard(handle_id)
        self.mesh.released.append(handle_id)


def prepared_of(request: ApiRequest, model: ServedModel) -> Prepared:
    """Prepares the first prompt of a request, as two tokens."""
    return prepare(request.requests[0], model, [1, 2], hashes=[], features=(), caller=ANYBODY, attempt_timeout_s=1.0)


def make_pipeline(
    mesh: FakeMesh, served: Models, *, lost_workers: LostWorkers | None = None, **settings: object
) -> Pipeline:
    """Returns a pipeline on a fake mesh with its own metrics registry."""
    return Pipeline(
        models=served,
        links=mesh,
        router=mesh,
        clock=SystemClock(),
        generator=random.Random(7),
        metrics=FrontendMetrics(Instruments(CollectorRegistry(), "frontend")),
        settings=PipelineSettings(**settings),  # type: ignore[arg-type]
        lost_workers=lost_workers,
    )


def tokens_of(text: TextModel, answer: str, *, ends: bool = True) -> list[int]:
    """Returns the tokens of a scripted answer, with the end-of-sequence token."""
    return [*text.tokenise(answer, adds_special_tokens=False), *([2] if ends else [])]


__all__ = [
    "CUT_OFF",
    "FakeMesh",
    "Faults",
    "StaticModels",
    "cut_off",
    "make_pipeline",
    "served_model",
    "tokens_of",
    "write_model",
]


class StaticModels:
    """A fixed set of models."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self._models = with_adapters({model.name: model for model in models})

    def find(self, name: str) -> ServedModel:
        """See Models."""
        if name not in self._models:
            raise model_not_found(name)
        return self._models[name]

    def served(self) -> Sequence[ServedModel]:
        """See Models."""
        return [model for _, model in sorted(self._models.items()) if not model.adapter]
