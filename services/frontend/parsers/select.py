"""Selects the families that parse a model's answers: by name, or by its chat template and special tokens."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvmesh.errors import UnsupportedError
from services.frontend.parsers.family import ReasoningFamily, ToolFamily, WholeFamily
from services.frontend.parsers.marks import clash
from services.frontend.parsers.tables import (
    REASONING_FAMILIES,
    TOOL_FAMILIES,
    reasoning_family,
    tool_family,
)

Family = TypeVar("Family", ToolFamily | WholeFamily, ReasoningFamily | WholeFamily)
AUTO, NONE = "auto", "none"
VLLM = "vllm:"
"""Prefix of a vLLM parser's name. That parser runs in a process of its own."""
DEFAULT_TOOL_FAMILY = "hermes"

# The more specific come first: templates of an earlier family may contain marks of a later one.
TOOL_ORDER: Sequence[str] = (
    "harmony", "kimi_k3", "kimi_k2", "hy_v3", "glm45", "minimax_m3", "minimax_m2", "deepseek_v4_1", "deepseek_v3_2", "deepseek_v3", "step3",
    "gemma", "nemotron", "jamba", "cohere_command", "apertus", "internlm", "gigachat3", "lfm2", "longcat", "phi4", "granite",
    "seed_oss", "mimo", "qwen3_coder", "mistral", "xlam", "pythonic", "granite_20b_fc", "olmo3", "hermes", "llama3_json",
)  # fmt: skip
# The reasoning family of a tool family, where the marks alone do not decide.
REASONING_OF_TOOLS: Mapping[str, str] = {
    "harmony": "gpt_oss", "kimi_k2": "kimi", "glm45": "glm45", "granite": "granite", "minimax_m2": "minimax_m2",
    "nemotron": "nemotron", "hy_v3": "hy_v3", "olmo3": "olmo3", "step3": "step3", "kimi_k3": "kimi_k3",
}  # fmt: skip
# ERNIE 4.5 has Granite's marks around the answer and Hermes's calls.
REASONING_OF_FOUND: Mapping[tuple[str, str], str] = {("hermes", "granite"): "ernie45"}
REASONING_ORDER: Sequence[str] = (
    "gpt_oss", "kimi_k3", "gemma", "cohere_command", "apertus", "minimax_m3", "seed_oss", "longcat", "hunyuan_a13b", "granite",
    "qwen3", "mistral", "kimi",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The parsers of one model. `problems`: warnings for the log about settings that do not fit the model."""

    tools: ToolFamily | WholeFamily | None = None
    reasoning: ReasoningFamily | WholeFamily | None = None
    problems: Sequence[str] = ()
    is_remote: bool = False

    def marks(self, *, parses_tools: bool) -> frozenset[str]:
        """Special tokens that the parsers need in the text."""
        found = self.reasoning.marks if self.reasoning is not None else frozenset()
        return found | self.tools.marks if parses_tools and self.tools is not None else found


def select(tool_parser: str, reasoning_parser: str, *, template: str, added_tokens: Collection[str] = ()) -> Selection:
    """The families for a model. `tool_parser` and `reasoning_parser`: a name, `auto` or `none`. UnsupportedError for a name
    that there is not; a name that does not fit the model is used and reported."""
    if VLLM in (tool_parser[: len(VLLM)], reasoning_parser[: len(VLLM)]):
        return _remote(tool_parser, reasoning_parser)
    problems: list[str] = []
    clues = _Clues(template, frozenset(added_tokens))
    tools = _tools(tool_parser, clues, problems)
    reasoning = _reasoning(reasoning_parser, tools, clues, problems)
    if isinstance(reasoning, WholeFamily) and tools is not None and tools is not reasoning:
        problems.append(f"reasoning is read as {reasoning.name}, which reads tool calls too; {tools.name} is not used")
        tools = reasoning
    elif _clash(tools, reasoning):
        assert tools is not None and reasoning is not None
        problems.append(f"the marks of {reasoning.name} begin like those of {tools.name}; reasoning is not read")
        reasoning = None
    return Selection(tools=tools, reasoning=reasoning, problems=tuple(problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserNames:
    """Parser settings: one family for all models, or `MODEL=FAMILY,MODEL=FAMILY`; other models are `auto`."""

    tools: str = AUTO
    reasoning: str = AUTO

    def tool_parser(self, model: str) -> str:
        """The word for a model."""
        return _named(self.tools, model)

    def reasoning_parser(self, model: str) -> str:
        """The word for a model."""
        return _named(self.reasoning, model)

    def check(self) -> None:
        """UnsupportedError for a family that there is not."""
        for words, find in ((self.tools, tool_family), (self.reasoning, reasoning_family)):
            for word in words.split(","):
                name = word.rpartition("=")[2].strip()
                if name not in (AUTO, NONE) and not name.startswith(VLLM):
                    find(name)

    @property
    def needs_vllm(self) -> bool:
        """Whether any of them is vLLM's."""
        return VLLM in self.tools or VLLM in self.reasoning


def _named(words: str, model: str) -> str:
    if "=" not in words:
        return words
    pairs = (word.rpartition("=") for word in words.split(","))
    return {name.strip(): parser.strip() for name, _, parser in pairs}.get(model, AUTO)


def _clash(tools: ToolFamily | WholeFamily | None, reasoning: ReasoningFamily | WholeFamily | None) -> bool:
    if not isinstance(tools, ToolFamily) or not isinstance(reasoning, ReasoningFamily):
        return False
    return clash(tools.searched_marks, reasoning.searched_marks)


def _remote(tool_parser: str, reasoning_parser: str) -> Selection:
    """vLLM's on both sides: the process reads the whole answer."""
    for name, field in ((tool_parser, "tool_parser"), (reasoning_parser, "reasoning_parser")):
        if name not in (AUTO, NONE) and not name.startswith(VLLM):
            raise UnsupportedError(
                f"{field} must be vllm:NAME or none beside a parser of vLLM's, not {name[:64]!r}",
                field=field,
                reason="parsers_mixed",
            )
    has_tools, has_reasoning = tool_parser.startswith(VLLM), reasoning_parser.startswith(VLLM)
    return Selection(
        tools=ToolFamily(name=tool_parser, gives_call_ids=True) if has_tools else None,
        reasoning=ReasoningFamily(name=reasoning_parser, openings=(), closings=()) if has_reasoning else None,
        is_remote=True,
    )


class _Clues:
    """The model's chat template and special tokens."""

    def __init__(self, template: str, tokens: frozenset[str]) -> None:
        self.template = template
        self._tokens = tokens

    def shows(self, marks: Iterable[str]) -> bool:
        """Whether a mark stands in the template or is a token of its own."""
        return any(mark in self.template or mark in self._tokens for mark in marks)

    def writes(self, marks: Iterable[str]) -> bool:
        """Whether a mark stands in the template."""
        return any(mark in self.template for mark in marks)


def _tools(name: str, clues: _Clues, problems: list[str]) -> ToolFamily | WholeFamily | None:
    if name == NONE:
        return None
    if name != AUTO:
        family = tool_family(name)
        if not clues.shows(family.template_marks):
            problems.append(
                f"the tool parser {name} does not fit the model: its template and tokens have none of its marks"
            )
        return family
    found = _first(TOOL_ORDER, TOOL_FAMILIES, clues)
    if found is None:
        if "tools" in clues.template:
            problems.append(f"no tool parser is known for the model's template; {DEFAULT_TOOL_FAMILY} is used")
        return TOOL_FAMILIES[DEFAULT_TOOL_FAMILY]
    return found


def _reasoning(
    name: str, tools: ToolFamily | WholeFamily | None, clues: _Clues, problems: list[str]
) -> ReasoningFamily | WholeFamily | None:
    if name == NONE:
        return None
    if name != AUTO:
        family = reasoning_family(name)
        if not clues.shows(family.template_marks):
            problems.append(
                f"the reasoning parser {name} does not fit the model: its template and tokens have none of its marks"
            )
        return family
    found = _first(REASONING_ORDER, REASONING_FAMILIES, clues)
    if found is None:
        return None
    if tools is None:
        return found
    known = REASONING_OF_FOUND.get((tools.name, found.name)) or REASONING_OF_TOOLS.get(tools.name, "")
    return REASONING_FAMILIES.get(known, found)


def _first(order: Iterable[str], families: Mapping[str, Family], clues: _Clues) -> Family | None:
    """Searches the template first: the tokenizer may contain marks of other models."""
    for has in (clues.writes, clues.shows):
        for name in order:
            if has(families[name].template_marks):
                return families[name]
    return None
