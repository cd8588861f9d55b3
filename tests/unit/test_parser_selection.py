"""The selection of parser families from chat templates and tokenizers of real models."""

import itertools
from collections.abc import Sequence

import pytest

from services.frontend.parsers.parser import answer_parser
from services.frontend.parsers.select import select
from services.frontend.parsers.tables import REASONING_FAMILIES, TOOL_ALIASES, TOOL_FAMILIES, tool_family

THINKS = "{{ '<think>' + message.reasoning_content + '</think>' }}"
DEEPSEEK_V3 = "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json'"
DEEPSEEK_V3_1 = "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>'"
GRANITE = "When a tool is required to answer the user's query, respond with <|tool_call|> followed by a JSON list of tools used."
HERMES = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
CODER = "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>"
GEMMA_4 = "{{ '<|tool_call>call:' + function['name'] + '{' }} <|channel>thought\n"
FUNCTION_GEMMA = "{{ '<start_function_call>call:' + function['name'] + '{' }} <escape>"
MIMO = "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>value_1</parameter>"
MINIMAX = '<minimax:tool_call>\n<invoke name="tool-name-1">\n<parameter name="param-key-1">'


@pytest.mark.parametrize(
    ("model", "template", "tokens", "tools", "reasoning"),
    [
        ("DeepSeek V3", DEEPSEEK_V3, (), "deepseek_v3", None),
        ("DeepSeek R1", DEEPSEEK_V3 + THINKS, (), "deepseek_v3", "qwen3"),
        ("DeepSeek V3.1", DEEPSEEK_V3_1 + THINKS, (), "deepseek_v3", "qwen3"),
        ("DeepSeek V3.2, which has no template", "", ("｜DSML｜", "<think>", "</think>"), "deepseek_v3_2", "qwen3"),
        ("Granite 3.1", GRANITE, ("<|tool_call|>",), "granite", None),
        ("Granite 3.2", GRANITE + " after 'Here is my thought process:'", (), "granite", "granite"),
        ("Granite 3.3", GRANITE + THINKS + "<response></response>", (), "granite", "granite"),
        ("Granite 4", HERMES, ("<|tool_call|>", "<tool_call>"), "hermes", None),
        ("Granite 20B FC", 'begin with "<function_call>"', (), "granite_20b_fc", None),
        ("Phi 4 mini", "'<|tool|>' + message['tools'] + '<|/tool|>'", ("<|tool_call|>",), "phi4", None),
        ("Phi 4 mini with vLLM's template", 'functools[{"name": [function name]', (), "phi4", None),
        ("Jamba 1.5", "{{ '<tool_calls>[' }}", (), "jamba", None),
        ("Nemotron Nano 2", "<TOOLCALL>[{...}]</TOOLCALL>" + THINKS, (), "nemotron", "nemotron"),
        ("Nemotron 3", CODER + THINKS, (), "qwen3_coder", "qwen3"),
        ("MiniMax M2", MINIMAX + THINKS, (), "minimax_m2", "minimax_m2"),
        ("Gemma 4", GEMMA_4, (), "gemma", "gemma"),
        ("FunctionGemma", FUNCTION_GEMMA, (), "gemma", None),
        ("Gemma 3 with vLLM's template", "[func_name1(params_name1=params_value1", (), "pythonic", None),
        ("Qwen 3", HERMES + THINKS, (), "hermes", "qwen3"),
        ("Apertus", "{{ '<|tools_prefix|>[' }} {{ '<|inner_prefix|>' }}", (), "apertus", "apertus"),
        ("Command A Reasoning", "{{ '<|START_ACTION|>[' }} <|START_THINKING|>", (), "cohere_command", "cohere_command"),
        ("ERNIE 4.5 Thinking", HERMES + THINKS + "<response></response>", (), "hermes", "ernie45"),
        ("GigaChat 3", "{{ '<|message_sep|>' }}", ("<|function_call|>", "<|message_sep|>"), "gigachat3", None),
        ("Hunyuan A13B", "{{ '<tool_calls>[' }}" + THINKS + "<answer>", (), "jamba", "hunyuan_a13b"),
        ("Hunyuan 3", "<tool_calls:opensource><tool_call:opensource>f<tool_sep:opensource><arg_key:opensource>" + THINKS, (),
         "hy_v3", "hy_v3"),
        ("InternLM 3", "{{ '<|action_start|><|plugin|>' }}", (), "internlm", None),
        ("Kimi K3", "{{ '<|open|>tools<|sep|>' }} <|open|>think<|sep|>", (), "kimi_k3", "kimi_k3"),
        ("LFM 2", "{{ '<|tool_list_start|>' }}", ("<|tool_call_start|>", "<|tool_call_end|>"), "lfm2", None),
        ("LongCat Flash Thinking", "<longcat_tool_call> <longcat_think>", (), "longcat", "longcat"),
        ("MiMo V2", MIMO + THINKS, (), "mimo", "qwen3"),
        ("MiniMax M3", "]<]minimax[>[<tool_call> <mm:think>", (), "minimax_m3", "minimax_m3"),
        ("Olmo 3 Think", "<function_calls></function_calls>" + THINKS, (), "olmo3", "olmo3"),
        ("Seed OSS", "<seed:tool_call>\n<function=f>\n<parameter=p> <seed:think>", (), "seed_oss", "seed_oss"),
        ("Step 3", "{{ '<｜tool_calls_begin｜>' }} <steptml:invoke name=" + THINKS, (), "step3", "step3"),
        ("xLAM 2", "You are developed by Salesforce xLAM team.", (), "xlam", None),
    ],
)  # fmt: skip
def test_families_are_detected(
    model: str, template: str, tokens: Sequence[str], tools: str, reasoning: str | None
) -> None:
    """`auto` detects the families of a model by its template or its added tokens, without problems."""
    found = select("auto", "auto", template=template, added_tokens=tokens)
    assert found.tools is not None and found.tools.name == tools
    assert (found.reasoning.name if found.reasoning is not None else None) == reasoning
    assert not found.problems


@pytest.mark.parametrize("name", sorted(TOOL_ALIASES))
def test_aliases_name_a_family(name: str) -> None:
    """An alias selects a family without problems for a template with its marks, and reports a problem for one without them."""
    family = tool_family(name)
    assert not select(name, "none", template=family.template_marks[0]).problems
    assert select(name, "none", template="{{ messages }}").problems


def test_any_two_families_can_be_combined() -> None:
    """Any pair of families gives a parser. Where a mark of one is a prefix of a mark of the other, reasoning is not parsed, and this is
    reported."""
    reported = set()
    for tools, reasoning in itertools.product(TOOL_FAMILIES, REASONING_FAMILIES):
        found = select(tools, reasoning, template="")
        assert not answer_parser(found.tools, found.reasoning).flush()
        if found.reasoning is None:
            reported.add((tools, reasoning))
            assert any("reasoning is not parsed" in problem for problem in found.problems)
    assert reported == {("pythonic", "mistral"), ("xlam", "mistral")}


def test_special_tokens_are_kept() -> None:
    """Marks that are special tokens are in the set of tokens that detokenisation keeps for the parser."""
    gemma = select("gemma", "gemma", template=GEMMA_4)
    assert {"<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"} <= gemma.marks(parses_tools=True)
    assert gemma.marks(parses_tools=False) == {"<|channel>", "<channel|>"}
    assert "｜DSML｜" in select("deepseek_v3_2", "none", template="").marks(parses_tools=True)
