"""Compare the lock with known vulnerabilities (pip-audit), and write a bill of materials (CycloneDX). `make audit`.

The tools live in an environment of their own, so that the lock need not hold them. The advisories come from PyPI. A package that could
not be audited, for example because a mirror has no advisories, is a failure.
"""

import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("KVMESH_CACHE") or ROOT / ".cache")
TOOLS = ("pip-audit==2.10.1", "cyclonedx-bom==7.5.0")
LOCKS = ("constraints.txt", "constraints-cpu.txt", "constraints-sglang.txt")
"""What runs in production. Those of tests and checks are not shipped."""


def main() -> int:
    """The exit status: 0 when no package of the lock has a known vulnerability."""
    tools = CACHE / "audit"
    if not (tools / "bin" / "pip-audit").exists():
        venv.create(tools, with_pip=True)
        run([str(tools / "bin" / "python"), "-m", "pip", "install", "--quiet", *TOOLS], check=True)
    bills = ROOT / "run"
    bills.mkdir(exist_ok=True)
    statuses = []
    for lock in LOCKS:
        print(f"== {lock}", flush=True)
        # Every package is pinned, so nothing needs to be resolved or installed.
        audit = [str(tools / "bin" / "pip-audit"), "--strict", "--disable-pip", "--no-deps", "-r", str(ROOT / lock)]
        statuses.append(run(audit))
        bill = bills / f"sbom-{Path(lock).stem}.json"
        run([str(tools / "bin" / "cyclonedx-py"), "requirements", str(ROOT / lock), "-o", str(bill)], check=True)
        print(f"bill of materials: {bill.relative_to(ROOT)}", flush=True)
    return max(statuses)


def run(command: Sequence[str], *, check: bool = False) -> int:
    return subprocess.run(command, check=check).returncode


if __name__ == "__main__":
    sys.exit(main())
