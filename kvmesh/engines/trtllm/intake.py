"""Checks legs and translates them to the engine's requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvmesh.checks import check_generation
from kvmesh.core import LegTask, ModelCard, Rendezvous
from kvmesh.engines.base import EngineRequest
from kvmesh.engines.handles import HandleForm, prompt_hash
from kvmesh.engines.sampling_names import FIELD
from kvmesh.engines.trtllm.handles import read_handle
from kvmesh.engines.trtllm.leg import TrtllmLeg
from kvmesh.engines.trtllm.sampling import (
    CONTEXT,
    GENERATION,
    check_emitted,
    request_priority,
    sampling_params,
    stopping,
)
from kvmesh.engines.trtllm.settings import TrtllmSettings
from kvmesh.errors import InvalidRequestError, UnsupportedError
from kvmesh.kv.blocks import seed_hash

if TYPE_CHECKING:
    from tensorrt_llm.disaggregated_params import DisaggregatedParams
    from tensorrt_llm.executor.request import LoRARequest
    from tensorrt_llm.llmapi.llm import LLM, RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmIntake:
    """Makes legs from requests. Has no state of running legs."""

    settings: TrtllmSettings
    card: ModelCard
    form: HandleForm
    has_tokenizer: bool
    defaults: Mapping[str, Any]

    def make_leg(
        self, request: EngineRequest, *, adapter: "LoRARequest | None", identity: str, now: float
    ) -> TrtllmLeg:
        """Returns a leg that is ready to start. Raises InvalidRequestError, UnsupportedError or KvLostError, without side effects."""
        generation = request.generation
        check_generation(
            generation, vocabulary_size=self.card.vocabulary_size, context_tokens_max=self.card.context_tokens_max
        )
        check_emitted(generation, self.defaults)
        self._check(request)
        tokens = [*generation.token_ids, *generation.emitted_token_ids]
        prompt = prompt_hash(seed_hash(adapter=identity, cache_salt=generation.cache_salt), tokens)
        params, is_late = self._params(request, tokens, prompt)
        return TrtllmLeg(
            request=request,
            tokens=tokens,
            seed=seed_hash(adapter=generation.adapter, cache_salt=generation.cache_salt),
            prompt=prompt,
            rules=stopping(
                generation,
                eos_token_ids=self.card.eos_token_ids,
                tokens_left=self.card.context_tokens_max - len(tokens),
            ),
            params=params,
            adapter=adapter,
            was_recomputed=is_late,
            submitted_at_s=now,
        )

    def start(self, leg: TrtllmLeg, llm: "LLM") -> "RequestOutput":
        """Gives the engine the leg's present attempt. InvalidRequestError for what it refuses."""
        from tensorrt_llm.executor import RequestError
        from tensorrt_llm.scheduling_params import SchedulingParams

        generation, rank = leg.request.generation, leg.request.generation.data_parallel_rank
        params = sampling_params(
            generation,
            leg.rules,
            defaults=self.defaults,
            end_id=self.card.eos_token_ids[0] if self.card.eos_token_ids else -1,
            vocabulary_size=self.card.vocabulary_size,
            phase=leg.phase,
        )
        try:
            return llm.generate_async(
                list(leg.tokens),
                sampling_params=params,
                lora_request=leg.adapter,
                streaming=True,
                disaggregated_params=leg.params,
                trace_headers={"traceparent": generation.traceparent} if generation.traceparent else None,
                scheduling_params=None
                if rank is None
                else SchedulingParams(attention_dp_rank=rank, attention_dp_relax=False),
                cache_salt=generation.cache_salt or None,
                priority=request_priority(generation.priority),
            )
        except (RequestError, ValueError, TypeError) as error:
            raise InvalidRequestError(
                f"TensorRT-LLM refused the request: {first_line(error)}", field="generation"
            ) from error

    def _check(self, request: EngineRequest) -> None:
        settings, generation = self.settings, request.generation
        rank = generation.data_parallel_rank or 0
        refused = (
            ("task", request.task is LegTask.EMBED),
            ("task", request.task is LegTask.PREFILL and not settings.has_kv_transfer),
            ("generation.media", bool(generation.media)),
            ("generation.data_parallel_rank", rank >= settings.data_parallel_size),
            ("rendezvous", request.rendezvous is not None and not settings.is_generation_first),
            ("handle", request.handle is not None and settings.is_generation_first),
        )
        for field, is_asked in refused:
            if is_asked:
                raise UnsupportedError(f"this TensorRT-LLM engine does not support {field}", field=field)
        if request.task is LegTask.PREFILL and request.handle is not None:
            raise InvalidRequestError("a prefill leg takes no handle", field="handle")
        if request.task is LegTask.PREFILL and settings.is_generation_first and request.rendezvous is None:
            raise InvalidRequestError("with generation_first a prefill leg needs a rendezvous", field="rendezvous")
        is_handed_over = request.handle is not None or request.rendezvous is not None
        if request.task is LegTask.GENERATE and is_handed_over and generation.sampling.prompt_logprobs is not None:
            raise UnsupportedError(
                "the prompt's log-probabilities are not known when its KV was computed elsewhere",
                field=f"{FIELD}.prompt_logprobs",
            )
        if generation.sampling.constraint is not None and not self.has_tokenizer:
            raise UnsupportedError("structured output needs a tokenizer in the engine", field=f"{FIELD}.constraint")

    def _params(
        self, request: EngineRequest, tokens: Sequence[int], prompt: str
    ) -> tuple["DisaggregatedParams | None", bool]:
        """Returns the handoff's parameters, and whether there is a handle that is too old to be pulled."""
        from tensorrt_llm.disaggregated_params import DisaggregatedParams

        if request.rendezvous is not None:
            return meeting(request.rendezvous, CONTEXT if request.task is LegTask.PREFILL else GENERATION), False
        if request.task is LegTask.PREFILL:
            return DisaggregatedParams(request_type=CONTEXT), False
        if request.handle is None:
            return None, False
        params = read_handle(self.form, request.handle, tokens=len(tokens), prompt=prompt)
        if not self.settings.has_kv_transfer or request.handle.lease_s <= self.settings.lease_margin_s:
            return None, True
        return params, False


def meeting(rendezvous: Rendezvous, phase: str) -> "DisaggregatedParams":
    """Both phases start at the same time and meet at the context engine's endpoint; the room is their common number."""
    from tensorrt_llm.disaggregated_params import DisaggregatedParams, DisaggScheduleStyle

    return DisaggregatedParams(
        request_type=phase,
        disagg_request_id=rendezvous.room,
        ctx_request_id=rendezvous.room if phase == GENERATION else None,
        ctx_info_endpoint=f"tcp://{rendezvous.host}:{rendezvous.port}" if phase == GENERATION else None,
        ctx_dp_rank=rendezvous.prefill_data_parallel_rank if phase == GENERATION else None,
        schedule_style=DisaggScheduleStyle.GENERATION_FIRST,
    )


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:400]
