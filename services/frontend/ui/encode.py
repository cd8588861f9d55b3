"""A mesh and an explanation as JSON for the page. Pure.

It has ids, lengths, names and times. It has no text of prompts and answers, which neither routers nor planners get.
Names come from other machines, so each text is cut to `TEXT_CHARACTERS_MAX`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvmesh.core import EarlierPlacement, Explanation, Report, RequestView
from kvmesh.core.planning import Decision, LatencyReport, PlanReport, Shape, Targets
from kvmesh.discovery.base import DECODE, PREFILL, Instance
from kvmesh.rpc.mesh.rows import PoolRow, WorkerRow, pool_rows
from kvmesh.rpc.mesh.view import MeshView
from kvmesh.rpc.router.explanations import is_chosen, shown_candidates, worker_name

TEXT_CHARACTERS_MAX = 160
WORKERS_MAX = 1024
"""Most workers that are listed. The whole list is sent to each viewer once per interval, and a longer one would not be read."""
CANDIDATES_MAX = 64
"""Candidates of one explanation."""
SERVICES_MAX = 256
"""Frontends, routers and planners that are listed."""
PROBLEMS_MAX = 16
DECISIONS_MAX = 20
Json = Mapping[str, Any]


def mesh_json(view: MeshView, rows: Sequence[WorkerRow]) -> dict[str, Any]:
    """Returns the mesh. `rows`: its workers, with rates."""
    return {
        "services": list(_services(view))[:SERVICES_MAX],
        "pools": list(map(_pool, pool_rows(rows, view.plan))),
        "workers": list(map(_worker, rows[:WORKERS_MAX])),
        "workers_left_out": max(0, len(rows) - WORKERS_MAX),
        "requests": list(map(_request, view.requests.requests)),
        "requests_in_flight": view.requests.requests_in_flight,
        "requests_queued": view.requests.requests_queued,
        "plan": None if view.plan is None else _plan(view.plan),
        "problems": [_text(each) for each in view.problems[:PROBLEMS_MAX]],
    }


def explanation_json(explanation: Explanation, router_id: str) -> dict[str, Any]:
    """Returns one decision of a router, and what was observed afterwards."""
    shown = shown_candidates(explanation, CANDIDATES_MAX)
    placement, found = explanation.placement, [report.cached_tokens for report in explanation.reports]
    known = [tokens for tokens in found if tokens is not None]
    return {
        "request_id": _text(explanation.request_id),
        "router": _text(router_id),
        "policy": _text(explanation.policy),
        "decided_at": explanation.decided_at_s,
        "unit": _text(explanation.cost_unit),
        "attempt": explanation.attempt,
        "prompt_tokens": explanation.prompt_tokens,
        "prefill": _name(placement.prefill) if placement is not None else "",
        "decode": _name(placement.decode) if placement is not None else "",
        "reasons": list(map(_text, placement.reasons)) if placement is not None else [],
        "refused": None if explanation.error is None else _text(explanation.error.reason),
        "margin": explanation.margin,
        "cached_expected": placement.cached_tokens if placement is not None else None,
        "cached_found": known[-1] if known else None,
        "ttft_expected_s": placement.expected_ttft_s if placement is not None else None,
        "ttft_observed_s": explanation.observed_ttft_s,
        "queued_s": explanation.queued_s,
        "candidates": [
            {
                "prefill": _name(each.prefill),
                "decode": _name(each.decode),
                "cost": each.cost,
                "terms": [[_text(name), value] for name, value in each.terms],
                "chosen": is_chosen(each, explanation),
                "removed_by": _text(each.removed_by),
            }
            for each in shown
        ],
        "candidates_left_out": len(explanation.candidates) - len(shown),
        "reports": _reports(explanation.reports),
        "earlier": list(map(_earlier, explanation.earlier)),
    }


def _services(view: MeshView) -> Iterable[Json]:
    for service, instances in view.instances.items():
        if service not in (PREFILL, DECODE):
            yield from (_service(each) for each in instances)


def _service(instance: Instance) -> Json:
    return {
        "service": instance.service.removeprefix("kvmesh-"),
        "id": _text(instance.instance_id),
        "address": _text(instance.address),
        "state": "draining" if instance.is_draining else instance.health.value,
        "version": _text(instance.meta.get("kvmesh_version", "")),
    }


def _pool(pool: PoolRow) -> Json:
    return {
        "model": _text(pool.model),
        "role": pool.role,
        "workers": pool.workers,
        "ready": pool.workers_ready,
        "planned": pool.workers_planned,
        "running": pool.running_requests,
        "waiting": pool.waiting_requests,
        "kv": pool.kv_blocks_used / pool.kv_blocks_total if pool.kv_blocks_total else None,
        "output_per_s": pool.output_tokens_per_s,
        "prompt_per_s": pool.prompt_tokens_per_s,
    }


def _worker(row: WorkerRow) -> Json:
    load = row.load
    return {
        "id": _text(row.name),
        "role": row.role,
        "model": _text(row.model),
        "engine": _text(row.engine),
        "address": _text(row.address),
        "state": _text(row.state),
        "note": _text(row.note),
        "trust": _text(row.trust),
        "breaker": row.breaker,
        "running": None if load is None else load.running_requests,
        "running_max": None if load is None else load.running_requests_max,
        "waiting": None if load is None else load.waiting_requests,
        "kv": row.kv_usage,
        "kv_used": None if load is None else load.kv_blocks_used,
        "kv_total": None if load is None else load.kv_blocks_total,
        "in_flight": row.requests_in_flight,
        "output_per_s": row.output_tokens_per_s,
        "prompt_per_s": row.prompt_tokens_per_s,
        "hit_rate": row.hit_rate,
    }


def _request(view: RequestView) -> Json:
    return {
        "id": _text(view.request_id),
        "model": _text(view.model),
        "tenant": _text(view.tenant),
        "state": view.state.value,
        "reason": _text(view.reason),
        "at": view.decided_at_s,
        "attempt": view.attempt,
        "prompt_tokens": view.prompt_tokens,
        "cached_tokens": view.cached_tokens,
        "output_tokens": view.output_tokens,
        "prefill": _name(view.prefill),
        "decode": _name(view.decode),
        "ttft_expected_s": view.expected_ttft_s,
        "ttft_observed_s": view.observed_ttft_s,
    }


def _plan(plan: PlanReport) -> Json:
    return {
        "mode": plan.mode,
        "source": _text(plan.source),
        "observed_at": plan.observed_at_s,
        "leader": _text(plan.leader_id),
        "latencies": list(map(_latency, plan.latencies)),
        "targets": list(map(_targets, plan.targets)),
        "decisions": [_decision(each) for each in _newest(plan.decisions)],
        "problems": [_text(each) for each in plan.problems[:PROBLEMS_MAX]],
    }


def _newest(decisions: Sequence[Decision]) -> Sequence[Decision]:
    return sorted(decisions, key=lambda each: -each.number)[:DECISIONS_MAX]


def _latency(report: LatencyReport) -> Json:
    return {
        "model": _text(report.model),
        "requests_per_s": report.requests_per_s,
        "ttft_mean_s": report.ttft_mean_s,
        "ttft_p99_s": report.ttft_p99_s,
        "itl_mean_s": report.itl_mean_s,
        "itl_p99_s": report.itl_p99_s,
        "hit_rate": report.hit_rate,
        "state": report.state.value,
    }


def _targets(targets: Targets) -> Json:
    return {
        "model": _text(targets.model),
        "ttft_s": targets.ttft_s,
        "itl_s": targets.itl_s,
        "percentile": targets.percentile,
    }


def _decision(decision: Decision) -> Json:
    return {
        "number": decision.number,
        "model": _text(decision.model),
        "at": decision.decided_at_s,
        "action": decision.action.value,
        "reason": _text(decision.reason),
        "detail": _text(decision.detail),
        "outcome": decision.outcome.value,
        "ready": _shape(decision.inputs.ready),
        "wanted": _shape(decision.shape),
        "observed_per_s": decision.inputs.observed.requests_per_s,
        "predicted_per_s": decision.inputs.predicted.requests_per_s,
    }


def _shape(shape: Shape) -> Json:
    return {
        "prefill": shape.prefill_workers,
        "decode": shape.decode_workers,
        "deflect_tokens": shape.deflect_tokens,
    }


def _reports(reports: Sequence[Report]) -> Sequence[Json]:
    """Only the reason of an error: its message comes from an engine."""
    return [
        {
            "kind": each.kind.value,
            "elapsed_s": each.elapsed_s,
            "reason": _text(each.error.reason) if each.error is not None else "",
            "worker": _text(each.failed_worker_id),
        }
        for each in reports
    ]


def _earlier(earlier: EarlierPlacement) -> Json:
    placement = earlier.placement
    return {
        "attempt": earlier.attempt,
        "prefill": _name(placement.prefill) if placement is not None else "",
        "decode": _name(placement.decode) if placement is not None else "",
        "refused": None if earlier.error is None else _text(earlier.error.reason),
        "reports": _reports(earlier.reports),
    }


def _name(worker: Any) -> str:
    return _text(worker_name(worker))


def _text(text: str) -> str:
    return text if len(text) <= TEXT_CHARACTERS_MAX else f"{text[: TEXT_CHARACTERS_MAX - 1]}…"
