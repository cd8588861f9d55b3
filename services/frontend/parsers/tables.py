"""Families by name. A literal table, so that reading it says what there is."""

from collections.abc import Mapping

from kvmesh.errors import UnsupportedError
from services.frontend.parsers import glm, harmony, hermes, kimi, llama, mistral, pythonic, qwen_coder
from services.frontend.parsers.family import ReasoningFamily, ToolFamily, WholeFamily

TOOL_FAMILIES: Mapping[str, ToolFamily | WholeFamily] = {
    "glm45": glm.FAMILY,
    "harmony": harmony.FAMILY,
    "hermes": hermes.FAMILY,
    "kimi_k2": kimi.FAMILY,
    "llama3_json": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "qwen3_coder": qwen_coder.FAMILY,
    "pythonic": pythonic.FAMILY,
}

TOOL_ALIASES: Mapping[str, str] = {
    "glm47": "glm45",
    "gpt_oss": "harmony",
    "gpt-oss": "harmony",
    "openai": "harmony",
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

_OPEN, _CLOSE = "<think>", "</think>"


def _think(name: str, *, is_open: bool = False, ends_at_tools: bool = False) -> ReasoningFamily:
    """A family with the usual marks."""
    return ReasoningFamily(
        name=name,
        openings=(_OPEN,),
        closings=(_CLOSE,),
        is_open=is_open,
        ends_at_tools=ends_at_tools,
        template_marks=(_CLOSE, _OPEN),
    )


REASONING_FAMILIES: Mapping[str, ReasoningFamily | WholeFamily] = {
    "deepseek_r1": _think("deepseek_r1", is_open=True),
    "glm45": _think("glm45", ends_at_tools=True),
    "gpt_oss": harmony.FAMILY,
    "kimi": ReasoningFamily(
        name="kimi",
        openings=(_OPEN, "◁think▷"),
        closings=(_CLOSE, "◁/think▷"),
        ends_at_tools=True,
        template_marks=("◁think▷", _CLOSE, _OPEN),
    ),
    "mistral": ReasoningFamily(
        name="mistral",
        openings=("[THINK]", _OPEN),
        closings=("[/THINK]", _CLOSE),
        ends_at_tools=True,
        template_marks=("[THINK]", _OPEN),
    ),
    "qwen3": _think("qwen3", ends_at_tools=True),
    "step3": _think("step3", is_open=True),
}

REASONING_ALIASES: Mapping[str, str] = {
    "glm47": "glm45",
    "gpt-oss": "gpt_oss",
    "harmony": "gpt_oss",
    "kimi_k2": "kimi",
    "openai_gptoss": "gpt_oss",
    "qwen3-thinking": "qwen3",
}


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
