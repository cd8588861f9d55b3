"""Compares our parsers with vLLM's on complete, well-formed answers.

If vLLM returns something else for an answer, the sample holds both outcomes and the reason for the difference; the tests check both outcomes.
"""

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
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

# Parsers may differ on these kinds.
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
    """Returns vLLM's name of a family: our name, or one of its aliases."""
    names = [name, *(alias for alias, family in aliases.items() if family == name)]
    return next((each for each in names if each in known), "")


def comparable(outcome: Outcome) -> tuple[str, str, list[tuple[str, Any]]]:
    """Removes whitespace at the ends and the layout of JSON, on which parsers may differ."""
    return outcome.content.strip(), outcome.reasoning.strip(), [(name, value(text)) for name, text in outcome.calls]


def value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def vllm_outcome(oracle: VllmOracle, sample: Sample) -> Outcome | str | None:
    """Returns what vLLM's parser of the same name or alias returns for a sample, or the type of its error. None: vLLM has no such parser."""
    tool = vllm_name(sample.tool_parser, TOOL_ALIASES, oracle.names["tools"])
    reasoning = vllm_name(sample.reasoning_parser, REASONING_ALIASES, oracle.names["reasonings"])
    if bool(tool) != bool(sample.tool_parser) or bool(reasoning) != bool(sample.reasoning_parser):
        return None
    outcome = oracle.whole(tool, reasoning, sample.tools, sample.text)
    return outcome if isinstance(outcome, Outcome) else outcome.partition(":")[0]


@pytest.mark.parametrize("sample", [each for each in COMPARED if each.vllm is None], ids=lambda sample: sample.id)
def test_outcome_equals_vllms(oracle: VllmOracle, sample: Sample) -> None:
    """Our parser returns the same content, reasoning and calls as vLLM's."""
    theirs = vllm_outcome(oracle, sample)
    assert isinstance(theirs, Outcome), theirs
    assert comparable(sample.parse([sample.text])) == comparable(theirs)


@pytest.mark.parametrize("sample", [each for each in COMPARED if each.vllm is not None], ids=lambda sample: sample.id)
def test_where_vllm_differs(oracle: VllmOracle, sample: Sample) -> None:
    """Our parser returns what the sample expects, vLLM's returns what the sample's `vllm` field expects, and the two differ."""
    expected = sample.vllm
    assert expected is not None and expected.reason
    ours = sample.parse([sample.text])
    sample.check(ours)
    theirs = vllm_outcome(oracle, sample)
    if not expected.has_parser:
        assert theirs is None, "vLLM now has a parser for the format"
    elif expected.fails:
        assert theirs == expected.fails
    else:
        assert isinstance(theirs, Outcome), theirs
        assert comparable(theirs) == (expected.content, expected.reasoning, list(expected.calls))
        assert comparable(theirs) != comparable(ours), "the parsers now agree"


def test_docs_list_unsupported_parsers(oracle: VllmOracle) -> None:
    """Every parser name of vLLM is a family or alias here, or docs/use/parsers.md lists it. The page lists no other names."""
    page = (Path(__file__).parents[2] / "docs" / "use" / "parsers.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (tools|reasoning) \| (.*) \|$", page, re.MULTILINE))
    known = {"tools": {*TOOL_FAMILIES, *TOOL_ALIASES}, "reasoning": {*REASONING_FAMILIES, *REASONING_ALIASES}}
    for kind, names in (("tools", oracle.names["tools"]), ("reasoning", oracle.names["reasonings"])):
        assert set(re.findall(r"`(\w+)`", rows[kind])) == set(names) - known[kind]
