"""vLLM's NIXL pull connector, extended by a proof that pulled blocks were held until the pull ended.

vLLM's own connector relies on time: the prefill side frees blocks when their lease ends, even if a peer is reading them. A decode side
that was suspended during that time reads blocks of other prompts and answers with wrong tokens. Here the prefill side ends a hold
(`holds.py`) before it frees the blocks, and the decode side reads the hold's word after the blocks.

Written against vLLM 0.32. vLLM loads the class by module path and name (`kv_connector_module_path`). The class has the name of vLLM's
own connector, because vLLM's configuration treats that name specially.
"""

import socket
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from kvmesh.engines.vllm.holds import HOLDS_PATH, SECRET_FILE, WORD_BYTES, HoldTable
from kvmesh.engines.vllm.side_channel import close_side_channel
from kvmesh.event_log import event_logger

_log = event_logger(__name__)

CHECKS_MAX = 1 << 14
"""Concurrent reads of hold words. A pull beyond this number counts as lost, and its prompt is computed."""
CONNECT_TIMEOUT_S = 1.0
"""Longest connect to a peer's side channel."""
FAILURES_MAX = 1024
MESSAGE_CHARACTERS_MAX = 200
HOLD = "hold"
"""Name of the hold in the connector's parameters of a request: `index`, `number`, and the table's `addresses` by rank."""


class NixlConnector(NixlPullConnector):  # type: ignore[misc]
    """Both halves of the connector. vLLM makes one instance for its scheduler and one for each worker."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        # Skips NixlPullConnector.__init__, which would make vLLM's own halves.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = HoldingScheduler(vllm_config, self.engine_id, kv_cache_config)
        else:
            self.connector_worker = HoldingWorker(vllm_config, self.engine_id, kv_cache_config)


class HoldingScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    """Starts a hold with each handed-out prompt and ends it before vLLM frees the blocks."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        close_side_channel(extra[SECRET_FILE])
        self._holds = HoldTable(extra[HOLDS_PATH])

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Adds the hold to the parameters for the reader, unless the table is full."""
        is_delayed, parameters = super().request_finished(request, block_ids)
        if is_delayed and parameters is not None:
            hold = self._holds.add(request.request_id)
            if hold is not None:
                parameters[HOLD] = {"index": hold.index, "number": hold.number}
        return is_delayed, parameters

    def update_connector_output(self, connector_output: Any) -> None:
        """Ends holds. vLLM calls this right before it frees the blocks of all requests in `finished_sending`."""
        for request_id in connector_output.finished_sending or ():
            self._holds.end(request_id)
        super().update_connector_output(connector_output)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Passes the holds of pulls that start in this step to the workers."""
        holds = {
            request_id: request.kv_transfer_params.get(HOLD)
            for request_id, (request, _, _, is_awaited) in self._reqs_need_recv.items()
            if is_awaited
        }
        metadata = super().build_connector_meta(scheduler_output)
        metadata.holds = holds
        return metadata


@dataclass(slots=True)
class _Check:
    """The pending check of one pull: after the blocks, read the hold's word from a rank of `engine_id`.

    `copy` is the index of the local copy of the word; None before its read is posted.
    """

    engine_id: str
    hold: dict[str, Any] | None
    copy: int | None = None
    is_abandoned: bool = False
    """True if the request was aborted during the read of the word, whose value then says nothing."""


class HoldingWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    """Checks the hold of each pull when its transfers are done, and only then notifies the prefill side.

    vLLM sends the notice with the transfer. Then the prefill side would end the hold before its word is read. A pull whose hold has
    ended counts as failed, and vLLM computes the prompt.
    """

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.nixl_wrapper: Any = _WithoutNotices(self.nixl_wrapper)
        extra = self.kv_transfer_config.kv_connector_extra_config
        close_side_channel(extra[SECRET_FILE])
        self.holds = HoldTable(extra[HOLDS_PATH])
        self._copies = np.zeros(CHECKS_MAX, np.uint64)
        self._free_copies = list(range(CHECKS_MAX - 1, -1, -1))
        self._pull_holds: dict[str, dict[str, Any] | None] = {}
        self._checks: dict[str, _Check] = {}
        self.failures: dict[str, tuple[str, str]] = {}
        """Reason and message of failed pulls, until the runner takes them."""

    def _nixl_handshake(self, host: str, port: int, *arguments: Any, **options: Any) -> Any:
        """Connects to the side channel first. vLLM's own socket would wait 5 s for a host that refuses, and with it all other peers."""
        with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S):
            pass
        return super()._nixl_handshake(host, port, *arguments, **options)

    def _log_failure(  # noqa: PLR0917  # vLLM calls it.
        self, failure_type: str, req_id: str | None, msg: str = "", error: BaseException | None = None, **more: Any
    ) -> None:
        """Keeps the failure of a request for its report. Handshakes fail on a thread of their own."""
        super()._log_failure(failure_type, req_id, msg, error, **more)
        if req_id is not None:
            reason, message = failure_of(failure_type, error)
            self._add_failure(req_id, reason=reason, message=message)
            if failure_type.startswith("transfer"):
                self._drop_peer(req_id)

    def _drop_peer(self, request_id: str) -> None:
        """Makes vLLM remove the peer of a failed transfer when its other transfers have ended, and repeat the handshake. vLLM does so
        only if NIXL itself has dropped the peer. Otherwise a broken connection fails all later transfers (NIXL_ERR_REMOTE_DISCONNECT,
        seen with nixl 1.5.1). KV paths have their own pause, so vLLM's pause is removed.
        """
        metadata = self._recving_metadata.get(request_id)
        if metadata is None or metadata.remote is None or metadata.remote.engine_id not in self._remote_agents:
            return
        engine_id = metadata.remote.engine_id
        if engine_id not in self._invalid_remote_engines:
            self._invalid_engine_backoff.pop(engine_id, None)
            self._mark_remote_engine_invalid(engine_id, time.perf_counter())

    def _add_failure(self, request_id: str, reason: str, message: str) -> None:
        self.failures.setdefault(request_id, (reason, message))
        if len(self.failures) > FAILURES_MAX:
            self.failures.pop(next(iter(self.failures)), None)

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Registers the hold words too, before super(), which ends with the metadata that peers read."""
        for address, size in (
            (self.holds.address, self.holds.size_bytes),
            (self._copies.ctypes.data, self._copies.nbytes),
        ):
            descriptors = self.nixl_wrapper.get_reg_descs([(address, size, 0, "")], "DRAM")
            self.nixl_wrapper.register_memory(descriptors, backends=self.nixl_backends)
            self._registered_descs.append(descriptors)
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, metadata: Any) -> None:
        """Stores the holds until the pulls start, possibly after a handshake."""
        self._pull_holds.update(metadata.holds)
        super().start_load_kv(metadata)

    def get_transfer_results(self) -> Any:
        """Removes the holds of finished pulls."""
        results = super().get_transfer_results()
        for request_id in results.finished_recving:
            self._pull_holds.pop(request_id, None)
        return results

    def _read_blocks(self, read_spec: Any, **arguments: Any) -> bool:
        """Posts a read of blocks. Its notice is sent after vLLM has accepted the pulled blocks."""
        is_posted = bool(super()._read_blocks(read_spec=read_spec, **arguments))
        if is_posted and any(read_spec.local_block_ids):
            request_id, engine_id = arguments["request_id"], arguments["dst_engine_id"]
            self._checks[request_id] = _Check(engine_id, self._pull_holds.get(request_id))
            if not self._mixed_mem_types:  # There vLLM itself sends the notice later.
                agent = self._remote_agents[engine_id][(0, read_spec.remote_rank)]
                notice = f"{arguments['remote_request_id']}:{arguments['expected_consumers']}".encode()
                self._pending_recv_notifs.setdefault(request_id, []).append((agent, notice))
        return is_posted

    def abandon(self, request_id: str) -> None:
        """Ends an aborted pull that waits for a handshake, and notifies the peer.

        Blocks of a running transfer stay allocated until it ends. NIXL cannot stop a transfer: its bytes still arrive after its handle was
        released or its peer removed, in blocks that another request may use by then (seen with nixl 1.5.1 over TCP).
        """
        metadata = self._recving_metadata.get(request_id)
        if metadata is None:
            return
        check = self._checks.get(request_id)
        if check is not None:
            if check.copy is None:
                del self._checks[request_id]
            else:
                # NIXL may still write the copy, which `_end_check` returns.
                check.is_abandoned = True
        if request_id not in self._recving_transfers:
            metadata.local_block_ids, metadata.local_physical_block_ids, metadata.awaiting_kvs = ([],), (), False
            self._recv_failures.add(request_id)

    def _pop_done_transfers(self, transfers: dict[str, list[Any]]) -> tuple[set[str], set[str]]:
        """Starts the read of the hold's word for each pull whose blocks have arrived. The pull is done when that read is."""
        done, failed = super()._pop_done_transfers(transfers)
        started = {request_id for request_id in done - failed if self._begin_check(request_id, transfers, failed)}
        done -= started
        # Reads of 8 bytes often complete immediately.
        words = {request_id: transfers[request_id] for request_id in started}
        words_done, words_failed = super()._pop_done_transfers(words)
        for request_id in started:
            if request_id in words_done:
                # `super()` has removed it from `words`, which is a dict of its own.
                del transfers[request_id]
            else:
                transfers[request_id] = words[request_id]
        done |= words_done
        failed |= words_failed
        for request_id in done:
            self._end_check(request_id, failed)
        return done, failed

    def _begin_check(self, request_id: str, transfers: dict[str, list[Any]], failed: set[str]) -> bool:
        """Posts the read of a hold's word. False: nothing to read, or the pull has failed."""
        check = self._checks.get(request_id)
        if check is None or check.copy is not None or request_id in self._recv_failures:
            return False
        try:
            # IndexError if no copy is free: the pull counts as lost.
            check.copy = self._free_copies.pop()
            # 0 is no hold's number, so a word that was not read does not match.
            self._copies[check.copy] = 0
            transfers[request_id] = [self._post_check(check, check.copy)]
        except Exception as error:  # noqa: BLE001  # NIXL has many error classes. Without the word the pull has failed.
            _log.warning("kv_hold_not_read", error=type(error).__name__)
            failed.add(request_id)
            return False
        return True

    def _post_check(self, check: _Check, copy: int) -> Any:
        if check.hold is None:
            raise LookupError("the handle has no hold")
        # All ranks of an engine share one table, so any rank will do.
        rank = min(
            tensor_rank for pipeline_rank, tensor_rank in self._remote_agents[check.engine_id] if pipeline_rank == 0
        )
        there = check.hold["addresses"][rank] + check.hold["index"] * WORD_BYTES
        here = self._copies.ctypes.data + copy * WORD_BYTES
        wrapper = self.nixl_wrapper
        transfer = wrapper.initialize_xfer(
            "READ",
            wrapper.get_xfer_descs([(here, WORD_BYTES, 0)], "DRAM"),
            wrapper.get_xfer_descs([(there, WORD_BYTES, 0)], "DRAM"),
            self._remote_agents[check.engine_id][(0, rank)],
        )
        wrapper.transfer(transfer)
        return transfer

    def _end_check(self, request_id: str, failed: set[str]) -> None:
        """Compares the word with the hold's number. Adds a pull whose hold has ended to `failed`."""
        check = self._checks.pop(request_id, None)
        if check is None or check.copy is None:
            return
        self._free_copies.append(check.copy)
        if check.is_abandoned or request_id in failed or request_id in self._recv_failures:
            return
        assert check.hold is not None
        if int(self._copies[check.copy]) != check.hold["number"]:
            self.xfer_stats.record_kv_expired_req()
            _log.warning("kv_hold_ended", request_id=request_id)
            self._add_failure(request_id, reason="kv_stale", message="the blocks were not held any more")
            failed.add(request_id)


def failure_of(failure_type: str, error: BaseException | None) -> tuple[str, str]:
    """Reason and message of a failure that vLLM logs."""
    message = f"{failure_type.replace('_', ' ')}: {error}" if error is not None else failure_type.replace("_", " ")
    if failure_type.startswith("handshake"):
        return ("kv_incompatible" if "compatibility" in message else "kv_handshake"), message[:MESSAGE_CHARACTERS_MAX]
    return "kv_peer_lost", message[:MESSAGE_CHARACTERS_MAX]


class _WithoutNotices:
    """A NIXL agent whose prepared transfers carry no notice."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def make_prepped_xfer(self, *arguments: Any, notif_msg: bytes = b"", **options: Any) -> Any:
        return self._agent.make_prepped_xfer(*arguments, **options)
