"""`kvmesh translate-args`: translates the command line of an engine's server for another engine and for `kvmesh up`."""

import argparse
import shlex
from collections.abc import Iterator, Sequence

from kvmesh.cli.engine_flags.kvmesh_command import mesh_command, mesh_notes
from kvmesh.cli.engine_flags.table import TITLES
from kvmesh.cli.engine_flags.translate import MODEL_FLAGS, PROGRAMS, Match, Translation, read_command_line, translate
from kvmesh.engines.registry import ENGINES

EXIT_UNKNOWN = 1
"""Some flags are unknown and were not translated."""


def lines(target: str, translations: Sequence[Translation]) -> Iterator[str]:
    """Both commands, then what differs, what has no counterpart and what is unknown."""
    yield f"{TITLES[target]}:"
    yield f"  {shlex.join(server_words(target, translations))}"
    yield from _config(translations)
    yield from ("", "kvmesh:")
    engine = ENGINES.get(target)
    if engine is None:
        yield f"  kvmesh has no adapter for {TITLES[target]} yet"
    else:
        yield f"  {mesh_command(engine, translations)}"
    yield from _section(f"differs in {TITLES[target]}", _notes(translations, Match.NEAR))
    yield from _section(f"no counterpart in {TITLES[target]}", _notes(translations, Match.NONE))
    if engine is not None:
        yield from _section("in kvmesh", mesh_notes(engine, translations))
    yield from _section("unknown, not translated", _notes(translations, Match.UNKNOWN))


def server_words(target: str, translations: Sequence[Translation]) -> Sequence[str]:
    """Returns the command of the target's server. vLLM's and TensorRT-LLM's take the model as their first argument."""
    words: list[str] = []
    model: list[str] = []
    for translation in translations:
        if target != "sglang" and translation.words[:1] == (MODEL_FLAGS[target],):
            model = list(translation.words[1:])
        else:
            words += translation.words
    if any(translation.config for translation in translations):
        words += ["--config", "config.yaml"]
    return (*PROGRAMS[target][0], *model, *words)


def _config(translations: Sequence[Translation]) -> Iterator[str]:
    """The YAML file, nested as its keys say."""
    entries = sorted((key.split("."), value) for each in translations for key, value in each.config)
    if not entries:
        return
    yield "  config.yaml:"
    above: list[str] = []
    for path, value in entries:
        common = 0
        while common < min(len(path) - 1, len(above)) and path[common] == above[common]:
            common += 1
        for depth in range(common, len(path) - 1):
            yield f"    {'  ' * depth}{path[depth]}:"
        yield f"    {'  ' * (len(path) - 1)}{path[-1]}: {value}"
        above = path[:-1]


def _notes(translations: Sequence[Translation], match: Match) -> Sequence[tuple[str, str]]:
    return [(each.given.text, each.note) for each in translations if each.match is match]


def _section(title: str, notes: Sequence[tuple[str, str]]) -> Iterator[str]:
    if notes:
        yield from ("", f"{title}:")
        yield from (f"  {text}: {note}" for text, note in notes)


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
