"""Checks legs before the scheduler accepts them, and makes their state."""

from array import array

from kvmesh.checks import check_generation, check_range
from kvmesh.core import Generation, LegTask, ModelCard, Role, SamplingParams
from kvmesh.engines.base import EngineRequest
from kvmesh.engines.simulated.constrained_answers import ScriptWriter
from kvmesh.engines.simulated.handles import HandlePayload, unpack
from kvmesh.engines.simulated.leg_state import SimulatedLeg
from kvmesh.engines.simulated.model_card import TokenRange
from kvmesh.engines.simulated.rendezvous.wire import FAKE_HOST
from kvmesh.engines.simulated.settings import SimulatedSettings
from kvmesh.engines.simulated.tokens import constant_of
from kvmesh.errors import InvalidRequestError, KvLostError, NotFoundError, UnsupportedError
from kvmesh.kv.blocks import block_hashes, seed_hash

TASKS = {Role.PREFILL: LegTask.PREFILL, Role.DECODE: LegTask.GENERATE}


def check_request(
    request: EngineRequest,
    card: ModelCard,
    adapters: frozenset[str],
    *,
    can_prefill: bool,
    can_write: bool,
    dimensions_max: int,
) -> None:
    """Raises InvalidRequestError, NotFoundError or UnsupportedError, which name the field."""
    generation = request.generation
    check_generation(generation, vocabulary_size=card.vocabulary_size, context_tokens_max=card.context_tokens_max)
    if generation.adapter and generation.adapter not in adapters:
        raise NotFoundError(
            f"adapter {generation.adapter} is not loaded", field="generation.adapter", reason="adapter_not_found"
        )
    sampling = generation.sampling
    refused = (
        ("generation.media", bool(generation.media)),
        ("generation.data_parallel_rank", bool(generation.data_parallel_rank)),
        ("generation.sampling.constraint", sampling.constraint is not None and not can_write),
        ("task", request.task is LegTask.PREFILL and not can_prefill),
    )
    for field, is_asked in refused:
        if is_asked:
            raise UnsupportedError(f"the simulated engine does not support {field}", field=field)
    if request.task is not LegTask.GENERATE and request.handle is not None:
        raise InvalidRequestError(f"a {request.task.value} leg takes no handle", field="handle")
    check_range(request.dimensions, "dimensions", low=1, high=dimensions_max)


def read_handle(
    request: EngineRequest, compatibility_hash: str, block_size_tokens: int, *, has_transport: bool
) -> HandlePayload | None:
    """Returns the payload of the request's handle. KvLostError when it can never be read here."""
    if request.handle is None:
        return None
    if not has_transport:
        raise KvLostError("this engine has no KV transport", reason="kv_transport", field="handle")
    length = len(request.generation.token_ids) + len(request.generation.emitted_token_ids)
    if not 0 < request.handle.tokens <= length:
        raise KvLostError(
            "the handle covers more tokens than the prompt has", reason="kv_payload", field="handle.tokens"
        )
    return unpack(request.handle, compatibility_hash, block_size_tokens)


def make_leg(
    request: EngineRequest,
    *,
    order: int,
    settings: SimulatedSettings,
    card: ModelCard,
    token_range: TokenRange,
    writer: ScriptWriter,
) -> SimulatedLeg:
    """Returns a leg before its first step. `max_tokens` and `min_tokens` count the whole answer, emitted tokens included.

    A constrained answer ends with its document, whatever `min_tokens` says.
    """
    generation, sampling = request.generation, request.generation.sampling
    tokens = array("I", generation.token_ids)
    tokens.extend(generation.emitted_token_ids)
    done = len(generation.emitted_token_ids)
    room = card.context_tokens_max - len(tokens)
    seed = seed_hash(adapter=generation.adapter, cache_salt=generation.cache_salt)
    script = writer.script(generation) if sampling.constraint is not None and request.task is LegTask.GENERATE else None
    if script is not None and done > len(script):
        raise InvalidRequestError(
            "more tokens were emitted than max_tokens allows", field="generation.emitted_token_ids"
        )
    return SimulatedLeg(
        request=request,
        order=order,
        tokens=tokens,
        start_tokens=len(tokens),
        names=block_hashes(tokens, settings.block_size_tokens, seed=seed),
        seed_hash=seed,
        constant=constant_of(sampling, generation.adapter, token_range.span),
        tokens_max=room if sampling.max_tokens is None else min(room, sampling.max_tokens - done),
        eos_at=_eos_at(generation, settings.eos_after_tokens) if script is None else len(script) + 1 - done,
        stop_ids=_stop_ids(sampling, card),
        bias=dict(sampling.logit_bias),
        script=script,
    )


def _stop_ids(sampling: SamplingParams, card: ModelCard) -> frozenset[int]:
    """Stop tokens. They include eos if a logit bias may generate it."""
    eos = card.eos_token_ids if sampling.logit_bias and not sampling.ignore_eos else ()
    return frozenset((*sampling.stop_token_ids, *eos))


def _eos_at(generation: Generation, eos_after_tokens: int) -> int:
    """Returns the number of the leg's token that is eos, from 1; 0: none."""
    if not eos_after_tokens or generation.sampling.ignore_eos:
        return 0
    first_allowed = (generation.sampling.min_tokens or 0) + 1
    return max(1, max(eos_after_tokens, first_allowed) - len(generation.emitted_token_ids))


def check_rendezvous(request: EngineRequest, settings: SimulatedSettings, *, role: Role, is_rendezvous: bool) -> None:
    """Raises InvalidRequestError or UnsupportedError. `is_rendezvous`: the engine serves only legs of a rendezvous."""
    rendezvous = request.rendezvous
    if not is_rendezvous:
        if rendezvous is not None:
            raise UnsupportedError("this engine does not support the rendezvous handoff", field="rendezvous")
        return
    if request.task is not TASKS[role]:
        raise UnsupportedError(
            f"a {role.value} worker with rendezvous handoff does not run {request.task.value} legs", field="task"
        )
    if rendezvous is None:
        raise InvalidRequestError(
            "this worker serves only pairs of legs: the leg needs a rendezvous", field="rendezvous"
        )
    if request.handle is not None:
        raise InvalidRequestError("a leg has a handle or a rendezvous, not both", field="handle")
    if settings.kv_transport == "fake" and rendezvous.host != FAKE_HOST:
        raise UnsupportedError(
            f"this worker moves no KV (kv_transport fake), so it only serves warm-up legs, whose host is {FAKE_HOST}",
            reason="fake_transfer",
            field="rendezvous.host",
        )
