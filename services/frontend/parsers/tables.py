"""Families by name. A literal table, so that reading it says what there is."""

from collections.abc import Mapping

from kvmesh.errors import UnsupportedError
from services.frontend.parsers import (
    apertus,
    deepseek,
    gemma,
    glm,
    harmony,
    hermes,
    invoke,
    json_lists,
    kimi,
    kimi_k3,
    llama,
    minimax_m3,
    mistral,
    pythonic,
    qwen_coder,
    step,
    xlam,
)
from services.frontend.parsers.family import ReasoningFamily, ToolFamily, WholeFamily

TOOL_FAMILIES: Mapping[str, ToolFamily | WholeFamily] = {
    "apertus": apertus.FAMILY,
    "cohere_command": json_lists.COHERE_COMMAND,
    "deepseek_v3": deepseek.FAMILY,
    "deepseek_v3_2": invoke.DEEPSEEK_V3_2,
    "deepseek_v4_1": invoke.DEEPSEEK_V4_1,
    "gemma": gemma.FAMILY,
    "gigachat3": json_lists.GIGACHAT3,
    "glm45": glm.FAMILY,
    "granite": json_lists.GRANITE,
    "granite_20b_fc": json_lists.GRANITE_20B,
    "harmony": harmony.FAMILY,
    "hermes": hermes.FAMILY,
    "hy_v3": glm.HY_V3,
    "internlm": json_lists.INTERNLM,
    "jamba": json_lists.JAMBA,
    "kimi_k2": kimi.FAMILY,
    "kimi_k3": kimi_k3.FAMILY,
    "lfm2": pythonic.LFM2,
    "llama3_json": llama.FAMILY,
    "longcat": hermes.LONGCAT,
    "mimo": qwen_coder.MIMO,
    "minimax_m2": invoke.MINIMAX_M2,
    "minimax_m3": minimax_m3.FAMILY,
    "mistral": mistral.FAMILY,
    "nemotron": json_lists.NEMOTRON,
    "olmo3": pythonic.OLMO3,
    "phi4": json_lists.PHI4,
    "pythonic": pythonic.FAMILY,
    "qwen3_coder": qwen_coder.FAMILY,
    "seed_oss": qwen_coder.SEED_OSS,
    "step3": step.FAMILY,
    "xlam": xlam.FAMILY,
}

TOOL_ALIASES: Mapping[str, str] = {
    "cohere_command3": "cohere_command",
    "cohere_command4": "cohere_command",
    "command_a": "cohere_command",
    "ernie45": "hermes",
    "gigachat": "gigachat3",
    "hunyuan": "hy_v3",
    "interns1": "hermes",
    "internlm2": "internlm",
    "kimi-k3": "kimi_k3",
    "minimax-m3": "minimax_m3",
    "step3p5": "qwen3_coder",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v3",
    "deepseekv32": "deepseek_v3_2",
    "deepseekv4": "deepseek_v3_2",
    "deepseek_r1": "deepseek_v3",
    "deepseek_v3_1": "deepseek_v3",
    "deepseek_v31": "deepseek_v3",
    "deepseek_v32": "deepseek_v3_2",
    "deepseek_v4": "deepseek_v3_2",
    "deepseek_v41": "deepseek_v4_1",
    "gemma3": "pythonic",
    "gemma4": "gemma",
    "gemma-4": "gemma",
    "functiongemma": "gemma",
    "glm47": "glm45",
    "ling3": "glm45",
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
    "apertus": ReasoningFamily(
        name="apertus",
        openings=("<|inner_prefix|>",),
        closings=("<|inner_suffix|>",),
        ends_at_tools=True,
        template_marks=("<|inner_prefix|>",),
    ),
    "cohere_command": ReasoningFamily(
        name="cohere_command",
        openings=("<|START_THINKING|>",),
        closings=("<|END_THINKING|>",),
        ends_at_tools=True,
        hidden_marks=json_lists.COMMAND_ANSWER_MARKS,
        template_marks=("<|START_THINKING|>",),
    ),
    "deepseek_r1": _think("deepseek_r1", is_open=True),
    "ernie45": ReasoningFamily(
        name="ernie45",
        openings=(_OPEN,),
        closings=(_CLOSE,),
        is_open=True,
        ends_at_tools=True,
        answer_marks=("<response>", "</response>"),
        template_marks=(_CLOSE, _OPEN),
    ),
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
    "hunyuan_a13b": ReasoningFamily(
        name="hunyuan_a13b",
        openings=(_OPEN,),
        closings=(_CLOSE,),
        ends_at_tools=True,
        answer_marks=("<answer>", "</answer>"),
        template_marks=("<answer>",),
    ),
    "hy_v3": ReasoningFamily(
        name="hy_v3",
        openings=(_OPEN, f"<think{glm.SUFFIX}>"),
        closings=(_CLOSE, f"</think{glm.SUFFIX}>"),
        ends_at_tools=True,
        template_marks=(f"<think{glm.SUFFIX}>", _CLOSE, _OPEN),
    ),
    "kimi": ReasoningFamily(
        name="kimi",
        openings=(_OPEN, "◁think▷"),
        closings=(_CLOSE, "◁/think▷"),
        ends_at_tools=True,
        template_marks=("◁think▷", _CLOSE, _OPEN),
    ),
    "kimi_k3": ReasoningFamily(
        name="kimi_k3",
        openings=("<|open|>think<|sep|>",),
        closings=("<|close|>think<|sep|>",),
        ends_at_tools=True,
        hidden_marks=kimi_k3.ANSWER_MARKS,
        mark_tokens=kimi_k3.TOKENS,
        template_marks=("<|open|>think<|sep|>", kimi_k3.OPEN),
    ),
    "longcat": ReasoningFamily(
        name="longcat",
        openings=("<longcat_think>",),
        closings=("</longcat_think>",),
        ends_at_tools=True,
        template_marks=("<longcat_think>", "</longcat_think>"),
    ),
    "minimax_m2": _think("minimax_m2", is_open=True, ends_at_tools=True),
    "minimax_m3": ReasoningFamily(
        name="minimax_m3",
        openings=("<mm:think>",),
        closings=("</mm:think>",),
        ends_at_tools=True,
        template_marks=("<mm:think>", "</mm:think>"),
    ),
    "mistral": ReasoningFamily(
        name="mistral",
        openings=("[THINK]", _OPEN),
        closings=("[/THINK]", _CLOSE),
        ends_at_tools=True,
        template_marks=("[THINK]", _OPEN),
    ),
    "nemotron": _think("nemotron", ends_at_tools=True),
    "olmo3": _think("olmo3", is_open=True, ends_at_tools=True),
    "qwen3": _think("qwen3", ends_at_tools=True),
    "seed_oss": ReasoningFamily(
        name="seed_oss",
        openings=("<seed:think>",),
        closings=("</seed:think>",),
        is_open=True,
        ends_at_tools=True,
        template_marks=("<seed:think>", "</seed:think>"),
    ),
    "step3": _think("step3", is_open=True),
}

REASONING_ALIASES: Mapping[str, str] = {
    "cohere_command3": "cohere_command",
    "cohere_command4": "cohere_command",
    "hunyuan": "hunyuan_a13b",
    "interns1": "qwen3",
    "kimi-k3": "kimi_k3",
    "mimo": "qwen3",
    "minimax-m3": "minimax_m3",
    "step3p5": "step3",
    "deepseek-r1": "deepseek_r1",
    "deepseek_v3": "qwen3",
    "deepseek_v3_1": "qwen3",
    "deepseek_v3_2": "qwen3",
    "deepseek_v4": "qwen3",
    "deepseek_v41": "qwen3",
    "holo2": "qwen3",
    "ling3": "glm45",
    "minimax_m2_append_think": "minimax_m2",
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
