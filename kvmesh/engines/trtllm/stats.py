"""The load record, from the engine's statistics and the adapter's own counts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvmesh.core import LoadRecord
from kvmesh.engines.trtllm.leg import TrtllmLeg


@dataclass(slots=True)
class HandleLease:
    """A handed-out handle. `was_seen`: statistics have shown its blocks since, so unused blocks later mean that it was pulled."""

    blocks: int
    expires_at_s: float
    was_seen: bool = False


@dataclass(slots=True, kw_only=True)
class LoadCounts:
    """Counts of one engine. All methods run on the event loop.

    The engine does not report when a handed-over prompt was pulled. A lease ends when it is released, when it expires (the engine's
    own timeout then frees the blocks), or when the statistics show that no block is in use.
    """

    blocks_total: int
    running_requests_max: int
    blocks_used: int = 0
    step: int = 0
    step_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    transferred_tokens: int = 0
    recomputed_tokens: int = 0
    failed_handoffs: int = 0
    _leases: dict[str, HandleLease] = field(default_factory=dict)

    def on_statistics(self, stats: Mapping[str, Any]) -> None:
        """One entry of `get_stats_async`."""
        cache = stats.get("kvCacheStats") or {}
        self.blocks_total = int(cache.get("maxNumBlocks") or self.blocks_total)
        self.blocks_used = min(int(cache.get("usedNumBlocks", self.blocks_used)), self.blocks_total)
        self.step_s = float(stats.get("iterLatencyMS") or 0.0) / 1000
        for lease in self._leases.values():
            lease.was_seen = lease.was_seen or self.blocks_used >= lease.blocks
        if not self.blocks_used:
            self._leases = {name: lease for name, lease in self._leases.items() if not lease.was_seen}

    def lease(self, handle_id: str, blocks: int, expires_at_s: float) -> None:
        self._leases[handle_id] = HandleLease(blocks, expires_at_s, was_seen=self.blocks_used >= blocks)

    def release(self, handle_id: str, now: float) -> bool:
        """Removes a lease. Returns False if it is unknown, was pulled or has expired."""
        self._expire(now)
        return self._leases.pop(handle_id, None) is not None

    def leases(self, now: float) -> int:
        self._expire(now)
        return len(self._leases)

    def _expire(self, now: float) -> None:
        self._leases = {name: lease for name, lease in self._leases.items() if lease.expires_at_s > now}

    def on_finish(self, leg: TrtllmLeg) -> None:
        self.cached_tokens += leg.cached_tokens
        if leg.was_recomputed:
            self.recomputed_tokens += len(leg.tokens)

    def on_begin(self, leg: TrtllmLeg) -> None:
        """The first output of a leg."""
        self.prompt_tokens += 0 if leg.transferred_tokens else len(leg.tokens)
        self.transferred_tokens += leg.transferred_tokens

    def record(self, legs: Iterable[TrtllmLeg], now: float) -> LoadRecord:
        self._expire(now)
        waiting = running = waiting_tokens = 0
        for leg in legs:
            if leg.output_tokens:
                running += 1
            else:
                waiting, waiting_tokens = waiting + 1, waiting_tokens + len(leg.tokens)
        leased = sum(lease.blocks for lease in self._leases.values())
        used = min(max(self.blocks_used, leased), self.blocks_total)
        # Without running legs every used block belongs to a handle, the one for the first generated token included.
        leased = used if leased and not running and not waiting else min(leased, used)
        return LoadRecord(
            step=self.step,
            running_requests=running,
            waiting_requests=waiting,
            waiting_prompt_tokens=waiting_tokens,
            running_requests_max=self.running_requests_max,
            kv_blocks_total=self.blocks_total,
            kv_blocks_used=used,
            kv_blocks_free=self.blocks_total - used,
            kv_blocks_leased=leased,
            step_s=self.step_s,
            prompt_tokens_total=self.prompt_tokens,
            output_tokens_total=self.output_tokens,
            cached_tokens_total=self.cached_tokens,
            transferred_tokens_total=self.transferred_tokens,
            recomputed_tokens_total=self.recomputed_tokens,
            failed_handoffs_total=self.failed_handoffs,
        )
