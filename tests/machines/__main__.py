"""Breaks one thing after the other in a mesh on eight hosts, and prints what requests noticed: `python -m tests.machines`. Needs root.

The status is 1 if the mesh missed a goal, 2 if there can be no hosts here.
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
    """Takes a few seconds longer for each fault than the fault, and longer where a worker has to start again."""
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
    parser.add_argument("--fault", action="append", choices=FAULTS, help="only this one; may be repeated")
    parser.add_argument("--seconds", type=float, default=FAULT_S, help=f"how long each fault lasts ({FAULT_S:g})")
    parser.add_argument("--logs", type=Path, help="a folder in which the services' logs stay")
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
