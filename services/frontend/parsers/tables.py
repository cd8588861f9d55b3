"""Families by name. A literal table, so that reading it says what there is."""

from collections.abc import Mapping

from kvmesh.errors import UnsupportedError
from services.frontend.parsers import (
    deepseek,
    gemma,
    glm,
    harmony,
    hermes,
    invoke,
    json_lists,
    kimi,
    llama,
    mistral,
    pythonic,
    qwen_coder,
)
from services.frontend.parsers.family import ReasoningFamily, ToolFamily, WholeFamily

TOOL_FAMILIES: Mapping[str, ToolFamily | WholeFamily] = {
    "deepseek_v3": deepseek.FAMILY,
    "deepseek_v3_2": invoke.DEEPSEEK_V3_2,
    "gemma": gemma.FAMILY,
    "glm45": glm.FAMILY,
    "granite": json_lists.GRANITE,
    "granite_20b_fc": json_lists.GRANITE_20B,
    "harmony": harmony.FAMILY,
    "hermes": hermes.FAMILY,
    "jamba": json_lists.JAMBA,
    "kimi_k2": kimi.FAMILY,
    "llama3_json": llama.FAMILY,
    "minimax_m2": invoke.MINIMAX_M2,
    "mistral": mistral.FAMILY,
    "nemotron": json_lists.NEMOTRON,
    "phi4": json_lists.PHI4,
    "qwen3_coder": qwen_coder.FAMILY,
    "pythonic": pythonic.FAMILY,
}

TOOL_ALIASES: Mapping[str, str] = {
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v3",
    "deepseekv32": "deepseek_v3_2",
    "deepseekv4": "deepseek_v3_2",
    "deepseek_r1": "deepseek_v3",
    "deepseek_v3_1": "deepseek_v3",
    "deepseek_v31": "deepseek_v3",
    "deepseek_v32": "deepseek_v3_2",
    "deepseek_v4": "deepseek_v3_2",
    "gemma3": "pythonic",
    "gemma4": "gemma",
    "gemma-4": "gemma",
    "functiongemma": "gemma",
    "glm47": "glm45",
    "granite-20b-fc": "granite_20b_fc",
    "granite4": "hermes",
    "hunyuan_a13b": "jamba",
    "llama_nemotron_json": "nemotron",
    "minimax-m2": "minimax_m2",
    "nemotron3": "qwen3_coder",
    "nemotron_deci": "nemotron",
    "nemotron_json": "nemotron",
    "nemotron_nano": "qwen3_coder",
    "nemotron_v3": "qwen3_coder",
    "phi4_mini_json": "phi4",
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
    "gemma": ReasoningFamily(
        name="gemma",
        openings=("<|channel>",),
        closings=("<channel|>",),
        label="thought\n",
        ends_at_tools=True,
        template_marks=("<|channel>", "<channel|>"),
    ),
    "glm45": _think("glm45", ends_at_tools=True),
    "gpt_oss": harmony.FAMILY,
    "granite": ReasoningFamily(
        name="granite",
        openings=("Here is my thought process:", "Here's my thought process:", _OPEN),
        closings=("Here is my response:", "Here's my response:", _CLOSE),
        template_marks=("Here is my thought process:", "<response>"),
        answer_marks=("<response>", "</response>"),
    ),
    "kimi": ReasoningFamily(
        name="kimi",
        openings=(_OPEN, "◁think▷"),
        closings=(_CLOSE, "◁/think▷"),
        ends_at_tools=True,
        template_marks=("◁think▷", _CLOSE, _OPEN),
    ),
    "minimax_m2": _think("minimax_m2", is_open=True, ends_at_tools=True),
    "mistral": ReasoningFamily(
        name="mistral",
        openings=("[THINK]", _OPEN),
        closings=("[/THINK]", _CLOSE),
        ends_at_tools=True,
        template_marks=("[THINK]", _OPEN),
    ),
    "nemotron": _think("nemotron", ends_at_tools=True),
    "qwen3": _think("qwen3", ends_at_tools=True),
    "step3": _think("step3", is_open=True),
}

REASONING_ALIASES: Mapping[str, str] = {
    "deepseek-r1": "deepseek_r1",
    "deepseek_v3": "qwen3",
    "deepseek_v3_1": "qwen3",
    "deepseek_v3_2": "qwen3",
    "deepseek_v4": "qwen3",
    "gemma4": "gemma",
    "gemma-4": "gemma",
    "glm47": "glm45",
    "gpt-oss": "gpt_oss",
    "harmony": "gpt_oss",
    "kimi_k2": "kimi",
    "minimax": "minimax_m2",
    "minimax-m2": "minimax_m2",
    "nemotron_3": "nemotron",
    "nemotron3": "nemotron",
    "nemotron_deci": "nemotron",
    "nemotron_nano": "nemotron",
    "nemotron_v3": "nemotron",
    "granite_thinking_parser": "nemotron",
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
