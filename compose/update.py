#!/usr/bin/env python3
"""Replaces the containers of one service of the stack by new ones, without failing a request.

    python3 compose/update.py decode            arguments after it go to `docker compose`: -f FILE, -p NAME, --profile NAME

First build or pull the new image, or change `.env`. New containers start beside the old ones. When they are healthy the old ones stop
one after the other: each drains, so requests in flight end or move. A service with published ports cannot run twice, so its
containers are replaced one at a time: with two frontends, clients and load balancers use the other one meanwhile.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

COMPOSE = Path(__file__).resolve().parent / "compose.yaml"


def main() -> int:
    """Returns 0 when all containers have been replaced."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    service, flags = sys.argv[1], sys.argv[2:]
    compose = ["docker", "compose", *(flags if "-f" in flags else ["-f", str(COMPOSE), *flags])]
    old = containers(compose, service)
    if not old:
        print(f"{service} has no running containers; `docker compose up` starts it", file=sys.stderr)
        return 1
    if has_published_ports(old):
        for container in old:
            end(container)
            scale(compose, service, len(old))
    else:
        scale(compose, service, 2 * len(old))
        for container in old:
            end(container)
        # Numbers of replicas that are free now are used again.
        scale(compose, service, len(old))
    print(f"{service}: {len(old)} replaced")
    return 0


def containers(compose: Sequence[str], service: str) -> list[str]:
    """Ids of the running containers of a service."""
    return output([*compose, "ps", "--quiet", "--status", "running", service]).split()


def has_published_ports(ids: Sequence[str]) -> bool:
    """Whether ports of the host lead to these containers."""
    return any(each["HostConfig"]["PortBindings"] for each in json.loads(output(["docker", "inspect", *ids])))


def scale(compose: Sequence[str], service: str, count: int) -> None:
    """Starts containers until there are so many, with the newest image and settings, and waits until they are healthy."""
    run([*compose, "up", "--detach", "--no-deps", "--no-recreate", "--wait", "--scale", f"{service}={count}", service])


def end(container: str) -> None:
    """Stops a container within its grace period, and removes it."""
    run(["docker", "stop", container])
    run(["docker", "rm", container])


def output(command: Sequence[str]) -> str:
    """Returns what a command prints. Ends the program if it fails."""
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if finished.returncode != 0:
        sys.exit(f"failed: {' '.join(command)}")
    return finished.stdout


def run(command: Sequence[str]) -> None:
    """Runs a command without its output."""
    output(command)


if __name__ == "__main__":
    sys.exit(main())
