"""Replays a run: `python -m tests.simulation --seed 7 --requests 1000`. `services/simulation/command.py` describes `--seeds` and `--replay`."""

import argparse
import logging
import sys
from pathlib import Path

from services.simulation.command import main as run_campaign
from tests.simulation.faults import SCRIPTS
from tests.simulation.load import LOADS
from tests.simulation.meshes import MESHES
from tests.simulation.runs import run

CAMPAIGN = ("--seeds", "--replay", "--from-seed")


def main() -> int:
    """Returns 0 if all invariants held and no request failed."""
    if any(each.partition("=")[0] in CAMPAIGN for each in sys.argv[1:]):
        return run_campaign(prog="python -m tests.simulation")
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--faults", choices=sorted(SCRIPTS), default="none")
    parser.add_argument("--mesh", choices=sorted(MESHES), default="small")
    parser.add_argument("--load", choices=sorted(LOADS), default="calm")
    parser.add_argument("--trace", type=Path, help="file for the trace, one event per line")
    parser.add_argument("--log", default="ERROR", help="log level of the services")
    given = parser.parse_args()
    logging.basicConfig(level=given.log, format="%(levelname)s %(name)s %(message)s")
    report = run(given.seed, given.requests, faults=given.faults, mesh=given.mesh, load=given.load)
    if given.trace:
        given.trace.write_text("\n".join(report.lines) + "\n")
    print(f"hash      {report.hash}")
    print(f"requests  {dict(sorted(report.outcomes.items()))}")
    print(f"cancelled {dict(sorted(report.cancelled_in.items()))}")
    print(f"tokens    {report.tokens} in {report.crossings} messages")
    print(f"time      {report.virtual_s:.1f} s virtual, {report.wall_s:.1f} s real, {report.cpu_s:.1f} s CPU")
    for problem in report.problems:
        print(f"PROBLEM   {problem}")
    for reason, count in sorted(report.failed.items()):
        print(f"FAILED    {count} requests: {reason}")
    return 1 if report.problems or report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
