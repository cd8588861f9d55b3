"""`kvmesh simulate faults`: a mesh of your shape in one process on virtual time, with faults from seeds.

    kvmesh simulate faults --prefill 2 --decode 4 --seeds 200
    kvmesh simulate faults --replay failure.json

Each seed draws requests and faults, runs the services' own code on them, and checks that each request ends once with the tokens, text and
usage of a run without faults, that nothing is left of it anywhere, and that every worker is used again afterwards. The first
failure is shrunk to the shortest schedule, shown, and written to a file. docs/operate/reliability.md explains faults, checks and outcomes.
"""

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from kvmesh.errors import MeshError
from services.simulation.campaign import Campaign, Totals, run_seeds
from services.simulation.play import Outcome, play
from services.simulation.schedule import COUNT_MAX, Schedule, Topology, check_topology, read_schedule
from services.simulation.shrink import RUNS_MAX, Shrinker
from services.simulation.timeline import explain

SEEDS_MAX = 1_000_000
PROGRESS_S = 10.0
NAMES = {"prefill": "prefill workers", "decode": "decode workers", "routers": "routers", "frontends": "frontends"}
SHAPE = tuple(NAMES)


def main(arguments: Sequence[str] | None = None, *, prog: str = "kvmesh simulate faults") -> int:
    """Returns the exit status: 0 if nothing was wrong, 1 if something was, 2 for invalid arguments."""
    options = _parser(prog).parse_args(arguments)
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        if options.replay is not None:
            return _replay(read_schedule(options.replay))
        return _run(_campaign(options), options)
    except (MeshError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    finally:
        logging.disable(disabled)


def _replay(schedule: Schedule) -> int:
    outcome = play(schedule)
    print("\n".join(explain(schedule, outcome)))
    print(f"outcomes  {dict(sorted(outcome.outcomes.items()))}")
    print(f"hash      {outcome.hash}")
    return 1 if outcome.problems else 0


def _run(campaign: Campaign, options: argparse.Namespace) -> int:
    seeds = range(options.from_seed, options.from_seed + options.seeds)
    for line in _notes(campaign):
        print(line, file=sys.stderr)
    totals, failed, is_interrupted = Totals(), list[Outcome](), False
    try:
        with closing(run_seeds(campaign, seeds, jobs=options.jobs)) as outcomes:
            _play_all(outcomes, totals, failed, options=options)
    except KeyboardInterrupt:
        is_interrupted = True
    print("\n".join(totals.lines()))
    print(f"failed    {len(failed)}")
    for outcome in failed[1:]:
        print(f"seed {outcome.seed} fails: {outcome.problems[0]}")
    if is_interrupted:
        print(f"interrupted after {totals.seeds} of {options.seeds} seeds", file=sys.stderr)
        return 130
    if failed:
        _show_failure(campaign.schedule(failed[0].seed), failed[0], options)
        return 1
    return 0


def _play_all(
    outcomes: Iterable[Outcome], totals: Totals, failed: list[Outcome], *, options: argparse.Namespace
) -> None:
    """Counts outcomes and collects those that failed, until the first one or the time is over. Says on stderr how far it is."""
    began_s = said_s = time.monotonic()
    for outcome in outcomes:
        totals.add(outcome)
        now_s = time.monotonic()
        if outcome.problems:
            failed.append(outcome)
        if (failed and not options.keep_going) or (options.time_s and now_s > began_s + options.time_s):
            return
        if now_s > said_s + PROGRESS_S:
            said_s = now_s
            print(
                f"{totals.seeds} of {options.seeds} seeds, {totals.requests} requests, {len(failed)} seeds failed",
                file=sys.stderr,
                flush=True,
            )


def _notes(campaign: Campaign) -> Iterator[str]:
    """What a reader of the result might not expect."""
    mesh = campaign.topology
    if mesh is None or not campaign.is_survivable or not campaign.faults:
        return
    alone = [role for role, count in (("prefill", mesh.prefill), ("decode", mesh.decode)) if count == 1]
    if alone:
        yield (
            f"note: one worker of each pool has no fault that takes it away, which is the only {' and the only '.join(alone)} worker here."
            " --no-survivor lifts that."
        )


def _show_failure(schedule: Schedule, outcome: Outcome, options: argparse.Namespace) -> None:
    print(f"seed {outcome.seed} fails: {outcome.problems[0]}")
    if options.shrink:
        shrinker = Shrinker(lambda shorter: bool(play(shorter).problems), runs_max=options.shrink)
        schedule = shrinker.shrink(schedule)
        print(f"shrunk in {shrinker.runs} runs to {len(schedule.faults)} faults and {len(schedule.requests)} requests")
    schedule.write(options.file)
    print("\n".join(explain(schedule, play(schedule))))
    print(f"written to {options.file}; play it again with --replay {options.file}")


def _campaign(options: argparse.Namespace) -> Campaign:
    topology = None
    is_given = any(getattr(options, name) is not None for name in SHAPE) or options.rendezvous or options.tight
    if is_given:
        given = {name: getattr(options, name) for name in SHAPE if getattr(options, name) is not None}
        topology = Topology(**given, rendezvous=options.rendezvous, is_tight=options.tight)
        check_topology(topology)
    return Campaign(
        requests=options.requests, faults=options.faults, topology=topology, is_survivable=not options.no_survivor
    )


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    mesh = Topology()
    for name in SHAPE:
        parser.add_argument(
            f"--{name}",
            type=_count(low=0, high=COUNT_MAX),
            metavar="N",
            help=f"number of {NAMES[name]} ({getattr(mesh, name)} if another flag of the mesh is given; else drawn from the seed)",
        )
    parser.add_argument("--rendezvous", action="store_true", help="prefill and decode start at once, as with SGLang")
    parser.add_argument("--tight", action="store_true", help="few KV blocks and small batches")
    parser.add_argument(
        "--seeds", type=_count(low=1, high=SEEDS_MAX), default=100, metavar="N", help="how many seeds (100)"
    )
    parser.add_argument(
        "--from-seed", type=_count(low=0, high=1 << 40), default=0, metavar="N", help="the first one (0)"
    )
    parser.add_argument(
        "--requests", type=_count(low=1, high=10_000), default=50, metavar="N", help="requests of each seed (50)"
    )
    parser.add_argument(
        "--faults", type=_count(low=0, high=1000), default=6, metavar="N", help="mean number of faults of each seed (6)"
    )
    parser.add_argument(
        "--no-survivor",
        action="store_true",
        help="faults may take all workers away at once; requests may then end with an error",
    )
    parser.add_argument(
        "--keep-going", action="store_true", help="play all seeds, also after one has failed; name each that fails"
    )
    parser.add_argument(
        "--jobs",
        type=_count(low=1, high=256),
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes (one for each core)",
    )
    parser.add_argument(
        "--time-s",
        type=_count(low=0, high=86_400),
        default=0,
        metavar="S",
        help="begin no seed after so many seconds; 0: no limit",
    )
    parser.add_argument(
        "--shrink",
        type=_count(low=0, high=10_000),
        default=RUNS_MAX,
        metavar="N",
        help=f"most runs to shrink a failure ({RUNS_MAX}); 0: none",
    )
    parser.add_argument("--file", type=Path, default=Path("simulation-failure.json"), help="where to write a failure")
    parser.add_argument("--replay", type=Path, help="play a written schedule, and print what happens")
    return parser


def _count(low: int, high: int) -> Callable[[str], int]:
    """Reads an integer within bounds."""

    def read(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be {low} to {high}")
        return value

    return read
