"""Checks the lock for known vulnerabilities (pip-audit) and writes a bill of materials (CycloneDX). `make audit`.

With names of images (`make audit ARGS="kvmesh/frontend:latest"`): writes a bill of materials of each image instead, with Python and Debian
packages.

The tools live in their own environment, so that the lock need not contain them. The advisories come from PyPI. A package that could not be
audited, for example because a mirror has no advisories, is a failure.
"""

import json
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("KVMESH_CACHE") or ROOT / ".cache")
TOOLS = ("pip-audit==2.10.1", "cyclonedx-bom==7.5.0")
LOCKS = (
    "constraints.txt",
    "constraints-top.txt",
    "constraints-cpu.txt",
    "constraints-gpu.txt",
    "constraints-sglang.txt",
    "constraints-sglang-gpu.txt",
)
"""The packages that run in production. Those of tests and checks are not shipped."""
PYTHON_PACKAGES = (
    "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()), sep='\\n')"
)
DEBIAN_PACKAGES = "dpkg-query -W -f '${Package} ${Version} ${Architecture}\\n'"


def main() -> int:
    """Returns 0 if no package of the lock has a known vulnerability, or if the bills of all images are written."""
    tools = CACHE / "audit"
    if not (tools / "bin" / "pip-audit").exists():
        venv.create(tools, with_pip=True)
        run([str(tools / "bin" / "python"), "-m", "pip", "install", "--quiet", *TOOLS], check=True)
    bills = ROOT / "run"
    bills.mkdir(exist_ok=True)
    if images := sys.argv[1:]:
        for image in images:
            write_image_bill(tools, image, bills / f"sbom-{image.replace('/', '-').replace(':', '-')}.json")
        return 0
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


def write_image_bill(tools: Path, image: str, bill: Path) -> None:
    """Writes the bill of an image: cyclonedx-py's bill of its Python packages, with Debian's packages added."""
    lines = sorted(set(in_image(image, ["/opt/kvmesh/bin/python", "-c", PYTHON_PACKAGES]).split()))
    command = [str(tools / "bin" / "cyclonedx-py"), "requirements", "-", "-o", str(bill)]
    subprocess.run(command, input="\n".join(lines), text=True, check=True)
    document = json.loads(bill.read_text())
    debian = [line.split() for line in in_image(image, ["sh", "-c", DEBIAN_PACKAGES]).splitlines()]
    document["components"] += [
        {
            "type": "library",
            "bom-ref": f"deb-{name}",
            "name": name,
            "version": version,
            "purl": f"pkg:deb/debian/{name}@{quote(version)}?arch={architecture}",
        }
        for name, version, architecture in debian
    ]
    bill.write_text(json.dumps(document, indent=2) + "\n")
    print(f"bill of materials of {image}: {bill.relative_to(ROOT)}", flush=True)


def in_image(image: str, command: Sequence[str]) -> str:
    """Runs a command in a new container of an image, without a network. Returns its output."""
    start = ["docker", "run", "--rm", "--network", "none", "--entrypoint", command[0], image, *command[1:]]
    return subprocess.run(start, check=True, stdout=subprocess.PIPE, text=True).stdout


def run(command: Sequence[str], *, check: bool = False) -> int:
    return subprocess.run(command, check=check).returncode


if __name__ == "__main__":
    sys.exit(main())
