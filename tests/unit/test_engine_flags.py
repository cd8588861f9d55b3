"""Tests of the table of the engines' flags."""

import json
import shlex
from dataclasses import fields

import pytest

from kvmesh.cli.engine_flags.kvmesh_command import mesh_command
from kvmesh.cli.engine_flags.table import TITLES, load_table
from kvmesh.cli.engine_flags.translate import Match, read_command_line, translate
from kvmesh.cli.up_settings import UpSettings
from kvmesh.engines.registry import ENGINES
from kvmesh.settings.declare import specs
from kvmesh.worker.settings import HostSettings
from services.frontend.settings import FrontendSettings

PAIRS = [(source, target) for source in TITLES for target in TITLES if source != target]


def flags_of(settings) -> set[str]:
    return {spec.flag for spec in specs(settings)}


def test_a_flag_has_one_meaning():
    """No flag of an engine is in two entries, because translation would never find the second entry."""
    for engine in TITLES:
        names = [name for each in load_table() for name in (*each.engines[engine].flag, *each.engines[engine].off)]
        assert len(names) == len(set(names))


def test_flags_of_kvmesh_exist():
    """A flag that kvmesh renames must be renamed in the table."""
    frontend, worker = flags_of(FrontendSettings), flags_of(HostSettings)
    up = flags_of(UpSettings)
    for subject in load_table():
        mesh = subject.mesh
        assert mesh.up in {"", *up}
        assert mesh.frontend in {"", *frontend}
        assert mesh.worker in {"", *worker}


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_each_flag_survives_translation_and_back(source, target):
    """A flag whose counterpart takes the same value translates back to itself. A flag without counterpart has a note."""
    for subject in load_table():
        flag = subject.engines[source]
        for name in (*flag.flag[:1], *flag.off[:1]):
            words = [name] if subject.kind == "switch" else [name, "1"]
            (given,) = read_command_line(source, words)
            there = translate(given, source=source, target=target)
            assert there.match is not Match.UNKNOWN
            if there.match is Match.NONE:
                assert there.note and not there.words and not there.config
            elif there.words:
                (back,) = read_command_line(target, there.words)
                assert translate(back, source=target, target=source).words == tuple(words)


def test_an_unknown_flag_is_reported_with_its_values():
    given = read_command_line("vllm", ["--no-such-flag", "1", "2", "--seed", "-3"])
    assert [each.text for each in given] == ["--no-such-flag 1 2", "--seed -3"]
    assert translate(given[0], source="vllm", target="sglang").match is Match.UNKNOWN


def test_engine_arguments_are_json_of_the_engines_own_names():
    """`--engine-args` of `kvmesh up` gets a JSON object with the engine's own names."""
    words = ["demo", "--seed", "3", "--quantization", "fp8", "--no-async-scheduling"]
    translations = [translate(each, source="vllm", target="vllm") for each in read_command_line("vllm", words)]
    command = shlex.split(mesh_command(ENGINES["vllm"], translations))
    (engine_args,) = (word.partition("=")[2] for word in command if word.startswith("--engine-args="))
    flag, value = shlex.split(engine_args)
    assert flag == "--vllm-engine-arguments"
    assert json.loads(value) == {"seed": 3, "quantization": "fp8", "async_scheduling": False}


def test_engines_with_an_adapter_have_the_setting_engine_arguments():
    """The last column of the guides names `--ENGINE-engine-arguments`."""
    for name in TITLES.keys() & ENGINES.keys():
        assert "engine_arguments" in {each.name for each in fields(ENGINES[name].settings_type)}
