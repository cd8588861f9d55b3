"""The end of an answer (limits, eos, stop tokens), tokens that constraints or biases change, and log-probabilities."""

from kvmesh.core import ModelCard
from kvmesh.engines.simulated.leg_state import SimulatedLeg
from kvmesh.engines.simulated.model_card import TokenRange
from kvmesh.engines.simulated.step import Step
from kvmesh.engines.simulated.tokens import biased_token, made_up_logprob


def steered_token(leg: SimulatedLeg, *, position: int, token_id: int, token_range: TokenRange) -> int:
    """The token of a steered leg at this position. `token_id` is the arithmetic's."""
    if leg.script is not None:
        return leg.scripted(position)
    return biased_token(token_id, leg.bias, token_range)


def last_token(leg: SimulatedLeg) -> int:
    """Number of the leg's last possible token, from 1."""
    return min(leg.eos_at, leg.tokens_max) if leg.eos_at else leg.tokens_max


def is_stop(leg: SimulatedLeg, token_id: int, generated: int) -> bool:
    """True when the leg's token number `generated` is a stop token and `min_tokens` is reached."""
    if token_id not in leg.stop_ids:
        return False
    generation = leg.request.generation
    return generated + len(generation.emitted_token_ids) > (generation.sampling.min_tokens or 0)


def is_watched(leg: SimulatedLeg) -> bool:
    """True when every token of the leg must be examined."""
    return bool(leg.stop_ids) or leg.request.generation.sampling.logprobs is not None


def score_prompt(leg: SimulatedLeg, step: Step, card: ModelCard) -> None:
    """Adds the prompt's log-probabilities if the leg asked for them: once, even when the prompt is computed again."""
    generation = leg.request.generation
    asked = generation.sampling.prompt_logprobs
    if asked is None or leg.has_scored_prompt or generation.emitted_token_ids:
        return
    leg.has_scored_prompt = True
    step.prompt_logprobs[leg.key] = [
        made_up_logprob(token_id, alternatives=asked, vocabulary_size=card.vocabulary_size)
        for token_id in generation.token_ids[1:]
    ]


def add_logprob(leg: SimulatedLeg, *, token_id: int, step: Step, card: ModelCard) -> None:
    """Adds the token's log-probability if the leg asked for it."""
    asked = leg.request.generation.sampling.logprobs
    if asked is not None:
        logprob = made_up_logprob(token_id, alternatives=asked, vocabulary_size=card.vocabulary_size)
        step.logprobs.setdefault(leg.key, []).append(logprob)
