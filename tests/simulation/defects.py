"""Plants defects, to check that the simulation finds them.

    python -m tests.simulation.defects             each within 200 seeds
    python -m tests.simulation.defects --only NAME

Each defect replaces one named function. Planting fails if the function was renamed.
"""

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

from kvmesh.core import LegTask, ReportKind
from kvmesh.errors import MeshError
from kvmesh.worker.slots import LegRecord, key_of
from services.simulation.campaign import Campaign
from services.simulation.play import Outcome, play
from services.simulation.schedule import Topology

SEEDS_MAX = 200
Function = Callable[..., Any]
CAMPAIGN = Campaign(requests=20, faults=8, topology=Topology(prefill=2, decode=2, routers=1, frontends=2))
"""A small mesh with many faults. A run costs a third of a run with a drawn mesh, and finds as many of these defects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """`where`: module, colon, dotted name of the function. `make` returns the defective function from the original one.

    `seeds`: seeds that found the defect before. `needs`: kinds of faults without which a seed cannot find it, each with its alternatives. Seeds
    that lack them are skipped.
    """

    where: str
    harm: str
    make: Callable[[Function], Function]
    seeds: tuple[int, ...] = ()
    needs: tuple[frozenset[str], ...] = ()

    def may_find(self, seed: int) -> bool:
        """Returns False if the seed's schedule lacks a fault that the defect needs."""
        kinds = {fault.kind for fault in CAMPAIGN.schedule(seed).faults}
        return all(kinds & alternatives for alternatives in self.needs)


REFUSE = frozenset({"refuse"})
EMPTY = frozenset({"registry-empty"})
RESTART = frozenset({"kill", "lose-engine", "restart", "rolling-restart"})
DRAIN = frozenset({"drain", "restart", "rolling-restart"})


def _reservation_leaked(report: Function) -> Function:
    def leaky(self: Any, frontend_id: str, ask_id: int, note: Any, **options: Any) -> Any:
        return None if note.kind is ReportKind.CANCELLED else report(self, frontend_id, ask_id, note, **options)

    return leaky


def _token_lost(merge: Function) -> Function:
    def lossy(shares: Any) -> Any:
        slots, token_ids, counts = merge(shares)
        if counts[-1] > 1:
            return slots, token_ids[:-1], [*counts[:-1], counts[-1] - 1]
        return slots, token_ids, counts

    return lossy


def _released_twice(end: Function) -> Function:
    def twice(self: Any, handle_id: str) -> bool:
        lease = self._leases.get(handle_id)
        is_known = end(self, handle_id)
        if lease is not None:
            self.pool.end_lease(lease.blocks)
        return bool(is_known)

    return twice


def _handle_kept(begin: Function) -> Function:
    return lambda self, cancel, *, release=None: begin(self, cancel)


def _usage_twice(usage: Function) -> Function:
    def twice(self: Any) -> Any:
        total = usage(self)
        return replace(total, output_tokens=total.output_tokens + self._continuations)

    return twice


def _cancel_kept(submit: Function) -> Function:
    def ignores_cancel(self: Any, leg: Any, sink: Any, *, timeout_s: float) -> Any:
        cancel = submit(self, leg, sink, timeout_s=timeout_s)
        return (lambda: None) if leg.task is LegTask.PREFILL else cancel

    return ignores_cancel


def _view_stale(on_response: Function) -> Function:
    lost: set[int] = set()

    def stale(self: Any, index: int, instances: Any) -> Any:
        if index < self.index:
            lost.add(id(self))
        return None if id(self) in lost else on_response(self, index, instances)

    return stale


def _never_closes(close: Function) -> Function:
    return lambda self, now: None


def _seed_changed(generation_of: Function) -> Function:
    def changed(self: Any, choice: int, emitted_token_ids: Sequence[int] = ()) -> Any:
        generation = generation_of(self, choice, emitted_token_ids)
        if not emitted_token_ids or generation.sampling.seed is None:
            return generation
        return replace(generation, sampling=replace(generation.sampling, seed=generation.sampling.seed + 1))

    return changed


def _slot_leaked(submit: Function) -> Function:
    def leaky(self: Any, link: int, slot: int, leg: Any, timeout_s: float | None) -> None:
        try:
            submit(self, link, slot, leg, timeout_s)
        except MeshError:
            key = key_of(link, slot)
            if self._legs.get(key) is None and not self._legs.has_leg_id(leg.leg_id):
                self._legs.add(key, LegRecord(leg_id=leg.leg_id, deadline_s=1e9))
            raise

    return leaky


def _gap_ignored(recover: Function) -> Function:
    def trusting(self: Any, reason: str) -> bool:
        if reason != "epoch_changed":
            return bool(recover(self, reason))
        return True

    return trusting


def _drain_ignored(check: Function) -> Function:
    def open_always(self: Any) -> None:
        draining, self._draining = self._draining, ""
        try:
            check(self)
        finally:
            self._draining = draining

    return open_always


def _count_kept(settle: Function) -> Function:
    return lambda self, placement: None


def _joins_at_once(has_decode_worker: Function) -> Function:
    return lambda core: True


def _check_keeps_handle(release: Function) -> Function:
    async def kept(self: Any, source: Any, leg_id: str) -> None:
        return None

    return kept


def _adoption_lost(adopt: Function) -> Function:
    return lambda self, ask_id, placed, stream: None


DEFECTS: dict[str, Defect] = {
    "reservation-leaked": Defect(
        where="services.router.core:RouterCore.report",
        harm="A router ignores that a client disconnected; the reservation counts until it expires.",
        make=_reservation_leaked,
        seeds=(5,),
    ),
    "token-lost-on-slow-link": Defect(
        where="kvmesh.worker.frames:_merge",
        harm="Steps that share a frame, as on a slow link, lose a token.",
        make=_token_lost,
        seeds=(8,),
    ),
    "lease-released-twice": Defect(
        where="kvmesh.engines.simulated.leases:Leases.end",
        harm="The blocks of a handle are freed twice, and two requests get the same ones.",
        make=_released_twice,
        seeds=(0,),
    ),
    "handle-not-returned": Defect(
        where="services.frontend.pipeline.choice_sink:ChoiceSink.begin",
        harm="The handle of a leg that the decode worker rejects stays until its lease ends.",
        make=_handle_kept,
        seeds=(119,),
        needs=(REFUSE,),
    ),
    "usage-counted-twice": Defect(
        where="services.frontend.pipeline.request_run:RequestRun.usage",
        harm="A continued answer is billed for one token too many.",
        make=_usage_twice,
        seeds=(2,),
    ),
    "cancel-not-forwarded-to-prefill": Defect(
        where="kvmesh.rpc.leg_link:GrpcLegLink.submit_nowait",
        harm="A prefill worker continues for a client that has disconnected; its handle is never used.",
        make=_cancel_kept,
    ),
    "view-stale-after-registry-restart": Defect(
        where="kvmesh.discovery.watching:WatchState.on_response",
        harm="After the registry lost its state, watchers see no further changes.",
        make=_view_stale,
        needs=(EMPTY, RESTART),
    ),
    "breaker-never-closes": Defect(
        where="services.router.health.breaker:Breaker.close",
        harm="A worker that failed once gets only single probes forever.",
        make=_never_closes,
        seeds=(6,),
    ),
    "seed-changed-by-continuation": Defect(
        where="services.frontend.pipeline.prepare:Prepared.generation_of",
        harm="A sampled answer continues with other random numbers.",
        make=_seed_changed,
        seeds=(2,),
    ),
    "slot-leaked-on-refusal": Defect(
        where="kvmesh.worker.worker:Worker.submit_nowait",
        harm="A leg that the engine refuses occupies its slot forever.",
        make=_slot_leaked,
        needs=(REFUSE,),
        seeds=(76,),
    ),
    "restarted-worker-index-trusted": Defect(
        where="services.router.index.kv_feed:KvFeed._recover",
        harm="A router mixes the cache of a worker's new process with that of the old one.",
        make=_gap_ignored,
        needs=(RESTART,),
    ),
    "draining-worker-accepts": Defect(
        where="kvmesh.worker.worker:Worker._check_open",
        harm="A draining worker accepts new requests, and loses them when it ends.",
        make=_drain_ignored,
        needs=(DRAIN,),
    ),
    "count-kept-without-router": Defect(
        where="services.frontend.pipeline.local_placement:LocalPlacer.settle",
        harm="A frontend without a router counts requests that are over, until all workers look full.",
        make=_count_kept,
        seeds=(0,),
    ),
    "adoption-lost": Defect(
        where="kvmesh.rpc.router.link:GrpcRouterLink._have_adopted",
        harm="No router receives the reports of a dead router's requests.",
        make=_adoption_lost,
        needs=(frozenset({"kill", "restart-router", "reset", "partition"}),),
    ),
    "router-joins-without-workers": Defect(
        where="services.router.replicas.joining:has_decode_worker",
        harm="A router that starts after the registry has lost its state refuses requests for some seconds.",
        make=_joins_at_once,
        seeds=(15,),
        needs=(EMPTY, frozenset({"kill", "restart-router"})),
    ),
    "check-keeps-handle": Defect(
        where="kvmesh.worker.kv_checks:KvChecks._release",
        harm="The handle of a check of a KV path that timed out stays until its lease ends.",
        make=_check_keeps_handle,
        needs=(frozenset({"suspend", "pause", "fail-pulls", "hang-pulls", "slow-kv", "slow-link", "partition"}),),
    ),
}


@contextmanager
def planted(defect: Defect) -> Iterator[None]:
    """Replaces the function in this process while the context is open."""
    module, _, dotted = defect.where.partition(":")
    *owners, name = dotted.split(".")
    owner: Any = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    original = owner.__dict__[name]
    setattr(owner, name, defect.make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def play_with(defect: Defect | None, seed: int) -> Outcome:
    """Plays a seed, with the defect unless it is None."""
    schedule = CAMPAIGN.schedule(seed)
    if defect is None:
        return play(schedule)
    with planted(defect):
        return play(schedule)


def find(name: str, seeds: Sequence[int]) -> tuple[int, str] | None:
    """Returns the first seed that fails with the defect and passes without it, and its first problem."""
    logging.disable(logging.CRITICAL)
    for seed in filter(DEFECTS[name].may_find, seeds):
        outcome = play_with(DEFECTS[name], seed)
        if outcome.problems and not play_with(None, seed).problems:
            return seed, outcome.problems[0]
    return None


def main() -> int:
    """Returns 0 if each defect was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.defects", description=__doc__)
    parser.add_argument("--only", choices=sorted(DEFECTS))
    parser.add_argument("--seeds", type=int, default=SEEDS_MAX)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    names = [options.only] if options.only else list(DEFECTS)
    missed, seeds = 0, [range(options.seeds)] * len(names)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        results = map(find, names, seeds) if options.jobs == 1 else pool.map(find, names, seeds)
        for name, found in zip(names, results, strict=True):
            missed += found is None
            print(
                f"{name:<36} " + ("NOT FOUND" if found is None else f"seed {found[0]:>3}: {found[1][:150]}"), flush=True
            )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
