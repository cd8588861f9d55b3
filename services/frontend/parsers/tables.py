"""Families by name. A literal table, so that reading it says what there is."""

from collections.abc import Mapping

from kvmesh.errors import UnsupportedError
from services.frontend.parsers import hermes, llama, mistral, pythonic, qwen_coder
from services.frontend.parsers.family import ReasoningFamily, ToolFamily, WholeFamily

TOOL_FAMILIES: Mapping[str, ToolFamily | WholeFamily] = {
    "hermes": hermes.FAMILY,
    "llama3_json": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "qwen3_coder": qwen_coder.FAMILY,
    "pythonic": pythonic.FAMILY,
}

TOOL_ALIASES: Mapping[str, str] = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "qwen3_json": "hermes",
    "qwen3_xml": "qwen3_coder",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4": "pythonic",
    "llama4_pythonic": "pythonic",
}

_THINK = ("<think>",), ("</think>",)

REASONING_FAMILIES: Mapping[str, ReasoningFamily | WholeFamily] = {
    "deepseek_r1": ReasoningFamily(
        name="deepseek_r1", openings=_THINK[0], closings=_THINK[1], is_open=True, template_marks=("</think>",)
    ),
    "qwen3": ReasoningFamily(
        name="qwen3", openings=_THINK[0], closings=_THINK[1], ends_at_tools=True, template_marks=("<think>",)
    ),
}

REASONING_ALIASES: Mapping[str, str] = {}


def tool_family(name: str) -> ToolFamily | WholeFamily:
    """By its name or an alias of it."""
    family = TOOL_FAMILIES.get(TOOL_ALIASES.get(name, name))
    if family is None:
        raise UnsupportedError(
            f"there is no tool parser {name[:64]!r}; there are {', '.join(sorted(TOOL_FAMILIES))}",
            field="tool_parser",
            reason="parser_unknown",
        )
    return family


def reasoning_family(name: str) -> ReasoningFamily | WholeFamily:
    """By its name or an alias of it."""
    family = REASONING_FAMILIES.get(REASONING_ALIASES.get(name, name))
    if family is None:
        raise UnsupportedError(
            f"there is no reasoning parser {name[:64]!r}; there are {', '.join(sorted(REASONING_FAMILIES))}",
            field="reasoning_parser",
            reason="parser_unknown",
        )
    return family
