"""Prepares a request: checks it against its model, renders, tokenises and hashes it."""

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvmesh.checks import CACHE_SALT_BYTES_MAX, PRIORITY_MAX, check_length, check_range, check_sampling
from kvmesh.core import Ask, Generation, SamplingParams
from kvmesh.errors import InvalidRequestError, UnsupportedError
from kvmesh.kv.blocks import block_hashes, seed_hash
from services.frontend.access.caller import Caller
from services.frontend.models import ServedModel
from services.frontend.pipeline.request import Conversation, Request, text_of
from services.frontend.settings import PipelineSettings

STRUCTURED_OUTPUT = "structured_output"
# Sampling fields, the worker feature that each needs (kvmesh.core.FEATURES), and the words for its absence.
_NEEDS: tuple[tuple[str, str, str], ...] = (
    ("constraint", STRUCTURED_OUTPUT, "do structured output"),
    ("prompt_logprobs", "prompt_logprobs", "give log-probabilities of the prompt"),
    ("logprobs", "logprobs", "give log-probabilities"),
    ("logit_bias", "logit_bias", "bias logits"),
)
INLINE_CHARACTERS_MAX = 65_536
"""Longest prompt that is tokenised on the event loop, which takes about 1 ms; longer ones use a thread."""
SLOW_TOKENISER_FACTOR = 16
"""The reference library takes at least this many times as long as fastokens for a text."""
_HASHED_AT_ONCE_TOKENS = 16_384
_PROMPT_CHARACTERS_PER_TOKEN = 64
"""No tokenizer in use has longer tokens on average, so a longer text cannot fit the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A checked request, ready to be placed and submitted. Choice i submits `generation_of(i, its emitted tokens)`."""

    request: Request
    caller: Caller
    model: ServedModel
    generation: Generation
    ask: Ask
    stop_ids: frozenset[int]

    def with_traceparent(self, traceparent: str) -> "Prepared":
        """Returns the request with this span as the parent of the router's and the workers' spans."""
        return replace(
            self,
            generation=replace(self.generation, traceparent=traceparent),
            ask=replace(self.ask, traceparent=traceparent),
        )

    def generation_of(self, choice: int, emitted_token_ids: Sequence[int] = ()) -> Generation:
        """Derives a seed of its own for each choice; with one seed all choices would be equal."""
        generation, seed = self.generation, self.generation.sampling.seed
        if emitted_token_ids:
            # A copy, since the choice appends the tokens of its next leg.
            generation = replace(generation, emitted_token_ids=emitted_token_ids[:])
        if seed is None or choice == 0:
            return generation
        # Wraps within the signed 64-bit range of seeds.
        shifted = (seed + choice + 2**63) % 2**64 - 2**63
        return replace(generation, sampling=replace(generation.sampling, seed=shifted))


def check_request(request: Request, model: ServedModel, settings: PipelineSettings) -> tuple[str, ...]:
    """Checks everything that needs no tokens of the prompt. Returns the features that the request's workers need."""
    check_range(request.choices, request.named("choices"), low=1, high=settings.choices_max)
    check_range(request.priority, request.named("priority"), low=-PRIORITY_MAX, high=PRIORITY_MAX)
    check_length(len(request.cache_salt.encode()), request.named("cache_salt"), high=CACHE_SALT_BYTES_MAX, unit="bytes")
    try:
        check_sampling(request.sampling, prefix="")
    except InvalidRequestError as error:
        named = request.named(error.field)
        message = error.message.replace(error.field, named, 1)
        raise InvalidRequestError(message, field=named, reason=error.reason) from error
    last = model.vocabulary_size - 1
    for token_id in request.sampling.stop_token_ids:
        check_range(token_id, request.named("stop_token_ids"), low=0, high=last)
    for token_id, _ in request.sampling.logit_bias:
        check_range(token_id, request.named("logit_bias"), low=0, high=last)
    needs = [need for need in _NEEDS if getattr(request.sampling, need[0]) not in (None, ())]
    for name, feature, what in needs:
        if feature not in model.features:
            raise UnsupportedError(f"no worker of {model.name} can {what}", field=request.named(name))
    if request.adapter and request.adapter not in model.adapters and request.adapter != model.adapter:
        raise UnsupportedError(f"{model.name} has no adapter of that name", field=request.named("adapter"))
    return tuple(feature for _, feature, _ in needs)


async def tokens_of(request: Request, model: ServedModel) -> "array[int]":
    """Returns the prompt's token ids, without those at its beginning that the request allows to cut off.

    Renders and tokenises long texts in a thread and short ones on the event loop.
    """
    prompt = request.prompt
    field = request.named("prompt")
    if isinstance(prompt, str | Conversation):
        if isinstance(prompt, str):
            text = prompt
            tokenise = partial(model.text.tokenise, text, adds_special_tokens=request.adds_special_tokens)
        else:
            text = await _rendered(prompt, model, field)
            tokenise = partial(model.text.tokenise_prompt, text, salt=request.cache_salt)
        if not text:
            raise InvalidRequestError(f"{field} must not be empty", field=field)
        if len(text) > _PROMPT_CHARACTERS_PER_TOKEN * model.context_tokens_max:
            raise _too_long(f"the prompt has {len(text)} characters", field=field, model=model)
        if len(text) <= INLINE_CHARACTERS_MAX // (1 if model.text.is_fast else SLOW_TOKENISER_FACTOR):
            token_ids = tokenise()
        else:
            token_ids = await asyncio.to_thread(tokenise)
    else:
        token_ids = array("I", checked_ids(prompt, field, model))
    kept = request.prompt_tokens_kept
    if kept is None:
        return token_ids
    room = max(1, model.context_tokens_max - (request.sampling.max_tokens or 1))
    return token_ids[-(room if kept < 0 else kept) :]


async def _rendered(conversation: Conversation, model: ServedModel, field: str) -> str:
    """Renders a conversation, a long one in a thread. A message counts as 128 more characters, a tool as 1024."""
    template = model.text.template
    if template is None:
        raise UnsupportedError("the model has no chat template; use completions", reason="no_chat_template")
    contents = sum(len(text_of(message.get("content"))) + 128 for message in conversation.messages)
    if contents + 1024 * len(conversation.tools) <= INLINE_CHARACTERS_MAX:
        return template.render(conversation, field=field)
    return await asyncio.to_thread(template.render, conversation, field=field)


async def hashes_of(token_ids: Sequence[int], request: Request, model: ServedModel) -> list[int]:
    """Returns the hashes of the prompt's blocks. Yields to the event loop after every third of a millisecond of work."""
    size = model.block_size_tokens
    if not size or len(token_ids) > model.context_tokens_max:
        # The model has no blocks, or `prepare` is about to refuse the prompt.
        return []
    seed = seed_hash(adapter=request.adapter or model.adapter, cache_salt=request.cache_salt)
    if len(token_ids) <= _HASHED_AT_ONCE_TOKENS:
        return block_hashes(token_ids, size, seed=seed)
    hashes: list[int] = []
    step = max(1, _HASHED_AT_ONCE_TOKENS // size) * size
    for begin in range(0, len(token_ids) - size + 1, step):
        # Not in a thread: it would hold the GIL as long, and the event loop would wait longer for it.
        hashes += block_hashes(token_ids[begin : begin + step], size, seed=hashes[-1] if hashes else seed)
        await asyncio.sleep(0)
    return hashes


def checked_ids(token_ids: Sequence[int], field: str, model: ServedModel) -> Sequence[int]:
    """Returns the ids. Raises InvalidRequestError if one is outside the vocabulary."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < model.vocabulary_size:
        raise InvalidRequestError(f"{field} must hold token ids below {model.vocabulary_size}", field=field)
    return token_ids


def prepare(
    request: Request,
    model: ServedModel,
    token_ids: Sequence[int],
    *,
    hashes: list[int],
    features: tuple[str, ...],
    caller: Caller,
    attempt_timeout_s: float,
) -> Prepared:
    """Builds what is placed and submitted. `hashes` and `features`: the results of `hashes_of` and `check_request`."""
    sampling = _sampling_for(request, model, len(token_ids))
    adapter = request.adapter or model.adapter
    generation = Generation(
        model=model.name,
        token_ids=token_ids,
        sampling=sampling,
        adapter=adapter,
        cache_salt=request.cache_salt,
        priority=request.priority,
        traceparent=request.traceparent,
    )
    ask = Ask(
        request_id=request.request_id,
        model=model.name,
        files_digest=model.files_digest,
        prompt_tokens=len(token_ids),
        block_hashes=hashes,
        block_size_tokens=model.block_size_tokens,
        expected_output_tokens=sampling.max_tokens or 0,
        adapter=adapter,
        tenant=caller.tenant,
        priority=request.priority,
        timeout_s=attempt_timeout_s,
        session_id=request.session_id,
        choices=request.choices,
        traceparent=request.traceparent,
        required_features=features,
        required_labels=request.required_labels,
        preferred_labels=request.preferred_labels,
        pinned_prefill_worker_id=request.pinned_prefill_worker_id,
        pinned_decode_worker_id=request.pinned_decode_worker_id,
    )
    eos = frozenset() if sampling.ignore_eos else model.eos_token_ids
    return Prepared(
        request=request,
        caller=caller,
        model=model,
        generation=generation,
        ask=ask,
        stop_ids=eos.union(sampling.stop_token_ids),
    )


def _sampling_for(request: Request, model: ServedModel, prompt_tokens: int) -> SamplingParams:
    """Adds the model's defaults and the bound of the answer. Removes stop strings: the frontend applies them."""
    field = request.named("prompt")
    if prompt_tokens == 0:
        raise InvalidRequestError(f"{field} must not be empty", field=field)
    room = model.context_tokens_max - prompt_tokens
    if room < 1:
        raise _too_long(f"the prompt has {prompt_tokens} tokens", field=field, model=model)
    wanted = request.sampling.max_tokens
    if wanted is not None and wanted > room and request.shortens_answer:
        wanted = None
    if wanted is not None and wanted > room:
        raise _too_long(
            f"the prompt has {prompt_tokens} tokens and {wanted} are asked for",
            field=request.named("max_tokens"),
            model=model,
        )
    sampling = request.sampling
    missing: dict[str, Any] = {
        name: value for name, value in model.text.defaults.items() if getattr(sampling, name) is None
    }
    if wanted is not None and not sampling.stop and not missing:
        return sampling
    return replace(sampling, **missing, max_tokens=room if wanted is None else wanted, stop=())


def _too_long(what: str, field: str, model: ServedModel) -> InvalidRequestError:
    return InvalidRequestError(
        f"{what}; the model's context is {model.context_tokens_max} tokens, prompt and answer together",
        field=field,
        reason="context_length_exceeded",
    )
