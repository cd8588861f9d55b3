"""Explanations of all routers: which one knows a request, and the placements that others made of it."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from kvmesh.core import Candidate, EarlierPlacement, Explanation, WorkerRef
from kvmesh.discovery.base import Instance
from kvmesh.errors import MeshError, NotFoundError, UnavailableError
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.router.client import GrpcRouterClient

PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")
"""Each HTTP API writes one before the request's id in its answers."""


async def find_explanation(
    routers: Sequence[Instance], channels: ChannelPool, request_id: str, *, timeout_s: float
) -> tuple[Explanation, str]:
    """Returns the newest explanation, with its router. NotFoundError when all routers answered and none knows the request."""
    if not routers:
        raise UnavailableError("no router is registered", reason="no_router")
    calls = [GrpcRouterClient(channels, router.address).explain(request_id, timeout_s=timeout_s) for router in routers]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    found: list[tuple[Explanation, str]] = []
    problems: list[str] = []
    for router, answer in zip(routers, answers, strict=True):
        if isinstance(answer, Explanation):
            found.append((answer, router.instance_id))
        elif isinstance(answer, MeshError):
            if not isinstance(answer, NotFoundError):
                problems.append(f"{router.instance_id}: {answer.message}")
        else:
            raise answer
    if found:
        return join_explanations(found)
    if problems:
        raise UnavailableError(f"no router that answered knows the request; {'; '.join(problems)}", reason="no_router")
    raise NotFoundError(
        f"no router knows a request {request_id!r}; each keeps its newest decisions only",
        reason="placement_not_found",
        field="request_id",
    )


def join_explanations(found: Sequence[tuple[Explanation, str]]) -> tuple[Explanation, str]:
    """Returns the newest decision, with the earlier ones that other routers made: after the loss of a router another one places the request."""
    newest, router_id = max(found, key=lambda pair: (pair[0].attempt, pair[0].decided_at_s))
    earlier = {each.attempt: each for each in newest.earlier}
    for explanation, _ in found:
        own = EarlierPlacement(
            attempt=explanation.attempt,
            decided_at_s=explanation.decided_at_s,
            placement=explanation.placement,
            error=explanation.error,
            reports=explanation.reports,
            prompt_tokens=explanation.prompt_tokens,
        )
        for each in (*explanation.earlier, own):
            if each.attempt < newest.attempt:
                earlier.setdefault(each.attempt, each)
    return replace(newest, earlier=[each for _, each in sorted(earlier.items())]), router_id


def request_id_in(answer_id: str) -> str:
    """Returns the request's id in the id of an answer."""
    for prefix in PREFIXES:
        answer_id = answer_id.removeprefix(prefix)
    return answer_id


def is_chosen(candidate: Candidate, explanation: Explanation) -> bool:
    """Returns True for the pair that the request was placed on."""
    placement = explanation.placement
    if placement is None or candidate.removed_by:
        return False
    chosen = (placement.prefill, placement.decode)
    return list(map(worker_name, (candidate.prefill, candidate.decode))) == list(map(worker_name, chosen))


def worker_name(worker: WorkerRef | None) -> str:
    """Returns the worker's id, with its data-parallel rank if it has several. Empty: no worker."""
    if worker is None:
        return ""
    rank = worker.data_parallel_rank
    return worker.worker_id if rank is None else f"{worker.worker_id}/{rank}"


def shown_candidates(explanation: Explanation, candidates_max: int) -> Sequence[Candidate]:
    """Returns the best candidates and some of the removed ones. The chosen one is always included."""
    scored = [candidate for candidate in explanation.candidates if not candidate.removed_by]
    removed = [candidate for candidate in explanation.candidates if candidate.removed_by]
    removed = removed[: max(candidates_max - len(scored), candidates_max // 2)]
    room = max(1, candidates_max - len(removed))
    best, rest = scored[:room], scored[room:]
    chosen = [candidate for candidate in rest if is_chosen(candidate, explanation)]
    return [*(best[: room - 1] if chosen else best), *chosen, *removed]
