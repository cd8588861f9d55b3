"""When an answer ends (limits, eos, stop tokens), tokens that constraints or biases force, and log-probabilities."""

from kvmesh.core import ModelCard
from kvmesh.engines.simulated.leg_state import LegState
from kvmesh.engines.simulated.model_card import TokenRange
from kvmesh.engines.simulated.step import Step
from kvmesh.engines.simulated.tokens import biased, made_up_logprob


def steered(leg: LegState, *, position: int, token_id: int, token_range: TokenRange) -> int:
    """What a steered leg says at this position where the arithmetic says `token_id`."""
    if leg.script is not None:
        return leg.scripted(position)
    return biased(token_id, leg.bias, token_range)


def last_token(leg: LegState) -> int:
    """Which token of the leg, from 1, is the last in any case."""
    return min(leg.eos_at, leg.tokens_max) if leg.eos_at else leg.tokens_max


def is_stop(leg: LegState, token_id: int, generated: int) -> bool:
    """True when the leg's newest token, number `generated` of it, is a stop token that may stop already."""
    if token_id not in leg.stop_ids:
        return False
    generation = leg.request.generation
    return generated + len(generation.emitted_token_ids) > (generation.sampling.min_tokens or 0)


def is_watched(leg: LegState) -> bool:
    """True when each of the leg's tokens must be looked at."""
    return bool(leg.stop_ids) or leg.request.generation.sampling.logprobs is not None


def score_prompt(leg: LegState, step: Step, card: ModelCard) -> None:
    """The prompt's log-probabilities, if the leg asked for them: once, even when it is computed again."""
    generation = leg.request.generation
    asked = generation.sampling.prompt_logprobs
    if asked is None or leg.has_scored_prompt or generation.emitted_token_ids:
        return
    leg.has_scored_prompt = True
    step.prompt_logprobs[leg.key] = [
        made_up_logprob(token_id, asked, card.vocabulary_size) for token_id in generation.token_ids[1:]
    ]


def add_logprob(leg: LegState, *, token_id: int, step: Step, card: ModelCard) -> None:
    """The token's log-probability, if the leg asked for it."""
    asked = leg.request.generation.sampling.logprobs
    if asked is not None:
        logprob = made_up_logprob(token_id, asked, card.vocabulary_size)
        step.logprobs.setdefault(leg.key, []).append(logprob)
