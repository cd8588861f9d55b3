"""What kvmesh adds to vLLM's worker, in whichever process it runs: freeing KV that vLLM itself would hold.

vLLM mixes this class into its worker (`worker_extension_cls`) and calls it through `collective_rpc`. It is written against
the NIXL pull connector of vLLM 0.32 and uses its insides; each method says which promise of vLLM's it relies on.
"""

import ctypes
import importlib
import importlib.util
import os
import signal
from collections.abc import Sequence
from typing import Any

from kvmesh.engines.vllm.environment import mend_nixl

PR_SET_PDEATHSIG = 1


class KvmeshWorkerExtension:
    """Methods have the prefix `kvmesh_`, since they live beside vLLM's own."""

    def kvmesh_prepare(self, engine_pid: int) -> str:
        """Binds a child process's life to the engine's. Answers the NIXL compatibility hash, empty without a connector."""
        if os.getpid() != engine_pid:
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        worker = connector_worker()
        return "" if worker is None else str(worker.compat_hash)

    def kvmesh_splits_heads(self) -> bool:
        """Whether an engine with another number of ranks can read these blocks, as the connector's handshake decides it: the heads
        of a block lie together, and no rank holds a copy of another's. Models with one latent head need neither."""
        worker = connector_worker()
        if worker is None or worker._has_mamba or worker.use_host_buffer:
            return False
        if worker.use_mla:
            return True
        layouts = importlib.import_module("vllm.v1.kv_cache_layout").KVCacheLayout
        is_copied = worker.world_size > worker.transfer_topo.total_num_kv_heads
        return bool(layouts[worker.kv_cache_layout].is_block_contiguous) and not is_copied

    def kvmesh_release(self, request_ids: Sequence[str]) -> None:
        """Ends leases as if a peer had pulled: the next step frees the blocks.

        `_replicated_pcp_done_sending` is the connector's own way to report requests as sent without a peer's word; a
        request taken out of `_reqs_to_process` gets no lease even if the scheduler hands it over in the next step.
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

    def kvmesh_abandon(self, request_ids: Sequence[str]) -> None:
        """Ends pulls of aborted requests so that their blocks are freed, which vLLM does only when the peer answers.

        A posted transfer is released; as vLLM does after a failure, a handle that NIXL does not let go of keeps its
        blocks. The notice that a transfer carries is lost with it, so the peer gets one of its own. A pull that waits
        for the handshake becomes a mere notice to the peer, which may free its blocks then.
        """
        worker = connector_worker()
        if worker is None:
            return
        for request_id in request_ids:
            handles = worker._recving_transfers.get(request_id)
            if handles is not None:
                kept = [handle for handle in handles if not worker._try_release_xfer_handle(request_id, handle)]
                worker._recving_transfers[request_id] = kept
                notify(worker, request_id)
            elif (meta := worker._recving_metadata.get(request_id)) is not None:
                meta.local_block_ids, meta.local_physical_block_ids, meta.awaiting_kvs = ([],), (), False
                worker._recv_failures.add(request_id)

    def kvmesh_has_peer(self, engine_id: str) -> bool:
        """True when the handshake with a peer is done, so that heartbeats for its leases go out."""
        worker = connector_worker()
        return worker is not None and engine_id in worker._remote_agents


def notify(worker: Any, request_id: str) -> None:
    """Tells the peers that a pull is over, as the transfer itself would have."""
    meta = worker._recving_metadata.get(request_id)
    if meta is None or meta.remote is None:
        return
    consumers = worker.tp_mappings[meta.remote.engine_id].local_consumers
    for agent in worker._remote_agents[meta.remote.engine_id].values():
        try:
            worker.nixl_wrapper.send_notif(agent, notif_msg=f"{meta.remote.request_id}:{consumers}".encode())
        except Exception:  # noqa: BLE001  # NIXL has an error class per failure; the peer's lease ends without us.
            worker.xfer_stats.record_failed_notification()


def connector_worker() -> Any:
    """The NIXL connector's worker side in this process, or None."""
    state = importlib.import_module("vllm.distributed.kv_transfer.kv_transfer_state")
    return state.get_kv_transfer_group().connector_worker if state.has_kv_transfer_group() else None


# A worker process of a tensor-parallel engine gets here before it makes its agent.
if importlib.util.find_spec("nixl") is not None:
    mend_nixl()
