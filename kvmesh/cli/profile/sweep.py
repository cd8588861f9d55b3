"""The points that a profile is made of, and the sweep over them."""

import os
import platform
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from kvmesh.cli.profile.fit import fit_bandwidth, fit_decode, fit_prefill
from kvmesh.cli.profile.measure import EngineMeter
from kvmesh.core import WorkerDescription
from kvmesh.core.engine_profile import DecodePoint, EngineProfile, HandoffPoint, PrefillPoint
from kvmesh.core.worker import PerformanceProfile
from kvmesh.errors import InvalidRequestError

Point = TypeVar("Point", PrefillPoint, DecodePoint, HandoffPoint)
Say = Callable[[str], None]
CACHED_PARTS = 2
"""Prompts whose first half, or more, is cached: they show what the context before a token costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """What to measure. Each point is measured `repeats` times, after one try that does not count."""

    prompt_tokens: Sequence[int]
    prompt_batches: Sequence[int]
    contexts: Sequence[int]
    decode_batches: Sequence[int]
    decode_tokens: int
    repeats: int

    def within(self, decode: WorkerDescription) -> "SweepPlan":
        """Returns the part that fits the worker. Raises InvalidRequestError if nothing does."""
        most = min(decode.model.context_tokens_max, decode.kv_blocks_total * decode.block_size_tokens) - 1
        plan = replace(
            self,
            prompt_tokens=[tokens for tokens in self.prompt_tokens if tokens < most],
            contexts=[tokens for tokens in self.contexts if tokens + self.decode_tokens < most],
        )
        if len(plan.prompt_tokens) < 2 or not plan.contexts:
            raise InvalidRequestError(
                f"the worker holds only {most} tokens; use shorter prompts", field="prompt_tokens"
            )
        return plan


async def sweep(meter: EngineMeter, plan: SweepPlan, say: Say) -> EngineProfile:
    """Measures all points. Progress is said before each."""
    capacity = meter.decode.kv_blocks_total * meter.decode.block_size_tokens
    prefill: list[PrefillPoint] = []
    for batch in plan.prompt_batches:
        for tokens in plan.prompt_tokens:
            if batch * tokens <= capacity:
                say(f"prefill {batch} x {tokens} tokens")
                prefill += await _repeat(plan, partial(meter.prefill_point, tokens, batch))
    for tokens in plan.prompt_tokens[-CACHED_PARTS:]:
        say(f"prefill {tokens - tokens // 2} tokens after {tokens // 2} that are cached")
        half = tokens // 2
        prefill += await _repeat(plan, partial(meter.prefill_point, tokens - half, 1, cached_tokens=half))
    decode: list[DecodePoint] = []
    for batch in plan.decode_batches:
        for context in plan.contexts:
            if batch * (context + plan.decode_tokens) <= capacity:
                say(f"decode batch {batch}, context {context}")
                decode += await _repeat(plan, partial(meter.decode_point, batch, context, plan.decode_tokens))
    handoff: list[HandoffPoint] = []
    if meter.prefill_address:
        for tokens in plan.prompt_tokens:
            say(f"handoff of {tokens} tokens")
            handoff += await _repeat(plan, partial(meter.handoff_point, tokens))
    return fitted(meter.decode, prefill, decode, handoff=handoff)


async def _repeat(plan: SweepPlan, measure: Callable[[], Awaitable[Point]]) -> list[Point]:
    await measure()
    return [await measure() for _ in range(plan.repeats)]


def fitted(
    worker: WorkerDescription,
    prefill: Sequence[PrefillPoint],
    decode: Sequence[DecodePoint],
    *,
    handoff: Sequence[HandoffPoint],
) -> EngineProfile:
    """Returns the profile with its fit and residuals."""
    bytes_per_token = (worker.profile.kv_bytes_per_token if worker.profile else None) or None
    return refitted(
        EngineProfile(
            model=worker.model.name,
            engine=worker.capabilities.engine,
            engine_version=worker.capabilities.engine_version,
            machine=machine(),
            kv_tokens=worker.kv_blocks_total * worker.block_size_tokens,
            prefill=tuple(prefill),
            decode=tuple(decode),
            handoff=tuple(handoff),
            fit=PerformanceProfile(kv_bytes_per_token=bytes_per_token),
        )
    )


def refitted(profile: EngineProfile) -> EngineProfile:
    """Returns the profile with the fit of its points."""
    bytes_per_token = profile.fit.kv_bytes_per_token
    of_prefill, prefill_residuals, shares_steps = fit_prefill(profile.prefill)
    of_decode, decode_residuals = fit_decode(profile.decode)
    fit = PerformanceProfile(
        prefill_base_s=of_prefill.prefill_base_s,
        prefill_s_per_token=of_prefill.prefill_s_per_token,
        prefill_s_per_token_pair=of_prefill.prefill_s_per_token_pair,
        decode_step_base_s=of_decode.decode_step_base_s,
        decode_s_per_request=of_decode.decode_s_per_request,
        decode_s_per_kv_token=of_decode.decode_s_per_kv_token,
        kv_bytes_per_token=bytes_per_token,
        transfer_bytes_per_s=fit_bandwidth(profile.handoff, bytes_per_token or 0),
    )
    return replace(
        profile,
        fit=fit,
        shares_steps=shares_steps,
        prefill_residuals=prefill_residuals,
        decode_residuals=decode_residuals,
    )


def machine() -> Mapping[str, str]:
    """This machine, without its name. A worker may run on another one."""
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "cpus": str(os.cpu_count() or 0),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
