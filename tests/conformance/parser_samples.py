"""Recorded answers of every family, and how a test feeds them.

A file `parsers/<family>.json` names its parsers and the request's functions (`tools`: parameter schemas by name), and holds
samples: `text` as the model wrote it, `kinds` (which of KINDS it shows), and what is to come of it: `content`, `reasoning`,
`calls` as [name, arguments] (a string where the arguments are no whole JSON object) and `warnings`. `prompt_tail` is the end
of the prompt where that matters. `vllm` says why vLLM's own parser makes something else of it.
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
    """What came of an answer, neighbours joined. Calls: name and arguments' text."""

    content: str
    reasoning: str
    calls: Sequence[tuple[str, str]]
    warnings: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One recorded answer and what is to come of it."""

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
    vllm: str = ""
    source: str = ""

    @property
    def id(self) -> str:
        """For pytest."""
        return f"{self.file}: {self.title}"

    def parser(self) -> AnswerParser:
        """A fresh parser."""
        return answer_parser(
            tool_family(self.tool_parser) if self.tool_parser else None,
            reasoning_family(self.reasoning_parser) if self.reasoning_parser else None,
            functions=self.tools,
            prompt_tail=self.prompt_tail,
        )

    def parse(self, pieces: Iterable[str]) -> Outcome:
        """Feeds the pieces and joins what comes."""
        parser = self.parser()
        parts = [part for piece in pieces for part in parser.push(piece)]
        return joined([*parts, *parser.flush()])

    def check(self, outcome: Outcome) -> None:
        """Fails where the outcome is not the recorded one."""
        assert outcome.content == self.content
        assert outcome.reasoning == self.reasoning
        assert [name for name, _ in outcome.calls] == [name for name, _ in self.calls]
        for (_, text), (_, wanted) in zip(outcome.calls, self.calls, strict=True):
            assert (text if isinstance(wanted, str) else json.loads(text)) == wanted
        assert list(outcome.warnings) == list(self.warnings)


def joined(parts: Iterable[Part]) -> Outcome:
    """Parts put together; checks their order: a call's arguments come behind its begin, calls one after the other."""
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


def load(path: Path) -> list[Sample]:
    """All samples of a file."""
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
            vllm=each.get("vllm", record.get("vllm", "")),
            source=each.get("source", record.get("source", "")),
        )
        for each in record["samples"]
    ]


FILES = {path.stem: load(path) for path in sorted(DIRECTORY.glob("*.json"))}
SAMPLES = [sample for samples in FILES.values() for sample in samples]
