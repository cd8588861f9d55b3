"""Our parsers against vLLM's, on answers that are whole and well-formed.

Where vLLM makes something else of an answer, the sample holds both outcomes and the reason why they differ; each is asserted.
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


def of_vllm(oracle: VllmOracle, sample: Sample) -> Outcome | str | None:
    """What vLLM's parser of the same name or alias makes of a sample, or the type of its error; None if there is none."""
    tool = vllm_name(sample.tool_parser, TOOL_ALIASES, oracle.names["tools"])
    reasoning = vllm_name(sample.reasoning_parser, REASONING_ALIASES, oracle.names["reasonings"])
    if bool(tool) != bool(sample.tool_parser) or bool(reasoning) != bool(sample.reasoning_parser):
        return None
    outcome = oracle.whole(tool, reasoning, sample.tools, sample.text)
    return outcome if isinstance(outcome, Outcome) else outcome.partition(":")[0]


@pytest.mark.parametrize("sample", [each for each in COMPARED if each.vllm is None], ids=lambda sample: sample.id)
@pytest.mark.timeout(180)
def test_as_vllm_reads(oracle: VllmOracle, sample: Sample) -> None:
    """The same content, reasoning and calls."""
    theirs = of_vllm(oracle, sample)
    assert isinstance(theirs, Outcome), theirs
    assert comparable(sample.parse([sample.text])) == comparable(theirs)


@pytest.mark.parametrize("sample", [each for each in COMPARED if each.vllm is not None], ids=lambda sample: sample.id)
@pytest.mark.timeout(180)
def test_where_vllm_differs(oracle: VllmOracle, sample: Sample) -> None:
    """We give what the sample says, vLLM what it says of vLLM, and these are not the same."""
    expected = sample.vllm
    assert expected is not None and expected.reason
    ours = sample.parse([sample.text])
    sample.check(ours)
    theirs = of_vllm(oracle, sample)
    if not expected.has_parser:
        assert theirs is None, "vLLM has a parser for the format by now"
    elif expected.fails:
        assert theirs == expected.fails
    else:
        assert isinstance(theirs, Outcome), theirs
        assert comparable(theirs) == (expected.content, expected.reasoning, list(expected.calls))
        assert comparable(theirs) != comparable(ours), "they agree by now"


@pytest.mark.timeout(180)
def test_docs_list_what_is_not_read(oracle: VllmOracle) -> None:
    """Every name of vLLM's is a family or an alias here, or stands in docs/use/parsers.md with the way out, and no other does."""
    page = (Path(__file__).parents[2] / "docs" / "use" / "parsers.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (tools|reasoning) \| (.*) \|$", page, re.MULTILINE))
    known = {"tools": {*TOOL_FAMILIES, *TOOL_ALIASES}, "reasoning": {*REASONING_FAMILIES, *REASONING_ALIASES}}
    for kind, names in (("tools", oracle.names["tools"]), ("reasoning", oracle.names["reasonings"])):
        assert set(re.findall(r"`(\w+)`", rows[kind])) == set(names) - known[kind]
