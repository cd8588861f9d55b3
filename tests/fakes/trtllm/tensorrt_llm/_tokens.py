"""The model: the candidates for a position are a pure function of all earlier tokens."""

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from tensorrt_llm.executor.result import Logprob
from tensorrt_llm.sampling_params import SamplingParams

CANDIDATES = 24


def candidates(tokens: Sequence[int], vocabulary: int) -> list[int]:
    """Returns the likeliest tokens, the best first."""
    state = xxh3_64_intdigest(b"".join(token.to_bytes(4, "little") for token in tokens))
    found: dict[int, None] = {}
    while len(found) < CANDIDATES:
        state = xxh3_64_intdigest(state.to_bytes(8, "little"))
        found[state % vocabulary] = None
    return list(found)


def sample(
    tokens: Sequence[int], emitted: int, params: SamplingParams, vocabulary: int
) -> tuple[int, dict[int, Logprob]]:
    """Returns the next token and the requested log-probabilities. The end token is excluded until `min_tokens`."""
    ranked = candidates(tokens, vocabulary)
    if emitted < (params.min_tokens or 0) and not params.ignore_eos:
        ranked = [token for token in ranked if token != params.end_id]
    if params.embedding_bias is not None:
        best = int(params.embedding_bias.argmax())
        ranked = [best, *(token for token in ranked if token != best)]
    is_greedy = params.top_k == 1 or params.temperature in (None, 0)
    drawn = xxh3_64_intdigest(f"{params.seed} {len(tokens)}".encode()) % max(1, min(8, params.top_k or 8))
    token = ranked[0 if is_greedy else drawn]
    return token, scores(ranked, token, params.logprobs)


def scores(ranked: Sequence[int], token: int, number: int | None) -> dict[int, Logprob]:
    """Returns the log-probabilities of the best tokens and of the chosen one."""
    if number is None:
        return {}
    found = {each: Logprob(-0.1 - 0.3 * rank, rank + 1) for rank, each in enumerate(ranked[:number])}
    rank = ranked.index(token) if token in ranked else len(ranked)
    return found | {token: Logprob(-0.1 - 0.3 * rank, rank + 1)}


def score_prompt(tokens: Sequence[int], number: int, vocabulary: int) -> list[dict[int, Logprob]]:
    """Returns an entry for each token from the second on, and one for the first generated token."""
    after = [*tokens[1:], candidates(tokens, vocabulary)[0]]
    return [scores(candidates(tokens[: i + 1], vocabulary), token, number) for i, token in enumerate(after)]
