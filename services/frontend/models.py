"""The served models: follows workers and their model cards in the registry, and loads tokenizers and chat templates."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from kvmesh.checks import is_whole_number
from kvmesh.clock import Clock
from kvmesh.discovery.base import DECODE, PREFILL, Instance, Registry, View
from kvmesh.discovery.members import watch_members
from kvmesh.errors import MeshError, UnavailableError, UnsupportedError
from kvmesh.event_log import event_logger
from services.frontend.access.caller import model_not_found
from services.frontend.model_cards import CARD_PREFIX, Described, WorkerCard, by_digest, is_decoder, read_card
from services.frontend.parser_process.process import ParserProcess
from services.frontend.parsers.select import VLLM, ParserNames
from services.frontend.settings import ModelSettings
from services.frontend.text.model_directories import FileSource, ModelDirectories
from services.frontend.text.text_model import TextModel, load_text_model

_log = event_logger(__name__)
RELOAD_S = 5.0
"""Pause before another attempt to load a model whose files could not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that takes requests. `adapter` is set if it was found by the name of a LoRA adapter."""

    name: str
    text: TextModel
    context_tokens_max: int
    vocabulary_size: int
    block_size_tokens: int
    eos_token_ids: frozenset[int]
    features: frozenset[str] = frozenset()
    adapters: Sequence[str] = ()
    workers_ready: int = 1
    created_s: int = 0
    adapter: str = ""
    source: str = ""
    """Directory or hub repository of the model, as its workers name it."""
    files_digest: str = ""
    """ModelCard.files_digest of the files that `text` was loaded from."""


class Models(Protocol):
    """Finds served models by name."""

    def find(self, name: str) -> ServedModel:
        """Finds a served model by its name or by an adapter's. Raises NotFoundError, or UnavailableError while it has no worker."""
        ...

    def served(self) -> Sequence[ServedModel]:
        """Returns all models that take requests now, sorted by name."""
        ...


def with_adapters(models: Mapping[str, ServedModel]) -> dict[str, ServedModel]:
    """Adds each adapter under its own name. A model's name takes precedence."""
    adapters = {name: replace(model, adapter=name, adapters=()) for model in models.values() for name in model.adapters}
    return adapters | dict(models)


class DiscoveredModels:
    """Models of the workers in the registry. `run` follows them until cancelled.

    A model is served while a decode worker takes requests, its card is known and its files are loaded. Files stay loaded, so that a model
    whose last worker left is served again immediately when a worker returns.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        source: FileSource,
        settings: ModelSettings,
        clock: Clock,
        parsers: ParserNames | None = None,
    ) -> None:
        self._registry = registry
        self._directories = ModelDirectories(settings, source, clock)
        self._settings = settings
        self._parsers = parsers or ParserNames()
        self._clock = clock
        self._views: dict[str, Sequence[Instance]] = {PREFILL: (), DECODE: ()}
        self._cards: dict[str, tuple[str, WorkerCard]] = {}
        self._texts: dict[tuple[str, str, str], TextModel] = {}
        self._served: dict[str, ServedModel] = {}
        self._created_s: dict[str, int] = {}
        self._problems: dict[str, str] = {}
        self._refusals: dict[str, UnsupportedError] = {}
        self._differing: dict[str, set[str]] = {}
        self._changed = asyncio.Event()
        self._serves = asyncio.Event()

    def find(self, name: str) -> ServedModel:
        """See Models."""
        if (model := self._served.get(name)) is not None:
            return model
        if problem := self._problem(name):
            raise UnavailableError(
                f"the model accepts no requests now: {problem}", field="model", reason="no_worker", retry_after_s=1.0
            )
        raise model_not_found(name)

    def _problem(self, name: str) -> str:
        """Returns why a known model takes no requests; empty if it does not exist."""
        if name in self._problems:
            return self._problems[name]
        if name in self._created_s:
            return "it has no workers"
        return "" if self._served or self._problems else "there is no worker yet"

    def served(self) -> Sequence[ServedModel]:
        """See Models."""
        return [model for name, model in sorted(self._served.items()) if not model.adapter]

    def workers(self, name: str) -> Sequence[Described]:
        """Returns the workers of a model whose cards are known."""
        listed = [each for instances in self._views.values() for each in instances if each.meta.get("model") == name]
        return [(each, self._cards[each.instance_id][1]) for each in listed if each.instance_id in self._cards]

    def problems(self) -> Mapping[str, str]:
        """Returns why known models take no requests, by model."""
        return dict(self._problems)

    async def start(self) -> None:
        """Does nothing: a frontend without models refuses requests."""

    async def wait_served(self) -> None:
        """Waits until a model is served for the first time."""
        await self._serves.wait()

    async def aclose(self) -> None:
        """Ends parser processes. The runner cancels `run`."""
        for text in self._texts.values():
            if text.parser_process is not None:
                await text.parser_process.aclose()

    async def run(self) -> None:
        """Follows workers until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(PREFILL), name="models-watch-prefill")
            tasks.create_task(self._watch(DECODE), name="models-watch-decode")
            tasks.create_task(self._follow(), name="models-follow")

    async def _watch(self, service: str) -> None:
        async with aclosing(watch_members(self._registry, service, self._clock)) as views:
            async for view in views:
                self._on_view(view)

    def _on_view(self, view: View) -> None:
        self._views[view.service] = view.instances
        self._changed.set()

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            # Before the refresh: a change during it causes another one.
            self._changed.clear()
            try:
                is_settled = await self._refresh()
            except MeshError as error:
                _log.warning("models_not_refreshed", reason=error.reason, detail=error.message)
                is_settled = False
            if not is_settled:
                await self._wait_retry()

    async def _wait_retry(self) -> None:
        try:
            async with asyncio.timeout(RELOAD_S):
                await self._changed.wait()
        except TimeoutError:
            # Makes `_follow` refresh again without a change.
            self._changed.set()

    async def _refresh(self) -> bool:
        """Updates `_served` from the views. Returns False if something failed that a later attempt may succeed with."""
        names = {each.meta.get("model", "") for instances in self._views.values() for each in instances} - {""}
        listed = {each.instance_id for instances in self._views.values() for each in instances}
        self._cards = {worker_id: card for worker_id, card in self._cards.items() if worker_id in listed}
        served: dict[str, ServedModel] = {}
        problems: dict[str, str] = {}
        for name in sorted(names):
            try:
                model = await self._model(name)
            except MeshError as error:
                problems[name] = error.message
                continue
            served[name] = model
        served = with_adapters(served)
        self._log_changes(served, problems)
        self._served, self._problems = served, problems
        if served:
            self._serves.set()
        return not problems

    def _log_changes(self, served: Mapping[str, ServedModel], problems: Mapping[str, str]) -> None:
        for name in served.keys() - self._served.keys():
            _log.info("model_served", model=name, workers=served[name].workers_ready)
        for name in self._served.keys() - served.keys():
            _log.warning("model_gone", model=name)
        for name, problem in problems.items():
            if self._problems.get(name) != problem:
                _log.warning("model_unavailable", model=name, detail=problem)

    async def _model(self, name: str) -> ServedModel:
        workers = [
            each
            for instances in self._views.values()
            for each in instances
            if each.meta.get("model") == name and each.takes_requests
        ]
        if not any(map(is_decoder, workers)):
            raise UnavailableError("no decode worker accepts requests", reason="no_worker")
        groups = by_digest([(each, card) for each in workers if (card := await self._card(each)) is not None])
        if not groups:
            raise UnavailableError("no decode worker has published its model card yet", reason="no_card")
        self._log_differing(name, groups)
        described, text = await self._loaded(groups)
        cards = [card for _, card in described]
        card = cards[0]
        decoders = [each for each, _ in described if is_decoder(each)]
        created_s = self._created_s.setdefault(name, int(self._clock.wall()))
        return ServedModel(
            name=name,
            source=card.source,
            files_digest=card.files_digest,
            text=text,
            # Any worker may get a request, so the smallest context counts. The router finds a worker with the features that a request needs.
            context_tokens_max=min(each.context_tokens_max for each in cards),
            vocabulary_size=card.vocabulary_size,
            block_size_tokens=_integer(decoders[0].meta.get("block_size_tokens"), 0),
            eos_token_ids=frozenset((*card.eos_token_ids, *text.eos_token_ids)),
            features=frozenset(feature for each in cards for feature in each.features),
            adapters=tuple(sorted({adapter for each in cards for adapter in each.adapters})),
            workers_ready=len(described),
            created_s=created_s,
        )

    async def _card(self, instance: Instance) -> WorkerCard | None:
        """Returns a worker's card. Reads it again when the worker's epoch changes; adapters loaded later count from then on."""
        epoch = instance.meta.get("epoch", "")
        known = self._cards.get(instance.instance_id)
        if known is not None and known[0] == epoch:
            return known[1]
        entry = await self._registry.get(CARD_PREFIX + instance.instance_id)
        if entry is None:
            return None
        card = read_card(entry.value)
        self._cards[instance.instance_id] = (epoch, card)
        return card

    async def _loaded(self, groups: Sequence[Sequence[Described]]) -> tuple[Sequence[Described], TextModel]:
        """Returns the first group whose files can be loaded, and its text side. Raises the failure of the preferred group."""
        failures: list[MeshError] = []
        for group in groups:
            try:
                return group, await self._text(group)
            except MeshError as error:
                failures.append(error)
        raise failures[0]

    def _log_differing(self, name: str, groups: Sequence[Sequence[Described]]) -> None:
        workers = {group[0][1].files_digest[:12] or "none": group[0][0].instance_id for group in groups}
        if len(groups) > 1 and self._differing.get(name) != workers.keys():
            _log.warning(
                "model_files_differ", model=name, workers=workers, detail="requests go to workers of one digest"
            )
        self._differing[name] = set(workers)

    async def _text(self, described: Sequence[Described]) -> TextModel:
        card = described[0][1]
        # The digest alone identifies files. Without one, the source and its revision do.
        key = (card.name, card.files_digest or card.source, card.revision)
        known = self._texts.get(key)
        if known is None:
            directory = await self._directories.find(card, [each for each, _ in described])
            known = await self._load_in_thread(card, directory)
            if known.selection.is_remote:
                known.parser_process = await self._start_parsers(card, directory)
            self._texts[key] = known
        return known

    async def _start_parsers(self, card: WorkerCard, directory: Path) -> ParserProcess:
        if (refusal := self._refusals.get(card.name)) is not None:
            # A parser that vLLM lacks stays missing, and each attempt takes seconds.
            raise refusal
        process = ParserProcess(
            directory,
            tool=_remote_name(self._parsers.tool_parser(card.name)),
            reasoning=_remote_name(self._parsers.reasoning_parser(card.name)),
            answers_max=self._settings.parser_process_answers_max,
        )
        try:
            await process.start()
        except UnsupportedError as error:
            self._refusals[card.name] = error
            raise
        return process

    async def _load_in_thread(self, card: WorkerCard, directory: Path) -> TextModel:
        # In a thread that ends afterwards: fastokens keeps 4 MiB for each thread that has ever used it.
        thread = ThreadPoolExecutor(1, thread_name_prefix="load-model")
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, self._load, card, directory)
        finally:
            thread.shutdown(wait=False)

    def _load(self, card: WorkerCard, directory: Path) -> TextModel:
        text = load_text_model(
            directory,
            self._clock,
            tool_parser=self._parsers.tool_parser(card.name),
            reasoning_parser=self._parsers.reasoning_parser(card.name),
            is_fast=self._settings.fast_tokenizer,
            cached_characters_max=self._settings.cached_characters_max,
        )
        for problem in text.selection.problems:
            _log.warning("parser_does_not_fit", model=card.name, detail=problem)
        return text


def _remote_name(word: str) -> str:
    """Returns NAME of `vllm:NAME`; empty for other values."""
    return word.removeprefix(VLLM) if word.startswith(VLLM) else ""


def _integer(text: str | None, default: int) -> int:
    return int(text) if text is not None and is_whole_number(text) else default
