"""`kvmesh translate-args`: translates the command line of an engine's server for another engine and for `kvmesh up`."""

import argparse
from collections.abc import Sequence

from kvmesh.cli.engine_flags.command_line import read_command_line
from kvmesh.cli.engine_flags.show import lines
from kvmesh.cli.engine_flags.table import TITLES
from kvmesh.cli.engine_flags.translate import Match, translate

EXIT_UNKNOWN = 1
"""Some flags are unknown and were not translated."""


def main(argv: Sequence[str]) -> int:
    """Prints the commands and what changes. The status is 1 if a flag is unknown."""
    parser = argparse.ArgumentParser(
        prog="kvmesh translate-args",
        description="Translate the command line of an engine's own server for another engine and for `kvmesh up`.",
        epilog="Example: kvmesh translate-args --from sglang --to vllm -- --model-path demo --tp-size 2",
    )
    parser.add_argument("--from", required=True, choices=TITLES, dest="source", help="engine of the given flags")
    parser.add_argument("--to", choices=TITLES, dest="target", help="engine to translate for; default: the same")
    parser.add_argument("words", nargs="*", metavar="ARGS", help="the flags, after --")
    options = parser.parse_args(argv)
    target = options.target or options.source
    given = read_command_line(options.source, options.words)
    translations = [translate(each, source=options.source, target=target) for each in given]
    print("\n".join(lines(target, translations)))
    return EXIT_UNKNOWN if any(each.match is Match.UNKNOWN for each in translations) else 0
