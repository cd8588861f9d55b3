"""Families by name, and their aliases: the names that vLLM, SGLang and Dynamo use."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from kvmesh.errors import UnsupportedError
from services.frontend.parsers import (
    apertus,
    deepseek,
    gemma,
    glm,
    harmony,
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

Family = TypeVar("Family", ToolFamily | WholeFamily, ReasoningFamily | WholeFamily)


def _aliases(aliases: Mapping[str, str]) -> dict[str, str]:
    """Returns the family by alias. `aliases`: a family's aliases, separated by blanks."""
    return {alias: family for family, names in aliases.items() for alias in names.split()}


_TOOL_FAMILIES: Sequence[ToolFamily | WholeFamily] = (
    apertus.FAMILY, deepseek.FAMILY, gemma.FAMILY, glm.FAMILY, glm.HY_V3, harmony.FAMILY, invoke.DEEPSEEK_V3_2,
    invoke.DEEPSEEK_V4_1, invoke.MINIMAX_M2, json_lists.COHERE_COMMAND, json_lists.GIGACHAT3, json_lists.GRANITE,
    json_lists.GRANITE_20B, json_lists.HERMES, json_lists.INTERNLM, json_lists.JAMBA, json_lists.LONGCAT, json_lists.NEMOTRON,
    json_lists.PHI4, kimi.FAMILY, kimi_k3.FAMILY, llama.FAMILY, minimax_m3.FAMILY, mistral.FAMILY, pythonic.FAMILY,
    pythonic.LFM2, pythonic.OLMO3, qwen_coder.FAMILY, qwen_coder.MIMO, qwen_coder.SEED_OSS, step.FAMILY, xlam.FAMILY,
)  # fmt: skip
TOOL_FAMILIES: Mapping[str, ToolFamily | WholeFamily] = {family.name: family for family in _TOOL_FAMILIES}
TOOL_ALIASES: Mapping[str, str] = _aliases(
    {
        "cohere_command": "cohere_command3 cohere_command4 command_a",
        "deepseek_v3": "deepseekv3 deepseekv31 deepseek_r1 deepseek_v3_1 deepseek_v31",
        "deepseek_v3_2": "deepseekv32 deepseekv4 deepseek_v32 deepseek_v4",
        "deepseek_v4_1": "deepseek_v41",
        "gemma": "gemma4 gemma-4 functiongemma",
        "gigachat3": "gigachat",
        "glm45": "glm47 ling3",
        "granite_20b_fc": "granite-20b-fc",
        "harmony": "gpt_oss gpt-oss openai",
        "hermes": "ernie45 granite4 interns1 qwen qwen25 qwen3 qwen3_json",
        "hy_v3": "hunyuan",
        "internlm": "internlm2",
        "jamba": "hunyuan_a13b",
        "kimi_k3": "kimi-k3",
        "llama3_json": "llama3 llama4_json",
        "minimax_m2": "minimax-m2",
        "minimax_m3": "minimax-m3",
        "nemotron": "llama_nemotron_json nemotron_deci nemotron_json",
        "phi4": "phi4_mini_json",
        "pythonic": "gemma3 llama4 llama4_pythonic",
        "qwen3_coder": "nemotron3 nemotron_nano nemotron_v3 qwen3_xml step3p5",
    }
)

_OPEN, _CLOSE = "<think>", "</think>"


def _reasoning(name: str, opening: str = _OPEN, closing: str = _CLOSE, **options: Any) -> ReasoningFamily:
    return ReasoningFamily(name=name, openings=(opening,), closings=(closing,), **options)


_REASONING_FAMILIES: Sequence[ReasoningFamily] = (
    _reasoning("apertus", opening="<|inner_prefix|>", closing="<|inner_suffix|>"),
    _reasoning(
        "cohere_command",
        opening="<|START_THINKING|>",
        closing="<|END_THINKING|>",
        hidden_marks=json_lists.COMMAND_ANSWER_MARKS,
    ),
    _reasoning("deepseek_r1", is_open=True, ends_at_tools=False),
    _reasoning("ernie45", is_open=True, answer_marks=("<response>", "</response>")),
    _reasoning("gemma", opening="<|channel>", closing="<channel|>", label="thought\n"),
    _reasoning("glm45"),
    ReasoningFamily(
        name="granite",
        openings=("Here is my thought process:", "Here's my thought process:", _OPEN),
        closings=("Here is my response:", "Here's my response:", _CLOSE),
        ends_at_tools=False,
        template_marks=("Here is my thought process:", "<response>"),
        answer_marks=("<response>", "</response>"),
    ),
    _reasoning("hunyuan_a13b", answer_marks=("<answer>", "</answer>"), template_marks=("<answer>",)),
    ReasoningFamily(name="hy_v3", openings=(_OPEN, f"<think{glm.SUFFIX}>"), closings=(_CLOSE, f"</think{glm.SUFFIX}>")),
    ReasoningFamily(name="kimi", openings=(_OPEN, "◁think▷"), closings=(_CLOSE, "◁/think▷")),
    _reasoning(
        "kimi_k3",
        opening="<|open|>think<|sep|>",
        closing="<|close|>think<|sep|>",
        hidden_marks=kimi_k3.ANSWER_MARKS,
        mark_tokens=kimi_k3.TOKENS,
        template_marks=("<|open|>think<|sep|>", kimi_k3.OPEN),
    ),
    _reasoning("longcat", opening="<longcat_think>", closing="</longcat_think>"),
    _reasoning("minimax_m2", is_open=True),
    _reasoning("minimax_m3", opening="<mm:think>", closing="</mm:think>"),
    ReasoningFamily(name="mistral", openings=("[THINK]", _OPEN), closings=("[/THINK]", _CLOSE)),
    _reasoning("nemotron"),
    _reasoning("olmo3", is_open=True),
    _reasoning("qwen3"),
    _reasoning("seed_oss", opening="<seed:think>", closing="</seed:think>", is_open=True),
    _reasoning("step3", is_open=True, ends_at_tools=False),
)
REASONING_FAMILIES: Mapping[str, ReasoningFamily | WholeFamily] = {
    **{family.name: family for family in _REASONING_FAMILIES},
    "gpt_oss": harmony.FAMILY,
}
REASONING_ALIASES: Mapping[str, str] = _aliases(
    {
        "cohere_command": "cohere_command3 cohere_command4",
        "deepseek_r1": "deepseek-r1",
        "gemma": "gemma4 gemma-4",
        "glm45": "glm47 ling3",
        "gpt_oss": "gpt-oss harmony openai_gptoss",
        "hunyuan_a13b": "hunyuan",
        "kimi": "kimi_k2",
        "kimi_k3": "kimi-k3",
        "minimax_m2": "minimax minimax-m2 minimax_m2_append_think",
        "minimax_m3": "minimax-m3",
        "nemotron": "granite_thinking_parser nemotron3 nemotron_3 nemotron_deci nemotron_nano nemotron_v3",
        "qwen3": "deepseek_v3 deepseek_v3_1 deepseek_v3_2 deepseek_v4 deepseek_v41 holo2 interns1 mimo qwen3-thinking",
        "step3": "step3p5",
    }
)


def tool_family(name: str) -> ToolFamily | WholeFamily:
    """Returns a family by its name or an alias. Raises UnsupportedError."""
    return _find(families=TOOL_FAMILIES, aliases=TOOL_ALIASES, name=name, kind="tool")


def reasoning_family(name: str) -> ReasoningFamily | WholeFamily:
    """Returns a family by its name or an alias. Raises UnsupportedError."""
    return _find(families=REASONING_FAMILIES, aliases=REASONING_ALIASES, name=name, kind="reasoning")


def _find(*, families: Mapping[str, Family], aliases: Mapping[str, str], name: str, kind: str) -> Family:
    family = families.get(aliases.get(name, name))
    if family is None:
        raise UnsupportedError(
            f"there is no {kind} parser {name[:64]!r}; known parsers: {', '.join(sorted(families))}",
            field=f"{kind}_parser",
            reason="parser_unknown",
        )
    return family
