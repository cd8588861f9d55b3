"""Applies one fault after the other to a mesh on eight hosts and prints the effect on requests: `python -m tests.machines`. Needs root.

Exits with status 1 if the mesh missed a goal, and 2 if this machine cannot have separate hosts.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.machines.faults import FAULT_S, FAULTS, Effect, measure
from tests.machines.layouts import MESHES
from tests.machines.table import head, line, missed_goals, row


async def run(engine: str, faults: Sequence[str], logs: Path, *, fault_s: float) -> list[Effect]:
    """Measures each fault. Each takes a few seconds longer than the fault itself, and more if a worker restarts."""
    effects: list[Effect] = []
    async with MESHES[engine](logs) as (mesh, questions):
        print("\n".join(head()), flush=True)
        for name in faults:
            effects.append(await measure(mesh, name, questions, fault_s=fault_s))
            print(line(row(effects[-1])), flush=True)
    return effects


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.machines", description=__doc__)
    parser.add_argument("--engine", choices=MESHES, default="simulated")
    parser.add_argument("--fault", action="append", choices=FAULTS, help="only this fault; may be repeated")
    parser.add_argument("--seconds", type=float, default=FAULT_S, help=f"duration of each fault (default: {FAULT_S:g})")
    parser.add_argument("--logs", type=Path, help="folder in which to keep the services' logs")
    given = parser.parse_args()
    with TemporaryDirectory(prefix="kvmesh-machines-") as directory:
        logs = given.logs or Path(directory)
        logs.mkdir(parents=True, exist_ok=True)
        try:
            effects = asyncio.run(run(given.engine, given.fault or list(FAULTS), logs, fault_s=given.seconds))
        except (pytest.skip.Exception, pytest.fail.Exception) as problem:
            print(f"{parser.prog}: {problem}", file=sys.stderr)
            return 2
    return 1 if any(missed_goals(effect) for effect in effects) else 0


if __name__ == "__main__":
    sys.exit(main())
