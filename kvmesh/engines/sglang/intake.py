"""Checks legs and translates them to messages for the engine process. Runs on the event loop."""

from dataclasses import dataclass
from random import Random

from kvmesh.checks import check_generation
from kvmesh.core import LegTask, ModelCard
from kvmesh.engines.base import EngineRequest
from kvmesh.engines.sampling_names import FIELD
from kvmesh.engines.sglang.messages import Meeting, Ready, Submit
from kvmesh.engines.sglang.sampling import PREFILL_ARGUMENTS, sampling_arguments
from kvmesh.errors import InvalidRequestError, KvLostError, UnsupportedError
from kvmesh.kv.blocks import pack_tokens

SEED_BITS = ROOM_BITS = 63
NO_TRANSFER_HOST = "2.2.2.2"
"""SGLang's FAKE_BOOTSTRAP_HOST."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangIntake:
    """Makes messages for an engine in `mode` (`null`, `prefill` or `decode`).

    `moves_kv` False: the transfer backend is `fake`. `random` draws seeds for requests without one.
    """

    ready: Ready
    card: ModelCard
    mode: str
    moves_kv: bool
    random: Random

    def message(self, request: EngineRequest, *, number: int, adapter_id: str) -> Submit:
        """Returns the leg as a message. InvalidRequestError, UnsupportedError or KvLostError, without side effects."""
        generation = request.generation
        check_generation(
            generation,
            vocabulary_size=self.card.vocabulary_size,
            context_tokens_max=self.card.context_tokens_max,
        )
        self._check(request)
        sampling = generation.sampling
        emitted = len(generation.emitted_token_ids)
        return Submit(
            number=number,
            token_ids=pack_tokens([*generation.token_ids, *generation.emitted_token_ids]),
            sampling=self._sampling(request),
            # The prefill engine's part of the first token's log-probability comes with the KV.
            logprobs=sampling.logprobs if request.task is not LegTask.EMBED else None,
            # The client has them already when tokens were emitted.
            prompt_logprobs=None if emitted or request.task is LegTask.EMBED else sampling.prompt_logprobs,
            priority=generation.priority,
            adapter=generation.adapter,
            adapter_id=adapter_id,
            cache_salt=generation.cache_salt,
            is_embedding=request.task is LegTask.EMBED,
            dimensions=request.dimensions,
            meeting=self._meeting(request),
        )

    def _sampling(self, request: EngineRequest) -> dict[str, object]:
        if request.task is LegTask.EMBED:
            return {"max_new_tokens": 0}
        arguments = sampling_arguments(
            request.generation,
            self.ready.sampling_defaults,
            context_tokens_max=self.card.context_tokens_max,
            seed=self.random.getrandbits(SEED_BITS),
        )
        return {**arguments, **PREFILL_ARGUMENTS} if request.task is LegTask.PREFILL else arguments

    def _check(self, request: EngineRequest) -> None:
        self._check_task(request)
        generation, ready = request.generation, self.ready
        sampling = generation.sampling
        refused = (
            ("generation.media", bool(generation.media), "this SGLang engine takes no media"),
            (
                "generation.data_parallel_rank",
                bool(generation.data_parallel_rank),
                "this SGLang engine has one data-parallel rank",
            ),
            (
                f"{FIELD}.constraint",
                sampling.constraint is not None and not ready.has_tokenizer,
                "structured output needs a tokenizer in the engine",
            ),
            (
                f"{FIELD}.min_tokens",
                bool(sampling.min_tokens) and not ready.has_tokenizer,
                "min_tokens needs a tokenizer in the engine",
            ),
            (
                f"{FIELD}.min_p",
                bool(sampling.min_p) and ready.honors_seeds,
                "SGLang cannot combine min_p with seeds: start it with --sglang-honors-seeds=false",
            ),
            (
                f"{FIELD}.seed",
                sampling.seed is not None and not ready.honors_seeds,
                "this SGLang engine honours no seeds: start it with --sglang-honors-seeds=true",
            ),
            (
                f"{FIELD}.prompt_logprobs",
                sampling.prompt_logprobs is not None and self.mode == "decode",
                "the prompt's log-probabilities are not known when its KV was computed elsewhere",
            ),
        )
        for field, is_refused, reason in refused:
            if is_refused:
                raise UnsupportedError(reason, field=field)

    def _check_task(self, request: EngineRequest) -> None:
        """An engine in mode `prefill` or `decode` does nothing but its part of a handoff."""
        task, is_embedding = request.task, self.ready.is_embedding
        if (task is LegTask.EMBED) != is_embedding:
            raise UnsupportedError(
                f"an SGLang engine started {'with' if is_embedding else 'without'} --sglang-is-embedding does not support {task}",
                field="task",
            )
        if request.handle is not None:
            raise KvLostError("an SGLang engine reads no handles: it supports only rendezvous handoffs", field="handle")
        wanted = {LegTask.PREFILL: ("prefill",), LegTask.GENERATE: ("null", "decode"), LegTask.EMBED: ("null",)}[task]
        if self.mode not in wanted:
            raise UnsupportedError(f"an SGLang engine in mode {self.mode} does not support {task}", field="task")
        if not (self.moves_kv or request.is_internal):
            raise UnsupportedError("the transfer backend `fake` moves no KV: it serves no clients", field="rendezvous")
        if (self._meeting(request) is None) != (self.mode == "null"):
            needs = "takes no" if self.mode == "null" else "needs a"
            raise InvalidRequestError(f"an SGLang engine in mode {self.mode} {needs} rendezvous", field="rendezvous")

    def _meeting(self, request: EngineRequest) -> Meeting | None:
        """Returns where the two engines meet. A warm-up has no counterpart; SGLang then transfers nothing."""
        where = request.rendezvous
        if where is not None:
            return Meeting(host=where.host, port=where.port, room=where.room)
        if self.mode == "null" or not request.is_internal:
            return None
        return Meeting(host=NO_TRANSFER_HOST, port=0, room=self.random.getrandbits(ROOM_BITS))
