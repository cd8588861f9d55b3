"""Selects the families that parse a model's answers: by name, or by its chat template and special tokens."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvmesh.errors import UnsupportedError
from services.frontend.parsers.family import ReasoningFamily, ToolFamily, WholeFamily
from services.frontend.parsers.marks import clash
from services.frontend.parsers.tables import (
    REASONING_FAMILIES,
    TOOL_FAMILIES,
    Family,
    reasoning_family,
    tool_family,
)

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
# The reasoning family of a tool family, if the marks alone do not decide.
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


class _Clues(NamedTuple):
    """The model's chat template and special tokens."""

    template: str
    tokens: frozenset[str]

    def contain(self, family: ToolFamily | ReasoningFamily | WholeFamily) -> bool:
        """Returns whether a mark of the family occurs in the template or is a token."""
        marks = family.template_marks
        if not marks and isinstance(family, ReasoningFamily):
            marks = (*family.openings, *family.closings)
        return any(mark in self.template or mark in self.tokens for mark in marks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The parsers of one model. `problems`: warnings for the log about settings that do not fit the model.

    `is_remote`: the parsers are vLLM's.
    """

    tools: ToolFamily | WholeFamily | None = None
    reasoning: ReasoningFamily | WholeFamily | None = None
    problems: Sequence[str] = ()
    is_remote: bool = False

    def marks(self, *, parses_tools: bool) -> frozenset[str]:
        """Returns the special tokens that the parsers need in the text."""
        found = self.reasoning.marks if self.reasoning is not None else frozenset()
        return found | self.tools.marks if parses_tools and self.tools is not None else found


def select(tool_parser: str, reasoning_parser: str, *, template: str, added_tokens: Collection[str] = ()) -> Selection:
    """Selects the families for a model. `tool_parser` and `reasoning_parser`: a name, `auto`, `none` or `vllm:NAME`.

    A name that does not fit the model is used, and reported in `problems`. Raises UnsupportedError for an unknown name.
    """
    if tool_parser.startswith(VLLM) or reasoning_parser.startswith(VLLM):
        return _select_remote(tool_parser=tool_parser, reasoning_parser=reasoning_parser)
    problems: list[str] = []
    clues = _Clues(template, frozenset(added_tokens))
    tools = _find_tools(tool_parser, clues, problems)
    reasoning = _find_reasoning(reasoning_parser, tools, clues, problems=problems)
    if isinstance(reasoning, WholeFamily) and tools is not None and tools is not reasoning:
        problems.append(f"the reasoning parser {reasoning.name} parses tool calls too; {tools.name} is not used")
        tools = reasoning
    elif (
        isinstance(tools, ToolFamily)
        and isinstance(reasoning, ReasoningFamily)
        and clash(tools.searched_marks, reasoning.searched_marks)
    ):
        problems.append(f"the marks of {reasoning.name} begin like those of {tools.name}; reasoning is not parsed")
        reasoning = None
    return Selection(tools=tools, reasoning=reasoning, problems=tuple(problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserNames:
    """Parser settings: one family for all models, or `MODEL=FAMILY,MODEL=FAMILY`; other models are `auto`."""

    tools: str = AUTO
    reasoning: str = AUTO

    def tool_parser(self, model: str) -> str:
        """Returns the setting for a model."""
        return _of_model(self.tools, model=model)

    def reasoning_parser(self, model: str) -> str:
        """Returns the setting for a model."""
        return _of_model(self.reasoning, model=model)

    def check(self) -> None:
        """Raises UnsupportedError for a family that does not exist."""
        for words, find in ((self.tools, tool_family), (self.reasoning, reasoning_family)):
            for word in words.split(","):
                name = word.rpartition("=")[2].strip()
                if name not in (AUTO, NONE) and not name.startswith(VLLM):
                    find(name)

    @property
    def needs_vllm(self) -> bool:
        """True if any parser is vLLM's."""
        return VLLM in self.tools or VLLM in self.reasoning


def _of_model(words: str, model: str) -> str:
    if "=" not in words:
        return words
    pairs = (word.rpartition("=") for word in words.split(","))
    return {name.strip(): parser.strip() for name, _, parser in pairs}.get(model, AUTO)


def _select_remote(tool_parser: str, reasoning_parser: str) -> Selection:
    """Selects vLLM's parsers. Both must be vLLM's, since the process parses the whole answer."""
    for name, field in ((tool_parser, "tool_parser"), (reasoning_parser, "reasoning_parser")):
        if name not in (AUTO, NONE) and not name.startswith(VLLM):
            raise UnsupportedError(
                f"{field} must be vllm:NAME or none if the other parser is vLLM's, not {name[:64]!r}",
                field=field,
                reason="parsers_mixed",
            )
    has_tools, has_reasoning = tool_parser.startswith(VLLM), reasoning_parser.startswith(VLLM)
    return Selection(
        tools=ToolFamily(name=tool_parser, gives_call_ids=True) if has_tools else None,
        reasoning=ReasoningFamily(name=reasoning_parser, openings=(), closings=()) if has_reasoning else None,
        is_remote=True,
    )


def _find(
    *,
    kind: str,
    name: str,
    find_named: Callable[[str], Family],
    families: Mapping[str, Family],
    order: Iterable[str],
    clues: _Clues,
    problems: list[str],
) -> Family | None:
    """Finds the family with this name, or the first in the order whose marks the model has."""
    if name != AUTO:
        family = find_named(name)
        if not clues.contain(family):
            problems.append(
                f"the {kind} parser {name} does not fit the model: its template and tokens have none of its marks"
            )
        return family
    # The template first: the tokenizer may contain marks of other models.
    for where in (_Clues(clues.template, frozenset()), clues):
        for each in order:
            if where.contain(families[each]):
                return families[each]
    return None


def _find_tools(name: str, clues: _Clues, problems: list[str]) -> ToolFamily | WholeFamily | None:
    if name == NONE:
        return None
    found = _find(
        kind="tool",
        name=name,
        find_named=tool_family,
        families=TOOL_FAMILIES,
        order=TOOL_ORDER,
        clues=clues,
        problems=problems,
    )
    if found is not None:
        return found
    if "tools" in clues.template:
        problems.append(f"no tool parser is known for the model's template; {DEFAULT_TOOL_FAMILY} is used")
    return TOOL_FAMILIES[DEFAULT_TOOL_FAMILY]


def _find_reasoning(
    name: str, tools: ToolFamily | WholeFamily | None, clues: _Clues, *, problems: list[str]
) -> ReasoningFamily | WholeFamily | None:
    if name == NONE:
        return None
    found = _find(
        kind="reasoning",
        name=name,
        find_named=reasoning_family,
        families=REASONING_FAMILIES,
        order=REASONING_ORDER,
        clues=clues,
        problems=problems,
    )
    if name != AUTO or found is None or tools is None:
        return found
    known = REASONING_OF_FOUND.get((tools.name, found.name)) or REASONING_OF_TOOLS.get(tools.name, "")
    return REASONING_FAMILIES.get(known, found)
