"""Every flag of the table exists in its engine's own server: a flag that an engine renames fails here."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvmesh.cli.engine_flags.table import Subject, load_table
from kvmesh.cli.engine_flags.translate import MODEL_FLAGS
from kvmesh.engines.trtllm.arguments import OWN, own_arguments, paths
from kvmesh.engines.trtllm.settings import TrtllmSettings
from tests.parts import require_part

PUBLISHED = Path(__file__).parent / "published"
VLLM_FLAGS = """
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
for action in make_arg_parser(FlexibleArgumentParser())._actions:
    kind = "switch" if action.nargs == 0 else "list" if action.nargs in ("+", "*") else "value"
    print("flag", kind, *action.option_strings)
"""


def parser_flags(python: str, code: str) -> dict[str, str]:
    """Each flag of a parser, with its kind. The parser is made in a process of its own, since its engine is heavy."""
    ran = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    lines = [line.split() for line in ran.stdout.splitlines() if line.startswith("flag ")]
    return {name: line[1] for line in lines for name in line[2:]}


def subjects(engine: str) -> list[tuple[str, Subject]]:
    """Each name of an engine in the table, with its entry."""
    return [(name, each) for each in load_table() for name in (*each.engines[engine].flag, *each.engines[engine].off)]


def check_flags(engine: str, flags: dict[str, str]) -> None:
    """Each name exists, and takes a value where the table says so."""
    names = subjects(engine)
    assert [name for name, _ in names if name not in flags] == []
    assert [name for name, each in names if (each.kind == "switch") != (flags[name] == "switch")] == []


def test_flags_of_vllm_exist():
    require_part("vllm")
    check_flags("vllm", parser_flags(sys.executable, VLLM_FLAGS))


def published(name: str) -> set[str]:
    """The names in a list of published ones."""
    lines = [line for line in (PUBLISHED / name).read_text().splitlines() if not line.startswith("#")]
    return {name for line in lines for name in line.split()}


def test_flags_of_tensorrt_llm_are_published():
    """The model is the first argument there, which the table writes as a flag."""
    names = {name for name, _ in subjects("trtllm")}
    assert names - {MODEL_FLAGS["trtllm"]} <= published("trtllm_serve_flags.txt")


def test_keys_of_tensorrt_llm_are_published():
    """Keys of its configuration file, in the table."""
    keys = {each.engines["trtllm"].config for each in load_table()} - {""}
    assert keys and keys <= published("trtllm_config_keys.txt")


def test_arguments_of_the_tensorrt_llm_adapter_are_published():
    """All that the adapter ever gives the engine, and all that it refuses to pass through. Unknown ones would end its start."""
    every = TrtllmSettings(
        model="any",
        revision="1",
        context_tokens_max=1,
        kv_cache_tokens=1,
        step_tokens_max=1,
        expert_parallel_size=1,
        gpus_per_node=1,
        orchestrator="ray",
        transceiver_runtime="CPP",
        enable_lora=True,
        kv_events="push",
        tokenizer="load",
    )
    pulling = replace(every, kv_events="pull")
    names = {name for each in (every, pulling) for name in paths(own_arguments(each))} | set(OWN)
    groups = {name.rpartition(".")[0] for name in names} - {""}
    assert names - groups <= published("trtllm_config_keys.txt")


@pytest.mark.parametrize("engine", ["vllm", "trtllm"])
def test_the_model_flag_is_in_the_table(engine):
    """The first argument of these servers is read as that flag."""
    assert MODEL_FLAGS[engine] in [name for name, _ in subjects(engine)]
