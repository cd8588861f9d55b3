"""For random fleets and events, workers that cannot exchange KV are never paired, and excluded workers get no requests."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.core import Handoff, LoadRecord, Report, ReportKind
from kvmesh.errors import LostError, MeshError
from services.router.explain import scored_candidates
from services.router.workers.worker import RegisteredWorker
from tests.unit.router_fleets import ask, core, join, store_blocks

WORKERS = st.lists(
    st.tuples(
        st.sampled_from(["prefill", "decode"]),
        st.sampled_from(["", "a", "b", "c"]),
        st.sampled_from([(), (Handoff.SEQUENTIAL,), (Handoff.RENDEZVOUS,), (Handoff.SEQUENTIAL, Handoff.RENDEZVOUS)]),
        st.sampled_from(["demo", "other"]),
        st.integers(1, 3),
    ),
    min_size=1,
    max_size=9,
)
STATES = ("marked", "critical", "drains", "unreachable", "silent", "well")
MOVES = st.lists(
    st.tuples(st.sampled_from(["ask", "state", "fail", "pin"]), st.integers(0, 8), st.sampled_from(STATES)), max_size=40
)


def put(router, worker: RegisteredWorker, state: str) -> None:
    """Applies one event from the registry, the worker or its stream."""
    if state in ("marked", "critical", "well"):
        router.fleet.register(
            worker.worker_id,
            address=worker.address,
            role=worker.role,
            labels={},
            is_critical=state == "critical",
            is_draining=state == "marked",
        )
    if state in ("drains", "well"):
        router.fleet.on_load_record(
            worker, LoadRecord(worker_id=worker.worker_id, epoch=1, is_draining=state == "drains")
        )
    if state in ("unreachable", "silent"):
        router.fleet.disconnected(worker, state)
    if state == "well":
        router.fleet.connected(worker)


def can_exchange(prefill: RegisteredWorker, decode: RegisteredWorker) -> bool:
    """Checks the descriptions: equal, non-empty hashes and the same kind of handoff."""
    one, two = prefill.description, decode.description
    return bool(
        one.kv_compatibility_hash
        and one.kv_compatibility_hash == two.kv_compatibility_hash
        and one.capabilities.handoffs[:1] == two.capabilities.handoffs[:1] != ()
    )


@settings(deadline=None)
@given(WORKERS, MOVES, st.sampled_from(["kv", "round_robin", "least_loaded", "random"]))
def test_placements_use_only_compatible_workers_that_take_requests(specs, moves, policy):
    """After any events, both workers serve the model, take requests and can exchange KV. All scored candidates can exchange KV too."""
    router = core(policy=policy)
    workers = [
        join(router, f"w{i}", role, hash=hash_, handoffs=handoffs, model=model, ranks=ranks)
        for i, (role, hash_, handoffs, model, ranks) in enumerate(specs)
    ]
    for i, worker in enumerate(workers[::2]):
        store_blocks(worker, [1, 2, 3][: i + 1])
    for number, (what, position, state) in enumerate(moves, start=1):
        worker = workers[position % len(workers)]
        if what == "state":
            put(router, worker, state)
            continue
        options = {}
        if what == "pin":
            options[f"pinned_{worker.role.value}_worker_id"] = worker.worker_id
        try:
            placement = router.ask("f", number, ask(f"r{number}", [1, 2, 3, number + 9], **options), now=0.0, wall=0.0)
        except MeshError:
            continue
        used = [ref for ref in (placement.prefill, placement.decode) if ref is not None]
        chosen = [router.fleet.workers[ref.worker_id] for ref in used]
        assert all(w.excluded_by == "" for w in chosen)
        assert all(w.description.model.name == "demo" for w in chosen)
        if placement.prefill is not None:
            assert can_exchange(*chosen)
        for candidate in scored_candidates(router.history.get(f"r{number}").decision):
            if candidate.prefill is not None and candidate.decode is not None:
                known = router.fleet.workers
                assert can_exchange(known[candidate.prefill.worker_id], known[candidate.decode.worker_id])
        if what == "fail":
            note = Report(
                kind=ReportKind.FAILED, elapsed_s=0.1, error=LostError("gone"), failed_worker_id=used[-1].worker_id
            )
            router.report("f", number, note, now=0.0)


@given(st.sampled_from(["marked", "critical", "drains", "unreachable", "silent"]), st.booleans())
def test_one_event_excludes_a_worker_and_one_readmits_it(state, is_prefill):
    """The exclusion and the readmission of a worker take effect from the next ask on."""
    router = core()
    for name, role in (("p1", "prefill"), ("p2", "prefill"), ("d1", "decode"), ("d2", "decode")):
        join(router, name, role)
    worker = router.fleet.workers["p1" if is_prefill else "d1"]

    def used(first: int) -> set[str]:
        placed = [router.ask("f", n, ask(f"r{n}", [n * 10]), now=0.0, wall=0.0) for n in range(first, first + 24)]
        return {p.prefill.worker_id for p in placed} | {p.decode.worker_id for p in placed}

    assert worker.worker_id in used(1)
    put(router, worker, state)
    assert worker.worker_id not in used(101)
    put(router, worker, "well")
    assert worker.worker_id in used(201)
