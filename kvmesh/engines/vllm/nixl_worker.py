"""Extends vLLM's worker, in whichever process it runs, to free KV that vLLM itself would keep.

vLLM mixes this class into its worker (`worker_extension_cls`) and calls it through `collective_rpc`. It uses private parts of the NIXL
pull connector of vLLM 0.32 (docs/contribute/replaced-parts.md).
"""

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from kvmesh.engines.vllm.continuation import split_emitted
from kvmesh.engines.vllm.cpu import prepare_runner
from kvmesh.engines.vllm.environment import reduce_nixl_polling


class KvmeshWorkerExtension:
    """Methods have the prefix `kvmesh_`, since vLLM adds them to its own class."""

    def kvmesh_prepare(self) -> tuple[str, int]:
        """Prepares the model runner.

        Returns the NIXL compatibility hash and the address of the hold table in this process; empty and 0 without a connector.
        """
        runner: Any = getattr(self, "model_runner", None)
        if runner is not None and runner.device.type == "cpu":
            prepare_runner(runner)
        if runner is not None:
            split_emitted(runner)
        worker = connector_worker()
        return ("", 0) if worker is None else (str(worker.compat_hash), worker.holds.address)

    def kvmesh_splits_heads(self) -> bool:
        """Returns True when an engine with another number of ranks can read these blocks.

        The connector's handshake requires that the heads of a block are contiguous and that no rank holds a copy of another's. Models
        with one latent head need neither.
        """
        worker = connector_worker()
        if worker is None or worker._has_mamba or worker.use_host_buffer:
            return False
        if worker.use_mla:
            return True
        layouts = importlib.import_module("vllm.v1.kv_cache_layout").KVCacheLayout
        is_copied = worker.world_size > worker.transfer_topo.total_num_kv_heads
        return bool(layouts[worker.kv_cache_layout].is_block_contiguous) and not is_copied

    def kvmesh_release(self, request_ids: Sequence[str]) -> None:
        """Ends leases as if a peer had pulled. The next step frees the blocks.

        The connector uses `_replicated_pcp_done_sending` to report requests as sent without a peer's notice. A request that is removed
        from `_reqs_to_process` gets no lease even if the scheduler passes it on in the next step.
        """
        worker = connector_worker()
        if worker is None:
            return
        for request_id in request_ids:
            worker._reqs_to_process.discard(request_id)
            worker._reqs_to_send.pop(request_id, None)
            worker.consumer_notification_counts_by_req.pop(request_id, None)
            worker.expected_consumer_notifications_by_req.pop(request_id, None)
            worker._replicated_pcp_done_sending.add(request_id)

    def kvmesh_abandon(self, request_id: str) -> None:
        """Ends the pull of an aborted request; vLLM does so only when the peer answers. See `HoldingWorker.abandon`."""
        worker = connector_worker()
        if worker is not None:
            worker.abandon(request_id)

    def kvmesh_pull_failure(self, request_id: str) -> tuple[str, str] | None:
        """Reason and message of a failed pull, once. None: unknown here."""
        worker = connector_worker()
        return worker.failures.pop(request_id, None) if worker is not None else None

    def kvmesh_has_peer(self, engine_id: str) -> bool:
        """Returns True after the handshake with a peer. From then on vLLM renews its leases by heartbeats."""
        worker = connector_worker()
        return worker is not None and engine_id in worker._remote_agents


def connector_worker() -> Any:
    """Returns the NIXL connector's worker side in this process, or None."""
    state = importlib.import_module("vllm.distributed.kv_transfer.kv_transfer_state")
    return state.get_kv_transfer_group().connector_worker if state.has_kv_transfer_group() else None


# A rank of a tensor-parallel engine imports this module before it makes its NIXL agent.
if importlib.util.find_spec("nixl") is not None:
    reduce_nixl_polling()
