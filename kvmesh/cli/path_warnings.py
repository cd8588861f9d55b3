"""Warnings of `kvmesh status` about paths: KV that does not pass between two workers, and frontends that lost workers."""

from collections.abc import Iterable, Mapping

from kvmesh.core import WorkerView

ADVICE: Mapping[str, str] = {
    "loopback_address": "it is handed out with a loopback address; start both with --address",
    "unreachable": "its KV address does not answer; check --address of both, and that the firewall lets the KV ports pass",
    "timed_out": "the transfer does not end in time; check the network between both hosts",
    "incompatible": "the two cannot exchange KV; start both with the same model, engine and KV settings",
    "failed": "the log of {decode} has the cause",
}
"""What to do, by `FailingKvPath.reason`."""


def path_warnings(views: Iterable[WorkerView]) -> list[str]:
    """One line per failing pair and per lost path, each once; `views` may come from several routers."""
    warnings: dict[str, None] = {}
    for view in views:
        decode = view.worker.worker_id
        for path in view.load.failing_kv_paths if view.load is not None else ():
            advice = ADVICE.get(path.reason, ADVICE["failed"]).format(decode=decode)
            warnings[f"{decode} cannot pull KV from {path.worker_id}: {path.reason}; {advice}"] = None
        for frontend_id in view.paused_frontend_ids:
            warnings[
                f"{frontend_id} has lost its connection to {decode}, and its requests go to other workers;"
                " check the network between both hosts"
            ] = None
    return list(warnings)
