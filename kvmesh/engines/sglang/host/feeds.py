"""Reports of the engine process other than outputs: the scheduler's load and the cache events.

Events are translated here, so that token ids need not be sent.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvmesh.core import KvEvent, KvRemoved, KvStored, KvTier
from kvmesh.engines.event_translator import EventTranslator
from kvmesh.engines.sglang.messages import HostLoad, KvChange
from kvmesh.kv.blocks import seed_hash

TIERS: Mapping[str | None, KvTier] = {
    None: KvTier.DEVICE,
    "GPU": KvTier.DEVICE,
    "CPU_PINNED": KvTier.HOST,
    "DISK": KvTier.DISK,
    "EXTERNAL": KvTier.OBJECT,
}


def current_load(scheduler: Any, *, step_s: float) -> HostLoad:
    """`scheduler` is SGLang's. Each request counts once. Prompts of requests that bootstrap wait to be computed."""
    pool = scheduler.pool_stats_observer.get_pool_stats()
    used, _ = pool.get_kv_token_stats()
    waiting = [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]
    # A batch keeps its finished requests until the next step.
    batches = [batch for batch in (scheduler.running_batch, scheduler.cur_batch_for_debug) if batch is not None]
    running = {request for batch in batches for request in batch.reqs if not request.finished()}
    running -= {*waiting, *(scheduler.disagg_prefill_inflight_queue or ())}
    bootstrapping, sending = scheduler.disagg_prefill_bootstrap_queue, scheduler.disagg_prefill_inflight_queue
    preallocating, receiving = scheduler.disagg_decode_prealloc_queue, scheduler.disagg_decode_transfer_queue
    to_compute = [*waiting, *(bootstrapping.queue if bootstrapping is not None else ())]
    queues = {
        "bootstrapping_requests": len(bootstrapping.queue) if bootstrapping is not None else 0,
        "sending_requests": len(sending) if sending is not None else 0,
        "preallocating_requests": len(preallocating.queue) if preallocating is not None else 0,
        "receiving_requests": len(receiving.queue) if receiving is not None else 0,
        "retracted_requests": len(preallocating.retracted_queue) if preallocating is not None else 0,
    }
    return HostLoad(
        step=scheduler.forward_ct,
        step_s=step_s,
        running_requests=len(running),
        waiting_requests=len(waiting),
        waiting_prompt_tokens=sum(len(request.origin_input_ids) for request in to_compute),
        kv_tokens_used=int(used),
        preempted_requests_total=scheduler.outputs.preempted_total,
        kv_tokens_cached=int(pool.full_evictable_size),
        kv_tokens_unaccounted=_unaccounted(scheduler, pool) if scheduler.is_fully_idle() else None,
        **queues,
    )


def _unaccounted(scheduler: Any, pool: Any) -> int | None:
    """Returns the tokens of the pool of an idle scheduler that are neither free, nor cached, nor of a session: 0, unless they leaked.

    While requests run, requests in the queues of prefill and decode engines own tokens that SGLang does not count.
    """
    if pool.is_hybrid_swa or pool.is_hybrid_ssm:
        return None
    sessions = scheduler.pool_stats_observer.session_held_tokens()
    protected = scheduler.tree_cache.protected_size()
    accounted = pool.full_available_size + pool.full_evictable_size + protected + sessions
    return int(scheduler.max_total_num_tokens - accounted)


class SglangEvents(EventTranslator):
    """SGLang has one cache, so all events count."""

    def is_counted(self, event: Any) -> bool:
        return True

    def seed(self, event: Any) -> int:
        return seed_hash(adapter=event.lora_name or "", cache_salt=event.cache_salt or "")

    def tier(self, event: Any) -> KvTier:
        return TIERS.get(event.medium, KvTier.DEVICE)


def to_changes(events: Sequence[KvEvent]) -> list[KvChange]:
    """Events as they are sent."""
    return [_to_change(event) for event in events]


def _to_change(event: KvEvent) -> KvChange:
    match event:
        case KvStored():
            return ("stored", list(event.block_hashes), event.parent_hash, event.tier.value)
        case KvRemoved():
            return ("removed", list(event.block_hashes), None, event.tier.value)
        case _:
            return ("cleared", [], None, "")
