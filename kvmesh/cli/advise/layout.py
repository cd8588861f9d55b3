"""Whether prefill and decode are split, and how many workers each pool needs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.cli.advise.hardware import WorkerSpeed
from kvmesh.cli.advise.needs import Needs

LOAD_MAX = 0.7
"""Part of a worker's time that may be planned. Above it queues grow quickly: at 0.7 a random arrival waits about one service time."""
HANDOFF_S = 0.004
"""Seconds of a handoff that do not depend on its size: a call, the transfer's set-up, a scheduling step."""
PREFILL_SHARE_MIN = 0.1
"""Part of the work that prompts must be before a pool of their own is worth it."""
BATCH_MAX = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Workers of each pool; `prefill` 0: not split. `limits` are targets that cannot be met, with what limits them."""

    prefill: int
    decode: int
    ttft_s: float
    itl_s: float
    requests_per_s_max: float
    reasons: Sequence[str]
    changes: Sequence[str]
    limits: Sequence[str]


def plan_layout(needs: Needs, speed: WorkerSpeed) -> Layout:
    """Pool sizes for the load, within the targets where they can be met."""
    workers = needs.devices // speed.ranks
    prompt_s = _uncached(needs) * speed.prefill_s_per_token
    batch = _batch(needs, speed)
    step_s = speed.step_s(batch, tokens=needs.prompt_tokens + needs.output_tokens / 2)
    decode_s = needs.output_tokens * step_s / batch
    is_split, reasons, changes = _split(needs, speed, workers=workers, prompt_s=prompt_s, decode_s=decode_s)
    load = needs.requests_per_s / LOAD_MAX
    if is_split:
        prefill, decode = max(1, math.ceil(load * prompt_s)), max(1, math.ceil(load * decode_s))
        capacity = LOAD_MAX / max(prompt_s / prefill, decode_s / decode)
    else:
        prefill, decode = 0, max(1, math.ceil(load * (prompt_s + decode_s)))
        capacity = LOAD_MAX * decode / (prompt_s + decode_s)
    ttft_s = 2 * prompt_s + step_s + (_handoff_s(needs, speed) if is_split else 0.0)
    return Layout(
        prefill=prefill,
        decode=decode,
        ttft_s=ttft_s,
        itl_s=step_s,
        requests_per_s_max=capacity,
        reasons=reasons,
        changes=[*changes, f"more than {capacity:.3g} requests/s need more workers"],
        limits=_limits(needs, speed, workers=workers, needed=prefill + decode, ttft_s=ttft_s, step_s=step_s),
    )


def _uncached(needs: Needs) -> float:
    return max(1.0, needs.prompt_tokens * (1 - needs.shared_ratio))


def _handoff_s(needs: Needs, speed: WorkerSpeed) -> float:
    return HANDOFF_S + needs.prompt_tokens * speed.kv_bytes_per_token / speed.transfer_bytes_per_s


def _batch(needs: Needs, speed: WorkerSpeed) -> int:
    """Most requests that decode together within the target and the KV memory; at least 1."""
    tokens = needs.prompt_tokens + needs.output_tokens / 2
    per_request_s = speed.step_s_per_request + tokens * speed.step_s_per_kv_token
    in_time = (needs.itl_s - speed.step_base_s) / per_request_s if per_request_s else BATCH_MAX
    in_memory = speed.kv_tokens / (needs.prompt_tokens + needs.output_tokens)
    return max(1, min(BATCH_MAX, int(in_time), int(in_memory)))


def _split(
    needs: Needs, speed: WorkerSpeed, *, workers: int, prompt_s: float, decode_s: float
) -> tuple[bool, Sequence[str], Sequence[str]]:
    """Applies the rules in order; the first that fits decides. Returns split or not, reasons, and what would change it."""
    share = prompt_s / (prompt_s + decode_s)
    handoff_s = _handoff_s(needs, speed)
    if workers < 2:
        return (
            False,
            ["there is room for one worker only, so prefill and decode share it"],
            ["with devices for two workers prefill and decode can be split"],
        )
    if prompt_s <= handoff_s:
        text = (
            f"a prompt takes {_ms(prompt_s)} to compute and {_ms(handoff_s)} to hand over, so splitting would not pay"
        )
        return False, [text], ["longer prompts, or fewer shared ones, make splitting worth it"]
    if prompt_s <= needs.itl_s:
        text = f"a prompt takes {_ms(prompt_s)}, within the target of {_ms(needs.itl_s)} between tokens, so it does not disturb other answers"
        return False, [text], [f"a target below {_ms(prompt_s)} between tokens makes splitting worth it"]
    if share < PREFILL_SHARE_MIN:
        text = f"prompts are {share:.0%} of the work, too little for workers of their own"
        return False, [text], ["longer prompts or shorter answers make splitting worth it"]
    text = f"a prompt takes {_ms(prompt_s)} and would stop other answers for longer than {_ms(needs.itl_s)}; prompts are {share:.0%} of the work"
    return (
        True,
        [text],
        [
            f"prompts of less than {needs.itl_s / speed.prefill_s_per_token:.0f} uncached tokens would not need the split"
        ],
    )


def _limits(
    needs: Needs, speed: WorkerSpeed, *, workers: int, needed: int, ttft_s: float, step_s: float
) -> Sequence[str]:
    limits = []
    if workers < 1:
        limits.append(f"the model needs {speed.ranks} devices for one worker, and there are {needs.devices}")
    elif needed > workers:
        limits.append(f"the load needs {needed} workers of {speed.ranks} devices, and there is room for {workers}")
    if ttft_s > needs.ttft_s:
        limits.append(
            f"the first token takes about {_ms(ttft_s)}, more than {_ms(needs.ttft_s)}: computing the prompt limits it"
        )
    if step_s > needs.itl_s:
        limits.append(
            f"a token takes at least {_ms(step_s)}, more than {_ms(needs.itl_s)}: reading the weights limits it"
        )
    if speed.kv_tokens < needs.prompt_tokens + needs.output_tokens:
        limits.append(f"one request needs more KV than a worker holds ({speed.kv_tokens:.0f} tokens)")
    return limits


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
