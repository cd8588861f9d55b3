"""How a request is placed again after tokens of its answer have arrived. Pure.

The engine of the next placement gets the prompt and the emitted tokens, so the placement request describes both: their length, the
hashes of their blocks, and how many tokens are left.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from kvmesh.core import Ask
from kvmesh.errors import LostError, MeshError, UnsupportedError
from kvmesh.kv.blocks import block_hashes, seed_hash
from services.frontend.pipeline.prepare import Prepared
from services.frontend.settings import PipelineSettings

SAMPLING_PREFIX = "generation.sampling."
"""Of the engines' names of sampling parameters. Clients have no part of that name."""
CANNOT_CONTINUE = "cannot_continue"
"""Reason of an answer that was lost after its client had received a part of it, and that no engine continues correctly."""


def continued_ask(prepared: Prepared, emitted: Collection[Sequence[int]]) -> Ask:
    """Returns the ask for the open choices with these tokens. Only a single choice has a prompt whose every block is known."""
    ask, generation = prepared.ask, prepared.generation
    counts = [len(tokens) for tokens in emitted]
    max_tokens = generation.sampling.max_tokens or 0
    hashes = ask.block_hashes
    if len(counts) == 1 and counts[0]:
        hashes = _extended_hashes(prepared, next(iter(emitted)))
    return replace(
        ask,
        # The longest choice has the longest prompt, the shortest one the most tokens to generate.
        prompt_tokens=ask.prompt_tokens + max(counts),
        block_hashes=hashes,
        expected_output_tokens=max(0, max_tokens - min(counts)),
        choices=len(counts),
    )


def _extended_hashes(prepared: Prepared, emitted: Sequence[int]) -> Sequence[int]:
    """Returns the hashes of the prompt's blocks and of those that the emitted tokens complete."""
    hashes, size = prepared.ask.block_hashes, prepared.ask.block_size_tokens
    generation = prepared.generation
    # Without a hash of each whole block of the prompt the chain cannot be extended.
    if not size or len(hashes) != len(generation.token_ids) // size:
        return hashes
    parent = hashes[-1] if hashes else seed_hash(adapter=generation.adapter, cache_salt=generation.cache_salt)
    rest = [*generation.token_ids[len(hashes) * size :], *emitted]
    return [*hashes, *block_hashes(rest, size, seed=parent)]


def may_continue(
    settings: PipelineSettings, *, continuations: int, age_s: float, tokens: int, error: MeshError
) -> bool:
    """Returns whether the limits allow another continuation. `tokens`: of the prompt and of the longest choice."""
    if isinstance(error, UnsupportedError) or continuations >= settings.continuations_max:
        return False
    if settings.continuation_age_s_max and age_s > settings.continuation_age_s_max:
        return False
    return not settings.continuation_tokens_max or tokens <= settings.continuation_tokens_max


def cannot_continue(lost: MeshError, refusal: UnsupportedError, named: Callable[[str], str]) -> LostError:
    """Returns the failure of an answer whose begin the client has and that the engine refuses to continue.

    `named` returns the client's name of a field.
    """
    return LostError(
        f"a worker was lost ({lost.reason}), and the answer cannot be continued on another one: {refusal.message}",
        reason=CANNOT_CONTINUE,
        field=named(refusal.field.removeprefix(SAMPLING_PREFIX)),
        where=lost.where,
    )
