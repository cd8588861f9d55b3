"""A mesh behind the frontend's three client interfaces, in one process: the lowest seam that the frontend has.

`FakeMesh` answers with the tokens that a test scripts, one engine step at a time, and can be told to fail at each place
where the real one can. It counts what is held, so that tests can see that nothing is left.
"""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from prometheus_client import CollectorRegistry
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvmesh.clock import SystemClock
from kvmesh.core import (
    Ask,
    FinishReason,
    Generation,
    Handoff,
    KvHandle,
    Placement,
    Rendezvous,
    ReportKind,
    TokenLogprob,
    Usage,
    WorkerRef,
)
from kvmesh.errors import MeshError, UnavailableError
from kvmesh.rpc.clients import DecodeLeg, LegFinish, LegOutput, LegSink, Placed, PrefillResult
from kvmesh.telemetry import Instruments
from services.frontend.metrics import FrontendMetrics
from services.frontend.models import Models, ServedModel, StaticModels
from services.frontend.pipeline.pipeline import Pipeline
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
    """A byte-level tokenizer that can write any text, with a chat template."""
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
    """The model of `write_model` as the registry would tell it."""
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
    """What goes wrong, by place; a list is used up from the front, one entry per call."""

    place: list[MeshError] = field(default_factory=list)
    prefill: list[MeshError] = field(default_factory=list)
    link: list[MeshError] = field(default_factory=list)
    submit: list[MeshError] = field(default_factory=list)
    leg_after: int | None = None
    leg_error: MeshError | None = None
    legs: list[tuple[int, MeshError]] = field(default_factory=list)
    """The first leg that has so many tokens fails so; then the next entry counts."""
    stalls_after: int | None = None
    prefill_hangs: bool = False


@dataclass
class FakeMesh:
    """Implements PrefillClient, DecodeLinks, DecodeLink and RouterLink."""

    answer: Callable[[Generation], Sequence[int]]
    step_s: float = 0.0
    tokens_per_step: int = 1
    has_prefill: bool = True
    answers: bool = True
    """Prefill workers answer single tokens."""
    has_welcomed: bool = True
    """And have said whether they do."""
    answered_by_prefill: list[int] = field(default_factory=list)
    told_cached: dict[ReportKind, int] = field(default_factory=dict)
    handoff: Handoff = Handoff.SEQUENTIAL
    faults: Faults = field(default_factory=Faults)
    asks: list[Ask] = field(default_factory=list)
    reports: list[tuple[int, ReportKind]] = field(default_factory=list)
    prefills: list[str] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    legs: list[DecodeLeg] = field(default_factory=list)
    handles: set[str] = field(default_factory=set)
    released: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    rendezvous: list[Rendezvous] = field(default_factory=list)
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    prefilling: int = 0
    stalled: int = 0

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
                decode=WorkerRef(worker_id=names[0], address=f"{names[0]}:1"),
                prefill=WorkerRef(worker_id=prefills[0], address=f"{prefills[0]}:1") if has_prefill else None,
                handoff=self.handoff if has_prefill else None,
                rendezvous_address="p0:9" if self.handoff is Handoff.RENDEZVOUS else "",
            ),
        )

    def report_nowait(
        self, ask_id: int, kind: ReportKind, *, cached_tokens: int | None = None, is_answered_by_prefill: bool = False,
        **_: object,
    ) -> None:  # fmt: skip
        self.reports.append((ask_id, kind))
        if is_answered_by_prefill:
            self.answered_by_prefill.append(ask_id)
        if cached_tokens is not None:
            self.told_cached[kind] = cached_tokens

    def may_answer(self, worker: WorkerRef) -> bool:
        return self.answers or not self.has_welcomed

    async def prefill(
        self, worker: WorkerRef, *, request_id: str, generation: Generation, timeout_s: float,
        rendezvous: Rendezvous | None = None, reservation_id: str = "", wants_output: bool = False,
    ) -> PrefillResult:  # fmt: skip
        assert timeout_s > 0 and reservation_id
        assert not wants_output or self.may_answer(worker)
        self.prefills.append(request_id)
        if self.faults.prefill:
            raise self.faults.prefill.pop(0)
        self.prefilling += 1
        try:
            await asyncio.sleep(1000 if self.faults.prefill_hangs else self.step_s)
        finally:
            self.prefilling -= 1
        usage = Usage(prompt_tokens=len(generation.token_ids), cached_tokens=4)
        if rendezvous is not None:
            return PrefillResult(handle=None, usage=usage, queue_s=0, compute_s=0)
        if wants_output and self.answers:
            output = self._output(generation, usage)
            return PrefillResult(handle=None, usage=output.finish.usage, queue_s=0, compute_s=0, output=output)
        self.handles.add(request_id)
        handle = KvHandle(
            handle_id=request_id, format="fake", compatibility_hash="c", payload=b"", worker_id=worker.worker_id,
            worker_epoch=0, tokens=len(generation.token_ids), lease_s=30.0,
        )  # fmt: skip
        return PrefillResult(handle=handle, usage=usage, queue_s=0, compute_s=0)

    def _output(self, generation: Generation, usage: Usage) -> LegOutput:
        self.generations.append(generation)
        tokens = list(self.answer(generation))[:1]
        asks_prompt = generation.sampling.prompt_logprobs is not None
        reason = FinishReason.STOP if tokens == [2] else FinishReason.LENGTH
        return LegOutput(
            token_ids=tokens,
            finish=LegFinish(reason=reason, usage=replace(usage, output_tokens=1)),
            logprobs=self._logprobs(generation, tokens),
            prompt_logprobs=[TokenLogprob(logprob=-0.5) for _ in generation.token_ids[1:]] if asks_prompt else None,
        )

    async def release_kv(self, worker: WorkerRef, handle_id: str, *, timeout_s: float) -> None:
        self.handles.discard(handle_id)
        self.released.append(handle_id)

    async def link(self, worker: WorkerRef, *, timeout_s: float) -> "FakeMesh":
        if self.faults.link:
            raise self.faults.link.pop(0)
        return self

    def submit_nowait(self, leg: DecodeLeg, sink: LegSink) -> Callable[[], None]:
        if self.faults.submit:
            raise self.faults.submit.pop(0)
        assert leg.request_id not in self.running, "leg ids are unique among live legs"
        self.legs.append(leg)
        self.generations.append(leg.generation)
        if leg.handle is not None:
            assert 0 < leg.handle.lease_s <= 30.0
            self.handles.discard(leg.handle.handle_id)
        if leg.rendezvous is not None:
            self.rendezvous.append(leg.rendezvous)
        task = asyncio.get_running_loop().create_task(self._generate(leg, sink))
        self.running[leg.request_id] = task

        def cancel() -> None:
            if leg.request_id in self.running:
                self.cancelled.append(leg.request_id)
                task.cancel()

        return cancel

    async def _generate(self, leg: DecodeLeg, sink: LegSink) -> None:
        computes = leg.handle is None and leg.rendezvous is None
        usage = Usage(prompt_tokens=len(leg.generation.token_ids), cached_tokens=2 if computes else 0)
        try:
            finish = await self._tokens(leg.generation, sink)
        except asyncio.CancelledError:
            self.running.pop(leg.request_id, None)
            sink.on_finish(LegFinish(reason=FinishReason.CANCELLED))
            return
        self.running.pop(leg.request_id, None)
        sink.on_finish(LegFinish(reason=finish, usage=usage) if isinstance(finish, FinishReason) else finish)

    async def _tokens(self, generation: Generation, sink: LegSink) -> FinishReason | LegFinish:
        faults = self.faults
        tokens = list(self.answer(generation))
        if generation.sampling.prompt_logprobs is not None:
            sink.on_prompt([TokenLogprob(logprob=-0.5) for _ in generation.token_ids[1:]])
        limit = generation.sampling.max_tokens or 10**9
        sent = 0
        while True:
            await asyncio.sleep(self.step_s)
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
        """Reports that settle, one per placement if all is well."""
        return [(ask_id, kind) for ask_id, kind in self.reports if kind.settles]


def make_pipeline(mesh: FakeMesh, served: Models, **settings: object) -> Pipeline:
    """A pipeline on a fake mesh, with its own metrics registry."""
    return Pipeline(
        models=served,
        prefill=mesh,
        links=mesh,
        router=mesh,
        clock=SystemClock(),
        generator=random.Random(7),
        metrics=FrontendMetrics(Instruments(CollectorRegistry(), "frontend")),
        settings=PipelineSettings(**settings),  # type: ignore[arg-type]
    )


def tokens_of(text: TextModel, answer: str, *, ends: bool = True) -> list[int]:
    """The tokens of a scripted answer, with the end-of-sequence token."""
    return [*text.tokenise(answer, adds_special_tokens=False), *([2] if ends else [])]


__all__ = ["FakeMesh", "Faults", "StaticModels", "make_pipeline", "served_model", "tokens_of", "write_model"]
