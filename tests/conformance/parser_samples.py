"""Sample answers in every family's format, the expected parser output, and how tests feed them.

A file `parsers/<family>.json` names its parsers, the request's functions (`tools`: parameter schemas by name) and the `source` of the format; a
sample may have a source of its own. No sample is the output of a model: they are written by hand in the format that the source shows.

A sample holds `text` as the model would write it, `kinds` (a subset of KINDS that it shows), and the expected output: `content`, `reasoning`,
`calls` as [name, arguments] (a string if the arguments are no complete JSON object) and `warnings`. `prompt_tail` is the end of the prompt where
that matters.

`vllm` is present if vLLM's own parser returns something else for the text. It holds the `reason` and either vLLM's output (`content`,
`reasoning` and `calls`), or the error that it `fails` with, or `parser: false` if vLLM has no parser for the format.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.frontend.parsers.parser import AnswerParser, answer_parser
from services.frontend.parsers.parts import CallArguments, CallBegin, Part, Reasoning, Warned
from services.frontend.parsers.tables import reasoning_family, tool_family

DIRECTORY = Path(__file__).parent / "parsers"
TOOL_KINDS = frozenset(
    {"plain", "single", "parallel", "nested", "unicode", "around", "truncated", "malformed", "unfinished"}
)
REASONING_KINDS = frozenset({"plain", "reasoned", "unclosed", "unicode", "around"})
SAMPLES_MIN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A parser's output with adjacent parts joined. `calls`: name and text of the arguments."""

    content: str
    reasoning: str
    calls: Sequence[tuple[str, str]]
    warnings: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmDifference:
    """What vLLM's parser returns for a sample if it differs from ours, and why. `fails`: the type of its error. `has_parser`: whether vLLM
    has a parser for the format."""

    reason: str
    has_parser: bool = True
    fails: str = ""
    content: str = ""
    reasoning: str = ""
    calls: Sequence[tuple[str, Any]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer and the expected parser output. `source`: where its format is defined."""

    file: str
    title: str
    tool_parser: str
    reasoning_parser: str
    tools: dict[str, Any] = field(default_factory=dict)
    prompt_tail: str = ""
    text: str
    kinds: frozenset[str]
    content: str
    reasoning: str
    calls: Sequence[tuple[str, Any]]
    warnings: Sequence[str]
    vllm: VllmDifference | None = None
    source: str

    @property
    def id(self) -> str:
        return f"{self.file}: {self.title}"

    def parser(self) -> AnswerParser:
        return answer_parser(
            tool_family(self.tool_parser) if self.tool_parser else None,
            reasoning_family(self.reasoning_parser) if self.reasoning_parser else None,
            functions=self.tools,
            prompt_tail=self.prompt_tail,
        )

    def parse(self, pieces: Iterable[str]) -> Outcome:
        """Feeds the pieces to a new parser and joins its output."""
        parser = self.parser()
        parts = [part for piece in pieces for part in parser.push(piece)]
        return joined([*parts, *parser.flush()])

    def check(self, outcome: Outcome) -> None:
        """Fails if the outcome is not the expected one."""
        assert outcome.content == self.content
        assert outcome.reasoning == self.reasoning
        assert [name for name, _ in outcome.calls] == [name for name, _ in self.calls]
        for (_, text), (_, wanted) in zip(outcome.calls, self.calls, strict=True):
            assert (text if isinstance(wanted, str) else json.loads(text)) == wanted
        assert list(outcome.warnings) == list(self.warnings)


def joined(parts: Iterable[Part]) -> Outcome:
    """Joins parts, and checks their order: a call's arguments follow its begin, and calls do not interleave."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    warnings: list[str] = []
    for part in parts:
        match part:
            case str():
                content.append(part)
            case Reasoning():
                reasoning.append(part.text)
            case CallBegin():
                assert part.number == len(calls)
                calls.append((part.name, []))
            case CallArguments():
                assert part.number == len(calls) - 1
                calls[-1][1].append(part.text)
            case Warned():
                warnings.append(part.reason)
    return Outcome(
        content="".join(content),
        reasoning="".join(reasoning),
        calls=[(name, "".join(pieces)) for name, pieces in calls],
        warnings=warnings,
    )


def difference(record: dict[str, Any] | None) -> VllmDifference | None:
    """Reads the field `vllm` of a sample or a file."""
    if record is None:
        return None
    return VllmDifference(
        reason=record["reason"],
        has_parser=record.get("parser", True),
        fails=record.get("fails", ""),
        content=record.get("content", ""),
        reasoning=record.get("reasoning", ""),
        calls=[(name, arguments) for name, arguments in record.get("calls", [])],
    )


def load(path: Path) -> list[Sample]:
    """Returns all samples of a file."""
    record = json.loads(path.read_text(encoding="utf-8"))
    return [
        Sample(
            file=path.stem,
            title=each["title"],
            tool_parser=each.get("tool_parser", record.get("tool_parser", "")),
            reasoning_parser=each.get("reasoning_parser", record.get("reasoning_parser", "")),
            tools=each.get("tools", record.get("tools", {})),
            prompt_tail=each.get("prompt_tail", record.get("prompt_tail", "")),
            text=each["text"],
            kinds=frozenset(each["kinds"]),
            content=each.get("content", ""),
            reasoning=each.get("reasoning", ""),
            calls=[(name, arguments) for name, arguments in each.get("calls", [])],
            warnings=each.get("warnings", []),
            vllm=difference(each.get("vllm", record.get("vllm"))),
            source=each.get("source") or record["source"],
        )
        for each in record["samples"]
    ]


FILES = {path.stem: load(path) for path in sorted(DIRECTORY.glob("*.json"))}
SAMPLES = [sample for samples in FILES.values() for sample in samples]
