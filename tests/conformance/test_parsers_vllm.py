"""Our parsers against vLLM's, on recorded answers that are whole and well-formed.

Where vLLM makes something else of an answer the sample says why; a reason that is no longer true fails too.
"""

import importlib.util
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from services.frontend.parsers.tables import (
    REASONING_ALIASES,
    REASONING_FAMILIES,
    TOOL_ALIASES,
    TOOL_FAMILIES,
)
from tests.conformance.parser_samples import SAMPLES, Outcome, Sample
from tests.conformance.vllm_oracle import VllmOracle, write_tokenizer

# What becomes of these is each parser's own matter.
OWN_KINDS = frozenset({"truncated", "malformed", "unclosed", "unfinished"})
MARK_CHARACTERS_MIN = 4
COMPARED = [sample for sample in SAMPLES if not sample.kinds & OWN_KINDS and not sample.prompt_tail]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmOracle]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    families = [*TOOL_FAMILIES.values(), *REASONING_FAMILIES.values()]
    marks = {mark for family in families for mark in family.marks if len(mark) >= MARK_CHARACTERS_MIN}
    oracle = VllmOracle(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), marks))
    yield oracle
    oracle.close()


def vllm_name(name: str, aliases: Mapping[str, str], known: list[str]) -> str:
    """vLLM's name of a family: ours, or one of its aliases."""
    names = [name, *(alias for alias, family in aliases.items() if family == name)]
    return next((each for each in names if each in known), "")


def comparable(outcome: Outcome) -> tuple[str, str, list[tuple[str, Any]]]:
    """Blanks at the ends are each parser's own matter too, and so is how JSON is laid out."""
    return outcome.content.strip(), outcome.reasoning.strip(), [(name, value(text)) for name, text in outcome.calls]


def value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@pytest.mark.parametrize("sample", COMPARED, ids=lambda sample: sample.id)
@pytest.mark.timeout(180)
def test_as_vllm_reads(oracle: VllmOracle, sample: Sample) -> None:
    """The same content, reasoning and calls."""
    tool = vllm_name(sample.tool_parser, TOOL_ALIASES, oracle.names["tools"])
    reasoning = vllm_name(sample.reasoning_parser, REASONING_ALIASES, oracle.names["reasonings"])
    if bool(tool) != bool(sample.tool_parser) or bool(reasoning) != bool(sample.reasoning_parser):
        pytest.skip(f"vllm has no parser for {sample.tool_parser} with {sample.reasoning_parser}")
    theirs = oracle.whole(tool, reasoning, sample.tools, sample.text)
    agrees = isinstance(theirs, Outcome) and comparable(theirs) == comparable(sample.parse([sample.text]))
    if sample.vllm:
        assert not agrees, f"they agree, so this is no reason any more: {sample.vllm}"
        pytest.skip(sample.vllm)
    assert isinstance(theirs, Outcome), theirs
    assert comparable(sample.parse([sample.text])) == comparable(theirs)
