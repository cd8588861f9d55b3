"""Checks with vLLM's grammar library what structural tags accept: recorded calls of each family, and no call that violates its schema."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from kvmesh.engines.simulated.documents.tags import make_tagged
from services.frontend.parsers.call_tags import CALL_TAGS
from services.frontend.parsers.tables import TOOL_ALIASES
from tests.conformance.parser_samples import DIRECTORY, Sample, load
from tests.parts import require_part

Accepts = Callable[[Any, str], bool]
SAMPLES = [sample for path in sorted(DIRECTORY.glob("*.json")) for sample in load(path)]
CITY: Any = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
NOTHING: Any = {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.fixture(scope="module")
def accepts() -> Accepts:
    """Returns a function that checks whether a text may be the whole answer: vLLM's grammar library reads it byte by byte, and then the token
    that ends it."""
    require_part("vllm")
    import xgrammar

    tokens = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    info = xgrammar.TokenizerInfo(tokens, vocab_type=xgrammar.VocabType.BYTE_FALLBACK, stop_token_ids=[0])
    compiler = xgrammar.GrammarCompiler(info)

    def accepts(document: Any, text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(json.dumps(document)))
        return bool(matcher.accept_string(text) and matcher.accept_token(0))

    return accepts


JSON_TYPES = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})


def has_json_types(sample: Sample) -> bool:
    """Whether the schemas use only types of JSON Schema. Other types are accepted by readers, but no grammar is made from them."""
    properties = [each for schema in sample.tools.values() for each in schema.get("properties", {}).values()]
    return all(each.get("type", "string") in JSON_TYPES for each in properties)


def family_of(sample: Sample) -> str:
    return TOOL_ALIASES.get(sample.tool_parser, sample.tool_parser)


@pytest.mark.parametrize("family", sorted(CALL_TAGS))
def test_recorded_answers_pass(accepts: Accepts, family: str) -> None:
    """The tags accept recorded answers: plain text, a call, several calls, and text around them. They reject the same calls if the functions
    have other names."""
    passed: set[str] = set()
    for sample in SAMPLES:
        if family_of(sample) != family or not has_json_types(sample):
            continue
        tools = sample.tools.items()
        if sample.warnings or not accepts(CALL_TAGS[family].document(tools, is_parallel=True), sample.text):
            continue
        passed |= sample.kinds
        if sample.calls:
            others = [(f"{name}_2", schema) for name, schema in tools]
            assert not accepts(CALL_TAGS[family].document(others, is_parallel=True), sample.text), sample.id
    assert passed >= {"plain", "single", "parallel", "around"}


def json_calls(*texts: str, arguments: str = "arguments") -> list[str]:
    return [f'{{"name": "f", "{arguments}": {text}}}' for text in texts]


def calls_in_format(family: str, *texts: str) -> str:
    """Returns calls of `f` in the family's format. `texts`: the arguments as JSON."""
    match family:
        case "hermes":
            return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in json_calls(*texts))
        case "llama3_json":
            return "; ".join(json_calls(*texts, arguments="parameters"))
        case "granite":
            return f"<|tool_call|>[{', '.join(json_calls(*texts))}]"
        case "granite_20b_fc":
            return "\n".join(f"<function_call> {each}" for each in json_calls(*texts))
        case "jamba":
            return f"<tool_calls>[{', '.join(json_calls(*texts))}]</tool_calls>"
        case "nemotron":
            return f"<TOOLCALL>[{', '.join(json_calls(*texts))}]</TOOLCALL>"
        case "phi4":
            return f"functools[{', '.join(json_calls(*texts))}]"
        case "deepseek_v3":
            calls = [f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{text}<｜tool▁call▁end｜>" for text in texts]
            return f"<｜tool▁calls▁begin｜>{''.join(calls)}<｜tool▁calls▁end｜>"
        case "kimi_k2":
            marks = "<|tool_call_begin|>functions.f:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
            calls = [marks.format(number, text) for number, text in enumerate(texts)]
            return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"
    return calls_with_parameter_marks(family, [json.loads(text) for text in texts])


def calls_with_parameter_marks(family: str, values: list[dict[str, Any]]) -> str:
    """Returns calls in the format of families that mark each parameter."""
    outer, call, parameter = {
        "glm45": ("{}", "<tool_call>f\n{}</tool_call>", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"),
        "qwen3_coder": (
            "{}", "<tool_call>\n<function=f>\n{}</function>\n</tool_call>\n", "<parameter={}>\n{}\n</parameter>\n",
        ),
        "minimax_m2": (
            "<minimax:tool_call>\n{}</minimax:tool_call>", '<invoke name="f">\n{}</invoke>\n',
            '<parameter name="{}">{}</parameter>\n',
        ),
        "deepseek_v3_2": (
            "<｜DSML｜function_calls>\n{}</｜DSML｜function_calls>", '<｜DSML｜invoke name="f">\n{}</｜DSML｜invoke>\n',
            '<｜DSML｜parameter name="{}" string="{}">{}</｜DSML｜parameter>\n',
        ),
    }[family]  # fmt: skip
    calls = []
    for each in values:
        parameters = []
        for key, value in each.items():
            is_text = isinstance(value, str)
            words = (key, json.dumps(is_text)) if "string=" in parameter else (key,)
            parameters.append(parameter.format(*words, value if is_text else json.dumps(value)))
        calls.append(call.format("".join(parameters)))
    return outer.format("".join(calls)).rstrip("\n")


@pytest.mark.parametrize("family", sorted(CALL_TAGS))
def test_arguments_must_match_their_schema(accepts: Accepts, family: str) -> None:
    """The tags reject missing arguments, unknown ones, and ones of another type. They reject a second call if calls must not be parallel."""
    good, other = '{"city": "Paris", "days": 3}', '{"city": "Rome"}'
    wrong = ('{"days": 3}', '{"city": "Paris", "unit": 3}', '{"city": "Paris", "days": "many"}', "{}")
    tags = CALL_TAGS[family]
    document = tags.document([("f", CITY), ("g", NOTHING)], is_parallel=True)
    assert accepts(document, f"Well, <b>.\n{calls_in_format(family, good)}")
    assert accepts(document, calls_in_format(family, good, other))
    for text in wrong:
        assert not accepts(document, calls_in_format(family, text)), text
        assert not accepts(document, calls_in_format(family, good, text)), text
    assert accepts(tags.document([("f", {"type": "object"})], is_parallel=True), calls_in_format(family, good))
    one = tags.document([("f", CITY)], is_parallel=False)
    assert accepts(one, calls_in_format(family, good)) and not accepts(one, calls_in_format(family, good, other))


@pytest.mark.parametrize("family", sorted(CALL_TAGS))
def test_the_simulated_engine_follows_the_same_grammar(accepts: Accepts, family: str) -> None:
    """The text that the simulated engine generates from a tag is accepted by vLLM's grammar library."""
    document = CALL_TAGS[family].document([("f", CITY), ("g", NOTHING)], is_parallel=True)
    for seed in range(20):
        text = make_tagged(document, Random(seed))
        assert accepts(document, text), text


BARE = {
    "deepseek_v3": "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "deepseek_v3_2": '<｜DSML｜invoke name="f">\n</｜DSML｜invoke>',
    "kimi_k2": "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    "llama3_json": '{ "name": "f", "parameters": {}}',
    "minimax_m2": '<invoke name="f">\n</invoke>',
    "phi4": 'functools{"name": "f", "arguments": {}}',
    "qwen3_coder": "<function=f>\n</function>",
}


@pytest.mark.parametrize("family", sorted(BARE))
def test_no_call_bypasses_its_schema(accepts: Accepts, family: str) -> None:
    """Free text cannot contain text that the reader would parse as a call, such as a call without its section."""
    document = CALL_TAGS[family].document([("f", CITY)], is_parallel=True)
    assert not accepts(document, BARE[family]) and not accepts(document, f"Well. {BARE[family]}")
