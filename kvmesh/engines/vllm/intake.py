"""Checks legs and translates them to vLLM requests. Runs on the event loop."""

from dataclasses import dataclass, replace
from typing import Any

from kvmesh.checks import check_generation
from kvmesh.core import Generation, LegTask, ModelCard
from kvmesh.engines.base import EngineRequest
from kvmesh.engines.handles import HandleForm, prompt_hash
from kvmesh.engines.sampling_names import FIELD
from kvmesh.engines.vllm.continuation import EMITTED
from kvmesh.engines.vllm.core import VllmCore
from kvmesh.engines.vllm.handles import PREFILL_PARAMETERS, read_handle
from kvmesh.engines.vllm.leg import VllmLeg
from kvmesh.engines.vllm.sampling import (
    constraint_arguments,
    decode_arguments,
    prefill_arguments,
)
from kvmesh.engines.vllm.settings import VllmSettings
from kvmesh.errors import InvalidRequestError, UnsupportedError
from kvmesh.kv.blocks import seed_hash
from kvmesh.kv.paths import KvPaths

EMBED_TASK, GENERATE_TASK = "embed", "generate"
"""vLLM's names of tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmIntake:
    """Makes legs from requests. Has no state of running legs."""

    core: VllmCore
    settings: VllmSettings
    card: ModelCard
    form: HandleForm
    has_tokenizer: bool
    defaults: dict[str, Any]
    paths: KvPaths

    def make_leg(
        self, request: EngineRequest, *, adapter: Any, number: int, now: float, validated: Any = None
    ) -> VllmLeg:
        """Returns a leg that is ready to run. `number` must be new for each leg, since vLLM knows a request id while its blocks are leased.

        `validated`: vLLM's parameters of the constraint, if it was validated before.

        Raises InvalidRequestError, UnsupportedError or KvLostError, without side effects.
        """
        generation = request.generation
        check_generation(
            generation,
            vocabulary_size=self.card.vocabulary_size,
            context_tokens_max=self.card.context_tokens_max,
        )
        self._check(request)
        tokens = [*generation.token_ids, *generation.emitted_token_ids]
        # The adapter's name in vLLM includes a hash of its content, so KV of other weights under the same name is never read.
        adapter_name = adapter.lora_name if adapter is not None else ""
        prompt = prompt_hash(seed_hash(adapter=adapter_name, cache_salt=generation.cache_salt), tokens)
        parameters, is_late = self._parameters(request, len(tokens), prompt)
        inner_id = f"{request.leg_id}~{number}"
        core_request = self._core_request(
            inner_id,
            # vLLM would validate the constraint again, here on the event loop. It is added below.
            request=request if validated is None else without_constraint(request),
            tokens=tokens,
            parameters=parameters,
            adapter=adapter,
        )
        if validated is not None:
            core_request.sampling_params.structured_outputs = validated
        return VllmLeg(
            request=request,
            inner_id=inner_id,
            core_request=core_request,
            prompt_tokens=len(tokens),
            prompt=prompt,
            parameters=parameters,
            adapter_number=adapter.lora_int_id if adapter is not None else 0,
            pull_by_s=now + (request.handle.lease_s - self.settings.lease_margin_s if request.handle else 0.0),
            was_recomputed=is_late,
            submitted_at_s=now,
            logprobs=generation.sampling.logprobs,
            prompt_logprobs=generation.sampling.prompt_logprobs,
        )

    def _check(self, request: EngineRequest) -> None:
        is_embed = request.task is LegTask.EMBED
        refused = (
            ("task", is_embed and EMBED_TASK not in self.core.supported_tasks),
            ("task", not is_embed and GENERATE_TASK not in self.core.supported_tasks),
            ("generation.media", bool(request.generation.media)),
            ("generation.data_parallel_rank", bool(request.generation.data_parallel_rank)),
            ("rendezvous", request.rendezvous is not None),
            ("task", request.task is LegTask.PREFILL and not self.settings.has_kv_transfer),
        )
        for field, is_asked in refused:
            if is_asked:
                raise UnsupportedError(f"this vLLM engine does not support {field}", field=field)
        if request.task is not LegTask.GENERATE and request.handle is not None:
            raise InvalidRequestError(f"a {request.task.value} leg takes no handle", field="handle")
        asks_prompt = request.generation.sampling.prompt_logprobs is not None
        if request.task is LegTask.GENERATE and request.handle is not None and asks_prompt:
            raise UnsupportedError(
                "the prompt's log-probabilities are not known when its KV was computed elsewhere",
                field=f"{FIELD}.prompt_logprobs",
            )
        if request.generation.sampling.constraint is not None and not self.has_tokenizer:
            raise UnsupportedError("structured output needs a tokenizer in the engine", field=f"{FIELD}.constraint")

    def _parameters(self, request: EngineRequest, tokens: int, prompt: str) -> tuple[dict[str, Any] | None, bool]:
        """Returns the connector's parameters, and whether there is a handle that cannot be pulled: it is too old or has no hold."""
        if request.task is LegTask.PREFILL:
            return dict(PREFILL_PARAMETERS), False
        if request.handle is None:
            return None, False
        parameters = read_handle(self.form, request.handle, tokens=tokens, prompt=prompt)
        if self.paths.own_host:
            # A handle does not decide where this engine connects to: the registry does.
            parameters["remote_host"] = self.paths.host_of(request.handle.worker_id)
            if not parameters["remote_host"]:
                return None, True
        is_late = request.handle.lease_s <= self.settings.lease_margin_s
        if not self.settings.has_kv_transfer or is_late or "hold" not in parameters:
            return None, True
        return parameters, False

    def _core_request(
        self,
        inner_id: str,
        *,
        request: EngineRequest,
        tokens: list[int],
        parameters: dict[str, Any] | None,
        adapter: Any,
    ) -> Any:
        from vllm.exceptions import VLLMError
        from vllm.inputs.engine import tokens_input

        generation = request.generation
        try:
            return self.core.input_processor.process_inputs(
                inner_id,
                tokens_input(tokens, cache_salt=generation.cache_salt or None),
                pooling(request)
                if request.task is LegTask.EMBED
                else self._sampling(generation, request.task, parameters),
                self.core.supported_tasks,
                lora_request=adapter,
                # vLLM serves the smallest number first.
                priority=-generation.priority,
            )
        except (VLLMError, ValueError, NotImplementedError) as error:
            raise refusal(error) from error

    def _sampling(self, generation: Generation, task: LegTask, parameters: dict[str, Any] | None) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

        if task is LegTask.PREFILL:
            arguments = prefill_arguments()
        else:
            arguments = decode_arguments(generation, self.defaults, self.core.continues)
            if generation.emitted_token_ids and arguments["max_tokens"] is None:
                # vLLM would take what the context leaves after the emitted tokens.
                arguments["max_tokens"] = self.card.context_tokens_max - len(generation.token_ids)
            if generation.sampling.constraint is not None:
                constraint = constraint_arguments(generation.sampling.constraint)
                arguments["structured_outputs"] = StructuredOutputsParams(**constraint)
        extra: dict[str, Any] = {}
        if parameters is not None:
            extra["kv_transfer_params"] = parameters
        if generation.emitted_token_ids and task is LegTask.GENERATE:
            extra[EMITTED] = len(generation.emitted_token_ids)
        arguments["extra_args"] = extra or None
        return SamplingParams(**arguments, detokenize=False, output_kind=RequestOutputKind.DELTA)


def without_constraint(request: EngineRequest) -> EngineRequest:
    generation = request.generation
    sampling = replace(generation.sampling, constraint=None)
    return replace(request, generation=replace(generation, sampling=sampling))


def pooling(request: EngineRequest) -> Any:
    from vllm.pooling_params import PoolingParams

    return PoolingParams(task=EMBED_TASK, dimensions=request.dimensions)


def refusal(error: Exception) -> InvalidRequestError:
    """vLLM's refusal as our error, with our name of the field."""
    parameter = getattr(error, "parameter", None)
    field = f"{FIELD}.{parameter}" if parameter else FIELD
    return InvalidRequestError(f"vLLM refused the request: {str(error).splitlines()[0]}", field=field)


def prepare_recomputation(leg: VllmLeg) -> None:
    """Prepares a leg's next attempt, which computes the prompt here: the same request under a new inner id."""
    import msgspec

    leg.attempt += 1
    leg.inner_id = f"{leg.inner_id}~{leg.attempt}"
    sampling = leg.core_request.sampling_params.clone()
    emitted = (sampling.extra_args or {}).get(EMITTED)
    sampling.extra_args = {EMITTED: emitted} if emitted else None
    leg.core_request = msgspec.structs.replace(leg.core_request, request_id=leg.inner_id, sampling_params=sampling)
    leg.parameters = None
    leg.pull_ends_s = None
    leg.was_recomputed = True
