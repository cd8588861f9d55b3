"""Completes /app in a build: the metadata that names the version, the command `kvmesh`, and bytecode."""

import compileall
import sys
import tomllib
from pathlib import Path

APP = Path("/app")
COMMAND = """#!/opt/kvmesh/bin/python
import sys

from kvmesh.cli.__main__ import main

sys.exit(main())
"""


def main() -> int:
    """Returns 0 if every file compiles."""
    project = tomllib.loads(Path("/build/pyproject.toml").read_text())["project"]
    metadata = APP / f"{project['name']}-{project['version']}.dist-info"
    metadata.mkdir()
    text = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (metadata / "METADATA").write_text(text)
    bin_folder = Path("/usr/local/bin")
    (bin_folder / "kvmesh").write_text(COMMAND)
    for name in ("kvmesh", "kvmesh-healthcheck"):
        (bin_folder / name).chmod(0o755)
    return 0 if compileall.compile_dir(APP, quiet=1, workers=0) else 1


if __name__ == "__main__":
    sys.exit(main())
