"""Changes the role of a running engine between prefill and decode.

SGLang's own switch tears the transfer structures of a role down, which its NIXL manager cannot. Here the structures of each role are made
once and kept: a parked role has no requests, and its NIXL agent only holds a second registration of the same KV memory.
"""

from typing import Any

from kvmesh.event_log import event_logger

_log = event_logger(__name__)

STRUCTURES = (
    "req_to_metadata_buffer_idx_allocator",
    "disagg_metadata_buffers",
    "disagg_prefill_bootstrap_queue",
    "disagg_prefill_inflight_queue",
    "disagg_prefill_pending_chunk_rids",
    "disagg_decode_prealloc_queue",
    "disagg_decode_transfer_queue",
)
"""Attributes of SGLang's scheduler that `init_disaggregation` makes for one role."""
NOT_IDLE = "requests run"


class RoleSwitch:
    """The roles of one scheduler, which has its first role already."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._parked: dict[str, dict[str, Any]] = {}

    def switch(self, role: str) -> str:
        """Returns why the role cannot change now.

        Empty: it has changed, and the scheduler must leave its event loop, because each role has its own. Evicts all cached blocks, as
        SGLang's own switch does.
        """
        from sglang.srt.disaggregation.utils import DisaggregationMode

        scheduler = self._scheduler
        present = scheduler.disaggregation_mode.value
        if role == present:
            return ""
        if not scheduler.is_fully_idle():
            return NOT_IDLE
        self._parked[present] = {name: getattr(scheduler, name, None) for name in STRUCTURES}
        self._empty_cache()
        self._set_mode(role)
        if (kept := self._parked.pop(role, None)) is not None:
            for name, value in kept.items():
                setattr(scheduler, name, value)
            scheduler.disaggregation_mode = DisaggregationMode(role)
        else:
            scheduler.init_disaggregation()
        scheduler._sync_disaggregation_mode_to_subcomponents()
        if role == "decode" and scheduler.device != "cpu":
            self._capture_graphs()
        return ""

    def _capture_graphs(self) -> None:
        """An engine that starts as prefill has no CUDA graphs for decoding."""
        try:
            self._scheduler.tp_worker.ensure_decode_cuda_graphs(None)
        except Exception as error:  # noqa: BLE001  # As SGLang's own switch: without graphs it decodes more slowly.
            _log.error("decode_graphs_not_captured", exc_info=error)

    def _set_mode(self, role: str) -> None:
        from sglang.srt.runtime_context import get_context

        get_context().override("kvmesh.role_switch", disaggregation_mode=role)

    def _empty_cache(self) -> None:
        scheduler = self._scheduler
        if scheduler.disable_radix_cache:
            return
        scheduler.tree_cache.reset()
        scheduler.req_to_token_pool.clear()
        scheduler.token_to_kv_pool_allocator.clear()
