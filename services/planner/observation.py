"""What the planner knows of one model, and whether it can be acted on. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvmesh.core import Role
from kvmesh.core.planning import LatencyReport, ObservationState, PoolReport, Shape
from services.planner.plan import (
    BLOCKS_TOTAL,
    BLOCKS_USED,
    OUTPUT_TOKENS,
    PROMPT_LENGTH,
    QUEUED_TOKENS,
    REQUESTS,
    RUNNING,
    WAITING_TOKENS,
    WORKER_OUTPUT_TOKENS,
    Window,
)
from services.planner.sizing.demand import LENGTH_CV, Demand, lengths_of_buckets, log_normal

SLACK_TOKENS = 1000.0
"""Largest difference of token counts that can be due to scrapes at different times."""
SLACK_RATIO = 1.5
OUTPUT_USUAL_TOKENS = 256.0
"""As routers assume for requests that do not say how long their answers will be (`OUTPUT_TOKENS`)."""
OUTPUT_USUAL_REQUESTS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelObservation:
    """One model at one time. `demand` None: nothing arrived, or the state is not COMPLETE.

    `recent_rate`: requests per second of the newest seconds, `surge_rate`: those since the observation before if they are many more (else 0),
    `newest_tokens`: prompt tokens per second since the observation before (None:
    not known); `demand` is the mean of the window. `ready` counts workers that take requests. `backlog_tokens`: prompt tokens that wait on
    workers and in routers. The means are of the window; None: nothing observed.
    """

    model: str
    state: ObservationState
    problems: Sequence[str] = ()
    demand: Demand | None = None
    recent_rate: float = 0.0
    surge_rate: float = 0.0
    newest_tokens: float | None = None
    ready: Shape = Shape()
    backlog_tokens: float = 0.0
    ttft_mean_s: float | None = None
    itl_mean_s: float | None = None
    kv_usage: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationLimits:
    """`window_s_min`: a shorter window shows too little. `age_s_max`: older samples are stale."""

    window_s_min: float = 10.0
    age_s_max: float = 30.0


def observe_model(
    model: str,
    window: Window | None,
    pools: Iterable[PoolReport],
    *,
    latency: LatencyReport | None,
    limits: ObservationLimits,
) -> ModelObservation:
    """Judges a window. Workers that are not ready yet may lack samples; ready ones may not."""
    mine = {pool.role: pool for pool in pools if pool.model == model}
    ready = Shape(
        prefill_workers=mine[Role.PREFILL].workers_ready if Role.PREFILL in mine else 0,
        decode_workers=mine[Role.DECODE].workers_ready if Role.DECODE in mine else 0,
    )
    state, problems = _judge(model, window, ready, limits=limits)
    if state is not ObservationState.COMPLETE or window is None:
        return ModelObservation(model=model, state=state, problems=problems, ready=ready)
    decode = mine.get(Role.DECODE)
    return ModelObservation(
        model=model,
        state=state,
        demand=_demand(model, window, latency),
        recent_rate=window.recent_rate(model),
        surge_rate=window.surges.get(model, 0.0),
        newest_tokens=window.newest_tokens.get(model),
        ready=ready,
        backlog_tokens=_backlog(model, window),
        ttft_mean_s=latency.ttft_mean_s if latency is not None else None,
        itl_mean_s=latency.itl_mean_s if latency is not None else None,
        kv_usage=decode.kv_usage if decode is not None else None,
    )


def _judge(
    model: str, window: Window | None, ready: Shape, *, limits: ObservationLimits
) -> tuple[ObservationState, Sequence[str]]:
    if window is None:
        return ObservationState.MISSING, ["no metrics were observed"]
    if window.window_s < limits.window_s_min:
        return ObservationState.MISSING, [f"the window of {window.window_s:.1f} s is too short"]
    if window.age_s > limits.age_s_max:
        return ObservationState.STALE, [f"samples of workers of {model} are {window.age_s:.0f} s old"]
    missing = [
        f"only {seen} of {count} ready {role} workers of {model} have metrics"
        for role, count in (("prefill", ready.prefill_workers), ("decode", ready.decode_workers))
        if (seen := window.workers.get((model, role), 0)) < count
    ]
    if missing:
        return ObservationState.MISSING, missing
    if problems := _contradictions(model, window):
        return ObservationState.CONTRADICTORY, problems
    return ObservationState.COMPLETE, ()


def _contradictions(model: str, window: Window) -> Sequence[str]:
    problems = []
    for role in ("prefill", "decode"):
        used, total = (window.gauges.get((name, model, role), 0.0) for name in (BLOCKS_USED, BLOCKS_TOTAL))
        if used > total:
            problems.append(f"{role} workers of {model} use {used:.0f} KV blocks of {total:.0f}")
        if window.gauges.get((RUNNING, model, role), 0.0) < 0:
            problems.append(f"{role} workers of {model} report a negative number of requests")
    received = window.increases.get((OUTPUT_TOKENS, model), 0.0)
    produced = sum(window.increases.get((WORKER_OUTPUT_TOKENS, model, role), 0.0) for role in ("prefill", "decode"))
    # Tokens of workers that came or went are received, but not in the workers' increases.
    if not window.has_changed_fleet and received > SLACK_RATIO * produced + SLACK_TOKENS:
        problems.append(f"frontends received {received:.0f} tokens of {model}, workers report {produced:.0f}")
    if any(value < 0 for key, value in window.increases.items() if len(key) > 1 and key[1] == model):
        problems.append(f"a counter of {model} fell without a restart")
    return problems


def _demand(model: str, window: Window, latency: LatencyReport | None) -> Demand | None:
    if latency is None or not latency.requests_per_s or not latency.prompt_tokens_mean:
        return None
    mean = latency.prompt_tokens_mean
    lengths = lengths_of_buckets(window.buckets(PROMPT_LENGTH, model=model), mean) or log_normal(
        mean=mean, cv=LENGTH_CV
    )
    return Demand(
        requests_per_s=latency.requests_per_s,
        prompt_lengths=lengths,
        output_tokens=_output_tokens(window, model),
        hit_rate=min(1.0, latency.hit_rate or 0.0),
    )


def _output_tokens(window: Window, model: str) -> float:
    """Returns the mean length of answers: all tokens that were generated, over the answers that ended.

    Short answers end first, so the mean of those that ended is too small after a rise of the load. This estimate counts the tokens of
    running answers too; it is the maximum-likelihood one for exponential lengths (censored data). A few answers say little, so a usual
    length counts for some.
    """
    ended = sum(
        count for key, count in window.increases.items() if key[:2] == (REQUESTS, model) and key[2].startswith("2")
    )
    generated = window.increases.get((WORKER_OUTPUT_TOKENS, model, Role.DECODE.value), 0.0)
    tokens = max(window.increases.get((OUTPUT_TOKENS, model), 0.0), generated)
    return (tokens + OUTPUT_USUAL_REQUESTS * OUTPUT_USUAL_TOKENS) / (ended + OUTPUT_USUAL_REQUESTS)


def _backlog(model: str, window: Window) -> float:
    on_workers = sum(window.gauges.get((WAITING_TOKENS, model, role), 0.0) for role in ("prefill", "decode"))
    in_routers = sum(
        tokens
        for (name, *labels), tokens in window.gauges.items()
        # Late requests missed the target already, and wait for spare time.
        if name == QUEUED_TOKENS and labels != ["late"]
    )
    return on_workers + in_routers
