"""Every flag of the table exists in its engine's own server, so that a flag renamed by an engine fails here."""

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
    """Returns each flag of a parser with its kind. Creates the parser in another process, because importing the engine is expensive."""
    ran = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    lines = [line.split() for line in ran.stdout.splitlines() if line.startswith("flag ")]
    return {name: line[1] for line in lines for name in line[2:]}


def subjects(engine: str) -> list[tuple[str, Subject]]:
    """Returns each name of an engine in the table, with its entry."""
    return [(name, each) for each in load_table() for name in (*each.engines[engine].flag, *each.engines[engine].off)]


def check_flags(engine: str, flags: dict[str, str]) -> None:
    """Fails if a name does not exist, or takes no value where the table says that it does."""
    names = subjects(engine)
    assert [name for name, _ in names if name not in flags] == []
    assert [name for name, each in names if (each.kind == "switch") != (flags[name] == "switch")] == []


def test_flags_of_vllm_exist():
    require_part("vllm")
    check_flags("vllm", parser_flags(sys.executable, VLLM_FLAGS))


def published(name: str) -> set[str]:
    """Returns the names in a list of published ones."""
    lines = [line for line in (PUBLISHED / name).read_text().splitlines() if not line.startswith("#")]
    return {name for line in lines for name in line.split()}


def test_flags_of_tensorrt_llm_are_published():
    """The published list has all flags of the table except the model, which the server takes as its first argument."""
    names = {name for name, _ in subjects("trtllm")}
    assert names - {MODEL_FLAGS["trtllm"]} <= published("trtllm_serve_flags.txt")


def test_keys_of_tensorrt_llm_are_published():
    """The published list has all keys of the configuration file that the table names."""
    keys = {each.engines["trtllm"].config for each in load_table()} - {""}
    assert keys and keys <= published("trtllm_config_keys.txt")


def test_arguments_of_the_tensorrt_llm_adapter_are_published():
    """The published list has all arguments that the adapter passes or refuses to pass through. The engine does not start with unknown ones."""
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
    """The table has the flag that stands for the first argument of these servers."""
    assert MODEL_FLAGS[engine] in [name for name, _ in subjects(engine)]
