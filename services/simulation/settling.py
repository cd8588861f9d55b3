"""After the last request: nothing may be left, every worker must be used again, and new requests must be answered."""

from kvmesh.core import Role, SamplingParams
from services.frontend.pipeline.request import Request
from services.router.health.breaker import BreakerState
from services.simulation.frontend import MODEL
from services.simulation.inject import Injector
from services.simulation.mesh import SimulatedMesh
from services.simulation.shapes import LEASE_S

SETTLED_S_MAX = 40.0
"""In this time everything is clean and usable. Shorter than a lease, so that the end of a lease cannot be what cleaned up."""
ROUND_S = 0.5
PROBED_S_MAX = 20.0
SLACK_S = 1.0
"""A handle made this long before a connection breaks may still be in transit when it breaks."""
PROBE, LAST = "probe", "last"


async def settle(mesh: SimulatedMesh, injector: Injector) -> list[str]:
    """Returns what is wrong."""
    ends_s, number = mesh.now_s + SETTLED_S_MAX, 0
    while problems := mesh.left(_excused(mesh, injector)) + _unused(mesh):
        if mesh.now_s > ends_s:
            return mesh.wrong_answers() + problems
        number += 1
        await _probe(mesh, number)
        await mesh.world.clock.sleep(ROUND_S)
    mesh.world.trace.note("settled")
    await _run(mesh, [_request(f"{LAST}{i}", 7 * i) for i in range(mesh.shape.frontends)])
    # Only the excused handles are left. Their leases must end by themselves.
    if any(len(worker.engine.scheduler.leases) for worker in mesh.workers.values()):
        await mesh.world.clock.sleep(LEASE_S + 2 * mesh.shape.worker.lease_check_s)
    ends_s = mesh.now_s + SETTLED_S_MAX
    while (problems := mesh.left()) and mesh.now_s < ends_s:
        await mesh.world.clock.sleep(ROUND_S)
    return mesh.wrong_answers() + problems


def _excused(mesh: SimulatedMesh, injector: Injector) -> set[str]:
    """Returns the handles that could not be released, because their frontend died, or because a connection broke while it carried the
    handle or its release.
    """
    excused: set[str] = set()
    for worker in mesh.workers.values():
        for handle_id in worker.engine.scheduler.leases.handle_ids():
            leg_id, made_s = worker.engine.handed_out[handle_id]
            names = {worker.worker_id, *mesh.involved(leg_id)}
            if any(each.name in names and each.ended_s >= made_s - SLACK_S for each in injector.breaks):
                excused.add(handle_id)
    return excused


def _unused(mesh: SimulatedMesh) -> list[str]:
    """Workers that a router which has a frontend does not use."""
    # A frontend that started during an outage of the registry does not serve yet.
    problems = [f"{name} serves no model" for name, frontend in mesh.frontends.items() if not frontend.takes_requests]
    streams = {router_id for frontend in mesh.frontends.values() for router_id in frontend.router_link.router_ids}
    problems += [
        f"{name} has no router" for name, frontend in mesh.frontends.items() if not frontend.router_link.router_ids
    ]
    for name, router in mesh.routers.items():
        known = router.core.fleet.workers
        problems += [
            f"{name} does not use {worker_id}: {known[worker_id].excluded_by or 'its breaker is not closed'}"
            for worker_id in mesh.workers
            if worker_id in known and name in streams and not _is_used(mesh, name, worker_id=worker_id)
        ]
    return problems


def _is_used(mesh: SimulatedMesh, router_id: str, worker_id: str) -> bool:
    core = mesh.routers[router_id].core
    core.health.advance(mesh.now_s)
    worker = core.fleet.workers[worker_id]
    return not worker.excluded_by and core.health.health_of(worker).breaker.state is BreakerState.CLOSED


async def _probe(mesh: SimulatedMesh, number: int) -> None:
    """Open breakers close only after successful requests. So each frontend sends some to each worker that a router does not use."""
    out = sorted(
        {
            worker_id
            for name in mesh.routers
            for worker_id in mesh.workers
            if worker_id in mesh.routers[name].core.fleet.workers and not _is_used(mesh, name, worker_id=worker_id)
        }
    )
    requests = []
    for worker_id in out:
        for i in range(mesh.shape.frontends * mesh.shape.routers):
            is_prefill = mesh.workers[worker_id].worker.description.role is Role.PREFILL
            requests.append(
                _request(
                    f"{PROBE}{number}x{worker_id.replace('-', '')}x{i}",
                    number + i,
                    prefill=worker_id if is_prefill else "",
                    decode="" if is_prefill else worker_id,
                )
            )
    await _run(mesh, requests)


def _request(request_id: str, number: int, *, prefill: str = "", decode: str = "") -> Request:
    return Request(
        request_id=request_id,
        model=MODEL,
        prompt=[(number * 37 + i * 11) % 250 for i in range(40)],
        sampling=SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0),
        pinned_prefill_worker_id=prefill,
        pinned_decode_worker_id=decode,
        timeout_s=PROBED_S_MAX,
    )


async def _run(mesh: SimulatedMesh, requests: list[Request]) -> None:
    frontends = [name for name, frontend in mesh.frontends.items() if frontend.takes_requests]
    if not frontends:
        return
    ledgers = [
        mesh.begin(request, frontend=frontends[number % len(frontends)]) for number, request in enumerate(requests)
    ]
    ends_s = mesh.now_s + PROBED_S_MAX + 10.0
    while not all(each.outcome for each in ledgers) and mesh.now_s < ends_s:
        await mesh.world.clock.sleep(0.05)
